"""The machines that ``topology=`` names: TPU slices, GPUs of a host, CPU devices. Needs no JAX."""

import contextlib
import os
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from maxtext_like.capacity.chips import CARDS, GIB
from maxtext_like.config.problems import nearest
from maxtext_like.errors import UserError

_CUDNN = 91_000  # 9.10, as of 2025; what an assumed GPU has


@dataclass(frozen=True, kw_only=True)
class Topology:
  """A slice, or several alike that are joined by the data-center network.

  Attributes:
    name: as people order it, ``v6e-8``: generation and number of chips.
    generation: key of the chip.
    grid: chips of a slice along x and y.
    hbm_bytes: of one chip, what XLA lets a program use.
    slices: how many of them.
  """

  name: str
  generation: str
  grid: tuple[int, int]
  hbm_bytes: int
  slices: int = 1

  @property
  def chips(self) -> int:
    """Of all slices."""
    return self.chips_of_slice * self.slices

  @property
  def chips_of_slice(self) -> int:
    return self.grid[0] * self.grid[1]

  @property
  def devices(self) -> int:
    """Chips, as all machines call theirs."""
    return self.chips

  @property
  def bytes(self) -> int:
    """Of a chip, what XLA lets a program use."""
    return self.hbm_bytes

  @property
  def libtpu_name(self) -> str:
    """As ``jax.experimental.topologies`` spells it: ``v6e:2x4``."""
    return f"{self.generation}:{self.grid[0]}x{self.grid[1]}"


# Of the 32 GB of a v6e chip XLA keeps some for itself; 31.25 GiB is what its out-of-memory message calls available.
_V6E_HBM = int(31.25 * GIB)
# cloud.google.com/tpu/docs/v6e, "Supported configurations".
_V6E_GRIDS = ((1, 1), (2, 2), (2, 4), (4, 4), (4, 8), (8, 8), (8, 16), (16, 16))

TOPOLOGIES: dict[str, Topology] = {
  f"v6e-{x * y}": Topology(name=f"v6e-{x * y}", generation="v6e", grid=(x, y), hbm_bytes=_V6E_HBM) for x, y in _V6E_GRIDS
}


def find_topology(name: str, others: tuple[str, ...] = (), fix: str | None = None) -> Topology:
  """The slice of this name.

  Args:
    name: of a slice.
    others: more names, for the error.
    fix: advice of the error; None: the names of the slices.

  Raises:
    UserError: unknown, with the nearest names.
  """
  if name in TOPOLOGIES:
    return TOPOLOGIES[name]
  near = nearest(name.lower(), (*TOPOLOGIES, *others), count=3)
  meant = f", did you mean {' or '.join(near)}?" if near else ""
  raise UserError(f"topology={name}: unknown topology{meant}\n  fix: {fix or 'one of ' + ', '.join(TOPOLOGIES)}")


@dataclass(frozen=True, kw_only=True)
class GpuHost:
  """GPUs of one host.

  Attributes:
    name: as people order it, ``h200-8``: the card and how many of them.
    card: as JAX calls it.
    key: name of the card in ``CARDS``, or ``gpu`` if only its memory is known.
    capability: CUDA's compute capability, as JAX writes it.
    gpus: how many.
    card_bytes: memory of one card that CUDA gives out.
    share: of it, what JAX takes.
  """

  name: str
  card: str
  key: str
  capability: str
  gpus: int
  card_bytes: int
  share: float

  @property
  def devices(self) -> int:
    """GPUs, as all machines call theirs."""
    return self.gpus

  @property
  def bytes(self) -> int:
    """Of a card, what JAX lets a program use."""
    return int(self.card_bytes * self.share)


