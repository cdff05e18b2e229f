"""Products of few rows with a quantized weight, in Pallas (Triton) for NVIDIA GPUs.

Decoding multiplies a few rows by every weight. XLA dequantizes the weight first: it writes the 16-bit array to memory and
reads it again, which moves nine times the bytes of 4-bit codes. This kernel dequantizes blocks in registers, so it reads only
codes and scales. It multiplies the rows by the codes' values in the dtype of the rows, and then the float32 sum over a block
by its scale. Values of int8 and float8 codes are exact in bfloat16; those of nf4 are rounded to it. ``Form.values`` rounds the
product of both instead, which has an error of the same size. More than ``MOST_ROWS`` rows are multiplied by the dequantized
weight, because its cost is then shared by many rows.

The codes are transposed once ("by output"): a matrix unit takes neighboring inputs of one output from a register.

R rows, K inputs, M outputs, B blocks of inputs with a common scale, S parts of the sum over K.
"""

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from jax.experimental import pallas as pl

from maxtext_like.layers.quantization.codebooks import dynamic_number

Name = Literal["xla", "pallas_triton"]
"""Names of the kernels for products of few rows. "xla" dequantizes the weight."""

MOST_ROWS = 64
"""Largest number of rows that the kernel multiplies."""
_KERNEL = "quantized_matmul"
"""Name of the kernel in a program."""

_FEWEST_ROWS = 16
"""Smallest number of rows of a matrix unit."""
_OUTPUTS, _INPUTS = 128, 64
"""Outputs of a program, and inputs of a step."""
_PROGRAMS = 660
"""Programs that are wanted at least: five for each multiprocessor of an H100, as many as fit there."""
_FEWEST_STEPS = 8
"""Smallest number of steps of a program, if there are as many: fewer do not hide the latency of the memory."""
_WARPS, _STAGES = 4, 4

Arrays = Mapping[str, jax.Array]


def _triton() -> Any:
  """Import Pallas for Triton on use: choosing between kernels does not need it."""
  from jax.experimental.pallas import triton

  return triton


def quantized_matmul(
  form: str, x_RK: jax.Array, stored: Arrays, M: int, *, values: np.ndarray | None = None, interpret: bool = False
) -> jax.Array:
  """Multiply rows by a quantized weight.

  Args:
    form: "int8", "nf4" or "fp8_block": the form of the weight, see ``quantization/quantized.py``.
    x_RK: rows, bfloat16, at most ``MOST_ROWS``.
    stored: the arrays of the form, of one layer and without experts. "codes" are transposed: [M, inputs].
    M: number of outputs.
    values: for nf4, the 16 values of the codes.
    interpret: run on any platform, slowly: for tests.

  Returns:
    float32 [R, M].
  """
  arrays = {name: jnp.atleast_1d(x) for name, x in stored.items()}
  table = None if values is None else tuple(values.astype(ml_dtypes.bfloat16).view(np.uint16).tolist())
  return jnp.sum(_parts(x_RK, arrays, form=form, M=M, table=table, interpret=interpret), axis=0)


def supports(form: str) -> bool:
  """Return True if there is a kernel for this form."""
  return form in _FORMS


