"""Weights of a model that is loaded and not trained, stored in the format of ``base_weights``.

They are quantized while they are read. Adapters are added to them in every product, as in training, and not merged. Open this
file for the choice between both, and for adapters of peft on quantized weights.
"""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from maxtext_like.checkpoint.adapters import adapter_step
from maxtext_like.checkpoint.adapters.adapted_weights import with_base
from maxtext_like.checkpoint.adapters.adapter_step import EXTRA, Base
from maxtext_like.checkpoint.adapters.init_adapter import factors
from maxtext_like.checkpoint.adapters.merge_adapters import in_order, settings_of_runs, step_of_adapter
from maxtext_like.checkpoint.huggingface import peft, peft_targets
from maxtext_like.checkpoint.read_weights import read_weights
from maxtext_like.checkpoint.store import manifest
from maxtext_like.checkpoint.store.stored_config import section
from maxtext_like.checkpoint.weight_sources import find_step, is_hugging_face
from maxtext_like.errors import NonFiniteError, UserError
from maxtext_like.models.adapter import Adapter, make_adapter
from maxtext_like.models.model import Model, placed
from maxtext_like.models.naming import ADAPTER


def with_storage(model: Model, directory: Path, adapters: Sequence[Path] = (), *, chosen: bool) -> tuple[Model, str]:
  """Returns the model with the storage of its weights, and a line about it for the user ("" if nothing is quantized).

  Without a choice of the user, weights below adapters are stored as they were when the adapters were trained.

  Args:
    model: the model. Its configuration has ``base_weights``.
    directory: the checkpoint. It may be a run that trained an adapter.
    adapters: directories of further adapters, of peft or of runs.
    chosen: True if the user set ``base_weights``. With null or bfloat16, adapters are merged.

  Raises:
    UserError: as ``with_base``; an adapter is missing or damaged.
  """
  own, settings = _step_of_adapter(directory), model.config.adapter
  found = [] if own is None else [section(ADAPTER, own[1].config)]
  found += settings_of_runs(adapters).values()
  trained = {(s.base_weights, s.base_weights_modules) for s in found}
  form, modules = next(iter(trained)) if len(trained) == 1 else (None, ())
  many = len(adapters) + (own is not None)
  if chosen:
    if form != settings.base_weights or settings.base_weights_modules:
      modules = settings.base_weights_modules
    form = settings.base_weights
  if many and form == "bfloat16" and chosen:
    form = None
  if form is None:
    modules = ()
  settings = dataclasses.replace(settings, base_weights=form, base_weights_modules=modules)
  model = dataclasses.replace(model, config=dataclasses.replace(model.config, adapter=settings))
  # Describe the choice.
  same = trained == {(form, modules)}
  below = " and ".join(sorted(f"{own} weights" if own else "weights that were not quantized" for own, _ in trained))
  below += " with other base_weights_modules" if form and {own for own, _ in trained} == {form} else ""
  who, are, them = ("the adapters", "are", "them") if many > 1 else ("the adapter", "is", "it")
  who += f", trained on {below}," if trained and not same else ""
  if form is None:
    line = f"{who} {are} merged into weights in {model.config.precision.weight_dtype}"
    return model, line if any(own for own, _ in trained) else ""
  line = f"the weights are stored as {form}"
  if many:
    line += f", and {who} {are} added in every product{', as in training' if same else ''}; base_weights=null merges {them}"
  return with_base(model, settings), line


def read_stored(directory: Path, model: Model, adapters: Sequence[Path] = ()) -> Any:
  """Returns the weights of a model with ``with_storage`` as the decoder reads them, with all adapters added and not merged.

  Args:
    directory, adapters: as for ``with_storage``.
    model: the model, whose ``base`` is not None.

  Raises:
    UserError: as ``read_weights``; an adapter is damaged or belongs to another model; the weights below the run's own adapter
      have changed; or adapters that cannot be combined.
    NonFiniteError: a number is not finite.
  """
  base = model.base
  assert base is not None
  directories = in_order(adapters, model, directory)
  # The weights, and the adapter that is the checkpoint itself.
  own = _step_of_adapter(directory)
  if own is None:
    tree = base.attach(read_weights(directory, model))
  else:
    tree = _attached(base.attach(_below(*own, model)), *adapter_step.read_adapter(*own, model), directory)
  # Further adapters, one on top of the other.
  for place in directories:
    if peft.is_adapter(place):
      made = _of_peft(place, model, tree)
    else:
      made = adapter_step.read_adapter(*step_of_adapter(place), model)
    tree = _attached(tree, *made, place)
  return tree


