"""Shows where the time of a training step goes on the device: by part of the model, by kind of operation, and by kernel.

python benchmarks/profile.py gemma3-4b per_device_batch_size=2 remat_policy=minimal max_target_length=4096 --out runs/profile
python benchmarks/profile.py gemma4-31b num_decoder_layers=6 per_device_batch_size=2 remat_policy=none packing=false
python benchmarks/profile.py gemma3-tiny max_target_length=64 --steps 2                                  a quick try on a CPU

Times the compiled step of a configuration, then traces more steps with jax.profiler. Each event of the device is assigned to
its instruction of the compiled program, and the instruction to the named scope that requested it. A fusion belongs to the scope
of its root, as the compiler names it. "casts" and "copies" are operations that do nothing else, in any part. "update" is
everything outside the layers: the optimizer, gradient norms and checks. "busy" is the time in which at least one operation
runs, "idle" the other time between the first event and the last. Parts and kinds add up to more than "busy" if streams overlap.
Prints tables. --out writes them as profile.json with every kernel, as the picture profile.svg, and the trace for xprof and
ui.perfetto.dev. Tokens are random, with two documents in each row, or one with packing=false.

On a GPU command buffers are off during the measurement, because kernels in them have no names, unless XLA_FLAGS sets them.
"step" is then a little longer than in training.
"""

import argparse
import collections
import html
import json
import os
import re
import statistics
import tempfile
import time
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

PARTS: dict[str, tuple[str, ...]] = {
  "attention": ("attention", "mla", "indexer"),
  "feed-forward": ("mlp", "moe", "experts"),
  "norms": ("norm",),
  "embedding": ("embedding", "ple", "per_layer_input"),
  "vision": ("vision", "vision_pool"),
  "head and loss": ("head", "loss", "logits"),
  "between": ("residual",),
  "update": ("optimizer",),
}
"""Scope names of each part. The innermost scope decides."""
CONTROL = ("while", "conditional", "call", "async-start", "async-done", "async-update")  # their contents have their own events
MOVES = frozenset(
  "copy copy-start copy-done transpose bitcast reshape broadcast slice dynamic-slice dynamic-update-slice concatenate pad iota "
  "reverse parameter constant tuple get-tuple-element".split()
)
COLLECTIVES = ("all-gather", "reduce-scatter", "all-reduce", "all-to-all", "collective-permute")
TRACES = "**/*.xplane.pb"
PRODUCTS = ("gemm", "matmul", "cublas", "dot", "conv")
COLORS = {"forward": "#0969da", "recomputed": "#bf8700", "backward": "#8250df", "update": "#57606a"}


@dataclass(frozen=True)
class Kernel:
  """The cost of an instruction of the program in a step.

  Attributes:
    name: name of the instruction.
    part: a key of ``PARTS``, "casts", "copies" or "outside the program".
    kind: result of ``kind_of``.
    stage: forward, recomputed or backward; update outside the computation of the loss.
    path, place: scope path and source line of the code that requested it.
    milliseconds, launches: per step.
  """

  name: str
  part: str
  kind: str
  stage: str
  path: str
  place: str
  milliseconds: float
  launches: float


def kind_of(operation: Any, program: Any) -> str:
  """Returns the kind of an operation of a ``compiled_program.CompiledProgram``, in a few words."""
  if operation.kind.removesuffix("-start").removesuffix("-done") in COLLECTIVES:
    return "collective"
  inside = list(_inside(operation, program))
  kinds, targets = {op.kind for op in inside}, [_target(op) for op in inside if op.kind == "custom-call"]
  if any("fmha" in target for target in targets):
    return "fused attention"
  if kinds & {"dot", "convolution", "ragged-dot"} or any(word in target for target in targets for word in PRODUCTS):
    return "matrix product"
  if targets:
    return f"custom call {targets[0]}"
  if kinds & {"sort", "scatter", "gather"}:
    return "gather, scatter, sort"
  if kinds <= MOVES | {"convert"}:
    return "cast" if "convert" in kinds else "copy"
  return "reduction" if kinds & {"reduce", "reduce-window"} else "elementwise"


def _target(operation: Any) -> str:
  return operation.text.partition('custom_call_target="')[2].partition('"')[0]


def _inside(operation: Any, program: Any) -> Iterator[Any]:
  """Yields the operation, or the operations of a fusion and of the fusions in it."""
  if operation.kind != "fusion":
    yield operation
    return
  called = re.search(r"calls=%([\w.\-]+)", operation.text)
  for op in program.computations[called[1]] if called else ():
    yield from _inside(op, program)


def part_of(scopes: Iterable[str], kind: str) -> str:
  """Returns the part of the model that a path of scopes belongs to."""
  if kind in (apart := {"cast": "casts", "copy": "copies", "outside the program": "outside the program"}):
    return apart[kind]
  in_layer = False
  for scope in reversed(tuple(scopes)):
    for part, names in PARTS.items():
      if scope in names or (part == "norms" and scope.endswith("_norm")):
        return part
    in_layer = in_layer or scope.startswith(("row_", "stack_", "layer_"))
  return "between" if in_layer else "update"


