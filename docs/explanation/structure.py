"""Draws docs/explanation/structure.svg from the order of imports: ``python docs/explanation/structure.py``."""

import html
import sys
import textwrap
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

from tests.test_imports import ORDER  # noqa: E402 (the order is defined there)

PICTURE = Path(__file__).with_name("structure.svg")
WIDTH, MARGIN, GAP, LINE, PAD = 720, 8, 8, 19, 10
CHARACTER = 7.3  # width of a letter of the text, in pixels
PARTS = {
  "cli": ("cli", "one file per command: arguments and printing"),
  "__init__": ("maxtext_like", "the public names, loaded when they are first used"),
  "api": ("api", "one file per verb: the functions behind the commands and the Python interface"),
  "analysis": ("analysis", "risk, audit, bisect, and why a step failed"),
  "training.run": ("training/run", "a run from start to exit: directory, lock, resume, report"),
  "training.loop": ("training/loop", "between two steps: metrics, checks, evaluation, signals, time limits"),
  "evaluation": ("evaluation", "log-probabilities, tasks of lm-evaluation-harness, perplexity"),
  "capacity": ("capacity", "does it fit, how fast can it be: memory, roofline, ahead-of-time compilation"),
  "training.step": ("training/step", "the compiled update of the weights"),
  "training.objectives": ("training/objectives", "losses"),
  "training.optimizers": ("training/optimizers", "update rules, learning rate"),
  "training.sinks": ("training/sinks", "output files"),
  "generation": ("generation", "text from a model: prefill, decoding, sampling"),
  "data": ("data", "documents, tokens, packed rows, batches"),
  "checkpoint": ("checkpoint", "states of runs, Hugging Face files"),
  "models": ("models", "one folder per family: from a configuration to a decoder on a mesh"),
  "sharding": ("sharding", "devices, mesh, processes"),
  "config": ("config", "files, keys, types and checks"),
  "numerics": ("numerics", "x-ray of any JAX function; knows no model and no trainer"),
  "layers": ("layers (src/layers)", "parameters and equations; imports only JAX and Flax"),
}
"""Title and description of each part; parts without an entry are the files below all others."""


def draw() -> str:
  """The picture as SVG: a box for each part, above every part that it may import."""
  rows = [[part for part in names if part in PARTS] for names in reversed(ORDER)]
  rows = [names for names in rows if names]
  if unknown := set(PARTS) - {part for names in rows for part in names}:
    raise ValueError(f"{', '.join(sorted(unknown))}: not in ORDER of tests/test_imports.py")
  base = [name for names in ORDER for name in names if name not in PARTS and not name.startswith("__")]
  shapes, y = [], MARGIN
  for names in rows:
    y = _row([PARTS[name] for name in names], shapes, y)
  y = _row([("single files", ", ".join(f"{name}.py" for name in base))], shapes, y)
  style = (
    "svg{background:#fff}rect{fill:#f6f8fa;stroke:#57606a}text{font:13px sans-serif;fill:#57606a}"
    ".title{font:bold 15px monospace;fill:#1f2328}"
  )
  head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {y}" width="{WIDTH}" height="{y}">'
  return "\n".join([head, f"<style>{style}</style>", *shapes, "</svg>\n"])


def _row(parts: list[tuple[str, str]], shapes: list[str], y: int) -> int:
  """Adds the boxes of one row to ``shapes``. Returns where the next row begins."""
  width = (WIDTH - 2 * MARGIN - GAP * (len(parts) - 1)) / len(parts)
  # A title and its description share a line where there is room.
  beside = len(parts) == 1 and len(parts[0][1]) < 75
  wrapped = [[said] if beside else textwrap.wrap(said, int((width - 2 * PAD) / CHARACTER)) for _, said in parts]
  height = 2 * PAD + LINE * (1 if beside else 1 + max(map(len, wrapped))) - 4
  for place, ((title, _), lines) in enumerate(zip(parts, wrapped, strict=True)):
    x = MARGIN + place * (width + GAP)
    shapes.append(f'<rect x="{x:.0f}" y="{y}" width="{width:.0f}" height="{height}" rx="6"/>')
    shapes.append(f'<text class="title" x="{x + PAD:.0f}" y="{y + PAD + 12}">{html.escape(title)}</text>')
    for number, line in enumerate(lines, 0 if beside else 1):
      at = x + PAD + (200 if beside else 0)
      shapes.append(f'<text x="{at:.0f}" y="{y + PAD + 12 + LINE * number}">{html.escape(line)}</text>')
  return y + height + GAP


if __name__ == "__main__":
  PICTURE.write_text(draw(), encoding="utf-8")
  print(PICTURE)
