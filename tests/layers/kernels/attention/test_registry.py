"""Tests which kernels are refused in which cases, and which kernel is chosen."""

import dataclasses
import re
import subprocess
import sys
from typing import Any, get_args

import jax
import pytest

from maxtext_like.layers.kernels.attention import registry
from maxtext_like.layers.kernels.attention.registry import Case, Choice, choose
from maxtext_like.layers.precision import Precision

GPU = Case(platform="gpu", precision=Precision(), query_heads=4, kv_heads=2, head_dim=128, value_dim=128, length=256)
HOPPER = dataclasses.replace(GPU, head_dim=512, value_dim=512, capability="9.0")
TPU = dataclasses.replace(GPU, platform="tpu")
REFUSED: list[tuple[Any, Case, dict[str, Any], str]] = [
  ("cudnn_flash", GPU, {"platform": "cpu"}, "on NVIDIA GPUs, not on cpu"),
  ("cudnn_flash", GPU, {"head_dim": 512, "value_dim": 512}, "512 is not a multiple of 8 up to 256"),
  ("cudnn_flash", GPU, {"head_dim": 12, "value_dim": 12}, "12 is not a multiple of 8"),
  ("cudnn_flash", GPU, {"value_dim": 136}, r"value heads \(136\) are wider than query heads \(128\)"),
  ("cudnn_flash", GPU, {"precision": Precision(dtype="float32")}, "float32 is neither bfloat16 nor float16"),
  ("cudnn_flash", GPU, {"bidirectional_images": True}, "bidirectional images"),
  ("cudnn_flash", GPU, {"probabilities": True}, "needs the probabilities"),
  ("cudnn_flash", GPU, {"length": 192}, "the row length 192 is not a multiple of 128"),
  ("cudnn_flash", GPU, {"capability": "7.5"}, "compute capability 8.0 or higher, not 7.5"),
  (
    "cudnn_flash",
    GPU,
    {"capability": "8.9", "head_dim": 256},
    r"256 .*128.*compute capability 9\.0, not 8\.9",
  ),
  ("cudnn_flash", GPU, {"soft_cap": 50.0}, "soft cap .*cuDNN"),
  ("mosaic_flash", HOPPER, {"platform": "cpu"}, "on NVIDIA GPUs, not on cpu"),
  ("mosaic_flash", HOPPER, {"capability": "8.0"}, r"compute capability 9\.0, not 8\.0"),
  ("mosaic_flash", HOPPER, {"capability": "10.0"}, r"compute capability 9\.0, not 10\.0"),
  ("mosaic_flash", HOPPER, {"context": 2}, r"split over 2 devices \(context\)"),
  ("mosaic_flash", HOPPER, {"head_dim": 520}, "head_dim 520 .*512 is not 128 to 512"),
  (
    "mosaic_flash",
    HOPPER,
    {"head_dim": 120, "value_dim": 120},
    "head_dim 120 .*120 is not 128 to 512",
  ),
  ("mosaic_flash", HOPPER, {"precision": Precision(dtype="float32")}, "float32 is neither bfloat16 nor float16"),
  ("mosaic_flash", HOPPER, {"probabilities": True}, "needs the probabilities"),
  ("mosaic_flash", HOPPER, {"length": 192}, "the row length 192 is not a multiple of 128"),
  ("mosaic_flash", HOPPER, {"causal": False}, "later keys"),
  ("splash", TPU, {"causal": False, "head_dim": 48, "value_dim": 48}, "heads of 48 and values of 48 .*64 wide"),
  ("splash", TPU, {"causal": False, "value_dim": 64}, "heads of 128 and values of 64 are not equal"),
  ("splash", TPU, {"platform": "cpu"}, "on TPUs, not on cpu"),
  ("splash", TPU, {"head_dim": 224, "value_dim": 128}, "head_dim 224 is not a multiple of 64"),
  ("splash", TPU, {"value_dim": 64}, "value heads of 64 are not a multiple of 128"),
  ("splash", TPU, {"precision": Precision(dtype="float32")}, "float32 is not bfloat16"),
  ("splash", TPU, {"precision": Precision(dtype="float16")}, "float16 is not bfloat16"),
  ("splash", TPU, {"bidirectional_images": True}, "bidirectional images"),
  ("splash", TPU, {"probabilities": True}, "needs the probabilities"),
  ("blockwise", GPU, {"length": 512}, "rows of 512 positions .*tile"),
  ("blockwise", GPU, {"length": 513, "probabilities": True}, "needs the probabilities"),
]


