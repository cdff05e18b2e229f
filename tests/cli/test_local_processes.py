"""Several processes on this machine: the options that ask for them, and the command line of each process."""

import contextlib
import os
import subprocess
import sys
import time

import pytest

from maxtext_like.cli import local_processes
from maxtext_like.cli.local_processes import take_options
from maxtext_like.cli.main import main
from maxtext_like.errors import UserError
from maxtext_like.verbs import VERBS


def test_the_words_that_ask():
  assert take_options(["a.yml", "steps=1"]) == (["a.yml", "steps=1"], None, None)
  assert take_options(["a.yml", "--processes", "2", "steps=1", "--devices-per-process=4"]) == (["a.yml", "steps=1"], 2, 4)
  for words in (["--processes"], ["--processes", "x"], ["--processes=0"], ["--devices-per-process", "2"]):
    with pytest.raises(UserError, match="fix: --processes 2"):
      take_options(words)


def test_every_process_gets_its_place_and_shows_it(capsys):
  code = local_processes.run(["--version"], 2, 3)
  lines = capsys.readouterr().out.splitlines()
  assert code == 0
  assert sorted(line[:4] for line in lines) == ["[0] ", "[1] "]


def test_the_first_bad_end_is_the_answer():
  program = "import sys; from maxtext_like.cli import local_processes as l; sys.exit(l.run(['no-such-verb'], 2, None))"
  done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=os.environ, timeout=60)
  assert done.returncode == 2
  assert "[1] error: unknown verb" in done.stdout


@pytest.mark.parametrize("verb", [verb for verb, entry in VERBS.items() if entry.several_processes])
def test_a_verb_starts_itself_in_each(verb, monkeypatch):
  """Each process gets the same arguments without the options that ask for several processes."""
  started = []
  monkeypatch.setattr(local_processes, "run", lambda *given: started.append(given) or 42)
  assert main([verb, "gemma4-tiny", "steps=1", "--processes", "2", "--devices-per-process=3"]) == 42
  assert started == [([verb, "gemma4-tiny", "steps=1"], 2, 3)]


def stand_in(folder, line):
  """Write a program that local_processes starts instead of Python."""
  path = folder / "program"
  path.write_text(f"#!/bin/sh\n{line}\n")
  path.chmod(0o755)
  return str(path)


@pytest.mark.parametrize(
  ("given", "shares"), [(None, ["0,1", "2,3"]), ("4,5,GPU-a,GPU-b", ["4,5", "GPU-a,GPU-b"]), ("", ["", ""]), ("-1", ["", ""])]
)
def test_gpus_that_the_environment_names_are_shared_out(tmp_path, monkeypatch, capsys, given, shares):
  monkeypatch.setattr(sys, "executable", stand_in(tmp_path, 'echo "=$CUDA_VISIBLE_DEVICES"'))
  monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
  if given is not None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", given)
  assert local_processes.run([], 2, 2) == 0
  assert sorted(capsys.readouterr().out.splitlines()) == [f"[{i}] ={share}" for i, share in enumerate(shares)]


def test_too_few_gpus_are_refused(monkeypatch):
  monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,4,5")
  with pytest.raises(UserError, match="need 4 GPUs, but CUDA_VISIBLE_DEVICES=3,4,5 has 3"):
    local_processes.run([], 2, 2)


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells a process of its parent's death")
def test_a_launcher_that_is_killed_stops_its_processes_which_save(tmp_path):
  """The system may send SIGTERM twice; the second must not end a process that is saving."""
  trains = f"""
import time
from maxtext_like.training.loop.signals import StopRequest
with StopRequest() as stop:
  stop.training = True
  open('{tmp_path}/pids', 'a').write(str(os.getpid()) + ' ')
  while stop.requested is None:
    time.sleep(0.01)
  time.sleep(0.2)
  open('{tmp_path}/saved', 'a').write(str(os.getpid()) + ' ')
"""
  program = f"from maxtext_like.cli import local_processes as l; l._PROGRAM = {trains!r}; l.run([], 2, None)"
  launcher = subprocess.Popen([sys.executable, "-c", program])
  await_that(lambda: len(pids(tmp_path)) == 2)
  launcher.kill()
  launcher.wait()
  await_that(lambda: not any(os.path.exists(f"/proc/{pid}") and "Z" not in state(pid) for pid in pids(tmp_path)))
  assert sorted((tmp_path / "saved").read_text().split()) == sorted(pids(tmp_path))


def pids(folder):
  return (folder / "pids").read_text().split() if (folder / "pids").exists() else []


def state(pid):
  with contextlib.suppress(OSError), open(f"/proc/{pid}/stat") as stat:
    return stat.read().rpartition(")")[2].split()[0]
  return "Z"


def await_that(condition):
  deadline = time.monotonic() + 60
  while not condition():
    assert time.monotonic() < deadline
    time.sleep(0.02)
