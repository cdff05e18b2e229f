"""X-ray's statistics: one integer reduction per tensor on the device, decoded to numbers on the host.

A row of COLUMNS int32 numbers describes one tensor. The bits of |x| as float32 sort like the numbers, so every statistic except
the sum of squares is an integer max, min or sum. A single variadic reduction then vectorizes: 0.3 ns per element on one CPU
core, compared with 16 ns for separate float reductions. Narrow floats convert to float32 exactly. float64 is clipped to
float32's range first; its own overflow is still detected.
"""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

MAX, WIDE, MIN, NAN, POS_INF, INF, NEGATIVE, ZERO, SUB_OWN, SUB_F16, SUB_E5M2, SUB_E4M3, SQUARES, COUNT = range(14)
COLUMNS = 14


def _bits_of(x: float) -> int:
  return int(np.float32(x).view(np.int32))


_INF_BITS = _bits_of(np.inf)

# The largest finite number, and the largest number that a conversion rounds to zero (half the smallest subnormal; bf16 and
# float32 subnormals count as zero because accelerators flush them).
LIMITS = {"float16": 65504.0, "bfloat16": 3.3895313892515355e38, "float8_e4m3fn": 448.0, "float8_e5m2": 57344.0}
_FLUSHED = {SUB_F16: 2.0**-25, SUB_E5M2: 2.0**-17, SUB_E4M3: 2.0**-10}
FORMATS = tuple(LIMITS)

# Equations whose result in float32 helps to explain an overflow of a narrow dtype: "1.8e3 x 1.3e3 -> 9.8e5 > 65504".
WIDENED = frozenset(["mul", "add", "sub", "div", "add_any", "square", "integer_pow", "exp", "exp2", "convert_element_type"])


def limit(dtype) -> float:
  """Return the largest finite number of a floating dtype."""
  return float(jnp.finfo(dtype).max)


def overflows_early(dtype) -> bool:
  """Return True if the dtype has a smaller range than float32."""
  return limit(dtype) < 3.0e38


def neutral() -> np.ndarray:
  """Return the row of an empty tensor: merging it changes nothing."""
  row = np.zeros(COLUMNS, np.int32)
  row[MIN] = _INF_BITS
  return row


def _float32(x):
  x = lax.stop_gradient(x)
  if x.dtype == jnp.float64:
    x = jnp.where(jnp.isfinite(x), jnp.clip(x, -3.4028235e38, 3.4028235e38), x)
  return x.astype(jnp.float32)


def _bits(x):
  return lax.bitcast_convert_type(x, jnp.int32)


def _magnitude(x):
  """Return the bits of |x|. The sign is cleared on the integer, because XLA removes abs() if it knows x >= 0, but exp(-nan) is
  -nan."""
  return _bits(x) & jnp.int32(0x7FFFFFFF)


# Up to this size the sum of squares is part of the reduction (one kernel less to compile); above it, it is a library call.
_SMALL = 2048


@dataclasses.dataclass
class Scalar:
  """A tensor of one element, which is measured together with the others of its frame: one kernel instead of many."""

  x: Any
  full: bool
  wide: Any


@dataclasses.dataclass
class Flag:
  """The largest |x| of a tensor, NaN or infinite if any element is, and the tensor's size."""

  largest: Any
  size: int


@dataclasses.dataclass
class Rows:
  """Several finished rows, int32 [n, COLUMNS]."""

  rows: Any


def row(x, *, full: bool = True, wide=None, flag: bool = False) -> "Scalar | Flag | list[Any]":
  """Return the statistics of one array, for `stack`: int32 scalars, one for each of COLUMNS (SQUARES: float32), or an object
  that represents them.

  full=False leaves out everything but max, NaN and infinities. flag=True also leaves out counts and signs, an eighth of the
  code to compile. `wide` is the same result computed in float32.
  """
  if x.size == 1:
    return Scalar(x, full, wide)
  if flag and not jnp.issubdtype(x.dtype, jnp.complexfloating):
    return Flag(jnp.max(jnp.abs(_float32(x))), x.size)
  return _reduced(x, full, wide)


