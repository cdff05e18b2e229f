"""The machines that ``topology=`` names: TPU slices, GPUs of a host, CPU devices. Does not import JAX."""

import contextlib
import os
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from maxtext_like.capacity.chips import CARDS, GIB
from maxtext_like.config.problems import nearest
from maxtext_like.errors import UserError

_CUDNN = 91_000  # 9.10, the version of 2025, which an assumed GPU has


@dataclass(frozen=True, kw_only=True)
class Topology:
  """A slice, or several identical slices joined by the data-center network.

  Attributes:
    name: the usual name, ``v6e-8``: generation and number of chips.
    generation: key of the chip.
    grid: chips of a slice along x and y.
    hbm_bytes: memory of one chip that XLA makes available to a program.
    slices: number of slices.
  """

  name: str
  generation: str
  grid: tuple[int, int]
  hbm_bytes: int
  slices: int = 1

  @property
  def chips(self) -> int:
    """Number of chips in all slices."""
    return self.chips_of_slice * self.slices

  @property
  def chips_of_slice(self) -> int:
    return self.grid[0] * self.grid[1]

  @property
  def devices(self) -> int:
    """Number of chips; all machines have this property."""
    return self.chips

  @property
  def bytes(self) -> int:
    """Memory of a chip that XLA makes available to a program."""
    return self.hbm_bytes

  @property
  def libtpu_name(self) -> str:
    """The name in ``jax.experimental.topologies``: ``v6e:2x4``."""
    return f"{self.generation}:{self.grid[0]}x{self.grid[1]}"


# XLA reserves a part of the 32 GB of a v6e chip; its out-of-memory message says that 31.25 GiB are available.
_V6E_HBM = int(31.25 * GIB)
# cloud.google.com/tpu/docs/v6e, "Supported configurations".
_V6E_GRIDS = ((1, 1), (2, 2), (2, 4), (4, 4), (4, 8), (8, 8), (8, 16), (16, 16))

TOPOLOGIES: dict[str, Topology] = {
  f"v6e-{x * y}": Topology(name=f"v6e-{x * y}", generation="v6e", grid=(x, y), hbm_bytes=_V6E_HBM) for x, y in _V6E_GRIDS
}


def find_topology(name: str, others: tuple[str, ...] = (), fix: str | None = None) -> Topology:
  """Return the slice of this name.

  Args:
    name: name of a slice.
    others: more names for the error message.
    fix: advice of the error message; None for the names of the slices.

  Raises:
    UserError: the name is unknown; the message has the nearest names.
  """
  if name in TOPOLOGIES:
    return TOPOLOGIES[name]
  near = nearest(name.lower(), (*TOPOLOGIES, *others), count=3)
  meant = f", did you mean {' or '.join(near)}?" if near else ""
  raise UserError(f"topology={name}: unknown topology{meant}\n  fix: {fix or 'use one of ' + ', '.join(TOPOLOGIES)}")


