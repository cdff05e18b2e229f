"""Tests attention in the vision tower with every kernel: patches see all patches of their image and no padding."""

import dataclasses
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from written_out import attention

from maxtext_like.config.load import load_config
from maxtext_like.layers.attention.masks import Tokens
from maxtext_like.layers.kernels.attention import registry
from maxtext_like.layers.kernels.attention.splash import splash_attention
from maxtext_like.layers.precision import Precision
from maxtext_like.layers.sharding_rules import RULES
from maxtext_like.layers.vision import attention as vision_attention
from maxtext_like.layers.vision.attention import attend_patches, case_of
from maxtext_like.layers.vision.gemma3 import SiglipConfig
from maxtext_like.models.build import build_decoder
from tests.layers import eight_devices
from tests.layers.conftest import _random_params
from tests.tiers import tiers

EXACT = Precision(dtype="float32", matmul_precision="highest")
TOWER = SiglipConfig(
  image_size=24, patch_size=8, emb_dim=144, mlp_dim=16, num_layers=1, num_heads=2, tokens_per_image=9, output_dim=4
)
SCALE = 0.3


def both_ways(attend, P, padded) -> list[np.ndarray]:
  """Return values and gradients of two images. The first image has padding between its patches and at the end."""
  rng = np.random.default_rng(0)
  q, k, v, g = (rng.normal(size=(2, P, 2, 72)) for _ in range(4))
  real = np.ones((2, P), np.int32)
  real[0, 7], real[0, -9:] = 0, 0
  given = jnp.asarray(real) if padded else None
  out, backward = jax.vjp(lambda q, k, v: attend(q, k, v, given), *(jnp.asarray(x, jnp.float32) for x in (q, k, v)))
  seen = np.broadcast_to(real[:, None] > 0 if padded else np.True_, (2, P, P)) & (real[:, :, None] > 0 if padded else True)
  expected, _ = attention(q, k, v, seen, SCALE)
  np.testing.assert_allclose(out, expected, atol=2e-5)
  return [np.asarray(x) for x in (out, *backward(jnp.asarray(g, jnp.float32)))]


def plain(q, k, v, real):
  return attend_patches(dataclasses.replace(TOWER, kernel="dot_product"), EXACT, RULES, q, k, v, real, scale=SCALE)


@pytest.mark.parametrize(  # 520 patches are two tiles in blockwise and five in splash, and the last tile is not full
  ("P", "padded"),
  [(100, False), (520, True), (100, True), (520, False)],
)
@pytest.mark.slow
def test_every_kernel_gives_values_and_gradients_of_attention_written_out(P, padded, monkeypatch):
  def of(name):
    monkeypatch.setattr(vision_attention, "choose", lambda choice, case, without: registry.kernel(name))
    return both_ways(plain, P, padded)

  def in_interpreter(q, k, v, real):
    return splash_attention(q, k, v, Tokens(real), window=None, scale=SCALE, causal=False, interpret=True)

  whole = jax.nn.dot_product_attention

  def in_the_place_of_cudnn(q, k, v, *, implementation, **how):
    assert (implementation, how["is_causal"], q.shape[1] % 128) == ("cudnn", False, 0)
    return whole(q, k, v, implementation="xla", **how)

  wanted = of("dot_product")
  found = {"blockwise": of("blockwise"), "splash": both_ways(in_interpreter, P, padded)}
  monkeypatch.setattr(jax.nn, "dot_product_attention", in_the_place_of_cudnn)
  found["cudnn_flash"] = of("cudnn_flash")
  for name, arrays in found.items():
    for want, got in zip(wanted, arrays, strict=True):
      np.testing.assert_allclose(got, want, atol=2e-5, err_msg=name)
  if padded:
    assert all(not x[0, [7, -1]].any() for x in wanted)


