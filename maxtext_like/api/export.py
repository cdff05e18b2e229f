"""``export_checkpoint`` and ``export_adapter``: write weights for transformers and vLLM, or an adapter for peft."""

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from maxtext_like.api.arguments import Saved, dtype_name, place_of
from maxtext_like.api.import_ import HUGGING_FACE
from maxtext_like.errors import UserError

if TYPE_CHECKING:
  from collections.abc import Mapping

  from maxtext_like.checkpoint.huggingface.export import Origin
  from maxtext_like.checkpoint.store.manifest import Manifest
  from maxtext_like.models.model import Model
  from maxtext_like.storage import Place

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Exported(Saved):
  """An exported checkpoint in Hugging Face's format.

  Attributes:
    directory: directory with config.json and safetensors files, local or in a store.
    tensors: number of written tensors.
    dtype: dtype of the tensors.
    files: further written files, such as the tokenizer's.
    notes: remarks, for example on missing files.
  """

  directory: "Path | Place"
  tensors: int
  dtype: str
  files: tuple[str, ...]
  notes: tuple[str, ...]


def export_checkpoint(
  source: str | Path | Saved,
  out: str | Path,
  *,
  dtype: Literal["bfloat16", "float16", "float32"] | None = None,
  shard_size: str | int = "5GB",
  merge: bool = False,
) -> Exported:
  """Write the weights of a run, or of an imported checkpoint, for transformers and vLLM.

  Args:
    source: a run, a directory of steps, a step, or an imported checkpoint.
    out: a new or empty directory, or a URL.
    dtype: dtype of the weights; None: the dtype of the imported checkpoint, or bfloat16.
    shard_size: maximum size of one file in bytes, or as "5GB" or "500MB".
    merge: raise an error if the checkpoint has no adapter. An adapter is merged in any case.

  Raises:
    UserError: there is no complete checkpoint or no adapter to merge, the dtype is unknown, or ``out`` cannot be written.
    RetryableError: a store does not answer.
  """
  from maxtext_like.checkpoint.adapters.adapter_step import holds_adapter_alone
  from maxtext_like.checkpoint.huggingface.config import lost_losses, require_counterpart
  from maxtext_like.checkpoint.huggingface.export import EXPORT_DTYPES, export_hugging_face
  from maxtext_like.checkpoint.huggingface.writer import parse_size
  from maxtext_like.checkpoint.read_weights import read_merged
  from maxtext_like.checkpoint.store.sidecar_files import name_of
  from maxtext_like.checkpoint.store.stored_config import section
  from maxtext_like.checkpoint.weight_sources import located

  dtype = dtype_name(dtype)
  if dtype not in (None, *EXPORT_DTYPES):
    raise UserError(f"export: unknown dtype {dtype!r}\n  fix: pass one of {', '.join(EXPORT_DTYPES)}")
  target, size = located(out), parse_size(str(shard_size))
  step, stored = _step_of(source)
  require_counterpart(section("model", stored.config))  # checked before the weights are read
  origin, notes = _origin(step, stored), ()
  _warn_if_failed(step, stored)
  dtype = dtype or origin.dtype or "bfloat16"
  if holds_adapter_alone(stored):
    whole = _on_one_device(step, stored)
    model, vision, decoder = whole.config.model, whole.config.vision, whole.decoder
    params, rounding = read_merged(step, stored, whole, dtype)
    below = section("adapter", stored.config).base_weights or whole.config.precision.weight_dtype
    notes = (
      f"the adapter is merged into {below} weights; rounding to {dtype} adds an error of {100 * rounding:.2g} % of the "
      "adapter's change (root mean square)",
    )
  elif merge:
    raise UserError(f"{step}: is a complete model without an adapter to merge\n  fix: leave out --merge (merge=True in Python)")
  else:
    model, vision, decoder, params = _own(step, stored)
  notes += () if (lost := lost_losses(model)) is None else (lost,)
  tensors = export_hugging_face(target, params, decoder, model, vision=vision, dtype=dtype, shard_size=size, origin=origin)
  files = tuple(map(name_of, origin.files))
  if not any("tokenizer" in name for name in files):
    notes += ("the model has no tokenizer files (bytes need none), but transformers expects them with the weights",)
  return Exported(target, tensors, str(dtype), files, notes)


