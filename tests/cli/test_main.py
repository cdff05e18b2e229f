"""The command line: exit codes, one message on stderr, a traceback only on request, and fast help (faults F49, F57)."""

import errno
import gc
import logging
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from maxtext_like import errors
from maxtext_like.cli import main as cli
from maxtext_like.cli import streams
from maxtext_like.cli.main import main, printable
from maxtext_like.errors import StoppedRunError, UserError
from maxtext_like.verbs import VERBS

ROOT = Path(__file__).resolve().parents[2]


def program(*words, env=None, cwd=ROOT, timeout=240):
  """Run the program as a user does, without environment variables that change its output."""
  kept = {k: v for k, v in os.environ.items() if k not in ("JAX_PLATFORMS", "XLA_FLAGS", "MAXTEXT_LIKE_DEBUG")}
  return subprocess.run(
    [sys.executable, *words],
    cwd=cwd,
    env=kept | {"PYTHONPATH": str(ROOT)} | (env or {}),
    capture_output=True,
    text=True,
    timeout=timeout,
    check=False,
  )


def loaded_modules(*words):
  """Return the names of the modules that a command loads."""
  code = (
    "import sys; from maxtext_like.cli.main import main\n"
    "try: main(sys.argv[1:])\n"
    "except SystemExit: pass\n"
    "print('\\n'.join(sys.modules), file=sys.stderr)"
  )
  return set(program("-c", code, *words).stderr.split())


def test_a_verb_of_one_process_says_so(capsys):
  assert main(["bisect", "gemma4-tiny", "--processes", "2"]) == 2
  assert "bisect runs in one process; only train, sft, xray, replay accept --processes" in capsys.readouterr().err


@pytest.mark.parametrize(
  "words",
  [
    ["--help"],
    ["config", "--help"],
    ["models", "--help"],
    ["config", "gemma4-tiny"],
    ["train", "--help-keys", "steps"],
    ["train", "--help-keys"],
    ["config", "gemma4-tniy"],
    ["config", "gemma4-tiny", "stepz=5"],
    ["nonsense"],
  ],
)
def test_help_and_configuration_load_nothing_heavy(words):
  """The number of light modules is limited too, because 230 take a fifth of a second (benchmarks/startup.py measures it)."""
  heavy = {"jax", "jaxlib", "flax", "orbax", "tokenizers", "numpy", "optax"}
  modules = loaded_modules(*words)
  assert not heavy & modules
  assert len(modules) < (150 if words == ["--help"] else 300)


@pytest.mark.parametrize("words", [("-m", "maxtext_like"), ("-m", "maxtext_like.cli.main")])
def test_module_and_script_are_the_same_program(words):
  assert program(*words, "--version").stdout == program("-m", "maxtext_like", "--version").stdout != ""


def test_train_py_is_the_verb_train(tmp_path):
  done = program(str(ROOT / "train.py"), "gemma4-tiny", "stepz=5", cwd=tmp_path)
  assert done.returncode == 2
  assert done.stderr == "error: command line \"stepz=5\": unknown key 'stepz', did you mean 'steps'?\n  fix: write steps=5\n"
  assert done.stdout == ""
  assert list(tmp_path.iterdir()) == []


def test_no_words_is_wrong_usage(capsys):
  assert main([]) == 2
  assert main(["--help"]) == 0
  text = capsys.readouterr().out
  assert all(f"\n  {verb} " in text for verb in VERBS)


@pytest.mark.parametrize(
  ("word", "reason"),
  [
    ("trian", "unknown verb 'trian', did you mean 'train'?"),
    ("configs/models/gemma4-tiny.yml", "fix: maxtext-like train configs/models/gemma4-tiny.yml"),
    ("xyzzy", "one of train, sft, data, forward, "),
  ],
)
def test_unknown_verbs(word, reason, capsys):
  assert main([word]) == 2
  assert reason in capsys.readouterr().err


