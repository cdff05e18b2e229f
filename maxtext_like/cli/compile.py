"""``maxtext-like compile``: compiles the train step for a TPU slice or GPUs ahead of time, and reports whether it fits."""

import os
from typing import Any

from maxtext_like import load_config
from maxtext_like.capacity.topologies import find_machine, machines
from maxtext_like.cli.arguments import parse_words, print_notes, split_configuration, verb_parser, write_json
from maxtext_like.config.paths import new_file
from maxtext_like.errors import DoesNotFitError, UserError
from maxtext_like.extras import install

LIST = "\n                    ".join(machines(cpus=False).split("; "))

DESCRIPTION = f"""Compiles the train step ahead of time for a TPU slice, on any Linux machine with libtpu
({install("tpu")}; no TPU is needed). Prints the memory of one chip by use, the work of a step (matrix products, bytes,
transfers between chips) and a lower bound for its time. If the step does not fit, other settings are tried. For GPUs it prints
the memory estimate that train makes before it allocates anything and, with JAX's CUDA libraries ({install("cuda")}; no
GPU is needed), the result of XLA's compiler.

  topology=NAME     {LIST}
  memory=SIZE       GPU: memory of one GPU, such as 24GB, instead of the table's; without topology: one GPU of any kind
  num_slices=N      TPU: number of slices, connected by the data-center network (mesh: dcn_data_parallelism=N)
  machine_code=false  TPU: stop when memory is assigned, after a tenth of the work; the compiler's own peak memory and errors
                    in kernels are then unknown. GPU: print only the estimate
  machine_code=quick  TPU (default): then also compile to the end with little optimization, for the peak and these errors
  machine_code=true   TPU: compile to the end as a run does
  --json FILE       also write the result as JSON
  xla_flags=GROUP   TPU: base (default) or all. all adds the flags that overlap collectives with computation, as tpu/env.sh
                    sets them for a run; compilation takes 2 to 3 times as long and needs about as much memory

exit codes: 0 fits; 2 wrong usage; 4 does not fit"""
EXAMPLES = """examples:
  maxtext-like compile gemma4-tiny topology=v6e-1
  maxtext-like compile gemma4-31b topology=v6e-32
  maxtext-like compile gemma4-31b topology=v6e-256 num_slices=2 dcn_data_parallelism=2 machine_code=false
  maxtext-like compile gemma4-31b tpu/v6e-32.yml topology=v6e-32 per_device_batch_size=2
  maxtext-like compile gemma4-31b topology=h200-8"""


def run(argv: list[str]) -> int:
  """Run the verb; see ``DESCRIPTION``."""
  parser = verb_parser("compile")
  parser.add_argument("--json", type=new_file)
  options, argv = parse_words(parser, argv)
  config, words = split_configuration("compile", DESCRIPTION, argv, EXAMPLES)
  own, overrides = split_own(words)
  find_machine(
    own.get("topology"), own.get("memory")
  )  # errors here and in the configuration are reported before JAX is imported
  loaded = load_config(config, *overrides)
  print_notes(loaded.notes)
  os.environ["JAX_PLATFORMS"] = "cpu"
  from maxtext_like import compile_step

  found = compile_step(loaded, **own)
  print(found)
  write_json(found, options.json)
  return 0 if found.fits else DoesNotFitError.exit_code


def split_own(
  words: list[str],
  verb: str = "compile",
  names: tuple[str, ...] = ("topology", "memory", "xla_flags", "num_slices", "machine_code"),
) -> tuple[dict[str, Any], list[str]]:
  """Split the words into options of the verb (``topology=NAME``, ``--topology=NAME``, ``--topology NAME``) and the others."""
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
      raise UserError(
        f"command line {word!r}: {value} is not a value of {name}\n  fix: see maxtext-like {verb} --help"
      ) from None
  return own, others


_OWN = {
  "topology": str,
  "memory": str,
  "platform": str,
  "xla_flags": str,
  "num_slices": int,
  "machine_code": {"true": True, "false": False, "quick": "quick"}.__getitem__,
}
