"""Every path of a documentation page that the repository names exists, and every link on a page has a target."""

import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FILES = [
  ROOT / name
  for name in subprocess.run(
    ["git", "ls-files", "--cached", "--others", "--exclude-standard"], cwd=ROOT, capture_output=True, text=True, check=True
  ).stdout.split()
  if not name.startswith("tests/golden/")
]
PAGES = [path for path in FILES if path.suffix == ".md" and path.is_file()]
_DOCS_PATH = re.compile(r"(?<![\w./-])docs/[\w./-]*\w\.(?:md|svg|py|png|ipynb)\b")
_LINK = re.compile(r"\]\(\s*([^)\s]+)\s*\)")


def anchors(page: Path) -> set[str]:
  """Returns the anchors of the headings of a page, as GitHub and MkDocs make them."""
  text = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)
  found: set[str] = set()
  for heading in re.findall(r"^#+ (.+?)\s*$", text, flags=re.MULTILINE):
    plain = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading).lower()
    found.add(re.sub(r"[^\w\- ]", "", plain).replace(" ", "-"))
    found.add(re.sub(r"[-\s]+", "-", re.sub(r"[^\w\s-]", "", plain).strip()))
  return found | set(re.findall(r"<a (?:id|name)=\"([\w-]+)\"", text))


def test_every_docs_path_in_the_repository_exists():
  named, missing = 0, []
  for file in FILES:
    if not file.is_file() or file.suffix in (".npz", ".safetensors", ".model", ".png", ".jpg", ".gz", ".zst"):
      continue
    text = file.read_bytes().decode("utf-8", errors="ignore")
    for path in set(_DOCS_PATH.findall(text)):
      named += 1
      if not (ROOT / path).is_file():
        missing.append(f"{file.relative_to(ROOT)}: {path}")
  assert named > 40
  assert not missing, "\n".join(missing)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_link_of_a_page_has_a_target(page):
  text = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)
  missing = []
  for link in _LINK.findall(re.sub(r"`[^`\n]*`", "", text)):
    name, _, anchor = link.partition("#")
    if re.match(r"[a-z]+:", name) or name.startswith("{"):
      continue
    target = (page.parent / name).resolve() if name else page
    if not target.exists() or (anchor and target.suffix == ".md" and anchor not in anchors(target)):
      missing.append(link)
  assert not missing, f"{page.relative_to(ROOT)}: {missing}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_source_file_that_a_page_names_exists(page):
  text = page.read_text(encoding="utf-8")
  for name in re.findall(r"`((?:[\w-]+/)+[\w.-]+\.(?:py|sh|yml|yaml|sbatch))(?::\d+)?[ `]", text):
    if name not in ("layers/moe.py", "trainers/pre_train/train.py"):  # MaxText's
      bases = (ROOT, ROOT / "maxtext_like", ROOT / "src", ROOT / "configs", page.parent)
      assert any((base / name).exists() for base in bases), name
