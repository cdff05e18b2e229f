"""The adapter that a run starts from (``lora_from``), of peft or of another run: its settings and its arrays."""

import dataclasses
import functools
import logging
import re
from collections import Counter
from pathlib import Path
from typing import Any

import jax
import numpy as np

from maxtext_like.checkpoint.adapters import adapter_step
from maxtext_like.checkpoint.adapters.adapted_weights import adapted_names, configured_adapter
from maxtext_like.checkpoint.adapters.adapter_step import EXTRA, Base
from maxtext_like.checkpoint.adapters.merge_adapters import step_of_adapter
from maxtext_like.checkpoint.huggingface import peft, peft_targets
from maxtext_like.checkpoint.store.stored_config import section
from maxtext_like.checkpoint.weight_sources import local_hugging_face, located
from maxtext_like.config.adapter_keys import AdapterConfig
from maxtext_like.config.hub import name_of
from maxtext_like.config.vision import VisionTower
from maxtext_like.errors import UserError
from maxtext_like.models.adapter import WHOLE, Adapter
from maxtext_like.models.model import Model
from maxtext_like.models.naming import ADAPTER
from maxtext_like.storage import Place, failed
from maxtext_like.strict_json import printable

_log = logging.getLogger(__name__)


@functools.cache
def _warn_once(message: str) -> None:
  _log.warning("%s", message)  # a program may be built several times


def with_init_adapter(model: Model) -> Model:
  """Returns the model with the settings of the adapter in ``lora_from``, unless ``lora_rank`` is set.

  The adapter's ``base_weights`` are used too, unless the run sets its own.

  Raises:
    UserError: there is no adapter, it is of another model, it cannot be trained, or the configuration contradicts it.
  """
  settings = model.config.adapter
  if settings.lora_from is None:
    return model
  found, tower = _settings(settings.lora_from, model)
  if found.lora_dropout != settings.lora_dropout:
    _warn_once(
      f"lora_from: {settings.lora_from} was trained with lora_dropout={found.lora_dropout:g}, this run has "
      f"lora_dropout={settings.lora_dropout:g}; the adapter's value is not used unless you type it"
    )
  model = _with_tower(model, tower)
  if settings.lora_rank:
    _require_same(settings, found, model)
    return model
  below = settings if settings.base_weights else found
  found = dataclasses.replace(
    found, lora_from=settings.lora_from, lora_dropout=settings.lora_dropout, base_weights=below.base_weights,
    base_weights_modules=below.base_weights_modules,
  )  # fmt: skip
  return dataclasses.replace(model, config=dataclasses.replace(model.config, adapter=found))


def _with_tower(model: Model, found: VisionTower | None) -> Model:
  """Returns the model with the adapter's ``vision_tower``, unless the run sets its own."""
  training = model.config.training
  if found == training.vision_tower or (found is None and training.vision_tower in ("frozen", "adapted")):
    return model
  if training.vision_tower is not None or found is None:
    raise UserError(
      f"lora_from: {model.config.adapter.lora_from} does not match this run\n"
      f"  vision_tower: adapter {found or '(not trained fully)'}, this run {training.vision_tower}\n"
      "  fix: leave vision_tower out to use the adapter's"
    )
  if model.decoder.cfg.vision is None:
    return model
  training = dataclasses.replace(training, vision_tower=found)
  return dataclasses.replace(model, config=dataclasses.replace(model.config, training=training))


def read_init_adapter(model: Model, adapter: Adapter, drawn: Any) -> Any:
  """Reads the arrays of the adapter in ``lora_from``, on the model's devices.

  Args:
    model: its configuration names the adapter.
    adapter: the adapter of the run.
    drawn: newly initialized arrays; those that the given adapter lacks, such as layers that peft left out, stay unchanged.

  Raises:
    UserError: as ``with_init_adapter``; the adapter is damaged.
  """
  source = model.config.adapter.lora_from
  assert source is not None
  place = _peft_place(source)
  if place is None:
    step, stored = step_of_adapter(located(source))
    return adapter_step.read_adapter(step, stored, model)[1]
  return factors(peft.read_adapter(place, model.decoder, model.config.model.decoder_block), drawn)


