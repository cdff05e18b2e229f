"""``forward``: runs a checkpoint on arrays and returns every output that can be compared with transformers.

B batch, T position, D model, V vocabulary, E experts.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from maxtext_like.api.arguments import Saved, place_of, words
from maxtext_like.config.load import is_chosen
from maxtext_like.errors import UserError

if TYPE_CHECKING:
  import numpy as np

  from maxtext_like.checkpoint.huggingface.config import HuggingFaceConfig
  from maxtext_like.checkpoint.huggingface.weights import Weights
  from maxtext_like.config.load import Loaded
  from maxtext_like.config.schema import Config
  from maxtext_like.layers.decoder import Decoder
  from maxtext_like.models.model import Model


@dataclass(frozen=True)
class Outputs:
  """Outputs of a model.

  Attributes:
    arrays: arrays by name, float32 unless they are indices: "logits", "loss" with labels, "hidden.layerNN", "router.layerNN.*",
      ...; in float16 "clamped"; with gradients "grad_global_norm" and "grad.<parameter name in transformers>".
    notes: remarks on unused inputs and on the attention kernels.
  """

  arrays: "dict[str, np.ndarray]"
  notes: tuple[str, ...]


def forward(
  checkpoint: str | Path | Saved,
  inputs: "str | Path | Mapping[str, Any]",
  *overrides: str,
  gradients: bool = False,
  **keys: Any,
) -> Outputs:
  """Run a checkpoint on arrays. With ``dtype=float32``, the default of ``matmul_precision`` is highest.

  With ``base_weights`` the weights are quantized while they are read, as for ``load``.

  Args:
    checkpoint: a directory with config.json and safetensors, its name in the local Hugging Face cache, a run, or one of its
      checkpoints. An adapter is merged into the weights below it, unless it was trained on quantized weights: it is then added
      to them, as in training. With gradients, or ``base_weights=null``, it is merged.
    inputs: an .npz file or a dict of arrays: input_ids [B, T]; optional labels (not shifted, -100 is ignored), attention_mask,
      position_ids, segment_ids; with images pixel_values, token_type_ids or mm_token_type_ids [B, T], and for Gemma 4
      image_position_ids.
    overrides: words that override the configuration.
    gradients: also compute gradients of the loss; needs labels.
    keys: the same as Python values.

  Raises:
    UserError: the checkpoint, the inputs or the overrides are invalid.
  """
  import numpy as np

  from maxtext_like.checkpoint.huggingface.inputs import make_batch, read_arrays
  from maxtext_like.checkpoint.weight_sources import find_step

  given, place = words(overrides, keys, forward), place_of(checkpoint, "checkpoint")
  if isinstance(inputs, str | Path):
    arrays, named = read_arrays(Path(inputs).expanduser()), str(inputs)
  else:
    named = "inputs"
    try:
      arrays = {name: np.asarray(x) for name, x in inputs.items()}
    except (AttributeError, ValueError) as error:
      raise UserError(
        f'{named}: not a dict of arrays: {error}\n  fix: pass {{"input_ids": [[5, 6], [8, 9]]}}, with rows of equal length'
      ) from None
  step = None if (place / "config.json").is_file() else find_step(place)
  opened = _open_hugging_face(place, given, arrays) if step is None else _open_step(step, given, gradients=gradients)
  loaded, weights = opened
  if gradients and isinstance(weights, StepWeights) and weights.model.base is not None:
    raise UserError(
      f"forward: gradients with base_weights = {weights.model.base.form.name}\n"
      "  why: quantized weights are not trained and have no gradients\n  fix: leave base_weights or the gradients out"
    )
  model = loaded.config.model
  lookup = weights.decoder.cfg.lookup
  read = make_batch(arrays, named, vocab_size=model.vocab_size, lookup=lookup, vision=loaded.config.vision)
  if gradients and "targets" not in read.batch:
    raise UserError(f"{named}: gradients need labels, which are missing\n  fix: add labels [B, T]")
  kernels = _settle_kernels(weights, loaded, read.batch)
  outputs = evaluator(weights, loaded.config, gradients=gradients)(weights.load(), read.batch)
  unused = [f"{named}: not used: {', '.join(read.unused)}"] if read.unused else []
  return Outputs(outputs, (*loaded.notes, *weights.notes, *kernels, *unused))


@dataclass
class StepWeights:
  """Weights of a checkpoint of this project, or quantized weights, with the interface of ``Weights``, which reads Hugging Face
  checkpoints.

  Attributes:
    decoder: the model.
    model: the model on its device.
    step: directory of the checkpoint, or of a Hugging Face checkpoint with quantized weights.
    exact: merge an adapter in float32 for any dtype of the stored weights.
    notes: remarks about the weights, complete after ``load``.
  """

  decoder: "Decoder"
  model: "Model"
  step: Path
  exact: bool = False
  notes: tuple[str, ...] = ()

  def load(self) -> Any:
    """Return the parameters, with an adapter merged, or added to quantized weights. Raises UserError, NonFiniteError."""
    from maxtext_like.checkpoint.adapters.adapter_step import holds_adapter_alone
    from maxtext_like.checkpoint.adapters.inference_weights import read_stored
    from maxtext_like.checkpoint.read_weights import read_merged, read_weights
    from maxtext_like.checkpoint.store import manifest
    from maxtext_like.checkpoint.store.stored_config import section

    if self.model.base is not None:
      return read_stored(self.step, self.model)
    stored = manifest.read(self.step)
    stored_in = self.model.config.precision.weight_dtype
    if not (self.exact and stored_in != "float32" and holds_adapter_alone(stored)):
      return read_weights(self.step, self.model)
    params, _ = read_merged(self.step, stored, self.model, "float32")
    form = section("adapter", stored.config).base_weights
    below = f"{form} weights (those that are not quantized are {stored_in})" if form else f"{stored_in} weights"
    self.notes += (f"the adapter is merged in float32 into {below}; weight_dtype={stored_in} would round the sums",)
    return params

  def in_transformers(self, tree: dict) -> "Iterator[tuple[str, np.ndarray]]":
    """Yield the arrays of a tree with the structure of the parameters by their names in transformers."""
    from maxtext_like.checkpoint.huggingface.weights import in_transformers

    config = self.model.config
    return in_transformers(self.decoder, config.model.decoder_block, tree, nested=config.vision.use_multimodal)


def _open_hugging_face(
  place: Path, given: list[str], arrays: "Mapping[str, np.ndarray]"
) -> "tuple[Loaded, Weights | StepWeights]":
  from maxtext_like.checkpoint.adapters.inference_weights import with_storage
  from maxtext_like.checkpoint.huggingface.config import read_config
  from maxtext_like.checkpoint.huggingface.inputs import has_images
  from maxtext_like.checkpoint.huggingface.model_file import load_checkpoint_config

  shape = arrays["input_ids"].shape if "input_ids" in arrays else ()
  # Read the vision tower only if there are images; an override may change this.
  tower = ["use_multimodal=true"] if has_images(arrays) and read_config(place).has_tower else []
  # The minimum of max_target_length is 2, because training needs a target. A single token is enough here.
  longest = max(shape[1], 2) if len(shape) == 2 else None
  config, loaded = load_checkpoint_config(place, [*tower, *given], length=longest, inference=True)
  weights = open_weights(place, config, loaded)
  if loaded.config.adapter.base_weights is None:
    return loaded, weights
  model, line = with_storage(_model(loaded), place, chosen=True)
  return loaded, StepWeights(weights.decoder, model, place, notes=(line, *weights.notes))


def _open_step(step: Path, given: list[str], *, gradients: bool) -> "tuple[Loaded, StepWeights]":
  """Return the configuration and weights of a step. With gradients, an adapter is merged unless ``base_weights`` is set."""
  from maxtext_like.checkpoint.adapters.inference_weights import with_storage
  from maxtext_like.checkpoint.store import manifest
  from maxtext_like.checkpoint.store.stored_config import load_stored
  from maxtext_like.training.loop.divergence import failed_notes

  try:
    stored = manifest.read(step)
    loaded = load_stored(stored.config, str(step), given, inference=True)
  except manifest.DamageError as error:
    raise UserError(f"{step}: not a complete checkpoint: {error}", fix=manifest.ANOTHER) from None
  model, line = with_storage(_model(loaded), step, chosen=gradients or is_chosen(loaded, "adapter.base_weights"))
  exact = loaded.config.precision.dtype == "float32" and not is_chosen(loaded, "precision.weight_dtype")
  # A merge in another dtype than that of the weights has its own note.
  widened = exact and model.base is None and loaded.config.precision.weight_dtype != "float32"
  notes = (line,) if line and not widened else ()
  notes += failed_notes(stored)
  return loaded, StepWeights(_decoder(loaded), model, step, exact=exact, notes=notes)


def _model(loaded: "Loaded") -> "Model":
  """Return the model of a configuration on one device."""
  import jax

  from maxtext_like.models.model import make_model
  from maxtext_like.sharding.mesh import make_mesh

  return make_model(loaded.config, mesh=make_mesh(loaded.config.mesh, jax.local_devices()[:1]), runs_attention=False)


def open_weights(checkpoint: Path, config: "HuggingFaceConfig", loaded: "Loaded") -> "Weights":
  """Return the weights of a checkpoint, matched with the decoder of its configuration."""
  from maxtext_like.checkpoint.huggingface.weights import Weights

  return Weights(checkpoint, _decoder(loaded), config)


def _decoder(loaded: "Loaded") -> "Decoder":
  """Return the decoder of a configuration. With float32, the default of ``matmul_precision`` is highest."""
  import dataclasses

  import jax

  from maxtext_like.models.build import build_decoder, precision_of

  settings, training = loaded.config.precision, loaded.config.training
  precision = precision_of(settings)
  if precision.dtype == "float32" and not is_chosen(loaded, "precision.matmul_precision"):
    precision = dataclasses.replace(precision, matmul_precision="highest")
  return build_decoder(
    loaded.config.model,
    precision,
    layer_precision=settings.layer_precision,
    vision=loaded.config.vision,
    scan_layers=training.scan_layers,
    remat_policy=training.remat_policy,
    attention=training.attention,
    platform=jax.default_backend(),
  )


def _settle_kernels(weights: "Weights | StepWeights", loaded: "Loaded", batch: dict[str, "np.ndarray"]) -> list[str]:
  """Give the decoder attention kernels that pass their self-test on this device; return a note for each fused kernel."""
  import jax

  from maxtext_like.models.attention_kernels import Rows, settle
  from maxtext_like.models.kernel_verdicts import Target

  patches = None
  if "pixel_values" in batch:
    positions = batch.get("image_position_ids")
    patches = loaded.config.vision.patches if positions is None else positions.shape[-2]
  device = jax.local_devices()[0]
  target = Target(
    platform=jax.default_backend(),
    capability=getattr(device, "compute_capability", None),
    device=device,
    cache=loaded.config.logging.compilation_cache_dir,
  )
  images, segments = "token_types" in batch, "segments" in batch
  rows = Rows(length=batch["tokens"].shape[1], images=images, patches=patches, segments=segments)
  weights.decoder, uses = settle(weights.decoder, rows, target)
  return [f"attention: {use}" for use in uses if use.is_notable]


def evaluator(
  weights: "Weights | StepWeights", config: "Config", *, gradients: bool, compiler_options: dict | None = None
) -> Callable[[dict, dict[str, "np.ndarray"]], dict[str, "np.ndarray"]]:
  """Return a function (parameters, batch) -> outputs by name, compiled once per shape of the batch.

  Args:
    weights: checkpoint and decoder.
    config: configuration of the run; ``module_api`` is the Flax API that is called. Quantized weights are passed to the layer
      itself, which gives the same bits, because a Flax module has one array for each weight.
    gradients: also return gradients of the loss; the batch then needs "targets".
    compiler_options: options of XLA.
  """
  import jax
  import numpy as np

  from maxtext_like.api.forward_layer import ForwardLayer
  from maxtext_like.training.step.program import make_apply

  layer = ForwardLayer(weights.decoder, padding_idx=config.model.pad_token_id)
  quantized = isinstance(weights, StepWeights) and weights.model.base is not None
  apply = make_apply(layer, "plain" if quantized else config.training.module_api)
  program = jax.jit(jax.value_and_grad(apply, has_aux=True) if gradients else apply, compiler_options=compiler_options)

  def evaluate(params: dict, batch: dict[str, "np.ndarray"]) -> dict[str, "np.ndarray"]:
    result = jax.device_get(program(params, batch))
    outputs, grads = (result[0][1], result[1]) if gradients else (result[1], None)
    outputs = _packed_images(outputs)
    named = {name: _plain(name, array) for name, array in outputs.items()}
    if grads is not None:
      squares = 0.0
      for name, gradient in weights.in_transformers(grads):
        named[f"grad.{name}"] = gradient.astype(np.float32)
        squares += float(np.sum(np.square(gradient.astype(np.float64))))
      named["grad_global_norm"] = np.asarray(np.sqrt(squares), np.float32)
    return named

  return evaluate


def _packed_images(outputs: dict[str, "np.ndarray"]) -> dict[str, "np.ndarray"]:
  """Return Gemma 4's image tokens as in transformers: all images in a row without padding, [tokens, ...]."""
  outputs = dict(outputs)
  valid = outputs.pop("vision.valid", None)
  if valid is not None and "vision.pooled" in outputs:
    outputs |= {name: outputs[name][valid] for name in ("vision.tower_out", "vision.projected")}
  return outputs


def _plain(name: str, array: "np.ndarray") -> "np.ndarray":
  """Convert to float32, or int32 for indices. Router outputs get shape [B * T, ...], as in transformers."""
  import numpy as np

  array = array.astype(np.int32 if array.dtype.kind in "iu" else np.float32)
  return array.reshape(-1, array.shape[-1]) if name.startswith("router.") else array
