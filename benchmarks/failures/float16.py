"""float16: the gated MLP, the residual stream in the backward pass, the vision pooler.

B batch, T position, D model, F hidden.
"""

from typing import Any

import jax
import jax.numpy as jnp

from maxtext_like.layers.context import Context
from maxtext_like.layers.mlp import MLP, MLPConfig
from maxtext_like.layers.norms import NormConfig, RMSNorm
from maxtext_like.layers.precision import Precision
from maxtext_like.layers.vision.gemma4 import Gemma4Vision, Gemma4VisionConfig
from maxtext_like.numerics.xray import xray

from .row import Row, drawn, finite_share, normal

D, F = 64, 96
HALF, FULL = Precision(dtype="float16"), Precision(dtype="float32", matmul_precision="highest")


def _mlp_weights(size: float) -> Any:
  """Weights that make gate and up as large as those of Gemma 4's first layers."""
  params = drawn(MLP(MLPConfig(emb_dim=D, mlp_dim=F), FULL).params())
  return params | {"gate": params["gate"] * size, "up": params["up"] * size}


def plain_mlp(p: Any, x: jax.Array) -> dict[str, jax.Array]:
  """Runs a gated MLP entirely in float16, like a model loaded in float16. Returns the output of every module."""
  half = jax.tree.map(lambda w: w.astype(jnp.float16), p)
  x = x.astype(jnp.float16)
  gate, up = x @ half["gate"], x @ half["up"]
  return {"gate_proj": gate, "up_proj": up, "down_proj": (jax.nn.gelu(gate) * up) @ half["down"]}


def mlp_saturation() -> Row:
  """unsloth-zoo #600: act(gate) * up overflows float16; the first module with a bad output is layers.0.mlp.down_proj."""
  p = _mlp_weights(600.0)
  x = jnp.asarray(normal(9, 2, 7, D))
  outputs = jax.jit(plain_mlp)(p, x)
  bad = [name for name, out in outputs.items() if finite_share(out) < 1]
  cause = xray(plain_mlp)(p, x).first_cause
  assert cause is not None
  cfg = MLPConfig(emb_dim=D, mlp_dim=F)

  def counted(p, x):
    ctx = Context.of(x).collecting()
    return MLP(cfg, HALF)(p, x, ctx), ctx.aux["clamped"]

  mine, clamped = jax.jit(counted)(p, x)
  exact = jax.jit(MLP(cfg, FULL).standalone)(p, x)
  error = float(jnp.max(jnp.abs(mine - exact)) / jnp.max(jnp.abs(exact)))
  numbers = {"bad_is_down": float(bad == ["down_proj"]), "cause_is_product": float(cause.op == "mul")}
  numbers |= {"error": error, "finite": finite_share(mine), "clamped": float(clamped)}
  theirs = f"first bad module layers.0.mlp.{bad[0] if bad else '-'}; x-ray: {cause.op}, {cause.explanation}"
  ours = f"finite, {error:.1e} from float32, {int(clamped)} clamped"
  return Row("float16 MLP saturates (Gemma 4, unsloth-zoo #600)", theirs, ours, numbers)


def _residual_loss(norm, mlp, residual: str):
  """Returns the loss of two blocks x + norm(mlp(norm(x))) on embedding rows, times a loss scale."""

  def loss(p, rows, loss_scale):
    x = rows.astype(residual)
    for _ in range(2):
      x = x + norm(p["post"], mlp(p["mlp"], norm(p["pre"], x, None)), residual).astype(residual)
    return jnp.sum(jnp.square(norm(p["pre"], x, "float32"))) * loss_scale / rows.shape[1]

  return loss


def _plain_norm(p, x, dtype):
  x = x.astype(jnp.float32)
  return (x * jax.lax.rsqrt(jnp.mean(jnp.square(x), -1, keepdims=True) + 1e-6) * p["scale"]).astype(dtype or "float16")


def residual_backward() -> Row:
  """unsloth-zoo #866: the forward pass stays in range, but the gradient of a float16 residual stream overflows.

  A norm's derivative is one over the size of its input, so the gradient is large if the embedding is small. A loss scale that
  lifts other gradients out of float16's subnormal numbers then takes it beyond 65504.
  """
  cfg, norm_cfg = MLPConfig(emb_dim=D, mlp_dim=F), NormConfig(dim=D)
  p = {"pre": {"scale": jnp.ones(D)}, "post": {"scale": jnp.full(D, 1e-3)}, "mlp": _mlp_weights(1.0)}
  rows = jnp.asarray(normal(3, 2, 7, D, size=2e-3))

  def gradient(norm, mlp, residual: str):
    return jax.jit(jax.value_and_grad(_residual_loss(norm, mlp, residual), argnums=1))

  plain = gradient(_plain_norm, lambda p, x: plain_mlp(p, x)["down_proj"], "float16")
  ours = gradient(RMSNorm(norm_cfg, HALF), MLP(cfg, HALF).standalone, HALF.residual)
  exact = gradient(RMSNorm(norm_cfg, FULL), MLP(cfg, FULL).standalone, "float32")(p, rows, 1.0)[1]
  scale = 2.0**15
  (value, theirs), (_, mine) = plain(p, rows, scale), ours(p, rows, scale)
  largest = max(k for k in range(16) if finite_share(plain(p, rows, 2.0**k)[1]) == 1)
  error = float(jnp.max(jnp.abs(mine / scale - exact)) / jnp.max(jnp.abs(exact)))
  numbers = {"loss": float(value), "their_finite": finite_share(theirs), "our_finite": finite_share(mine), "error": error}
  return Row(
    "float16 residual stream overflows backward (Gemma 4, #866)",
    f"loss scale 2^15: loss finite, {1 - numbers['their_finite']:.0%} of the gradient not; up to 2^{largest} all is finite",
    f"residual_dtype float32: all finite, {error:.1e} from float32",
    numbers | {"largest": float(largest)},
  )


def vision_pooler() -> Row:
  """Gemma 4's pooler multiplies by sqrt(Dv) = 34 before it subtracts a bias of 5e4 (transformers before 5.10.1)."""
  width = 1152
  cfg = Gemma4VisionConfig(
    patch_size=1, emb_dim=width, mlp_dim=1, num_layers=1, num_heads=1, head_dim=4, position_table_size=1, output_dim=1,
    standardize=True,
  )  # fmt: skip
  pooled = 2300 + 2 * jnp.asarray(normal(4, 1, 4, width))
  p = {"std_bias": jnp.full(width, 2300 * width**0.5), "std_scale": jnp.full(width, 0.01)}
  shifted = (pooled.astype(jnp.float16) * width**0.5) - p["std_bias"].astype(jnp.float16)
  mine, _ = Gemma4Vision(cfg, HALF)._standardize(p, pooled)
  exact = (pooled * width**0.5 - p["std_bias"]) * p["std_scale"]
  error = float(jnp.max(jnp.abs(mine - exact)))
  numbers = {"their_finite": finite_share(shifted), "our_finite": finite_share(mine), "error": error}
  return Row(
    "float16 vision pooler, sqrt(Dv) * 2300 (Gemma 4)",
    f"{1 - numbers['their_finite']:.0%} not finite",
    f"float32_vision_pool: finite, {error:.1e} from float32",
    numbers,
  )


ROWS = (mlp_saturation, residual_backward, vision_pooler)
