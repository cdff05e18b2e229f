"""Runs the examples of docs/guides/python.md, and checks the public names of the package."""

import ast
import doctest
import importlib
import subprocess
import sys
from pathlib import Path

import pytest

import maxtext_like
from maxtext_like import verbs

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "guides" / "python.md"


@pytest.fixture
def own_home(tmp_path, monkeypatch):
  """A temporary home directory, for the compilation cache."""
  monkeypatch.setenv("HOME", str(tmp_path))
  monkeypatch.setattr("tempfile.tempdir", str(tmp_path))


@pytest.mark.slow
def test_what_the_page_shows_is_what_happens(own_home, capsys):
  failed, tried = doctest.testfile(
    str(PAGE), module_relative=False, optionflags=doctest.NORMALIZE_WHITESPACE | doctest.ELLIPSIS
  )
  assert tried > 50
  assert not failed, capsys.readouterr().out


def test_every_public_name_is_on_the_page_and_has_a_docstring():
  text = PAGE.read_text(encoding="utf-8")
  for name in maxtext_like.__all__:
    assert f"maxtext_like.{name}" in text or f"`{name}`" in text, name
    assert getattr(maxtext_like, name).__doc__, name


def test_type_checkers_read_the_table_of_names():
  stub = ROOT / "maxtext_like" / "__init__.pyi"
  assert stub.read_text("utf-8") == verbs.stub(), "run: python -m maxtext_like.config.document"
  assert sorted(maxtext_like.__all__) == sorted(verbs.public_names())
  assert set(maxtext_like.__all__) < set(dir(maxtext_like))
  with pytest.raises(AttributeError, match="no attribute 'trian'"):
    maxtext_like.trian  # noqa: B018  # pyright: ignore[reportAttributeAccessIssue]


def test_every_verb_has_its_two_files():
  for verb, entry in verbs.VERBS.items():
    module = verbs.module_of(verb)
    assert callable(importlib.import_module(f"maxtext_like.cli.{module}").run), verb
    assert (ROOT / "maxtext_like" / "api" / f"{module}.py").is_file(), verb
    assert entry.api, verb


def test_importing_the_package_loads_nothing():
  code = "import sys; before = set(sys.modules); import maxtext_like; print(*sorted(set(sys.modules) - before))"
  run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
  standard = {name for name in run.stdout.split() if name.split(".")[0] not in sys.stdlib_module_names}
  assert standard == {"maxtext_like"}


def test_only_the_command_line_prints():
  """All other modules return their messages to the caller or use ``logging``."""
  package = ROOT / "maxtext_like"
  files = [*package.rglob("*.py"), *(package / "layers").rglob("*.py")]
  assert len(files) > 150
  printing = []
  for path in files:
    text = path.read_text("utf-8")
    if "print(" in text and path.relative_to(package).parts[0] != "cli":
      calls = (node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Call))
      printing += [f"{path}:{c.lineno}" for c in calls if isinstance(c.func, ast.Name) and c.func.id in ("print", "pprint")]
  assert not printing
