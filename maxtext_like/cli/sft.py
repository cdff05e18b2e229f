"""``maxtext-like sft``: fine-tunes a model on conversations."""

import sys

from maxtext_like.cli import local_processes
from maxtext_like.cli.arguments import split_configuration

DESCRIPTION = """Fine-tunes a model on conversations (supervised fine-tuning). It is `train` with data_format=chat and with the
dataset chosen by the files of dataset_path. `maxtext-like data --sft` with the same arguments shows the learned tokens."""
EXAMPLES = """examples:
  maxtext-like sft gemma-3-4b-it dataset_path=chats.jsonl steps=500 learning_rate=1e-5    model and weights of a directory
  maxtext-like sft gemma3-4b init_from=gemma-3-4b-it dataset_path=chats.jsonl steps=500 learning_rate=1e-5
  maxtext-like sft gemma3-4b recipes/qlora.yml init_from=gemma-3-4b-it dataset_path=chats.jsonl
  maxtext-like sft gemma4-31b init_from=gemma-4-31B-it dataset_path=chats.parquet train_on=last"""


def run(argv: list[str]) -> int:
  """Run the verb; see ``DESCRIPTION``."""
  argv, processes, devices = local_processes.take_options(argv)
  config, overrides = split_configuration("sft", DESCRIPTION, argv, EXAMPLES)
  if processes is not None:
    return local_processes.run(["sft", *argv], processes, devices)
  from maxtext_like import sft
  from maxtext_like.training.sinks.output import guarded_output

  with guarded_output():
    sft(config, *overrides, progress=sys.stdout)
  return 0
