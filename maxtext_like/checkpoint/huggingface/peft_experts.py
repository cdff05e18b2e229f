"""The updates of a layer's experts in the format of peft (``target_parameters``, ``ParamWrapper``; peft 0.17 or newer).

transformers stores the experts of a layer as two arrays, ``experts.gate_up_proj`` [E, 2 F, D] and ``experts.down_proj`` [E, D,
F]. peft wraps the module once for each adapted array: the first wrapper is the module ``base_layer`` of the second. A wrapper's
lora_A.weight is [E R, in], grouped by expert. Its lora_B.weight is [out, R E], grouped by rank.

E experts, R rank, F width of an expert, D model.
"""

import re
from collections.abc import Callable, Collection, Sequence
from typing import NamedTuple

import numpy as np

from maxtext_like.checkpoint.huggingface.tensors import Tensor
from maxtext_like.errors import UserError
from maxtext_like.strict_json import printable

_INSIDE = ".base_layer"
_DECLARED = ("gate_up_proj", "down_proj")
"""The arrays in the order in which transformers declares them and peft wraps them."""


class Half(NamedTuple):
  """The update of one of the weights in an array of experts.

  Attributes:
    rank: R; 0 if this weight is not adapted.
    scale: factor that multiplies the product a b.
    out: number of output rows of this weight.
    factors: returns the factors a and b in this project's layout, float32 [E, in, R] and [E, R, out].
  """

  rank: int
  scale: float
  out: int
  factors: Callable[[], tuple[np.ndarray, np.ndarray]]


def scale(halves: Sequence[Half]) -> float:
  """Returns the scale of the update that ``fused`` makes."""
  return next(half.scale for half in halves if half.rank)


def fused(halves: Sequence[Half]) -> tuple[np.ndarray, np.ndarray]:
  """Returns lora_A.weight and lora_B.weight of one update of the complete array.

  The ranks of the halves are concatenated, and each half affects only its own output rows. The b of a half with another scale
  is adjusted.
  """
  of_a, of_b, row, out = [], [], 0, sum(half.out for half in halves)
  for half in halves:
    if half.rank:
      a, b = half.factors()
      of_a.append(a.swapaxes(1, 2))
      wide = np.zeros((len(b), half.rank, out), np.float32)
      wide[:, :, row : row + half.out] = b * np.float32(half.scale / scale(halves))
      of_b.append(wide)
    row += half.out
  a, b = np.concatenate(of_a, axis=1), np.concatenate(of_b, axis=1)  # [E, R, in], [E, R, out]
  return a.reshape(-1, a.shape[2]), b.transpose(2, 1, 0).reshape(out, -1)


def apart(a: np.ndarray, b: np.ndarray, experts: int) -> tuple[np.ndarray, np.ndarray]:
  """Splits lora_A.weight and lora_B.weight by expert: returns [E, R, in] and [E, out, R]."""
  return a.reshape(experts, -1, a.shape[1]), b.reshape(b.shape[0], -1, experts).transpose(2, 0, 1)


def wrapper(name: str, names: Collection[str]) -> str:
  """Returns the module name of the wrapper of one adapted array of a layer."""
  container, _, array = name.rpartition(".")
  later = _DECLARED[_DECLARED.index(array) + 1 :]
  return container + _INSIDE * sum(f"{container}.{other}" in names for other in later)


def matched(
  modules: Collection[str], tensors: dict[str, Tensor], targets: Sequence[str], bare: Callable[[str], str], where: str
) -> dict[str, tuple[str, Tensor]]:
  """Matches modules of an adapter with arrays of experts.

  Args:
    modules: module names of the adapter.
    tensors: the model's arrays of experts by bare names.
    targets: ``target_parameters``.
    bare: module name -> bare name.
    where: name of the file.

  Returns:
    {module: (name of the array there, the array)} for modules that wrap experts.

  Raises:
    UserError: the wrappers do not correspond to the arrays that the targets name.
  """
  inside: dict[str, set[str]] = {}
  for module in modules:
    container = re.sub(rf"(?:{re.escape(_INSIDE)})+$", "", module)
    if any(name.rpartition(".")[0] == bare(container) for name in tensors):
      inside.setdefault(container, set()).add(module)
  found = {}
  for container, wrappers in inside.items():
    names = {f"{container}.{array}": tensors[f"{bare(container)}.{array}"] for array in _DECLARED}
    names = {name: t for name, t in names.items() if any(f".{name}".endswith(f".{target}") for target in targets)}
    own = {wrapper(name, names): (name, tensor) for name, tensor in names.items()}
    if own.keys() != wrappers:
      raise UserError(
        f"{where}: '{printable(container)}' contains the updates {', '.join(map(printable, sorted(wrappers)))}, but "
        f"target_parameters names {', '.join(sorted(names)) or 'none of its arrays'}",
        fix="write target_parameters as in the LoraConfig of the training, or save the adapter again",
      )
    found |= own
  return found
