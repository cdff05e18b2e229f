"""Tests rows that are split over devices: outputs, losses and gradients equal those of one device. Queries stay on their
device, keys are sent to the others."""

import dataclasses
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from equations import named

from maxtext_like.layers.attention.masks import Tokens
from maxtext_like.layers.kernels.attention.registry import Case, attend, choose
from maxtext_like.layers.param import init
from maxtext_like.layers.precision import Precision
from maxtext_like.layers.sharding_rules import RULES
from maxtext_like.training.objectives.language_modeling import LanguageModeling
from tests.layers import eight_devices
from tests.layers.conftest import _tiny_decoder

B, T = 4, 40


def rows(images: bool = False, packed: bool = True) -> dict:
  """Return a batch. Some documents end inside the part of one device, others extend over several parts. There is padding, and
  images cross the border between parts."""
  rng = np.random.default_rng(5)
  tokens = rng.integers(0, 37, (B, T))
  lengths = [(3, 24, 13), (40,), (1, 15, 14), (9, 21)] if packed else [(T,)] * B
  segments, positions = np.zeros((B, T), int), np.zeros((B, T), int)
  for row, documents in enumerate(lengths):
    at = 0
    for number, length in enumerate(documents, 1):
      segments[row, at : at + length], positions[row, at : at + length] = number, np.arange(length)
      at += length
  targets = np.where((segments == np.roll(segments, -1, 1)) & (segments > 0), np.roll(tokens, -1, 1), -100)
  targets[:, -1] = -100
  found = {"tokens": tokens, "segments": segments, "positions": positions, "targets": targets}
  if images:
    types = np.zeros((B, T), int)
    types[1, 3:7], types[1, 9:33], types[2, 2:15] = 1, 1, 1
    found["token_types"] = types
  return {name: jnp.asarray(a, jnp.int32) for name, a in found.items()}


def agree(function, mesh, p, spec, batch, tolerance) -> str:
  """Compare the values and gradients of a function on a mesh with those on one device. Return the text of the program on the
  mesh.

  Args:
    function: maps (p, batch) to (loss, other results by name).
    mesh: the mesh.
    p: parameters.
    spec: spec of the parameters.
    batch: the batch.
    tolerance: largest relative difference.
  """
  step = jax.jit(jax.value_and_grad(function, has_aux=True))
  (loss, seen), gradients = step(p, batch)
  with jax.set_mesh(mesh):
    on_mesh = eight_devices.placed(spec, p, mesh, RULES), eight_devices.spread(batch, mesh, RULES, "batch", "sequence")
    compiled = step.lower(*on_mesh).compile()
    (loss_there, seen_there), gradients_there = compiled(*on_mesh)
  pairs = [(loss_there, loss), (gradients_there, gradients), *((seen_there[name], seen[name]) for name in seen)]
  found = max(eight_devices.worst(there, here) for there, here in pairs)
  assert found < tolerance, (dict(mesh.shape), found)
  return compiled.as_text() or ""


def compare(family, batch, changes=None, tolerance=2e-5, chunks=1, **sizes) -> str:
  """Compare a complete decoder and its loss. Return the text of the program on the mesh."""
  decoder = _tiny_decoder(family, changes=changes)
  objective, spec = LanguageModeling(decoder, chunks=chunks), decoder.params()
  # Use the initial values of a training run. Larger weights would amplify rounding errors, which depend on the order of sums.
  p = init(spec, jax.random.key(0))

  def loss(p, batch):
    total, weight, aux = objective(p, batch)
    seen = {name: aux[name] for name in ("moe_load", "clamped") if name in aux}
    return total / weight + sum(aux["means"].values()), seen

  return agree(loss, eight_devices.mesh_of(**sizes), p, spec, batch, tolerance)


def stays_split(text: str, parts: int) -> None:
  """Check that no device has scores or a mask of all queries and all keys."""
  # Scores are [B, K, G, T, S]. In arrays with fewer axes, an axis of size T may have another meaning, such as the part of
  # several heads.
  whole = [line for line in text.splitlines() if re.search(rf"pred\[(\d+,)*{T},{T}\]|\[(\d+,){{3,}}{T},{T}\]", line)]
  assert not whole, "\n".join(whole[:5])
  assert re.search(rf"pred\[(\d+,)*{T // parts},{T}\]", text)  # the mask of a global layer


def quick():
  # The windows reach over several parts.
  text = compare("gemma3", rows(), {"num_decoder_layers": 2, "sliding_window_size": 14}, 3e-5, chunks=2, context=4)
  stays_split(text, 4)
  assert re.search(r" collective-permute(-start)?\(", text)
  text = compare("deepseek3.2", rows(), context=2, tensor=2)
  stays_split(text, 2)
  # Latents are gathered, not the heads that are computed from them.
  assert not re.search(rf"\[(\d+,)*{T},4,8\]\S* all-gather", text)