def rows_of(x) -> Rows:
  """Return full statistics of every slice of the leading axis."""
  columns = _reduced(x, True, None, axes=tuple(range(1, x.ndim)))
  columns[SQUARES] = _bits(jnp.asarray(columns[SQUARES], jnp.float32))
  return Rows(jnp.stack([jnp.broadcast_to(jnp.asarray(c, jnp.int32), x.shape[:1]) for c in columns], axis=-1))


def _reduced(x, full: bool, wide, axes: tuple[int, ...] | None = None) -> list[Any]:
  axes = tuple(range(x.ndim)) if axes is None else axes
  size = math.prod(x.shape[a] for a in axes)
  parts, squares = _elements(x, full, wide, float(jnp.finfo(x.dtype).tiny))
  inside = full and size <= _SMALL
  if inside:
    parts[SQUARES] = squares
  columns = sorted(parts)
  start = [jnp.float32(0) if c == SQUARES else jnp.int32(_INF_BITS if c == MIN else 0) for c in columns]
  join = lambda a, b: tuple(_merge_column(c, p, q) for c, p, q in zip(columns, a, b, strict=True))
  values = lax.reduce(tuple(parts[c] for c in columns), tuple(start), join, axes)
  done = dict(zip(columns, values, strict=True))
  if full:  # not masked by finiteness: a plain sum of squares is a library call
    done[SQUARES] = done[SQUARES] if inside else jnp.sum(squares, axes)
  done[COUNT] = jnp.int32(np.uint32(size).view(np.int32))  # read back as unsigned
  blank = neutral()
  return [done.get(c, jnp.int32(blank[c])) for c in range(COLUMNS)]


def _elements(x, full: bool, wide, tiny) -> tuple[dict[int, Any], Any]:
  """Return each element's contribution to each column, and its square. `tiny` is the smallest normal number of the tensor's
  dtype."""
  if jnp.issubdtype(x.dtype, jnp.complexfloating):
    re, im = _float32(x.real), _float32(x.imag)
    bits = lax.max(_magnitude(re), _magnitude(im))  # the larger component represents the number
    signed, squares = bits, re * re + im * im
  else:
    x32 = _float32(x)
    signed, bits, squares = _bits(x32), _magnitude(x32), x32 * x32
  flag = lambda condition: condition.astype(jnp.int32)
  parts = {
    MAX: jnp.where(bits < _INF_BITS, bits, 0),
    NAN: flag(bits > _INF_BITS),
    POS_INF: flag(signed == _INF_BITS),
    INF: flag(bits == _INF_BITS),
    NEGATIVE: flag((signed < 0) & (bits > 0) & (bits <= _INF_BITS)),
  }
  if wide is not None:
    wide_bits = _magnitude(_float32(wide))
    parts[WIDE] = jnp.where(wide_bits < _INF_BITS, wide_bits, 0)
  if full:
    # float64's smallest normal number is zero in float32, whose bits are then 0, so zeros count.
    tiny_bits = np.maximum(np.asarray(tiny, np.float32).view(np.int32), 1)
    parts[MIN] = jnp.where(bits > 0, bits, _INF_BITS)
    parts[ZERO] = flag(bits == 0)
    parts[SUB_OWN] = flag(bits < tiny_bits)
    parts |= {column: flag(bits <= _bits_of(bound)) for column, bound in _FLUSHED.items()}
  return parts, squares


