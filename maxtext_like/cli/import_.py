"""``maxtext-like import``: a Hugging Face checkpoint as one of ours, to train from, with its model file."""

import argparse
import shutil
from pathlib import Path

from maxtext_like.cli.arguments import on_the_host, parse_words
from maxtext_like.config.hub import checkpoint_path
from maxtext_like.config.paths import local_path
from maxtext_like.errors import UserError

DESCRIPTION = """Reads a Hugging Face checkpoint (config.json, safetensors) and writes one of ours:

  DIR/model.yml        the model, to train with
  DIR/checkpoints/0    the weights, with the tokenizer's files
  DIR/hugging_face     config.json and the files of the tokenizer

Weights are stored in weight_dtype, which keeps every digit of 16-bit and 8-bit files by default."""
EPILOG = """examples:
  maxtext-like import gemma-3-4b-it --out models/gemma3-4b
  maxtext-like train models/gemma3-4b/model.yml init_from=models/gemma3-4b dataset=text dataset_path=notes/*.txt
  maxtext-like train gemma3-4b init_from=gemma-3-4b-it      (the same, without a copy)"""
FOLDER = "hugging_face"


def run(argv: list[str]) -> int:
  """Runs the verb; see ``DESCRIPTION``."""
  parser = argparse.ArgumentParser(
    prog="maxtext-like import",
    usage="maxtext-like import HF_DIR --out DIR [key=value ...]",
    description=DESCRIPTION,
    epilog=EPILOG,
    formatter_class=argparse.RawDescriptionHelpFormatter,
    allow_abbrev=False,
    exit_on_error=False,
  )
  parser.add_argument(
    "source", type=checkpoint_path, metavar="HF_DIR", nargs="?", help="directory with config.json and safetensors"
  )
  parser.add_argument("--out", type=local_path, metavar="DIR", help="a new directory")
  options, overrides = parse_words(parser, argv, {"source": "HF_DIR", "out": "--out"})
  on_the_host()
  source, out = Path(options.source).expanduser(), Path(options.out).expanduser()
  tensors, notes = import_checkpoint(source, out, overrides)
  for note in notes:
    print(f"note: {note}")
  print(f"{out}: {tensors} tensors; train with: maxtext-like train {out / 'model.yml'} init_from={out}")
  return 0


def import_checkpoint(source: Path, out: Path, overrides: list[str]) -> tuple[int, list[str]]:
  """Imports ``source`` into the new directory ``out``.

  Args:
    source: a Hugging Face checkpoint directory.
    out: a directory that does not exist, or an empty one.
    overrides: ``key=value`` words, ``weight_dtype`` and ``mesh`` among them.

  Returns:
    The number of tensors, and notes on what was left out.

  Raises:
    UserError: anything wrong with the checkpoint, the overrides or ``out``; nothing is left behind.
  """
  from maxtext_like.checkpoint import companions
  from maxtext_like.checkpoint.huggingface.config import read_config
  from maxtext_like.checkpoint.huggingface.export import new_directory, read_origin
  from maxtext_like.checkpoint.huggingface.model_file import load_checkpoint_config, model_file
  from maxtext_like.checkpoint.huggingface.weights import Weights
  from maxtext_like.checkpoint.manager import CheckpointManager
  from maxtext_like.layers.param import shardings
  from maxtext_like.models.placed import make_model

  words = ["use_multimodal=true"] if read_config(source).has_tower else []
  config, loaded = load_checkpoint_config(source, [*words, *overrides], length=2048)
  model = make_model(loaded.config, runs_attention=False)
  weights = Weights(source, model.decoder, config)
  with new_directory(out) as part:
    params = weights.load(shardings(model.spec, model.mesh))
    _require_finite(params)
    (part / FOLDER).mkdir()
    for file in [source / "config.json", *read_origin(source).files]:
      shutil.copyfile(file, part / FOLDER / file.name)
    (part / "model.yml").write_text(model_file(config, str(source)), encoding="utf-8")
    extra = {"hugging_face": {"source": str(source.resolve())}}
    tokenizer = {file.name: file.read_bytes() for file in companions.beside(source)}
    manager = CheckpointManager(
      part / "checkpoints", config=loaded.config, interval=1, max_to_keep=1, asynchronous=False, tokenizer=tokenizer
    )
    with manager:
      manager.save_and_wait(0, {"params": params}, extra)
  return len(weights.table), [*loaded.notes, *weights.notes]


def _require_finite(params: dict) -> None:
  import numpy as np

  from maxtext_like.checkpoint.tree import flatten

  for name, leaf in flatten(params).items():
    if not all(np.isfinite(np.asarray(shard.data)).all() for shard in leaf.addressable_shards):
      raise UserError(f"the checkpoint holds numbers that are not finite, in {name}; is the file damaged?")