def every():
  # Later layers reuse keys and values. The tolerance is larger because the norm of the per-layer input amplifies rounding
  # errors. It does so even on a mesh that splits only the batch.
  small = {"num_decoder_layers": 4, "num_kv_shared_layers": 2, "hidden_size_per_layer_input": 64, "sliding_window_size": 14}
  stays_split(compare("gemma4-e2b", rows(), small, 3e-5, chunks=2, context=4), 4)
  stays_split(compare("gemma3", rows(), {"sliding_window_size": 4}, context=8), 8)
  stays_split(compare("gemma3", rows(images=True), {"attn_logits_soft_cap": 0.7}, context=4), 4)
  stays_split(compare("gemma4", rows(packed=False), context=2, tensor=2, chunks=3), 2)
  stays_split(compare("gemma4-moe", rows(), {"num_experts": 6}, context=2, expert=2, tensor=2), 2)
  stays_split(compare("deepseek3.2", rows(packed=False), context=4, fsdp=2), 4)
  tiles()


def tiles():
  """Compare rows that are long enough for several tiles on every device."""
  rng, length = np.random.default_rng(1), 2080
  q, k, v = (jnp.asarray(rng.normal(size=(1, length, heads, 4)), jnp.float32) for heads in (4, 2, 2))
  segments = jnp.asarray(np.repeat([1, 2, 3, 0], [100, 1000, 900, 80])[None], jnp.int32)
  for window, cap in ((None, None), (300, None), (1100, 1.5)):
    how: Any = {"window": window, "bidirectional_images": False, "scale": 0.5, "precision": Precision(dtype="float32")}
    how["soft_cap"] = cap

    def loss(arrays, batch, how: Any = how):
      q, k, v = arrays
      reference = attend("dot_product", q, k, v, Tokens(batch), **how) * (batch > 0)[..., None, None]
      here = attend("blockwise", q, k, v, Tokens(batch), **how)
      return jnp.sum(here * jnp.cos(jnp.arange(here.size).reshape(here.shape))), {"same": here - reference, "out": here}

    step = jax.jit(jax.value_and_grad(loss, has_aux=True))
    (_, seen), expected = step((q, k, v), segments)
    with jax.set_mesh(eight_devices.mesh_of(context=2, tensor=2)) as _:
      (_, there), found = step((q, k, v), segments)
    assert np.abs(there["same"]).max() < 1e-5
    assert eight_devices.worst((there["out"], found), (seen["out"], expected)) < 1e-5


@pytest.mark.slow
def test_queries_stay_keys_travel_and_nothing_changes():
  eight_devices.run("attention.test_context_parallel", "quick")


@pytest.mark.nightly
def test_every_family_and_mixed_meshes():
  eight_devices.run("attention.test_context_parallel", "every")


def test_fused_kernels_do_the_windows_that_a_neighbor_s_keys_fill():
  """If rows are split over devices, a fused kernel needs a window that is no longer than the part of one device. The keys of
  one neighbor then suffice."""
  case = Case(
    platform="gpu", precision=Precision(), query_heads=4, kv_heads=2, head_dim=128, value_dim=128, length=4096, context=4
  )
  with pytest.raises(ValueError, match=r"split over 4 devices \(context\), 1024 positions each, .*all earlier keys"):
    choose("cudnn_flash", case)
  assert choose("auto", case).name == "blockwise"
  assert choose("auto", dataclasses.replace(case, window=1024)).name == "cudnn_flash"
  assert choose("auto", dataclasses.replace(case, window=1200)).name == "blockwise"


def test_tiles_hand_nothing_empty_to_the_devices():
  """The GPU compiler of jaxlib 0.11.2 crashes if shard_map has an empty argument. Each device must also keep only a few arrays
  of a layer for the backward pass, not some for each tile."""
  q, k = (jax.ShapeDtypeStruct((2, 4096, heads, 8), jnp.bfloat16) for heads in (4, 2))
  how: Any = {"window": None, "bidirectional_images": False, "scale": 0.5, "precision": Precision()}

  def loss(q, k, v, segments):
    run = jax.checkpoint(lambda q, k, v: attend("blockwise", q, k, v, Tokens(segments), **how))
    return run(q, k, v).astype(jnp.float32).sum()

  mesh = jax.sharding.AbstractMesh((2,), ("context",), axis_types=(jax.sharding.AxisType.Auto,))
  with jax.sharding.use_abstract_mesh(mesh):
    arguments = (q, k, k, jax.ShapeDtypeStruct((2, 4096), jnp.int32))
    found = named(jax.grad(loss, (0, 1, 2)), *arguments, name="shard_map")
  assert len(found) == 3  # the forward pass, its recomputation for the backward pass, and the backward pass
  for equation in found:
    assert all(v.aval.size for v in equation.invars)
    assert len(equation.invars) < 12
