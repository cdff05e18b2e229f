"""Hugging Face checkpoints and peft's adapters to ours, and back."""

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from maxtext_like.api.arguments import Saved, dtype_name, place_of, words
from maxtext_like.errors import UserError

if TYPE_CHECKING:
  from maxtext_like.checkpoint.huggingface.export import Origin
  from maxtext_like.checkpoint.store.manifest import Manifest
  from maxtext_like.models.model import Model
  from maxtext_like.storage import Place

FOLDER = "hugging_face"
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Imported(Saved):
  """A checkpoint of ours that was made of a Hugging Face one, or of an adapter of peft's.

  Attributes:
    directory: model.yml to train with, checkpoints/0 with the weights and the tokenizer's files, and hugging_face/; of an
      adapter checkpoints/0 with its factors, and adapter.yml to lay over a model.
    tensors: that were read.
    notes: on what was left out.
    words: to train from it, behind "train".
  """

  directory: Path
  tensors: int
  notes: tuple[str, ...]
  words: tuple[str, ...] = ()


@dataclass(frozen=True)
class Exported(Saved):
  """A Hugging Face checkpoint that was made of one of ours.

  Attributes:
    directory: config.json, safetensors and the rest; here or in a store.
    tensors: that were written.
    dtype: of them.
    files: that came along, as the tokenizer's.
    notes: on what is missing.
  """

  directory: "Path | Place"
  tensors: int
  dtype: str
  files: tuple[str, ...]
  notes: tuple[str, ...]


def import_checkpoint(source: str | Path | Saved, out: str | Path, *overrides: str, **keys: Any) -> Imported:
  """Turns a Hugging Face checkpoint, or an adapter of peft's, into one of ours, to train from.

  Weights are stored in ``weight_dtype``, which keeps every digit of 16-bit and 8-bit files by default. An adapter becomes what
  a run with its settings would have saved: ``load`` and the export functions take it as one.

  Args:
    source: a directory with config.json and safetensors, or the name of one in this machine's Hugging Face cache; or one with
      adapter_config.json. The weights below an adapter are those of ``init_from``, else those that it names.
    out: a directory that does not exist, or an empty one.
    overrides: words laid over the configuration, ``"weight_dtype=..."`` and the mesh among them.
    keys: the same as Python values.

  Raises:
    UserError: anything wrong with the checkpoint, the overrides or ``out``; nothing is left behind.
  """
  from maxtext_like.checkpoint.huggingface import peft
  from maxtext_like.checkpoint.huggingface.config import read_config
  from maxtext_like.checkpoint.huggingface.export import read_origin
  from maxtext_like.checkpoint.huggingface.model_file import load_checkpoint_config, model_file
  from maxtext_like.checkpoint.huggingface.new_directory import new_directory
  from maxtext_like.checkpoint.huggingface.weights import Weights
  from maxtext_like.checkpoint.store import sidecar_files
  from maxtext_like.checkpoint.store.manager import CheckpointManager
  from maxtext_like.layers.param import shardings
  from maxtext_like.models.model import make_model

  given, place, target = words(overrides, keys, import_checkpoint), place_of(source, "source"), Path(out).expanduser()
  if peft.is_adapter(place):
    return _import_adapter(place, target, given)
  tower = ["use_multimodal=true"] if read_config(place).has_tower else []
  config, loaded = load_checkpoint_config(place, [*tower, *given], length=2048)
  model = make_model(loaded.config, runs_attention=False)
  weights = Weights(place, model.decoder, config)
  with new_directory(target, "model.yml") as new:
    part = new.path
    params = weights.load(shardings(model.spec, model.mesh, model.decoder.cfg.rules))
    _require_finite(params)
    (part / FOLDER).mkdir()
    sidecar_files.copy([place / "config.json", *read_origin(place).files], part / FOLDER)
    (part / "model.yml").write_text(model_file(config, place), encoding="utf-8")
    extra = {"hugging_face": {"source": str(place.resolve())}}
    tokenizer = sidecar_files.contents(place)
    manager = CheckpointManager(
      part / "checkpoints", config=loaded.config, interval=1, max_to_keep=1, asynchronous=False, tokenizer=tokenizer
    )
    with manager:
      manager.save_and_wait(0, {"params": params}, extra)
  train = (str(target / "model.yml"), f"init_from={target}")
  return Imported(target, len(weights.table), (*loaded.notes, *weights.notes), train)