@dataclass(frozen=True)
class ExportedAdapter(Saved):
  """An adapter exported for peft.

  Attributes:
    directory: directory with adapter_config.json and adapter_model.safetensors, local or in a store.
    maps: number of adapted linear maps.
    rank: ``lora_rank`` of the adapter; ``lora_rank_pattern`` may set other ranks for some maps.
    base: weights that the adapter was trained on; None if they were random.
    seed: seed of random weights; meaningless with ``base``.
    base_weights: format that the weights were quantized to; None if they were not.
    notes: settings that peft cannot represent, and rows that the base model has to be extended with.
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
    """The weights that the adapter was trained on, as text."""
    quantized = f", quantized to {self.base_weights}" if self.base_weights else ""
    return (self.base or f"weights initialized from seed {self.seed}") + quantized


def export_adapter(source: str | Path | Saved, out: str | Path) -> ExportedAdapter:
  """Write the adapter of a run with ``lora_rank`` for ``peft.PeftModel.from_pretrained``.

  Args:
    source: a run, or one of its steps.
    out: a new or empty directory, or a URL.

  Raises:
    UserError: there is no adapter, transformers lacks the model, peft lacks a setting, or ``out`` cannot be written.
  """
  from maxtext_like.checkpoint.adapters.adapter_step import EXTRA, Base, holds_adapter_alone, read_adapter
  from maxtext_like.checkpoint.added_rows import fewer_rows
  from maxtext_like.checkpoint.huggingface.config import require_counterpart
  from maxtext_like.checkpoint.huggingface.peft import write_adapter
  from maxtext_like.checkpoint.store.sidecar_files import OF_THE_MODEL
  from maxtext_like.checkpoint.store.stored_config import section
  from maxtext_like.checkpoint.weight_sources import located

  target, (step, stored) = located(out), _step_of(source)
  if not holds_adapter_alone(stored):
    raise UserError(f"{step}: is a complete model without an adapter\n  fix: leave out --adapter (export_checkpoint in Python)")
  require_counterpart(section("model", stored.config))
  _warn_if_failed(step, stored)
  model = _on_one_device(step, stored)
  adapter, factors = read_adapter(step, stored, model)
  base = Base.from_json(stored.extra[EXTRA])
  origin = _origin(step, stored)
  nested = model.decoder.cfg.vision is not None or origin.nested
  settings = section("adapter", stored.config)
  # Tokens that the base model lacks are unusable without the tokenizer that has them.
  rows = {} if base.source is None else fewer_rows(located(base.source), model.config.model)
  tokenizer = [file for file in origin.files if file.name not in OF_THE_MODEL] if rows else []
  written = write_adapter(
    target,
    adapter,
    factors,
    model.decoder,
    model.config.model.decoder_block,
    base=base.source,
    nested=nested,
    settings=settings,
    files=tokenizer,
  )
  notes = (*written.notes, *_row_notes(base.source, rows, settings.modules_to_save))
  return ExportedAdapter(target, written.maps, settings.lora_rank, base.source, base.seed, settings.base_weights, notes)


def _row_notes(base: str | None, rows: "Mapping[str, tuple[int, int]]", saved: tuple[str, ...]) -> list[str]:
  """Return a note for each kind of table that has more rows in the run than in the weights below its adapter.

  Args:
    base: the weights.
    rows: rows of the weights and of the run, by key.
    saved: names of the tables that the adapter contains.
  """
  notes = []
  _, now = rows.get("vocab_size", (0, 0))
  if now:
    from_file = f"the rows of {' and '.join(saved)} are in the adapter" if saved else "new rows are the mean of the others"
    notes.append(
      f"the run added rows to the vocabulary of {base} ({rows['vocab_size'][0]} -> {now}): "
      f"call model.resize_token_embeddings({now}) before PeftModel.from_pretrained; {from_file}"
    )
  per_layer = rows.get("vocab_size_per_layer_input", (0, now))
  if per_layer[1] != now:
    notes.append(
      f"the run added rows to embed_tokens_per_layer ({per_layer[0]} -> {per_layer[1]}), but resize_token_embeddings gives it "
      "as many rows as the vocabulary; export --merge writes a complete model"
    )
  return notes


def _warn_if_failed(step: Path, stored: "Manifest") -> None:
  """Log a warning if the run that saved the step has failed."""
  from maxtext_like.training.loop.divergence import failed_notes

  for note in failed_notes(stored):
    _log.warning("%s: %s", step, note)


def _step_of(source: str | Path | Saved) -> tuple[Path, "Manifest"]:
  """Return the newest complete step of a source, and its manifest."""
  from maxtext_like.checkpoint.store import manifest
  from maxtext_like.checkpoint.weight_sources import find_step, unsaved_run

  place = place_of(source, "source")
  step = find_step(place)
  if step is None:
    raise unsaved_run(place) or UserError(
      f"{place}: no complete checkpoint\n  fix: name a run directory, one of its checkpoints/N, or an imported checkpoint"
    )
  try:
    return step, manifest.read(step)
  except manifest.DamageError as error:
    raise UserError(f"{step}: not a complete checkpoint: {error}", fix=manifest.ANOTHER) from None


def _on_one_device(step: Path, stored: "Manifest") -> "Model":
  """Return the model of a step, on the first device of this process."""
  import jax

  from maxtext_like.checkpoint.store.stored_config import load_stored
  from maxtext_like.models.model import make_model
  from maxtext_like.sharding.mesh import make_mesh

  config = load_stored(stored.config, str(step)).config
  return make_model(config, mesh=make_mesh(config.mesh, jax.local_devices()[:1]), runs_attention=False)


def _own(step: Path, stored: "Manifest") -> tuple[Any, Any, Any, Any]:
  """Return sections model and vision, decoder and weights of a complete step, on the first device of this process."""
  import jax

  from maxtext_like.checkpoint.store import stored_state
  from maxtext_like.checkpoint.store.stored_config import section
  from maxtext_like.layers.param import abstract
  from maxtext_like.layers.precision import Precision
  from maxtext_like.models.build import build_decoder

  model, vision = section("model", stored.config), section("vision", stored.config)
  weight_dtype = stored.config.get("precision", {}).get("weight_dtype", "float32")
  decoder = build_decoder(model, Precision(weight_dtype=weight_dtype), vision=vision)
  local = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
  like = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=local), abstract(decoder.params()))
  return model, vision, decoder, stored_state.load(step, {"params": like}).state["params"]


def _origin(step: Path, stored: Any) -> "Origin":
  """Return config.json and files of the Hugging Face checkpoint that the run started from, with the step's own tokenizer."""
  from dataclasses import replace

  from maxtext_like.checkpoint.store import manifest, sidecar_files

  origin = _beginning(step, stored)
  own = sidecar_files.find(manifest.home(step, stored) / sidecar_files.FOLDER)
  if not any(file.name.startswith("tokenizer.") for file in own):
    return origin
  names = {file.name for file in own}
  rest = [file for file in origin.files if file.name in sidecar_files.OF_THE_MODEL and file.name not in names]
  return replace(origin, files=(*own, *rest))


def _beginning(step: Any, stored: Any) -> "Origin":
  """Return the origin of the first checkpoint in the chain of ``init_from``."""
  from maxtext_like.checkpoint.huggingface.export import Origin, read_origin
  from maxtext_like.checkpoint.store import manifest
  from maxtext_like.checkpoint.weight_sources import find_step, is_hugging_face, local_hugging_face, located

  seen: set[Any] = set()
  while step not in seen:
    seen.add(step)
    for home in (step.parent.parent, step.parent):
      if is_hugging_face(home / HUGGING_FACE):
        return read_origin(local_hugging_face(home / HUGGING_FACE, weights=False))
    beginning = stored.config.get("checkpoint", {}).get("init_from")
    if not beginning:
      break
    directory = located(beginning)
    if is_hugging_face(directory):
      return read_origin(local_hugging_face(directory, weights=False))
    earlier = find_step(directory)
    if earlier is None:
      break
    step, stored = earlier, manifest.read(earlier)
  return Origin()
