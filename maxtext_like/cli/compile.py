"""``maxtext-like compile``: the train step compiled for a TPU slice, or estimated for GPUs, and whether it fits there."""

import os

from maxtext_like.cli.arguments import print_notes, split_configuration
from maxtext_like.config.load import Loaded, load_config
from maxtext_like.errors import DoesNotFitError, UserError
from maxtext_like.training.topologies import GIB, GPU_NAMES, TOPOLOGIES, GpuHost, find_gpus, find_topology

DESCRIPTION = f"""Compiles the train step of a configuration ahead of time for a TPU slice, on any Linux machine with libtpu
(pip install -e '.[tpu]'), and prints the memory that one chip needs. Nothing runs, no TPU is needed. For GPUs, whose programs
only the device's own libraries can compile, it prints the estimate that train makes before it allocates anything.

  topology=NAME     a slice: {", ".join(TOPOLOGIES)}
                    GPUs of a host, by estimate: a100-1 (80 GB), h100-8, h200-8, b200-8, h200 for one
  xla_flags=GROUP   TPU: base (default), or all: with the flags that put collectives behind computation, as tpu/env.sh sets
                    them for a run; compiles 2 to 3 times as long and needs about as much memory

Exit code 0: fits, 4: does not fit, 2: wrong usage."""
EXAMPLES = """examples:
  maxtext-like compile gemma4-tiny topology=v6e-1
  maxtext-like compile gemma4-31b topology=v6e-32
  maxtext-like compile gemma4-31b tpu/v6e-32.yml topology=v6e-32 per_device_batch_size=2
  maxtext-like compile gemma4-31b topology=h200-8"""


def run(argv: list[str]) -> int:
  """Compiles and prints the verdict; see ``DESCRIPTION``."""
  config, words = split_configuration("compile", DESCRIPTION, argv, EXAMPLES)
  own, overrides = split_own(words)
  if "topology" not in own:
    raise UserError(f"compile: no topology\n  fix: add topology=NAME, one of {', '.join((*TOPOLOGIES, *GPU_NAMES))}")
  host = find_gpus(own["topology"])
  if host is not None and "xla_flags" in own:
    raise UserError(f"compile: xla_flags={own['xla_flags']} is for TPUs, {host.name} is not\n  fix: leave it out")
  target = host or find_topology(own["topology"], GPU_NAMES)

  # Later than the configuration's errors, which should come at once.
  loaded = load_config(config, overrides)
  print_notes(loaded.notes)
  os.environ["JAX_PLATFORMS"] = "cpu"
  if isinstance(target, GpuHost):
    return estimate(loaded, target)
  from maxtext_like.training import ahead_of_time

  group = own.get("xla_flags", "base")
  step = ahead_of_time.compile_step(loaded.config, target, ahead_of_time.xla_flags(group))
  print(report(loaded, step, group))
  return 0 if step.fits else DoesNotFitError.exit_code


def estimate(loaded: Loaded, host: GpuHost) -> int:
  """Prints what a step needs of each GPU, in GB (1e9 bytes), and gives the exit code."""
  import jax

  from maxtext_like.layers.param import count
  from maxtext_like.training import memory

  program, need, limit = memory.for_gpus(loaded.config, host)
  fits = need.total <= limit.bytes
  mesh = " x ".join(f"{axis} {size}" for axis, size in program.model.mesh.shape.items())
  rows = [
    *_run_rows(loaded, count(jax.tree.leaves(program.abstract_state["params"])), "GPU"),
    ("topology", f"{host.name} ({host.card}), {host.gpus} of one host, mesh {mesh}"),
    *(("attention", str(use)) for use in program.model.kernels),
    ("by estimate", "no GPU is here, and nothing was compiled: these are the arrays that follow from shapes and shardings,"),
    ("", "as train counts them before it allocates; of each GPU:"),
  ]
  print("\n".join(f"  {name:<12} {value}" for name, value in rows))
  print(memory.table(need, limit))
  tail = [("not counted", "what XLA, cuDNN and NCCL work in, and weights that are gathered for a layer: the device tells")]
  share = f"{need.total / limit.bytes:.0%} of what there is"
  tail.append(("verdict", f"fits by estimate, with {share}" if fits else f"does not fit: {share}"))
  print("\n".join(f"  {name:<12} {value}" for name, value in tail))
  if not fits:
    print(memory.remedies(program, need, limit))
  return 0 if fits else DoesNotFitError.exit_code