def require_base(model: Model, below: Base) -> None:
  """Refuses weights that the adapter of ``lora_from`` was not trained on.

  An adapter of peft records only the name of its base weights; a different name is logged as a warning.

  Args:
    model: the model of the run.
    below: identification of its weights.

  Raises:
    UserError: the adapter of a run was trained on other weights.
  """
  source, own = model.config.adapter.lora_from, model.config.adapter
  if source is None:
    return
  if (place := _peft_place(source)) is not None:
    named = peft.read_settings(place).get("base_model_name_or_path")
    if isinstance(named, str) and named and not _same_model(named, below.source):
      _log.warning(
        "lora_from: %s was trained on %s, but the weights here are %s; if these are another model, the adapter is useless",
        source, printable(named), below.source or f"initialized from seed {below.seed}",
      )  # fmt: skip
    return
  stored = step_of_adapter(located(source))[1]
  then, form = Base.from_json(stored.extra[EXTRA]), section(ADAPTER, stored.config)
  stored_as = (form.base_weights, form.base_weights_modules, stored.config.get("precision", {}).get("weight_dtype"))
  if stored_as == (own.base_weights, own.base_weights_modules, model.config.precision.weight_dtype):
    same = then.fingerprint == below.fingerprint
  elif (files := then.same_files(below.files)) is not None:  # another dtype or quantization changes every bit
    same = files
  else:
    same = then.source == below.source and (then.source is not None or then.seed == below.seed)
  if not same:
    raise UserError(
      f"lora_from: {source} was trained on other base weights\n  then: {then}\n  now:  {below}\n"
      "  why: an adapter only fits the weights that it was trained on\n"
      "  fix: name those weights in init_from\n"
      "       or run maxtext-like export RUN --out DIR --adapter and set lora_from=DIR (trains it on these weights anyway)"
    )


def _same_model(named: str, source: str | None) -> bool:
  """Returns True if the name of a model in a peft file may denote these weights. ``source`` is None for random weights."""
  if source is None:
    return False
  one, other = Path(named).expanduser().resolve(), Path(source).expanduser().resolve()
  return name_of(one).lower() == name_of(other).lower() or one.is_relative_to(other) or other.is_relative_to(one)


def factors(given: peft.PeftAdapter, drawn: Any) -> Any:
  """Returns newly initialized adapter arrays with the values of a peft adapter filled in."""
  found: dict[str, np.ndarray] = {}
  # Low-rank factors and magnitudes.
  for own, piece in ((each, piece) for each in given.maps for piece in each.tensor.pieces):
    node = drawn
    for key in piece.path:
      node = node[key]
    for name, values in own.factors(piece).items():
      whole = found.setdefault(".".join((*piece.path, name)), np.array(jax.device_get(node[name]), np.float32))
      if name != "lora_magnitude":  # pad with zeros if other layers of the stack have a larger rank
        more = [(0, 0)] * values.ndim
        more[-1 if name == "lora_a" else -2] = (0, node["lora_a"].shape[-1] - own.rank)
        values = np.pad(values, more)
      whole[piece.index] = values.reshape(whole[piece.index].shape)
  # Arrays that are trained fully.
  for piece, values in ((piece, values) for tensor, values in given.whole for piece in tensor.pieces):
    node = drawn
    for key in piece.path:
      node = node[key]
    x = found.setdefault(".".join((*piece.path, WHOLE)), np.array(jax.device_get(node[WHOLE])))
    x[piece.index] = piece.to_ours(values)

  def placed(path: Any, x: Any) -> Any:
    name = ".".join(str(entry.key) for entry in path)
    return jax.make_array_from_callback(x.shape, x.sharding, found[name].__getitem__) if name in found else x

  return jax.tree_util.tree_map_with_path(placed, drawn)