def _step_of_adapter(directory: Path) -> tuple[Path, manifest.Manifest] | None:
  """Returns the step of a run that trained an adapter, and its manifest; None if the checkpoint is a complete model."""
  if is_hugging_face(directory) or (step := find_step(directory)) is None:
    return None
  try:
    stored = manifest.read(step)
  except manifest.DamageError as error:
    raise UserError(f"{step}: not a complete checkpoint: {error}", fix=manifest.ANOTHER) from None
  return (step, stored) if adapter_step.holds_adapter_alone(stored) else None


def _below(step: Path, stored: manifest.Manifest, model: Model) -> Any:
  """Returns the stored weights below a run's adapter. Raises UserError if they are not those that it was trained on."""
  # The run may have cast the weights, so the same casts are allowed here.
  config = dataclasses.replace(model.config, checkpoint=dataclasses.replace(model.config.checkpoint, allow_dtype_change=True))
  model, settings = dataclasses.replace(model, config=config), section(ADAPTER, stored.config)
  base, scheme = Base.from_json(stored.extra[EXTRA]), adapter_step.stored_init_scheme(stored.config)
  params, found = adapter_step.read_base(model, base.source, base.seed, scheme, read_weights)
  own = config.adapter
  form = (own.base_weights, own.base_weights_modules, config.precision.weight_dtype)
  then = (settings.base_weights, settings.base_weights_modules, stored.config.get("precision", {}).get("weight_dtype"))
  base.require(found, step, same_form=form == then)
  return params


def _attached(tree: dict[str, Any], adapter: Adapter, arrays: Any, place: Path) -> dict[str, Any]:
  if not _all_finite(jax.tree.leaves(arrays)):
    raise NonFiniteError(
      f"{place}: the adapter contains non-finite numbers\n"
      "  why: everything computed with it would be non-finite too\n  fix: use an earlier step of that run"
    )
  return adapter.attach({**tree, ADAPTER: arrays})


@jax.jit
def _all_finite(arrays: list[jax.Array]) -> jax.Array:
  return jnp.stack([jnp.isfinite(x).all() for x in arrays]).all()


def _of_peft(directory: Path, model: Model, tree: dict[str, Any]) -> tuple[Adapter, Any]:
  """Reads an adapter of peft. ``tree`` has the weights that it is added to."""
  given = peft.read_adapter(directory, model.decoder, model.config.model.decoder_block)
  # Scales become part of B, because the maps of one array may have different scales.
  maps = tuple(dataclasses.replace(own, b=own.b * own.scale, scale=1.0) for own in given.maps)
  whole = {piece.path for tensor, _ in given.whole for piece in tensor.pieces}
  assert model.base is not None
  if both := sorted(whole & set(model.base.weights)):
    raise UserError(
      f"base_weights_modules: {'.'.join(both[0])} is stored as {model.base.form.name}, but {directory} replaces it\n"
      "  fix: remove it from base_weights_modules"
    )
  settings = dataclasses.replace(
    model.config.adapter, lora_rank=max(own.rank for own in maps), lora_alpha=None,
    lora_dora=any(own.magnitude is not None for own in maps),
  )  # fmt: skip
  names = frozenset(peft_targets.name_of(model.decoder, piece) for own in maps for piece in own.tensor.pieces)
  adapter = make_adapter(model.decoder, names, settings, whole)
  # Maps that the file lacks have zeros, and magnitudes equal to their norms.
  like = placed(adapter.params(), model.mesh, model.decoder.cfg.rules)
  zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype, device=x.sharding), like)
  if adapter.dora or adapter.whole:
    start = jax.jit(lambda params: adapter.started(params, model.decoder.precision)[ADAPTER])
    zeros = start({**tree, ADAPTER: zeros})
  return adapter, factors(dataclasses.replace(given, maps=maps), zeros)