@pytest.mark.parametrize(("kernel", "case", "change", "reason"), REFUSED)
def test_a_kernel_that_cannot_is_refused_by_name_and_passed_by_automatically(kernel, case, change, reason):
  case = dataclasses.replace(case, **change)
  with pytest.raises(ValueError, match=rf"attention={kernel} .*{reason}.*\n  fix: .*attention=auto"):
    choose(kernel, case)
  assert choose("auto", case).name != kernel
  assert choose("dot_product", case).name == "dot_product"


def test_a_kernel_of_another_platform_is_refused():
  with pytest.raises(ValueError, match=r"attention=cudnn_flash .*on NVIDIA GPUs, not on tpu"):
    choose("cudnn_flash", TPU)
  with pytest.raises(ValueError, match=r"attention=splash .*on TPUs, not on gpu"):
    choose("splash", GPU)


def test_every_reason_is_told_at_once():
  case = dataclasses.replace(GPU, platform="cpu", head_dim=512, value_dim=512, precision=Precision(dtype="float32"))
  with pytest.raises(ValueError, match=r"cpu.*512.*float32"):
    choose("cudnn_flash", case)


@pytest.mark.parametrize(("platform", "fused"), [("gpu", "cudnn_flash"), ("cuda", "cudnn_flash"), ("tpu", "splash")])
def test_the_fast_kernel_is_taken_where_it_honors_everything(platform, fused: Any):
  case = dataclasses.replace(GPU, platform=platform)
  assert choose("auto", case).name == fused
  assert choose(fused, case).name == fused


def test_heads_of_512_have_a_kernel_on_hopper_gpus_where_jax_can_write_it(monkeypatch):
  for newest in (False, True):
    monkeypatch.setattr(jax, "__version_info__", (0, 11, 0) if newest else (0, 10, 2))
    for kernel, change in (
      ("mosaic_flash", {}),
      ("mosaic_flash", {"bidirectional_images": True, "length": 1024}),
      ("mosaic_flash", {"capability": None}),  # unknown if the program is compiled ahead of time
      ("cudnn_flash", {"head_dim": 256, "value_dim": 256}),
      ("dot_product", {"capability": "8.0"}),
    ):
      case = dataclasses.replace(HOPPER, **change)
      assert (choose("auto", case).name == kernel) == (newest or kernel != "mosaic_flash")
  monkeypatch.setattr(jax, "__version_info__", (0, 10, 2))
  with pytest.raises(ValueError, match=rf"mosaic_flash .*JAX 0\.11, .*{re.escape(jax.__version__)}"):
    choose("mosaic_flash", HOPPER)


