"""Compiles the train step for a TPU slice that is not available: libtpu compiles on any x86 machine and reports the memory.

Nothing runs and no array is allocated, so a step of a 31B model compiles on a laptop. Generating machine code is nine tenths of
the compiler's work, and most of that is optimization. Therefore, unless complete compilation is requested, the compiler is
stopped after it has laid out memory. Compiling the same step with little optimization then shows whether the compilation
succeeds.
"""

import importlib.metadata
import importlib.util
import math
import os
import pickle
import re
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from packaging.requirements import Requirement

from maxtext_like.capacity import memory_layout
from maxtext_like.capacity.array_bytes import by_place
from maxtext_like.capacity.chips import find_chip
from maxtext_like.capacity.compiled_program import CompiledProgram, Transfer
from maxtext_like.capacity.memory_layout import MemoryLayout
from maxtext_like.capacity.topologies import GIB, Topology
from maxtext_like.config.files import configs_folder
from maxtext_like.config.parallelism import MeshConfig
from maxtext_like.config.schema import Config
from maxtext_like.errors import UserError
from maxtext_like.extras import install

FLAG_GROUPS = {"base": ("base",), "all": ("base", "overlap")}
"""Values of ``xla_flags=``: groups of ``tpu/xla_flags.yml``."""


MachineCode = bool | Literal["quick"]
"""Whether to generate machine code. "quick": lay out the memory of the run's program, and compile the same step with little
optimization."""


@dataclass(frozen=True, kw_only=True)
class Work:
  """The work of a step on one chip, and the shortest time for it.

  Attributes:
    flops: FLOPs of matrix products, with loops counted by iteration, recomputation included.
    model_flops: FLOPs of the model without recomputation (``flops.train_flops``), for a chip's share of the batch.
    memory_bytes: bytes through main memory.
    transfers: the collectives.
    roofline: bounds of the time; None if the device is not in the table.
  """

  flops: float
  model_flops: float
  memory_bytes: int
  transfers: tuple[Transfer, ...]
  roofline: Any


@dataclass(frozen=True, kw_only=True)
class CompiledStep:
  """The compiler's report on a train step. Bytes are per chip.

  Attributes:
    topology: the slices.
    mesh: size of each mesh axis.
    parameters: number of parameters, buffers included.
    argument_bytes: the state and the batch, from their shardings.
    peak_bytes: the most that is in use at once, as libtpu counts it, or the laid-out bytes if it was stopped then. With
      ``out_of_memory`` the bytes that the compiler names, which may be incomplete. None if it was not compiled because the
      arguments alone do not fit.
    layout: how memory is laid out; None if it is not.
    work: the work of a step; None without a program.
    seconds: time of tracing and compiling.
    machine_code: True if the compilation was complete; otherwise the compiler was stopped after laying out memory.
    quick_peak: with "quick", the ``peak_bytes`` of the program with little optimization; None if it was not compiled.
    quick_words: the compiler's message if that program does not fit; otherwise "".
    kernels: the kernels of the attention layers.
    out_of_memory: the compiler's message; "" if it compiled.
    hlo: the text of the compiled program, if there is one.
    weights: the declared dtype of every parameter by the name of its argument.
  """

  topology: Topology
  mesh: dict[str, int]
  parameters: int
  argument_bytes: int
  peak_bytes: int | None
  layout: MemoryLayout | None = None
  work: Work | None = None
  seconds: float
  machine_code: MachineCode = True
  quick_peak: int | None = None
  quick_words: str = ""
  kernels: tuple[Any, ...] = ()
  out_of_memory: str = ""
  hlo: str = ""
  weights: dict[str, str] = field(default_factory=dict)

  @property
  def fits(self) -> bool:
    """True if a chip has enough memory."""
    return not self.out_of_memory and self.peak_bytes is not None and self.peak_bytes <= self.topology.hbm_bytes