def _import_adapter(place: Path, target: Path, given: list[str]) -> Imported:
  """What peft wrote as the step 0 of a run that trained it."""
  from dataclasses import replace

  import jax

  from maxtext_like.api.pretrained import load
  from maxtext_like.checkpoint.adapters.adapted_weights import configured_adapter
  from maxtext_like.checkpoint.adapters.adapter_step import EXTRA, Base
  from maxtext_like.checkpoint.adapters.init_adapter import factors, peft_settings
  from maxtext_like.checkpoint.huggingface import peft
  from maxtext_like.checkpoint.huggingface.new_directory import new_directory
  from maxtext_like.checkpoint.store import sidecar_files
  from maxtext_like.checkpoint.store.manager import CheckpointManager
  from maxtext_like.config import hub
  from maxtext_like.config.yaml_file import to_text
  from maxtext_like.layers.param import init
  from maxtext_like.models.naming import ADAPTER

  named = [word.partition("=")[2] for word in given if word.startswith("init_from=")]
  base = named[-1] if named else peft.read_settings(place).get("base_model_name_or_path")
  below = None if not base else hub.find(str(base)) or Path(str(base)).expanduser()
  if below is None or not below.is_dir():
    raise UserError(
      f"{place / peft.CONFIG}: the weights below are {base or 'not named'}"
      f"{', which is no directory here' + hub.advice(str(base)) if base else ''}\n  fix: name them: init_from=DIR"
    )
  loaded = load(below, *(word for word in given if not word.startswith("init_from=")))
  settings = peft_settings(place, loaded.model)
  read = peft.read_adapter(place, loaded.model.decoder, loaded.model.config.model.decoder_block)
  config = loaded.model.config
  checkpoint = replace(config.checkpoint, init_from=str(below))
  training = replace(config.training, vision_tower=read.vision_tower)
  model = replace(loaded.model, config=replace(config, adapter=settings, checkpoint=checkpoint, training=training))
  adapter = configured_adapter(model, settings, read.vision_tower)
  params = {**loaded.params, ADAPTER: init(adapter.params(), jax.random.key(0))}
  params = adapter.started(params, model.decoder.precision)  # of layers that have no addition
  extra = {EXTRA: Base.of(params, str(below), 0).to_json()}
  lines = {"lora_from": str(target.resolve())} | {
    key: getattr(settings, key) for key in ("lora_rank", "lora_alpha", "lora_rslora", "lora_dora", "lora_modules")
  }
  rarer = "modules_to_save", "lora_rank_pattern", "lora_alpha_pattern"
  lines |= {key: value for key in rarer if (value := getattr(settings, key))}
  with new_directory(target, "adapter.yml") as new:
    part = new.path
    text = ["adapter:", *(f"  {key}: {to_text(value)}" for key, value in lines.items())]
    text += ["", "checkpoint:", f"  init_from: {to_text(str(below.resolve()))}"]
    (part / "adapter.yml").write_text(f"# Made from {place}.\n\n" + "\n".join(text) + "\n", encoding="utf-8")
    tokenizer = sidecar_files.contents(loaded.files or below)
    manager = CheckpointManager(
      part / "checkpoints", config=model.config, interval=1, max_to_keep=1, asynchronous=False, tokenizer=tokenizer
    )
    with manager:
      manager.save_and_wait(0, {"params": {ADAPTER: factors(read, params[ADAPTER])}}, extra)
  tensors = sum(2 + (own.magnitude is not None) for own in read.maps) + len(read.whole)
  return Imported(target, tensors, loaded.notes, ("MODEL", str(target / "adapter.yml")))


def _require_finite(params: dict) -> None:
  import numpy as np

  from maxtext_like.checkpoint.store.tree import flatten

  for name, leaf in flatten(params).items():
    if not all(np.isfinite(np.asarray(shard.data)).all() for shard in leaf.addressable_shards):
      raise UserError(f"the checkpoint holds numbers that are not finite, in {name}; is the file damaged?")


