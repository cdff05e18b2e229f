"""``maxtext-like import``: converts a Hugging Face checkpoint, or an adapter of peft, to train from."""

from maxtext_like.cli.arguments import on_the_host, parse_words, print_notes, verb_parser
from maxtext_like.config.hub import checkpoint_path
from maxtext_like.config.paths import local_path

DESCRIPTION = """Converts a Hugging Face checkpoint (config.json, safetensors) to this project's format:

  DIR/model.yml        the model file
  DIR/checkpoints/0    the weights and the tokenizer's files
  DIR/hugging_face     config.json and the tokenizer's files

Weights are stored in weight_dtype; the default float32 represents 16-bit and 8-bit weights exactly.

An adapter of peft (adapter_config.json) becomes

  DIR/checkpoints/0    the checkpoint of a run that trained the adapter; generate and export accept DIR
  DIR/adapter.yml      an overlay with the adapter's keys, to continue training

The weights below the adapter are those of init_from, or those that adapter_config.json names."""
EPILOG = """examples:
  maxtext-like import gemma-3-4b-it --out models/gemma3-4b
  maxtext-like train models/gemma3-4b/model.yml init_from=models/gemma3-4b dataset=text dataset_path=notes/*.txt
  maxtext-like train gemma3-4b init_from=gemma-3-4b-it      (the same, without a copy)
  maxtext-like import peft-adapter --out adapters/a init_from=gemma-3-4b-it"""


def run(argv: list[str]) -> int:
  """Run the verb; see ``DESCRIPTION``."""
  usage = "HF_DIR --out DIR [key=value ...]"
  parser = verb_parser("import", usage, DESCRIPTION, EPILOG)
  what = "directory with config.json and safetensors, or with an adapter of peft"
  parser.add_argument("source", type=checkpoint_path, metavar="HF_DIR", nargs="?", help=what)
  parser.add_argument("--out", type=local_path, metavar="DIR", help="a new directory")
  options, overrides = parse_words(parser, argv, {"source": "HF_DIR", "out": "--out"})
  on_the_host()
  from maxtext_like import import_checkpoint

  done = import_checkpoint(options.source, options.out, *overrides)
  print_notes(done.notes)
  print(f"{done.directory}: {done.tensors} tensors; train with: maxtext-like train {' '.join(done.words)}")
  return 0
