"""docs/explanation/architecture.md names things that exist, its picture is current, and no journey is longer than 20 hops."""

import importlib
import importlib.util
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/explanation/architecture.md").read_text(encoding="utf-8")
JOURNEYS = {part.partition("\n")[0]: part for part in PAGE.partition("## To add")[0].split("\n### ")[1:]}


def test_the_picture_is_current():
  spec = importlib.util.spec_from_file_location("structure", ROOT / "docs/explanation/structure.py")
  assert spec is not None
  assert spec.loader is not None
  structure: Any = importlib.util.module_from_spec(spec)
  spec.loader.exec_module(structure)
  assert structure.PICTURE.read_text(encoding="utf-8") == structure.draw(), "run: python docs/explanation/structure.py"


@pytest.mark.parametrize("name", sorted(set(re.findall(r"`(maxtext_like\.[\w.]+)`", PAGE))))
def test_every_name_is_there(name):
  parts, found = name.split("."), None
  for cut in range(len(parts), 0, -1):
    try:
      found = importlib.import_module(".".join(parts[:cut]))
      break
    except ModuleNotFoundError:
      continue
  for attribute in parts[cut:]:
    fields = getattr(found, "__dataclass_fields__", {})
    assert hasattr(found, attribute) or attribute in fields, name
    found = getattr(found, attribute, None)


def test_every_file_to_add_to_is_there():
  table = PAGE.partition("## To add")[2]
  paths = {path for path in re.findall(r"`([\w./]+\.(?:py|md))`", table) if "<" not in path and "/" in path}
  assert len(paths) >= 8
  for path in paths:
    places = [ROOT / path, ROOT / "maxtext_like" / path, ROOT / "src" / path]
    assert any(place.exists() for place in places), path


def test_no_journey_is_long():
  assert len(JOURNEYS) == 3
  for title, text in JOURNEYS.items():
    hops = len(re.findall(r"`maxtext_like\.", text))
    assert 8 <= hops <= 20, (title, hops)


@pytest.mark.slow
@pytest.mark.newest
@pytest.mark.skipif(sys.version_info < (3, 12), reason="sys.monitoring is new in 3.12")
def test_a_trace_counts_no_more_files_than_the_page_says():
  run = subprocess.run([sys.executable, "benchmarks/journeys.py"], cwd=ROOT, capture_output=True, text=True, check=True)
  counted = re.findall(r"^ *(\d+) files: (.+)$", run.stdout, flags=re.MULTILINE)
  said = {journey: number for number, journey in re.findall(r"^ *(\d+) files: (.+)$", PAGE, flags=re.MULTILINE)}
  assert len(counted) == 3
  for number, journey in counted:
    assert int(number) <= int(said[journey]), journey
