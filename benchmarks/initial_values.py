"""Compares the loss curves of the two values of init_scheme, from random weights.

  python benchmarks/initial_values.py                                        four deep, narrow models on a CPU
  python benchmarks/initial_values.py --only gemma4-31b gemma4-26b --devices 4   one GPU per run, four runs at a time
  python benchmarks/initial_values.py --only qwen3 --schemes depth_scaled --rates 1e-3 3e-3 --warmups 0.1 0.3

Each run is a separate process with 300 steps on the same text. The narrow models have the layer pattern, head sizes and norms
of a released model, 36 layers and a width of 64, so that they show the effect of depth. The table has a row for each model,
scheme, learning rate and warm-up: the gradient norm of step 1 (largest of the seeds), the loss at some steps (mean of the
seeds) and the mean loss of the last 20 steps (mean, lowest and highest of the seeds). ``--json FILE`` stores every curve,
``--read FILE`` reads stored curves instead of training, and ``--svg FILE`` draws the curves.
"""

import argparse
import json
import os
import queue
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import numpy as np

from maxtext_like.training.run.report_curves import labels, linear_ticks

SHARED = ["steps=300", "enable_checkpointing=false", "enable_tensorboard=false", "replay_failed_step=false"]
NARROW = ["num_decoder_layers=36", "emb_dim=64", "num_query_heads=4", "vocab_size=512", "pad_token_id=0", "dtype=float32"]
NARROW += ["remat_policy=none", "max_target_length=64", "per_device_batch_size=2"]
GEMMA = ["num_kv_heads=2", "mlp_dim=256", "sliding_window_size=32"]
LATENT = ["num_kv_heads=4", "mlp_dim=192", "q_lora_rank=32", "kv_lora_rank=32", "indexer_n_heads=4", "indexer_topk=16"]
EXPERTS = ["num_experts=16", "num_experts_per_tok=4", "n_routing_groups=4", "topk_routing_group=2", "moe_mlp_dim=64"]
ONE_GPU = ["gpu/one_h200.yml", "max_target_length=512"]
MODELS = {
  "gemma4": ["gemma4-31b", *NARROW, *GEMMA, "global_num_kv_heads=1"],
  "gemma3": ["gemma3-27b", *NARROW, *GEMMA],
  "deepseek3.2": ["deepseek3.2-671b", *NARROW, *LATENT, *EXPERTS],
  "qwen3": ["qwen3-8b", *NARROW, "num_kv_heads=2", "mlp_dim=192"],
  **{name: [name, *ONE_GPU] for name in ("gemma4-31b", "gemma4-26b", "gemma4-e2b", "gemma3-4b", "qwen3-8b", "qwen3-0.6b")},
}
"""Words of ``train`` for each model: the first four fit a CPU, the others a GPU with 80 GB."""

SCHEMES = ("depth_scaled", "maxtext")
STEPS = (1, 2, 5, 10, 20, 60, 100, 200)


class Run(NamedTuple):
  """One curve."""

  model: str
  scheme: str
  rate: float
  seed: int
  warmup: float = 0.1


class Curve(NamedTuple):
  """Loss and gradient norm of every step."""

  loss: list[float]
  gradient_norm: list[float]