@functools.partial(jax.jit, static_argnames=("form", "M", "table", "interpret"))  # layers share the compiled kernel
def _parts(x: jax.Array, arrays: dict[str, jax.Array], *, form: str, M: int, table: Any, interpret: bool) -> jax.Array:
  """Return the parts of the sums, float32 [S, R, M]. ``table``: bits of the values of the codes in bfloat16."""
  plgpu = _triton()
  (R, K), names = x.shape, list(arrays)
  rows = max(_FEWEST_ROWS, pl.next_power_of_2(R))
  steps, tiles = pl.cdiv(K, _INPUTS), pl.cdiv(M, _OUTPUTS)
  # Divide the sums, so that a weight with few outputs occupies the complete GPU.
  S = max(1, min(pl.cdiv(_PROGRAMS, tiles), steps // _FEWEST_STEPS))
  each = pl.cdiv(steps, S)
  S, make = pl.cdiv(steps, each), _FORMS[form]

  def kernel(x, *refs):
    out, tile, part = refs[-1], pl.program_id(0), pl.program_id(1)
    real = jax.lax.broadcasted_iota(jnp.int32, (rows,), 0) < R
    first = tile * _OUTPUTS
    number = first + jax.lax.broadcasted_iota(jnp.int32, (_OUTPUTS,), 0)
    inside = None if M % _OUTPUTS == 0 else number < M
    own = _Tile(dict(zip(names, refs[:-1], strict=True)), K, first, number, inside, table, interpret)

    def read_x(start: Any, size: int) -> Any:
      known = start + jax.lax.broadcasted_iota(jnp.int32, (size,), 0) < K
      # The first row is no constant, because a constant slice must not end beyond the array.
      return plgpu.load(x.at[pl.ds(part * 0, rows), pl.ds(start, size)], mask=real[:, None] & known[None, :], other=0.0)

    add, scale = make(own, read_x)
    begin, start = part * each, jnp.zeros((rows, _OUTPUTS), jnp.float32)
    total = scale(jax.lax.fori_loop(begin, jnp.minimum(begin + each, steps), add, start))
    mask = real[:, None] if inside is None else real[:, None] & inside[None, :]
    plgpu.store(out.at[part, pl.ds(part * 0, rows), pl.ds(first, _OUTPUTS)], total, mask=mask)

  return pl.pallas_call(
    kernel,
    out_shape=jax.ShapeDtypeStruct((S, R, M), jnp.float32),
    grid=(tiles, S),
    compiler_params=plgpu.CompilerParams(num_warps=_WARPS, num_stages=_STAGES),
    interpret=interpret,
    name=_KERNEL,
  )(x, *arrays.values())


@dataclass(frozen=True)
class _Tile:
  """The arrays that a program reads and the outputs that it computes.

  Attributes:
    arrays: the stored arrays of the weight.
    K: number of inputs.
    first, number: the first output, and the numbers of all.
    inside: which of them exist; None: all.
    table: bits of the values of the codes.
    interpret: as for ``quantized_matmul``.
  """

  arrays: dict[str, Any]
  K: int
  first: Any
  number: Any
  inside: Any
  table: Any
  interpret: bool

  def load(self, name: str, *index: Any) -> Any:
    """Load an array's entries for the outputs of this program."""
    ref = self.arrays[name]
    return _triton().load(ref.at[index], **({} if self.inside is None else {"mask": self.inside, "other": ref.dtype.type(0)}))

  def codes(self, start: Any, size: int, stored: int) -> Any:
    """Load codes [outputs, size], of which a row has ``stored``."""
    ref, mask = self.arrays["codes"], None if self.inside is None else self.inside[:, None]
    if stored % size:
      known = (start + jax.lax.broadcasted_iota(jnp.int32, (size,), 0) < stored)[None, :]
      mask = known if mask is None else mask & known
    masked = {} if mask is None else {"mask": mask, "other": ref.dtype.type(0)}
    return _triton().load(ref.at[pl.ds(self.first, _OUTPUTS), pl.ds(start, size)], **masked)

  @property
  def outputs(self) -> Any:
    """The slice of the outputs."""
    return pl.ds(self.first, _OUTPUTS)


def _dot(x: Any, codes: Any) -> Any:
  """Multiply rows by the values of codes [outputs, inputs]."""
  return _triton().dot(x, codes.astype(x.dtype), trans_b=True)


def _int8(tile: _Tile, read_x: Callable[..., Any]) -> tuple[Callable[..., Any], Callable[[Any], Any]]:
  """An integer for each weight, and a scale for each output."""

  def add(i, total):
    start = i * _INPUTS
    return total + _dot(read_x(start, _INPUTS), tile.codes(start, _INPUTS, tile.K))

  return add, lambda total: total * tile.load("scales", tile.outputs)[None, :]


def _fp8_block(tile: _Tile, read_x: Callable[..., Any]) -> tuple[Callable[..., Any], Callable[[Any], Any]]:
  """A float8 number for each weight, and a scale for each block of 128 inputs and 128 outputs."""

  def add(i, total):
    start = i * _INPUTS
    scale = _triton().load(tile.arrays["scales"].at[jax.lax.div(start, 128), jax.lax.div(tile.first, 128)])
    return total + _dot(read_x(start, _INPUTS), tile.codes(start, _INPUTS, tile.K)) * scale

  return add, lambda total: total


def _nf4(tile: _Tile, read_x: Callable[..., Any]) -> tuple[Callable[..., Any], Callable[[Any], Any]]:
  """Blocks of 64 inputs. A byte holds the codes of inputs i (high bits) and i + 32 of its block."""
  half, blocks = _INPUTS // 2, pl.cdiv(tile.K, _INPUTS)
  mean = _triton().load(tile.arrays["scale_mean"].at[tile.first * 0])

  def add(i, total):
    codes = tile.codes(i * half, half, blocks * half)
    # The maximum of a block: 8 bits times the scale of 256 maxima, which are ordered by output, then by block.
    most = tile.load("scale_scales", jax.lax.div(tile.number * blocks + i, 256))
    largest = dynamic_number(tile.load("scales", i, tile.outputs)) * most + mean
    high, low = (_looked_up(codes, tile, high=high) for high in (True, False))
    sums = _dot(read_x(i * _INPUTS, half), high) + _dot(read_x(i * _INPUTS + half, half), low)
    return total + sums * largest[None, :]

  return add, lambda total: total


def _looked_up(codes: Any, tile: _Tile, *, high: bool) -> Any:
  """Return the bfloat16 values of the codes in the high or low halves of bytes.

  A chain of selections takes three times as long, and reading the table from memory as well, so this is assembly: a byte
  permutation (``prmt``) looks up one byte for four codes in a table of eight entries.
  """
  if tile.interpret:
    chosen, index = jnp.zeros(codes.shape, jnp.bfloat16), (codes >> 4 if high else codes & 15)
    for entry, bits in enumerate(tile.table):
      chosen = jnp.where(index == entry, float(np.uint16(bits).view(ml_dtypes.bfloat16)), chosen)
    return chosen.astype(jnp.bfloat16)
  result = jax.ShapeDtypeStruct(codes.shape, jnp.bfloat16)
  asm = _assembly(tile.table, high=high)
  inline = _triton().elementwise_inline_asm
  return inline(asm, args=[codes], constraints="=r,=r,r", pack=4, result_shape_dtypes=[result])[0]


def _assembly(table: tuple[int, ...], *, high: bool) -> str:
  """Return PTX that looks up four codes: the operands are two registers of two bfloat16 numbers, and one of four bytes."""
  planes = [np.array([bits >> shift & 255 for bits in table], np.uint8).view("<u4").tolist() for shift in (0, 8)]
  lookups = "".join(
    f"prmt.b32 a, {words[0]}, {words[1]}, s; prmt.b32 b, {words[2]}, {words[3]}, s; lop3.b32 {name}, a, b, m, 0xD8;\n"
    for name, words in zip("lh", planes, strict=True)
  )
  return (
    "{ .reg .b32 t, s, m, a, b, l, h;\n"
    # Codes as the low bits of four bytes.
    + ("shr.b32 t, $2, 4; and.b32 t, t, 0x0F0F0F0F;\n" if high else "and.b32 t, $2, 0x0F0F0F0F;\n")
    # The selector: four times three bits.
    + "shr.b32 s, t, 4; or.b32 s, s, t; prmt.b32 s, s, s, 0x0020; and.b32 s, s, 0x7777;\n"
    # The fourth bit as a mask of bytes: it chooses between the two halves of the table.
    + "shl.b32 m, t, 4; prmt.b32 m, m, m, 0xba98;\n"
    + lookups
    # Low and high bytes together.
    + "prmt.b32 $0, l, h, 0x5140; prmt.b32 $1, l, h, 0x7362; }"
  )


_FORMS: dict[str, Callable[[_Tile, Callable[..., Any]], Any]] = {"int8": _int8, "nf4": _nf4, "fp8_block": _fp8_block}
"""For each form: the functions that add a step to the sums of a tile, and that scale the sums at the end."""
