"""Names of parameters in messages and files: ``layers.7.mlp.down`` for a row of a stacked array, ``embedding.table`` otherwise.

Paths are the keys into the nested dict of ``Decoder.params()``.
"""

from maxtext_like.layers.decoder import Decoder

ADAPTER = "adapter"
"""Key of an adapter in a tree of parameters. The adapter's tree repeats the paths of the model's parameters."""


def row_names(decoder: Decoder, path: tuple[str, ...]) -> list[str]:
  """Return the names of one leaf: one for each row of a stacked leaf, in order, or a single one."""
  if path[0] == ADAPTER:  # ``layers.7.attention.q.lora_a``
    return row_names(decoder, path[1:])
  for s in decoder.stacks:
    if path[0] == s.name:
      j, rest = int(path[1].removeprefix("layer_")), ".".join(path[2:])
      return [f"layers.{s.first + row * len(s.layers) + j}.{rest}" for row in range(s.repeats)]
  return [".".join(path)]


def parameter_name(decoder: Decoder, path: tuple[str, ...], row: int | None = None) -> str:
  """Return the name of one row of a leaf, or of the complete leaf: ``layers.0,6,12.mlp.down`` for a stack of three."""
  names = row_names(decoder, path)
  if row is not None:
    return names[row]
  if len(names) == 1:
    return names[0]
  numbers = [name.split(".")[1] for name in names]
  shown = ",".join(numbers) if len(numbers) <= 4 else f"{numbers[0]},{numbers[1]},..,{numbers[-1]}"
  return f"layers.{shown}.{names[0].split('.', 2)[2]}"
