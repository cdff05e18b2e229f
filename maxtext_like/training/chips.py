"""The numbers of a device that bound a step: matrix units, memory, links. Published ones, in one table. Needs no JAX."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Chip:
  """One device.

  Attributes:
    kind: a part of what JAX calls it (``Device.device_kind``), lower case.
    tflops: dense bfloat16 products, TFLOP/s.
    float8: dense float8 products, TFLOP/s; None: it has none.
    memory: bytes/s between its memory and its units; None: not needed so far.
    links: bytes/s that a collective over the devices of a slice or a host moves through one of them.
    network: bytes/s of a device's share of the network between slices or hosts.
    host: bytes/s between its memory and its host's, one way.
  """

  kind: str
  tflops: float
  float8: float | None = None
  memory: float | None = None
  links: float | None = None
  network: float | None = None
  host: float | None = None


# The first match counts.
CHIPS: tuple[Chip, ...] = (
  # nvidia.com/en-us/data-center/h200: 1979 TFLOP/s with sparsity, 3958 in float8; NVLink 900 GB/s and PCIe 128 GB/s both ways;
  # a 400 Gb/s card for each GPU.
  Chip(kind="h200", tflops=989.0, float8=1979.0, memory=4.8e12, links=450e9, network=50e9, host=64e9),
  Chip(kind="h100 pcie", tflops=756.0, float8=1513.0, memory=2.0e12),  # nvidia.com/en-us/data-center/h100
  Chip(kind="h100", tflops=989.0, float8=1979.0, memory=3.35e12, links=450e9, network=50e9, host=64e9),  # the same page, SXM
  # NVIDIA Blackwell datasheet, dense
  Chip(kind="b200", tflops=2250.0, float8=4500.0, memory=8.0e12, links=900e9, network=50e9, host=64e9),
  Chip(kind="a100", tflops=312.0, memory=2.039e12, links=300e9, network=25e9, host=32e9),  # nvidia.com/en-us/data-center/a100
  # cloud.google.com/tpu/docs/v6e: 918 TFLOP/s, 1640 GB/s. Links as MaxText's guide has them for collectives: 5100 FLOP a
  # byte on a slice whose rings do not close (``links_of`` has the other). Network: 25.6 Tb/s of a pod of 256 chips. Host: PCIe
  # of the fifth generation, of which jax-ml.github.io/scaling-book/tpus has 32 GB/s for a v6e.
  Chip(kind="tpu v6 lite", tflops=918.0, memory=1.64e12, links=1.8e11, network=12.5e9, host=32e9),
  Chip(kind="tpu v6e", tflops=918.0, memory=1.64e12, links=1.8e11, network=12.5e9, host=32e9),
  Chip(kind="tpu v5 lite", tflops=197.0),  # cloud.google.com/tpu/docs/v5e
  Chip(kind="tpu v5e", tflops=197.0),
  Chip(kind="tpu v5p", tflops=459.0),  # cloud.google.com/tpu/docs/v5p
  Chip(kind="tpu v5", tflops=459.0),
  Chip(kind="tpu v4", tflops=275.0),  # cloud.google.com/tpu/docs/v4
)

WHOLE_V6E_POD = 256
"""Chips of the one v6e slice whose links close to rings in both directions of its torus: twice the bytes/s."""


def find_chip(device_kind: str) -> Chip | None:
  """A device by what JAX calls it; None: not in the table."""
  kind = device_kind.lower()
  return next((chip for chip in CHIPS if chip.kind in kind), None)


def links_of(chip: Chip, devices: int) -> float | None:
  """Bytes/s of a collective over so many devices that are linked (of one slice, of one host)."""
  if chip.links is None or "v6" not in chip.kind:
    return chip.links
  return chip.links * (2 if devices >= WHOLE_V6E_POD else 1)
