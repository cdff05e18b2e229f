"""``maxtext-like audit``: reads dtypes from the program of the train step, and checks that it honors the precision keys."""

from maxtext_like import load_config
from maxtext_like.capacity.topologies import TOPOLOGIES
from maxtext_like.cli.arguments import on_the_host, parse_words, print_notes, split_configuration, verb_parser, write_json
from maxtext_like.cli.compile import split_own
from maxtext_like.config.paths import new_file
from maxtext_like.errors import NonFiniteError

DESCRIPTION = f"""Lowers the train step for a platform, which this machine need not have, and reads the program. Prints the
dtypes of operands, accumulators and results for every named part of the model, forward and backward, and for every precision
key whether the program honors it.

  --platform tpu|cuda|cpu  the platform
  --topology NAME          also compile for a TPU slice with libtpu, and read the compiled program:
                           {", ".join(TOPOLOGIES)}
  --json FILE              also write the tables as JSON

exit codes: 0 every key is honored; 2 wrong usage; 3 a key is not honored"""
EXAMPLES = """examples:
  maxtext-like audit gemma4-31b --platform cuda
  maxtext-like audit deepseek3.2-671b --platform tpu float32_logits=false
  maxtext-like audit gemma4-tiny --platform tpu --topology v6e-8"""


def run(argv: list[str]) -> int:
  """Run the verb; see ``DESCRIPTION``."""
  parser = verb_parser("audit")
  parser.add_argument("--json", type=new_file)
  own, words = parse_words(parser, argv)
  config, words = split_configuration("audit", DESCRIPTION, words, EXAMPLES)
  machine, overrides = split_own(words, "audit", ("platform", "topology"))
  loaded = load_config(config, *overrides)
  print_notes(loaded.notes)
  on_the_host()
  from maxtext_like import audit

  found = audit(loaded, **machine)
  print(found)
  write_json(found, own.json)
  return 0 if found.honored else NonFiniteError.exit_code
