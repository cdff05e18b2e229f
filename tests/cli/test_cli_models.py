"""``maxtext-like models``: parameter counts equal the published ones, computed here independently. No array is allocated."""

import pytest

from maxtext_like.api import models
from maxtext_like.cli.main import main
from maxtext_like.config.files import model_names
from maxtext_like.config.load import load_config


def counts(name):
  config = load_config(name).config
  return models.parameter_counts(config.model, config.precision)


def gemma3(V, D, F, L, N, K, H):
  layer = 4 * D + D * H * (2 * N + 2 * K) + 2 * H + 3 * D * F
  return V * D + L * layer + D


def gemma4(V, D, F, L, N, K, H, GH, GK, cycle, k_eq_v=True):
  total = V * D + D
  for i in range(L):
    glob = (i + 1) % cycle == 0
    h, k = (GH, GK) if glob else (H, K)
    total += 4 * D + D * h * (2 * N + (1 if glob and k_eq_v else 2) * k) + 2 * h + 3 * D * F
  return total


def gemma4_small(V, D, F, L, N, K, H, GH, P, shared, cycle, wide):
  total = V * D + D + V * L * P + L * P * D + P
  for i in range(L):
    h = GH if (i + 1) % cycle == 0 else H
    own = i < L - shared
    total += 4 * D + 2 * D * h * N + h + (2 * D * h * K + h if own else 0)
    total += 3 * D * F * (2 if wide and not own else 1) + 2 * D * P + D
  return total


def deepseek(V, D, F, L, dense, N, rq, rk, dn, dr, dv, E, Fe, indexer=0):
  attention = D * rq + rq + rq * N * (dn + dr) + D * (rk + dr) + rk + rk * N * (dn + dv) + N * dv * D
  moe = D * E + (E + 1) * 3 * D * Fe
  return 2 * V * D + D + L * (2 * D + attention + indexer) + dense * 3 * D * F + (L - dense) * moe


V3 = (129280, 7168, 18432, 61, 3, 128, 1536, 512, 128, 64, 128, 256, 2048)
INDEXER = 1536 * 64 * 128 + 7168 * 128 + 2 * 128 + 7168 * 64

EXACT = {
  "gemma3-4b": gemma3(262208, 2560, 10240, 34, 8, 4, 256),
  "gemma3-12b": gemma3(262208, 3840, 15360, 48, 16, 8, 256),
  "gemma3-27b": gemma3(262208, 5376, 21504, 62, 32, 16, 128),
  "gemma4-31b": gemma4(262144, 5376, 21504, 60, 32, 16, 256, 512, 4, 6),
  "gemma4-26b": gemma4(262144, 2816, 2112, 30, 16, 8, 256, 512, 2, 6)
  + 30 * (3 * 2816 + 2816 * 128 + 2816 + 128 + 128 * 3 * 2816 * 704),
  "gemma4-e2b": gemma4_small(262144, 1536, 6144, 35, 8, 1, 256, 512, 256, 20, 5, True),
  "gemma4-e4b": gemma4_small(262144, 2560, 10240, 42, 8, 2, 256, 512, 256, 18, 6, False),
  "deepseek3-671b": deepseek(*V3),
  "deepseek3.2-671b": deepseek(*V3, indexer=INDEXER),
}

# Published counts of the language models, in billions, without DeepSeek's multi-token prediction module.
PUBLISHED = {
  "gemma3-4b": "3.880",
  "gemma3-12b": "11.766",
  "gemma3-27b": "27.009",
  "gemma4-31b": "30.70",
  "gemma4-26b": "25.23",
  "gemma4-e2b": "4.63",
  "gemma4-e4b": "7.46",
  "deepseek3-671b": "671.03",
  "deepseek3.2-671b": "671.88",
}


# Counts of the released configurations in transformers, including tower and projector, in billions.
WITH_TOWER = {
  "gemma3-4b": "4.300",
  "gemma3-12b": "12.187",
  "gemma3-27b": "27.432",
  "gemma4-26b": "25.81",
  "gemma4-31b": "31.27",
  "gemma4-e2b": "4.80",
  "gemma4-e4b": "7.63",
}


@pytest.mark.parametrize("name", WITH_TOWER)
def test_totals_with_the_vision_tower_are_the_published_ones(name):
  config = load_config(name, ["use_multimodal=true"]).config
  total = models.parameter_counts(config.model, config.precision, config.vision).total
  published = WITH_TOWER[name]
  assert f"{total / 1e9:.{len(published.partition('.')[2])}f}" == published


@pytest.mark.parametrize("name", EXACT)
def test_counts_are_the_published_ones_exactly(name):
  total = counts(name).total
  assert total == EXACT[name]
  published = PUBLISHED[name]
  assert f"{total / 1e9:.{len(published.partition('.')[2])}f}" == published


def test_active_parameters_leave_out_the_experts_not_chosen():
  dense, routed = counts("gemma4-31b"), counts("deepseek3-671b")
  assert dense.active == dense.total
  assert routed.total - routed.active == 58 * (256 - 8) * 3 * 7168 * 2048
  assert round(routed.active / 1e9, 1) == 37.6


def test_released_sizes_of_the_text_models():
  # Totals of the complete checkpoints minus the towers: 419 816 304 of Gemma 3 4B's 4 300 079 472 are for images.
  assert counts("gemma3-4b").total == 4_300_079_472 - 419_816_304
  config = load_config("gemma3-4b", ["use_multimodal=true"]).config
  assert models.parameter_counts(config.model, config.precision, config.vision).total == 4_300_079_472


def test_no_array_is_made(monkeypatch):
  import jax

  def fail(*args, **kwargs):
    raise AssertionError("an array was made")

  for name in ("zeros", "ones", "asarray", "array"):
    monkeypatch.setattr(jax.numpy, name, fail)
  monkeypatch.setattr(jax.random, "key", fail)
  assert counts("deepseek3-671b").total == 671_026_419_200 - 58 * 256  # biases of routers are not parameters


def test_the_table_lists_every_model(capsys):
  assert main(["models"]) == 0
  lines = capsys.readouterr().out.splitlines()
  assert [line.split()[0] for line in lines[1:]] == model_names()
  assert main(["models", "--exact"]) == 0
  assert f"{EXACT['deepseek3-671b']:,}" in capsys.readouterr().out


def test_a_terminal_gets_a_table(capsys, monkeypatch):
  monkeypatch.setattr("sys.stdout.isatty", lambda: True)
  monkeypatch.setenv("COLUMNS", "160")
  assert main(["models"]) == 0
  assert "671.03 B" in capsys.readouterr().out