def export_checkpoint(
  source: str | Path | Saved,
  out: str | Path,
  *,
  dtype: Literal["bfloat16", "float16", "float32"] | None = None,
  shard_size: str | int = "5GB",
  merge: bool = False,
) -> Exported:
  """Writes the weights of a run, or of an imported checkpoint, for transformers and vLLM.

  Args:
    source: a run, a directory of steps, a step, or an imported checkpoint.
    out: a directory that does not exist, or an empty one; it may be a URL of a store.
    dtype: of the weights; None: what the model was imported with, else bfloat16.
    shard_size: bytes of one file, also as "5GB" or "500MB".
    merge: refuses what has no adapter; one that is there is added in any case.

  Raises:
    UserError: no complete checkpoint there, no such dtype, no adapter to merge, or ``out`` cannot be written.
    RetryableError: a store does not answer.
  """
  from maxtext_like.checkpoint.adapters.adapter_step import holds_adapter_alone
  from maxtext_like.checkpoint.huggingface.config import require_counterpart
  from maxtext_like.checkpoint.huggingface.export import EXPORT_DTYPES, export_hugging_face
  from maxtext_like.checkpoint.huggingface.writer import parse_size
  from maxtext_like.checkpoint.read_weights import read_merged
  from maxtext_like.checkpoint.store.sidecar_files import name_of
  from maxtext_like.checkpoint.store.stored_config import section
  from maxtext_like.checkpoint.weight_sources import located

  dtype = dtype_name(dtype)
  if dtype not in (None, *EXPORT_DTYPES):
    raise UserError(f"export: dtype {dtype!r}\n  fix: one of {', '.join(EXPORT_DTYPES)}")
  target, size = located(out), parse_size(str(shard_size))
  step, stored = _step_of(source)
  require_counterpart(section("model", stored.config))  # before its weights are read
  origin, notes = _origin(step, stored), ()
  _warn_if_failed(step, stored)
  dtype = dtype or origin.dtype or "bfloat16"
  if holds_adapter_alone(stored):
    whole = _on_one_device(step, stored)
    model, vision, decoder = whole.config.model, whole.config.vision, whole.decoder
    params, rounding = read_merged(step, stored, whole, dtype)
    below = section("adapter", stored.config).base_weights or whole.config.precision.weight_dtype
    notes = (f"the adapter is added to weights of {below}; what rounding to {dtype} changes is {rounding:.2g} of what it adds",)
  elif merge:
    raise UserError(f"{step}: holds a whole model and no adapter to merge\n  fix: export it without merge")
  else:
    model, vision, decoder, params = _own(step, stored)
  tensors = export_hugging_face(target, params, decoder, model, vision=vision, dtype=dtype, shard_size=size, origin=origin)
  files = tuple(map(name_of, origin.files))
  if not any("tokenizer" in name for name in files):
    notes += ("no tokenizer's files came with the model (bytes need none); transformers wants one beside the weights",)
  return Exported(target, tensors, str(dtype), files, notes)


@dataclass(frozen=True)
class ExportedAdapter(Saved):
  """An adapter that was written for peft.

  Attributes:
    directory: adapter_config.json and adapter_model.safetensors; here or in a store.
    maps: linear maps that it adds to.
    rank: of the additions; of most, where lora_rank_pattern gives some another.
    base: the weights that it was trained on; None: they were drawn.
    seed: that they were drawn from; of no meaning with a base.
    base_weights: the form that they were quantised to; None: they were not.
    notes: what peft's settings have no place for.
  """

  directory: "Path | Place"
  maps: int
  rank: int
  base: str | None
  seed: int
  base_weights: str | None
  notes: tuple[str, ...] = ()

  @property
  def below(self) -> str:
    """The weights that it was trained on, in words."""
    quantised = f", which were {self.base_weights} as it was trained" if self.base_weights else ""
    return (self.base or f"weights drawn from seed {self.seed}") + quantised


def export_adapter(source: str | Path | Saved, out: str | Path) -> ExportedAdapter:
  """Writes the adapter of a run that trained with ``lora_rank``, as ``peft.PeftModel.from_pretrained`` loads it.

  Args:
    source: the run, or a step of it.
    out: a directory that does not exist, or an empty one; it may be a URL of a store.

  Raises:
    UserError: it has none, transformers has no such model, peft has no place for a part of it, or ``out`` cannot be written.
  """
  from maxtext_like.checkpoint.adapters.adapter_step import EXTRA, Base, holds_adapter_alone, read_adapter
  from maxtext_like.checkpoint.huggingface.config import require_counterpart
  from maxtext_like.checkpoint.huggingface.peft import write_adapter
  from maxtext_like.checkpoint.store.stored_config import section
  from maxtext_like.checkpoint.weight_sources import located

  target, (step, stored) = located(out), _step_of(source)
  if not holds_adapter_alone(stored):
    raise UserError(f"{step}: holds a whole model and no adapter\n  fix: export it as a model")
  require_counterpart(section("model", stored.config))
  _warn_if_failed(step, stored)
  model = _on_one_device(step, stored)
  adapter, factors = read_adapter(step, stored, model)
  base = Base.from_json(stored.extra[EXTRA])
  nested = model.decoder.cfg.vision is not None or _origin(step, stored).nested
  settings = section("adapter", stored.config)
  written = write_adapter(
    target,
    adapter,
    factors,
    model.decoder,
    model.config.model.decoder_block,
    base=base.source,
    nested=nested,
    settings=settings,
  )
  return ExportedAdapter(target, written.maps, settings.lora_rank, base.source, base.seed, settings.base_weights, written.notes)


