"""The train step compiled for a TPU slice that is not there: libtpu compiles on any x86 machine, and tells the memory.

Nothing runs and no array is made, so a step of a 31B model compiles on a laptop.
"""

import collections
import importlib.metadata
import importlib.util
import math
import os
import re
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement

from maxtext_like.config.files import configs_folder
from maxtext_like.config.schema import Config, MeshConfig
from maxtext_like.errors import UserError
from maxtext_like.training.topologies import GIB, Topology

COLLECTIVES = ("all-gather", "reduce-scatter", "all-reduce", "all-to-all", "collective-permute")
FLAG_GROUPS = {"base": ("base",), "all": ("base", "overlap")}
"""What ``xla_flags=`` means: groups of ``tpu/xla_flags.yml``."""


@dataclass(frozen=True, kw_only=True)
class CompiledStep:
  """What the compiler says about a train step. Bytes are those of one chip.

  Attributes:
    topology: the slice.
    mesh: size of each mesh axis.
    parameters: number of them, buffers included.
    argument_bytes: the state and the batch, from their shardings.
    peak_bytes: the most that is in use at once; with ``out_of_memory`` what the compiler names, which may be less than
      all; None where it was not compiled because the arguments alone do not fit.
    temporary_bytes: all temporaries, not all of them at once; None without a compiled program.
    collectives: instructions of the compiled program by kind, a loop's body counted once; None when libtpu cannot print
      the program (0.0.51 with jax 0.10.2, for big ones).
    seconds: of tracing and compiling.
    kernels: what the attention layers run on.
    out_of_memory: the compiler's words; empty when it compiled.
  """

  topology: Topology
  mesh: dict[str, int]
  parameters: int
  argument_bytes: int
  peak_bytes: int | None
  temporary_bytes: int | None = None
  collectives: dict[str, int] | None = field(default_factory=dict)
  seconds: float
  kernels: tuple[Any, ...] = ()
  out_of_memory: str = ""

  @property
  def fits(self) -> bool:
    """Whether a chip has the memory."""
    return not self.out_of_memory and self.peak_bytes is not None and self.peak_bytes <= self.topology.hbm_bytes


def compile_step(config: Config, topology: Topology, flags: dict[str, Any]) -> CompiledStep:
  """Compiles the train step of a configuration for a slice.

  Args:
    config: of the run; its mesh is laid over the slice.
    topology: the slice.
    flags: XLA flags by name.

  Raises:
    UserError: no libtpu, a mesh that does not fit the slice, a flag that libtpu does not know.
  """
  prepare_environment()
  import jax

  from maxtext_like.training.program import make_program

  start = time.monotonic()
  program = make_program(config, mesh=tpu_mesh(topology, config.mesh))
  state = program.abstract_state
  arguments = _bytes_of_a_chip((state, program.abstract_batch))
  sizes = [math.prod(x.shape) for x in jax.tree.leaves(state["params"])]
  known = {
    "topology": topology,
    "mesh": dict(program.model.mesh.shape),
    "parameters": sum(sizes),
    "argument_bytes": arguments,
    "kernels": program.model.kernels,
  }
  if arguments > topology.hbm_bytes:
    # XLA would say so too, minutes later.
    reason = f"parameters, optimizer and batch alone take {arguments / GIB:.2f} GiB of a chip"
    return CompiledStep(**known, peak_bytes=None, seconds=time.monotonic() - start, out_of_memory=reason)
  lowered = program.lower_step("tpu")
  try:
    compiled = lowered.compile(compiler_options=flags)
  except jax.errors.JaxRuntimeError as error:
    seconds = time.monotonic() - start
    if (needed := out_of_memory_bytes(str(error))) is not None:
      words = str(error).strip().splitlines()[0]
      return CompiledStep(**known, peak_bytes=needed, seconds=seconds, out_of_memory=words)
    if (flag := re.search(r"No such compile option: '(\w+)'", str(error))) is not None:
      raise UserError(
        f"tpu/xla_flags.yml: libtpu {version('libtpu')} has no flag {flag[1]}\n  fix: take it out, or change libtpu"
      ) from error
    if "proto" in str(error) and (wanted := other_libtpu_wanted()) is not None:
      raise UserError(
        f"compile: libtpu {version('libtpu')} cannot read the program of jax {jax.__version__}, which is made for {wanted}\n"
        f"  it says: {str(error).strip()[:200]}\n  fix: pip install 'libtpu{wanted}', or pip install -e '.[tpu]'"
      ) from error
    raise
  seconds = time.monotonic() - start
  memory = compiled.memory_analysis()
  return CompiledStep(
    **known,
    peak_bytes=memory.peak_memory_in_bytes,
    temporary_bytes=memory.temp_size_in_bytes,
    collectives=_collectives(compiled),
    seconds=seconds,
  )


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
  """The mesh of a configuration over the chips of a slice, neighbours in the mesh being neighbours in the torus.

  Raises:
    UserError: the axes do not multiply to the number of chips.
  """
  from jax.experimental import topologies

  from maxtext_like.sharding.mesh import make_mesh

  one_chip = {"chips_per_host_bounds": (1, 1, 1)} if topology.chips == 1 else {}
  description = topologies.get_topology_desc(platform="tpu", topology_name=topology.libtpu_name, **one_chip)
  try:
    return make_mesh(config, description.devices)
  except UserError as error:
    raise UserError(f"topology={topology.name}: {error}") from error


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


def count_collectives(hlo: str) -> dict[str, int]:
  """Instructions of an HLO text that move data between chips, by kind; an asynchronous pair counts once.

  On TPU a reduce-scatter is an all-reduce in a fused computation of its own, ``%all-reduce-scatter``.
  """
  instruction = re.compile(rf" ({'|'.join(COLLECTIVES)})(?:-start)?\(")
  counted: collections.Counter[str] = collections.Counter()
  scatter = False
  for line in hlo.splitlines():
    if line.startswith(("%", "ENTRY")):
      scatter = line.startswith("%all-reduce-scatter")
    for found in instruction.finditer(line):
      counted["reduce-scatter" if scatter and found[1] == "all-reduce" else found[1]] += 1
  return {name: counted[name] for name in COLLECTIVES if counted[name]}


def _collectives(compiled: Any) -> dict[str, int] | None:
  import jax

  try:
    return count_collectives(compiled.as_text())
  except jax.errors.JaxRuntimeError as error:
    if "async-update" in str(error):
      return None
    raise


def _bytes_of_a_chip(tree: Any) -> int:
  import jax

  return sum(math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize for x in jax.tree.leaves(tree))
