"""Checkpoints that hold an adapter alone: what names the weights below it, and how both are read together."""

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np

from maxtext_like.checkpoint.adapters.adapted_weights import configured_adapter, with_base
from maxtext_like.checkpoint.model_changes import Change
from maxtext_like.checkpoint.store import manifest, restore
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
"""Where a step of an adapter says what lies below it."""


@dataclass(frozen=True)
class Base:
  """The weights below an adapter.

  Attributes:
    source: where they are, an absolute path or a URL; None: they were drawn.
    seed: that they were drawn from; of no meaning with a source.
    fingerprint: see the function of this name.
    files: see ``fingerprint.of_files``; None: unknown, as where an earlier version wrote it.
  """

  source: str | None
  seed: int
  fingerprint: str
  files: str | None = None

  @classmethod
  def of(cls, params: dict[str, Any], init_from: str | None, seed: int) -> "Base":
    """That of a run.

    Args:
      params: of the model; an adapter beside them is no part of them.
      init_from: where they came from; None: from the seed.
      seed: of the run.
    """
    weights = {name: value for name, value in params.items() if name != ADAPTER}
    place = None if init_from is None else located(init_from)
    source = str(place.resolve()) if isinstance(place, Path) else init_from
    return cls(source, seed, fingerprint(weights), None if place is None else of_files(place))

  def to_json(self) -> dict[str, Any]:
    """As ``from_json`` reads it."""
    return asdict(self)

  @classmethod
  def from_json(cls, values: dict[str, Any]) -> "Base":
    """Of what ``to_json`` gave."""
    return cls(**values)

  def same_files(self, found: str | None) -> bool | None:
    """Whether the files are those of ``found`` (``fingerprint.of_files``); None: nobody knows."""
    if self.files is None or found is None or self.files.split()[0] != found.split()[0]:
      return None
    return self.files == found

  def require(self, found: "Base", step: Path | Place, *, same_form: bool = True, changed: Sequence[Change] = ()) -> None:
    """Refuses other weights than those that an adapter was trained on.

    Args:
      found: what is there.
      step: of the adapter.
      same_form: they are in the dtype of then; else every number may be another, and only the files tell.
      changed: the keys that say how they are read and have other values now.

    Raises:
      UserError: they are others.
    """
    if self.fingerprint != found.fingerprint if same_form else self.same_files(found.files) is False:
      lines = "".join(f"{change.line}\n" for change in changed)
      fix = "name the very weights in init_from (a step, where it was a run that went on), with the weight_dtype of then"
      if changed:
        words = " ".join(change.word for change in changed)
        fix = f"{words} (the checkpoint's values)\n       or run_name=NAME (a new run)"
      raise UserError(
        f"{step}: the weights below this adapter are others now\n{lines}  then: {self}\n  now:  {found}\n  fix: {fix}"
      )

  def __str__(self) -> str:
    where = f"drawn from seed {self.seed}" if self.source is None else self.source
    return f"{where}, {self.fingerprint[:16]}"


def holds_adapter_alone(stored: manifest.Manifest) -> bool:
  """Whether a step is an adapter without the weights below it."""
  names = [name for name in stored.leaves if name.startswith("params.")]
  return bool(names) and all(name.startswith(f"params.{ADAPTER}.") for name in names)


def stored_adapter(stored: manifest.Manifest, model: Model) -> Adapter:
  """The adapter that a step holds, for a model that is the one it was trained on."""
  tower = stored.config.get("training", {}).get("vision_tower")
  return configured_adapter(model, section(ADAPTER, stored.config), tower)


def read_adapter(step: Path | Place, stored: manifest.Manifest, model: Model) -> tuple[Adapter, Any]:
  """The adapter of a step, and its factors on the model's devices.

  Raises:
    UserError: damaged, or of another model.
  """
  adapter = stored_adapter(stored, model)
  like = placed(adapter.params(), model.mesh, model.decoder.cfg.rules)
  found = restore.load(step, {"params": {ADAPTER: like}}, config=model.config, allow_dtype_change=True)
  return adapter, found.state["params"][ADAPTER]


def drawn_with(config: dict[str, Any]) -> Scheme:
  """Return the ``init_scheme`` of a stored configuration. Versions without the key drew MaxText's initial values."""
  return config.get("training", {}).get("init_scheme", "maxtext")


def read_base(
  model: Model, init_from: str | None, seed: int, scheme: Scheme, read_weights: Callable[..., Any]
) -> tuple[Any, Base]:
  """Read the weights below an adapter, or draw them again if the run had random weights.

  Args:
    model: the model without the adapter.
    init_from: checkpoint of the weights; None for random weights.
    seed: seed of random weights.
    scheme: ``init_scheme`` of random weights.
    read_weights: (directory, model) -> the weights in it.

  Returns:
    The weights, and the record that identifies them.
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
    # The run that started the adapter accepted any change of the model, so none is refused here.
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
  """The weights below a step's adapter with the adapter added.

  Args:
    step: its directory.
    stored: its manifest.
    model: whose they become.
    read_weights: as of ``read_base``.
    dtype: of the weights that have an addition; None: their own.

  Raises:
    UserError: the weights below are gone, or others than they were; as ``read_adapter``.
  """
  # What the run cast when it read the weights below is cast again; the fingerprint says whether they are the same.
  config = dataclasses.replace(model.config, checkpoint=dataclasses.replace(model.config.checkpoint, allow_dtype_change=True))
  below = with_base(dataclasses.replace(model, config=config), section(ADAPTER, stored.config))
  base = Base.from_json(stored.extra[EXTRA])
  params, found = read_base(below, base.source, base.seed, drawn_with(stored.config), read_weights)
  same_form = model.config.precision.weight_dtype == stored.config.get("precision", {}).get("weight_dtype")
  base.require(found, step, same_form=same_form)
  return merged(params, step, stored, below, dtype)


def merged(params: Any, step: Path | Place, stored: manifest.Manifest, model: Model, dtype: str | None = None) -> Merged:
  """Weights, whose memory is taken where they are not quantised, with a step's adapter added.

  Args:
    params: as the model's base says.
    step, stored: of the adapter.
    model: whose they are.
    dtype: of the weights that have an addition; None: their own.

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
