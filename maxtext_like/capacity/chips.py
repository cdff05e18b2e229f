"""Published numbers of devices: memory, dense FLOP/s for each dtype, and links. Does not import JAX.

A GPU that ``plan`` and ``compile`` know by name is a ``Card``: to add a card, add one line to ``CHIPS``.
"""

import re
from dataclasses import dataclass

GIB = 1 << 30


@dataclass(frozen=True, kw_only=True)
class Chip:
  """One device. FLOP rates are dense, in TFLOP/s, with float32 accumulation.

  Attributes:
    kind: regular expression for a part of JAX's name of the device (``Device.device_kind``), in lower case.
    tflops: bfloat16 products.
    float16: float16 products; None if the same as bfloat16.
    float32: float32 products in the default precision, which is TF32 if the device has it; None if it uses passes of bfloat16.
    exact_float32: float32 products with ``matmul_precision=highest``.
    float8: float8 products; None if the device has none.
    memory: bytes/s of the device's memory; None if not needed so far.
    links: bytes/s through one device of a collective over the devices of a slice or a host.
    network: bytes/s of a device's share of the network between slices or hosts.
    host: bytes/s between device memory and host memory, one way.
  """

  kind: str
  tflops: float
  float16: float | None = None
  float32: float | None = None
  exact_float32: float | None = None
  float8: float | None = None
  memory: float | None = None
  links: float | None = None
  network: float | None = None
  host: float | None = None

  def peak(self, dtype: str, precision: str = "default") -> float:
    """Return the dense TFLOP/s of products in a dtype. ``precision`` is a value of ``matmul_precision`` and matters for
    float32."""
    if dtype == "float16":
      return self.float16 or self.tflops
    if dtype != "float32":
      return self.tflops
    if self.float32 is None:  # a TPU splits a float32 number into bfloat16 numbers (jax.lax.Precision)
      return self.tflops / {"default": 1, "high": 3, "highest": 6}[precision]
    return (self.exact_float32 or self.float32) if precision == "highest" else self.float32


@dataclass(frozen=True, kw_only=True)
class Card(Chip):
  """A GPU that ``plan`` and ``compile`` know by name.

  Attributes:
    name: the value of ``topology=``.
    card: JAX's complete name of the card.
    capability: CUDA's compute capability.
    bytes: memory that CUDA makes available.
  """

  name: str
  card: str
  capability: str
  bytes: int


# Products, bandwidths and links are from NVIDIA's data sheets, dense (half of the numbers "with sparsity") and with float32
# accumulation, which halves the rate of GeForce cards: "NVIDIA L4", "L40", "L40S", "A10", "A40", "A100", "H100", "H200", "HGX
# B200" and "GH200" data sheets; "T4" and "V100" data sheets; architecture white papers "Ampere GA102" (RTX 3090, A6000), "Ada"
# (RTX 4090, 6000 Ada), "RTX Blackwell" (RTX 5090). A10G: NVIDIA's data sheet for AWS. Links are one direction of NVLink, or of
# PCIe for cards without NVLink: 16 GB/s (3.0 x16), 32 (4.0), 64 (5.0). Networks are 200 or 400 Gb/s per GPU.
# Memory is the memory that CUDA makes available, which is less than the card has. H100 and H200 reported it (driver
# 580.159.04). For the following cards it is the smallest total in published "CUDA out of memory" messages, which varies with
# the driver by 0.2 GiB: L4 arcinstitute/evo2#190, L40S step-video-t2v#8, L40 Qwen3-VL#2097, RTX 4090 soulx-flashtalk#5, RTX
# 5090 wan2.1#465, T4 catvton#133, V100 32 GB chatglm-finetuning#73. A10 and A10G are assumed to have the 24 GB with ECC of an
# L4, and A40 the 48 GB of an L40. The others are estimates that no message confirms: RTX 3090, A6000, 6000 Ada, A100 40 GB,
# H100 PCIe, GH200 and V100 16 GB.
_AMPERE = {"tflops": 312.0, "float32": 156.0, "exact_float32": 19.5, "links": 300e9, "network": 25e9, "host": 32e9}
_HOPPER = {"tflops": 989.0, "float32": 494.5, "exact_float32": 67.0, "float8": 1979.0, "links": 450e9, "network": 50e9}
_PCIE3, _PCIE4, _PCIE5 = ({"links": rate, "host": rate} for rate in (16e9, 32e9, 64e9))


