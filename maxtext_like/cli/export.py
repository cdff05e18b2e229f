"""``maxtext-like export``: the weights of a run, or of an imported checkpoint, for transformers and vLLM."""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from maxtext_like.cli.arguments import on_the_host, parse_words
from maxtext_like.config.paths import existing_path, local_path
from maxtext_like.errors import UserError

if TYPE_CHECKING:
  from maxtext_like.checkpoint.huggingface.export import Origin

DESCRIPTION = """Writes the newest complete checkpoint of a run, or what `maxtext-like import` made, as a directory that
transformers and vLLM load: config.json, safetensors (with an index when there are several), generation_config.json and
the files of the tokenizer, where the model came with them. The dtype is by default that of the weights the run began
with, else bfloat16."""
EPILOG = """examples:
  maxtext-like export runs/gemma4-tiny --out exported
  maxtext-like export runs/a/checkpoints/500 --out exported --dtype float32 --shard-size 2GB"""


def run(argv: list[str]) -> int:
  """Runs the verb; see ``DESCRIPTION``."""
  parser = argparse.ArgumentParser(
    prog="maxtext-like export",
    usage="maxtext-like export RUN_OR_DIR --out HF_DIR [--dtype bfloat16] [--shard-size 5GB]",
    description=DESCRIPTION,
    epilog=EPILOG,
    formatter_class=argparse.RawDescriptionHelpFormatter,
    allow_abbrev=False,
    exit_on_error=False,
  )
  parser.add_argument(
    "source",
    type=existing_path,
    metavar="RUN_OR_DIR",
    nargs="?",
    help="a run, one of its checkpoints, or an imported checkpoint",
  )
  parser.add_argument("--out", type=local_path, metavar="HF_DIR", help="a new directory")
  parser.add_argument("--dtype", choices=("bfloat16", "float16", "float32"), help="of the weights")
  parser.add_argument("--shard-size", default="5GB", help="bytes of one file, as 5GB or 500MB (default: %(default)s)")
  options, rest = parse_words(parser, argv, {"source": "RUN_OR_DIR", "out": "--out"})
  if rest:
    raise UserError(f"export: unknown word '{rest[0]}'\n  fix: see maxtext-like export --help")
  on_the_host()
  source, out = Path(options.source).expanduser(), Path(options.out).expanduser()
  from maxtext_like.checkpoint.huggingface.writer import parse_size

  tensors, dtype, copied = export_checkpoint(source, out, options.dtype, parse_size(options.shard_size))
  if not any("tokenizer" in name for name in copied):
    print("note: no tokenizer's files came with the model (bytes need none); transformers wants one beside the weights")
  print(f"{out}: {tensors} tensors in {dtype}" + (f", {', '.join(copied)}" if copied else ""))
  return 0


def export_checkpoint(source: Path, out: Path, dtype: Any, shard_size: int) -> tuple[int, str, list[str]]:
  """Exports ``source`` into the new directory ``out``.

  Args:
    source: a run, a directory of steps, a step, or an imported checkpoint.
    out: a directory that does not exist, or an empty one.
    dtype: of the weights; None: what the model was imported with, else bfloat16.
    shard_size: bytes of one file.

  Returns:
    The number of tensors, their dtype, and the names of the files that were copied.

  Raises:
    UserError: no complete checkpoint there, or ``out`` cannot be written.
  """
  import jax

  from maxtext_like.checkpoint import manifest, restore
  from maxtext_like.checkpoint.huggingface.export import export_hugging_face
  from maxtext_like.checkpoint.sources import find_step
  from maxtext_like.checkpoint.stored_config import section
  from maxtext_like.layers.param import abstract
  from maxtext_like.layers.precision import Precision
  from maxtext_like.models.build import build_decoder

  step = find_step(source)
  if step is None:
    raise UserError(
      f"{source}: no complete checkpoint\n"
      "  fix: name a run directory, one of its checkpoints/N, or a directory made by maxtext-like import"
    )
  try:
    stored = manifest.read(step)
  except manifest.DamageError as error:
    raise UserError(f"{step}: not a complete checkpoint: {error}") from None
  model, vision = section("model", stored.config), section("vision", stored.config)
  weight_dtype = stored.config.get("precision", {}).get("weight_dtype", "float32")
  decoder = build_decoder(model, Precision(weight_dtype=weight_dtype), vision=vision)
  local = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
  like = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=local), abstract(decoder.params()))
  params = restore.load(step, {"params": like}).state["params"]
  origin = _origin(step, stored)
  dtype = dtype or origin.dtype or "bfloat16"
  tensors = export_hugging_face(
    out,
    params,
    decoder,
    model,
    vision=vision,
    dtype=dtype,
    shard_size=shard_size,
    origin=origin,
  )
  return tensors, dtype, [file.name for file in origin.files]


def _origin(step: Path, stored: Any) -> "Origin":
  """What the model inherits from the Hugging Face checkpoint that its weights began with; the tokenizer is the step's own."""
  from dataclasses import replace

  from maxtext_like.checkpoint import companions

  origin = _beginning(step, stored)
  own = companions.beside(step / companions.FOLDER)
  if not any(file.name.startswith("tokenizer.") for file in own):
    return origin
  names = {file.name for file in own}
  rest = [file for file in origin.files if file.name in companions.OF_THE_MODEL and file.name not in names]
  return replace(origin, files=(*own, *rest))


def _beginning(step: Path, stored: Any) -> "Origin":
  """What the checkpoint at the beginning of a chain of ``init_from`` hands down."""
  from maxtext_like.checkpoint import manifest
  from maxtext_like.checkpoint.huggingface.export import Origin, read_origin
  from maxtext_like.checkpoint.sources import find_step
  from maxtext_like.cli.import_ import FOLDER

  seen: set[Path] = set()
  while step not in seen:
    seen.add(step)
    for home in (step.parent.parent, step.parent):
      if (home / FOLDER / "config.json").is_file():
        return read_origin(home / FOLDER)
    beginning = stored.config.get("checkpoint", {}).get("init_from")
    if not beginning:
      break
    directory = Path(beginning).expanduser()
    if (directory / "config.json").is_file():
      return read_origin(directory)
    earlier = find_step(directory)
    if earlier is None:
      break
    step, stored = earlier, manifest.read(earlier)
  return Origin()