def peft_settings(directory: Path, model: Model) -> AdapterConfig:
  """Returns the settings of a peft adapter as our keys.

  Raises:
    UserError: as ``peft.read_adapter``; two of our weights share one peft module; or ``lora_alpha`` is not above 0.
  """
  config, given = peft.read_settings(directory), peft.read_adapter(directory, model.decoder, model.config.model.decoder_block)
  where = printable(directory / peft.CONFIG)
  # In peft the two halves of an expert array share lora_A. Training here would give each half its own.
  if shared := [
    own.tensor.name for own in given.maps if len({piece.half for piece in own.tensor.pieces}) < len(own.tensor.pieces)
  ]:
    raise UserError(
      f"{where}: {printable(shared[0])}: it is two weights here, which cannot share a trained adapter",
      fix="merge the adapter with peft (merge_and_unload) and import the result",
    )
  maps = {peft_targets.name_of(model.decoder, piece): own for own in given.maps for piece in own.tensor.pieces}
  rslora = bool(config.get("use_rslora"))
  ranks = {name: own.rank for name, own in maps.items()}
  alphas = {name: float(f"{own.scale * (ranks[name] ** 0.5 if rslora else ranks[name]):.9g}") for name, own in maps.items()}
  if (low := next((name for name, value in alphas.items() if value <= 0), None)) is not None:
    key = "lora_alpha" if config.get("lora_alpha") == alphas[low] else "alpha_pattern"
    raise UserError(
      f"{where}: {key} = {alphas[low]:g} for {printable(low)} is not above 0\n"
      "  why: with 0 the adapter would not be trained, and below 0 it would be subtracted\n"
      "  fix: for 0, start a new adapter (lora_rank= instead of lora_from); below 0, negate lora_B and make lora_alpha positive"
    )
  (rank, rank_pattern), (alpha, alpha_pattern) = (_pattern(values, model) for values in (ranks, alphas))
  return dataclasses.replace(
    model.config.adapter, lora_rank=rank, lora_alpha=alpha, lora_rslora=rslora, lora_dora=bool(config.get("use_dora")),
    lora_dropout=float(config.get("lora_dropout") or 0),
    lora_modules=_entries(frozenset(maps), model), lora_from=None, lora_rank_pattern=rank_pattern,
    lora_alpha_pattern=alpha_pattern, modules_to_save=given.modules_to_save,
  )  # fmt: skip


def _pattern(values: dict[str, Any], model: Model) -> tuple[Any, dict[str, Any] | None]:
  """Returns the most common value, and the others as entries of a pattern (None if there are none)."""
  (most, _), *others = Counter(values.values()).most_common()
  found: dict[str, Any] = {}
  for value, _ in others:
    names = frozenset(name for name, own in values.items() if own == value)
    found |= dict.fromkeys(_entries(names, model), value)
  return most, found or None


def _entries(names: frozenset[str], model: Model) -> tuple[str, ...]:
  """Returns ``lora_modules`` that match exactly these weights, without layer numbers if that is possible."""
  short = tuple(sorted({re.sub(r"^layers\.\d+\.", "", name) for name in names}))
  same = adapted_names(model.decoder, model.config.model.decoder_block, short) == names
  return short if same else tuple(sorted(names))


def _settings(source: str, model: Model) -> tuple[AdapterConfig, VisionTower | None]:
  """Returns the settings of an adapter and its ``vision_tower``."""
  place = _peft_place(source)
  if place is not None:
    given = peft.read_adapter(place, model.decoder, model.config.model.decoder_block)
    return peft_settings(place, model), given.vision_tower
  stored = step_of_adapter(located(source))[1].config
  return section(ADAPTER, stored), stored.get("training", {}).get("vision_tower")


def _peft_place(source: str) -> Path | None:
  """Returns the local directory of a peft adapter; None if the source is not one."""
  place = located(source)
  if isinstance(place, Place):
    try:
      return local_hugging_face(place) if (place / peft.CONFIG).entry() is not None else None
    except OSError as error:
      raise failed(error) from error
  return place if peft.is_adapter(place) else None


def _shown(settings: AdapterConfig, key: str) -> str:
  """Formats a setting and the exceptions of its pattern."""
  pattern = getattr(settings, f"{key}_pattern", None)
  return f"{getattr(settings, key)}{f' except {pattern}' if pattern else ''}"


def _require_same(settings: AdapterConfig, found: AdapterConfig, model: Model) -> None:
  """Refuses settings that differ from those of the given adapter."""
  tower = model.config.training.vision_tower
  own, given = (configured_adapter(model, s, tower) for s in (settings, found))
  both = lambda same: all(same(own.sizes[path], given.sizes[path]) for path in own.sizes.keys() & given.sizes.keys())
  differ = [
    f"{key}: adapter {_shown(found, key)}, this run {_shown(settings, key)}"
    for key, same in {
      "lora_rank": both(lambda own, given: own.ranks == given.ranks),
      "lora_alpha": both(lambda own, given: np.allclose(own.scales, given.scales, rtol=1e-6, atol=0)),
      "lora_dora": own.dora == given.dora,
      "lora_modules": own.names == given.names,
      "modules_to_save": own.whole.keys() == given.whole.keys(),
    }.items()
    if not same
  ]
  if differ:
    raise UserError(
      f"lora_from: {settings.lora_from} does not match this run\n  " + "\n  ".join(differ) + "\n"
      "  fix: leave lora_rank and the other adapter keys out to use the adapter's settings"
    )