def compile_step(
  config: Config, topology: Topology, flags: dict[str, Any], *, machine_code: MachineCode = "quick"
) -> CompiledStep:
  """Compile the train step of a configuration for slices.

  Args:
    config: configuration of the run; its mesh is placed on the slices.
    topology: the slices.
    flags: XLA flags by name.
    machine_code: with False or "quick" the compiler runs in a separate process, which is stopped after laying out memory.

  Raises:
    UserError: libtpu is not installed, the mesh does not fit the slice, or libtpu does not know a flag.
  """
  prepare_environment()
  import jax

  from maxtext_like.training.step.program import make_program

  start = time.monotonic()
  program = make_program(config, mesh=tpu_mesh(topology, config.mesh))
  state = program.abstract_state
  arguments = _bytes_of_a_chip((by_place(state)[0], program.abstract_batch))
  leaves = jax.tree_util.tree_leaves_with_path(program.spec)
  known = {
    "topology": topology,
    "mesh": dict(program.model.mesh.shape),
    "parameters": program.size,
    "argument_bytes": arguments,
    "kernels": program.model.kernels,
    "machine_code": machine_code,
  }
  # Stop here if the arguments alone do not fit.
  if arguments > topology.hbm_bytes:
    # XLA would report the same, but only minutes later.
    reason = f"parameters, optimizer and batch alone take {arguments / GIB:.2f} GiB per chip"
    return CompiledStep(**known, peak_bytes=None, seconds=time.monotonic() - start, out_of_memory=reason)
  # Compile completely, or until memory is laid out; then read the compiler's dump.
  with tempfile.TemporaryDirectory(prefix="maxtext-like-compile-") as folder:
    where, peak, words, quick = Path(folder), None, "", (None, "")
    if machine_code is True:
      try:
        compiled = program.lower_step("tpu").compile(compiler_options=flags | {_DUMP: folder})
        peak = _peak(compiled)
      except jax.errors.JaxRuntimeError as error:
        words = str(error)
    else:
      words = _until_laid_out(config, topology, flags, where)
    if words:
      needed, line = explained(words)
      layout = memory_layout.read_dump(where)[2] if memory_layout.written(where) else None
      seconds = time.monotonic() - start
      return CompiledStep(**known, peak_bytes=needed, layout=layout, seconds=seconds, out_of_memory=line)
    text, compiled_program, layout = memory_layout.read_dump(where)
    if layout.bytes < arguments:
      raise RuntimeError(
        f"libtpu {version('libtpu')} lays out {layout.bytes:,} bytes according to its dump, but parameters, optimizer and "
        f"batch alone take {arguments:,}: the format of the dump has changed"
      )
    if machine_code == "quick":
      quick = _with_little_optimization(program, flags)
  return CompiledStep(
    **known,
    peak_bytes=layout.bytes if peak is None else peak,
    quick_peak=quick[0],
    quick_words=quick[1],
    layout=layout,
    work=_work(program, compiled_program, topology),
    seconds=time.monotonic() - start,
    hlo=text,
    weights={f"state['params']{jax.tree_util.keystr(path)}": leaf.dtype for path, leaf in leaves},
  )


_DUMP = "xla_dump_to"


def _work(program: Any, compiled: CompiledProgram, topology: Topology) -> Work:
  from maxtext_like.capacity.flops import train_flops
  from maxtext_like.capacity.roofline import kernel_flops, roofline
  from maxtext_like.capacity.traffic import Traffic
  from maxtext_like.layers.moe.expert_parallel import SLACK

  chip = find_chip(f"tpu {topology.generation}")
  assert chip is not None
  length = program.config.training.max_target_length
  decoder = program.model.decoder
  flops = compiled.flops(kernel_flops(decoder, SLACK if program.model.ways("expert") > 1 else 1.0))
  model_flops = train_flops(decoder, program.spec, program.selection, program.global_batch, length) / topology.chips
  moved, transfers = Traffic(compiled).step(), tuple(compiled.transfers(topology.chips_of_slice))
  bounds = roofline(
    chip, topology.chips_of_slice, flops=flops, memory_bytes=moved, transfers=transfers, model_flops=model_flops
  )
  return Work(flops=flops, model_flops=model_flops, memory_bytes=moved, transfers=transfers, roofline=bounds)


