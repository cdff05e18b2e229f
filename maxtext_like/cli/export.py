"""``maxtext-like export``: writes the weights of a run or an imported checkpoint for transformers and vLLM."""

from maxtext_like.cli.arguments import on_the_host, parse_words, print_notes, require_none, verb_parser
from maxtext_like.config.hub import checkpoint_path
from maxtext_like.config.paths import new_place
from maxtext_like.errors import UserError

DESCRIPTION = """Writes the newest complete checkpoint of a run, or an imported checkpoint, as a directory that transformers and
vLLM load: config.json, safetensors files (with an index if there are several), generation_config.json, and the tokenizer's
files if the model has them. The default dtype is that of the weights the run started from, or bfloat16. For a run that trained
an adapter (lora_rank), it writes the weights with the adapter merged or, with --adapter, only the adapter for peft."""
EPILOG = """examples:
  maxtext-like export runs/gemma4-tiny --out exported
  maxtext-like export runs/a/checkpoints/500 --out exported --dtype float32 --shard-size 2GB"""


def run(argv: list[str]) -> int:
  """Run the verb; see ``DESCRIPTION``."""
  usage = "RUN_OR_DIR --out HF_DIR [--dtype bfloat16] [--shard-size 5GB] [--merge | --adapter]"
  parser = verb_parser("export", usage, DESCRIPTION, EPILOG)
  what = "a run, one of its checkpoints, or an imported checkpoint"
  parser.add_argument("source", type=checkpoint_path, metavar="RUN_OR_DIR", nargs="?", help=what)
  parser.add_argument("--out", type=new_place, metavar="HF_DIR", help="a new directory, or a URL as gs://bucket/x")
  parser.add_argument("--dtype", choices=("bfloat16", "float16", "float32"), help="dtype of the written weights")
  parser.add_argument("--shard-size", default="5GB", help="maximum file size, such as 5GB or 500MB (default: %(default)s)")
  kinds = parser.add_mutually_exclusive_group()
  what = "only for a run with lora_rank: write weights with the adapter merged (the default)"
  kinds.add_argument("--merge", action="store_true", help=what)
  kinds.add_argument("--adapter", action="store_true", help="only for a run with lora_rank: write the adapter for peft")
  options, rest = parse_words(parser, argv, {"source": "RUN_OR_DIR", "out": "--out"})
  require_none(parser, rest)
  on_the_host()
  from maxtext_like import export_adapter, export_checkpoint

  if options.adapter:
    if options.dtype is not None:
      raise UserError("export: --dtype has no effect with --adapter, which is always float32\n  fix: leave one of them out")
    written = export_adapter(options.source, options.out)
    print_notes(written.notes)
    print(f"{written.directory}: an adapter for {written.maps} linear maps, rank {written.rank}, trained on {written.below}")
    return 0
  done = export_checkpoint(options.source, options.out, dtype=options.dtype, shard_size=options.shard_size, merge=options.merge)
  print_notes(done.notes)
  print(f"{done.directory}: {done.tensors} tensors in {done.dtype}" + (f", {', '.join(done.files)}" if done.files else ""))
  return 0
