"""A command that begins again with large pages, once, as the same process with the same words."""

import json
import os
import subprocess
import sys

import pytest

from maxtext_like.cli import huge_pages
from tests.processes import ROOT

SAYS = """
import json, os, sys
begun = os.environ.setdefault("BEGUN", str(os.getpid()))
from maxtext_like.cli import huge_pages
huge_pages._for_the_asking = lambda: ASKING
huge_pages.begin_again()
print(json.dumps([os.environ.get("GLIBC_TUNABLES"), sys.argv[1:], begun == str(os.getpid())]))
"""


@pytest.mark.parametrize(
  ("asking", "given", "wanted"),
  [
    (True, None, "glibc.malloc.hugetlb=1"),
    (True, "glibc.malloc.arena_max=2", "glibc.malloc.arena_max=2:glibc.malloc.hugetlb=1"),
    (True, "glibc.malloc.hugetlb=0", "glibc.malloc.hugetlb=0"),
    (False, None, None),
  ],
)
def test_it_begins_again_once_with_the_same_words(asking, given, wanted):
  environment = {name: value for name, value in os.environ.items() if name != "GLIBC_TUNABLES"}
  environment |= {} if given is None else {"GLIBC_TUNABLES": given}
  words = ["a b", "", "run_name='ü'", "-v"]
  code = SAYS.replace("ASKING", str(asking))
  done = subprocess.run(
    [sys.executable, "-c", code, *words], env=environment, cwd=ROOT, capture_output=True, text=True, check=True, timeout=60
  )
  assert json.loads(done.stdout) == [wanted, words, True]


def test_a_process_that_began_as_another_program_is_left_alone():
  code = SAYS.replace("ASKING", "True").replace("import json,", "import jax, json,")
  environment = {name: value for name, value in os.environ.items() if name != "GLIBC_TUNABLES"}
  command = [sys.executable, "-c", code]
  done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, check=True, timeout=60)
  assert json.loads(done.stdout) == [None, [], True]


@pytest.mark.parametrize(
  ("setting", "library", "expected"),
  [
    ("always [madvise] never\n", "glibc 2.36", True),
    ("[always] madvise never\n", "glibc 2.36", False),
    ("always madvise [never]\n", "glibc 2.36", False),
    ("always [madvise] never\n", "glibc 2.34", False),
    ("always [madvise] never\n", "", False),
    (None, "glibc 2.36", False),
  ],
)
def test_only_where_they_are_to_be_had_for_the_asking(monkeypatch, tmp_path, setting, library, expected):
  file = tmp_path / "enabled"
  if setting is not None:
    file.write_text(setting)
  monkeypatch.setattr(huge_pages, "_SETTING", file)
  monkeypatch.setattr(os, "confstr", lambda name: library)
  monkeypatch.setattr(sys, "platform", "linux")
  assert huge_pages._for_the_asking() is expected  # pyright: ignore[reportPrivateUsage]