CODES = {"UserError": 2, "NonFiniteError": 3, "DoesNotFitError": 4, "RetryableError": 42}
CODES |= {"PreemptedRunError": 42, "InterruptedRunError": 130}


@pytest.mark.parametrize(("name", "code"), CODES.items())
@pytest.mark.parametrize("debug", ["", "0", "1"])
def test_exit_codes_and_messages(name, code, debug, monkeypatch, capsys):
  error = getattr(errors, name)

  def fail(argv):
    raise error("what happened\n  where: here\n  fix: do that")

  monkeypatch.setattr("maxtext_like.cli.config.run", fail)
  monkeypatch.setenv("MAXTEXT_LIKE_DEBUG", debug)
  assert main(["config"]) == code
  stderr = capsys.readouterr().err
  asked = issubclass(error, StoppedRunError)  # a requested stop is not an error
  assert stderr.endswith(f"{'' if asked else 'error: '}what happened\n  where: here\n  fix: do that\n")
  assert ("error: what happened" in stderr) == (not asked)
  assert ("Traceback" in stderr) == (debug == "1")


def test_an_error_of_the_program_itself_keeps_its_traceback(monkeypatch):
  def fail(argv):
    raise RuntimeError("a bug")

  monkeypatch.setattr("maxtext_like.cli.config.run", fail)
  with pytest.raises(RuntimeError, match="a bug"):
    main(["config"])


def test_garbage_is_looked_for_less_often_while_a_verb_runs(monkeypatch):
  # 700 is Python's own threshold for new objects. The others keep the collector from scanning the million objects of earlier
  # tests. The tests themselves run with the thresholds of a verb.
  seen, usual, of_tests = [], (700, 10_000, 10_000), gc.get_threshold()
  monkeypatch.setattr("maxtext_like.cli.config.run", lambda argv: seen.append(gc.get_threshold()) or 0)
  gc.set_threshold(*usual)
  try:
    assert main(["config"]) == 0
    assert gc.get_threshold() == usual
  finally:
    gc.set_threshold(*of_tests)
  assert seen[0][0] > usual[0]


@pytest.mark.parametrize("calls_back", [False, True])
def test_what_a_library_may_still_call_back_does_not_change_the_exit_code(calls_back, monkeypatch):
  left: list[int] = []
  monkeypatch.setattr(cli, "main", lambda words: 42)
  monkeypatch.setattr(cli.abandoned_threads, "_calling_back", False)
  monkeypatch.setattr(streams, "leave", left.append)
  cli.abandoned_threads.abandon([], calls_back=calls_back)
  assert cli.program("train") == 42
  assert left == [42] * calls_back


def test_ctrl_c_is_130(monkeypatch, capsys):
  def interrupt(argv):
    raise KeyboardInterrupt

  monkeypatch.setattr("maxtext_like.cli.config.run", interrupt)
  assert main(["config"]) == 130
  assert capsys.readouterr().err == "interrupted\n"


def test_a_closed_pipe_is_no_error():
  command = f"{sys.executable} -m maxtext_like config gemma4-tiny | head -1; exit ${{PIPESTATUS[0]}}"
  done = subprocess.run(["bash", "-c", command], cwd=ROOT, capture_output=True, text=True, check=False)
  assert done.stderr == ""
  assert done.stdout.startswith("# Resolved configuration")


def test_control_characters_of_a_name_do_not_reach_the_terminal(capsys):
  assert printable("a\x1b[2Jb\nc\x07é") == "a\\x1b[2Jb\nc\\x07é"
  assert main(["config", "x\x1b[31m.yml"]) == 2
  assert "\x1b" not in capsys.readouterr().err