def events(traces: Iterable[Path], module: str) -> Iterator[tuple[str, float, float]]:
  """Yields (instruction, start in ns, duration in ns) for every event of the device in a trace.

  The instruction is "" for an event that belongs to none.

  Args:
    traces: files of jax.profiler.
    module: name of the step's module, because a CPU's threads also run other modules.
  """
  from jax.profiler import ProfileData

  for file in traces:
    for plane in ProfileData.from_file(str(file)).planes:
      on_device = plane.name.startswith("/device:")
      for line in plane.lines:
        if on_device and not line.name.startswith(("Stream", "XLA Ops")):
          continue  # other lines repeat the events under other names
        for event in line.events:
          stats = dict(event.stats)
          named = str(stats.get("hlo_op") or (event.name.split(" ")[0] if line.name == "XLA Ops" else ""))
          if on_device or (named and stats.get("hlo_module") == module):
            yield named.lstrip("%"), event.start_ns, event.duration_ns


def kernels(found: list[tuple[str, float, float]], program: Any, steps: int) -> list[Kernel]:
  """Returns the cost of each instruction in a step, the most expensive first."""
  from maxtext_like.numerics.hlo import Instruction

  times: dict[str, list[float]] = collections.defaultdict(list)
  for name, _, duration in found:
    times[name].append(duration)
  rows = []
  for name, each in times.items():
    operation = program.operations.get(name)
    if operation is not None and operation.kind in CONTROL:
      continue
    path, place = program.requested_by(name)
    asked = Instruction(kind="", path=path, operands=(), results=())
    kind = "outside the program" if operation is None else kind_of(operation, program)
    part, within = part_of(asked.scopes, kind), part_of(asked.scopes, "")
    stage = "update" if within == "update" else asked.stage
    rows.append(Kernel(name, part, kind, stage, path, place, sum(each) / steps / 1e6, len(each) / steps))
  return sorted(rows, key=lambda k: -k.milliseconds)


def busy(found: list[tuple[str, float, float]]) -> tuple[float, float]:
  """Returns the milliseconds in which at least one event ran, and those between the first event and the last."""
  together, end = 0.0, 0.0
  spans = sorted((start, start + duration) for _, start, duration in found)
  for start, stop in spans:
    together += max(0.0, stop - max(start, end))
    end = max(end, stop)
  return together / 1e6, (end - spans[0][0]) / 1e6 if spans else 0.0


def totals(rows: list[Kernel], by: str) -> dict[str, dict[str, float]]:
  """Returns the milliseconds of a step by "part" or "kind" and by stage, with "all" and "launches"; largest first."""
  found: dict[str, dict[str, float]] = collections.defaultdict(lambda: dict.fromkeys((*COLORS, "all", "launches"), 0.0))
  for k in rows:
    own = found[getattr(k, by)]
    own[k.stage] += k.milliseconds
    own["all"] += k.milliseconds
    own["launches"] += k.launches
  return dict(sorted(found.items(), key=lambda item: -item[1]["all"]))


def table(found: dict[str, dict[str, float]], by: str) -> str:
  """Returns totals as a Markdown table."""
  whole = sum(own["all"] for own in found.values()) or 1.0
  lines = [f"| {by} | ms a step | share | {' | '.join(COLORS)} | kernels |", "|" + "---|" * (4 + len(COLORS))]
  for name, own in found.items():
    stages = " | ".join(f"{own[stage]:.3f}" for stage in COLORS)
    lines.append(f"| {name} | {own['all']:.3f} | {own['all'] / whole:.1%} | {stages} | {own['launches']:.0f} |")
  return "\n".join(lines)


def picture(found: dict[str, dict[str, float]], title: str) -> str:
  """Returns totals by part as an SVG bar chart."""
  left, width, height, gap = 150, 620, 20, 8
  most = max((own["all"] for own in found.values()), default=1.0) or 1.0
  shapes = [f'<text x="12" y="20" class="t">{html.escape(title)}</text>']
  for n, (stage, color) in enumerate(COLORS.items()):
    shapes.append(f'<rect x="{left + 120 * n}" y="32" width="12" height="12" fill="{color}"/>')
    shapes.append(f'<text x="{left + 120 * n + 18}" y="43">{stage}</text>')
  for row, (name, own) in enumerate(found.items()):
    x, y = float(left), 58 + row * (height + gap)
    shapes.append(f'<text x="{left - 8}" y="{y + 15}" text-anchor="end">{html.escape(name)}</text>')
    for stage, color in COLORS.items():
      size = own[stage] / most * width
      shapes.append(f'<rect x="{x:.1f}" y="{y}" width="{size:.1f}" height="{height}" fill="{color}"/>')
      x += size
    shapes.append(f'<text x="{x + 6:.1f}" y="{y + 15}">{own["all"]:.2f} ms, {own["launches"]:.0f} kernels</text>')
  bottom = 66 + len(found) * (height + gap)
  style = "svg{background:#fff}text{font:13px sans-serif;fill:#1f2328}.t{font-weight:bold}"
  return (
    f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {left + width + 180} {bottom}"><style>{style}</style>\n'
    + "\n".join(shapes)
    + "\n</svg>\n"
  )


