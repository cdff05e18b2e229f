"""``compile_step``: compiles a train step for TPUs or GPUs, which this machine need not have, and reports whether it fits."""

from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

from maxtext_like.api.arguments import words
from maxtext_like.api.config import load_config
from maxtext_like.capacity.chips import GIB
from maxtext_like.capacity.topologies import TOPOLOGIES, GpuHost, Topology, find_machine
from maxtext_like.errors import UserError

if TYPE_CHECKING:
  from maxtext_like.analysis.audit_keys import KeyVerdict
  from maxtext_like.api.config import Configuration
  from maxtext_like.capacity.aot_gpu import CompiledForGpus
  from maxtext_like.capacity.aot_tpu import CompiledStep, MachineCode, Work
  from maxtext_like.capacity.memory import MemoryEstimate
  from maxtext_like.capacity.memory_layout import MemoryLayout
  from maxtext_like.capacity.memory_limits import Limit
  from maxtext_like.config.schema import Config
  from maxtext_like.training.step.program import TrainProgram


@dataclass(frozen=True)
class Change:
  """Other settings that were tried. As text: the settings and the result.

  Attributes:
    values: ``key=value`` words.
    step: result of the compiler with these settings.
  """

  values: tuple[str, ...]
  step: "CompiledStep"

  def __str__(self) -> str:
    size = "" if self.step.peak_bytes is None else f", {size_words(self.step.peak_bytes)} per chip"
    return f"{' '.join(self.values)}: {'fits' if self.step.fits else 'does not fit'}{size}"


@dataclass(frozen=True)
class Compiled:
  """A train step compiled by libtpu. As text: a table, in GiB (2**30 bytes) or MiB per chip.

  Attributes:
    config: configuration of the step.
    step: memory, work and compilation time.
    flags: name of the group of XLA flags.
    tried: if the step does not fit, other settings that were compiled until memory was assigned; the last one may fit.
    keys: verdicts on the precision keys; empty without a compiled program, or if layers differ in precision.
  """

  config: "Config"
  step: "CompiledStep"
  flags: str
  tried: tuple[Change, ...] = ()
  keys: "tuple[KeyVerdict, ...]" = ()

  @property
  def fits(self) -> bool:
    """True if the step fits the memory of a chip."""
    return self.step.fits

  def __str__(self) -> str:
    from maxtext_like.capacity.aot_tpu import version
    from maxtext_like.sharding.mesh import in_words

    step = self.step
    hbm, t = step.topology.hbm_bytes, step.topology
    chips = "1 chip" if t.chips == 1 else f"{t.chips} chips" + (f" in {t.slices} slices" if t.slices > 1 else "")
    rows = [
      *run_rows(self.config, step.parameters, "chip"),
      ("topology", f"{t.name} ({t.libtpu_name}), {chips}, mesh {in_words(step.mesh)}"),
      *(("attention", str(use)) for use in step.kernels),
      ("arguments", f"{size_words(step.argument_bytes)} per chip (parameters, optimizer, batch)"),
    ]
    if step.layout is not None:
      rows += [*_memory_rows(step.layout), *host_rows(step.layout.host, "chip")]
    if step.peak_bytes is not None:
      share = f"{step.peak_bytes / hbm:.0%}"
      name = "needed" if step.out_of_memory else "peak" if step.machine_code is True else "laid out"
      rows.append((name, f"{size_words(step.peak_bytes)} of {size_words(hbm)} HBM per chip ({share})"))
    if step.quick_peak is not None:
      what = (
        f"needed where libtpu optimizes little: {step.quick_words}" if step.quick_words else "where libtpu optimizes little"
      )
      rows.append(("peak", f"{size_words(step.quick_peak)}, {what}"))
    if step.work is not None:
      rows += work_rows(step.work, "chip", UNITS["TPU"])
    if self.keys:
      rows.append(("audit", audit_summary(self.keys)))
    packages = f"jax {version('jax')}, libtpu {version('libtpu')}, XLA flags {self.flags}"
    until = "" if step.machine_code is True or step.layout is None else ", stopped before machine code"
    until += "; machine code made with little optimization" if step.quick_peak is not None and not step.quick_words else ""
    rows.append(("compiled", f"in {step.seconds:.0f} s with {packages}{until}"))
    if step.out_of_memory:
      rows.append(("compiler", step.out_of_memory))
    rows += [("tried" if i == 0 else "", str(change)) for i, change in enumerate(self.tried)]
    rows.append(("verdict", "fits" if step.fits else f"does not fit: {self._remedy()}"))
    return columns(rows)

  def _remedy(self) -> str:
    if self.tried and self.tried[-1].step.fits:
      return f"it fits with {' '.join(self.tried[-1].values)}"
    return "nor do the settings tried; use more chips, opt_type=adafactor, or a smaller max_target_length"

  def to_json(self) -> dict[str, Any]:
    """Return everything as JSON data."""
    from maxtext_like.capacity.aot_tpu import version

    step, t = self.step, self.step.topology
    work = None
    if step.work is not None:
      work = asdict(step.work) | {"transfers": [asdict(x) for x in step.work.transfers]}
    return {
      "model": self.config.model.model_name,
      "topology": {"name": t.name, "chips": t.chips, "slices": t.slices, "hbm_bytes": t.hbm_bytes},
      "mesh": step.mesh,
      "parameters": step.parameters,
      "kernels": [use.to_json() for use in step.kernels],
      "argument_bytes": step.argument_bytes,
      "peak_bytes": step.peak_bytes,
      "layout": None if step.layout is None else asdict(step.layout),
      "work": work,
      "audit": [asdict(key) for key in self.keys],
      "seconds": step.seconds,
      "machine_code": step.machine_code,
      "quick_peak_bytes": step.quick_peak,
      "packages": {name: version(name) for name in ("jax", "libtpu")},
      "xla_flags": self.flags,
      "out_of_memory": step.out_of_memory,
      "tried": [{"values": list(c.values), "fits": c.step.fits, "peak_bytes": c.step.peak_bytes} for c in self.tried],
      "fits": step.fits,
    }