def _warn_if_failed(step: Path, stored: "Manifest") -> None:
  """Warns if the run that saved the step has failed."""
  from maxtext_like.training.loop.divergence import reasons_of

  if reasons := reasons_of(stored):
    _log.warning("%s: the run has failed, and these weights are not usable: %s", step, "; ".join(reasons))


def _step_of(source: str | Path | Saved) -> tuple[Path, "Manifest"]:
  """The newest complete step of what was named, and its manifest."""
  from maxtext_like.checkpoint.store import manifest
  from maxtext_like.checkpoint.weight_sources import find_step

  place = place_of(source, "source")
  step = find_step(place)
  if step is None:
    raise UserError(
      f"{place}: no complete checkpoint\n"
      "  fix: name a run directory, one of its checkpoints/N, or what import made of a Hugging Face checkpoint"
    )
  try:
    return step, manifest.read(step)
  except manifest.DamageError as error:
    raise UserError(f"{step}: not a complete checkpoint: {error}") from None


def _on_one_device(step: Path, stored: "Manifest") -> "Model":
  """The model of a step, on the first device of this process."""
  import jax

  from maxtext_like.checkpoint.store.stored_config import load_stored
  from maxtext_like.models.model import make_model
  from maxtext_like.sharding.mesh import make_mesh

  config = load_stored(stored.config, str(step)).config
  return make_model(config, mesh=make_mesh(config.mesh, jax.local_devices()[:1]), runs_attention=False)


def _own(step: Path, stored: "Manifest") -> tuple[Any, Any, Any, Any]:
  """model:, vision:, the decoder and the weights of a step that holds them, on the first device of this process."""
  import jax

  from maxtext_like.checkpoint.store import restore
  from maxtext_like.checkpoint.store.stored_config import section
  from maxtext_like.layers.param import abstract
  from maxtext_like.layers.precision import Precision
  from maxtext_like.models.build import build_decoder

  model, vision = section("model", stored.config), section("vision", stored.config)
  weight_dtype = stored.config.get("precision", {}).get("weight_dtype", "float32")
  decoder = build_decoder(model, Precision(weight_dtype=weight_dtype), vision=vision)
  local = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
  like = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=local), abstract(decoder.params()))
  return model, vision, decoder, restore.load(step, {"params": like}).state["params"]


def _origin(step: Path, stored: Any) -> "Origin":
  """What the model inherits from the Hugging Face checkpoint that its weights began with; the tokenizer is the step's own."""
  from dataclasses import replace

  from maxtext_like.checkpoint.store import manifest, sidecar_files

  origin = _beginning(step, stored)
  own = sidecar_files.beside(manifest.home(step, stored) / sidecar_files.FOLDER)
  if not any(file.name.startswith("tokenizer.") for file in own):
    return origin
  names = {file.name for file in own}
  rest = [file for file in origin.files if file.name in sidecar_files.OF_THE_MODEL and file.name not in names]
  return replace(origin, files=(*own, *rest))


def _beginning(step: Any, stored: Any) -> "Origin":
  """What the checkpoint at the beginning of a chain of ``init_from`` hands down."""
  from maxtext_like.checkpoint.huggingface.export import Origin, read_origin
  from maxtext_like.checkpoint.store import manifest
  from maxtext_like.checkpoint.weight_sources import find_step, hugging_face_here, is_hugging_face, located

  seen: set[Any] = set()
  while step not in seen:
    seen.add(step)
    for home in (step.parent.parent, step.parent):
      if is_hugging_face(home / FOLDER):
        return read_origin(hugging_face_here(home / FOLDER, weights=False))
    beginning = stored.config.get("checkpoint", {}).get("init_from")
    if not beginning:
      break
    directory = located(beginning)
    if is_hugging_face(directory):
      return read_origin(hugging_face_here(directory, weights=False))
    earlier = find_step(directory)
    if earlier is None:
      break
    step, stored = earlier, manifest.read(earlier)
  return Origin()
