"""The loss against hand-computed numbers, and the loss in chunks against the loss in one piece."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from maxtext_like.config.load import load_config
from maxtext_like.layers.param import init
from maxtext_like.models.model import make_model
from maxtext_like.sharding.mesh import abstract_mesh
from maxtext_like.training.objectives import language_modeling
from maxtext_like.training.objectives.language_modeling import (
  LanguageModeling,
  automatic_chunks,
  log_sum_exp,
  looked_up,
  token_losses,
)
from tests.layers.equations import named
from tests.training.toy import B, D, T, V, toy_batch, toy_decoder


def test_by_hand():
  # Z = 1 + 2 + 5 = 8; the target has probability 2 / 8.
  logits = jnp.log(jnp.asarray([[[1.0, 2.0, 5.0], [1.0, 1.0, 2.0], [3.0, 3.0, 3.0]]]))
  losses, z_losses = token_losses(logits, jnp.asarray([[1, 2, -100]]), z_loss=0.5)
  np.testing.assert_allclose(losses, [[np.log(4), np.log(2), 0]], rtol=1e-6)
  np.testing.assert_allclose(z_losses, [[0.5 * np.log(8) ** 2, 0.5 * np.log(4) ** 2, 0]], rtol=1e-6)


def test_low_precision_logits_are_widened_first():
  logits = jnp.asarray([[[200.0, 199.0]]], jnp.float16)
  losses, _ = token_losses(logits, jnp.asarray([[1]]), z_loss=0.0)
  assert losses.dtype == jnp.float32
  np.testing.assert_allclose(losses, [[np.log1p(np.e)]], rtol=1e-6)


def test_an_ignored_token_gives_nothing_even_where_its_logits_are_not_finite():
  logits = jnp.asarray([[[0.0, 0.0], [jnp.nan, jnp.inf]]])
  losses, _ = token_losses(logits, jnp.asarray([[0, -100]]), z_loss=1.0)
  np.testing.assert_allclose(losses, [[np.log(2), 0]], rtol=1e-6)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_one_gpu_reads_once_and_looks_up_what_others_read_twice_and_add_up(dtype, monkeypatch):
  rng = np.random.default_rng(0)
  logits = jnp.asarray(20 * rng.normal(size=(2, 3, 1001)) + 300, dtype)
  targets = jnp.asarray([[0, 6, -100], [3, -100, 5]])
  both = []
  for alone in (False, True):
    monkeypatch.setattr(language_modeling, "on_one_gpu", lambda alone=alone: alone)
    both.append(jax.value_and_grad(lambda x: jnp.sum(token_losses(x, targets, 0.1)[0]))(logits))
  for summed, found in zip(*both, strict=True):
    assert found.dtype == summed.dtype
    np.testing.assert_allclose(found, summed, rtol=2e-6, atol=1e-7)
  assert len(named(looked_up, logits, targets, name="gather")) == 1


def test_the_log_of_a_sum_in_one_pass_is_that_of_two_where_logits_are_not_finite():
  rows = np.random.default_rng(1).normal(size=(6, 300)).astype(np.float32)
  rows[1, 7], rows[2, 8], rows[3, 9], rows[4] = np.inf, -np.inf, np.nan, -np.inf
  rows[5, [0, 299]] = np.inf
  logits = jnp.asarray(rows)[None]
  np.testing.assert_allclose(jax.jit(log_sum_exp)(logits), jax.nn.logsumexp(logits, axis=-1), rtol=1e-6)


@pytest.mark.parametrize("chunks", [3, 2, 7])
@pytest.mark.slow
def test_chunks_equal_the_whole_with_gradients(chunks):
  decoder = toy_decoder()
  params = init(decoder.params(), jax.random.key(1))
  batch = toy_batch(ignored=9)

  def total(chunks, expected=1.0):
    def loss(p):
      value, _, aux = LanguageModeling(decoder, 0.01, chunks)(p, batch, jnp.float32(expected))
      return 3 * value, aux["terms"]

    return jax.value_and_grad(loss, has_aux=True)(params)

  ((whole, whole_terms), whole_grads), ((cut, cut_terms), cut_grads) = total(1), total(chunks, 3.0)
  np.testing.assert_allclose(cut, whole, rtol=1e-6)
  alone, weight, _ = LanguageModeling(decoder, 0.01, chunks)(params, batch)  # without gradients
  np.testing.assert_allclose(3 * alone, whole, rtol=1e-6)
  assert weight == B * T - 9
  assert cut_terms.keys() == whole_terms.keys() == {"cross_entropy", "z_loss"}
  jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), cut_terms, whole_terms)
  jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-5, atol=1e-6), cut_grads, whole_grads)
  # The incoming cotangent differs from the expected one.
  jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), total(chunks, 0.5)[1], cut_grads)


def test_gradients_of_chunks_add_up_in_float32_under_16_bit_weights():
  """The gradient of each chunk is float32, so that the sum is rounded to bfloat16 once, as the gradient in one piece is."""
  params = jax.tree.map(lambda w: w.astype(jnp.bfloat16), init(toy_decoder().params(), jax.random.key(1)))
  batch = toy_batch()
  whole, cut = (
    jax.grad(lambda p, n=n: LanguageModeling(toy_decoder(), 0.0, n)(p, batch)[0])(params)["head"]["kernel"] for n in (1, 7)
  )
  assert cut.dtype == jnp.bfloat16
  # Different orders of float32 sums can change the last bit of a rounded number. Rounding each chunk would change half of all
  # numbers.
  assert np.mean(np.asarray(cut) != np.asarray(whole)) < 0.1


@pytest.mark.parametrize(("model", "head"), [("gemma3-4b", "embed_tokens"), ("deepseek3-671b", "lm_head")])
def test_small_pieces_are_for_a_frozen_head(model, head):
  def chunks(*words):
    config = load_config(model, [*words, "max_target_length=4096", "per_device_batch_size=1"]).config
    return language_modeling.build(make_model(config, mesh=abstract_mesh(config.mesh, 1), platform="gpu")).chunks

  lora = ("lora_rank=2", "lora_modules=[o_proj]")
  assert chunks() == chunks(*lora, f"modules_to_save=[{head}]") < chunks(*lora)


def test_a_16_bit_head_has_no_copy_in_float32():
  """Only the sum of its gradients is float32. A float32 copy of the head before the loop would be as large as that sum and stay
  in memory."""
  params = jax.tree.map(lambda w: w.astype(jnp.bfloat16), init(toy_decoder().params(), jax.random.key(1)))
  loss = lambda p: LanguageModeling(toy_decoder(), 0.0, 7)(p, toy_batch())[0]
  before = itertools.takewhile(lambda e: e.primitive.name != "scan", jax.make_jaxpr(jax.grad(loss))(params).eqns)
  wide = [e.primitive.name for e in before for v in e.outvars if (v.aval.shape, v.aval.dtype) == ((D, V), jnp.float32)]
  assert wide == ["broadcast_in_dim"], wide


def test_chunks_compute_logits_once_and_no_gradient_of_a_frozen_head():
  decoder = toy_decoder()
  params, batch = init(decoder.params(), jax.random.key(1)), toy_batch()

  def products(*trained):
    def loss(some):
      return LanguageModeling(decoder, 0.0, 7)(params | some, batch)[0]

    found = named(jax.grad(loss), {name: params[name] for name in trained}, name="dot_general")
    shapes = [e.outvars[0].aval.shape for e in found]
    return shapes.count((B, 1, V)), sum(sorted(shape) == [D, V] for shape in shapes)

  assert products("stack_0", "head") == (1, 1)
  assert products("stack_0") == (1, 0)
  assert products("head") == (1, 1)


def test_chunks_keep_the_logits_of_one_piece_only():
  decoder = toy_decoder()
  params, batch = init(decoder.params(), jax.random.key(1)), toy_batch()

  def sizes(chunks):
    jaxpr = jax.make_jaxpr(jax.grad(lambda p: LanguageModeling(decoder, 0.0, chunks)(p, batch)[0]))(params)
    return {v.aval.shape for eqn in jaxpr.eqns for v in eqn.outvars}

  assert (B, T, V) in sizes(1)
  largest = max((np.prod(shape) for shape in sizes(7) if shape[-1:] == (V,) and len(shape) > 2), default=0)
  assert largest <= B * V


def test_automatic_chunks():
  assert automatic_chunks(8, 128, 512) == 1
  assert automatic_chunks(2, 4096, 262144) == 8  # 8 GiB of logits
  assert automatic_chunks(2, 4096, 262144, 4 << 30) == 2
  assert automatic_chunks(1, 3, 2**40) == 3


@pytest.mark.parametrize(("platform", "devices", "chunks"), [("gpu", 1, 8), ("gpu", 2, 2), ("tpu", 2, 8)])
def test_gpus_that_share_a_head_read_it_in_fewer_chunks(platform, devices, chunks):
  config = load_config("gemma4-31b", ["max_target_length=4096", "per_device_batch_size=2"]).config
  model = make_model(config, mesh=abstract_mesh(config.mesh, devices), platform=platform)
  assert language_modeling.build(model).chunks == chunks
