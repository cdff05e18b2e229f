"""Finding a configuration: by name, by path, misspelled, missing, a folder (fault F56); in a checkout and in a wheel."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from maxtext_like.config.coerce import coerce
from maxtext_like.config.files import configs_folder, find_config, label_of, model_names
from maxtext_like.config.load import base_values
from maxtext_like.config.schema import LEAVES
from maxtext_like.config.yaml_file import Mapping, read_yaml
from maxtext_like.errors import UserError

ROOT = Path(__file__).resolve().parents[2]


def test_models_are_found_by_name_and_path(monkeypatch, tmp_path):
  file = configs_folder() / "models" / "gemma4-tiny.yml"
  assert find_config("gemma4-tiny") == file
  assert find_config(str(file)) == file
  monkeypatch.chdir(tmp_path)
  assert find_config("configs/models/gemma4-tiny.yml") == file  # the README's spelling, from any directory
  mine = tmp_path / "mine.yml"
  mine.write_text("steps: 5\n")
  assert find_config("mine.yml").resolve() == mine
  assert find_config(str(mine)) == mine


def test_every_model_of_the_project_is_listed():
  assert model_names() == sorted(
    [f"gemma3-{size}" for size in ("4b", "12b", "27b", "tiny")]
    + [f"gemma4-{size}" for size in ("e2b", "e4b", "26b", "31b", "tiny", "moe-tiny", "e2b-tiny")]
    + [f"deepseek{version}-{size}" for version in ("3", "3.2") for size in ("671b", "tiny")]
    + [f"qwen3-{size}" for size in ("0.6b", "8b", "30b-a3b", "tiny", "moe-tiny")]
  )


@pytest.mark.parametrize(
  ("name", "reason"),
  [
    ("gemma4-tniy", "gemma4-tniy: no such model or configuration file\n  fix: did you mean gemma4-tiny"),
    ("Gemma4_31B", "did you mean gemma4-31b"),
    ("deepseek3-671", "did you mean deepseek3-671b"),
    ("configs/models/gemma4-32b.yml", "did you mean .*gemma4-31b"),
    ("/nowhere/gemma3-4b.yml", "/nowhere/gemma3-4b.yml: no such model.*\n.*did you mean gemma3-4b"),
    ("llama", "fix: .*deepseek3-671b, "),
    (
      "google/gemma-3-4b-it",
      "and it is not in the Hugging Face cache .*\n  fix: hf download google/gemma-3-4b-it --local-dir DIR .*use DIR",
    ),
    ("Qwen/Qwen3-0.6B", "Hugging Face cache .*\n  fix: hf download Qwen/Qwen3-0.6B --local-dir DIR"),
    ("/models/gemma-3-4b-it", "^/models/gemma-3-4b-it: no such directory\n  fix: write the path of a checkpoint"),
    ("./gemma3-4b", "^./gemma3-4b: no such directory\n  fix: write"),
    ("~/gemma-3-4b-it", "no such directory\n  fix: write"),
    ("configs/gemma3-4b/", "no such directory\n  fix: write"),
    ("configs/models", "is a directory"),
    ("/dev/null", "is not a regular file"),
    ("", "name of the configuration is empty"),
  ],
)
def test_what_is_not_there(name, reason, monkeypatch):
  monkeypatch.chdir(ROOT)
  with pytest.raises(UserError, match=reason):
    find_config(name)


def test_a_missing_directory_suggests_no_model():
  """A model of a similar name would train random weights, although the directory of trained ones was meant."""
  for name in ("google/gemma-3-4b-it", "/models/gemma-3-4b-it", "../gemma3-tiny", "~/qwen3-8b"):
    with pytest.raises(UserError) as caught:
      find_config(name)
    assert "did you mean" not in str(caught.value)


def test_labels_are_short(monkeypatch, tmp_path):
  monkeypatch.chdir(tmp_path)
  assert label_of(configs_folder() / "base.yml") == "configs/base.yml"
  assert label_of(tmp_path / "a" / "b.yml") == "a/b.yml"
  assert label_of(Path("/etc/x.yml")) == "/etc/x.yml"


def test_an_installed_wheel_finds_its_own_copy(tmp_path):
  # The content of the wheel: the package with configs/ inside (pyproject's force-include), without the checkout around it.
  shutil.copytree(ROOT / "maxtext_like", tmp_path / "maxtext_like", ignore=shutil.ignore_patterns("__pycache__"))
  shutil.copytree(ROOT / "configs", tmp_path / "maxtext_like" / "configs")
  program = (
    "from maxtext_like.config.load import load_config; import maxtext_like;"
    "loaded = load_config('configs/models/gemma4-tiny.yml');"
    "print(loaded.path); print(loaded.origins['training.learning_rate'])"
  )
  done = subprocess.run(
    [sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, check=True, env={"PYTHONPATH": "."}
  )
  path, origin = done.stdout.splitlines()
  assert Path(path) == tmp_path / "maxtext_like" / "configs" / "models" / "gemma4-tiny.yml"
  assert origin.startswith("configs/models/gemma4-tiny.yml:")


def test_a_damaged_installation_says_so(tmp_path):
  shutil.copytree(ROOT / "maxtext_like", tmp_path / "maxtext_like", ignore=shutil.ignore_patterns("__pycache__"))
  program = "from maxtext_like.config.files import configs_folder; configs_folder()"
  done = subprocess.run(
    [sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, check=False, env={"PYTHONPATH": "."}
  )
  assert "configs/base.yml is missing" in done.stderr
  assert "fix: install maxtext-like again" in done.stderr


@pytest.mark.parametrize("name", model_names())
def test_a_model_file_does_not_repeat_a_default(name):
  """A model file should show only what the model changes. The reason for a kept default belongs in a comment."""
  path = configs_folder() / "models" / f"{name}.yml"
  defaults = base_values()
  repeated = []
  for section in read_yaml(path, path.name).items.values():
    assert isinstance(section, Mapping)
    for key, node in section.items.items():
      if coerce(node, LEAVES[key][1]) == defaults[key]:
        repeated.append(f"{path.name}:{section.key_lines[key]}: {key} is the default of configs/base.yml; remove the line")
  assert not repeated, "\n".join(repeated)
