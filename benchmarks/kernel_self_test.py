"""Runs the self-tests of fused kernels on this machine's device at models' shapes: a table for attention, or all with times.

python benchmarks/kernel_self_test.py [--length 4096] [--any-length] [--model gemma3-4b ...] [--dtype bfloat16 ...]
python benchmarks/kernel_self_test.py --together [--model gemma4-26b] [--dtype bfloat16]

`--any-length` adds rows that are 64 positions longer. A run never passes them to cuDNN, whose bfloat16 backward pass gave NaN
gradients at length % 128 == 64 (pytorch issue 196678). The option shows if this machine's libraries still do. Exit code 3 if a
kernel failed at a shape that a run would use. `--together` prints no table. It tests kernels of attention, experts and norms
at the same time, as a run does at its first start, in bfloat16 unless `--dtype` names another dtype. A run tests only some of
the shapes: those with or without documents, with or without images. It prints the seconds of each shape and of each stage.
"""

import argparse
import collections
import dataclasses
import importlib.metadata
import os
import sys
import time
from typing import Any

import jax

from maxtext_like.config.load import load_config
from maxtext_like.layers.attention.attention import AttentionConfig
from maxtext_like.layers.kernels.attention.registry import Case, Name, kernel
from maxtext_like.layers.precision import Precision
from maxtext_like.layers.vision.attention import case_of
from maxtext_like.models import grouped_kernels, norm_kernels
from maxtext_like.models.attention_kernels import shape_of
from maxtext_like.models.build import build_decoder
from maxtext_like.models.kernel_verdicts import Target, verdict_each, versions
from maxtext_like.numerics import grouped_selfcheck, norm_selfcheck
from maxtext_like.numerics.attention_selfcheck import ShapeClass, self_test
from maxtext_like.numerics.selfcheck_programs import EVENT, STAGES

MODELS = ("gemma3-4b", "gemma3-27b", "gemma4-31b", "gemma4-e2b")


KERNELS: dict[str, dict[Name, tuple[str, ...]]] = {  # platform: {kernel: dtypes}
  "gpu": {"cudnn_flash": ("bfloat16", "float16"), "mosaic_flash": ("bfloat16", "float16")},
  "tpu": {"splash": ("bfloat16",)},
}


def classes(models: list[str], name: Name, dtype: Any, length: int, device: Any) -> list[ShapeClass]:
  """Returns the shape classes of the models that a kernel supports, each once.

  They are those of attention layers, with and without documents and bidirectional images, and those of vision towers.
  """
  where = {"platform": device.platform, "capability": getattr(device, "compute_capability", None)}
  found, precision = {}, Precision(dtype=dtype)
  for model in models:
    config = load_config(model).config
    if config.vision.num_hidden_layers_for_vit:
      config = load_config(model, ["use_multimodal=true"]).config
    decoder = build_decoder(config.model, precision, vision=config.vision)
    cases: list[tuple[Case, tuple[bool, ...]]] = [
      (dataclasses.replace(layer.mixer.case(128, images=images), **where), (True, False))
      for layer in decoder.layers
      if isinstance(layer.cfg.mixer, AttentionConfig)
      for images in (False, True)
    ]
    if (tower := decoder.cfg.vision) is not None:
      cases.append((dataclasses.replace(case_of(tower, precision, config.vision.patches), **where), (tower.padded,)))
    for case, documents in cases:
      if not kernel(name).refuses(case):
        rows = dataclasses.replace(case, length=length) if case.causal else case
        found |= dict.fromkeys(shape_of(name, rows, segments) for segments in documents)
  return list(found)


def other_shapes(models: list[str], dtype: Any, length: int, device: Any) -> list[tuple[Any, Any]]:
  """Returns (shape, self-test) for the models' experts and the gradients of their norms, each once, for one device."""
  where = {"platform": device.platform, "capability": getattr(device, "compute_capability", None)}
  found = {}
  for model in models:
    decoder = build_decoder(load_config(model).config.model, Precision(dtype=dtype), **where)
    shapes = grouped_kernels.first_shapes(decoder, tokens=length, ways=1)
    found |= dict.fromkeys((shape, grouped_selfcheck.self_test) for shape in shapes)
    norms = norm_kernels.first_shapes(decoder, Target(**where), asked="auto")
    found |= dict.fromkeys((shape, norm_selfcheck.self_test) for shape in norms)
  return list(found)