def _with_little_optimization(program: Any, flags: dict[str, Any]) -> tuple[int, str]:
  """Compile the step completely with little optimization, a sixth of the work. Return its peak and "", or, if it does not fit,
  the bytes that it needs and the compiler's message.

  Raises:
    RuntimeError: it does not compile for another reason, such as a kernel that exceeds vector memory.
  """
  import jax

  before = jax.config.values["jax_optimization_level"]
  jax.config.update("jax_optimization_level", "O1")
  try:
    compiled = program.lower_step("tpu").compile(compiler_options=flags)
  except jax.errors.JaxRuntimeError as error:
    return explained(str(error))
  finally:
    jax.config.update("jax_optimization_level", before)
  return _peak(compiled), ""


def _peak(compiled: Any) -> int:
  """Return the peak in bytes of a chip. libtpu includes arguments in host memory, which are subtracted."""
  said = compiled.memory_analysis()
  return said.peak_memory_in_bytes - said.host_argument_size_in_bytes


def _until_laid_out(config: Config, topology: Topology, flags: dict[str, Any], folder: Path) -> str:
  """Compile in a separate process until memory is laid out. The compiler's dump is in the folder.

  Returns:
    The compiler's error; "" if there is none.
  """
  task, errors = folder / "task", folder / "errors"
  task.write_bytes(pickle.dumps((config, topology, flags)))
  with errors.open("wb") as sink:
    child = subprocess.Popen([sys.executable, "-m", __name__, str(folder)], stdout=sink, stderr=sink)
  try:
    while child.poll() is None and not memory_layout.written(folder):
      time.sleep(0.1)
  finally:
    child.kill()
    child.wait()
  if memory_layout.written(folder):
    return ""
  said = errors.read_text("utf-8", errors="replace").strip()
  return said or f"the compiler's process exited with code {child.returncode}"


def _main(folder: str) -> None:
  """The process of ``_until_laid_out``, which is stopped in the middle of this function."""
  prepare_environment()
  import jax

  from maxtext_like.training.step.program import make_program

  config, topology, flags = pickle.loads((Path(folder) / "task").read_bytes())
  lowered = make_program(config, mesh=tpu_mesh(topology, config.mesh)).lower_step("tpu")
  try:
    lowered.compile(compiler_options=flags | {_DUMP: folder})
  except jax.errors.JaxRuntimeError as error:
    sys.stderr.write(str(error))


def explained(message: str) -> tuple[int, str]:
  """Interpret an error of the compiler: return the bytes it would need, and the line that says so.

  Raises:
    UserError: the error is not about memory and has a known fix.
  """
  if (needed := out_of_memory_bytes(message)) is not None:
    return needed, next(line for line in message.splitlines() if out_of_memory_bytes(line) is not None)
  if (flag := re.search(r"No such compile option: '(\w+)'", message)) is not None:
    raise UserError(
      f"tpu/xla_flags.yml: libtpu {version('libtpu')} has no flag {flag[1]}\n  fix: remove the flag, or install another libtpu"
    )
  if "proto" in message and (wanted := other_libtpu_wanted()) is not None:
    raise UserError(
      f"compile: libtpu {version('libtpu')} cannot read the program of jax {version('jax')}, which needs libtpu {wanted}\n"
      f"  libtpu's message: {message.strip()[:200]}\n  fix: pip install 'libtpu{wanted}', or {install('tpu')}"
    )
  raise RuntimeError(f"libtpu: {message.strip()[-2000:]}")


def other_libtpu_wanted() -> str | None:
  """Return the libtpu versions that the installed JAX requires ("==0.0.50.*"), or None if the installed one is among them.

  Other versions often work. If a JAX program contains something that an older libtpu does not know, it fails with a parse
  error.
  """
  for line in importlib.metadata.requires("jax") or ():
    requirement = Requirement(line)
    if requirement.name == "libtpu" and not requirement.specifier.contains(version("libtpu")):
      return str(requirement.specifier)
  return None