@pytest.mark.parametrize(
  ("platform", "capability", "dtype", "patches", "head", "name"),
  [
    ("gpu", "9.0", "bfloat16", 2520, 72, "cudnn_flash"),
    ("gpu", "8.0", "float16", 4096, 64, "cudnn_flash"),
    ("gpu", "9.0", "float32", 4096, 72, "blockwise"),
    ("tpu", None, "bfloat16", 2520, 72, "splash"),
    ("tpu", None, "float16", 4096, 72, "blockwise"),
    ("cpu", None, "bfloat16", 4096, 72, "blockwise"),
    ("tpu", None, "bfloat16", 64, 12, "dot_product"),
    ("gpu", "9.0", "bfloat16", 4096, 256, "cudnn_flash"),
    ("gpu", "9.0", "bfloat16", 4096, 512, "blockwise"),
  ],
)
def test_the_fast_kernel_is_taken_where_it_honors_everything(platform, capability, dtype, patches, head, name):
  tower = dataclasses.replace(TOWER, platform=platform, capability=capability, emb_dim=2 * head)
  case = case_of(tower, Precision(dtype=dtype), patches)
  assert registry.choose("auto", case).name == name
  assert registry.choose("dot_product", case).name in registry.PLAIN


def test_a_kernel_that_is_named_is_the_layers_alone():
  """A named kernel applies only to the layers of the decoder, because the heads of the tower differ. Plain XLA applies to
  both."""

  def tower(attention: Any) -> Any:
    config = load_config("gemma3-tiny", ["use_multimodal=true"]).config
    return build_decoder(config.model, EXACT, vision=config.vision, attention=attention, platform="gpu").cfg.vision

  kernels = {name: tower(name).kernel for name in ("auto", "cudnn_flash", "splash", "dot_product", "blockwise")}
  assert kernels == {
    "auto": "auto", "cudnn_flash": "auto", "splash": "auto", "dot_product": "dot_product", "blockwise": "dot_product",
  }  # fmt: skip
  assert tower("auto").platform == "gpu"


def images_on_eight_devices(*names):
  """Check that each device computes the images of its rows, forward and backward, and that no device has an array of all
  images."""
  words = ["use_multimodal=true", "max_images_per_row=2", "num_decoder_layers=1", "inhomogeneous_layer_cycle_interval=1"]
  for name in names:
    config = load_config(name, words).config
    decoder = build_decoder(config.model, EXACT, vision=config.vision, remat_policy="full")
    p, rng = _random_params(decoder.params()), np.random.default_rng(0)
    tokens = rng.integers(5, 90, (8, 40)).astype(np.int32)
    of_image = config.vision.vision_output_length
    tokens[:, 2 : 2 + of_image] = tokens[:, 20 : 20 + of_image] = config.vision.image_token_id or 0
    shapes = config.vision.image_shapes()
    batch = {"tokens": tokens, "pixel_values": rng.normal(size=(8, 2, *shapes["pixel_values"])).astype(np.float32)}
    if "image_position_ids" in shapes:
      side = int(config.vision.patches**0.5)
      grid = np.stack(np.meshgrid(np.arange(side), np.arange(side)), -1).reshape(-1, 2).astype(np.int32)
      grid = np.pad(grid, ((0, config.vision.patches - len(grid)), (0, 0)), constant_values=-1)
      batch["image_position_ids"] = np.broadcast_to(grid, (8, 2, *grid.shape))
    step = jax.jit(jax.grad(lambda p, batch, decoder=decoder: jnp.sum(decoder(p, batch)[0] ** 2)))
    alone = step(p, batch)
    mesh = eight_devices.mesh_of(fsdp=8)
    with jax.set_mesh(mesh):
      given = eight_devices.placed(decoder.params(), p, mesh, RULES), eight_devices.spread(batch, mesh, RULES, "batch")
      compiled = step.lower(*given).compile()
      together = compiled(*given)
    found = eight_devices.worst(together, alone)
    assert found < 1e-4, (name, found)
    text, P = compiled.as_text() or "", config.vision.patches
    assert re.search(rf"f32\[2,{P},", text), name
    assert not (whole := re.findall(rf"f32\[(?:8,2|16),{P},.*", text)), (name, whole[:3])


@pytest.mark.parametrize("model", tiers(["gemma4-tiny", "gemma3-tiny"], slow=["gemma4-tiny"]))
def test_images_lie_on_the_devices_of_their_rows(model):
  eight_devices.run("vision.test_vision_attention", "images_on_eight_devices", model)
