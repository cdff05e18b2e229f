"""Attention in a vision tower: every patch of an image sees all patches of it, by the kernel that fits.

I images, P patches of one image (padding included), N heads, H head.
"""

from typing import ClassVar, Protocol

import jax
from jax.ad_checkpoint import checkpoint_name

from maxtext_like.layers.attention.masks import Tokens
from maxtext_like.layers.kernels.attention.registry import Case, Choice, Name, attend, choose
from maxtext_like.layers.precision import Precision
from maxtext_like.layers.sharding_rules import Rules


class TowerConfig(Protocol):
  """What the configuration of a tower says of its attention.

  Attributes:
    num_heads, head_dim: N, H.
    padded: images have padding among their patches.
    kernel: what the configuration asks for.
    platform: "cpu", "gpu" or "tpu", where the program will run.
    capability: CUDA's compute capability there; None: no NVIDIA GPU, or not known.
    failed: kernels that failed their self-test there.
  """

  padded: ClassVar[bool]

  @property
  def num_heads(self) -> int: ...
  @property
  def head_dim(self) -> int: ...
  @property
  def kernel(self) -> Choice: ...
  @property
  def platform(self) -> str: ...
  @property
  def capability(self) -> str | None: ...
  @property
  def failed(self) -> tuple[Name, ...]: ...


def case_of(cfg: TowerConfig, precision: Precision, patches: int) -> Case:
  """What a kernel has to do for images of so many patches."""
  return Case(
    platform=cfg.platform,
    capability=cfg.capability,
    precision=precision,
    query_heads=cfg.num_heads,
    kv_heads=cfg.num_heads,
    head_dim=cfg.head_dim,
    value_dim=cfg.head_dim,
    length=patches,
    causal=False,
  )


def attend_patches(
  cfg: TowerConfig,
  precision: Precision,
  rules: Rules,
  q_IPNH: jax.Array,
  k_IPNH: jax.Array,
  v_IPNH: jax.Array,
  real_IP: jax.Array | None,
  *,
  scale: float,
) -> jax.Array:
  """Full attention.

  Args:
    cfg: of the tower.
    precision: flags.
    rules: how images lie on the mesh in use, as rows do.
    q_IPNH, k_IPNH, v_IPNH: queries, keys, values.
    real_IP: int32, 1 for a patch and 0 for padding, which nothing sees; None: there is no padding.
    scale: multiplies the scores.

  Returns:
    [I, P, N, H] in ``dtype``; zeros for padding.
  """
  kernel = choose(cfg.kernel, case_of(cfg, precision, q_IPNH.shape[1]), cfg.failed)
  out_IPNH = attend(
    kernel.name,
    q_IPNH,
    k_IPNH,
    v_IPNH,
    Tokens(real_IP),
    window=None,
    bidirectional_images=False,
    scale=scale,
    precision=precision,
    rules=rules,
    causal=False,
  )
  return out_IPNH if kernel.named else checkpoint_name(out_IPNH, "attention")
