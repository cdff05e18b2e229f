"""The notebooks of examples/ run without errors, and their outputs show the results that their text promises.

tests/parity/test_notebook.py tests the notebook that needs torch.
"""

import json
import re
import tomllib
from pathlib import Path
from typing import Any

import pytest

from tests.notebooks import EXAMPLES, execute, text_of
from tests.processes import ROOT, environment

REPOSITORY = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]["urls"]["Repository"]
NOTEBOOKS = sorted(EXAMPLES.glob("*.ipynb"))


def cells(path: Path, kind: str) -> list[Any]:
  return [cell for cell in json.loads(path.read_text("utf-8"))["cells"] if cell["cell_type"] == kind]


def source(cell: Any) -> str:
  return "".join(cell["source"])


def pictures(notebook: Any) -> int:
  return sum("image/png" in output.get("data", {}) for cell in notebook.cells for output in cell.get("outputs", []))


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_has_a_badge_an_install_cell_and_links_with_targets(path):
  text = "\n".join(map(source, cells(path, "markdown")))
  page = f"{REPOSITORY.removeprefix('https://')}/blob/main/examples/{path.name}"
  assert f"(https://colab.research.google.com/{page.replace('.com', '', 1)})" in text
  assert f"]({path.name})" in (EXAMPLES / "README.md").read_text("utf-8")
  install = source(cells(path, "code")[0])
  assert 'if not find_spec("maxtext_like"):\n  %pip install' in install
  assert f"git+{REPOSITORY}" in install
  for target in re.findall(rf"\({REPOSITORY}/blob/main/([^)#]+)", text):
    assert (ROOT / target).is_file(), target


def test_the_documentation_links_to_every_notebook():
  docs = ROOT / "docs"
  pages = {page.relative_to(docs).as_posix(): page.read_text("utf-8") for page in docs.rglob("*.md")}
  linked = {name: set(re.findall(rf"\({REPOSITORY}/blob/main/examples/([^)]+)\)", text)) for name, text in pages.items()}
  assert linked["index.md"] == {path.name for path in NOTEBOOKS} == set.union(*linked.values())


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_stored_outputs_are_complete_small_and_from_no_particular_machine(path):
  for cell in cells(path, "code"):
    outputs = cell["outputs"]
    assert cell["execution_count"] is not None
    assert not [output for output in outputs if output["output_type"] == "error"]
    assert ("plt." in source(cell)) == any("image/png" in output.get("data", {}) for output in outputs)
    assert ("print(" not in source(cell)) or outputs
  assert path.stat().st_size < 150_000
  assert not re.search(r"/(?:work|root|home|Users)/", path.read_text("utf-8"))


@pytest.mark.slow
@pytest.mark.timeout(1200)  # a new Jupyter kernel compiles everything again
def test_the_first_training_run_learns_and_resumes():
  notebook = execute(EXAMPLES / "first_training_run.ipynb", environment())
  text = text_of(notebook)
  losses = {int(step): float(loss) for step, loss in re.findall(r"step +(\d+) of \d+ +loss ([\d.]+)", text)}
  assert list(losses) == [20, 40, 60, 80]  # a progress line that is overwritten shows the other steps
  first = re.search(r"loss0 +finite +([\d.]+)", text)
  assert first
  assert losses[80] < losses[20] < float(first[1]) - 1
  assert re.search(r"step 60/60 \[#{20}\]", text)
  assert "\r" in text
  assert "20 of them since this start" in text
  assert "(1, 3, 512)" in text
  assert pictures(notebook) == 1


@pytest.mark.slow
@pytest.mark.timeout(1200)  # a new Jupyter kernel compiles everything again
def test_the_adapter_learns_the_answers():
  notebook = execute(EXAMPLES / "lora_chat.ipynb", environment())
  text = text_of(notebook)
  assert re.findall(r"^learned  +(.*)$", text, flags=re.MULTILINE) == ["'two<end_of_turn>'"]
  table = [[float(x) for x in row] for row in re.findall(r"^ +(\d+) +([\d.]+) +([\d.]+)$", text, flags=re.MULTILINE)]
  assert len(table) >= 8
  assert table[-1][1] < 0.5 < 2 < table[0][1]
  base, tuned = re.findall(r"^(?:base|tuned): '(.*)'$", text, flags=re.MULTILINE)
  assert (base == "five", tuned == "five") == (False, True)
  assert "adapter_config.json" in text
  assert pictures(notebook) == 1


@pytest.mark.slow
@pytest.mark.timeout(1200)  # a new Jupyter kernel compiles everything again
def test_the_nan_is_found_and_repaired():
  notebook = execute(EXAMPLES / "find_a_nan.ipynb", environment())
  text = text_of(notebook)
  assert "step 1: non-finite loss0" in text
  cause = re.search(r"first cause: .*dot_product\.py:\d+ dot_general, layer 1, forward: .* -> inf > 65504\n(.*)", text)
  assert cause
  assert "float32_qk_product=true" in cause[1]
  assert "finished: 2 steps" in text
  assert pictures(notebook) == 1
