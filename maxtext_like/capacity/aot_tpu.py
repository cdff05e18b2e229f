"""The train step compiled for a TPU slice that is not there: libtpu compiles on any x86 machine, and tells the memory.

Nothing runs and no array is made, so a step of a 31B model compiles on a laptop. Machine code is nine tenths of the compiler's
work, and of that nearly all is its optimisation. So unless all of it is asked for, the compiler is stopped once it has laid out
memory, and what it makes of the same step with little optimisation says whether it comes to an end.
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

FLAG_GROUPS = {"base": ("base",), "all": ("base", "overlap")}
"""What ``xla_flags=`` means: groups of ``tpu/xla_flags.yml``."""


MachineCode = bool | Literal["quick"]
"""Whether machine code is made; "quick": of the same step with little optimisation, beside the program that a run has."""


@dataclass(frozen=True, kw_only=True)
class Work:
  """What a step makes a chip do, and in which time it can.

  Attributes:
    flops: of matrix products, loops counted as often as they turn, recomputation too.
    model_flops: the model's alone (``flops.train_flops``), on a chip's share of the batch.
    memory_bytes: through main memory.
    transfers: the collectives.
    roofline: bounds of the time; None: of a device that is in no table.
  """

  flops: float
  model_flops: float
  memory_bytes: int
  transfers: tuple[Transfer, ...]
  roofline: Any


@dataclass(frozen=True, kw_only=True)
class CompiledStep:
  """What the compiler says about a train step. Bytes are those of one chip.

  Attributes:
    topology: the slices.
    mesh: size of each mesh axis.
    parameters: number of them, buffers included.
    argument_bytes: the state and the batch, from their shardings.
    peak_bytes: the most that is in use at once, as libtpu counts it, or what it has laid out where it was stopped then; with
      ``out_of_memory`` what the compiler names, which may be less than all; None where it was not compiled because the
      arguments alone do not fit.
    layout: how memory is laid out; None where it is not.
    work: what a step does; None without a program.
    seconds: of tracing and compiling.
    machine_code: True: all was compiled; else the compiler was stopped once memory was laid out.
    quick_peak: with "quick" what ``peak_bytes`` is of all of a program with little optimisation; None: it was not compiled.
    quick_words: the compiler's, where that program does not fit; empty where it does.
    kernels: what the attention layers run on.
    out_of_memory: the compiler's words; empty when it compiled.
    hlo: the compiled program's text, where there is one.
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
    """Whether a chip has the memory."""
    return not self.out_of_memory and self.peak_bytes is not None and self.peak_bytes <= self.topology.hbm_bytes


def compile_step(
  config: Config, topology: Topology, flags: dict[str, Any], *, machine_code: MachineCode = "quick"
) -> CompiledStep:
  """Compiles the train step of a configuration for slices.

  Args:
    config: of the run; its mesh is laid over the slices.
    topology: the slices.
    flags: XLA flags by name.
    machine_code: False or "quick": the compiler, in a process of its own, is stopped once memory is laid out.

  Raises:
    UserError: no libtpu, a mesh that does not fit the slice, a flag that libtpu does not know.
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
  if arguments > topology.hbm_bytes:
    # XLA would say so too, minutes later.
    reason = f"parameters, optimizer and batch alone take {arguments / GIB:.2f} GiB of a chip"
    return CompiledStep(**known, peak_bytes=None, seconds=time.monotonic() - start, out_of_memory=reason)
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
        f"libtpu {version('libtpu')} lays out {layout.bytes:,} bytes, as its text is read here, and parameters, optimizer and "
        f"batch alone take {arguments:,}: the text means something else"
      )
    if machine_code == "quick":
      quick = _with_little_optimisation(program, flags)
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


def _with_little_optimisation(program: Any, flags: dict[str, Any]) -> tuple[int, str]:
  """The peak of the step as libtpu compiles it to the end with little optimisation, a sixth of the work; where it does not fit
  so what it would need, and the compiler's words.

  Raises:
    RuntimeError: it does not compile for another reason, as a kernel that outgrows vector memory.
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
  """Bytes of a chip; libtpu counts arguments in the host's memory too."""
  said = compiled.memory_analysis()
  return said.peak_memory_in_bytes - said.host_argument_size_in_bytes


