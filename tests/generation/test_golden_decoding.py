"""Decodes every golden case token by token from caches, with images and padding.

The logits equal those of transformers' forward passes over the complete text.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from maxtext_like.api.forward import open_weights
from maxtext_like.checkpoint.huggingface.inputs import IMAGE_INPUTS, make_batch
from maxtext_like.checkpoint.huggingface.model_file import load_checkpoint_config
from maxtext_like.layers.cache import Step
from maxtext_like.layers.decoder import Decoder
from tests.models.test_golden import GOLDEN, QUICK, TOLERANCE, Case, rms
from tests.tiers import tiers

CASES = sorted(path.parent.name for path in GOLDEN.glob("*/outputs.npz"))
SHORTER = 3  # the second row's prompt is shorter by this many tokens, which padding follows
DECODED = 9  # tokens decoded one by one, more than the smallest window if the images leave that many
# The other models use the same caches in other ways; test_engine.py runs tiny models of them.
QUICK_CASES = ("gemma3_vision",)


def decode(name: str, *words: str) -> tuple[Any, np.ndarray, np.ndarray]:
  """Returns the case; the positions [B, N] of the logits; the logits from caches, first those of the prompts' last tokens."""
  case = Case(name)
  vision = ["use_multimodal=true"] if "pixel_values" in case.inputs else []
  directory = GOLDEN / name / "checkpoint"
  config, loaded = load_checkpoint_config(directory, [*vision, *words], length=case.inputs["input_ids"].shape[1])
  batch = make_batch(case.inputs, name, vocab_size=loaded.config.model.vocab_size, vision=loaded.config.vision).batch
  tokens = batch["tokens"]
  B, S = tokens.shape
  weights = open_weights(directory, config, loaded)
  last = int(np.flatnonzero(batch["token_types"].any(axis=0))[-1]) if "token_types" in batch else 0
  decoded = min(DECODED, S - 1 - last - SHORTER)  # the images are in the prompts
  assert decoded >= 3
  T = S - decoded
  lengths = T - SHORTER * np.arange(B, dtype=np.int32)

  def right(array: np.ndarray) -> np.ndarray:
    return np.stack([np.pad(row[:length], (0, T - length)) for row, length in zip(array, lengths, strict=True)])

  prompt = {"tokens": right(tokens), "positions": right(np.broadcast_to(np.arange(S, dtype=np.int32), (B, S)))}
  prompt |= {key: batch[key] for key in IMAGE_INPUTS if key in batch}
  if "token_types" in batch:
    prompt["token_types"] = right(batch["token_types"])
  at = lengths[:, None] + np.arange(decoded)
  following = np.take_along_axis(tokens, at, axis=1)
  program = jax.jit(run, static_argnums=0, compiler_options=QUICK)
  logits = program(weights.decoder, weights.load(), prompt, following, lengths)
  return case, np.concatenate([lengths[:, None] - 1, at], axis=1), np.asarray(logits, np.float32)


def run(decoder: Decoder, params, prompt, following, lengths):
  """Returns logits [B, 1 + N, V] of the prompts' last tokens and of the N tokens after them."""
  (B, T), N = prompt["tokens"].shape, following.shape[1]
  step = Step(jnp.zeros(B, jnp.int32), lengths, fresh=True)
  x, cache, _ = decoder.extend(params, prompt, decoder.empty_cache(B, T + N), step)
  last = jnp.take_along_axis(x, lengths[:, None, None] - 1, axis=1)

  def one(cache, item):
    token, begin = item
    batch = {"tokens": token[:, None], "positions": begin[:, None]}
    x, cache, _ = decoder.extend(params, batch, cache, Step(begin, jnp.ones(B, jnp.int32)))
    return cache, x[:, 0]

  _, after = jax.lax.scan(one, cache, (following.T, lengths + jnp.arange(N)[:, None]))
  return decoder.head(params, jnp.concatenate([last, after.swapaxes(0, 1)], axis=1))


SLOW_CASES = ("gemma3_text", "gemma4_e2b", "gemma4_moe", "gemma4_vision_small", "deepseek32", "qwen3_moe")


@pytest.mark.parametrize("name", tiers(CASES, quick=QUICK_CASES, slow=SLOW_CASES))
def test_logits_from_caches_are_those_of_the_whole_pass(name: str):
  case, at, logits = decode(name, "dtype=float32")
  want = np.take_along_axis(case.expected["fp32.base.logits"], at[..., None], axis=1)
  np.testing.assert_allclose(logits, want, rtol=0, atol=TOLERANCE)


IN_FLOAT16 = ("gemma3_text", "gemma4_e2b", "stress_fp16_mlp", "stress_fp16_vision")
"""Models without experts, because rounding may change the choice of experts: plain caches, shared caches, planted hazards."""


@pytest.mark.parametrize("name", IN_FLOAT16)
@pytest.mark.slow
def test_in_float16_caches_lose_no_more_than_transformers_does(name: str):
  """rms(ours - float32) <= 1.5 * rms(transformers' - float32); if transformers overflows, ours is finite and close."""
  case, at, logits = decode(name, "dtype=float16", "weight_dtype=float16")
  exact, theirs = (np.take_along_axis(case.expected[f"{d}.base.logits"], at[..., None], axis=1) for d in ("fp32", "fp16"))
  assert np.isfinite(logits).all()
  if np.isnan(theirs).any():
    np.testing.assert_allclose(logits, exact, rtol=0, atol=3e-2)
  else:
    assert rms(logits - exact) <= 1.5 * rms(theirs - exact)