def prepare_environment() -> None:
  """Let libtpu compile without a TPU, at the same time as other processes, and without network access.

  Call it before JAX initializes a backend: JAX then runs on the CPU, and does not occupy a TPU of this machine.

  Raises:
    UserError: libtpu is not installed.
  """
  if importlib.util.find_spec("libtpu") is None:
    raise UserError(
      f"compile: libtpu is not installed; it is the compiler for TPUs (no TPU is needed)\n  fix: {install('tpu')}"
    )
  os.environ["JAX_PLATFORMS"] = "cpu"
  os.environ["TPU_SKIP_MDS_QUERY"] = "1"  # this machine has no metadata server
  os.environ["ALLOW_MULTIPLE_LIBTPU_LOAD"] = "1"  # otherwise libtpu's lock file blocks a second process
  # Values that the metadata server would return. libtpu warns if they are missing; the topology is used in any case.
  os.environ.setdefault("TPU_ACCELERATOR_TYPE", "v6e-8")
  os.environ.setdefault("TPU_WORKER_HOSTNAMES", "localhost")
  os.environ.setdefault("TPU_WORKER_ID", "0")


def tpu_mesh(topology: Topology, config: MeshConfig) -> Any:
  """Return the mesh of a configuration on the chips of slices. Neighbors in the mesh are neighbors in the torus.

  Raises:
    UserError: the axes do not multiply to the number of chips.
  """
  from jax.experimental import topologies

  from maxtext_like.sharding.mesh import make_mesh

  more: dict[str, Any] = {"chips_per_host_bounds": (1, 1, 1)} if topology.chips_of_slice == 1 else {}
  if topology.slices > 1:
    more["num_slices"] = topology.slices
  description = topologies.get_topology_desc(platform="tpu", topology_name=topology.libtpu_name, **more)
  try:
    return make_mesh(config, description.devices)
  except UserError as error:
    raise UserError(f"topology={topology.name} num_slices={topology.slices}: {error}") from error


def xla_flags(group: str = "base") -> dict[str, Any]:
  """Return the flags of ``tpu/xla_flags.yml``: "base", or "all", which includes those that overlap collectives with
  computation.

  Raises:
    UserError: unknown group.
  """
  import yaml

  if group not in FLAG_GROUPS:
    raise UserError(f"xla_flags={group}: unknown group of flags\n  fix: pass one of {', '.join(FLAG_GROUPS)}")
  groups = yaml.safe_load(_flags_file().read_text("utf-8"))
  # The compiler takes a Python bool, and a number as text that it parses itself.
  return {
    name: value if isinstance(value, bool) else str(value)
    for part in FLAG_GROUPS[group]
    for name, value in groups[part].items()
  }


def _flags_file() -> Path:
  """Return the file in ``tpu/`` of a checkout, or the copy in a wheel's configurations."""
  places = (configs_folder().parent / "tpu" / "xla_flags.yml", configs_folder() / "tpu" / "xla_flags.yml")
  for path in places:
    if path.is_file():
      return path
  raise UserError(f"{places[0]}: missing\n  fix: reinstall maxtext-like")


def version(package: str) -> str:
  """Return the installed version of a package."""
  return importlib.metadata.version(package)


_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}
_OUT_OF_MEMORY = (
  # Ran out of memory in memory space hbm. Used 86.10G of 31.25G hbm.
  re.compile(r"Used ([\d.]+)([KMGT]?) of [\d.]+[KMGT]? hbm"),
  # Ran out of memory on HBM, the total memory required for HLO temporaries (34.07G) exceeds available HBM (31.25G).
  re.compile(r"on HBM, the total memory required for [\w ]+ \(([\d.]+)([KMGT]?)\)"),
)


def out_of_memory_bytes(message: str) -> int | None:
  """Return the bytes of HBM that XLA would need according to its message; None for any other error (such as vector memory,
  which is the fault of a kernel)."""
  for pattern in _OUT_OF_MEMORY:
    if found := pattern.search(message):
      return int(float(found[1]) * _UNITS[found[2]])
  return None


def _bytes_of_a_chip(tree: Any) -> int:
  import jax

  return sum(math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize for x in jax.tree.leaves(tree))


if __name__ == "__main__":
  _main(sys.argv[1])