def measure(model: str, words: list[str], steps: int, out: Path) -> dict[str, Any]:
  """Runs and traces the step of a configuration, and returns the measured numbers."""
  import jax
  import numpy as np
  from step_cost import DRAWN, batch, require_updates

  from maxtext_like.capacity.compiled_program import read_program
  from maxtext_like.config.load import load_config
  from maxtext_like.sharding.mesh import make_mesh
  from maxtext_like.training.step.program import make_program

  config = load_config(model, words).config
  program = make_program(config, mesh=make_mesh(config.mesh, jax.local_devices()[:1]))
  compiled = program.lower_step().compile()
  state = program.lower_init().compile()(np.uint32(0))
  data, known = batch(program), DRAWN

  def run(count: int) -> float:
    """Runs steps back to back and returns the milliseconds of a step."""
    nonlocal state, known
    begin = time.perf_counter()
    for _ in range(count):
      state, metrics = compiled(state, data, known)
      known = metrics["magnitude_bound"]
    jax.block_until_ready((state, metrics))
    milliseconds = (time.perf_counter() - begin) / count * 1e3
    require_updates([metrics])
    return milliseconds

  run(2)
  plain = statistics.median(run(steps) for _ in range(3))
  earlier = set(out.glob(TRACES))
  with jax.profiler.trace(str(out)):
    traced = run(steps)
  text = compiled.as_text()
  found = list(events(set(out.glob(TRACES)) - earlier, text.split(None, 2)[1].rstrip(",")))
  rows = kernels(found, read_program(text), steps)
  together, spanned = busy(found)
  device = jax.local_devices()[0]
  return {
    "model": model, "words": words, "jax": jax.__version__, "device": device.device_kind,
    "attention": [str(use) for use in program.model.kernels], "experts": program.model.grouped_product,
    "rows": program.global_batch, "length": config.training.max_target_length,
    "step_ms": plain, "traced_step_ms": traced, "busy_ms": together / steps, "idle_ms": (spanned - together) / steps,
    "peak_bytes": (device.memory_stats() or {}).get("peak_bytes_in_use"),
    "kernels_a_step": sum(k.launches for k in rows), "kernels": [asdict(k) for k in rows],
  }  # fmt: skip


def main() -> None:
  """Prints the tables."""
  parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
  parser.add_argument("model")
  parser.add_argument("words", nargs="*", metavar="key=value")
  parser.add_argument("--steps", type=int, default=5, help="that are traced, and those of each group that is timed")
  parser.add_argument("--kernels", type=int, default=15, help="dearest instructions that are listed")
  parser.add_argument("--out", type=Path, help="folder for profile.json, profile.svg and the trace")
  args = parser.parse_args()
  flag = "--xla_gpu_enable_command_buffer"
  if flag not in os.environ.get("XLA_FLAGS", ""):
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {flag}=".strip()
  os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", ".92")
  with tempfile.TemporaryDirectory() as temporary:
    out = args.out or Path(temporary)
    out.mkdir(parents=True, exist_ok=True)
    found = measure(args.model, args.words, args.steps, out)
    rows = [Kernel(**k) for k in found["kernels"]]
    parts, kinds = totals(rows, "part"), totals(rows, "kind")
    title = f"{args.model} {' '.join(args.words)}: {found['step_ms']:.2f} ms a step on {found['device']}"
    (out / "profile.json").write_text(json.dumps(found | {"parts": parts, "kinds": kinds}, indent=1) + "\n")
    (out / "profile.svg").write_text(picture(parts, title))
  print(f"jax {found['jax']}, {found['rows']} x {found['length']} tokens, {'; '.join(found['attention'])}\n{title}")
  print(
    f"traced {found['traced_step_ms']:.2f} ms: busy {found['busy_ms']:.2f}, idle {found['idle_ms']:.2f}; "
    f"{found['kernels_a_step']:.0f} kernels\n\n{table(parts, 'part')}\n\n{table(kinds, 'kind')}\n"
  )
  print("| instruction | ms a step | times | part | kind | stage | asked for by |\n" + "|---" * 7 + "|")
  for k in rows[: args.kernels]:
    print(f"| {k.name} | {k.milliseconds:.3f} | {k.launches:.0f} | {k.part} | {k.kind} | {k.stage} | {k.place or k.path} |")
  if args.out:
    print(f"\n{out}/profile.json, profile.svg; the trace: xprof --logdir {out}")


if __name__ == "__main__":
  main()
