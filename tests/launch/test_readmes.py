"""Every file that tpu/README.md, gpu/README.md and docs/guides/does-it-fit.md name exists."""

import re

import pytest

from maxtext_like.config.files import configs_folder

ROOT = configs_folder().parent
PAGES = ("tpu/README.md", "gpu/README.md", "docs/guides/does-it-fit.md")
_STARTS = r"sbatch gpu/train\.sbatch|[tg]pu/finiteness_check\.sh"


def test_printed_launch_scripts_are_there():
  for page in PAGES[:2]:
    assert re.search(_STARTS, (ROOT / page).read_text("utf-8")), page


@pytest.mark.parametrize("page", PAGES)
def test_files_that_a_page_names_exist(page):
  text = (ROOT / page).read_text("utf-8")
  for name in re.findall(r"`?((?:tpu|gpu|docs)/[\w.-]+\.(?:sh|yml|yaml|md|sbatch))", text):
    assert (ROOT / name).is_file(), name
  folder = page.partition("/")[0]
  for name in () if folder == "docs" else re.findall(r"^\| `([\w.]+)` \|", text, flags=re.MULTILINE):
    assert (ROOT / folder / name).is_file(), name
