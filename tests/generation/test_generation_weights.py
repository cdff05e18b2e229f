"""Parameters are converted to the form for decoding and back without loss."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from maxtext_like.config.load import load_config
from maxtext_like.generation import weights
from maxtext_like.generation.weights import DecodingWeights
from maxtext_like.layers.cache import Step
from maxtext_like.layers.kernels.quantized_matmul import quantized_matmul
from maxtext_like.layers.quantization import quantized
from maxtext_like.models.build import build_decoder, precision_of
from maxtext_like.models.quantized_base import make_base
from tests.tiers import tiers


def test_rows_apart_and_stacked_again():
  config = load_config("gemma3-tiny", ["dtype=float32", "num_decoder_layers=7", "emb_dim=24", "vocab_size=37"]).config
  decoder = build_decoder(config.model, precision_of(config.precision), vision=config.vision)
  params = jax.tree.map(lambda p: np.arange(np.prod(p.shape), dtype=np.float32).reshape(p.shape), decoder.params())
  on_cpu, on_gpu = (DecodingWeights(decoder, lambda: params, platform) for platform in ("cpu", "gpu"))
  assert on_cpu.for_decoding is params
  apart = on_gpu.for_decoding
  jax.tree.map(np.testing.assert_array_equal, apart, decoder.apart(params))
  rows = [row for stack in decoder.stacks for row in apart[stack.name]]
  assert len(rows) == sum(stack.repeats for stack in decoder.stacks)
  jax.tree.map(np.testing.assert_array_equal, on_gpu.stacked, params)


CASES = {
  "gemma4-e2b-tiny": ["num_decoder_layers=6", "num_kv_shared_layers=3"],
  "gemma4-moe-tiny": ["num_decoder_layers=6"],
  "deepseek3.2-tiny": ["indexer_topk=6", "num_decoder_layers=2", "num_experts=4", "n_routing_groups=2"],
  "qwen3-moe-tiny": ["num_decoder_layers=2"],
}


def decoded(decoder, params, tokens):
  """Returns the logits of the last token of a prompt and of the token that follows."""
  cache, found = decoder.empty_cache(2, 16, apart=True), []
  for begin, end in ((0, 8), (8, 9)):
    step = Step(jnp.full(2, begin), jnp.full(2, end - begin), fresh=begin == 0)
    batch = {"tokens": tokens[:, begin:end], "positions": jnp.broadcast_to(jnp.arange(begin, end), (2, end - begin))}
    x, cache, _ = decoder.extend(params, batch, cache, step)
    found.append(decoder.head(params, x[:, -1:]))
  return jnp.concatenate(found, axis=1)


@pytest.mark.parametrize("name", tiers(CASES, slow=["gemma4-e2b-tiny", "deepseek3.2-tiny"]))
def test_rounded_weights_give_the_same_bits(name: str):
  """A weight that is also used in float32, such as a router's, must not be rounded, because that would change the logits."""
  config = load_config(name, ["dtype=bfloat16", *CASES[name]]).config
  decoder = build_decoder(config.model, precision_of(config.precision), vision=config.vision)
  leaves, tree = jax.tree.flatten(decoder.params())
  draws = [np.random.default_rng(i).normal(size=leaf.shape).astype(np.float32) for i, leaf in enumerate(leaves)]
  read = lambda: jax.tree.map(jnp.asarray, tree.unflatten(draws))
  weights = DecodingWeights(decoder, read, "gpu")
  tokens = np.random.default_rng(1).integers(2, 97, (2, 9)).astype(np.int32)

  logits = jax.jit(lambda params: decoded(decoder, params, tokens))
  exact = logits(decoder.apart(read()))
  rounded = weights.for_decoding
  count = sum(x.dtype == jnp.bfloat16 for x in jax.tree.leaves(rounded))
  assert count >= 10
  np.testing.assert_array_equal(logits(rounded), exact)
  jax.tree.map(np.testing.assert_array_equal, weights.stacked, read())


