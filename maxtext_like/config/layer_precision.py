"""The key ``layer_precision``: precision of single layers, such as ``3-5 dtype=float32`` or ``7 float32_logits=true``.

Only keys that act inside a layer can differ between layers; parameters, the residual stream and checkpoints do not change.
Layers are numbered from 0.
"""

import re
import typing
from collections.abc import Iterator, Sequence
from typing import Any

from maxtext_like.config.coerce import CoercionError, coerce
from maxtext_like.config.precision_keys import LAYER_KEYS, PrecisionConfig, idle_reason
from maxtext_like.config.problems import Problem, did_you_misspell
from maxtext_like.config.schema import Config
from maxtext_like.config.yaml_file import Scalar, to_text

KEY = "layer_precision"
FORM = "write [3-5 dtype=float32, 7 float32_logits=true]: a layer or a range, then key=value"

Values = dict[str, Any]  # key -> value of one layer

_KINDS = typing.get_type_hints(PrecisionConfig)


def layer_values(entries: Sequence[str], layers: int) -> list[Values]:
  """Return the values set for each layer, as one dict per layer, empty if nothing is set.

  Args:
    entries: the value of ``layer_precision``.
    layers: number of layers of the model.

  Raises:
    ValueError: an entry cannot be read, names a layer that does not exist, or names a layer twice.
  """
  values, problems = _read(entries, layers)
  if problems:
    raise ValueError("; ".join(p.what + (f" ({p.fix})" if p.fix else "") for p in problems))
  return values


def written(values: Sequence[Values]) -> tuple[str, ...]:
  """Return the value of ``layer_precision`` for the values of each layer; equal neighbors become one range."""
  out, first = [], 0
  for i in range(1, len(values) + 1):
    if i < len(values) and values[i] == values[first]:
      continue
    if values[first]:
      where = str(first) if i == first + 1 else f"{first}-{i - 1}"
      out.append(" ".join([where, *(f"{key}={to_text(value)}" for key, value in values[first].items())]))
    first = i
  return tuple(out)


def layer_problems(config: Config) -> Iterator[Problem]:
  """Yield every problem of ``layer_precision``. The sections of the configuration may have other problems."""
  model, precision = config.model, config.precision
  values, problems = _read(precision.layer_precision, model.num_decoder_layers)
  yield from problems
  if problems:
    return
  wrong: dict[tuple[str, Any, str], list[int]] = {}
  for layer, own in enumerate(values):
    for key, value in own.items():
      if reason := _refused(key, value, layer, own, config):
        wrong.setdefault((key, value, reason), []).append(layer)
  for (key, value, reason), layers in wrong.items():
    yield Problem(
      f"{KEY}: {key}={to_text(value)} in {_layers(layers)}: {reason}", (KEY,), "leave it out for these layers"
    )  # fmt: skip


def _refused(key: str, value: Any, layer: int, own: Values, config: Config) -> str | None:
  whole = vars(config.precision)
  if key != "dtype":
    return idle_reason(key, value, layer, config.model, whole | {"dtype": own.get("dtype", whole["dtype"])})
  if value == whole["dtype"]:
    return "the model has that value already"
  if value == "float16":
    return "float16 needs a loss scale, which only the model's dtype switches on"
  return None


def _layers(numbers: Sequence[int]) -> str:
  if len(numbers) == 1:
    return f"layer {numbers[0]}"
  whole = list(numbers) == list(range(numbers[0], numbers[-1] + 1))
  return f"layers {numbers[0]}-{numbers[-1]}" if whole else "layers " + ", ".join(map(str, numbers))


def _read(entries: Sequence[str], layers: int) -> tuple[list[Values], list[Problem]]:
  values: list[Values] = [{} for _ in range(max(layers, 0))]
  problems: list[Problem] = []
  owner: dict[int, str] = {}
  for entry in entries:
    where, *settings = entry.split() or [""]
    shown = f"{KEY}: {entry!r}"
    found = re.fullmatch(r"(\d{1,6})(?:-(\d{1,6}))?", where)
    if not found or not settings:
      problems.append(Problem(f"{shown}: expected a layer or a range of layers, then key=value", (KEY,), FORM))
      continue
    first = int(found[1])
    last = first if found[2] is None else int(found[2])
    if first > last or last >= layers:
      problems.append(
        Problem(
          f"{shown}: the model has layers 0 to {layers - 1}",
          (KEY, "num_decoder_layers"),
          fix=f"write layers from 0 to {layers - 1}",
        )
      )
      continue
    if twice := [i for i in range(first, last + 1) if i in owner]:
      problems.append(Problem(f"{shown}: layer {twice[0]} is also in {owner[twice[0]]!r}", (KEY,), "name each layer once"))
      continue
    own, wrong = _settings(settings, shown)
    problems += wrong
    for i in range(first, last + 1):
      owner[i], values[i] = entry, dict(own)
  return values, problems


def _settings(words: Sequence[str], shown: str) -> tuple[Values, list[Problem]]:
  own: Values = {}
  problems = []
  for word in words:
    key, equals, text = word.partition("=")
    if not equals or not text:
      problems.append(Problem(f"{shown}: {word!r} is not key=value", (KEY,), FORM))
    elif key in own:
      problems.append(Problem(f"{shown}: {key} is set twice", (KEY,), f"remove one of the two values of {key}"))
    elif key not in LAYER_KEYS:
      known = key in _KINDS
      what = f"{key} applies to the model as a whole" if known else f"unknown key {key!r}{did_you_misspell(key, LAYER_KEYS)}"
      problems.append(Problem(f"{shown}: {what}", (KEY,), f"keys of a layer are {', '.join(LAYER_KEYS)}"))
    else:
      try:
        own[key] = coerce(Scalar(text, plain=True, line=1), _KINDS[key])
      except CoercionError as error:
        problems.append(Problem(f"{shown}: {key}: {error}", (KEY,), error.fix))
  return {key: own[key] for key in LAYER_KEYS if key in own}, problems
