"""Perplexity over windows equals transformers' recipe, which is implemented here, and the command ``perplexity`` prints it."""

import json
import math
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from maxtext_like import load, perplexity
from maxtext_like.api.pretrained import Pretrained
from maxtext_like.cli.main import main
from maxtext_like.errors import UserError
from maxtext_like.evaluation.perplexity import windows
from tests.generation.letters import copy_golden
from tests.processes import ROOT, environment

TEXT = "the fox runs. the hen sits, and who knows why? " * 2


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
  folder = copy_golden("gemma3_text", tmp_path_factory.mktemp("golden") / "model")
  (folder / "text.txt").write_text(TEXT)
  return folder


@pytest.fixture(scope="module")
def model(folder: Path) -> Pretrained:
  return load(folder, "dtype=float32", "matmul_precision=highest", "compilation_cache_dir=null")


def recipe(model: Pretrained, tokens: list[int], max_length: int, stride: int) -> tuple[float, float]:
  """Returns (perplexity, perplexity over tokens). A window's loss is the mean over its labels after they shift by one."""
  sums = weights = all_losses = count = 0.0
  previous_end = 0
  for begin in range(0, len(tokens), stride):
    end = min(begin + max_length, len(tokens))
    row = tokens[begin:end]
    labels = np.array(row)
    labels[: len(row) - (end - previous_end)] = -100
    padded = np.zeros((1, max_length), np.int32)
    padded[0, : len(row)] = row
    logits = np.asarray(model.logits(padded))[0, : len(row) - 1].astype(np.float64)
    log_probs = logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True))
    losses = -log_probs[np.arange(len(row) - 1), row[1:]][labels[1:] != -100]
    weight = int((labels != -100).sum()) - 1
    if len(losses):
      sums, weights = sums + losses.mean() * weight, weights + weight
      all_losses, count = all_losses + losses.sum(), count + len(losses)
    previous_end = end
    if end == len(tokens):
      break
  return math.exp(sums / weights), math.exp(all_losses / count)


@pytest.mark.parametrize(("max_length", "stride"), [(20, 7), (20, 20), (19, 1), (96, 50)])
def test_it_is_the_recipe(model: Pretrained, folder: Path, max_length: int, stride: int):
  found = perplexity(model, folder / "text.txt", max_length=max_length, stride=stride, batch_size=4)
  tokens = [2, *model.tokenizer.encode(TEXT)]
  assert (found.tokens, found.max_length, found.stride) == (len(tokens), max_length, stride)
  assert (found.perplexity, found.token_perplexity) == pytest.approx(recipe(model, tokens, max_length, stride), rel=1e-5)
  assert found.loss == pytest.approx(math.log(found.perplexity))
  if stride < max_length:
    assert found.scored == len(tokens) - 1, "every token but the first one is scored once"


def test_windows_of_a_text():
  assert windows(10, 4, 2) == [(0, 1, 4, 3), (2, 4, 6, 1), (4, 6, 8, 1), (6, 8, 10, 1)]
  assert windows(9, 4, 4) == [(0, 1, 4, 3), (4, 5, 8, 3), (8, 9, 9, 0)]


@pytest.mark.parametrize(
  ("sizes", "reason"),
  [((5, 4, 5), "choose a stride from 1 to 4"), ((5, 4, 0), "stride is 0"), ((5, 1, 1), "at least 2"), ((1, 4, 2), "1 tokens")],
)
def test_impossible_windows(sizes: tuple[int, int, int], reason: str):
  with pytest.raises(UserError, match=reason):
    windows(*sizes)


def test_the_verb(folder: Path, capsys: pytest.CaptureFixture):
  words = ["perplexity", str(folder), "--stride", "7", str(folder / "text.txt"), "--max-length", "20", "--batch-size", "4"]
  output = folder / "numbers.json"
  assert main([*words, "--output", str(output), "dtype=float32", f"compilation_cache_dir={folder}/cache"]) == 0
  numbers = json.loads(output.read_text())
  shown = re.match(
    r"perplexity ([\d.]+) \(loss ([\d.]+)\); over tokens ([\d.]+)\n95 tokens, 94 of them", capsys.readouterr().out
  )
  assert shown is not None
  found = [numbers[name] for name in ("perplexity", "loss", "token_perplexity")]
  assert [float(number) for number in shown.groups()] == pytest.approx(found, abs=1e-4)


@pytest.mark.slow
def test_a_mesh_of_eight_devices_gives_the_same_number(model: Pretrained, folder: Path):
  """The mesh shards rows, positions, heads and the vocabulary. Shapes are rounded up to multiples of the mesh axes."""
  axes = [f"ici_{axis}_parallelism=2" for axis in ("fsdp", "context", "tensor")]
  own = ["dtype=float32", "matmul_precision=highest", "compilation_cache_dir=null", "ici_data_parallelism=1", *axes]
  words = ["perplexity", str(folder), str(folder / "text.txt"), "--max-length", "20", "--stride", "7", "--batch-size", "3"]
  output = folder / "mesh.json"
  command = [sys.executable, "-m", "maxtext_like", *words, "--output", str(output), *own]
  subprocess.run(command, env=environment(8), cwd=ROOT, check=True, timeout=300)
  expected = perplexity(model, folder / "text.txt", max_length=20, stride=7, batch_size=4)
  assert json.loads(output.read_text())["loss"] == pytest.approx(expected.loss, abs=1e-5)


@pytest.mark.parametrize(
  ("more", "reason"),
  [
    ([], "needs FILE"),
    (["none.txt"], "none.txt: cannot be read: No such file or directory"),
    (["latin.txt"], "latin.txt: not UTF-8 at byte 1"),
    (["text.txt", "--stride", "0"], "stride=0"),
    (["text.txt", "--max-length", "200000"], "max_length is 200000, but the model takes 131072 tokens"),
    (["text.txt", "--speed"], "unknown word '--speed'"),
  ],
)
def test_what_the_verb_refuses(more: list[str], reason: str, folder: Path, capsys: pytest.CaptureFixture, monkeypatch):
  monkeypatch.chdir(folder)
  Path("latin.txt").write_bytes(b"a\xe4")
  assert main(["perplexity", str(folder), *more]) == 2
  assert reason in capsys.readouterr().err
