"""Attention of a vision tower: every patch of an image sees all patches of this image. A suitable kernel is chosen.

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
  """Attributes of a tower's configuration that its attention needs.

  Attributes:
    num_heads, head_dim: N, H.
    padded: images have padding among their patches.
    kernel: the kernel that the configuration selects.
    platform: "cpu", "gpu" or "tpu": where the program will run.
    capability: CUDA compute capability of that device; None if it is not an NVIDIA GPU or not known.
    failed: kernels that failed their self-test on that device.
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
  """Describe the computation that a kernel must support for images with this number of patches."""
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
  """Compute full attention within each image.

  Args:
    cfg: configuration of the tower.
    precision: selects the dtypes.
    rules: sharding of images on the current mesh, which is that of rows.
    q_IPNH, k_IPNH, v_IPNH: queries, keys, values.
    real_IP: int32, 1 for a patch and 0 for padding, which no patch sees; None: there is no padding.
    scale: factor on the scores.

  Returns:
    [I, P, N, H] in ``dtype``; zeros for padding.
  """
  # Choose the kernel for images of this size, and name its result for checkpoint policies.
  kernel = choose(cfg.kernel, case_of(cfg, precision, q_IPNH.shape[1]), cfg.failed)
  # The batch axis holds images, so the mesh splits images. Patches see all patches (causal=False).
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
  # A kernel that saves its own residuals has named its result already.
  return out_IPNH if kernel.named else checkpoint_name(out_IPNH, "attention")
