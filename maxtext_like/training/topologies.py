"""TPU slices that the train step can be compiled for on any machine, GPUs that it is estimated for. Needs no JAX."""

import contextlib
import os
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from maxtext_like.config.problems import nearest
from maxtext_like.errors import UserError

GIB = 1 << 30
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


def find_topology(name: str, others: tuple[str, ...] = ()) -> Topology:
  """The slice of this name.

  Args:
    name: of a slice.
    others: names that whoever asks knows besides, for the error.

  Raises:
    UserError: unknown, with the nearest names.
  """
  if name in TOPOLOGIES:
    return TOPOLOGIES[name]
  near = nearest(name, (*TOPOLOGIES, *others), count=3)
  known = ", ".join((*TOPOLOGIES, *others))
  raise UserError(
    f"topology={name}: unknown topology{', did you mean ' + ' or '.join(near) + '?' if near else ''}\n  fix: one of {known}"
  )


@dataclass(frozen=True, kw_only=True)
class GpuHost:
  """GPUs of one host.

  Attributes:
    name: as people order it, ``h200-8``: the card and how many of them.
    card: as JAX calls it.
    capability: CUDA's compute capability, as JAX writes it.
    gpus: how many.
    card_bytes: memory of one card that CUDA gives out.
    share: of it, what JAX takes.
  """

  name: str
  card: str
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
# What CUDA says of a card. H100 and H200 were asked (driver 580.159.04); A100 and B200 as PyTorch's messages about a lack of
# memory have it, the smallest that is published (it varies with the driver by 0.2 GiB).
_CARDS = {
  "a100": ("NVIDIA A100-SXM4-80GB", "8.0", int(79.15 * GIB)),
  "h100": ("NVIDIA H100 80GB HBM3", "9.0", 85_017_493_504),
  "h200": ("NVIDIA H200", "9.0", 150_109_880_320),
  "b200": ("NVIDIA B200", "10.0", int(178.35 * GIB)),
}
GPU_NAMES = tuple(f"{card}-{gpus}" for card in _CARDS for gpus in (1, 2, 4, 8))


def find_gpus(name: str) -> GpuHost | None:
  """The GPUs of this name, ``h200`` for one of them; None: it names none.

  Raises:
    UserError: more than one host has; the environment's share of a card's memory is none.
  """
  found = re.fullmatch(rf"({'|'.join(_CARDS)})(?:-([0-9]{{1,6}}))?", name)
  if found is None:
    return None
  gpus = int(found[2] or 1)
  if not 1 <= gpus <= MAX_GPUS:
    raise UserError(
      f"topology={name}: GPUs of one host are planned and compiled for, 1 to {MAX_GPUS} of them; a run may have several hosts\n"
      f"  fix: topology={found[1]}-8, with the rows of one host"
    )
  card, capability, size = _CARDS[found[1]]
  name = f"{found[1]}-{gpus}"
  return GpuHost(name=name, card=card, capability=capability, gpus=gpus, card_bytes=size, share=_share())


def _share() -> float:
  text = os.environ.get(_SHARE_VARIABLE) or str(_SHARE)
  if re.fullmatch(r"0?\.[0-9]+|1(\.0*)?", text) is None or not float(text):
    raise UserError(f"environment variable {_SHARE_VARIABLE}={text}: not a share of the memory\n  fix: unset it, or {_SHARE}")
  return float(text)


@dataclass(frozen=True, kw_only=True)
class Cpus:
  """CPU devices of one host, as ``cpu-8``; of their memory and speed nothing is known here."""

  name: str
  devices: int
  bytes: int | None = None


def find_cpus(name: str) -> Cpus | None:
  """The CPU devices of this name, ``cpu`` for one; None: it names none."""
  found = re.fullmatch(r"cpu(?:-([1-9][0-9]{0,3}))?", name)
  return None if found is None else Cpus(name=name, devices=int(found[1] or 1))


def memory_of(device_kind: str) -> int | None:
  """Bytes of a device by what JAX calls it, where it does not say itself; None: not in the tables here."""
  cards = {card: size for card, _, size in _CARDS.values()} | {"TPU v6 lite": _V6E_HBM}
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
