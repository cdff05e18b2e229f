"""How one of our parameters stands in a Hugging Face file: the entry of the tables in tensors.py and tensors_vision.py."""

from dataclasses import dataclass
from typing import Literal

Kind = Literal["same", "scalar", "flat", "rows", "linear", "linear2", "conv", "experts"]


@dataclass(frozen=True)
class Rule:
  """How one of our parameters stands in a file.

  Attributes:
    name: after the layer's prefix; ``{e}`` is the number of an expert with a tensor of its own.
    kind: "same"; "scalar": [1]; "rows": all axes but the first flattened; "linear": [out, in] with one input axis on our
      side; "linear2": with two; "experts": [E, out, in];
      "flat": [all axes]; "conv": [out, 3, side, side] of a patch, ours with the input axes flattened first.
    half: 0 or 1: the tensor holds two parameters one above the other along its output axis, and this is the first or
      second.
    buffer: no parameter in transformers: it has no gradient there.
  """

  name: str
  kind: Kind = "same"
  half: int | None = None
  buffer: bool = False
