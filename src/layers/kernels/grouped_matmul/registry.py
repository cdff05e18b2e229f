"""The kernels for grouped products: the cases that each supports, and the choice between them.

A grouped product multiplies rows, sorted by group, by the matrix of their group, as tokens by the matrix of their expert. A
kernel is a module of this folder with a ``KERNEL``. The module has the name of the kernel in the configuration. This module
imports no JAX, so that the configuration can read it too.

M rows, D summed, F columns, G groups.
"""

import importlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

from maxtext_like.layers.kernels.names import Grouped as Name
from maxtext_like.layers.kernels.names import GroupedChoice as Choice

NAMES: tuple[Name, ...] = get_args(Name)
"""Kernels in the order in which "auto" prefers them."""

PLATFORMS: dict[str, str] = {"pallas_tpu": "tpu", "pallas_gpu": "gpu", "pallas_triton": "gpu"}
"""The platform of the kernels that run on one only. "auto" does not import kernels of other platforms."""


@dataclass(frozen=True, kw_only=True)
class Case:
  """The properties of a grouped product that decide which kernels support it.

  Attributes:
    platform: "cpu", "gpu" or "tpu": where the program will run.
    dtype: dtype of rows and matrices.
    sums: the float32 sums are returned, see ``GroupedKernel.sums``.
    capability: CUDA compute capability of the device. None: not an NVIDIA GPU, or not known; kernels then assume the one that
      they need.
  """

  platform: str
  dtype: str
  sums: bool = False
  capability: str | None = None


@dataclass(frozen=True, kw_only=True, eq=False)
class GroupedKernel:
  """One implementation of grouped products.

  Attributes:
    name: its name in the configuration.
    refuses: returns the reasons why it does not support a case; an empty list if it does.
    avoided: returns the reason why "auto" prefers another kernel for a supported case; "" if "auto" may choose this one.
    run: (x [M, D], w [G, D, F], sizes int32 [G], ``jax.lax.Precision``) -> [M, F] in x's dtype, accumulated in float32;
      differentiable in x and w. Rows are sorted by group. Rows after the last group belong to no group.
    run_for_sums: (x, w, sizes, a 16-bit dtype) -> float32 [M, F]. x and w have this dtype or float32. Products are computed in
      this dtype, but operands and cotangents keep the range of float32. None: ``run`` computes it with float32 operands.
    float16: the ``matmul_precision`` with which float32 operands that hold float16 numbers are multiplied exactly.
    called: (path, name) -> True if this operation of a compiled program is one of the kernel's.
    rows: (M, G) -> maximum number of rows that are multiplied by matrices. On a TPU it also holds for the gradient of these.
    skips: rows without a group are not multiplied.
    fused: the kernel is a compiled binary that must pass a self-test on the device before a run uses it.
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
    """Return the float32 sums [M, F] without rounding.

    Args:
      x, w, sizes: as in ``run``; x and w have ``dtype`` or float32.
      dtype: dtype of the products.
      precision: ``matmul_precision``.
    """
    # Some kernels return float32 sums of 16-bit products. Others multiply float32 operands, with a precision that is exact for
    # 16-bit numbers.
    if self.run_for_sums is not None and dtype != "float32":
      return self.run_for_sums(x, w, sizes, dtype)
    asked = self.float16 if dtype == "float16" and precision == "default" else precision
    return self.run(x.astype("float32"), w.astype("float32"), sizes, asked)

  def reasons(self, case: Case) -> list[str]:
    """Return the reasons why it does not support a case, also with float32 operands; an empty list if it does."""
    return self.refuses(self._run_by(case))

  def chosen(self, case: Case) -> bool:
    """True if "auto" may choose the kernel for a supported case."""
    return not self.avoided(self._run_by(case))

  def _run_by(self, case: Case) -> Case:
    return replace(case, dtype="float32", sums=False) if case.sums and self.run_for_sums is None else case


def kernel(name: Name) -> GroupedKernel:
  """Return the kernel with this name. Imports its module."""
  return importlib.import_module(f"{__package__}.{name}").KERNEL


def choose(choice: Choice, *cases: Case, without: tuple[Name, ...] = ()) -> GroupedKernel:
  """Return the kernel to run.

  Args:
    choice: the kernel that the configuration selects.
    cases: all cases that it must support.
    without: kernels that "auto" must not choose.

  Raises:
    ValueError: the configuration names a kernel that does not support a case.
  """
  if choice == "auto":
    # Prefer kernels that do not multiply more rows than needed; otherwise take the first that supports all cases.
    runs = lambda name: all(PLATFORMS.get(name, case.platform) == case.platform for case in cases)
    names: list[Name] = [name for name in NAMES if name not in without and runs(name)]
    able = [found for found in map(kernel, names) if not any(map(found.reasons, cases))]
    return next((found for found in able if all(map(found.chosen, cases))), able[0])
  # A kernel chosen by name must support every case. List each reason once.
  asked = kernel(choice)
  if reasons := list(dict.fromkeys(reason for case in cases for reason in asked.reasons(case))):
    raise ValueError(f"grouped_product={choice} cannot be used here: {'; '.join(reasons)}\n  fix: grouped_product=auto")
  return asked
