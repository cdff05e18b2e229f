"""Several processes on this machine: which words ask for them, and what comes of a command line in each."""

import os
import subprocess
import sys

import pytest

from maxtext_like.cli import local_processes
from maxtext_like.cli.local_processes import take_options
from maxtext_like.errors import UserError


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
