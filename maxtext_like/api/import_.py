"""``import_checkpoint``: converts a Hugging Face checkpoint or an adapter of peft."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from maxtext_like.api.arguments import Saved, place_of, words
from maxtext_like.errors import UserError

HUGGING_FACE = "hugging_face"
"""Folder of an imported checkpoint with config.json and the tokenizer's files; export reads them."""


@dataclass(frozen=True)
class Imported(Saved):
  """An imported checkpoint or adapter.

  Attributes:
    directory: directory with model.yml, checkpoints/0 (weights and tokenizer files) and hugging_face/; for an adapter with
      checkpoints/0 (its factors) and the overlay adapter.yml.
    tensors: number of tensors that were read.
    notes: remarks, for example on tensors that were left out.
    words: arguments of ``maxtext-like train`` to train from it.
  """

  directory: Path
  tensors: int
  notes: tuple[str, ...]
  words: tuple[str, ...] = ()


def import_checkpoint(source: str | Path | Saved, out: str | Path, *overrides: str, **keys: Any) -> Imported:
  """Convert a Hugging Face checkpoint, or an adapter of peft, to this project's format, to train from it.

  Weights are stored in ``weight_dtype``; the default float32 represents 16-bit and 8-bit weights exactly. An adapter becomes
  the checkpoint of a run with its settings, which ``load`` and the export functions accept.

  Args:
    source: a directory with config.json and safetensors, its name in the local Hugging Face cache, or a directory with
      adapter_config.json. The weights below an adapter are those of ``init_from``, or those that it names.
    out: a new or empty directory.
    overrides: words that override the configuration, such as ``"weight_dtype=..."`` and the mesh.
    keys: the same as Python values.

  Raises:
    UserError: the checkpoint, the overrides or ``out`` is invalid; no partial output remains.
  """
  from maxtext_like.checkpoint.huggingface import peft
  from maxtext_like.checkpoint.huggingface.config import read_config
  from maxtext_like.checkpoint.huggingface.export import read_origin
  from maxtext_like.checkpoint.huggingface.model_file import load_checkpoint_config, model_file
  from maxtext_like.checkpoint.huggingface.weights import Weights
  from maxtext_like.checkpoint.huggingface.writer import new_directory
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
    (part / HUGGING_FACE).mkdir()
    sidecar_files.copy([place / "config.json", *read_origin(place).files], part / HUGGING_FACE)
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
  """Import an adapter of peft as step 0 of a run that trained it."""
  from dataclasses import replace

  import jax

  from maxtext_like.api.pretrained import load
  from maxtext_like.checkpoint.adapters.adapted_weights import configured_adapter
  from maxtext_like.checkpoint.adapters.adapter_step import EXTRA, Base
  from maxtext_like.checkpoint.adapters.init_adapter import factors, peft_settings
  from maxtext_like.checkpoint.huggingface import peft
  from maxtext_like.checkpoint.huggingface.writer import new_directory
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
      f"{', which is not a directory' + hub.advice(str(base)) if base else ''}",
      fix=hub.fix(str(base), "name them with init_from=DIR"),
    )
  loaded = load(below, *(word for word in given if not word.startswith("init_from=")))
  if loaded.model.base is not None:
    raise UserError(
      f"import: base_weights = {loaded.model.base.form.name} has no effect: an imported adapter has no weights below it\n"
      "  fix: leave it out, and write it after train or generate"
    )
  settings = peft_settings(place, loaded.model)
  read = peft.read_adapter(place, loaded.model.decoder, loaded.model.config.model.decoder_block)
  config = loaded.model.config
  checkpoint = replace(config.checkpoint, init_from=str(below))
  training = replace(config.training, vision_tower=read.vision_tower)
  model = replace(loaded.model, config=replace(config, adapter=settings, checkpoint=checkpoint, training=training))
  adapter = configured_adapter(model, settings, read.vision_tower)
  params = {**loaded.params, ADAPTER: init(adapter.params(), jax.random.key(0))}
  params = adapter.started(params, model.decoder.precision)  # also for layers without an addition
  extra = {EXTRA: Base.of(params, str(below), 0).to_json()}
  lines = {"lora_from": str(target.resolve())} | {
    key: getattr(settings, key) for key in ("lora_rank", "lora_alpha", "lora_rslora", "lora_dora", "lora_modules")
  }
  rarer = "lora_dropout", "modules_to_save", "lora_rank_pattern", "lora_alpha_pattern"
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

  from maxtext_like.checkpoint.store.stored_state import flatten

  for name, leaf in flatten(params).items():
    if not all(np.isfinite(np.asarray(shard.data)).all() for shard in leaf.addressable_shards):
      raise UserError(
        f"the checkpoint has non-finite numbers in {name}\n  fix: check whether the file is damaged, and download it again"
      )