def _scalars(found: list[Scalar]) -> Any:
  """Return the rows of scalars, int32 [len(found), COLUMNS]; real ones in one vector operation."""
  as32 = lambda x: jnp.abs(x).astype(jnp.float32) if jnp.issubdtype(x.dtype, jnp.complexfloating) else _float32(x)
  x = jnp.stack([as32(s.x).reshape(()) for s in found])
  wide = jnp.stack([jnp.float32(0) if s.wide is None else _float32(s.wide).reshape(()) for s in found])
  tiny = np.asarray([float(jnp.finfo(s.x.dtype).tiny) for s in found])
  parts, squares = _elements(x, True, wide, tiny)
  parts |= {SQUARES: _bits(squares), COUNT: jnp.ones(len(found), jnp.int32)}
  return jnp.stack([parts[c] for c in range(COLUMNS)], axis=-1)


def _merge_column(column, a, b):
  if column in (MAX, WIDE):
    return lax.max(a, b)
  return lax.min(a, b) if column == MIN else lax.add(a, b)


def merge(a, b):
  """Merge two rows (int32 [..., COLUMNS], on the device) as if their tensors were one."""
  out = []
  for c in range(COLUMNS):
    p, q = a[..., c], b[..., c]
    if c == SQUARES:
      out.append(_bits(lax.bitcast_convert_type(p, jnp.float32) + lax.bitcast_convert_type(q, jnp.float32)))
    else:
      out.append(_merge_column(c, p, q))
  return jnp.stack(out, axis=-1)


def merge_axis(rows: np.ndarray, axis: int = 0) -> np.ndarray:
  """Merge rows (host) along one axis, for instance over the shards of a shard_map."""
  rows = np.moveaxis(rows, axis, 0)
  out = np.add.reduce(rows, axis=0, dtype=np.int32)
  out[..., MAX], out[..., WIDE] = rows[..., MAX].max(0), rows[..., WIDE].max(0)
  out[..., MIN] = rows[..., MIN].min(0)
  squares = rows[..., SQUARES].copy().view(np.float32)
  with np.errstate(over="ignore", invalid="ignore"):
    out[..., SQUARES] = np.asarray(squares.sum(0, dtype=np.float32)).view(np.int32)
  return out


def bad(rows: np.ndarray) -> np.ndarray:
  """Return whether each row's tensor contains a NaN or an infinity."""
  return (rows[..., NAN] != 0) | (rows[..., INF] != 0)


@dataclasses.dataclass(frozen=True)
class Stats:
  """Statistics of one tensor. Each is an array with one entry per iteration of the surrounding loops (shape () outside loops).

  An entry that was never computed (a branch not taken) is NaN, with count 0. In light mode only count, max, wide, nan, inf,
  neg_inf, negative and headroom exist; the others are NaN.

  Attributes:
    count: elements measured.
    max: largest finite |x|; NaN if there are non-finite elements and no other element is above 0.
    wide: like max, before rounding to a narrow dtype, or 0.
    rms: root mean square; NaN with non-finite elements, and if float32 squares under- or overflow (< 1e-19 or > 1e19).
    min_nonzero: smallest |x| > 0.
    nan, inf, neg_inf: number of NaN, of +-inf, of -inf.
    negative: number of elements < 0.
    zero: fraction of exact zeros.
    subnormal: fraction of zeros and of subnormals of the tensor's own dtype.
    flushed: for each format, the fraction that would become zero there and is not zero here.
    headroom: for each format, log2(largest finite number / max) in bits; negative if max does not fit, NaN if max is NaN.
  """

  count: np.ndarray
  max: np.ndarray
  wide: np.ndarray
  rms: np.ndarray
  min_nonzero: np.ndarray
  nan: np.ndarray
  inf: np.ndarray
  neg_inf: np.ndarray
  negative: np.ndarray
  zero: np.ndarray
  subnormal: np.ndarray
  flushed: dict[str, np.ndarray]
  headroom: dict[str, np.ndarray]

  @property
  def nonfinite(self) -> np.ndarray:
    return self.nan + self.inf