def _memory_rows(layout: "MemoryLayout") -> list[tuple[str, str]]:
  parts = ", ".join(f"{name} {size_words(size)}" for name, size in layout.classes.items() if size >= 1 << 20)
  rows = [("memory", f"{size_words(layout.bytes)} laid out, at the fullest instant: {parts}")]
  for i, held in enumerate(layout.largest):
    words = " ".join(filter(None, (held.place, held.path.removeprefix("jit(<unnamed function>)/"))))
    several = f"{held.count} x " if held.count > 1 else ""
    rows.append(("largest" if i == 0 else "", f"{several}{size_words(held.bytes)} {held.type}, {held.kind}: {words}"))
  return rows


def host_rows(size: int, device: str) -> list[tuple[str, str]]:
  """Return a row about host memory per device, named ``device``; no row if none is used."""
  return [("host", f"{size_words(size)} per {device} in host memory")] if size else []


# Printed names of the terms of a ``Roofline``, for TPUs and for GPUs by their links. Other names are printed unchanged.
_EVERYWHERE = {"HBM": "memory bandwidth", "host": "copies to and from the host", "exposed transfers": "exposed communication"}
UNITS = {"TPU": _EVERYWHERE, "NVLink": _EVERYWHERE | {"ICI": "NVLink"}, "PCIe": _EVERYWHERE | {"ICI": "PCIe"}}