CHIPS: tuple[Chip, ...] = (
  Card(name="t4", card="Tesla T4", kind="t4", capability="7.5", bytes=int(14.56 * GIB), memory=320e9,
       tflops=8.1, float16=65.0, float32=8.1, exact_float32=8.1, **_PCIE3),
  Card(name="v100-32gb", card="Tesla V100-SXM2-32GB", kind="v100-sxm2-32gb", capability="7.0", bytes=int(31.74 * GIB),
       memory=900e9, tflops=15.7, float16=125.0, float32=15.7, exact_float32=15.7, links=150e9, host=16e9),
  Card(name="v100", card="Tesla V100-SXM2-16GB", kind="v100", capability="7.0", bytes=int(15.77 * GIB), memory=900e9,
       tflops=15.7, float16=125.0, float32=15.7, exact_float32=15.7, links=150e9, host=16e9),
  Card(name="a10", card="NVIDIA A10", kind="a10", capability="8.6", bytes=int(22.03 * GIB), memory=600e9,
       tflops=125.0, float32=62.5, exact_float32=31.2, **_PCIE4),
  Card(name="a10g", card="NVIDIA A10G", kind="a10g", capability="8.6", bytes=int(22.03 * GIB), memory=600e9,
       tflops=70.0, float32=35.0, exact_float32=31.5, **_PCIE4),
  Card(name="a40", card="NVIDIA A40", kind="a40", capability="8.6", bytes=int(44.4 * GIB), memory=696e9,
       tflops=149.7, float32=74.8, exact_float32=37.4, **_PCIE4),
  Card(name="l4", card="NVIDIA L4", kind="l4", capability="8.9", bytes=int(22.03 * GIB), memory=300e9,
       tflops=121.0, float32=60.0, exact_float32=30.3, float8=242.0, **_PCIE4),
  Card(name="l40", card="NVIDIA L40", kind="l40", capability="8.9", bytes=int(44.4 * GIB), memory=864e9,
       tflops=181.05, float32=90.5, exact_float32=90.5, float8=362.0, **_PCIE4),
  Card(name="l40s", card="NVIDIA L40S", kind="l40s", capability="8.9", bytes=int(44.4 * GIB), memory=864e9,
       tflops=362.05, float32=183.0, exact_float32=91.6, float8=733.0, **_PCIE4),
  Card(name="rtx3090", card="NVIDIA GeForce RTX 3090", kind="rtx 3090", capability="8.6", bytes=int(23.6 * GIB), memory=936e9,
       tflops=71.0, float32=35.6, exact_float32=35.6, **_PCIE4),
  Card(name="rtx4090", card="NVIDIA GeForce RTX 4090", kind="rtx 4090", capability="8.9", bytes=int(23.52 * GIB), memory=1008e9,
       tflops=165.2, float32=82.6, exact_float32=82.6, float8=330.3, **_PCIE4),
  Card(name="rtx5090", card="NVIDIA GeForce RTX 5090", kind="rtx 5090", capability="12.0", bytes=int(31.36 * GIB),
       memory=1792e9, tflops=209.5, float32=104.8, exact_float32=104.8, float8=419.0, **_PCIE5),
  Card(name="rtxa6000", card="NVIDIA RTX A6000", kind="rtx a6000", capability="8.6", bytes=int(47.4 * GIB), memory=768e9,
       tflops=154.8, float32=77.4, exact_float32=38.7, **_PCIE4),
  Card(name="rtx6000ada", card="NVIDIA RTX 6000 Ada Generation", kind="rtx 6000 ada", capability="8.9", bytes=int(47.4 * GIB),
       memory=960e9, tflops=364.2, float32=182.1, exact_float32=91.1, float8=728.5, **_PCIE4),
  Card(name="a100-40gb", card="NVIDIA A100-SXM4-40GB", kind="a100-.*40gb", capability="8.0", bytes=int(39.39 * GIB),
       memory=1.555e12, **_AMPERE),
  Chip(kind="a100 80gb pcie", memory=1.935e12, **_AMPERE | {"links": 32e9}),
  Card(name="a100", card="NVIDIA A100-SXM4-80GB", kind="a100", capability="8.0", bytes=int(79.15 * GIB), memory=2.039e12,
       **_AMPERE),
  Card(name="h100-pcie", card="NVIDIA H100 PCIe", kind="h100 pcie", capability="9.0", bytes=int(79.1 * GIB), memory=2.0e12,
       tflops=756.0, float32=378.0, exact_float32=51.0, float8=1513.0, **_PCIE5),
  Chip(kind="h100 nvl", memory=3.9e12, **_HOPPER | {"tflops": 835.0, "float32": 417.5, "float8": 1671.0}, host=64e9),
  Card(name="h100", card="NVIDIA H100 80GB HBM3", kind="h100", capability="9.0", bytes=85_017_493_504, memory=3.35e12,
       **_HOPPER, host=64e9),
  Card(name="h200", card="NVIDIA H200", kind="h200", capability="9.0", bytes=150_109_880_320, memory=4.8e12, **_HOPPER,
       host=64e9),
  # 96 GB of HBM3. Host memory is connected by NVLink-C2C.
  Card(name="gh200", card="NVIDIA GH200 480GB", kind="gh200", capability="9.0", bytes=int(94.5 * GIB), memory=4.0e12, **_HOPPER,
       host=450e9),
  Card(name="b200", card="NVIDIA B200", kind="b200", capability="10.0", bytes=int(178.35 * GIB), memory=8.0e12, tflops=2250.0,
       float32=1100.0, exact_float32=80.0, float8=4500.0, links=900e9, network=50e9, host=64e9),
  # cloud.google.com/tpu/docs/v6e: 918 TFLOP/s, 1640 GB/s. Links for collectives are from MaxText's guide: 5100 FLOP per byte on
  # a slice without closed rings (``links_of`` handles closed rings). Network: 25.6 Tb/s for a pod of 256 chips. Host:
  # fifth-generation PCIe, 32 GB/s for a v6e according to jax-ml.github.io/scaling-book/tpus.
  Chip(kind="tpu v6 lite", tflops=918.0, memory=1.64e12, links=1.8e11, network=12.5e9, host=32e9),
  Chip(kind="tpu v6e", tflops=918.0, memory=1.64e12, links=1.8e11, network=12.5e9, host=32e9),
  Chip(kind="tpu v5 lite", tflops=197.0),  # cloud.google.com/tpu/docs/v5e
  Chip(kind="tpu v5e", tflops=197.0),
  Chip(kind="tpu v5p", tflops=459.0),  # cloud.google.com/tpu/docs/v5p
  Chip(kind="tpu v5", tflops=459.0),
  Chip(kind="tpu v4", tflops=275.0),  # cloud.google.com/tpu/docs/v4
)  # fmt: skip
CARDS = {chip.name: chip for chip in CHIPS if isinstance(chip, Card)}

WHOLE_V6E_POD = 256
"""Number of chips of the only v6e slice whose links form closed rings in both directions of its torus, which doubles the
bytes/s."""


def find_chip(device_kind: str) -> Chip | None:
  """Return a device by JAX's name of it, or None if it is not in the table. Ti, Super and laptop cards have a different chip
  than the card of the same name, so they do not match."""
  kind = device_kind.lower()
  whole = r"(?<![a-z0-9]){}(?![a-z0-9])(?!.* (?:ti|super|d|laptop)\b)"
  return next((chip for chip in CHIPS if re.search(whole.format(chip.kind), kind)), None)


def links_of(chip: Chip, devices: int) -> float | None:
  """Return the bytes/s of a collective over this many linked devices (of one slice or one host)."""
  if chip.links is None or "v6" not in chip.kind:
    return chip.links
  return chip.links * (2 if devices >= WHOLE_V6E_POD else 1)
