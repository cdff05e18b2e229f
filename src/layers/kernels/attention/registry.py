"""The attention kernels, what each of them can do, and the choice between them.

A kernel is a module of this folder, named as the configuration names it, with a ``KERNEL``. It is used only where it honours
the mask and the precision flags; asked for where it does not, it is refused. Whatever else wants to know about kernels asks
here: the self-test, the audit, the start line of a run. This module imports no JAX, so that the configuration may ask too.

B batch, T query, S key, N query heads, K key-value heads, H head, V value head.
"""

import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, get_args

if TYPE_CHECKING:
  import jax

  from maxtext_like.layers.attention.masks import Tokens
  from maxtext_like.layers.precision import Precision
  from maxtext_like.layers.sharding_rules import Rules

Name = Literal["splash", "cudnn_flash", "mosaic_flash", "blockwise", "dot_product"]
NAMES: tuple[Name, ...] = get_args(Name)
"""In the order in which "auto" prefers them, the slow ones of a case last. The last one can do everything."""

Choice = Literal["auto", "dot_product", "blockwise", "cudnn_flash", "mosaic_flash", "splash"]
"""What a configuration may ask for: "auto" takes the first that honours everything, "dot_product" any of ``PLAIN``."""

PLAIN: tuple[Name, ...] = ("blockwise", "dot_product")
"""Plain XLA: the reference, and the same in tiles of queries where a row has several."""


