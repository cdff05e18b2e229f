"""``maxtext-like train``: trains a model. ``python train.py`` runs it too."""

import sys

from maxtext_like import load_config
from maxtext_like.cli import local_processes
from maxtext_like.cli.arguments import print_notes, split_configuration

DESCRIPTION = """Trains a model: pretraining, or fine-tuning with init_from or an adapter (lora_rank). If the run exists, the
same command resumes it from the newest checkpoint, or reports that it is finished."""
EXAMPLES = """examples:
  maxtext-like train gemma4-tiny
  maxtext-like train gemma4-tiny steps=200 run_name=first dtype=bfloat16
  maxtext-like train gemma4-31b gpu/h200.yml mine.yml steps=2    two overlays and a value
  maxtext-like train gemma4-tiny --processes 2 --devices-per-process 4    several processes on this machine, as on a pod
  maxtext-like train gemma-3-4b-it dataset_path=notes/*.txt    model and initial weights of a checkpoint directory
  maxtext-like train --help-keys learning

A run is the directory output_dir/run_name, runs/gemma4-tiny by default: config.yml, env.json, metrics.jsonl,
finiteness.json, goodput.json, tensorboard/, checkpoints/ and, at the end, report.html. A resumed run keeps replaced files
under another name: config.1.yml, metrics.dropped.jsonl.

exit codes: 0 done; 2 wrong usage, configuration or input; 3 non-finite numbers, or restarts without progress; 4 not enough
memory; 42 stopped by SIGTERM or SIGHUP, or a failure that a restart may fix; 130 stopped by Ctrl-C"""


def run(argv: list[str]) -> int:
  """Run the verb; see ``DESCRIPTION``."""
  argv, processes, devices = local_processes.take_options(argv)
  config, overrides = split_configuration("train", DESCRIPTION, argv, EXAMPLES)
  loaded = load_config(config, *overrides)
  if processes is not None:
    return local_processes.run(["train", *argv], processes, devices)
  from maxtext_like import train
  from maxtext_like.training.sinks.output import guarded_output

  with guarded_output():
    print_notes(loaded.notes)
    train(loaded, progress=sys.stdout)
  return 0
