"""Whether a train step fits machines that are not here: compiled for a TPU slice, or estimated for GPUs."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from maxtext_like.api.arguments import words
from maxtext_like.api.configuration import load_config
from maxtext_like.errors import UserError
from maxtext_like.training.topologies import GIB, GPU_NAMES, TOPOLOGIES, GpuHost, find_gpus, find_topology

if TYPE_CHECKING:
  from maxtext_like.api.configuration import Configuration
  from maxtext_like.config.schema import Config
  from maxtext_like.training.ahead_of_time import CompiledStep
  from maxtext_like.training.memory import Limit, MemoryEstimate
  from maxtext_like.training.program import TrainProgram


@dataclass(frozen=True)
class Compiled:
  """What libtpu says of a train step. As text: the table, in GiB (2**30 bytes) or MiB of one chip.

  Attributes:
    config: of it.
    step: memory, collectives, seconds.
    flags: the group of XLA flags that it was compiled with.
  """

  config: "Config"
  step: "CompiledStep"
  flags: str

  @property
  def fits(self) -> bool:
    """Whether a chip has the memory."""
    return self.step.fits

  def __str__(self) -> str:
    from maxtext_like.sharding.mesh import in_words
    from maxtext_like.training.ahead_of_time import version

    step = self.step
    hbm = step.topology.hbm_bytes
    chips = "1 chip" if step.topology.chips == 1 else f"{step.topology.chips} chips"
    mesh = in_words(step.mesh)
    rows = [
      *_run_rows(self.config, step.parameters, "chip"),
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
    packages = f"jax {version('jax')}, libtpu {version('libtpu')}, XLA flags {self.flags}"
    rows.append(("compiled", f"in {step.seconds:.0f} s with {packages}"))
    if step.out_of_memory:
      rows.append(("compiler", step.out_of_memory))
    rows.append(("verdict", "fits" if step.fits else f"does not fit: {_remedy(step)}"))
    return _rows(rows)


@dataclass(frozen=True)
class Estimated:
  """What a train step needs of each GPU, from shapes and shardings. As text: the table, in GB (1e9 bytes).

  Attributes:
    host: the GPUs.
    program: that nothing compiled.
    need: the estimate that a run makes before it allocates anything.
    limit: what there is.
  """

  host: GpuHost
  program: "TrainProgram"
  need: "MemoryEstimate"
  limit: "Limit"

  @property
  def fits(self) -> bool:
    """Whether the estimate is within the limit."""
    return self.need.total <= self.limit.bytes

  def __str__(self) -> str:
    import jax

    from maxtext_like.layers.param import count
    from maxtext_like.sharding.mesh import in_words
    from maxtext_like.training import memory

    program, host = self.program, self.host
    mesh = in_words(program.model.mesh.shape)
    rows = [
      *_run_rows(program.config, count(jax.tree.leaves(program.abstract_state["params"])), "GPU"),
      ("topology", f"{host.name} ({host.card}), {host.gpus} of one host, mesh {mesh}"),
      *(("attention", str(use)) for use in program.model.kernels),
      ("by estimate", "no GPU is here, and nothing was compiled: these are the arrays that follow from shapes and shardings,"),
      ("", "as train counts them before it allocates; of each GPU:"),
    ]
    tail = [("not counted", "what XLA, cuDNN and NCCL work in, and weights that are gathered for a layer: the device tells")]
    share = f"{self.need.total / self.limit.bytes:.0%} of what there is"
    tail.append(("verdict", f"fits by estimate, with {share}" if self.fits else f"does not fit: {share}"))
    parts = [_rows(rows), memory.table(self.need, self.limit), _rows(tail)]
    return "\n".join(parts if self.fits else [*parts, memory.remedies(program, self.need, self.limit)])


def compile_step(
  config: "Configuration", *overrides: str, topology: str, xla_flags: str | None = None, **keys: Any
) -> Compiled | Estimated:
  """Compiles the train step for a TPU slice with libtpu, on any Linux machine; for GPUs it estimates. Nothing runs.

  Only a GPU's own libraries can compile its programs, so there the arrays are counted, as a run counts them at its start.

  Args:
    config: a name, a path, or what ``load_config`` returned.
    overrides: words laid over it.
    topology: a slice, as "v6e-32", or the GPUs of a host, as "h200-8".
    xla_flags: of TPUs: "base" (None), or "all", with those that put collectives behind computation.
    keys: values laid over it.

  Raises:
    UserError: no such topology, a mesh that does not fit it, no libtpu.
  """
  given = words(overrides, keys, compile_step)
  host = find_gpus(topology)
  if host is not None and xla_flags is not None:
    raise UserError(f"compile: xla_flags={xla_flags} is for TPUs, {host.name} is not\n  fix: leave it out")
  target = host or find_topology(topology, GPU_NAMES)
  c = load_config(config, *given).config
  if isinstance(target, GpuHost):
    from maxtext_like.training import memory

    return Estimated(target, *memory.for_gpus(c, target))
  from maxtext_like.training import ahead_of_time

  group = xla_flags or "base"
  return Compiled(c, ahead_of_time.compile_step(c, target, ahead_of_time.xla_flags(group)), group)


def _run_rows(c: "Config", parameters: int, device: str) -> list[tuple[str, str]]:
  """What is looked at: model and training, the batch as that of a device, which is called ``device``."""
  t = c.training
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


def _rows(rows: list[tuple[str, str]]) -> str:
  return "\n".join(f"  {name:<12} {value}" for name, value in rows)
