"""Dockerfiles, workflows and files for assistants name only files and extras that exist in the repository."""

import re
import tomllib
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[2]
EXTRAS = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]["optional-dependencies"]
DOCKERFILES = sorted((ROOT / "docker").glob("*.Dockerfile"))
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))


@pytest.mark.parametrize("path", DOCKERFILES, ids=lambda path: path.name)
def test_a_dockerfile_copies_and_installs_what_exists(path):
  text = path.read_text("utf-8")
  allowed = [line[1:] for line in (ROOT / ".dockerignore").read_text("utf-8").splitlines() if line.startswith("!")]
  copied = [word for line in re.findall(r"^COPY (.+)$", text, re.M) for word in line.split()[:-1]]
  assert copied
  for word in copied:
    assert (ROOT / word).exists(), word
    assert word in allowed, f".dockerignore leaves out {word}"
  (extras,) = re.findall(r"pip install '\.\[([\w,]+)\]'", text)
  assert set(extras.split(",")) <= set(EXTRAS)


@pytest.mark.parametrize("path", DOCKERFILES, ids=lambda path: path.name)
def test_a_dockerfile_copies_every_file_that_the_wheel_needs(path):
  wheel = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["tool"]["hatch"]["build"]["targets"]["wheel"]
  needed = {*wheel["packages"], *wheel["force-include"], "src", "README.md", "LICENSE"}
  lines = re.findall(r"^COPY (.+)$", path.read_text("utf-8"), re.M)
  assert needed <= {word for line in lines for word in line.split()[:-1]}


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_a_workflow_runs_scripts_of_the_repository(path):
  jobs = yaml.safe_load(path.read_text("utf-8"))["jobs"]
  commands = [step["run"] for job in jobs.values() for step in job["steps"] if "run" in step]
  scripts = {word for command in commands for word in command.split() if word.startswith(".ci/")}
  assert scripts
  for script in scripts:
    assert (ROOT / script).stat().st_mode & 0o100, f"{script} is not executable"
  assert all("timeout-minutes" in job for job in jobs.values())


def test_the_release_checks_the_version_of_the_package():
  pattern = re.search(r"s/(\^__version__.+\$)/", (ROOT / ".github/workflows/release.yml").read_text("utf-8"))
  assert pattern is not None
  python = pattern[1].replace(r"\(", "(").replace(r"\)", ")")
  assert re.search(python, (ROOT / "maxtext_like/__init__.py").read_text("utf-8"), re.M)


@pytest.mark.parametrize("name", ["llms.txt", "AGENTS.md"])
def test_a_path_for_assistants_exists(name):
  text = (ROOT / name).read_text("utf-8")
  links = re.findall(r"\]\(([\w./-]+)\)", text)
  paths = {*links, *re.findall(r"`((?:docs|src|tests|configs|maxtext_like)/[\w./-]+)`", text)}
  assert paths
  assert not [path for path in sorted(paths) if not (ROOT / path).exists()]
