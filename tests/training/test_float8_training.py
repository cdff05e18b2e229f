"""``matmul_dtype: float8`` in complete programs: every family trains, eight devices agree with one, and machines without float8
units are refused."""

import io

import jax
import numpy as np
import pytest

from maxtext_like.analysis.failed_step import FailedStep
from maxtext_like.capacity.chips import find_chip
from maxtext_like.capacity.flops import train_flops
from maxtext_like.capacity.roofline import roofline
from maxtext_like.config.load import load_config
from maxtext_like.errors import UserError
from maxtext_like.layers.param import path_keys
from maxtext_like.models import float8_products
from maxtext_like.models.build import build_decoder, precision_of
from maxtext_like.sharding.mesh import abstract_mesh
from maxtext_like.training.run.run import train
from maxtext_like.training.sinks.metrics import METRICS, read
from maxtext_like.training.step.program import make_program
from tests.tiers import tiers
from tests.training.small import losses, small_config
from tests.training.step.test_program import run_small
from tests.training.test_parallelism import FEWER

FLOAT8 = ["dtype=bfloat16", "matmul_dtype=float8"]


def decoder(model: str, *words: str):
  config = load_config(model, [*words]).config
  return build_decoder(config.model, precision_of(config.precision), layer_precision=config.precision.layer_precision)


KINDS = ("qwen3-moe-tiny", "gemma4-moe-tiny", "gemma4-e2b-tiny", "deepseek3.2-tiny")
"""Models with every kind of layer. tests/layers/quantization/test_float8.py checks the gradients of each kind."""


@pytest.mark.parametrize("model", tiers(KINDS))
def test_every_family_trains_beside_bfloat16(model):
  low, plain = (losses(small_config(model, *FEWER[model], *words)) for words in (FLOAT8, FLOAT8[:1]))
  assert np.isfinite(low).all()
  np.testing.assert_allclose(low[0::2], plain[0::2], rtol=0.03)


OTHER_WAYS = (
  "dtype=float16 module_api=nnx",
  "scan_layers=false remat_policy=full",
  "optimizer_in_backward=true clip=layer remat_policy=full",
  "lora_rank=4 base_weights=nf4",
  "weight_dtype=bfloat16 gradient_accumulation_steps=2",
)


@pytest.mark.parametrize("words", tiers(OTHER_WAYS, slow=OTHER_WAYS[2:4]))
def test_it_goes_with_the_other_ways_to_train(words):
  assert np.isfinite(losses(small_config("qwen3-tiny", "num_decoder_layers=2", *FLOAT8, *words.split()))).all()


@pytest.mark.slow
def test_eight_devices_give_nearly_the_losses_of_one():
  """The losses agree only approximately: sums in bfloat16 have another order, which can change how a number rounds to
  float8."""
  found = run_small("qwen3-tiny", "num_decoder_layers=2", *FLOAT8)
  one, eight = np.asarray(found["one"]), np.asarray(found["eight"])
  np.testing.assert_allclose(eight[0::2], one[0::2], rtol=5e-3)


@pytest.mark.slow
def test_fifty_steps_end_where_those_of_bfloat16_do(tmp_path):
  words = ["vocab_size=300", "tokenizer=bytes", "steps=50", "max_target_length=64", "per_device_batch_size=4"]
  words += ["num_decoder_layers=2", "inhomogeneous_layer_cycle_interval=2", "emb_dim=64", "mlp_dim=128", "learning_rate=2e-3"]
  words += ["enable_checkpointing=false", "enable_tensorboard=false", f"output_dir={tmp_path}"]
  curves = []
  for name, own in {"plain": FLOAT8[:1], "low": FLOAT8}.items():
    train(load_config("gemma4-tiny", [*words, *own, f"run_name={name}"]), FailedStep, io.StringIO())
    curves.append([row["loss"] for row in read(tmp_path / name / METRICS)])
  plain, low = np.array(curves)
  assert plain[-10:].mean() < plain[:5].mean() - 1
  assert abs(low[-10:].mean() / plain[-10:].mean() - 1) < 0.01


def test_a_tpu_and_an_old_gpu_are_refused():
  config = small_config("gemma4-tiny", *FLOAT8)
  with pytest.raises(UserError, match="matmul_dtype=float8: a TPU"):
    make_program(config, mesh=abstract_mesh(config.mesh, 1), platform="tpu")
  with pytest.raises(UserError, match=r"matmul_dtype=float8: a GPU of compute capability 8.0"):
    make_program(config, mesh=abstract_mesh(config.mesh, 1), platform="gpu", capability="8.0")
  d = decoder("gemma4-tiny", *FLOAT8)
  for known in ("8.9", "9.0", "10.0", "gfx942", None):
    float8_products.require_units(d, "gpu", known)
  float8_products.require_units(decoder("gemma4-tiny"), "gpu", "8.0")


def test_the_start_says_which_products():
  assert float8_products.describe(decoder("gemma4-tiny")) == ""
  words = "products by weights of attention and MLP in float8 (e4m3, gradients e5m2)"
  assert float8_products.describe(decoder("gemma4-tiny", *FLOAT8)) == words
  assert float8_products.describe(decoder("gemma4-moe-tiny", *FLOAT8)) == f"{words}, routed experts excepted"
  some = decoder("gemma4-tiny", "layer_precision=[1-2 matmul_dtype=float8]")
  assert float8_products.layers(some) == (1, 2)
  assert f" in 2 of {len(some.layers)} layers" in float8_products.describe(some)


def test_flops_are_counted_as_before_and_bound_by_both_peaks():
  program = make_program(small_config("gemma4-moe-tiny", *FLOAT8), mesh=None)
  count = lambda **how: train_flops(program.model.decoder, program.spec, program.selection, 8, 16, **how)
  plain = make_program(small_config("gemma4-moe-tiny"))
  assert count() == train_flops(plain.model.decoder, plain.spec, plain.selection, 8, 16)
  low = 0
  for path, p in jax.tree_util.tree_leaves_with_path(program.spec):
    keys = path_keys(path)
    if {"attention", "mlp"} & {*keys} and "scale" not in keys and "experts" not in keys:
      low += p.shape and int(np.prod(p.shape))
  assert count(float8_alone=True) == 6 * 8 * 16 * low
  chip = find_chip("NVIDIA H200")
  assert chip is not None
  bound = lambda share: roofline(
    chip, 1, flops=1e15, memory_bytes=0, transfers=(), model_flops=1e15, float8_flops=share * 1e15
  ).bounds["matrix units"]
  assert bound(0) == pytest.approx(1 / 0.989)
  assert bound(0.5) == pytest.approx(0.5 / 0.989 + 0.5 / 1.979)