def decode(rows: Any, *, full: bool = True, dtype: Any = jnp.float32) -> Stats:
  """Decode rows (int32 [..., COLUMNS]) to numbers."""
  rows = np.asarray(rows)
  real = lambda c: rows[..., c].copy().view(np.float32).astype(np.float64)
  whole = lambda c: rows[..., c].copy().view(np.uint32).astype(np.int64)
  count, nan, inf = whole(COUNT), whole(NAN), whole(INF)
  measured = count > 0
  nothing = np.full(count.shape, math.nan)
  largest = np.where(measured & ((real(MAX) > 0) | (nan + inf == 0)), real(MAX), math.nan)
  # Counts become fractions; formats flush the numbers below their smallest subnormal.
  with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
    share = lambda c: np.where(measured, whole(c) / count, math.nan) if full else nothing
    rms = np.sqrt(real(SQUARES) / count)
    lost = ((rms == 0) & (largest > 0)) | ~np.isfinite(rms)
    smallest = np.where(measured & np.isfinite(real(MIN)), real(MIN), math.nan)
    zero, subnormal = share(ZERO), share(SUB_OWN)
    flushed = {
      "float16": share(SUB_F16) - zero,
      "bfloat16": subnormal - zero if jnp.finfo(dtype).minexp == -126 else zero * 0,
      "float8_e4m3fn": share(SUB_E4M3) - zero,
      "float8_e5m2": share(SUB_E5M2) - zero,
    }
    headroom = {f: np.log2(LIMITS[f] / largest) for f in FORMATS}
  return Stats(
    count=count,
    max=largest,
    wide=real(WIDE),
    rms=np.where(measured & full & ~lost, rms, math.nan),
    min_nonzero=smallest if full else nothing,
    nan=nan,
    inf=inf,
    neg_inf=inf - whole(POS_INF),
    negative=whole(NEGATIVE),
    zero=zero,
    subnormal=subnormal,
    flushed=flushed,
    headroom=headroom,
  )


def _flags(found: list[Flag]) -> Any:
  """Return the rows of flags, int32 [len(found), COLUMNS]. The sign of an infinity is unknown; it is recorded as +."""
  bits = _magnitude(jnp.stack([f.largest for f in found]))
  infinite = (bits == _INF_BITS).astype(jnp.int32)
  count = np.asarray([f.size for f in found], np.uint32).view(np.int32)
  columns = {MAX: jnp.where(bits < _INF_BITS, bits, 0), NAN: (bits > _INF_BITS).astype(jnp.int32), INF: infinite}
  columns |= {POS_INF: infinite, COUNT: jnp.asarray(count)}
  blank = neutral()
  return jnp.stack([columns.get(c, jnp.full(len(found), blank[c], jnp.int32)) for c in range(COLUMNS)], axis=-1)


def stack(rows: Sequence[Any]) -> jax.Array:
  """Return results of `row` as int32 [len(rows), COLUMNS]. The n - 1 entries after a `Rows` of n are None."""
  kinds = {kind: [i for i, r in enumerate(rows) if isinstance(r, kind)] for kind in (list, Scalar, Flag, Rows)}
  parts = [jnp.zeros((0, COLUMNS), jnp.int32)]
  order = [i for kind in (list, Scalar, Flag) for i in kinds[kind]]
  if tensors := kinds[list]:
    whole = jnp.stack([x for i in tensors for c, x in enumerate(rows[i]) if c != SQUARES]).reshape(-1, COLUMNS - 1)
    squares = jnp.stack([jnp.asarray(rows[i][SQUARES], jnp.float32) for i in tensors])  # one bit cast for all of them
    parts.append(jnp.insert(whole, SQUARES, _bits(squares), axis=1))
  if kinds[Scalar]:
    parts.append(_scalars([rows[i] for i in kinds[Scalar]]))
  if kinds[Flag]:
    parts.append(_flags([rows[i] for i in kinds[Flag]]))
  for i in kinds[Rows]:
    parts.append(rows[i].rows)
    order += range(i, i + rows[i].rows.shape[0])
  joined = jnp.concatenate(parts)
  assert joined.shape[0] == len(rows)
  return joined if order == sorted(order) else joined[np.argsort(np.asarray(order, np.int32))]
