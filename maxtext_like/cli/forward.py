"""``maxtext-like forward``: a Hugging Face checkpoint on given arrays, written out for comparison with transformers.

B batch, T position, D model, V vocabulary, E experts.
"""

import argparse
import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from maxtext_like.config.hub import checkpoint_path
from maxtext_like.config.paths import existing_path, local_path
from maxtext_like.errors import UserError

if TYPE_CHECKING:
  import numpy as np

  from maxtext_like.checkpoint.huggingface.config import HuggingFaceConfig
  from maxtext_like.checkpoint.huggingface.weights import Weights
  from maxtext_like.config.load import Loaded
  from maxtext_like.config.schema import Config

DESCRIPTION = """Runs a Hugging Face checkpoint (config.json, safetensors) on the arrays of an .npz file.

inputs:  input_ids [B, T]; optional labels (not shifted, -100 does not count), attention_mask, position_ids, segment_ids;
         with images pixel_values, token_type_ids or mm_token_type_ids [B, T], Gemma 4 also image_position_ids
outputs: logits, loss, hidden.embed, hidden.layerNN, hidden.final_norm, router.layerNN.*, indexer.layerNN.topk_idx,
         ple.layerNN, vision.pooled, vision.tower_out, vision.projected, in float16 rescued (how many values left its
         range and were clipped or zeroed), and with --gradients grad_global_norm and
         grad.<name of the parameter in transformers>"""
EPILOG = """examples:
  maxtext-like forward --checkpoint gemma-3-4b-it --inputs in.npz --output out.npz dtype=float32
  maxtext-like forward --checkpoint DIR --inputs in.npz --output out.npz --gradients module_api=linen scan_layers=false

With dtype=float32, matmul_precision is highest unless it is given."""


def run(argv: list[str]) -> int:
  """Runs the verb; see ``DESCRIPTION``."""
  options, overrides = _parse(argv)
  for name in ("checkpoint", "inputs", "output"):
    if getattr(options, name) is None:
      raise UserError(f"forward needs --{name}\n  fix: see maxtext-like forward --help")
  output = Path(options.output)
  if not output.parent.is_dir() or not os.access(output.parent, os.W_OK) or output.is_dir():
    raise UserError(f"{output}: cannot be written; its folder is missing or not writable")
  outputs, notes = forward(Path(options.checkpoint), Path(options.inputs), overrides, gradients=options.gradients)
  for note in notes:
    print(f"note: {note}")
  _save(output, outputs)
  for name in ("loss", "grad_global_norm"):
    if name in outputs:
      print(f"{name} {float(outputs[name]):.7g}")
  if "rescued" in outputs:
    print(rescued_line(int(outputs["rescued"])))
  print(f"{output}: {len(outputs)} arrays, logits {list(outputs['logits'].shape)}")
  return 0


def rescued_line(count: int) -> str:
  """How many values float16 could not hold, and what that means for the numbers."""
  if count == 0:
    return "float16: 0 values rescued"
  return (
    f"float16: {count} values left its range and were rescued (clipped, or zeroed where not finite), so these are not the "
    "model's numbers\n  fix: dtype=bfloat16 or dtype=float32"
  )


def _parse(argv: list[str]) -> tuple[argparse.Namespace, list[str]]:
  parser = argparse.ArgumentParser(
    prog="maxtext-like forward",
    usage="maxtext-like forward --checkpoint DIR --inputs IN.npz --output OUT.npz [--gradients] [key=value ...]",
    description=DESCRIPTION,
    epilog=EPILOG,
    formatter_class=argparse.RawDescriptionHelpFormatter,
    allow_abbrev=False,
    exit_on_error=False,
  )
  parser.add_argument("--checkpoint", type=checkpoint_path, metavar="DIR", help="directory with config.json and safetensors")
  parser.add_argument("--inputs", type=existing_path, metavar="IN.npz", help="the input arrays")
  parser.add_argument("--output", type=local_path, metavar="OUT.npz", help="where to write the results; replaced if it exists")
  parser.add_argument("--gradients", action="store_true", help="gradients of the loss as well; needs labels")
  try:
    return parser.parse_known_args(argv)
  except argparse.ArgumentError as error:
    raise UserError(f"forward: {error}\n  fix: see maxtext-like forward --help") from None