@dataclass(frozen=True, kw_only=True)
class GpuHost:
  """GPUs of one host.

  Attributes:
    name: the usual name, ``h200-8``: the card and the number of cards.
    card: JAX's name of the card.
    key: name of the card in ``CARDS``, or ``gpu`` if only its memory is known.
    capability: CUDA's compute capability, in JAX's format.
    gpus: number of GPUs.
    card_bytes: memory of one card that CUDA makes available.
    share: fraction of it that JAX uses.
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
    """Number of GPUs; all machines have this property."""
    return self.gpus

  @property
  def bytes(self) -> int:
    """Memory of a card that JAX makes available to a program."""
    return int(self.card_bytes * self.share)


_SHARE, _SHARE_VARIABLE = 0.92, "XLA_PYTHON_CLIENT_MEM_FRACTION"  # the value of gpu/env.sh; JAX's own default is 0.75
MAX_GPUS = 8
GPU_NAMES = tuple(f"{card}-{gpus}" for card in CARDS for gpus in (1, 2, 4, 8))
OTHER_GPU = "gpu"
"""The name of a card that is not in the table; ``memory=`` gives its memory."""
_CAPABILITY_OF_OTHERS = "8.0"  # Ampere, which has bfloat16 and fused attention; kernels that need newer cards are not assumed
# Other spellings of the names of cards, as regular expressions that are applied in order.
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
  """Return the GPUs of this name, ``h200`` for one of them; None if it does not name GPUs.

  Args:
    name: a card of ``CARDS``, or ``gpu`` for any other, and the number of cards. Upper case and common spellings are accepted.
    memory: memory of one card, such as ``24GB``; None for that of the table.

  Raises:
    UserError: more GPUs than one host has; an invalid memory, or none for an unknown card; an invalid share of a card's memory
      in the environment.
  """
  # Normalize the spelling, then split the name into card and number of cards.
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
      f"topology={name}: only GPUs of one host are supported here, 1 to {MAX_GPUS} of them (a run may have several hosts)\n"
      f"  fix: topology={key}-8, with the batch of one host{meant}"
    )
  # An unknown card needs its memory.
  size = None if memory is None else memory_bytes(memory)
  card = CARDS.get(key)
  if card is None and size is None:
    raise UserError(f"topology={name}: this card is not in the table, so its memory is unknown\n  fix: add memory=24GB")
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
  """Return the bytes of a size such as ``24GB`` (10**9 bytes) or ``22.5GiB`` (2**30 bytes).

  Raises:
    UserError: not a size, or below 1 MB or above 100 TB.
  """
  found = re.fullmatch(r"([0-9]{1,6}(?:\.[0-9]{1,6})?) ?([kmgt]i?b)", text.strip().lower())
  size = int(float(found[1]) * _UNITS[found[2]]) if found else 0
  if not 10**6 <= size <= 10**14:
    raise UserError(f"memory={text}: not the memory of a device\n  fix: memory=24GB, or memory=22.5GiB")
  return size


def _share() -> float:
  text = os.environ.get(_SHARE_VARIABLE) or str(_SHARE)
  if re.fullmatch(r"0?\.[0-9]+|1(\.0*)?", text) is None or not float(text):
    raise UserError(
      f"environment variable {_SHARE_VARIABLE}={text}: not a fraction between 0 and 1\n  fix: unset it, or {_SHARE}"
    )
  return float(text)


@dataclass(frozen=True, kw_only=True)
class Cpus:
  """CPU devices of one host, such as ``cpu-8``. Their speed is unknown, and their memory is only known if it is passed."""

  name: str
  devices: int
  bytes: int | None = None


def find_cpus(name: str, memory: str | None = None) -> Cpus | None:
  """Return the CPU devices of this name, ``cpu`` for one; None if it does not name CPU devices.

  Args:
    name: ``cpu``, or ``cpu-8``.
    memory: memory of one device, such as ``24GB``; None if unknown.

  Raises:
    UserError: an invalid memory.
  """
  found = re.fullmatch(r"cpu(?:-([1-9][0-9]{0,3}))?", name)
  if found is None:
    return None
  return Cpus(name=name, devices=int(found[1] or 1), bytes=None if memory is None else memory_bytes(memory))


def machines(cpus: bool) -> str:
  """Return the values of ``topology=`` in one line. ``cpus``: include CPU devices."""
  cpu = "; CPU devices: cpu-8" if cpus else ""
  gpus = f"GPUs: {', '.join(CARDS)}, with -2 to -{MAX_GPUS} for several, or topology=gpu memory=24GB for any other"
  return f"a slice: {', '.join(TOPOLOGIES)}; {gpus}{cpu}"


def find_machine(name: str | None, memory: str | None = None, *, cpus: bool = False) -> Topology | GpuHost | Cpus:
  """Return the machine that ``topology=`` and ``memory=`` describe.

  Args:
    name: a slice, GPUs, or CPU devices; None for one GPU with the memory.
    memory: memory of a device, such as ``24GB``; None for that of the tables.
    cpus: accept CPU devices.

  Raises:
    UserError: an unknown name (the message has the nearest names); neither name nor memory; a memory for a TPU.
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
      "  fix: remove memory="
    )
  return topology


def memory_of(device_kind: str) -> int | None:
  """Return the memory in bytes of a device by JAX's name of it, for devices that do not report it; None if it is not in the
  tables."""
  cards = {card.card: card.bytes for card in CARDS.values()} | {"TPU v6 lite": _V6E_HBM}
  return cards.get(device_kind)


@contextlib.contextmanager
def assumed_gpu() -> Iterator[None]:
  """Let JAX trace and lower cuDNN's attention and Triton kernels without a GPU, by assuming a compute capability and a cuDNN
  version."""
  from jax._src.cudnn import fused_attention_stablehlo as cudnn

  answers: list[tuple[Any, str, Callable[..., Any]]] = [
    (cudnn, "check_cudnn_version", lambda: _CUDNN),
    (cudnn, "check_compute_capability", lambda capability: float(capability) <= 9.0),
    (cudnn, "is_cuda_compute_capability_equal", lambda capability: capability == "9.0"),
  ]
  with contextlib.suppress(ImportError):  # before JAX 0.11, Triton assumes this GPU itself
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
