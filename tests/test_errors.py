"""Every message about wrong input has a fix: it says what to type."""

import ast
from collections.abc import Iterator
from pathlib import Path

from maxtext_like.errors import UserError

ROOT = Path(__file__).parents[1] / "maxtext_like"
COMPLETE = (
  # Inserted texts that contain their own line ``fix:``.
  *("_PICKLE", "_hint(", "{said}", "topology={", "several processes ({written})"),
  # Only a developer can cause these.
  *("compiled program: the number of iterations", "no comment at", "no default for"),
)


def test_a_fix_is_the_last_line():
  assert str(UserError("a: wrong", fix="b")) == "a: wrong\n  fix: b"
  assert str(UserError("a: wrong\n  fix: b")) == "a: wrong\n  fix: b"


def literal(node: ast.expr) -> str:
  """Return the text of a message, with ``{}`` for what is inserted."""
  if isinstance(node, ast.Constant):
    return str(node.value)
  if isinstance(node, ast.JoinedStr):
    return "".join(str(v.value) if isinstance(v, ast.Constant) else "{}" for v in node.values)
  return "{}"


def without_fix(source: str) -> Iterator[str]:
  """Yield the texts of ``UserError`` and ``Problem`` calls that neither pass nor contain a fix."""
  for node in ast.walk(ast.parse(source)):
    if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Name) or node.func.id not in ("UserError", "Problem"):
      continue
    positional = 2 if node.func.id == "Problem" else 1
    said = literal(node.args[0])
    if len(node.args) <= positional and said.strip("{}: "):
      written = ast.get_source_segment(source, node) or ""
      if "fix" not in written.lower() and not any(part in written for part in COMPLETE):
        yield said


def test_every_message_about_wrong_input_says_what_to_type():
  assert list(without_fix('UserError("a"); UserError("a", fix="b"); UserError(str(e)); Problem("c", ("k",))')) == ["a", "c"]
  missing = []
  for path in sorted(ROOT.rglob("*.py")):
    source = path.read_text(encoding="utf-8")
    if "UserError(" in source or "Problem(" in source:
      missing += [f"{path.relative_to(ROOT)}: {said}" for said in without_fix(source)]
  assert not missing, "give these a fix:\n" + "\n".join(missing)
