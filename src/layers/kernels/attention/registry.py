"""The attention kernels: the cases that each supports, and the choice between them.

A kernel is a module of this folder with a ``KERNEL``. The module has the name of the kernel in the configuration. A kernel is
used only for cases whose mask and precision flags it supports. If the configuration names a kernel that does not support the
case, it is an error. The self-test, the audit and the banner of a run read this registry. This module imports no JAX, so that
the configuration can read it too.

B batch, T query, S key, N query heads, K key-value heads, H head, V value head.
"""

import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, get_args

from maxtext_like.layers.kernels.names import Attention as Name
from maxtext_like.layers.kernels.names import AttentionChoice as Choice

if TYPE_CHECKING:
  import jax

  from maxtext_like.layers.attention.masks import Tokens
  from maxtext_like.layers.precision import Precision
  from maxtext_like.layers.sharding_rules import Rules

NAMES: tuple[Name, ...] = get_args(Name)
"""Kernels in the order in which "auto" prefers them."""

PLATFORMS: dict[str, tuple[str, ...]] = {"splash": ("tpu",), "cudnn_flash": ("gpu", "cuda"), "mosaic_flash": ("gpu", "cuda")}
"""Platforms of the kernels that run on some only. "auto" does not import kernels of other platforms."""

PLAIN: tuple[Name, ...] = ("blockwise", "dot_product")
"""Kernels in plain XLA: the reference, and the same computation in tiles of queries for rows longer than a tile."""


@dataclass(frozen=True, kw_only=True)
class Case:
  """The properties of an attention layer that decide whether a kernel supports it.

  Attributes:
    platform: "cpu", "gpu" (or "cuda") or "tpu": where the program will run.
    precision: precision of the layer; its ``dtype`` is that of q, k and v.
    query_heads, kv_heads: N and K.
    head_dim, value_dim: H and V.
    window: number of keys a query sees, including itself; None: all earlier keys.
    causal: queries do not see later keys. False: they see all keys of their row, as the patches of an image do.
    length: positions of a row, T = S.
    context: devices that the positions of a row are split over.
    bidirectional_images: tokens of one image see each other in both directions.
    documents: a row may contain several documents, which do not see each other.
    probabilities: the layer reads the probabilities, so they must be returned as an array.
    soft_cap: scores become cap * tanh(scores / cap) before the mask; None: no cap.
    capability: CUDA compute capability of the device. None: not an NVIDIA GPU, or not known; kernels then assume the one that
      they need.
  """

  platform: str
  precision: "Precision"
  query_heads: int
  kv_heads: int
  head_dim: int
  value_dim: int
  length: int
  context: int = 1
  window: int | None = None
  causal: bool = True
  bidirectional_images: bool = False
  documents: bool = False
  probabilities: bool = False
  soft_cap: float | None = None
  capability: str | None = None

  @property
  def dtype(self) -> str:
    """The dtype of q, k and v."""
    return self.precision.dtype


@dataclass(frozen=True, kw_only=True, eq=False)
class AttentionKernel:
  """One implementation of attention.

  Attributes:
    name: its name in the configuration.
    refuses: returns the reasons why it does not support a case; an empty list if it does.
    run: (q [B, T, N, H], k [B, S, K, H], v [B, S, K, V], tokens, *, window, bidirectional_images, scale, precision,
      rules) -> [B, T, N, V] in ``dtype``; zeros for a query that sees no key. It receives ``causal=False`` and ``soft_cap``
      only for cases that it supports. A kernel that is not fused also accepts ``keys`` (``masks.Keys``), if the keys are at
      other positions than the queries.
    fused: the kernel is a compiled binary that always computes scores, softmax and accumulators in float32 (see
      ``guarantee``). It must pass a self-test on the device before a run uses it.
    slow: returns True for cases that it supports but computes slowly. "auto" then prefers another fused kernel that is not
      slow.
    named: the kernel gives the checkpoint name "attention" to all residuals of its backward pass. For other kernels only the
      result gets this name.
    in_parts: a variant of ``run`` for the self-test of a kernel that splits large arguments into parts. It splits a few hundred
      positions into several parts. None: the kernel does not split its arguments.
    guarantee: for a fused kernel: the dtypes that it always uses, from its source or manual (they are not visible in a
      program's text).
    title: name of a fused kernel in tables.
    scope: ``jax.named_scope`` in which a fused kernel runs.
    operation: for a fused kernel: (target of a custom call, scopes along its path) -> name of the operation, or None for any
      other custom call. It finds the kernel in a program's text.
    products: for a fused kernel: number of matrix products of an operation, by its name. Half of them, rounded down, are as
      wide as values, the others as keys.
  """

  name: Name
  refuses: Callable[[Case], list[str]]
  run: Callable[..., Any]
  fused: bool = False
  slow: Callable[[Case], bool] = lambda case: False
  named: bool = False
  in_parts: Callable[..., Any] | None = None
  guarantee: str = "float32 scores, softmax and accumulators inside the kernel"
  title: str = ""
  scope: str = ""
  operation: Callable[[str, tuple[str, ...]], str | None] = lambda target, scopes: None
  products: Callable[[str], int] = lambda operation: 0

  def surpasses(self, case: Case) -> list[str]:
    """Return the precision keys that are false but have no effect, because the kernel always computes in float32."""
    # Plain XLA follows the flags, and with float32 they change nothing.
    if not self.fused or case.dtype == "float32":
      return []
    return [key for key in ("float32_qk_product", "float32_logits") if not getattr(case.precision, key)]