def work_rows(work: "Work", device: str, units: dict[str, str]) -> list[tuple[str, str]]:
  """Return rows about matrix products, transfers and, if the device's speed is known, bounds of the time.

  Args:
    work: products, transfers and bounds of one device.
    device: the device in words, such as "chip" or "GPU".
    units: one of ``UNITS``.
  """
  from maxtext_like.capacity.compiled_program import HOST_COPIES

  bounds = work.roofline
  share = work.flops / work.model_flops
  rows = [
    (
      "products",
      f"{work.flops / 1e12:,.4g} TFLOP per {device} and step, {share:.2f} times the model's {work.model_flops / 1e12:,.4g}",
    ),
  ]
  for name, copies in (("collectives", False), ("copies", True)):
    found = [t for t in work.transfers if (t.kind in HOST_COPIES) is copies]
    for i, t in enumerate(found):
      way = ("overlapped with computation" if t.asynchronous else "exposed") + (", between slices" if t.between_slices else "")
      said = f"{t.kind}: {t.times} per step, {t.bytes / 1e9:,.4g} GB {'of' if copies else 'through'} each {device}, {way}"
      rows.append((name if i == 0 else "", said))
    if not found and not copies:
      rows.append((name, "none"))
  if bounds is None:
    return rows
  times = ", ".join(f"{units.get(name, name)} {seconds:.3f} s" for name, seconds in bounds.bounds.items() if seconds)
  rows.append(("at least", f"{bounds.step:.3f} s per step: {times}, exposed communication {bounds.waiting:.3f} s"))
  peak = " of the bfloat16 peak" if bounds.float8 else ""
  rows.append(
    ("at most", f"{bounds.mfu:.1%} MFU{peak}; limited by {units.get(bounds.binds, bounds.binds)}; not measured on hardware")
  )
  return rows


def audit_summary(keys: "tuple[KeyVerdict, ...]") -> str:
  """Return the verdicts in one line."""
  by: dict[str, list[str]] = {}
  for key in keys:
    by.setdefault(key.verdict, []).append(key.key)
  names = lambda verdict: "" if verdict == "honored" else f" ({', '.join(by[verdict])})"
  return ", ".join(f"{len(found)} keys {verdict}{names(verdict)}" for verdict, found in by.items())


@dataclass(frozen=True)
class OnGpus:
  """Memory of a train step on each GPU, estimated from shapes and, if possible, compiled. As text: a table, in GB (1e9 bytes).

  Attributes:
    host: the GPUs.
    program: program of the step.
    need: estimate that a run makes before it allocates anything.
    limit: memory of a GPU.
    compiled: result of XLA; None if the step was not compiled.
    why_not: reason why it was not compiled.
  """

  host: GpuHost
  program: "TrainProgram"
  need: "MemoryEstimate"
  limit: "Limit"
  compiled: "CompiledForGpus | None" = None
  why_not: str = ""

  @property
  def bytes(self) -> int:
    """The larger of the estimate, which a run checks at its start, and the compiled size."""
    return max(self.need.total, 0 if self.compiled is None else self.compiled.total)

  @property
  def fits(self) -> bool:
    """True if ``bytes`` is within the limit."""
    return self.bytes <= self.limit.bytes

  def to_json(self) -> dict[str, Any]:
    """Return everything as JSON data."""
    c, need = self.program.config, asdict(self.need)
    return {
      "model": c.model.model_name,
      "topology": {"name": self.host.name, "gpus": self.host.gpus, "card": self.host.card},
      "mesh": dict(self.program.model.mesh.shape),
      "kernels": [use.to_json() for use in self.program.model.kernels],
      "estimate": need | {"total": self.need.total},
      "compiled": None if self.compiled is None else asdict(self.compiled) | {"total": self.compiled.total},
      "limit": asdict(self.limit),
      "fits": self.fits,
    }

  def __str__(self) -> str:
    import jax

    from maxtext_like.capacity import memory
    from maxtext_like.layers.param import count
    from maxtext_like.sharding.mesh import in_words

    program, host = self.program, self.host
    mesh = in_words(program.model.mesh.shape)
    rows = [
      *run_rows(program.config, count(jax.tree.leaves(program.abstract_state["params"])), "GPU"),
      ("topology", f"{host.name} ({host.card}), {host.gpus} of one host, mesh {mesh}"),
      *(("attention", str(use)) for use in program.model.kernels),
      (
        "by estimate",
        "arrays by shapes and shardings, as train estimates them at its start; per GPU:",
      ),
    ]
    share = f"{self.bytes / self.limit.bytes:.0%} of the memory"
    if (x := self.compiled) is None:
      by = " by estimate"
      tail = [
        ("not compiled", self.why_not),
        ("not counted", "workspaces of XLA, cuDNN and NCCL, and a gathered output head; only the device shows them"),
      ]
    else:
      from maxtext_like.capacity.aot_gpu import installed

      by = ""
      sizes = f"{x.argument_bytes / memory.GB:.2f} GB of state and batch, {x.output_bytes / memory.GB:.2f} of other outputs"
      tail = [
        ("as compiled", f"{x.total / memory.GB:.2f} GB: {sizes}, {x.temporary_bytes / memory.GB:.2f} of temporaries"),
        *([("host", f"{x.host_bytes / memory.GB:.2f} GB of host memory in addition")] if x.host_bytes else []),
        ("compiled", f"in {x.seconds:.0f} s with {installed()}"),
        ("not counted", "workspaces of matrix kernels and cuDNN plans, which the device chooses by autotuning, and of NCCL"),
      ]
    tail.append(("verdict", f"fits{by}, with {share}" if self.fits else f"does not fit{by}: {share}"))
    parts = [columns(rows), memory.table(self.need, self.limit), columns(tail)]
    return "\n".join(parts if self.fits else [*parts, memory.remedies(program, self.need, self.limit)])


