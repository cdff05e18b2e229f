"""Steps that contain only an adapter: identification of the base weights, and reading both together."""

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np

from maxtext_like.checkpoint.adapters.adapted_weights import configured_adapter, stored_as
from maxtext_like.checkpoint.model_changes import Change
from maxtext_like.checkpoint.store import manifest, stored_state
from maxtext_like.checkpoint.store.fingerprint import fingerprint, of_files
from maxtext_like.checkpoint.store.stored_config import section
from maxtext_like.checkpoint.weight_sources import located
from maxtext_like.errors import UserError
from maxtext_like.models.adapter import Adapter, Merged
from maxtext_like.models.initial_values import Scheme
from maxtext_like.models.model import Model, make_model, placed
from maxtext_like.models.naming import ADAPTER
from maxtext_like.sharding import processes
from maxtext_like.sharding.mesh import replicated
from maxtext_like.storage import Place

EXTRA = "base"
"""Key in a step's ``extra`` that identifies the base weights of its adapter."""


@dataclass(frozen=True)
class Base:
  """Identifies the base weights of an adapter.

  Attributes:
    source: their absolute path or URL; None if they were initialized randomly.
    seed: seed of random weights; unused with a source.
    fingerprint: see ``fingerprint.fingerprint``.
    files: see ``fingerprint.of_files``; None if unknown, as in steps of older versions.
  """

  source: str | None
  seed: int
  fingerprint: str
  files: str | None = None

  @classmethod
  def of(cls, params: dict[str, Any], init_from: str | None, seed: int) -> "Base":
    """Returns the identification for a run.

    Args:
      params: parameters of the model; those of an adapter are ignored.
      init_from: source of the weights; None for random weights.
      seed: seed of the run.
    """
    weights = {name: value for name, value in params.items() if name != ADAPTER}
    place = None if init_from is None else located(init_from)
    source = str(place.resolve()) if isinstance(place, Path) else init_from
    return cls(source, seed, fingerprint(weights), None if place is None else of_files(place))

  def to_json(self) -> dict[str, Any]:
    """Returns the JSON values that ``from_json`` reads."""
    return asdict(self)

  @classmethod
  def from_json(cls, values: dict[str, Any]) -> "Base":
    """Reads the values that ``to_json`` returned."""
    return cls(**values)

  def same_files(self, found: str | None) -> bool | None:
    """Returns whether the files equal ``found`` (``fingerprint.of_files``); None if that is unknown."""
    if self.files is None or found is None or self.files.split()[0] != found.split()[0]:
      return None
    return self.files == found

  def require(self, found: "Base", step: Path | Place, *, same_form: bool = True, changed: Sequence[Change] = ()) -> None:
    """Refuses other weights than those that an adapter was trained on.

    Args:
      found: identification of the present weights.
      step: the step of the adapter.
      same_form: True if the weights are read in the same dtype. Otherwise every number may differ, and only the files are
        compared.
      changed: changed keys that affect how the weights are read.

    Raises:
      UserError: the weights differ.
    """
    if self.fingerprint != found.fingerprint if same_form else self.same_files(found.files) is False:
      lines = "".join(f"{change.line}\n" for change in changed)
      fix = "name the original weights in init_from (a step, if that run was continued), with the original weight_dtype"
      if changed:
        words = " ".join(change.word for change in changed)
        fix = f"{words} (the checkpoint's values)\n       or run_name=NAME (a new run)"
      raise UserError(
        f"{step}: the base weights of this adapter have changed\n{lines}  then: {self}\n  now:  {found}\n  fix: {fix}"
      )

  def __str__(self) -> str:
    where = f"initialized from seed {self.seed}" if self.source is None else self.source
    return f"{where}, {self.fingerprint[:16]}"


def holds_adapter_alone(stored: manifest.Manifest) -> bool:
  """Returns True if a step contains only an adapter, without its base weights."""
  names = [name for name in stored.leaves if name.startswith("params.")]
  return bool(names) and all(name.startswith(f"params.{ADAPTER}.") for name in names)


def stored_adapter(stored: manifest.Manifest, model: Model) -> Adapter:
  """Builds the adapter that a step contains, for the model that it was trained on."""
  tower = stored.config.get("training", {}).get("vision_tower")
  return configured_adapter(model, section(ADAPTER, stored.config), tower)