_SHARE, _SHARE_VARIABLE = 0.92, "XLA_PYTHON_CLIENT_MEM_FRACTION"  # as gpu/env.sh sets it; JAX's own is 0.75
MAX_GPUS = 8
GPU_NAMES = tuple(f"{card}-{gpus}" for card in CARDS for gpus in (1, 2, 4, 8))
OTHER_GPU = "gpu"
"""The name of a card that is not in the table, which ``memory=`` describes."""
_CAPABILITY_OF_OTHERS = "8.0"  # Ampere, which has bfloat16 and fused attention: no kernel that only newer cards run is assumed
# Other ways to write the names of cards, by regular expressions, applied one after the other.
_SPELLINGS = (
  (r"[ _]+", "-"),
  (r"^(?:nvidia-|tesla-|geforce-)+", ""),
  (r"^rtx-", "rtx"),
  (r"^([345]0[5-9]0)\b", r"rtx\1"),
  (r"^(?:rtx)?a6000\b", "rtxa6000"),
  (r"^(?:rtx)?6000-?ada(?:-generation)?", "rtx6000ada"),
  (r"^([ahv]\d+)-(?:sxm\d?|hbm\d)\b", r"\1"),
  (r"^(a100|h100)-80gb\b", r"\1"),
  (r"^v100-16gb\b", "v100"),
)


def find_gpus(name: str, memory: str | None = None) -> GpuHost | None:
  """The GPUs of this name, ``h200`` for one of them; None: it names none.

  Args:
    name: a card of ``CARDS``, or ``gpu`` for any other, and how many; capital letters and the usual spellings are fine.
    memory: memory of one card, as ``24GB``; None: as in the table.

  Raises:
    UserError: more GPUs than one host has; a memory that is no size, or none for an unknown card; the environment's share of
      a card's memory is none.
  """
  written = name.lower()
  for pattern, spelling in _SPELLINGS:
    written = re.sub(pattern, spelling, written)
  key, gpus = written, 1
  if key not in (*CARDS, OTHER_GPU):
    found = re.fullmatch(r"(.+)-([0-9]{1,6})", written)
    if found is None or found[1] not in (*CARDS, OTHER_GPU):
      return None
    key, gpus = found[1], int(found[2])
  if not 1 <= gpus <= MAX_GPUS:
    sized = f"{key}-{gpus}gb"
    meant = f", or topology={sized} if {gpus} GB is its memory" if find_gpus(sized) else ""
    raise UserError(
      f"topology={name}: GPUs of one host are planned and compiled for, 1 to {MAX_GPUS} of them; a run may have several hosts\n"
      f"  fix: topology={key}-8, with the rows of one host{meant}"
    )
  size = None if memory is None else memory_bytes(memory)
  card = CARDS.get(key)
  if card is None and size is None:
    raise UserError(f"topology={name}: the memory of a card that is not in the table has to be given\n  fix: add memory=24GB")
  return GpuHost(
    name=f"{key}-{gpus}",
    card=card.card if card else "GPU",
    key=key,
    capability=card.capability if card else _CAPABILITY_OF_OTHERS,
    gpus=gpus,
    card_bytes=size or (card.bytes if card else 0),
    share=_share(),
  )


