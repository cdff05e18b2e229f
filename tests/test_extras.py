"""The install command of an extra fits a checkout or an installed wheel, and every extra named in a message exists."""

import ast
import tomllib
from pathlib import Path

from maxtext_like import extras

ROOT = Path(__file__).parents[1]


def test_checkout_and_wheel(tmp_path, monkeypatch):
  assert extras.install("parquet") == "pip install -e '.[parquet]'"
  monkeypatch.setattr(extras, "__file__", str(tmp_path / "maxtext_like/extras.py"))
  assert extras.install("parquet") == "pip install 'maxtext-like[parquet]'"


def test_messages_name_extras_that_exist():
  known = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]["optional-dependencies"]
  named = set()
  for path in (ROOT / "maxtext_like").rglob("*.py"):
    text = path.read_text("utf-8")
    if "install" not in text:
      continue
    for node in ast.walk(ast.parse(text)):
      if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "install":
        named |= {arg.value for arg in node.args if isinstance(arg, ast.Constant)}
      elif isinstance(node, ast.Constant) and isinstance(node.value, str) and path.name != "extras.py":
        assert "pip install -e" not in node.value, f"{path}:{node.lineno}: use extras.install"
  assert len(named) >= 8
  assert named <= set(known), named - set(known)