def forward(
  checkpoint: Path, inputs: Path, overrides: list[str], *, gradients: bool = False
) -> tuple[dict[str, "np.ndarray"], list[str]]:
  """The outputs by name, float32 unless they are indices, and notes on what was not used.

  Args:
    checkpoint: a Hugging Face checkpoint directory.
    inputs: an .npz file.
    overrides: ``key=value`` words.
    gradients: of the loss, as well.

  Raises:
    UserError: anything wrong with the checkpoint, the inputs or the overrides.
  """
  from maxtext_like.checkpoint.huggingface.config import read_config
  from maxtext_like.checkpoint.huggingface.inputs import make_batch, read_arrays
  from maxtext_like.checkpoint.huggingface.inputs_vision import has_images
  from maxtext_like.checkpoint.huggingface.model_file import load_checkpoint_config

  arrays = read_arrays(inputs)
  shape = arrays["input_ids"].shape if "input_ids" in arrays else ()
  # The tower is read where there are images for it, unless the command line has a say.
  words = [*(["use_multimodal=true"] if has_images(arrays) and read_config(checkpoint).has_tower else []), *overrides]
  # max_target_length begins at 2: training needs a target. Here one token is enough, and nothing depends on the other.
  config, loaded = load_checkpoint_config(checkpoint, words, length=max(shape[1], 2) if len(shape) == 2 else None)
  model = loaded.config.model
  weights = open_weights(checkpoint, config, loaded)
  lookup = weights.decoder.cfg.lookup
  read = make_batch(arrays, str(inputs), vocab_size=model.vocab_size, lookup=lookup, vision=loaded.config.vision)
  if gradients and "targets" not in read.batch:
    raise UserError(f"{inputs}: --gradients needs labels, which are missing")
  kernels = _settle_kernels(weights, loaded, read.batch)
  outputs = evaluator(weights, loaded.config, gradients=gradients)(weights.load(), read.batch)
  unused = [f"{inputs}: not used: {', '.join(read.unused)}"] if read.unused else []
  return outputs, [*loaded.notes, *weights.notes, *kernels, *unused]


def open_weights(checkpoint: Path, config: "HuggingFaceConfig", loaded: "Loaded") -> "Weights":
  """The checkpoint's weights matched against the decoder that the configuration describes."""
  import dataclasses

  import jax

  from maxtext_like.checkpoint.huggingface.weights import Weights
  from maxtext_like.models.build import build_decoder, precision_of

  settings, training = loaded.config.precision, loaded.config.training
  precision = precision_of(settings)
  if precision.dtype == "float32" and loaded.origins["precision.matmul_precision"].startswith("configs/base.yml"):
    precision = dataclasses.replace(precision, matmul_precision="highest")
  decoder = build_decoder(
    loaded.config.model,
    precision,
    layer_precision=settings.layer_precision,
    vision=loaded.config.vision,
    scan_layers=training.scan_layers,
    remat_policy=training.remat_policy,
    attention=training.attention,
    platform=jax.default_backend(),
  )
  return Weights(checkpoint, decoder, config)


def _settle_kernels(weights: "Weights", loaded: "Loaded", batch: dict[str, "np.ndarray"]) -> list[str]:
  """Gives the decoder the attention kernels that pass their self-test here; returns what each fused one came to."""
  import jax

  from maxtext_like.models.attention_kernels import settle

  weights.decoder, uses = settle(
    weights.decoder,
    length=batch["tokens"].shape[1],
    images="token_types" in batch,
    segments="segments" in batch,
    device=jax.local_devices()[0],
    cache=loaded.config.logging.compilation_cache_dir,
  )
  return [f"attention: {use}" for use in uses if use.worth_telling]


def evaluator(
  weights: "Weights", config: "Config", *, gradients: bool, compiler_options: dict | None = None
) -> Callable[[dict, dict[str, "np.ndarray"]], dict[str, "np.ndarray"]]:
  """A function of parameters and a batch to outputs by the names of ``DESCRIPTION``; compiled once for batches of one shape.

  Args:
    weights: checkpoint and decoder.
    config: of the run; its ``module_api`` is the face that is called.
    gradients: of the loss as well; the batch then needs "targets".
    compiler_options: of XLA.
  """
  import jax
  import numpy as np

  from maxtext_like.cli.forward_layer import ForwardLayer
  from maxtext_like.training.faces import make_apply

  layer = ForwardLayer(weights.decoder, padding_idx=config.model.pad_token_id)
  apply = make_apply(layer, config.training.module_api)
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
  """Gemma 4's image tokens as transformers has them, one image after the other without padding: [tokens, ...]."""
  outputs = dict(outputs)
  valid = outputs.pop("vision.valid", None)
  if valid is not None and "vision.pooled" in outputs:
    outputs |= {name: outputs[name][valid] for name in ("vision.tower_out", "vision.projected")}
  return outputs


def _plain(name: str, array: "np.ndarray") -> "np.ndarray":
  """float32, or int32 for indices; the router's rows are tokens, as transformers has them: [B * T, ...]."""
  import numpy as np

  array = array.astype(np.int32 if array.dtype.kind in "iu" else np.float32)
  return array.reshape(-1, array.shape[-1]) if name.startswith("router.") else array


def _save(path: Path, outputs: dict[str, Any]) -> None:
  """Writes the whole file beside its place first, so that a stop leaves no half-written one."""
  import numpy as np

  part = path.with_name(f".{path.name}.{os.getpid()}.part")
  try:
    with open(part, "wb") as file:
      np.savez(file, **outputs)
    os.replace(part, path)
  except OSError as error:
    raise UserError(f"{path}: cannot be written: {error.strerror}") from None
  finally:
    part.unlink(missing_ok=True)
