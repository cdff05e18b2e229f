"""``maxtext-like forward``: runs a checkpoint on arrays and saves its outputs, to compare them with transformers."""

import argparse
import os
import sys
from pathlib import Path
from typing import Any

from maxtext_like.cli.arguments import parse_words, print_notes, verb_parser
from maxtext_like.config.hub import checkpoint_path
from maxtext_like.config.paths import existing_path, local_path
from maxtext_like.errors import UserError

DESCRIPTION = """Runs a Hugging Face checkpoint (config.json, safetensors), or a run, on the arrays of an .npz file.

inputs:  input_ids [B, T]; optional labels (not shifted, -100 does not count), attention_mask, position_ids, segment_ids;
         with images pixel_values, token_type_ids or mm_token_type_ids [B, T], Gemma 4 also image_position_ids
outputs: logits, loss, hidden.embed, hidden.layerNN, hidden.final_norm, router.layerNN.*, indexer.layerNN.topk_idx,
         ple.layerNN, vision.pooled, vision.tower_out, vision.projected; in float16 clamped (number of values that
         overflowed and were clipped or set to zero); with --gradients grad_global_norm and
         grad.<parameter name in transformers>"""
EPILOG = """examples:
  maxtext-like forward --checkpoint gemma-3-4b-it --inputs in.npz --output out.npz dtype=float32
  maxtext-like forward --checkpoint DIR --inputs in.npz --output out.npz --gradients module_api=linen scan_layers=false

With dtype=float32, the default of matmul_precision is highest. base_weights=nf4 or int8 quantizes the weights. An adapter that
was trained on quantized weights is added to them; with --gradients or base_weights=null it is merged.

exit codes: 0 done; 2 wrong usage or input"""


def run(argv: list[str]) -> int:
  """Run the verb; see ``DESCRIPTION``."""
  options, overrides = _parse(argv)
  output = Path(options.output)
  if not output.parent.is_dir() or not os.access(output.parent, os.W_OK) or output.is_dir():
    raise UserError(
      f"{output}: cannot be written, because its folder is missing or not writable\n  fix: choose another --output"
    )
  from maxtext_like import forward

  found = forward(options.checkpoint, options.inputs, *overrides, gradients=options.gradients)
  print_notes(found.notes)
  outputs = found.arrays
  _save(output, outputs)
  for name in ("loss", "grad_global_norm"):
    if name in outputs:
      print(f"{name} {float(outputs[name]):.7g}")
  if "clamped" in outputs:
    print(clamped_line(int(outputs["clamped"])))
  print(f"{output}: {len(outputs)} arrays, logits {list(outputs['logits'].shape)}")
  return 0


def print_clamped(count: int | None) -> None:
  """Print the line about the values that overflowed to standard error; nothing if None, because the dtype is not float16."""
  if count is not None:
    print(clamped_line(count), file=sys.stderr)


def clamped_line(count: int) -> str:
  """Return a line about the values that overflowed in float16."""
  if count == 0:
    return "float16: 0 values clamped"
  return (
    f"float16: {count} values overflowed and were clamped (clipped, or set to zero if not finite), so the results are not the "
    "model's\n  fix: dtype=bfloat16 or dtype=float32"
  )


def _parse(argv: list[str]) -> tuple[argparse.Namespace, list[str]]:
  usage = "--checkpoint DIR --inputs IN.npz --output OUT.npz [--gradients] [key=value ...]"
  parser = verb_parser("forward", usage, DESCRIPTION, EPILOG)
  parser.add_argument(
    "--checkpoint", type=checkpoint_path, metavar="DIR", help="directory with config.json and safetensors, or a run"
  )
  parser.add_argument("--inputs", type=existing_path, metavar="IN.npz", help="the input arrays")
  parser.add_argument("--output", type=local_path, metavar="OUT.npz", help="file to write; an existing file is replaced")
  parser.add_argument("--gradients", action="store_true", help="also compute gradients of the loss; needs labels")
  return parse_words(parser, argv, {"checkpoint": "--checkpoint", "inputs": "--inputs", "output": "--output"})


def _save(path: Path, outputs: dict[str, Any]) -> None:
  """Write to a temporary file first and rename it, so that an interruption leaves no partial file."""
  import numpy as np

  part = path.with_name(f".{path.name}.{os.getpid()}.part")
  try:
    with open(part, "wb") as file:
      np.savez(file, **outputs)
    os.replace(part, path)
  except OSError as error:
    raise UserError(
      f"{path}: cannot be written: {error.strerror}", fix="name a file in a directory that can be written: --output OUT.npz"
    ) from None
  finally:
    part.unlink(missing_ok=True)
