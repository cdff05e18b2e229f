"""``kernel_self_test``: tests an attention function against attention in float32."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, get_args

from maxtext_like.api.arguments import dtype_name, require_function, require_number
from maxtext_like.errors import UserError

if TYPE_CHECKING:
  from maxtext_like.numerics.attention_selfcheck import Attention, CaseResult


@dataclass(frozen=True)
class KernelTest:
  """Results of a self-test. As text: a line for each case.

  Attributes:
    results: result of each case, in order.
  """

  results: "tuple[CaseResult, ...]"

  @property
  def passed(self) -> bool:
    """True if every case passed."""
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
  """Compare values and gradients of an attention function on JAX's default device with attention in float32.

  The cases cover common errors of masks: windows, documents packed into one row, rows that see no key, scores below the value
  used for masked positions, and odd lengths.

  Args:
    attention: ``(q, k, v, tokens, *, window, scale) -> [B, T, N, H]`` of q [B, T, N, H], k and v [B, T, K, H], causal;
      ``tokens.segments`` is int32 [B, T]: a position sees positions with the same number, and 0 is padding.
    dtype: dtype of q, k and v: "bfloat16", "float16" or "float32", or as ``jnp.bfloat16``.
    head_dim: size of a head, H.
    query_heads: number of query heads, N.
    kv_heads: number of kv heads, K.
    length: length of a row, T.
    window: test a sliding window; the function gets its size as ``window``, otherwise None.
    segments: test rows with several documents and padding.

  Raises:
    UserError: the dtype is not supported, or query_heads is not a multiple of kv_heads.
  """
  from maxtext_like.layers.precision import Dtype
  from maxtext_like.numerics.attention_selfcheck import self_test, shape_class

  require_function(kernel_self_test, "attention", attention)
  for name, size in {"head_dim": head_dim, "query_heads": query_heads, "kv_heads": kv_heads, "length": length}.items():
    require_number(kernel_self_test, name, size, whole=True)
  dtype = str(dtype_name(dtype))
  if dtype not in get_args(Dtype):
    raise UserError(f"kernel_self_test: unknown dtype {dtype!r}\n  fix: pass one of {', '.join(get_args(Dtype))}")
  if min(head_dim, query_heads, kv_heads, length) < 1 or query_heads % kv_heads:
    raise UserError(
      f"kernel_self_test: head_dim={head_dim}, query_heads={query_heads}, kv_heads={kv_heads}, length={length}: "
      "impossible sizes\n  fix: make all of them at least 1, and query_heads a multiple of kv_heads"
    )
  shape = shape_class(
    "dot_product", dtype=dtype, head_dim=head_dim, query_heads=query_heads, kv_heads=kv_heads, window=window,
    segments=segments, length=length,
  )  # fmt: skip
  return KernelTest(tuple(self_test(shape, attention)))