def whole_rows(case: Case) -> list[str]:
  """Return the reasons why a kernel that needs as many queries as keys does not support a case; an empty list if it does."""
  size = case.length // case.context
  if case.context > 1 and (case.window is None or -(-(case.window - 1) // 128) * 128 > size):
    seen = "all earlier keys" if case.window is None else f"{case.window} keys"
    return [f"rows are split over {case.context} devices (context), {size} positions each, and a query sees {seen}"]
  return []


def kernel(name: Name) -> AttentionKernel:
  """Return the kernel with this name. Imports its module."""
  return importlib.import_module(f"{__package__}.{name}").KERNEL


def fused_kernels() -> list[AttentionKernel]:
  """Return the fused kernels."""
  return [found for found in map(kernel, NAMES) if found.fused]


def choose(choice: Choice, case: Case, without: Sequence[Name] = ()) -> AttentionKernel:
  """Return the kernel to run.

  Args:
    choice: the kernel that the configuration selects.
    case: the layer.
    without: kernels that "auto" must not choose.

  Raises:
    ValueError: the configuration names a kernel that does not support the case.
  """
  if choice in ("auto", "dot_product"):
    # Choose the first kernel that supports the case. Slow fused kernels come after fast ones, and plain XLA last.
    names: Sequence[Name] = (
      [name for name in NAMES if case.platform in PLATFORMS.get(name, (case.platform,))] if choice == "auto" else PLAIN
    )
    able = [found for found in (kernel(name) for name in names if name not in without) if not found.refuses(case)]
    return min(able, key=lambda found: (not found.fused, found.slow(case)))
  asked = kernel(choice)
  if reasons := asked.refuses(case):
    raise ValueError(
      f"attention={choice} cannot be used here: {'; '.join(reasons)}\n  fix: attention=auto or attention=dot_product"
    )
  return asked


def attend(
  name: Name,
  q_BTNH: "jax.Array",
  k_BSKH: "jax.Array",
  v_BSKV: "jax.Array",
  tokens: "Tokens",
  *,
  window: int | None,
  bidirectional_images: bool,
  scale: float,
  precision: "Precision",
  rules: "Rules | None" = None,
  causal: bool = True,
  soft_cap: float | None = None,
) -> "jax.Array":
  """Compute self-attention of rows with the kernel that ``choose`` returned.

  Args:
    name: name of the kernel.
    q_BTNH, k_BSKH, v_BSKV: queries, keys and values, T = S; query head n reads key-value head n // (N / K).
    tokens: segments and images. Causal rows that are known to be one document get no document mask, which would double the time
      of a fused kernel.
    window: number of keys a query sees, including itself; None: all earlier keys.
    bidirectional_images: tokens of one image see each other.
    scale: factor on the scores.
    precision: selects the dtypes.
    rules: sharding of the batch on the current mesh; None: ``rules.RULES``.
    causal: queries do not see later keys. False: queries see their complete document, and ``window`` is None.
    soft_cap: the scaled, unmasked scores become cap * tanh(scores / cap); None: no cap.

  Returns:
    [B, T, N, V] in ``dtype``; zeros for padding. In causal rows that are known to be one document, padding attends to the
    tokens before it. The block sets these positions to zero, where this costs nothing (``Tokens.real``).
  """
  from maxtext_like.layers.attention.masks import Tokens
  from maxtext_like.layers.sharding_rules import RULES

  rules = rules or RULES
  # Shared keys and values may come from a layer with another dtype.
  # All kernels need operands of one dtype.
  q_BTNH, k_BSKH, v_BSKV = map(precision.cast, (q_BTNH, k_BSKH, v_BSKV))
  # Build the arguments. Pass soft_cap and causal only if they are set, because not every kernel accepts them.
  how = {"window": window, "bidirectional_images": bidirectional_images, "scale": scale, "precision": precision}
  if soft_cap is not None:
    how["soft_cap"] = soft_cap
  if not causal:
    assert window is None
    assert not bidirectional_images
    how["causal"] = False
  elif tokens.one_document and tokens.segments is not None:
    tokens = Tokens(None, tokens.images)
  # Run the kernel on rows that are split over devices, or on complete rows with batch and heads split.
  if causal and rules.row_parts(q_BTNH.shape[1]) > 1:
    from maxtext_like.layers.attention import context_parallel

    return context_parallel.attend(kernel(name), q_BTNH, k_BSKH, v_BSKV, tokens, rules=rules, **how)
  positions = "sequence" if causal else None  # non-causal rows are never split
  own = ("batch", positions, "heads")
  of_kv = own if k_BSKH.shape[2] == q_BTNH.shape[2] else ("batch", positions, "kv_heads")
  q, k, v = rules.share(q_BTNH, *own), rules.share(k_BSKH, *of_kv), rules.share(v_BSKV, *of_kv)
  return rules.share(kernel(name).run(q, k, v, tokens, rules=rules, **how), *own)
