"""The command that a stopped run prints is the one that was typed."""

import os
import shlex
import subprocess
import sys

import pytest

from maxtext_like.cli import local_processes
from maxtext_like.cli import main as cli
from maxtext_like.typed_command import VARIABLE, as_command, is_command, typed_command, typed_words


def script(path, executable=True):
  path.parent.mkdir(parents=True, exist_ok=True)
  path.write_text(f"#!{sys.executable}\nfrom maxtext_like.typed_command import typed_command\nprint(typed_command())\n")
  path.chmod(0o755 if executable else 0o644)
  return path


def printed(words, path="/usr/bin:/bin", cwd=None):
  environment = {"PATH": path, "PYTHONPATH": os.getcwd()}
  shell = ["/bin/sh", "-c", shlex.join(words)]  # as a person starts a program: the shell searches PATH for its name
  return subprocess.run(shell, env=environment, cwd=cwd, capture_output=True, text=True, check=True).stdout.strip()


def test_a_program_that_the_shell_finds_is_printed_by_its_name(tmp_path):
  installed = script(tmp_path / "bin" / "maxtext-like")
  words = ["train", "gemma4-tiny", "run_name=a b"]
  line = "maxtext-like train gemma4-tiny 'run_name=a b'"
  assert printed(["maxtext-like", *words], f"{installed.parent}:/usr/bin:/bin") == line
  # The shell would find another program of that name, or none, so only the path works.
  assert printed([str(installed), *words]) == f"{installed} train gemma4-tiny 'run_name=a b'"
  assert printed(["bin/maxtext-like", "train"], cwd=tmp_path) == "bin/maxtext-like train"


def test_a_script_is_printed_with_python(tmp_path):
  script(tmp_path / "train.py", executable=False)
  assert printed([sys.executable, "train.py", "gemma4-tiny"], cwd=tmp_path) == "python train.py gemma4-tiny"


@pytest.mark.parametrize(
  ("words", "typed"),
  [
    (["/env/lib/maxtext_like/__main__.py", "train"], ["python", "-m", "maxtext_like", "train"]),
    (["/not/there", "x"], ["python", "/not/there", "x"]),
    ([sys.executable and "-c", "x"], ["python", "-c", "x"]),
  ],
)
def test_other_ways_to_start(words, typed):
  assert typed_words(words) == typed


def test_the_processes_of_a_launcher_print_its_command_without_secrets(monkeypatch):
  started = {}
  monkeypatch.setattr(local_processes.subprocess, "Popen", lambda words, env, **_: started.update(env))
  monkeypatch.setattr(sys, "argv", ["/env/maxtext_like/__main__.py", "train", "gemma4-tiny", "--processes", "2", "api_key=abc"])
  local_processes._start(["train", "gemma4-tiny"], "127.0.0.1:1", 2, 0, None, [])
  monkeypatch.setenv(VARIABLE, started[VARIABLE])
  monkeypatch.setattr(sys, "argv", ["/env/maxtext_like/__main__.py", "train", "gemma4-tiny"])
  assert typed_command() == "python -m maxtext_like train gemma4-tiny --processes 2 'api_key=***'"


def test_a_notebook_is_no_command(monkeypatch):
  """The words that started a notebook are no training command. A process counts as a command only inside ``as_command``."""
  monkeypatch.delenv(VARIABLE, raising=False)
  assert not is_command()
  with as_command():
    assert is_command()
  assert not is_command()


def test_main_is_called_as_the_command_only_by_the_program(monkeypatch):
  """A call of ``main`` in a notebook does not count as the command that a person typed. The installed program does."""
  seen = []
  monkeypatch.delenv(VARIABLE, raising=False)
  monkeypatch.setattr(cli, "_exit_code", lambda words: seen.append(is_command()) or 0)
  assert cli.main(["models"]) == cli.program("models") == 0
  assert seen == [False, True]
  assert not is_command()
