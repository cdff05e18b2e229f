"""Precision keys at their safer value, as changes of a configuration for the complete model or for single layers."""

import dataclasses
import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from maxtext_like.config.layer_precision import layer_values, written
from maxtext_like.config.precision_keys import KEYS, LAYER_KEYS, REMEDIES, idle_reason
from maxtext_like.config.schema import Config
from maxtext_like.config.yaml_file import to_text
from maxtext_like.layers.kernels.attention.registry import kernel
from maxtext_like.models.build import runs_in_loops

LOSS_SCALE = "loss_scale_init"


@dataclass(frozen=True)
class Remedy:
  """One key at its safer value.

  Attributes:
    key: a key of ``precision:``, or ``loss_scale_init``.
    value: its new value; None for the loss scale, which is halved until the gradients are finite.
    layer: the only layer that it is set for; None for the complete model.
  """

  key: str
  value: Any
  layer: int | None = None

  def __str__(self) -> str:
    value = "lower" if self.value is None else to_text(self.value)
    return f"{self.key}={value}" + ("" if self.layer is None else f" in layer {self.layer}")


def candidates(config: Config, platform: str = "cpu") -> tuple[Remedy, ...]:
  """Return every key that affects this model and is not at its safer value, except ``dtype``.

  Args:
    config: configuration of the run.
    platform: "cpu", "gpu" or "tpu". On a CPU ``matmul_precision`` has no effect.
  """
  found = []
  for key in REMEDIES:
    if key.repairs == "hides":  # lowering the loss scale hides nothing, so it comes before the keys that do
      found += [Remedy(LOSS_SCALE, None)] if config.precision.dtype == "float16" else []
    if key.lacking(config.model, config.vision) or not key.acts_with(_dtypes(config), platform):
      continue
    remedy = Remedy(key.name, key.safer)
    if layers_of(config, remedy) if key.per_layer else key.value(vars(config.precision)) != key.safer:
      found.append(remedy)
  return tuple(found)


def last_resorts(config: Config) -> tuple[Remedy, ...]:
  """Return other dtypes for the complete model, the cheaper one first."""
  dtype = config.precision.dtype
  found = [Remedy("dtype", "bfloat16")] if dtype == "float16" else []
  # Fused kernels only support 16-bit dtypes.
  if _dtypes(config) != {"float32"} and not _fused(config):
    found.append(Remedy("dtype", "float32"))
  return tuple(found)


def layers_of(config: Config, remedy: Remedy) -> tuple[int, ...]:
  """Return the layers that a remedy changes, for keys that can differ between layers."""
  p = vars(config.precision)
  found = []
  for i, own in enumerate(layer_values(config.precision.layer_precision, config.model.num_decoder_layers)):
    now = p | own
    if remedy.key == "dtype":
      changes = now["dtype"] != remedy.value
    else:
      changes = idle_reason(remedy.key, remedy.value, i, config.model, now) is None
    if changes:
      found.append(i)
  return tuple(found)


def applied(config: Config, remedies: Iterable[Remedy], loss_scale: float | None = None) -> Config:
  """Return the configuration with some remedies.

  A key for the complete model replaces its values in ``layer_precision``. Keys of single layers that then have no effect are
  removed.

  Args:
    config: the original configuration.
    remedies: any of ``candidates`` and ``last_resorts``, or the same for single layers.
    loss_scale: the value of ``loss_scale_init``, if that is one of the remedies.
  """
  whole = dict(vars(config.precision))
  layers = layer_values(config.precision.layer_precision, config.model.num_decoder_layers)
  training = config.training
  remedies = tuple(remedies)
  for remedy in remedies:
    if remedy.key == LOSS_SCALE:
      if loss_scale is not None:
        training = dataclasses.replace(training, loss_scale_init=loss_scale)
    elif remedy.layer is not None:
      layers[remedy.layer][remedy.key] = remedy.value
    else:
      whole[remedy.key] = remedy.value
      for own in layers:
        own.pop(remedy.key, None)
  # Remove the keys of single layers that no longer have an effect.
  for i, own in enumerate(layers):
    if own.get("dtype") == whole["dtype"]:
      del own["dtype"]
    now = whole | {"dtype": own.get("dtype", whole["dtype"])}
    idle = [key for key in own if key != "dtype" and idle_reason(key, own[key], i, config.model, now)]
    layers[i] = {key: own[key] for key in LAYER_KEYS if key in own and key not in idle}
  whole["layer_precision"] = written(layers)
  if whole["weight_dtype"] == "float32" != config.precision.weight_dtype:
    training = dataclasses.replace(training, stochastic_rounding=False)  # float32 weights need no rounding
  changed = dataclasses.replace(config, precision=dataclasses.replace(config.precision, **whole), training=training)
  if training.remat_offload == "none" or runs_in_loops(changed):
    return changed
  # No two rows of layers are equal any more, so they do not run in a loop and their activations cannot be offloaded. Offloading
  # does not change any number.
  return dataclasses.replace(changed, training=dataclasses.replace(training, remat_offload="none"))


def reference(config: Config) -> Config:
  """Return the configuration of the step in float32: every dtype and key at its safest value, products without TF32, and
  kernels that support float32."""
  whole = {name: key.safer for name, key in KEYS.items()} | {"layer_precision": ()}
  training = dataclasses.replace(config.training, attention="dot_product") if _fused(config) else config.training
  return dataclasses.replace(config, precision=dataclasses.replace(config.precision, **whole), training=training)


def yaml(before: Config, after: Config) -> str:
  """Return the YAML to paste over ``before`` to get ``after``."""
  lines = []
  for section in ("precision", "training"):
    old, new = vars(getattr(before, section)), vars(getattr(after, section))
    changed = [f"  {key}: {to_text(value)}" for key, value in new.items() if old[key] != value]
    lines += [f"{section}:", *changed] if changed else []
  return "\n".join(lines)


def words(before: Config, after: Config) -> list[str]:
  """Return the same changes as ``key=value`` words of the command line."""
  out: list[str] = []
  for section in ("precision", "training"):
    old, new = vars(getattr(before, section)), vars(getattr(after, section))
    out += [f"{key}={to_text(value)}" for key, value in new.items() if old[key] != value]
  return out


def _fused(config: Config) -> bool:
  """Return True if the configuration names a fused attention kernel."""
  asked = config.training.attention
  return asked != "auto" and kernel(asked).fused


def _dtypes(config: Config) -> set[str]:
  own = layer_values(config.precision.layer_precision, config.model.num_decoder_layers)
  return {config.precision.dtype, *(values.get("dtype", config.precision.dtype) for values in own)}


def groups(layers: Sequence[int], most: int) -> list[tuple[int, ...]]:
  """Split layers into at most ``most`` groups of neighbors of nearly equal size."""
  count = min(most, len(layers))
  edges = [len(layers) * i // count for i in range(count + 1)]
  return [tuple(layers[a:b]) for a, b in itertools.pairwise(edges)]
