"""The self-test of attention kernels, for anybody's."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, get_args

from maxtext_like.api.arguments import dtype_name, require_function, require_number
from maxtext_like.errors import UserError

if TYPE_CHECKING:
  from maxtext_like.numerics.attention_selfcheck import Attention, CaseResult


@dataclass(frozen=True)
class KernelTest:
  """What came of a kernel's trials. As text: a line for each.

  Attributes:
    results: of the trials, in order.
  """

  results: "tuple[CaseResult, ...]"

  @property
  def passed(self) -> bool:
    """Nothing is wrong."""
    return not any(result.problem for result in self.results)

  def __str__(self) -> str:
    return "\n".join(f"{result.name}: {result.problem or 'passed'}" for result in self.results)


def kernel_self_test(
  attention: "Attention",
  *,
  dtype: Any,
  head_dim: int,
  query_heads: int,
  kv_heads: int,
  length: int,
  window: bool = False,
  segments: bool = False,
) -> KernelTest:
  """Tries an attention function on JAX's default device, values and gradients, against attention written out in float32.

  What is looked at is what masks get wrong: windows, documents packed into one row, rows that see nothing, scores far below any
  number that stands for "masked", odd lengths.

  Args:
    attention: ``(q, k, v, tokens, *, window, scale) -> [B, T, N, H]`` of q [B, T, N, H], k and v [B, T, K, H], causal;
      ``tokens.segments`` int32 [B, T]: a position sees those of its own number, and 0 is padding.
    dtype: of q, k and v: "bfloat16", "float16" or "float32"; or as ``jnp.bfloat16``.
    head_dim: H.
    query_heads: N of a layer.
    kv_heads: K of a layer.
    length: T.
    window: there is a sliding window, whose size ``window`` is; else it is None.
    segments: rows hold documents and padding.

  Raises:
    UserError: another dtype, or heads that do not share keys evenly.
  """
  from maxtext_like.layers.precision import Dtype
  from maxtext_like.numerics.attention_selfcheck import self_test, shape_class

  require_function(kernel_self_test, "attention", attention)
  for name, size in {"head_dim": head_dim, "query_heads": query_heads, "kv_heads": kv_heads, "length": length}.items():
    require_number(kernel_self_test, name, size, whole=True)
  dtype = str(dtype_name(dtype))
  if dtype not in get_args(Dtype):
    raise UserError(f"kernel_self_test: dtype {dtype!r}\n  fix: one of {', '.join(get_args(Dtype))}")
  if min(head_dim, query_heads, kv_heads, length) < 1 or query_heads % kv_heads:
    raise UserError(
      f"kernel_self_test: head_dim={head_dim}, query_heads={query_heads}, kv_heads={kv_heads}, length={length}\n"
      "  fix: all at least 1, and query_heads a multiple of kv_heads"
    )
  shape = shape_class(
    "dot_product", dtype=dtype, head_dim=head_dim, query_heads=query_heads, kv_heads=kv_heads, window=window,
    segments=segments, length=length,
  )  # fmt: skip
  return KernelTest(tuple(self_test(shape, attention)))