def read_adapter(step: Path | Place, stored: manifest.Manifest, model: Model) -> tuple[Adapter, Any]:
  """Reads the adapter of a step. Returns it and its arrays on the model's devices.

  Raises:
    UserError: the step is damaged or belongs to another model.
  """
  adapter = stored_adapter(stored, model)
  like = placed(adapter.params(), model.mesh, model.decoder.cfg.rules)
  found = stored_state.load(step, {"params": {ADAPTER: like}}, config=model.config, allow_dtype_change=True)
  return adapter, found.state["params"][ADAPTER]


def stored_init_scheme(config: dict[str, Any]) -> Scheme:
  """Returns the ``init_scheme`` of a stored configuration. Versions without the key used MaxText's initial values."""
  return config.get("training", {}).get("init_scheme", "maxtext")


def read_base(
  model: Model, init_from: str | None, seed: int, scheme: Scheme, read_weights: Callable[..., Any]
) -> tuple[Any, Base]:
  """Reads the base weights of an adapter, or initializes them again if the run had random weights.

  Args:
    model: the model without the adapter.
    init_from: checkpoint of the weights; None for random weights.
    seed: seed of random weights.
    scheme: ``init_scheme`` of random weights.
    read_weights: (directory, model) -> the weights in it.

  Returns:
    The weights, and their identification.
  """
  if init_from is None:
    if scheme != model.config.training.init_scheme:
      config = dataclasses.replace(model.config, training=dataclasses.replace(model.config.training, init_scheme=scheme))
      decoder = make_model(config, mesh=model.mesh, platform=model.platform, runs_attention=False).decoder
      model = dataclasses.replace(model, config=config, decoder=decoder)
    draw = model.lower_init().compile()
    processes.await_compiled("the weights below the adapter", model.config.watchdog.watchdog_compile_seconds)
    params = draw(np.uint32(seed % 2**32))
  else:
    # The run that started the adapter accepted all changes of the model, so none is refused here.
    checkpoint = dataclasses.replace(model.config.checkpoint, allow_model_change=True)
    config = dataclasses.replace(model.config, checkpoint=checkpoint)
    params = read_weights(located(init_from), dataclasses.replace(model, config=config))
  return params, Base.of(params, init_from, seed)


def read_merged(
  step: Path | Place,
  stored: manifest.Manifest,
  model: Model,
  read_weights: Callable[..., Any],
  dtype: str | None = None,
) -> Merged:
  """Returns the base weights of a step's adapter with the adapter merged.

  Args:
    step: directory of the step.
    stored: its manifest.
    model: the model without the adapter.
    read_weights: as for ``read_base``.
    dtype: dtype of the merged weights; None keeps their own.

  Raises:
    UserError: the base weights are missing or have changed; as ``read_adapter``.
  """
  # Repeat the casts that the run made when it read the base weights. The fingerprint shows whether the result is the same.
  config = dataclasses.replace(model.config, checkpoint=dataclasses.replace(model.config.checkpoint, allow_dtype_change=True))
  below = stored_as(dataclasses.replace(model, config=config), section(ADAPTER, stored.config))
  base = Base.from_json(stored.extra[EXTRA])
  params, found = read_base(below, base.source, base.seed, stored_init_scheme(stored.config), read_weights)
  same_form = model.config.precision.weight_dtype == stored.config.get("precision", {}).get("weight_dtype")
  base.require(found, step, same_form=same_form)
  return merged(params, step, stored, below, dtype)


def merged(params: Any, step: Path | Place, stored: manifest.Manifest, model: Model, dtype: str | None = None) -> Merged:
  """Merges a step's adapter into weights. The memory of weights that are not quantized is reused.

  Args:
    params: weights in the form of the model's base.
    step, stored: the step of the adapter and its manifest.
    model: the model.
    dtype: dtype of the merged weights; None keeps their own.

  Raises:
    UserError: as ``read_adapter``.
  """
  adapter, factors = read_adapter(step, stored, model)
  whole = dataclasses.replace(model, base=None)
  places = jax.tree.map(lambda x: x.sharding, whole.abstract_params)
  everywhere: Any = replicated(model.mesh)
  merge = jax.jit(
    lambda params, factors: adapter.merge({**params, ADAPTER: factors}, dtype, model.base),
    out_shardings=Merged(places, everywhere),
    donate_argnums=() if model.base else 0,
  )
  return merge(params, factors)