@dataclass(frozen=True, kw_only=True)
class Case:
  """What decides whether a kernel can do an attention layer.

  Attributes:
    platform: "cpu", "gpu" (or "cuda") or "tpu": where the program will run.
    precision: of the layer, whose ``dtype`` is that of q, k and v.
    query_heads, kv_heads: N and K.
    head_dim, value_dim: H and V.
    window: keys a query sees, itself included; None: all before it.
    causal: a query sees no key behind it; False: all keys of its row, as patches of an image do.
    length: positions of a row, T = S.
    context: devices that the positions of a row are split over.
    bidirectional_images: tokens of one image see each other both ways.
    documents: a row may hold several, which do not see each other.
    probabilities: the layer needs every probability written out.
    soft_cap: of the scores, which become cap * tanh(scores / cap) before the mask; None: none.
    capability: CUDA's compute capability of the device; None: no NVIDIA GPU, or not known, and then taken for the one it needs.
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
    """Of q, k and v."""
    return self.precision.dtype


@dataclass(frozen=True, kw_only=True, eq=False)
class AttentionKernel:
  """One way to compute attention.

  Attributes:
    name: as the configuration has it.
    refuses: why it cannot do a case; empty where it can.
    run: (q [B, T, N, H], k [B, S, K, H], v [B, S, K, V], tokens, *, window, bidirectional_images, scale, precision,
      rules) -> [B, T, N, V] in ``dtype``; zeros for a query that sees no key. It gets ``causal=False`` and ``soft_cap`` where
      it does not refuse those. One that is not fused also takes ``keys`` (``masks.Keys``), where there are others than the
      queries' own.
    fused: a binary of its own, with float32 scores, softmax and accumulators whatever the flags ask (see ``guarantee``); it
      is tried on the device before a run trusts it.
    slow: what it can do, though slower than it should be: "auto" takes another fused kernel there, if that is not slow too.
    named: what its backward pass needs of the forward pass bears the name "attention" for policies of ``jax.checkpoint``; of
      another kernel the result alone gets it.
    in_parts: ``run`` of a kernel that works through large arguments part by part, with parts so small that a few hundred
      positions have several, for its self-test; None: the kernel has no such parts.
    guarantee: of a fused kernel: what it does by construction (their sources and manuals; no program's text shows it).
    title: what a fused kernel is called in tables.
    scope: ``jax.named_scope`` that a fused kernel works under.
    operation: of a fused kernel: (target of a custom call, scopes along its path) -> its operation's name, None for
      anything else; how it is recognised in a program's text.
    products: of a fused kernel: matrix products that an operation makes, by its name; half of them, rounded down, are as wide
      as values, the others as keys.
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
    """The precision keys that are false and that the kernel does not obey, because it computes in float32 anyway."""
    if not self.fused or case.dtype == "float32":
      return []
    return [key for key in ("float32_qk_product", "float32_logits") if not getattr(case.precision, key)]


def whole_rows(case: Case) -> list[str]:
  """Why a kernel that takes as many queries as keys cannot do a case; empty where it can."""
  size = case.length // case.context
  if case.context > 1 and (case.window is None or -(-(case.window - 1) // 128) * 128 > size):
    seen = "all before it" if case.window is None else f"{case.window} keys"
    return [f"rows are split over {case.context} devices (context), {size} positions each, and a query sees {seen}"]
  return []


def kernel(name: Name) -> AttentionKernel:
  """The kernel of that name; imports its module."""
  return importlib.import_module(f"{__package__}.{name}").KERNEL


def fused_kernels() -> list[AttentionKernel]:
  """Those that are binaries of their own."""
  return [found for found in map(kernel, NAMES) if found.fused]


def choose(choice: Choice, case: Case, without: Sequence[Name] = ()) -> AttentionKernel:
  """The kernel that will run.

  Args:
    choice: what the configuration asks for.
    case: the layer.
    without: kernels that "auto" shall not take.

  Raises:
    ValueError: a kernel that is asked for by name cannot do it.
  """
  if choice in ("auto", "dot_product"):
    names = NAMES if choice == "auto" else PLAIN
    able = [found for found in (kernel(name) for name in names if name not in without) if not found.refuses(case)]
    return min(able, key=lambda found: (not found.fused, found.slow(case)))
  asked = kernel(choice)
  if reasons := asked.refuses(case):
    raise ValueError(f"attention={choice} cannot be used here: {'; '.join(reasons)}; use attention=auto or dot_product")
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
  """Self-attention of rows over themselves, by the kernel that ``choose`` picked.

  Args:
    name: of the kernel.
    q_BTNH, k_BSKH, v_BSKV: queries, keys and values, T = S; query head n reads key-value head n // (N / K).
    tokens: segments and images. Causal rows known to be one document get no mask of segments, which would cost a fused kernel
      as much again.
    window: keys a query sees, itself included; None: all before it.
    bidirectional_images: tokens of one image see each other.
    scale: multiplies the scores.
    precision: flags.
    rules: how the batch lies on the mesh in use; None: ``rules.RULES``.
    causal: a query sees no key behind it; False: all of its document, and ``window`` is None.
    soft_cap: the scores, after the scale and before the mask, become cap * tanh(scores / cap); None: they stay.

  Returns:
    [B, T, N, V] in ``dtype``; zeros for padding. Of causal rows known to be one document, padding has what it makes of the
    tokens before it, and the block zeroes that where it costs nothing (``Tokens.real``).
  """
  from maxtext_like.layers.attention import context_parallel
  from maxtext_like.layers.attention.masks import Tokens
  from maxtext_like.layers.sharding_rules import RULES

  rules = rules or RULES
  # Keys and values that a layer borrows may come from one of another dtype.
  q_BTNH, k_BSKH, v_BSKV = map(precision.cast, (q_BTNH, k_BSKH, v_BSKV))
  how = {"window": window, "bidirectional_images": bidirectional_images, "scale": scale, "precision": precision}
  if soft_cap is not None:
    how["soft_cap"] = soft_cap
  if not causal:
    assert window is None
    assert not bidirectional_images
    how["causal"] = False
  elif tokens.one_document and tokens.segments is not None:
    tokens = Tokens(None, tokens.images)
  if causal and context_parallel.parts(rules, q_BTNH.shape[1]) > 1:
    return context_parallel.attend(name, q_BTNH, k_BSKH, v_BSKV, tokens, rules=rules, **how)
  positions = "sequence" if causal else None  # of a row that nothing splits
  own = ("batch", positions, "heads")
  of_kv = own if k_BSKH.shape[2] == q_BTNH.shape[2] else ("batch", positions, "kv_heads")
  q, k, v = rules.share(q_BTNH, *own), rules.share(k_BSKH, *of_kv), rules.share(v_BSKV, *of_kv)
  return rules.share(kernel(name).run(q, k, v, tokens, rules=rules, **how), *own)
