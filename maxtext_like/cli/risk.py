"""``maxtext-like risk``: how large a checkpoint's numbers can become, from its weights alone, and what that does to a dtype."""

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING

from maxtext_like.cli.arguments import on_the_host, parse_words
from maxtext_like.config.hub import checkpoint_path
from maxtext_like.config.paths import local_path
from maxtext_like.errors import NonFiniteError, UserError

if TYPE_CHECKING:
  from maxtext_like.analysis.risk import Risk
  from maxtext_like.analysis.risk_parameters import Reader
  from maxtext_like.config.model import ModelConfig
  from maxtext_like.layers.decoder import Decoder

DESCRIPTION = """Reads the weights of a checkpoint, one tensor at a time, and prints for every layer how large gate, up, their
product, q.k, router and index scores, the vision pooler, logits and the residual stream are expected to become and cannot
exceed, against the limits of float16, bfloat16 and e4m3, worst first, and the key of `precision:` that removes each risk.

DIR is a Hugging Face checkpoint (config.json, safetensors), a run, or one of its checkpoints. Nothing is run.

  expected  the median of the largest magnitude over N tokens (--tokens) whose normed inputs are random
  at most   what no input can exceed
  float16   bits between that and the largest number, of expected/at most; negative: beyond it; e4m3 likewise
  bf16 +-   half of bfloat16's spacing at the expected size: the largest rounding error
  verdict   in the dtype that holds the quantity: overflow (expected), possible (at most), coarse (rounding changes
            probabilities by 5 % or makes ties) with what to set; or safe, and by which key"""
EPILOG = """examples:
  maxtext-like risk --checkpoint gemma-4-31b-it dtype=float16
  maxtext-like risk --checkpoint runs/gemma4-tiny --rows 0 --json risk.json dtype=float16 float32_gate_product=false

exit codes: 0 no expected size is beyond what holds it; 2 wrong usage or input; 3 one is, or a weight is not finite"""


def run(argv: list[str]) -> int:
  """Runs the verb; see ``DESCRIPTION``."""
  parser = argparse.ArgumentParser(
    prog="maxtext-like risk",
    usage="maxtext-like risk --checkpoint DIR [--rows N] [--json FILE] [--tokens N] [key=value ...]",
    description=DESCRIPTION,
    epilog=EPILOG,
    formatter_class=argparse.RawDescriptionHelpFormatter,
    allow_abbrev=False,
    exit_on_error=False,
  )
  parser.add_argument("--checkpoint", type=checkpoint_path, metavar="DIR", help="whose weights are read")
  parser.add_argument("--rows", type=int, default=20, metavar="N", help="rows of the table (20); 0 for all")
  parser.add_argument("--json", type=local_path, metavar="FILE", help="write every row here, with numbers in full")
  parser.add_argument("--tokens", type=int, default=4096, metavar="N", help="that an expected maximum is over (4096)")
  options, overrides = parse_words(parser, argv, {"checkpoint": "--checkpoint"})
  if unknown := [word for word in overrides if word.startswith("-") or "=" not in word]:
    raise UserError(f"risk: unknown word {unknown[0]!r}\n  fix: see maxtext-like risk --help")
  if options.tokens < 100 or options.rows < 0:
    raise UserError(f"risk: --tokens {options.tokens} --rows {options.rows}\n  fix: --tokens 100 or more, --rows 0 or more")
  if options.json and not Path(options.json).absolute().parent.is_dir():
    raise UserError(f"{options.json}: cannot be written; its folder is missing")
  on_the_host()

  from maxtext_like.analysis import risk
  from maxtext_like.analysis.risk_model import measure

  model, decoder, read, notes = open_checkpoint(Path(options.checkpoint).expanduser(), overrides)
  risks = risk.assess(measure(model, decoder, read, options.tokens), decoder.precision)
  for note in notes:
    print(f"note: {note}")
  print(risk.table(risks, options.rows))
  print(summary(risks, decoder.precision.dtype))
  if options.json:
    content = {"dtype": decoder.precision.dtype, "tokens": options.tokens, "risks": risk.records(risks)}
    Path(options.json).write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    print(options.json)
  return NonFiniteError.exit_code if risk.unprotected_overflows(risks) else 0


def summary(risks: list["Risk"], dtype: str) -> str:
  """What it comes to, in one line or a few."""
  from maxtext_like.analysis.risk import ALWAYS

  lines = []
  meanings = (
    ("overflow", f"{dtype} is expected to overflow in"),
    ("possible", "no input can be ruled out to overflow in"),
    ("coarse", "rounding is coarse in"),
  )
  for verdict, meaning in meanings:
    found = [risk for risk in risks if risk.verdict == verdict]
    if found:
      keys = sorted({key for risk in found for key in risk.key.split()})
      lines.append(f"{meaning} {len(found)} of {len(risks)} quantities; set {', '.join(keys)}")
  kept = [risk.key for risk in risks if risk.verdict == "safe" and risk.key not in ("", ALWAYS)]
  needed = sorted({key for keys in kept for key in keys.split(", ")})
  if needed:
    lines.append(f"safe because of {', '.join(needed)}")
  if not any(risk.verdict in ("overflow", "possible") for risk in risks):
    lines.insert(0, f"{dtype}: no quantity can overflow")
  return "\n".join(lines)


def open_checkpoint(directory: Path, overrides: list[str]) -> tuple["ModelConfig", "Decoder", "Reader", list[str]]:
  """The configuration and decoder of a checkpoint, a function that reads parts of its parameters, and notes for the user.

  Raises:
    UserError: no checkpoint, a damaged one, or overrides that do not fit it.
  """
  if not directory.is_dir():
    raise UserError(f"{directory}: no such directory")
  if (directory / "config.json").is_file():
    from maxtext_like.checkpoint.huggingface.config import read_config
    from maxtext_like.checkpoint.huggingface.model_file import load_checkpoint_config
    from maxtext_like.cli.forward import open_weights

    words = [*(["use_multimodal=true"] if read_config(directory).has_tower else []), *overrides]
    config, loaded = load_checkpoint_config(directory, words)
    weights = open_weights(directory, config, loaded)
    return loaded.config.model, weights.decoder, weights.part, [*loaded.notes, *weights.notes]
  from maxtext_like.checkpoint.slices import StoredArrays
  from maxtext_like.checkpoint.sources import find_step
  from maxtext_like.config.load import load_config
  from maxtext_like.models.build import build_decoder, precision_of

  run_directory = next((d for d in (directory, *directory.absolute().parents[:2]) if (d / "config.yml").is_file()), None)
  step = find_step(directory)
  if run_directory is None or step is None:
    raise UserError(
      f"{directory}: neither a run with a complete checkpoint nor a Hugging Face checkpoint (config.json)\n"
      "  fix: name a run directory, one of its checkpoints/N, or a directory with config.json and safetensors"
    )
  config = load_config(run_directory / "config.yml", overrides).config
  decoder = build_decoder(config.model, precision_of(config.precision), vision=config.vision)
  return config.model, decoder, StoredArrays(step).parameter, [f"step {step.name} of {run_directory}"]
