"""The kernels for a grouped product, what each of them can do, and the choice between them.

A grouped product multiplies rows that lie sorted by group with the matrix of their group: the experts of a token. A kernel is
a module of this folder, named as the configuration names it, with a ``KERNEL``. This module imports no JAX, so that the
configuration may ask too.

M rows, D summed, F columns, G groups.
"""

import importlib
from collections.abc import Callable
from dataclasses import dataclass, replace
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
    sums: the float32 sums are handed on, see ``GroupedKernel.sums``.
    capability: CUDA's compute capability of the device; None: no NVIDIA GPU, or not known, and then taken for the one it needs.
  """

  platform: str
  dtype: str
  sums: bool = False
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
    run_for_sums: (x, w, sizes, a 16-bit dtype) -> float32 [M, F], likewise; x and w, of this dtype or float32, are multiplied
      as it has them, but keep float32's range, and so do cotangents. None: ``run`` does it, with all of them in float32.
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
  run_for_sums: Callable[..., Any] | None = None
  float16: Literal["default", "high"] = "default"
  called: Callable[[str, str], bool] = lambda path, name: False
  rows: Callable[[int, int], int] = lambda rows, groups: rows
  skips: bool = False
  fused: bool = False

  def sums(self, x: Any, w: Any, sizes: Any, dtype: str, precision: str) -> Any:
    """float32 [M, F]: the sums as they are, not rounded.

    Args:
      x, w, sizes: as of ``run``; x and w of ``dtype`` or float32.
      dtype: that they are multiplied in.
      precision: ``matmul_precision``.
    """
    if self.run_for_sums is not None and dtype != "float32":
      return self.run_for_sums(x, w, sizes, dtype)
    asked = self.float16 if dtype == "float16" and precision == "default" else precision
    return self.run(x.astype("float32"), w.astype("float32"), sizes, asked)

  def reasons(self, case: Case) -> list[str]:
    """Why it cannot do a case, be it by float32 operands; empty where it can."""
    return self.refuses(self._run_by(case))

  def chosen(self, case: Case) -> bool:
    """Whether "auto" takes it for a case that it can do."""
    return not self.avoided(self._run_by(case))

  def _run_by(self, case: Case) -> Case:
    return replace(case, dtype="float32", sums=False) if case.sums and self.run_for_sums is None else case


def kernel(name: Name) -> GroupedKernel:
  """The kernel of that name; imports its module."""
  return importlib.import_module(f"{__package__}.{name}").KERNEL


def choose(choice: Choice, *cases: Case, without: tuple[Name, ...] = ()) -> GroupedKernel:
  """The kernel that will run.

  Args:
    choice: what is asked for.
    cases: all that it has to do.
    without: those that "auto" passes by.

  Raises:
    ValueError: a kernel that is asked for by name cannot do it.
  """
  if choice == "auto":
    able = [found for found in map(kernel, NAMES) if found.name not in without and not any(map(found.reasons, cases))]
    return next((found for found in able if all(map(found.chosen, cases))), able[0])
  asked = kernel(choice)
  if reasons := list(dict.fromkeys(reason for case in cases for reason in asked.reasons(case))):
    raise ValueError(f"grouped_product={choice} cannot be used here: {'; '.join(reasons)}; use grouped_product=auto")
  return asked