def time_together(models: list[str], dtypes: list[str], length: int, device: Any) -> int:
  """Tests all shapes at the same time and prints the seconds. Returns the exit code."""
  # Experts first, as in a run: their kernels take longest to compile.
  tests = [test for dtype in dtypes for test in other_shapes(models, dtype, length, device)]
  for name, supported in KERNELS[device.platform].items():
    used = [dtype for dtype in dtypes if dtype in supported]
    tests += [(shape, self_test) for dtype in used for shape in classes(models, name, dtype, length, device)]
  spans = collections.defaultdict(list)  # (begin, end) of every event

  def listen(event: str, duration_secs: float, **_: Any) -> None:
    spans[event].append((time.monotonic() - duration_secs, time.monotonic()))

  jax.monitoring.register_event_duration_secs_listener(listen)
  begin, cpu = time.monotonic(), cpu_seconds()
  found = verdict_each(tests, device, None)
  total, cpu = time.monotonic() - begin, cpu_seconds() - cpu
  for shape, (problem, seconds) in found.items():
    print(f"{seconds:6.1f} s  {shape}: {f'FAILED: {problem}' if problem else 'passed'}")
  programs = len(spans[COMPILED])
  print(f"{len(found)} shapes tested at the same time: {total:.1f} s, {cpu:.0f} CPU s; JAX compiled {programs} programs")
  for stage in STAGES:
    times = spans[EVENT + stage]
    if not times:
      continue
    took = sorted(end - start for start, end in times)
    first, last = min(start for start, _ in times) - begin, max(end for _, end in times) - begin
    print(
      f"  {stage:11} {len(times):3} times, {sum(took):6.1f} s added up, the longest {took[-1]:5.1f} s; "
      f"from second {first:.1f} to {last:.1f}, {covered(times):.1f} s with at least one"
    )
  return 3 if any(problem for problem, _ in found.values()) else 0


COMPILED = "/jax/core/compile/backend_compile_duration"


def covered(times: list[tuple[float, float]]) -> float:
  """Returns the length of the union of intervals, each a (begin, end)."""
  total, until = 0.0, float("-inf")
  for start, end in sorted(times):
    total += max(0.0, end - max(start, until))
    until = max(until, end)
  return total


def cpu_seconds() -> float:
  """Returns the CPU seconds of this process and of its finished children."""
  return sum(os.times()[:4])


def main() -> int:
  parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
  parser.add_argument("--length", type=int, default=4096, help="positions of a row")
  parser.add_argument("--any-length", action="store_true", help="also try rows of 64 positions more")
  parser.add_argument("--together", action="store_true", help="time all shapes at once")
  parser.add_argument("--dtype", nargs="+", choices=("bfloat16", "float16"), help="only these; --together: bfloat16")
  parser.add_argument("--model", nargs="+", default=list(MODELS), help="models whose shapes are tried")
  options = parser.parse_args()
  device = jax.devices()[0]
  if device.platform not in KERNELS:
    print(f"{device.device_kind}: no fused kernel runs here")
    return 0
  known = versions(device)
  print(f"{device.device_kind}, {', '.join(f'{k} {v}' for k, v in known['packages'].items())}")
  print(f"{known['driver'] or known['platform'].splitlines()[0]}; python {sys.version.split()[0]}")
  print(f"flax {importlib.metadata.version('flax')}; rows of {options.length}")
  if options.together:
    return time_together(options.model, options.dtype or ["bfloat16"], options.length, device)
  heads = f"{'kernel':12} {'dtype':9} {'heads':5} {'group':5} {'window':6} {'docs':4} {'images':6}"
  print(f"{heads} {'case':26} {'error':>8} {'gradient':>8} result")
  lengths = [options.length] + ([options.length + 64] if options.any_length else [])
  failed = False
  for length in lengths:
    for name, dtypes in KERNELS[device.platform].items():
      tried = [dtype for dtype in dtypes if dtype in (options.dtype or dtypes)]
      for shape in (s for dtype in tried for s in classes(options.model, name, dtype, length, device)):
        begin = time.monotonic()
        for r in self_test(shape):
          errors = [f"{'-' if e is None else format(e, '.1e'):>8}" for e in (r.error, r.gradient_error)]
          start = f"{name:12} {shape.dtype:9} {shape.head_dim:5} {shape.groups:5} {'yes' if shape.window else 'no':6}"
          docs, images = ("yes" if there else "no" for there in (shape.segments, shape.images))
          result = f"FAILED: {r.problem}" if r.problem else "passed"
          print(f"{start} {docs:4} {images:6} {r.name:26} {' '.join(errors)} {result}", flush=True)
          # An exception is a failure too, because ``classes`` contains only shapes that the kernel supports. Rows that are 64
          # positions longer do not count, because no run uses them.
          failed |= bool(r.problem) and length % 128 == 0
        print(f"  {shape}: {time.monotonic() - begin:.1f} s", flush=True)
  return 3 if failed else 0


if __name__ == "__main__":
  sys.exit(main())
