"""``maxtext-like replay``: the step that ended a run, looked through again."""

import argparse
from pathlib import Path

from maxtext_like.cli.arguments import parse_words
from maxtext_like.config.paths import local_path, require_local
from maxtext_like.errors import UserError

DESCRIPTION = """Looks again through the step that ended a run with exit code 3, from the state and the batch that the run kept:
on this machine, on as many devices as it has, with other values where key=value says so. dtype=float32 shows whether the
step is finite there; module_api, scan_layers and remat_policy may change too.

RUN is the run's directory."""
EXAMPLES = """examples:
  maxtext-like replay runs/gemma4-tiny
  maxtext-like replay runs/gemma4-tiny dtype=float32
  maxtext-like replay runs/gemma4-tiny float32_gate_product=auto module_api=linen

exit codes: 0 finite; 2 wrong usage or input; 3 not finite; 4 does not fit the machine"""


def run(argv: list[str]) -> int:
  """Runs the verb; see ``DESCRIPTION``."""
  parser = argparse.ArgumentParser(
    prog="maxtext-like replay",
    usage="maxtext-like replay RUN [--out DIR] [--all] [key=value ...]",
    description=DESCRIPTION,
    epilog=EXAMPLES,
    formatter_class=argparse.RawDescriptionHelpFormatter,
    allow_abbrev=False,
    exit_on_error=False,
  )
  parser.add_argument(
    "--out", type=local_path, metavar="DIR", help="where xray.json and xray.html go; default: RUN/failed_step/replay"
  )
  parser.add_argument("--all", action="store_true", help="measure every tensor, not only the key ones; compiles far longer")
  options, words = parse_words(parser, argv, {})
  if not words or "=" in words[0] or words[0].startswith("-"):
    raise UserError("replay: no run named\n  fix: maxtext-like replay runs/NAME [key=value ...]")
  place = Path(require_local(words[0])).expanduser()
  if not (place / "config.yml").is_file():
    raise UserError(
      f"{place}: is no run directory, it holds no config.yml\n  fix: maxtext-like replay runs/NAME [key=value ...]"
    )
  from maxtext_like.config.load import load_config

  config = load_config(str(place / "config.yml"), words[1:]).config
  from maxtext_like.analysis import failed_step
  from maxtext_like.analysis.step_xray import xray_step
  from maxtext_like.cli.xray import show
  from maxtext_like.sharding.compilation_cache import use_compilation_cache
  from maxtext_like.sharding.mesh import make_mesh
  from maxtext_like.training.initial_state import read_state
  from maxtext_like.training.program import make_program

  kept = failed_step.find(place)
  print(f"step {kept.step} of {place} ended it: {kept.error.splitlines()[0]}")
  use_compilation_cache(config.logging.compilation_cache_dir)
  mesh = make_mesh(config.mesh)
  config = failed_step.fitted(config, kept, mesh.size)
  program = make_program(config, mesh=mesh)
  state = read_state(kept.state, program)
  report = xray_step(program, state, program.place(kept.batch), everything=options.all)
  changed = f" with {' '.join(words[1:])}" if words[1:] else ""
  out = Path(options.out) if options.out else place / failed_step.DIRECTORY / "replay"
  return show(
    report, config, out, f"x-ray of step {kept.step} of {place.name}{changed}, {mesh.size} x {mesh.devices.flat[0].platform}"
  )
