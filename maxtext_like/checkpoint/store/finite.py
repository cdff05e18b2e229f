"""Whether numbers on the host are finite, as fast as they are read."""

import numpy as np

_CHUNK = 1 << 22  # numbers that are widened at a time
_BITS = {  # bytes of a number: unsigned integers of that size
  1: np.uint8,
  2: np.uint16,
}
_EXPONENT = {"bfloat16": 0x7F80, "float16": 0x7C00, "float8_e5m2": 0x7C}  # all of its bits set: infinity or NaN
_NAN_ALONE = {"float8_e4m3fn": 0x7F}  # every bit but the sign: NaN, and there is no infinity


def all_finite(x: np.ndarray) -> bool:
  """Whether every number is: of 16 and 8 bits on the bits, for which numpy needs no conversion.

  Args:
    x: float32, float64, bfloat16, float16, float8_e4m3fn or float8_e5m2.
  """
  pattern = _EXPONENT.get(x.dtype.name, _NAN_ALONE.get(x.dtype.name))
  if pattern is None:
    return bool(np.isfinite(x).all())
  bits = x.view(_BITS[x.dtype.itemsize])
  return x.size == 0 or int((bits & bits.dtype.type(pattern)).max()) != pattern


def described(x: np.ndarray) -> str:
  """What of an array is not finite, as "1 NaN and 2 infinite of 64 numbers, the first at [0, 3]"."""
  flat, nan, infinite, first = x.reshape(-1), 0, 0, -1
  for start in range(0, flat.size, _CHUNK):
    with np.errstate(invalid="ignore"):
      chunk = flat[start : start + _CHUNK].astype(np.float64)
    bad = ~np.isfinite(chunk)
    if first < 0 and bad.any():
      first = start + int(bad.argmax())
    nan, infinite = nan + int(np.isnan(chunk).sum()), infinite + int(np.isinf(chunk).sum())
  counts = [f"{n} {what}" for n, what in ((nan, "NaN"), (infinite, "infinite")) if n]
  where = [int(i) for i in np.unravel_index(max(first, 0), x.shape)]
  return f"{' and '.join(counts)} of {x.size} numbers, the first at {where}"