def trained(run: Run, words: list[str], device: int | None) -> Curve | str:
  """Returns the curve of a run in a process that sees only this GPU, or the last lines of output of a failed run.

  With ``device=None`` the process sees all devices.
  """
  with tempfile.TemporaryDirectory() as folder:
    own = {} if device is None else {"CUDA_VISIBLE_DEVICES": str(device)}
    given = [
      f"learning_rate={run.rate}",
      f"warmup_steps_fraction={run.warmup}",
      f"seed={run.seed}",
      f"init_scheme={run.scheme}",
      f"output_dir={folder}",
      "run_name=run",
    ]
    command = [sys.executable, "-m", "maxtext_like", "train", *MODELS[run.model], *SHARED, *given, *words]
    done = subprocess.run(command, env=os.environ | own, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if done.returncode:
      return "\n".join(done.stdout.splitlines()[-5:])
    rows = [json.loads(line) for line in Path(folder, "run", "metrics.jsonl").read_text().splitlines()]
  return Curve([row["loss"] for row in rows], [row["grad_norm"] for row in rows])


def table(curves: dict[Run, Curve]) -> list[str]:
  """Returns the lines of a Markdown table: a row for each model, scheme, learning rate and warm-up."""
  groups: dict[tuple[str, str, float, float], list[Curve]] = {}
  for run, curve in curves.items():
    groups.setdefault((run.model, run.scheme, run.rate, run.warmup), []).append(curve)
  head = ["model", "init_scheme", "learning rate", "warm-up", "seeds", "gradient norm, step 1"]
  head += [*(f"loss, step {s}" for s in STEPS), "end"]
  lines = [f"| {' | '.join(head)} |", f"|{'---|' * len(head)}"]
  for (model, scheme, rate, warmup), found in groups.items():
    length = min(len(curve.loss) for curve in found)
    loss = np.array([curve.loss[:length] for curve in found])
    ends = loss[:, -20:].mean(axis=1)
    cells = [
      model,
      scheme,
      f"{rate:g}",
      f"{warmup:.0%}",
      str(len(found)),
      f"{max(curve.gradient_norm[0] for curve in found):.3g}",
    ]
    cells += [f"{loss[:, step - 1].mean():.2f}" if step <= length else "" for step in STEPS]
    cells.append(f"{ends.mean():.3f} ({ends.min():.3f} to {ends.max():.3f})")
    lines.append(f"| {' | '.join(cells)} |")
  return lines


def picture(curves: dict[Run, Curve], rate: float) -> str:
  """Returns an SVG file with a panel for each model: the loss at one learning rate, as running means of 20 steps."""
  models = list(dict.fromkeys(run.model for run in curves if run.rate == rate))
  width, height, left, top, colors = 300, 210, 34, 24, {"depth_scaled": "#0072b2", "maxtext": "#d55e00"}
  text = 'font-family="sans-serif" font-size="11" fill="#444"'
  parts = []
  for i, model in enumerate(models):
    smooth = {
      run: np.convolve(curve.loss, np.ones(20) / 20, "valid")
      for run, curve in curves.items()
      if run.model == model and run.rate == rate
    }
    ticks = linear_ticks(min(map(np.min, smooth.values())), max(map(np.max, smooth.values())))
    steps = max(map(len, smooth.values())) + 19
    x_at = lambda x, i=i, steps=steps: i * width + left + x / steps * (width - left - 12)
    y_at = lambda y, ticks=ticks: top + (ticks[-1] - y) / (ticks[-1] - ticks[0]) * (height - top - 22)
    parts.append(f'<text x="{x_at(0):.0f}" y="14" {text}>{model}, learning rate {rate:g}</text>')
    for tick, label in zip(ticks, labels(ticks), strict=True):
      parts.append(
        f'<line x1="{x_at(0):.0f}" x2="{x_at(steps):.0f}" y1="{y_at(tick):.1f}" y2="{y_at(tick):.1f}" stroke="#ddd"/>'
      )
      parts.append(f'<text x="{x_at(0) - 4:.0f}" y="{y_at(tick) + 4:.1f}" text-anchor="end" {text}>{label}</text>')
    parts.append(f'<text x="{x_at(steps):.0f}" y="{height - 6}" text-anchor="end" {text}>step {steps}</text>')
    for run, losses in smooth.items():
      line = " ".join(f"{x_at(step + 20):.1f},{y_at(y):.1f}" for step, y in enumerate(losses))
      parts.append(f'<polyline points="{line}" fill="none" stroke="{colors[run.scheme]}" stroke-width="1.2"/>')
    for j, (scheme, color) in enumerate(colors.items()):
      at = f'x="{x_at(steps) - 4:.0f}" y="{top + 14 + 14 * j}" text-anchor="end"'
      parts.append(f"<text {at} {text.replace('#444', color)}>{scheme}</text>")
  size = f'viewBox="0 0 {width * len(models)} {height}" width="{width * len(models)}" height="{height}"'
  return f'<svg xmlns="http://www.w3.org/2000/svg" {size}>\n' + "\n".join(parts) + "\n</svg>\n"


def main() -> int:
  """Print the table; return 1 if a run failed."""
  parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
  parser.add_argument("words", nargs="*", metavar="key=value", help="laid over every run")
  parser.add_argument("--only", nargs="+", choices=MODELS, default=["gemma4", "gemma3", "deepseek3.2", "qwen3"])
  parser.add_argument("--schemes", nargs="+", choices=SCHEMES, default=list(SCHEMES))
  parser.add_argument("--rates", nargs="+", type=float, default=None, help="learning rates (3e-3; with a GPU's models 3e-4)")
  parser.add_argument("--warmups", nargs="+", type=float, default=[0.1], help="shares of the steps with a rising rate (0.1)")
  parser.add_argument("--seeds", type=int, default=3, help="seeds 0, 1, ... of each (3)")
  parser.add_argument("--devices", type=int, default=0, help="number of GPUs, one run on each at a time (0: no GPU is chosen)")
  parser.add_argument("--json", type=Path, metavar="FILE", help="write every curve here")
  parser.add_argument("--read", type=Path, metavar="FILE", help="take the curves of such a file, train nothing")
  parser.add_argument("--svg", type=Path, metavar="FILE", help="draw the curves of the first learning rate here")
  options = parser.parse_intermixed_args()
  if options.read:
    kept = [dict(row) for row in json.loads(options.read.read_text())]
    curves = {
      Run(**{name: row[name] for name in Run._fields if name in row}): Curve(row["loss"], row["gradient_norm"]) for row in kept
    }
    return report(curves, options.svg)
  free: queue.Queue[int | None] = queue.Queue()
  for device in range(options.devices) if options.devices else [None]:
    free.put(device)
  runs = [
    Run(model, scheme, rate, seed, warmup)
    for model in options.only
    for seed in range(options.seeds)
    for scheme in options.schemes
    for rate in options.rates or [3e-4 if "gpu/one_h200.yml" in MODELS[model] else 3e-3]
    for warmup in options.warmups
  ]

  def one(run: Run) -> Curve | str:
    device = free.get()
    try:
      return trained(run, options.words, device)
    finally:
      free.put(device)

  curves = {}
  with ThreadPoolExecutor(max(1, options.devices)) as pool:
    for run, result in zip(runs, pool.map(one, runs), strict=True):
      if isinstance(result, str):
        print(f"{run} failed:\n{result}", file=sys.stderr, flush=True)
        continue
      curves[run] = result
      print(f"{run}: ends at {np.mean(result.loss[-20:]):.4f}", file=sys.stderr, flush=True)
  if options.json:
    options.json.write_text(json.dumps([run._asdict() | curve._asdict() for run, curve in curves.items()]))
  return report(curves, options.svg) or int(len(curves) < len(runs))


def report(curves: dict[Run, Curve], svg: Path | None) -> int:
  """Print the table and draw the curves. Return 1 if there are no curves."""
  if not curves:
    return 1
  print(*table(curves), sep="\n")
  if svg:
    svg.write_text(picture(curves, next(iter(curves)).rate))
  return 0


if __name__ == "__main__":
  sys.exit(main())
