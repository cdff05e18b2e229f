"""The commands of the READMEs and of docs/compile.md are commands that the program understands."""

import re
import shlex

import pytest

from maxtext_like.cli.compile import split_own
from maxtext_like.cli.main import VERBS
from maxtext_like.config.files import configs_folder
from maxtext_like.config.load import load_config
from maxtext_like.training.topologies import find_machine

ROOT = configs_folder().parent
PAGES = ("tpu/README.md", "gpu/README.md", "docs/compile.md")
_STARTS = r"(?:maxtext-like \w+|python train\.py|sbatch gpu/train\.sbatch|[tg]pu/finiteness_check\.sh|\S*\.sh [\w-]+)"


def commands():
  for page in PAGES:
    for line in (ROOT / page).read_text("utf-8").splitlines():
      code = line.strip() if line.startswith("    ") else ""
      found = re.search(rf"(?:^|\s)({_STARTS})( .*)?$", code)
      if found and not code.startswith(("gcloud", ".")):
        yield pytest.param(found[1], shlex.split(found[2] or "", comments=True), id=f"{page}: {code[:60]}")


COMMANDS = list(commands())


def test_the_pages_have_commands():
  assert len(COMMANDS) >= 12


@pytest.mark.parametrize(("start", "words"), COMMANDS)
def test_a_command_of_the_pages_is_understood(start, words, monkeypatch):
  monkeypatch.chdir(ROOT)
  program = start.split()[0]
  if program == "maxtext-like":
    assert start.split()[1] in VERBS
  elif program not in ("python", "sbatch"):
    assert (ROOT / program).is_file()
  if start in ("maxtext-like compile", "maxtext-like plan"):
    verb = start.split()[1]
    words = [word for word in words if verb == "compile" or word != "--search"]
    own, words = split_own(words, verb, ("topology", "memory", "num_slices")) if verb == "plan" else split_own(words)
    find_machine(own.get("topology"), own.get("memory"))
  assert (load_config(words[0], words[1:]).config.training.steps or 0) >= 1


@pytest.mark.parametrize("page", PAGES)
def test_files_that_a_page_names_exist(page):
  text = (ROOT / page).read_text("utf-8")
  for name in re.findall(r"`?((?:tpu|gpu|docs)/[\w.-]+\.(?:sh|yml|yaml|md|sbatch))", text):
    assert (ROOT / name).is_file(), name
  folder = page.partition("/")[0]
  for name in re.findall(r"^\| `([\w.]+)` \|", text, flags=re.MULTILINE):
    assert (ROOT / folder / name).is_file(), name
