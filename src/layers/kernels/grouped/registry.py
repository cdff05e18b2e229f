"""The kernels for a grouped product, what each of them can do, and the choice between them.

A grouped product multiplies rows that lie sorted by group with the matrix of their group: the experts of a token. A kernel is
a module of this folder, named as the configuration names it, with a ``KERNEL``. This module imports no JAX, so that the
configuration may ask too.

M rows, D summed, F columns, G groups.
"""

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, get_args

Name = Literal["pallas_tpu", "pallas_gpu", "pallas_triton", "rounds", "ragged_dot", "tiles"]
NAMES: tuple[Name, ...] = get_args(Name)
"""In the order in which "auto" prefers them, where they do no more than the useful work."""

Choice = Literal["auto", "pallas_tpu", "pallas_gpu", "pallas_triton", "rounds", "ragged_dot", "tiles"]
"""What a configuration may ask for."""


@dataclass(frozen=True, kw_only=True)
class Case:
  """What decides between kernels.

  Attributes:
    platform: "cpu", "gpu" or "tpu", where the program will run.
    dtype: of rows and matrices.
    capability: CUDA's compute capability of the device; None: no NVIDIA GPU, or not known, and then taken for the one it needs.
  """

  platform: str
  dtype: str
  capability: str | None = None


@dataclass(frozen=True, kw_only=True, eq=False)
class GroupedKernel:
  """One way to compute a grouped product.

  Attributes:
    name: as the configuration has it.
    refuses: why it cannot do a case; empty where it can.
    avoided: why "auto" takes another kernel for a case that this one can do; empty where it is the choice.
    run: (x [M, D], w [G, D, F], sizes int32 [G], ``jax.lax.Precision``) -> [M, F] in x's dtype, accumulated in float32;
      differentiable in x and w. Rows of group 0 come first, then those of group 1; rows behind them all are no one's.
    float16: the ``matmul_precision`` under which float32 operands multiply as the float16 numbers that they hold.
    called: whether the operation of a compiled program that has this path and name is one of its kernels.
    rows: of M rows and G groups, the most that are multiplied with matrices, and on a TPU in the gradient of these too.
    skips: it multiplies no one's rows with nothing.
    fused: a binary of its own, which is tried on the device before a run trusts it.
  """

  name: Name
  refuses: Callable[[Case], list[str]]
  avoided: Callable[[Case], str]
  run: Callable[..., Any]
  float16: Literal["default", "high"] = "default"
  called: Callable[[str, str], bool] = lambda path, name: False
  rows: Callable[[int, int], int] = lambda rows, groups: rows
  skips: bool = False
  fused: bool = False


def kernel(name: Name) -> GroupedKernel:
  """The kernel of that name; imports its module."""
  return importlib.import_module(f"{__package__}.{name}").KERNEL


def choose(choice: Choice, case: Case, *, without: tuple[Name, ...] = ()) -> GroupedKernel:
  """The kernel that will run; without: those that "auto" passes by.

  Raises:
    ValueError: a kernel that is asked for by name cannot do it.
  """
  if choice == "auto":
    able = [found for found in map(kernel, NAMES) if found.name not in without and not found.refuses(case)]
    return next((found for found in able if not found.avoided(case)), able[0])
  asked = kernel(choice)
  if reasons := asked.refuses(case):
    raise ValueError(f"grouped_product={choice} cannot be used here: {'; '.join(reasons)}; use grouped_product=auto")
  return asked