@pytest.mark.parametrize(
  "words",
  [
    ["export", "runs/q\nfinished: 9", "--out", "z"],
    ["generate", "--checkpoint", "q\nfinished: 9", "--prompt", "a"],
    ["train", "q\nfinished: 9 steps.yml"],
    ["train", "gemma3-tiny", "ste\nfinished: 9=1"],
    ["train", "gemma3-tiny", "steps=1\nfinished: 9"],
  ],
)
def test_a_line_break_in_a_typed_word_forges_no_line(words, capsys):
  assert main(words) == 2
  lines = capsys.readouterr().err.splitlines()
  assert not any(line.startswith("finished") for line in lines)
  assert any("\\nfinished: 9" in line for line in lines)


def test_the_message_of_a_bad_file_has_its_place_and_a_fix(tmp_path):
  (tmp_path / "m.yml").write_text("model:\n  emb_dim: !!python/object/apply:os.system ['touch canary']\n")
  done = program("-m", "maxtext_like", "config", "m.yml", cwd=tmp_path)
  assert done.returncode == 2
  assert done.stderr.startswith("error: m.yml:2: tag 'tag:yaml.org,2002:python/object/apply:os.system'")
  assert re.fullmatch(r"error: .*\n  fix: .*\n", done.stderr)
  assert not (tmp_path / "canary").exists()


@pytest.mark.parametrize("words", [["train", "x" * 300], ["train", "gemma4-tiny", "x" * 300 + ".yml"], ["replay", "x" * 300]])
def test_a_name_that_no_file_can_have(words, capsys):
  assert main(words) == 2
  assert re.fullmatch(r"error: \S*x{300}\S*: File name too long\n  fix: .*\n", capsys.readouterr().err)


def test_a_path_that_may_not_be_looked_at_is_wrong_input():
  error = cli._as_exit(PermissionError(errno.EACCES, "Permission denied", "/there"))
  assert type(error) is UserError
  assert str(error).startswith("/there: Permission denied\n  fix: ")
  assert cli._as_exit(OSError(errno.EIO, "Input/output error", "/there")) is None


def test_endless_words_are_shortened():
  text = f"a {'1' * 5000}b c"
  assert cli.shortened(text) == f"a {'1' * 200}...(5001 characters)...{'1' * 49}b c"
  assert cli.shortened("x" * 999) == "x" * 999


def verb(words, **streams):
  """Start ``maxtext-like`` as a separate process with unbuffered output."""
  command = [sys.executable, "-u", "-m", "maxtext_like.cli.main", *words]
  return subprocess.Popen(command, cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)}, **streams)


def test_a_reader_that_left_is_no_error_of_a_verb_that_prints():
  read, write = os.pipe()
  os.close(read)
  process = verb(["train", "--help-keys"], stdout=write, stderr=subprocess.PIPE)
  os.close(write)
  assert process.communicate()[1] == b""
  assert process.returncode == 0


def test_another_broken_pipe_is_an_error(monkeypatch, capfd):
  def fail(argv):
    raise BrokenPipeError

  monkeypatch.setattr("maxtext_like.cli.config.run", fail)
  with pytest.raises(BrokenPipeError):
    main(["config"])


@pytest.mark.parametrize("redirect", ["2>/dev/full", "2>&-", "<&- >&- 2>&-"])
def test_the_exit_code_says_it_where_no_stream_does(redirect):
  script = f'exec "$0" -m maxtext_like.cli.main xyzzy {redirect}'
  assert (
    subprocess.run(["sh", "-c", script, sys.executable], cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)}).returncode == 2
  )


def test_warnings_are_lines_of_their_own(capsys):
  with streams.LogLines():
    logging.getLogger("maxtext_like.checkpoint.store.stored_state").warning("cast %d arrays", 3)
    logging.getLogger("some.library").error("no")
    logging.getLogger("maxtext_like.data").info("what nobody asked for")
    logging.basicConfig()  # as some libraries do
  assert capsys.readouterr().err == "warning: cast 3 arrays\nerror: some.library: no\n"
  assert not any(isinstance(handler, streams.LogLines) for handler in logging.getLogger().handlers)