def _until_laid_out(config: Config, topology: Topology, flags: dict[str, Any], folder: Path) -> str:
  """Compiles in a process of its own until the memory is laid out, and what is said of it lies in the folder.

  Returns:
    The compiler's error; empty where there is none.
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
  return said or f"the compiler's process ended with {child.returncode}"


def _main(folder: str) -> None:
  """The process of ``_until_laid_out``, which is stopped in the middle of this."""
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
  """An error of the compiler: the bytes it would need, and its line.

  Raises:
    UserError: it is no lack of memory.
  """
  if (needed := out_of_memory_bytes(message)) is not None:
    return needed, next(line for line in message.splitlines() if out_of_memory_bytes(line) is not None)
  if (flag := re.search(r"No such compile option: '(\w+)'", message)) is not None:
    raise UserError(
      f"tpu/xla_flags.yml: libtpu {version('libtpu')} has no flag {flag[1]}\n  fix: take it out, or change libtpu"
    )
  if "proto" in message and (wanted := other_libtpu_wanted()) is not None:
    raise UserError(
      f"compile: libtpu {version('libtpu')} cannot read the program of jax {version('jax')}, which is made for {wanted}\n"
      f"  it says: {message.strip()[:200]}\n  fix: pip install 'libtpu{wanted}', or pip install -e '.[tpu]'"
    )
  raise RuntimeError(f"libtpu: {message.strip()[-2000:]}")


def other_libtpu_wanted() -> str | None:
  """The versions of libtpu that the installed JAX asks for ("==0.0.50.*"), None when the installed one is among them.

  Others often work; when a program of JAX says something that an older libtpu does not know, it fails with a parse error.
  """
  for line in importlib.metadata.requires("jax") or ():
    requirement = Requirement(line)
    if requirement.name == "libtpu" and not requirement.specifier.contains(version("libtpu")):
      return str(requirement.specifier)
  return None


def prepare_environment() -> None:
  """Lets libtpu compile where there is no TPU, beside other processes that do so, and without asking the network.

  Has to come before JAX starts a backend: JAX then works on the CPU, and does not take hold of a TPU that is there.

  Raises:
    UserError: libtpu is not installed.
  """
  if importlib.util.find_spec("libtpu") is None:
    raise UserError(
      "compile: libtpu is not installed, and it is the TPU's compiler (no TPU is needed)\n  fix: pip install -e '.[tpu]'"
    )
  os.environ["JAX_PLATFORMS"] = "cpu"
  os.environ["TPU_SKIP_MDS_QUERY"] = "1"  # there is no metadata server to ask about this machine
  os.environ["ALLOW_MULTIPLE_LIBTPU_LOAD"] = "1"  # else libtpu's lock file keeps a second process out
  # What the metadata server would have said. libtpu complains when it is missing; the topology decides all the same.
  os.environ.setdefault("TPU_ACCELERATOR_TYPE", "v6e-8")
  os.environ.setdefault("TPU_WORKER_HOSTNAMES", "localhost")
  os.environ.setdefault("TPU_WORKER_ID", "0")


def tpu_mesh(topology: Topology, config: MeshConfig) -> Any:
  """The mesh of a configuration over the chips of slices, neighbours in the mesh being neighbours in the torus.

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
  """The flags of ``tpu/xla_flags.yml``: "base", or "all" with those that put collectives behind computation.

  Raises:
    UserError: unknown group.
  """
  import yaml

  if group not in FLAG_GROUPS:
    raise UserError(f"xla_flags={group}: unknown\n  fix: one of {', '.join(FLAG_GROUPS)}")
  groups = yaml.safe_load(_flags_file().read_text("utf-8"))
  # A bool goes to the compiler as Python's, a number as the text that it parses itself.
  return {
    name: value if isinstance(value, bool) else str(value)
    for part in FLAG_GROUPS[group]
    for name, value in groups[part].items()
  }


def _flags_file() -> Path:
  """``tpu/`` of a checkout; a wheel carries the file with the configurations."""
  places = (configs_folder().parent / "tpu" / "xla_flags.yml", configs_folder() / "tpu" / "xla_flags.yml")
  for path in places:
    if path.is_file():
      return path
  raise UserError(f"{places[0]}: missing; install maxtext-like again")


def version(package: str) -> str:
  """The installed version of a package."""
  return importlib.metadata.version(package)


_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}
_OUT_OF_MEMORY = (
  # Ran out of memory in memory space hbm. Used 86.10G of 31.25G hbm.
  re.compile(r"Used ([\d.]+)([KMGT]?) of [\d.]+[KMGT]? hbm"),
  # Ran out of memory on HBM, the total memory required for HLO temporaries (34.07G) exceeds available HBM (31.25G).
  re.compile(r"on HBM, the total memory required for [\w ]+ \(([\d.]+)([KMGT]?)\)"),
)


def out_of_memory_bytes(message: str) -> int | None:
  """Bytes of HBM that XLA says it would need; None for any other error (vector memory, say, which is a kernel's fault)."""
  for pattern in _OUT_OF_MEMORY:
    if found := pattern.search(message):
      return int(float(found[1]) * _UNITS[found[2]])
  return None


def _bytes_of_a_chip(tree: Any) -> int:
  import jax

  return sum(math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize for x in jax.tree.leaves(tree))


if __name__ == "__main__":
  _main(sys.argv[1])