def compile_step(
  config: "Configuration",
  *overrides: str,
  topology: str | None = None,
  memory: str | None = None,
  num_slices: int = 1,
  xla_flags: str | None = None,
  machine_code: "MachineCode" = "quick",
  **keys: Any,
) -> Compiled | OnGpus:
  """Compile the train step for TPU slices with libtpu or for GPUs with JAX's CUDA libraries, on any Linux machine.

  Without CUDA libraries the memory of GPUs is estimated, as a run does at its start. If the step does not fit a TPU, other
  settings are tried one after the other until one fits.

  Args:
    config: a configuration, as for ``load_config``.
    overrides: words that override the configuration.
    topology: a slice, such as "v6e-32", or the GPUs of a host, such as "h200-8", "rtx4090" or, for any other, "gpu-2".
    memory: memory of a GPU, such as "24GB", instead of the table's value; without a topology, one GPU of any kind.
    num_slices: TPU: number of slices, connected by the data-center network.
    xla_flags: TPU: "base" (None), or "all", which adds the flags that overlap collectives with computation.
    machine_code: False: stop the TPU compiler when memory is assigned, after a tenth of the work; the compiler's own peak
      memory and errors in kernels are then unknown. "quick": then also compile to the end with little optimization, to find
      those. True: compile to the end as a run does. For GPUs, False compiles nothing.
    keys: the same as Python values.

  Raises:
    UserError: the topology is unknown, the mesh does not fit it, or libtpu is not installed.
  """
  given = words(overrides, keys, compile_step)
  target = find_machine(topology, memory)
  if isinstance(target, GpuHost) and (xla_flags is not None or num_slices != 1):
    what = f"xla_flags={xla_flags}" if xla_flags is not None else f"num_slices={num_slices}"
    raise UserError(f"compile: {what} is only for TPUs, and {target.name} is not a TPU\n  fix: remove it")
  if not isinstance(machine_code, bool) and machine_code != "quick":
    raise UserError(f"compile: machine_code={machine_code!r} is not one of its values\n  fix: pass True, False or 'quick'")
  if num_slices < 1:
    raise UserError(f"compile: num_slices={num_slices} is less than 1\n  fix: set num_slices=1 or more")
  c = load_config(config, *given).config
  if isinstance(target, GpuHost):
    return _on_gpus(c, target, machine_code)
  assert isinstance(target, Topology), "find_machine without CPUs"
  from maxtext_like.capacity import aot_tpu

  target = replace(target, slices=num_slices)
  group = xla_flags or "base"
  flags = aot_tpu.xla_flags(group)
  step = aot_tpu.compile_step(c, target, flags, machine_code=machine_code)
  tried = () if step.fits else tuple(_changes(c, target, flags))
  return Compiled(c, step, group, tried, _verdicts(c, step))


def _on_gpus(c: "Config", host: GpuHost, compiled: "MachineCode") -> OnGpus:
  from maxtext_like.capacity import aot_gpu, memory

  counted = memory.for_gpus(c, host)
  if not compiled:
    return OnGpus(host, *counted, why_not="machine_code=false")
  if why := aot_gpu.why_not(c, host):
    return OnGpus(host, *counted, why_not=why)
  return OnGpus(host, *counted, aot_gpu.compile_step(c, host))