def test_rows_of_several_documents_go_to_a_kernel_that_masks_none_where_there_is_one(monkeypatch):
  """cuDNN needs a mask for several documents, which makes it slow. ``auto`` then prefers mosaic_flash, which needs none."""
  monkeypatch.setattr(jax, "__version_info__", (0, 11, 0))
  case = dataclasses.replace(HOPPER, head_dim=256, value_dim=256, documents=True)
  without: Any = ("mosaic_flash",)
  assert [choose("auto", dataclasses.replace(case, documents=d)).name for d in (False, True)] == ["cudnn_flash", "mosaic_flash"]
  assert choose("auto", case, without).name == "cudnn_flash"
  assert choose("auto", case, ("cudnn_flash", *without)).name == "dot_product"
  assert choose("auto", dataclasses.replace(case, capability="8.0", head_dim=128, value_dim=128)).name == "cudnn_flash"
  # cuDNN does not support 256 on this device.
  assert choose("auto", dataclasses.replace(case, capability="8.0")).name == "dot_product"
  # mosaic_flash pads heads of 192. It is still chosen if queries see all earlier keys, but not with a window.
  narrow = dataclasses.replace(case, head_dim=128, value_dim=128)
  for change, name in (
    ({}, "mosaic_flash"), ({"window": 64}, "mosaic_flash"), ({"documents": False}, "cudnn_flash"),
    ({"head_dim": 192}, "mosaic_flash"), ({"head_dim": 192, "window": 64}, "cudnn_flash"),
    ({"head_dim": 192, "window": 256}, "mosaic_flash"),
    ({"head_dim": 64, "value_dim": 64}, "cudnn_flash"), ({"window": 64, "bidirectional_images": True}, "mosaic_flash"),
  ):  # fmt: skip
    assert choose("auto", dataclasses.replace(narrow, **change)).name == name
  assert choose("auto", dataclasses.replace(TPU, documents=True)).name == "splash"
  assert choose("mosaic_flash", case, without).name == "mosaic_flash"  # a kernel that is chosen by name is never replaced


def test_scores_with_a_soft_cap_go_past_cudnn(monkeypatch):
  monkeypatch.setattr(jax, "__version_info__", (0, 11, 0))
  capped = dataclasses.replace(GPU, soft_cap=50.0, length=1024)
  for change, name in (
    ({"capability": "9.0"}, "mosaic_flash"), ({"capability": "8.0"}, "blockwise"), ({"platform": "tpu"}, "splash"),
    ({"capability": "8.0", "length": 256}, "dot_product"),
  ):  # fmt: skip
    assert choose("auto", dataclasses.replace(capped, **change)).name == name


def test_plain_xla_goes_in_blocks_where_a_row_has_several():
  for choice in ("auto", "dot_product"):
    for length, name in ((512, "dot_product"), (513, "blockwise")):
      assert choose(choice, dataclasses.replace(GPU, platform="cpu", length=length)).name == name


def test_flags_that_a_fused_kernel_surpasses_are_named():
  """``surpasses`` returns the flags that request less precision than the kernel uses."""
  asked = dataclasses.replace(GPU, precision=Precision(float32_logits=False))
  assert registry.kernel("cudnn_flash").surpasses(asked) == ["float32_logits"]
  assert registry.kernel("cudnn_flash").surpasses(GPU) == []
  assert registry.kernel("dot_product").surpasses(asked) == []


def test_names_choices_and_modules_are_the_same():
  assert set(get_args(Choice)) == {"auto", *registry.NAMES}
  assert [registry.kernel(name).name for name in registry.NAMES] == list(registry.NAMES)


@pytest.mark.parametrize("platform", ["cpu", "gpu", "cuda", "tpu"])
def test_auto_imports_only_kernels_of_the_platform(platform, monkeypatch):
  case = dataclasses.replace(GPU, platform=platform)
  others: set[registry.Name] = {name for name in registry.NAMES if platform not in registry.PLATFORMS.get(name, (platform,))}
  assert others
  for name in others:
    assert f"not on {platform}" in " ".join(registry.kernel(name).refuses(case))
  asked = []
  find = registry.kernel
  monkeypatch.setattr(registry, "kernel", lambda name: asked.append(name) or find(name))
  choose("auto", case)
  assert set(asked) == set(registry.NAMES) - others


def test_the_configuration_can_ask_without_jax():
  """Importing the registry must not import JAX, so that code without JAX can use it."""
  code = "import sys, maxtext_like.layers.kernels.attention.registry; assert 'jax' not in sys.modules"
  assert subprocess.run([sys.executable, "-c", code]).returncode == 0
