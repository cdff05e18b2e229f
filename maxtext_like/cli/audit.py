"""``maxtext-like audit``: what the train step computes in which dtype, read from the program, and the keys it honours."""

import argparse
import json
from pathlib import Path

from maxtext_like.analysis.lowered import PLATFORMS
from maxtext_like.cli.arguments import on_the_host, parse_words, print_notes, split_configuration
from maxtext_like.config.load import Loaded, load_config
from maxtext_like.config.paths import local_path
from maxtext_like.errors import NonFiniteError, UserError
from maxtext_like.training.topologies import TOPOLOGIES, find_topology

DESCRIPTION = f"""Lowers the train step for a platform that need not be here, reads the program and prints for every named part
of the model the dtypes of operands, accumulators and results, forward and backward, and for every precision key whether
the program honours it.

  --platform tpu|cuda|cpu  the platform
  --topology NAME          compiles for a TPU slice with libtpu and reads the compiler's program too:
                           {", ".join(TOPOLOGIES)}
  --json FILE              also writes the tables as JSON

Exit code 0: every key is honoured, 3: one is not, 2: wrong usage."""
EXAMPLES = """examples:
  maxtext-like audit gemma4-31b --platform cuda
  maxtext-like audit deepseek3.2-671b --platform tpu float32_logits=false
  maxtext-like audit gemma4-tiny --platform tpu --topology v6e-8"""


def run(argv: list[str]) -> int:
  """Audits; see ``DESCRIPTION``."""
  parser = argparse.ArgumentParser(prog="maxtext-like audit", add_help=False, allow_abbrev=False, exit_on_error=False)
  for option in ("platform", "topology"):
    parser.add_argument(f"--{option}")
  parser.add_argument("--json", type=local_path)
  own, words = parse_words(parser, argv, {})
  config, overrides = split_configuration("audit", DESCRIPTION, words, EXAMPLES)
  if own.topology and own.platform not in (None, "tpu"):
    raise UserError(f"audit: --topology {own.topology} is a TPU slice, --platform {own.platform} is not\n  fix: leave one out")
  platform = own.platform or ("tpu" if own.topology else None)
  if platform not in PLATFORMS:
    said = f"--platform {platform} is none of" if platform else "no platform\n  fix: add --platform with one of"
    raise UserError(f"audit: {said} {', '.join(PLATFORMS)}")
  topology = find_topology(own.topology) if own.topology else None
  loaded = load_config(config, overrides)
  print_notes(loaded.notes)

  on_the_host()
  import jax

  from maxtext_like.analysis import audit, audit_keys, lowered
  from maxtext_like.models.build import precision_of
  from maxtext_like.numerics import hlo

  c = loaded.config
  if c.precision.layer_precision:
    raise UserError(
      "audit: layer_precision gives layers dtypes of their own, and a site's verdict is for all layers\n"
      "  fix: audit without it, and once more with its keys for the whole model"
    )
  text = None
  if topology is None:
    program, module = lowered.lower(c, platform)
  else:
    program, module, text = lowered.compile_for(c, topology)
  precision = precision_of(c.precision)
  leaves = jax.tree_util.tree_leaves_with_path(program.spec)
  weights = {f"state['params']{jax.tree_util.keystr(path)}": leaf.dtype for path, leaf in leaves}

  def judged(reading: hlo.Reading, compiled: bool) -> list[audit_keys.KeyVerdict]:
    return audit_keys.judge_keys(reading, precision, c.model, c.vision, weights=weights, compiled=compiled)

  reading = hlo.read_stablehlo(module)
  extra = audit.unasked(reading, precision.dtype, audit_keys.asked_float32(precision))
  keys = judged(reading, compiled=False)
  if text is not None:
    reading = hlo.read_hlo(text)
    keys = audit_keys.together(keys, judged(reading, compiled=True))
  rows = audit.rows(reading)
  print(report(loaded, platform, topology.name if topology else None, program, rows, keys, extra))
  if own.json:
    about = {"model": c.model.model_name, "platform": platform, "topology": own.topology}
    about["kernels"] = [use.to_json() for use in program.model.kernels]
    Path(own.json).write_text(json.dumps(about | audit.to_json(rows, keys, extra), indent=1) + "\n", encoding="utf-8")
  return NonFiniteError.exit_code if any(k.verdict == "not honoured" for k in keys) else 0


def report(loaded: Loaded, platform: str, topology: str | None, program, rows, keys, extra) -> str:
  """The tables for people."""
  c = loaded.config
  mesh = " x ".join(f"{axis} {size}" for axis, size in program.model.mesh.shape.items())
  what = f"compiled for {topology}" if topology else f"lowered for {platform}, before compilation"
  lines = [f"{c.model.model_name}, {c.precision.dtype}: train step {what}, mesh {mesh}"]
  lines += [f"attention: {use}" for use in program.model.kernels]
  table = [("site", "pass", "operation", "operands", "sum in", "result", "places")]
  table += [(r.site, r.stage, r.operation, r.operands, r.accumulation, r.output, str(r.places)) for r in rows]
  lines += ["", *_columns(table)]
  lines += [f"  {site}: {note}" for site, note in dict.fromkeys((r.site, r.note) for r in rows if r.note)]
  lines += ["", *_columns([("key", "value", "", "evidence")] + [(k.key, k.value, k.verdict, k.evidence) for k in keys])]
  lines += ["", "work in a dtype that no key asked for: " + ("" if extra else "none")]
  lines += [f"  {u.places} x {u.operation} {u.dtypes} at {u.path}" for u in extra]
  return "\n".join(lines)


def _columns(table: list[tuple[str, ...]]) -> list[str]:
  widths = [max(len(row[i]) for row in table) for i in range(len(table[0]))]
  return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in table]