def split_own(words: list[str]) -> tuple[dict[str, str], list[str]]:
  """The words that are compile's own (``topology=``, ``xla_flags=``, with dashes or without), and all others in order."""
  own: dict[str, str] = {}
  others = []
  for word in words:
    key, equals, value = word.partition("=")
    name = key.lstrip("-").replace("-", "_")
    if name in ("topology", "xla_flags"):
      if not equals or not value:
        raise UserError(f"command line {word!r}: no value\n  fix: write {name}=VALUE, see maxtext-like compile --help")
      own[name] = value
    else:
      others.append(word)
  return own, others


def report(loaded: Loaded, step, group: str) -> str:
  """The table for people, in GiB (2**30 bytes) or MiB of one chip."""
  from maxtext_like.training.ahead_of_time import version

  hbm = step.topology.hbm_bytes
  chips = "1 chip" if step.topology.chips == 1 else f"{step.topology.chips} chips"
  mesh = " x ".join(f"{axis} {size}" for axis, size in step.mesh.items())
  rows = [
    *_run_rows(loaded, step.parameters, "chip"),
    ("topology", f"{step.topology.name} ({step.topology.libtpu_name}), {chips}, mesh {mesh}"),
    *(("attention", str(use)) for use in step.kernels),
    ("arguments", f"{_size(step.argument_bytes)} a chip (parameters, optimizer, batch)"),
  ]
  if step.temporary_bytes is not None:
    rows.append(("temporaries", f"{_size(step.temporary_bytes)} a chip, not all at once"))
  if step.peak_bytes is not None:
    share = f"{step.peak_bytes / hbm:.0%}"
    name = "peak" if not step.out_of_memory else "needed"
    rows.append((name, f"{_size(step.peak_bytes)} of {_size(hbm)} HBM a chip ({share})"))
  if not step.out_of_memory:
    rows.append(("collectives", collectives(step)))
  packages = f"jax {version('jax')}, libtpu {version('libtpu')}, XLA flags {group}"
  rows.append(("compiled", f"in {step.seconds:.0f} s with {packages}"))
  if step.out_of_memory:
    rows.append(("compiler", step.out_of_memory))
  rows.append(("verdict", "fits" if step.fits else f"does not fit: {_remedy(step)}"))
  return "\n".join(f"  {name:<12} {value}" for name, value in rows)


def _run_rows(loaded: Loaded, parameters: int, device: str) -> list[tuple[str, str]]:
  """What is looked at: model and training, the batch as that of a device, which is called ``device``."""
  c, t = loaded.config, loaded.config.training
  shape = f"{t.per_device_batch_size} x {t.max_target_length} tokens a {device}"
  if t.gradient_accumulation_steps > 1:
    shape += f", {t.gradient_accumulation_steps} times"
  return [
    ("model", f"{c.model.model_name}, {parameters:,} parameters, {c.precision.weight_dtype} weights"),
    ("training", f"{t.opt_type}, {c.precision.dtype}, remat {t.remat_policy}, attention {t.attention}, {shape}"),
  ]


def collectives(step) -> str:
  """The counts in words."""
  if step.collectives is None:
    return "this libtpu cannot print the program"
  if not step.collectives:
    return "none"
  words = ", ".join(f"{count} {name}" for name, count in step.collectives.items())
  return f"{sum(step.collectives.values())} in the program text: {words}"


def _size(size: int) -> str:
  return f"{size / GIB:.2f} GiB" if size >= 0.1 * GIB else f"{size / GIB * 1024:.2f} MiB"


def _remedy(step) -> str:
  bigger = [t.name for t in TOPOLOGIES.values() if t.chips > step.topology.chips]
  lower = "per_device_batch_size, max_target_length, weight_dtype=bfloat16, opt_type=adafactor, remat_policy=full"
  return f"try {'topology=' + bigger[0] + ', or ' if bigger else ''}{lower}"
