"""``maxtext-like compile``: the train step compiled for a TPU slice or the GPUs of a host, and whether it fits there."""

import argparse
import json
import os
from pathlib import Path
from typing import Any

from maxtext_like import load_config
from maxtext_like.capacity.topologies import find_machine, machines
from maxtext_like.cli.arguments import parse_words, print_notes, split_configuration
from maxtext_like.config.paths import new_file
from maxtext_like.errors import DoesNotFitError, UserError

LIST = "\n                    ".join(machines(cpus=False).split("; "))

DESCRIPTION = f"""Compiles the train step of a configuration ahead of time for a TPU slice, on any Linux machine with libtpu
(pip install -e '.[tpu]'), and prints the memory that one chip needs, what lies there, what the step does (products, bytes,
transfers between chips) and the time that this takes at least. Nothing runs, no TPU is needed. What does not fit is tried with
other values. For GPUs it prints the estimate that train makes before it allocates anything and, with JAX's CUDA libraries
(pip install -e '.[cuda]'; no GPU is needed), what XLA's compiler for CUDA says.

  topology=NAME     {LIST}
  memory=SIZE       of a GPU, as 24GB, in the place of what the table has; alone it is one GPU of any kind
  num_slices=N      TPU: so many such slices, joined by the data-center network (the mesh: dcn_data_parallelism=N)
  machine_code=false  TPU: stop once memory is laid out, after a tenth of the work; all but the compiler's own peak and its
                    objections to kernels is known then. GPUs: the estimate alone
  machine_code=quick  TPU (default): and compile the same with little optimisation to the end, for these
  machine_code=true   TPU: compile what a run compiles, to the end
  --json FILE       also writes all of it as JSON
  xla_flags=GROUP   TPU: base (default), or all: with the flags that put collectives behind computation, as tpu/env.sh sets
                    them for a run; compiles 2 to 3 times as long and needs about as much memory

Exit code 0: fits, 4: does not fit, 2: wrong usage."""
EXAMPLES = """examples:
  maxtext-like compile gemma4-tiny topology=v6e-1
  maxtext-like compile gemma4-31b topology=v6e-32
  maxtext-like compile gemma4-31b topology=v6e-256 num_slices=2 dcn_data_parallelism=2 machine_code=false
  maxtext-like compile gemma4-31b tpu/v6e-32.yml topology=v6e-32 per_device_batch_size=2
  maxtext-like compile gemma4-31b topology=h200-8"""


def run(argv: list[str]) -> int:
  """Compiles and prints the verdict; see ``DESCRIPTION``."""
  parser = argparse.ArgumentParser(prog="maxtext-like compile", add_help=False, allow_abbrev=False, exit_on_error=False)
  parser.add_argument("--json", type=new_file)
  options, argv = parse_words(parser, argv, {})
  config, words = split_configuration("compile", DESCRIPTION, argv, EXAMPLES)
  own, overrides = split_own(words)
  find_machine(own.get("topology"), own.get("memory"))  # its errors and those of the configuration come before JAX, at once
  loaded = load_config(config, *overrides)
  print_notes(loaded.notes)
  os.environ["JAX_PLATFORMS"] = "cpu"
  from maxtext_like import compile_step

  found = compile_step(loaded, **own)
  print(found)
  if options.json:
    Path(options.json).write_text(json.dumps(found.to_json(), indent=1) + "\n", encoding="utf-8")
  return 0 if found.fits else DoesNotFitError.exit_code


def split_own(
  words: list[str],
  verb: str = "compile",
  names: tuple[str, ...] = ("topology", "memory", "xla_flags", "num_slices", "machine_code"),
) -> tuple[dict[str, Any], list[str]]:
  """The words that are a verb's own (``topology=NAME``, ``--topology=NAME``, ``--topology NAME``), and all others in order."""
  own: dict[str, Any] = {}
  others = []
  left = list(words)
  while left:
    word = left.pop(0)
    key, equals, value = word.partition("=")
    name = key.lstrip("-").replace("-", "_")
    if name not in names:
      others.append(word)
      continue
    if not equals and key.startswith("--") and left and not left[0].startswith("-"):
      equals, value = "=", left.pop(0)
    if not equals or not value:
      raise UserError(f"command line {word!r}: no value\n  fix: write {name}=VALUE, see maxtext-like {verb} --help")
    try:
      own[name] = _OWN[name](value)
    except (KeyError, ValueError):
      raise UserError(f"command line {word!r}: {value} is no value of {name}\n  fix: see maxtext-like {verb} --help") from None
  return own, others


_OWN = {
  "topology": str,
  "memory": str,
  "platform": str,
  "xla_flags": str,
  "num_slices": int,
  "machine_code": {"true": True, "false": False, "quick": "quick"}.__getitem__,
}
