"""Lower bounds of the time of a step, compared with sums by hand."""

import pytest

from maxtext_like.capacity.chips import CARDS, CHIPS, Card, find_chip, links_of
from maxtext_like.capacity.compiled_program import HOST_COPIES, Array, Operation, Transfer
from maxtext_like.capacity.flops import visible_pairs
from maxtext_like.capacity.roofline import kernel_flops, roofline
from maxtext_like.config.load import load_config
from maxtext_like.sharding.mesh import abstract_mesh
from maxtext_like.training.step.program import make_program

CHIP = next(chip for chip in CHIPS if chip.kind == "tpu v6 lite")
LINKS, NETWORK, HOST = 180_000_000_000, 12_500_000_000, 32_000_000_000


def test_chips():
  assert find_chip("cpu") is None
  assert find_chip("TPU v6e") == next(chip for chip in CHIPS if chip.kind == "tpu v6e")
  assert find_chip("TPU v6 lite") == CHIP
  assert (CHIP.tflops, CHIP.memory, CHIP.links, CHIP.network) == (918.0, 1.64e12, LINKS, NETWORK)
  assert links_of(CHIP, 256) == 2 * (links_of(CHIP, 128) or 0)


@pytest.mark.parametrize(
  ("kind", "gb", "bandwidth", "bfloat16", "float16", "float32", "exact", "float8"),
  [
    # Copied from the data sheets: GB of the card, GB/s, dense TFLOP/s with float32 accumulation.
    ("NVIDIA L4", 24, 300, 121, 121, 60, 30.3, 242),
    ("NVIDIA L40S", 48, 864, 362.05, 362.05, 183, 91.6, 733),
    ("NVIDIA A10", 24, 600, 125, 125, 62.5, 31.2, None),
    ("NVIDIA A10G", 24, 600, 70, 70, 35, 31.5, None),
    ("NVIDIA GeForce RTX 3090", 24, 936, 71, 71, 35.6, 35.6, None),
    ("NVIDIA GeForce RTX 4090", 24, 1008, 165.2, 165.2, 82.6, 82.6, 330.3),
    ("NVIDIA GeForce RTX 5090", 32, 1792, 209.5, 209.5, 104.8, 104.8, 419),
    ("NVIDIA A100-SXM4-40GB", 40, 1555, 312, 312, 156, 19.5, None),
    ("NVIDIA A100-SXM4-80GB", 80, 2039, 312, 312, 156, 19.5, None),
    ("NVIDIA GH200 480GB", 96, 4000, 989, 989, 494.5, 67, 1979),
    ("NVIDIA B200", 180, 8000, 2250, 2250, 1100, 80, 4500),
    ("Tesla T4", 16, 320, 8.1, 65, 8.1, 8.1, None),
    ("Tesla V100-SXM2-32GB", 32, 900, 15.7, 125, 15.7, 15.7, None),
  ],
)
def test_published_numbers_of_cards(kind, gb, bandwidth, bfloat16, float16, float32, exact, float8):
  card = find_chip(kind)
  assert isinstance(card, Card)
  assert card.card == kind
  assert card.memory == bandwidth * 1e9
  assert [card.peak(dtype) for dtype in ("bfloat16", "float16", "float32")] == [bfloat16, float16, float32]
  assert (card.peak("float32", "highest"), card.float8) == (exact, float8)
  # CUDA offers less than the complete memory, and a GB of a data sheet may mean 2**30 bytes.
  assert 0.9 * gb * 2**30 < card.bytes < gb * 2**30


def test_a_card_is_not_taken_for_its_namesake():
  kinds = {
    "NVIDIA L40": "l40",
    "NVIDIA A100-PCIE-40GB": "a100-.*40gb",
    "NVIDIA H100 PCIe": "h100 pcie",
    "TPU v5 lite": "tpu v5 lite",
  }
  for device, kind in kinds.items():
    assert (chip := find_chip(device)) is not None
    assert chip.kind == kind
  for other in (
    "NVIDIA GeForce RTX 4090 Laptop GPU",
    "NVIDIA GeForce RTX 3090 Ti",
    "NVIDIA GB200",
    "NVIDIA GeForce RTX 4090 D",
  ):
    assert find_chip(other) is None
  for card in CARDS.values():
    assert find_chip(card.card) is card


def test_a_float32_product_takes_longer():
  card = find_chip("NVIDIA L4")
  assert card is not None
  seconds = lambda **how: roofline(card, 1, flops=121e12, memory_bytes=0, transfers=(), model_flops=121e12, **how)
  assert seconds().step == pytest.approx(1)
  assert seconds(dtype="float32").step == pytest.approx(121 / 60)
  assert seconds(dtype="float32", precision="highest").mfu == pytest.approx(30.3 / 121)  # relative to the bfloat16 peak
  assert CHIP.peak("float32") / CHIP.peak("float32", "highest") == 6


def bounds(*transfers: Transfer, flops: float = 918e12, memory: float = 0.82e12):
  return roofline(CHIP, 32, flops=flops, memory_bytes=memory, transfers=transfers, model_flops=0.75 * flops)


