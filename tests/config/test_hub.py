"""Names of models on the Hub: a directory of that name comes first, then a cached snapshot, and the network is never used."""

import argparse
from pathlib import Path

import pytest

from maxtext_like.cli.main import main
from maxtext_like.config import hub
from maxtext_like.config.load import load_config

NAME = "google/gemma-3-4b-it"


@pytest.fixture
def cached(tmp_path, monkeypatch):
  """Return a function that makes a snapshot in a cache and returns its directory. The working directory is empty."""
  for variable in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "XDG_CACHE_HOME"):
    monkeypatch.delenv(variable, raising=False)
  monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
  (tmp_path / "work").mkdir()
  monkeypatch.chdir(tmp_path / "work")

  def put(name: str = NAME, revision: str = "0123abcd", ref: str = "main") -> Path:
    model = tmp_path / "hf" / "hub" / f"models--{name.replace('/', '--')}"
    (model / "refs").mkdir(parents=True, exist_ok=True)
    (model / "refs" / ref).write_text(revision)
    (model / "snapshots" / revision).mkdir(parents=True, exist_ok=True)
    return model / "snapshots" / revision

  return put


def test_the_snapshot_of_main(cached):
  assert hub.find(NAME) is None
  cached(revision="old00000")
  snapshot = cached(revision="new00000")
  cached(revision="other000", ref="experiment")
  assert hub.find(NAME) == snapshot
  assert hub.find("google/gemma-3-12b-it") is None
  assert str(hub.cache()) in hub.advice(NAME)
  assert "hf download google/gemma-3-4b-it" in hub.fix(NAME)
  assert "hf download" not in hub.fix("runs/a/b")


@pytest.mark.parametrize(
  ("variables", "expected"),
  [
    ({"HF_HUB_CACHE": "/a", "HF_HOME": "/b"}, "/a"),
    ({"HUGGINGFACE_HUB_CACHE": "/c", "HF_HOME": "/b"}, "/c"),
    ({"HF_HOME": "/b"}, "/b/hub"),
    ({"XDG_CACHE_HOME": "/d"}, "/d/huggingface/hub"),
    ({"HOME": "/e"}, "/e/.cache/huggingface/hub"),
    ({"HF_HOME": "~/f", "HOME": "/e"}, "/e/f/hub"),
  ],
)
def test_where_the_cache_is(variables, expected, monkeypatch):
  for name in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "HF_HOME", "XDG_CACHE_HOME"):
    monkeypatch.delenv(name, raising=False)
  for name, value in variables.items():
    monkeypatch.setenv(name, value)
  assert str(hub.cache()) == expected


def test_a_directory_of_that_name_comes_first(cached):
  cached()
  Path(NAME).mkdir(parents=True)
  assert hub.find(NAME) is None
  assert hub.checkpoint_path(NAME) == NAME
  assert load_config("gemma3-tiny", [f"init_from={NAME}"]).config.checkpoint.init_from == NAME


@pytest.mark.parametrize("text", ["gemma", "/google/gemma", "./google/gemma", "../x/y", "a/b/c", "~/x", "", "google/", "x/.."])
def test_paths_are_no_names(text, cached):
  cached()
  assert hub.find(text) is None
  assert hub.advice(text) == ""


@pytest.mark.parametrize("revision", ["../../../elsewhere", "gone", "", "a b"])
def test_a_revision_that_leads_nowhere(revision, cached):
  model = cached().parent.parent
  (model / "refs" / "main").write_text(revision)
  assert hub.find(NAME) is None


def test_keys_of_a_configuration(cached):
  snapshot = cached()
  loaded = load_config("gemma3-tiny", [f"init_from={NAME}", f"tokenizer_path={NAME}"])
  assert loaded.config.checkpoint.init_from == str(snapshot) == loaded.config.data.tokenizer
  assert any(note.startswith(f'argument "init_from={NAME}": init_from') and str(snapshot) in note for note in loaded.notes)
  assert f'  init_from: {snapshot}  # argument "init_from={NAME}"' in loaded.to_yaml()
  other = load_config("gemma3-tiny", ["init_from=google/gemma-3-12b-it"])  # not in the cache, as on a machine that only plans
  assert (other.config.checkpoint.init_from, other.notes) == ("google/gemma-3-12b-it", ())


def test_options(cached):
  snapshot = cached()
  assert hub.checkpoint_path(NAME) == str(snapshot)
  with pytest.raises(argparse.ArgumentTypeError, match=r"^runs: no such file or directory"):
    hub.checkpoint_path("runs")
  with pytest.raises(argparse.ArgumentTypeError, match="hf download google/gemma-3-12b-it"):
    hub.checkpoint_path("google/gemma-3-12b-it")
  Path("runs/mine").mkdir(parents=True)
  assert hub.checkpoint_path("runs/mine") == "runs/mine"
  with pytest.raises(argparse.ArgumentTypeError, match=r"^runs/others: no such file or directory"):
    hub.checkpoint_path("runs/others")  # a path in an existing directory is not a model's name


@pytest.mark.parametrize(
  "words",
  [
    ["train", "gemma3-tiny", f"init_from={NAME}"],
    ["train", "gemma3-tiny", f"tokenizer={NAME}"],
    ["generate", "--checkpoint", NAME, "--prompt", "a"],
    ["risk", "--checkpoint", NAME],
    ["import", NAME, "--out", "there"],
    ["xray", "gemma3-tiny", "--checkpoint", NAME],
    ["bisect", "--checkpoint", NAME],
    ["forward", "--checkpoint", NAME, "--inputs", "a", "--output", "b"],
  ],
)
def test_what_is_not_in_the_cache_says_how_to_get_it(words, cached, capsys):
  assert main(words) == 2
  assert f"hf download {NAME}" in capsys.readouterr().err
  assert not list(Path().iterdir())
