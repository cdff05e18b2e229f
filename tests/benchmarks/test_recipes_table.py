"""benchmarks/recipes.py: the reason that it prints for a failed run, and its exit code."""

import sys

import pytest

from benchmarks import recipes

TRACEBACK = """\
W0000 a warning of an error to come
Traceback (most recent call last):
  File "a.py", line 1, in <module>
    raise ValueError("error")
jaxlib.JaxRuntimeError: RESOURCE_EXHAUSTED: out of memory
--------------------
For simplicity, JAX has removed its internal frames from the traceback.
"""


@pytest.mark.parametrize(
  ("stderr", "said"),
  [
    ("warning: slow\nerror: no such file\n  fix: name one\n", "error: no such file"),
    (TRACEBACK, "jaxlib.JaxRuntimeError: RESOURCE_EXHAUSTED: out of memory"),
    ("a warning\nKilled\n\n", "Killed"),
    ("", "-"),
  ],
)
def test_why_a_run_failed(stderr, said):
  assert recipes.reason(stderr) == said


@pytest.mark.parametrize(("failing", "code"), [("lora", 1), (None, 0)])
def test_the_exit_code_is_of_all_rows(failing, code, monkeypatch, capsys):
  monkeypatch.setattr(recipes.Runs, "row", lambda self, model, recipe, *, alone: (f"| {model} | {recipe} |", recipe != failing))
  monkeypatch.setattr(sys, "argv", ["recipes.py", "--models", "gemma3-tiny"])
  assert recipes.main() == code
  assert capsys.readouterr().out.count("| gemma3-tiny |") == 4


def test_what_fails_beside_others_is_tried_again_alone(monkeypatch, capsys):
  tried = []

  def row(self, model, recipe, *, alone):
    tried.append((recipe, alone))
    return f"| {model} | {recipe} | {alone} |", alone or recipe != "full"

  monkeypatch.setattr(recipes.Runs, "row", row)
  monkeypatch.setattr(sys, "argv", ["recipes.py", "--models", "gemma3-tiny", "--workers", "2", "--recipes", "full", "lora"])
  assert recipes.main() == 0
  assert sorted(tried) == [("full", False), ("full", True), ("lora", False)]
  said = capsys.readouterr().out
  assert "| gemma3-tiny | full | True |" in said
  assert "| gemma3-tiny | full | False |" not in said


def test_what_was_not_begun_is_no_failure(monkeypatch, capsys):
  monkeypatch.setattr(sys, "argv", ["recipes.py", "--models", "gemma3-tiny", "--seconds", "-1"])
  assert recipes.main() == 0
  assert capsys.readouterr().out.count("not begun") == 4


def test_what_failed_beside_others_says_why_where_no_time_is_left_to_try_it_alone(monkeypatch, capsys):
  row = lambda self, model, recipe, *, alone: ("not begun", None) if alone else (f"| {recipe} | exit code 1: because |", False)
  monkeypatch.setattr(recipes.Runs, "row", row)
  monkeypatch.setattr(sys, "argv", ["recipes.py", "--models", "gemma3-tiny", "--workers", "2", "--recipes", "full"])
  assert recipes.main() == 1
  said = capsys.readouterr().out
  assert "| full | exit code 1: because |" in said
  assert "not begun" not in said