@pytest.mark.parametrize("done", [0, 5, 14])
def test_out_of_memory_in_the_middle_leaves_the_weights_usable(done: int, monkeypatch: pytest.MonkeyPatch):
  config = load_config("gemma3-tiny", ["dtype=float32", "num_decoder_layers=7", "emb_dim=24", "vocab_size=37"]).config
  decoder = build_decoder(config.model, precision_of(config.precision), vision=config.vision)
  params = jax.tree.map(lambda p: np.arange(np.prod(p.shape), dtype=np.float32).reshape(p.shape), decoder.params())
  made, calls = DecodingWeights(decoder, lambda: params, "gpu"), 0

  def limited(function):
    def call(x):
      nonlocal calls
      calls += 1
      if calls > done:
        raise RuntimeError("RESOURCE_EXHAUSTED")
      return function(x)

    return call

  for name, read in (("unstack", lambda: made.for_decoding), ("stack", lambda: made.stacked)):
    calls = 0
    with monkeypatch.context() as patch:
      patch.setattr(jnp, name, limited(getattr(jnp, name)))
      with pytest.raises(RuntimeError, match="RESOURCE_EXHAUSTED"):
        read()
    # Either form can be read again, with all arrays.
    jax.tree.map(np.testing.assert_array_equal, made.stacked, params)
    jax.tree.map(np.testing.assert_array_equal, made.for_decoding, decoder.apart(params))


def test_an_error_while_weights_are_rounded_or_read_again_loses_none(monkeypatch: pytest.MonkeyPatch):
  config = load_config("gemma3-tiny", ["dtype=bfloat16", "num_decoder_layers=2", "emb_dim=24", "vocab_size=37"]).config
  decoder = build_decoder(config.model, precision_of(config.precision), vision=config.vision)
  params = jax.tree.map(lambda p: jnp.arange(np.prod(p.shape), dtype=jnp.float32).reshape(p.shape) / 3, decoder.params())
  fails = False

  def read():
    if fails:
      raise RuntimeError("RESOURCE_EXHAUSTED")
    return params

  made = DecodingWeights(decoder, read, "gpu")
  with monkeypatch.context() as patch:
    patch.setattr(weights, "roundable", lambda decoder, own=weights.roundable: own(decoder) | {("zzz",)})
    with pytest.raises(KeyError):
      made.for_decoding  # noqa: B018
  jax.tree.map(np.testing.assert_array_equal, made.stacked, params)
  rounded = made.for_decoding
  fails = True
  with pytest.raises(RuntimeError, match="RESOURCE_EXHAUSTED"):
    made.stacked  # noqa: B018
  fails = False
  jax.tree.map(np.testing.assert_array_equal, made.for_decoding, rounded)
  jax.tree.map(np.testing.assert_array_equal, made.stacked, params)


@pytest.mark.slow
def test_codes_are_ordered_for_the_kernel_and_give_the_same_logits(monkeypatch: pytest.MonkeyPatch):
  # No weight is rounded, so only the order of the codes makes it necessary to read the weights again.
  words = ["dtype=bfloat16", "weight_dtype=bfloat16", "num_decoder_layers=2", "vocab_size=37"]
  config = load_config("qwen3-tiny", words).config
  decoder = build_decoder(config.model, precision_of(config.precision), vision=config.vision)
  names = {f"layers.{i}.{name}" for i in range(2) for name in ("mlp.down", "attention.o")}
  base = dataclasses.replace(make_base(decoder, frozenset(names), "int8"), kernel="pallas_triton")
  stored = base.init(decoder.params(), jax.random.key(0))
  weights = DecodingWeights(decoder, lambda: base.attach(stored), "gpu")
  tokens = np.random.default_rng(1).integers(2, 37, (2, 9)).astype(np.int32)
  calls = []

  def interpreted(*args, **how):
    calls.append(args[1].shape)
    return quantized_matmul(*args, **how, interpret=True)

  monkeypatch.setattr(quantized, "quantized_matmul", interpreted)
  logits = jax.jit(lambda params: decoded(decoder, params, tokens))
  want = logits(decoder.apart(base.attach(stored)))
  assert not calls
  got = logits(weights.for_decoding)
  assert len(calls) == 2 * 2 * 2
  error = np.linalg.norm(np.float64(got) - np.float64(want)) / np.linalg.norm(np.float64(want))
  assert error < 0.03, error
  jax.tree.map(np.testing.assert_array_equal, weights.stacked, base.attach(stored))
