"""README is short and complete, its numbers are in docs/results, and the index and troubleshooting pages are up to date."""

import ast
import re
from pathlib import Path

import pytest

import maxtext_like

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
VERBS = [
  path.stem.rstrip("_")
  for path in (ROOT / "maxtext_like/cli").glob("*.py")
  if path.stem != "keys" and "\ndef run(argv" in path.read_text("utf-8")  # keys.py is behind --help-keys
]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def section(text: str, title: str) -> str:
  return text.partition(f"## {title}\n")[2].partition("\n## ")[0]


def verbs_of_table(text: str) -> list[str]:
  cells = [row.split(" | ")[0] for row in text.splitlines() if row.startswith("| `maxtext-like")]
  return [re.findall(r"`maxtext-like (\S+?)[ `]", cell)[0] for cell in cells]


def test_readme_has_at_most_900_words():
  assert len(README.split()) <= 900


def test_install_lines_are_what_ci_uses():
  lines = section(README, "Install and test")
  ci = (ROOT / ".ci/run").read_text(encoding="utf-8") + "".join(
    path.read_text(encoding="utf-8") for path in sorted((ROOT / ".ci").glob("*.sh"))
  )
  assert "pip install -e '.[dev]' && pytest" in lines
  assert "install --quiet -e '.[dev]'" in ci
  assert "pytest" in ci


@pytest.mark.parametrize(("page", "title"), [("README.md", "Commands"), ("docs/reference/cli.md", "All commands")])
def test_the_table_of_commands_is_complete(page, title):
  assert sorted(verbs_of_table(section((ROOT / page).read_text(encoding="utf-8"), title))) == sorted(VERBS)


def test_every_number_of_the_hardware_table_is_in_the_results():
  results = "\n".join(path.read_text(encoding="utf-8") for path in (DOCS / "results").glob("*.md"))
  rows = [row for row in section(README, "What fits on my hardware").splitlines() if row.startswith("| ")][1:]
  assert len(rows) >= 8
  for row in rows:
    _, _, _, memory, speed, source, _ = (cell.strip() for cell in row.split("|"))
    assert "measured" in source or "compiled" in source, row
    for number in (memory.split()[0], speed):
      assert number == "" or re.search(rf"(?<![\d.,]){re.escape(number)}(?![\d,]|\.\d)", results), (row, number)


@pytest.mark.parametrize("guide", ["large-model-one-gpu", "lora-on-24-gb"])
def test_every_measured_number_of_a_guide_is_in_the_results(guide):
  results = "\n".join(path.read_text(encoding="utf-8") for path in (DOCS / "results").glob("*.md"))
  rows = re.findall(r"^\|.*\d GiB.*$|^\|.*\d GB \|.*$", (DOCS / f"guides/{guide}.md").read_text("utf-8"), flags=re.MULTILINE)
  assert len(rows) >= 5
  for row in rows:
    numbers = re.findall(r"\| (\d+\.\d+) G", row) + re.findall(r"\| ([\d,]*\d) \|", row)
    assert numbers, row
    for number in numbers:
      assert re.search(rf"(?<![\d.,]){re.escape(number)}(?![\d,]|\.\d)", results), (row, number)


def test_every_model_is_in_the_table_of_models():
  table = (DOCS / "reference/models.md").read_text(encoding="utf-8")
  for path in (ROOT / "configs/models").glob("*.yml"):
    assert f"`{path.stem}`" in table, path.stem


def test_every_guide_is_in_the_index_and_in_the_navigation():
  index, site = (DOCS / "index.md").read_text(encoding="utf-8"), (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
  for page in DOCS.rglob("*.md"):
    name = page.relative_to(DOCS).as_posix()
    assert re.search(rf"[ \"]{re.escape(name)}\"?$", site, flags=re.MULTILINE), f"mkdocs.yml: {name}"
    if page.parent.name != "results" and name != "index.md":
      assert f"({name})" in index, f"docs/index.md: {name}"


def test_every_public_name_is_in_the_api_reference():
  page = (DOCS / "reference/python-api.md").read_text(encoding="utf-8")
  assert sorted(re.findall(r"^::: maxtext_like\.(\w+)$", page, flags=re.MULTILINE)) == sorted([*maxtext_like.__all__, "errors"])


def test_messages_in_headings_of_the_troubleshooting_page_are_printed_by_the_program():
  texts = []
  for path in [*(ROOT / "maxtext_like").rglob("*.py"), *(ROOT / "src").rglob("*.py")]:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
      if isinstance(node, ast.Constant) and isinstance(node.value, str):
        texts.append(node.value)
      elif isinstance(node, ast.JoinedStr):
        texts.append("".join(str(v.value) if isinstance(v, ast.Constant) else "\0" for v in node.values))
  printed, pieces = "\n".join(texts), []
  for heading in re.findall(r"^### (.+)$", (DOCS / "troubleshooting.md").read_text(encoding="utf-8"), flags=re.MULTILINE):
    pieces += [piece.strip() for span in re.findall(r"`([^`]+)`", heading) for piece in span.split("...")]
  assert len(pieces) >= 6
  for piece in pieces:
    assert piece in printed, piece