def test_what_runs_beside_products_is_a_bound_and_what_is_waited_for_is_added():
  found = bounds(
    Transfer("all-gather", 2 * LINKS, 5, asynchronous=True),
    Transfer("reduce-scatter", LINKS, 5, asynchronous=False),
    Transfer("all-reduce", NETWORK // 2, 1, asynchronous=True, between_slices=True),
    *(Transfer(kind, HOST // 4, 5, asynchronous=True) for kind in HOST_COPIES),
  )
  assert found.bounds == pytest.approx({"matrix units": 1.0, "HBM": 0.5, "ICI": 2.0, "DCN": 0.5, "host": 0.5})
  assert (found.waiting, found.step) == pytest.approx((1.0, 3.0))
  assert found.mfu == pytest.approx(0.25)
  assert found.binds == "ICI"
  assert bounds().binds == "matrix units"
  assert bounds(memory=3e12).binds == "HBM"
  assert bounds(Transfer("all-gather", 3 * LINKS, 5, asynchronous=False)).binds == "exposed transfers"
  assert bounds(Transfer("to host", 3 * HOST, 5, asynchronous=True)).binds == "host"


def call(name: str, path: str, *results: Array) -> Operation:
  text = ', custom_call_target="tpu_custom_call"'
  return Operation(name, "custom-call", results, (), text, path, 0, root=False)


def test_kernels_count_what_their_masks_leave():
  config = load_config("gemma4-31b", ["max_target_length=2048", "num_decoder_layers=6"]).config
  of = kernel_flops(make_program(config, mesh=abstract_mesh(config.mesh, 32), platform="tpu").model.decoder)
  q, k = Array("bf16", (32, 2048, 256)), Array("bf16", (16, 2048, 256))
  tables = [Array("s8", (1, 4, 3)), Array("s8", (1, 4, 3))]
  pairs = visible_pairs(2048, 1024)
  for name, products in {"splash_mha_fwd_residuals": 2, "splash_mha_dq": 3, "splash_mha_dkv": 4}.items():
    op = call(name, f"jit(step)/jvp()/while/body/stack_0/layer_0/attention/{name}/pallas_call")
    assert of(op, [*tables, q, k, k]) == products * 2 * 32 * 256 * pairs
  # In a vision tower, all patches of an image attend to each other.
  for tower in ("jvp(vision)", "transpose(jvp(vision))", "vision"):
    op = call("splash_mha_dq", f"jit(step)/{tower}/while/body/checkpoint/attention/splash_mha_dq/pallas_call")
    assert of(op, [*tables, q, q, q]) == 3 * 2 * 32 * 256 * 2048**2
  wide = Array("bf16", (32, 2048, 512))
  path = "jit(step)/jvp()/stack_1/layer_0/attention/splash_mha_fwd/pallas_call"
  assert of(call("splash_mha_fwd", path), [*tables, wide, wide, wide]) == 2 * 2 * 32 * 512 * visible_pairs(2048)
  # In latent attention, values are narrower than queries and keys.
  q, v = Array("bf16", (16, 2048, 192)), Array("bf16", (16, 2048, 128))
  for name, wide in {"splash_mha_fwd": 192 + 128, "splash_mha_dq": 2 * 192 + 128, "splash_mha_dkv": 2 * 192 + 2 * 128}.items():
    op = call(name, f"jit(step)/stack_1/layer_0/attention/{name}/pallas_call")
    assert of(op, [*tables, q, q, v]) == 2 * wide * 16 * visible_pairs(2048)


def test_products_of_experts_count_their_rows():
  config = load_config("gemma4-moe-tiny").config
  of = kernel_flops(make_program(config, mesh=abstract_mesh(config.mesh, 8), platform="tpu").model.decoder)
  sizes, rows, weights = Array("s32", (129,)), Array("bf16", (640, 48)), Array("bf16", (8, 48, 20))
  assert (
    of(call("ragged-dot-none.1", "jit(step)/experts", Array("bf16", (640, 20))), [sizes, rows, weights]) == 2 * 640 * 48 * 20
  )
  gradient = call("ragged-dot-none.2", "jit(step)/experts", weights)
  assert of(gradient, [sizes, rows, Array("bf16", (640, 20))]) == 2 * 640 * 48 * 20
  assert of(call("ragged-dot-metadata", "jit(step)/experts", sizes), [sizes]) == 0
  # The Pallas kernels process one more tile of 16 rows at each of the 7 boundaries, and skip the padding rows.
  path = "jit(step)/experts/transpose(jvp(grouped_weights))/pallas_call"
  assert of(call("grouped.3", path, weights), [sizes, rows, Array("bf16", (640, 20))]) == 2 * (640 + 7 * 16) * 48 * 20
  padded = kernel_flops(make_program(config, mesh=abstract_mesh(config.mesh, 8), platform="tpu").model.decoder, 1.25)
  assert padded(call("grouped.3", path, weights), [sizes, rows, Array("bf16", (640, 20))]) == 2 * (512 + 7 * 16) * 48 * 20