_UNITS = {"kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12, "kib": 1 << 10, "mib": 1 << 20, "gib": GIB, "tib": 1 << 40}


def memory_bytes(text: str) -> int:
  """The bytes of a size, as ``24GB`` (10**9 bytes) or ``22.5GiB`` (2**30 bytes).

  Raises:
    UserError: no size, or one below 1 MB or above 100 TB.
  """
  found = re.fullmatch(r"([0-9]{1,6}(?:\.[0-9]{1,6})?) ?([kmgt]i?b)", text.strip().lower())
  size = int(float(found[1]) * _UNITS[found[2]]) if found else 0
  if not 10**6 <= size <= 10**14:
    raise UserError(f"memory={text}: not the memory of a device\n  fix: memory=24GB, or memory=22.5GiB")
  return size


def _share() -> float:
  text = os.environ.get(_SHARE_VARIABLE) or str(_SHARE)
  if re.fullmatch(r"0?\.[0-9]+|1(\.0*)?", text) is None or not float(text):
    raise UserError(f"environment variable {_SHARE_VARIABLE}={text}: not a share of the memory\n  fix: unset it, or {_SHARE}")
  return float(text)


@dataclass(frozen=True, kw_only=True)
class Cpus:
  """CPU devices of one host, as ``cpu-8``. Their speed is not known here, their memory only if it is passed."""

  name: str
  devices: int
  bytes: int | None = None


def find_cpus(name: str, memory: str | None = None) -> Cpus | None:
  """The CPU devices of this name, ``cpu`` for one; None: it names none.

  Args:
    name: ``cpu``, or ``cpu-8``.
    memory: of one device, as ``24GB``; None: not known.

  Raises:
    UserError: a memory that is no size.
  """
  found = re.fullmatch(r"cpu(?:-([1-9][0-9]{0,3}))?", name)
  if found is None:
    return None
  return Cpus(name=name, devices=int(found[1] or 1), bytes=None if memory is None else memory_bytes(memory))


def machines(cpus: bool) -> str:
  """The values of ``topology=`` in a line. ``cpus``: CPU devices are allowed."""
  cpu = "; CPU devices: cpu-8" if cpus else ""
  gpus = f"GPUs: {', '.join(CARDS)}, with -2 to -{MAX_GPUS} for several, or topology=gpu memory=24GB for any other"
  return f"a slice: {', '.join(TOPOLOGIES)}; {gpus}{cpu}"


def find_machine(name: str | None, memory: str | None = None, *, cpus: bool = False) -> Topology | GpuHost | Cpus:
  """The machine that ``topology=`` and ``memory=`` describe.

  Args:
    name: of a slice, of GPUs, or of CPU devices; None: one GPU with the memory.
    memory: of a device, as ``24GB``; None: as the tables have it.
    cpus: CPU devices are allowed.

  Raises:
    UserError: unknown, with the nearest names; no name and no memory; a memory for a TPU.
  """
  if name is None and memory is None:
    raise UserError(f"no topology\n  fix: add topology=NAME, {machines(cpus)}")
  name = name or OTHER_GPU
  if (host := find_gpus(name, memory)) is not None:
    return host
  if cpus and (found := find_cpus(name, memory)) is not None:
    return found
  topology = find_topology(name, (*GPU_NAMES, *(["cpu-8"] if cpus else [])), machines(cpus))
  if memory is not None:
    raise UserError(
      f"memory={memory} is for GPUs{' and CPUs' * cpus}; a chip of {name} has {topology.hbm_bytes / GIB:g} GiB\n"
      "  fix: leave it out"
    )
  return topology


def memory_of(device_kind: str) -> int | None:
  """Bytes of a device by what JAX calls it, where it does not say itself; None: not in the tables here."""
  cards = {card.card: card.bytes for card in CARDS.values()} | {"TPU v6 lite": _V6E_HBM}
  return cards.get(device_kind)


@contextlib.contextmanager
def assumed_gpu() -> Iterator[None]:
  """Lets JAX trace and lower cuDNN's attention, and kernels by Triton, where there is no GPU to ask for its compute capability
  and cuDNN version."""
  from jax._src.cudnn import fused_attention_stablehlo as cudnn

  answers: list[tuple[Any, str, Callable[..., Any]]] = [
    (cudnn, "check_cudnn_version", lambda: _CUDNN),
    (cudnn, "check_compute_capability", lambda capability: float(capability) <= 9.0),
    (cudnn, "is_cuda_compute_capability_equal", lambda capability: capability == "9.0"),
  ]
  with contextlib.suppress(ImportError):  # before JAX 0.11 Triton takes this GPU for granted by itself
    from jax._src.pallas.triton import gpu_info  # pyright: ignore[reportAttributeAccessIssue]

    hopper = gpu_info.GpuInfo(gpu_version=None, arch_name="9.0", compute_capability=90)
    answers.append((gpu_info, "get_gpu_info", lambda: hopper))
  before = [(module, name, getattr(module, name)) for module, name, _ in answers]
  try:
    for module, name, answer in answers:
      setattr(module, name, answer)
    yield
  finally:
    for module, name, function in before:
      setattr(module, name, function)