def _changes(c: "Config", topology: Topology, flags: dict[str, Any]) -> "Iterator[Change]":
  """Yield settings that make a step smaller, first those that change no result, until one fits."""
  from maxtext_like.capacity import aot_tpu
  from maxtext_like.layers.remat import offload_under
  from maxtext_like.models.build import runs_in_loops

  t = c.training
  offload = offload_under("full", t.remat_offload)
  values: dict[str, Any] = {}
  steps: list[dict[str, Any]] = []
  if t.remat_policy != "full":
    steps.append({"remat_policy": "full"} | ({} if offload == t.remat_offload else {"remat_offload": offload}))
  if t.remat_offload == "none" and runs_in_loops(c):
    steps.append({"remat_offload": "layer_inputs"})
  if t.per_device_batch_size > 1:
    parts = t.per_device_batch_size * t.gradient_accumulation_steps
    summed = {} if t.optimizer_in_backward or parts % 1 else {"gradient_accumulation_steps": int(parts)}
    steps.append({"per_device_batch_size": 1} | summed)
  for more in steps:
    values |= more
    changed = replace(c, training=replace(t, **values))
    step = aot_tpu.compile_step(changed, topology, flags, machine_code=False)
    yield Change(tuple(f"{k}={v}" for k, v in values.items()), step)
    if step.fits:
      return
  changed = replace(c, training=replace(t, **values))
  for bigger in TOPOLOGIES.values():
    if bigger.chips_of_slice <= topology.chips_of_slice or topology.slices > 1 or not _any_size(c):
      continue
    step = aot_tpu.compile_step(changed, bigger, flags, machine_code=False)
    yield Change((f"topology={bigger.name}", *(f"{k}={v}" for k, v in values.items())), step)
    if step.fits:
      return
  if c.precision.weight_dtype == "float32" and c.precision.dtype != "float16":
    narrow = replace(changed, precision=replace(c.precision, weight_dtype="bfloat16"))
    step = aot_tpu.compile_step(narrow, topology, flags, machine_code=False)
    yield Change((*(f"{k}={v}" for k, v in values.items()), "weight_dtype=bfloat16"), step)


def _any_size(c: "Config") -> bool:
  """Return True if an axis of the mesh takes all remaining chips of a slice."""
  return any(size == -1 for axis, size in vars(c.mesh).items() if axis.startswith("ici_"))


def _verdicts(c: "Config", step: "CompiledStep") -> "tuple[KeyVerdict, ...]":
  if not step.hlo or c.precision.layer_precision:
    return ()
  from maxtext_like.analysis import audit_keys
  from maxtext_like.models.build import precision_of
  from maxtext_like.numerics import hlo

  reading, precision = hlo.read_hlo(step.hlo), precision_of(c.precision)
  return tuple(audit_keys.judge_keys(reading, precision, c.model, c.vision, weights=step.weights, compiled=True))


def run_rows(c: "Config", parameters: int, device: str) -> list[tuple[str, str]]:
  """Return rows about model and training, with the batch of a device, named ``device``."""
  t = c.training
  shape = f"{t.per_device_batch_size} x {t.max_target_length} tokens per {device}"
  offload = "" if t.remat_offload == "none" else f", {t.remat_offload} on the host"
  if t.gradient_accumulation_steps > 1:
    shape += f", {t.gradient_accumulation_steps} times"
  return [
    ("model", f"{c.model.model_name}, {parameters:,} parameters, {c.precision.weight_dtype} weights"),
    ("training", f"{t.opt_type}, {c.precision.dtype}, remat {t.remat_policy}{offload}, attention {t.attention}, {shape}"),
  ]


def size_words(size: float) -> str:
  """Return a size in GiB, or in MiB if it is below 0.1 GiB."""
  return f"{size / GIB:.2f} GiB" if size >= 0.1 * GIB else f"{size / GIB * 1024:.2f} MiB"


def columns(rows: list[tuple[str, str]]) -> str:
  """Return rows as lines with two columns."""
  return "\n".join(f"  {name:<12} {value}" for name, value in rows)
