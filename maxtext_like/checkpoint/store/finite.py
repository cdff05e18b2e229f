"""Fast checks for NaN and infinity in host arrays."""

import numpy as np

_CHUNK = 1 << 22  # numbers converted to float64 at a time
_BITS = {  # bytes of a number -> unsigned integer type of that size
  1: np.uint8,
  2: np.uint16,
}
_EXPONENT = {"bfloat16": 0x7F80, "float16": 0x7C00, "float8_e5m2": 0x7C}  # all exponent bits set means infinity or NaN
_NAN_ALONE = {"float8_e4m3fn": 0x7F}  # all bits except the sign set means NaN; there is no infinity


def all_finite(x: np.ndarray) -> bool:
  """Returns True if every number is finite. Numbers of 16 and 8 bits are tested by their bits, without conversion.

  Args:
    x: float32, float64, bfloat16, float16, float8_e4m3fn or float8_e5m2.
  """
  pattern = _EXPONENT.get(x.dtype.name, _NAN_ALONE.get(x.dtype.name))
  if pattern is None:
    return bool(np.isfinite(x).all())
  bits = x.view(_BITS[x.dtype.itemsize])
  return x.size == 0 or int((bits & bits.dtype.type(pattern)).max()) != pattern


def described(x: np.ndarray) -> str:
  """Describes the non-finite numbers of an array, as in "1 NaN and 2 infinite of 64 numbers, the first at [0, 3]"."""
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
