"""Tests the choice of attention kernels for layers: the effect of self-tests, their stored verdicts, and the messages about
them."""

import collections
import contextlib
import dataclasses
import json
import threading
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import pytest

from maxtext_like.cli.main import main
from maxtext_like.config.load import load_config
from maxtext_like.errors import UserError
from maxtext_like.layers.kernels.attention import registry
from maxtext_like.layers.kernels.attention.registry import choose
from maxtext_like.layers.vision.attention import case_of
from maxtext_like.models import attention_kernels, kernel_verdicts
from maxtext_like.models.attention_kernels import Rows, plain_tower, settle
from maxtext_like.models.build import build_decoder, precision_of
from maxtext_like.models.kernel_verdicts import Target
from maxtext_like.models.model import make_model
from maxtext_like.numerics.attention_selfcheck import CaseResult
from maxtext_like.training.step.program import make_program
from tests.training.small import small_config

GPU = SimpleNamespace(device_kind="NVIDIA H000", platform="gpu", client=SimpleNamespace(platform_version="cuda 13"))
GOOD = [CaseResult(name=name, error=1e-3, gradient_error=2e-3) for name in ("window", "segments")]
BAD = [GOOD[0], CaseResult(name="segments", error=0.5, gradient_error=None, problem="dq: 3 of 9 numbers are not finite")]
RAISED = [CaseResult(name="window", problem="NotImplementedError: head_dim must be <= 128", raised=True)]


def gpu(capability: str) -> Target:
  return Target(platform="gpu", capability=capability, device=GPU)


def decoder(attention: Any = "auto", model="gemma4-tiny", layer_precision=()):
  config = small_config(model, "dtype=bfloat16")
  return build_decoder(
    config.model, precision_of(config.precision), attention=attention, platform="gpu", layer_precision=layer_precision
  )


def decide(
  results: Any, *, attention: Any = "auto", cache=None, model="gemma4-tiny", device: Any = GPU, length=256, images=False,
  layer_precision=(),
):  # fmt: skip
  """Return (kernels of the layers, uses, shapes that were self-tested)."""
  ran = []

  def test(shape) -> Any:
    ran.append(shape)
    return results(shape) if callable(results) else results

  rows, target = Rows(length=length, images=images), Target(platform="gpu", device=device, cache=cache)
  settled, uses = settle(decoder(attention, model, layer_precision), rows, target, test=test)
  return [traced(layer, length, images=images) for layer in settled.layers], uses, ran


def traced(layer: Any, length: int, *, images: bool = False) -> str:
  """Return the kernel that a layer chooses when it is traced, for packed rows."""
  mixer = layer.mixer
  return choose(mixer.cfg.kernel, mixer.case(length, images=images, documents=True), mixer.cfg.failed).name


@pytest.fixture(autouse=True)
def any_device(monkeypatch):
  """Replace ``default_device``, which requires a real device. The devices of these tests only have a name."""
  monkeypatch.setattr(jax, "default_device", lambda device: contextlib.nullcontext())


def test_a_kernel_that_passes_is_used():
  layers, uses, ran = decide(GOOD)
  assert set(layers) == {"cudnn_flash"}
  assert {use.kernel for use in uses if use.shape} == {"cudnn_flash"}
  assert all(shape.segments and shape.length == 256 for shape in ran)
  assert len(ran) == len(set(ran))
  assert "self-test passed on NVIDIA H000 in 0 s" in str(uses[0])


def test_the_kernel_for_heads_of_512_falls_back_alone_where_it_fails_its_test(monkeypatch):
  monkeypatch.setattr(jax, "__version_info__", (0, 11, 0))
  config = load_config("gemma4-31b", ["num_decoder_layers=6", "dtype=bfloat16"]).config
  model = build_decoder(config.model, precision_of(config.precision), platform="gpu")

  def uses(capability: str, bad: str) -> list[Any]:
    def test(shape) -> Any:
      return BAD if shape.kernel == bad else GOOD

    decoder, found = settle(
      model,
      Rows(length=4096, segments=False),
      gpu(capability),
      test=test,
    )
    mixers: list[Any] = [layer.mixer for layer in decoder.layers]
    names = collections.Counter(choose(m.cfg.kernel, m.case(4096, images=False), m.cfg.failed).name for m in mixers)
    assert names == {use.kernel: use.layers for use in found}
    return list(found)

  for bad, of_512 in ("", "mosaic_flash"), ("mosaic_flash", "blockwise"):
    found = uses("9.0", bad)
    assert [(use.kernel, use.layers) for use in found] == [("cudnn_flash", 5), (of_512, 1)]
    assert bool(found[1].problem) == bool(bad)
  # cuDNN supports heads of more than 128 only from compute capability 9.0 on.
  assert [(use.kernel, use.layers) for use in uses("8.0", "")] == [("blockwise", 6)]


def test_packed_rows_fall_back_to_the_kernel_that_masks_their_documents_and_then_to_plain_xla(monkeypatch):
  monkeypatch.setattr(jax, "__version_info__", (0, 11, 0))
  config = load_config("gemma4-31b", ["num_decoder_layers=6", "dtype=bfloat16"]).config
  model = build_decoder(config.model, precision_of(config.precision), platform="gpu")
  for bad, kernel in ((), "mosaic_flash"), (("mosaic_flash",), "cudnn_flash"), (("mosaic_flash", "cudnn_flash"), "blockwise"):
    test: Any = lambda shape, bad=bad: BAD if shape.kernel in bad else GOOD
    settled, uses = settle(model, Rows(length=4096), gpu("9.0"), test=test)
    local = [layer for layer in settled.layers if layer.mixer.case(4096, images=False).window]
    assert {traced(layer, 4096) for layer in local} == {kernel}
    use = uses[0]
    assert (use.kernel, use.layers, use.failed, use.problem.count("not finite")) == (kernel, 5, bad, len(bad))
    assert f" instead of {' and '.join(bad)} in 5 of 6 layers" in str(use) or not bad


def test_layers_with_a_soft_cap_are_tested_with_one_and_have_another_kernel_than_cudnn(monkeypatch):
  monkeypatch.setattr(jax, "__version_info__", (0, 11, 0))
  for words, kernel in ([], "cudnn_flash"), (["attn_logits_soft_cap=50"], "mosaic_flash"):
    config = load_config("gemma3-4b", ["num_decoder_layers=6", "dtype=bfloat16", *words]).config
    model = build_decoder(config.model, precision_of(config.precision), platform="gpu")
    ran: list[Any] = []
    test: Any = lambda shape, ran=ran: (ran.append(shape), GOOD)[1]
    settle(model, Rows(length=4096, segments=False), gpu("9.0"), test=test)
    assert {(shape.kernel, shape.soft_cap) for shape in ran} == {(kernel, bool(words))}


def test_layers_that_see_images_have_a_verdict_of_their_own(monkeypatch):
  monkeypatch.setattr(jax, "__version_info__", (0, 11, 0))
  config = load_config("gemma4-31b", ["num_decoder_layers=6", "dtype=bfloat16"]).config
  model = build_decoder(config.model, precision_of(config.precision), platform="gpu")
  ran = []

  def test(shape) -> Any:
    ran.append(shape)
    return BAD if shape.images else GOOD

  # After a failure the next kernel is tried. No other fused kernel supports these layers. Shapes are tested at the same time,
  # in any order.
  for images, local in ((True, ("mosaic_flash", True, True)), (False, ("cudnn_flash", True, False))):
    ran.clear()
    settle(model, Rows(length=4096, images=images, segments=False), gpu("9.0"), test=test)
    found = [(shape.kernel, shape.window, shape.images) for shape in ran]
    assert sorted(found) == sorted([local, ("mosaic_flash", False, False)])


@pytest.mark.parametrize("bad", [False, True])
def test_a_vision_tower_has_a_verdict_of_its_own(bad):
  config = load_config("gemma4-31b", ["num_decoder_layers=6", "dtype=bfloat16", "use_multimodal=true"]).config
  model = build_decoder(config.model, precision_of(config.precision), vision=config.vision, platform="gpu")
  ran = []

  def test(shape) -> Any:
    ran.append(shape)
    return BAD if bad and not shape.causal else GOOD

  patches = config.vision.patches
  settled, uses = settle(model, Rows(length=256, patches=patches), gpu("8.0"), test=test)
  # Heads of 256 need a newer GPU, so only the tower is tested.
  assert [(s.kernel, s.head_dim, s.causal, s.segments) for s in ran] == [("cudnn_flash", 72, False, True)]
  tower = settled.cfg.vision
  assert (tower.failed, tower.capability) == (("cudnn_flash",) if bad else (), "8.0")
  name = choose(tower.kernel, case_of(tower, settled.precision, patches), tower.failed).name
  assert (uses[-1].kernel, uses[-1].layers, uses[-1].tower) == (name, 27, True)
  assert name == ("blockwise" if bad else "cudnn_flash")
  words = "blockwise instead of cudnn_flash" if bad else "cudnn_flash"
  assert str(uses[-1]).startswith(f"{words} in 27 of 27 layers of the vision tower")
  without, uses = settle(model, Rows(length=256), gpu("8.0"), test=test)
  assert not any(use.tower for use in uses)
  assert plain_tower(without).cfg.vision.kernel == "dot_product"


@pytest.mark.parametrize("results", [BAD, RAISED])
def test_auto_falls_back_and_says_why(results):
  layers, uses, _ = decide(results)
  assert set(layers) == {"dot_product"}
  failed = [use for use in uses if use.shape]
  assert {use.kernel for use in failed} == {"dot_product"}
  assert sum(use.layers for use in uses) == uses[0].of == len(layers)
  words = str(failed[0])
  assert "dot_product instead of cudnn_flash" in words
  assert f"failed its self-test on NVIDIA H000: {failed[0].shape}: {results[-1].name}: {results[-1].problem}" in words


def test_layers_whose_kernel_passes_keep_it():
  """The kernel fails in layers with a window and passes in global layers."""
  layers, uses, _ = decide(lambda shape: BAD if shape.window else GOOD)
  windows = [layer.mixer.case(256, images=False).window for layer in decoder().layers]
  assert layers == ["dot_product" if window else "cudnn_flash" for window in windows]
  assert {"dot_product", "cudnn_flash"} == {use.kernel for use in uses if use.shape}


def test_an_explicit_kernel_is_refused_with_the_case_that_failed():
  message = "attention=cudnn_flash failed its self-test on NVIDIA H000: .*: segments: dq: 3 of 9 .*\n  fix: attention=auto"
  with pytest.raises(UserError, match=message):
    decide(BAD, attention="cudnn_flash")
  assert set(decide(GOOD, attention="cudnn_flash")[0]) == {"cudnn_flash"}


def test_an_explicit_kernel_that_cannot_is_refused_before_any_test():
  with pytest.raises(UserError, match="the row length 192 is not a multiple of 128"):
    decide(GOOD, attention="cudnn_flash", length=192)


def test_without_a_device_nothing_is_tested_and_that_is_said():
  layers, uses, ran = decide(BAD, device=None)
  assert not ran
  assert set(layers) == {"cudnn_flash"}
  assert "cudnn_flash in" in str(uses[0])
  assert str(uses[0]).endswith("not self-tested: there is no device")


def test_layers_that_no_fused_kernel_can_do_are_not_tested():
  cases: list[dict[str, Any]] = [{"length": 200}, {"model": "gemma3-tiny", "images": True}, {"model": "deepseek3.2-tiny"}]
  for case in cases:
    layers, uses, ran = decide(BAD, **case)
    assert not ran
    assert set(layers) == {"dot_product"}
    assert all(use.kernel == "dot_product" and use.shape is None for use in uses)


def test_a_layer_with_a_dtype_of_its_own_gets_a_kernel_of_its_own():
  layers, uses, _ = decide(GOOD, layer_precision=("1 dtype=float32",))
  assert [layer for layer, name in enumerate(layers) if name != "cudnn_flash"] == [1]
  assert {(use.kernel, use.layers) for use in uses if use.shape is None} == {("dot_product", 1)}
  assert sum(use.layers for use in uses) == len(layers)
  with pytest.raises(UserError, match=r"attention=cudnn_flash .*dtype float32 is neither"):
    decide(GOOD, attention="cudnn_flash", layer_precision=("1 dtype=float32",))


def test_long_rows_say_that_they_go_in_blocks():
  for model in ("deepseek3-tiny", "gemma4-tiny"):
    _, uses, _ = decide(GOOD, attention="dot_product", model=model, length=600)
    assert [str(use) for use in uses] == [f"blockwise in {uses[0].of} of {uses[0].of} layers"]
    assert uses[0].is_notable
  _, uses, _ = decide(GOOD, attention="dot_product", length=512)
  assert not uses[0].is_notable


def test_a_kernel_that_is_more_exact_than_a_flag_asks_is_told():
  config = small_config("gemma4-tiny", "dtype=bfloat16", "float32_logits=false")
  model = build_decoder(config.model, precision_of(config.precision), platform="gpu")
  _, uses = settle(model, Rows(length=256), Target(platform="gpu"))
  assert "in float32" in str(uses[0])
  assert "float32_logits=false" in str(uses[0])


def test_a_verdict_is_kept_beside_the_compiled_programs(tmp_path):
  for results, passes in ((GOOD, True), (BAD, False)):
    cache = str(tmp_path / str(passes))
    _, first, ran = decide(results, cache=cache)
    _, again, ran_again = decide(RAISED, cache=cache)
    assert ran
    assert not ran_again
    assert [use.kernel for use in again] == [use.kernel for use in first]
    assert [use.problem for use in again] == [use.problem for use in first]
    assert ("passed on NVIDIA H000 earlier" in str(again[0])) == passes
  (file, *_) = (tmp_path / "True" / kernel_verdicts.FOLDER).iterdir()
  assert json.loads(file.read_text())["cases"][0] == dataclasses.asdict(GOOD[0])
  assert file.suffix == ".json"


def test_verdicts_that_come_with_the_environment_are_read(tmp_path, monkeypatch):
  assert decide(GOOD, cache=str(tmp_path))[2]
  assert decide(GOOD)[2]
  monkeypatch.setattr(kernel_verdicts, "SHIPPED", tmp_path / kernel_verdicts.FOLDER)
  layers, uses, ran = decide(RAISED)
  assert not ran
  assert set(layers) == {"cudnn_flash"}
  assert "passed on NVIDIA H000 earlier" in str(uses[0])


def test_the_first_choices_of_all_layers_are_tested_at_the_same_time():
  together = threading.Barrier(2)

  def test(shape) -> Any:
    together.wait(timeout=60)
    return BAD if shape.window else GOOD

  assert {use.kernel: use.layers for use in decide(test)[1]} == {"dot_product": 4, "cudnn_flash": 2}


def test_another_device_version_or_flag_is_tested_again(tmp_path, monkeypatch):
  cache = str(tmp_path)
  count = len(decide(GOOD, cache=cache)[2])
  other = SimpleNamespace(device_kind="NVIDIA H001", platform="gpu", client=GPU.client)
  assert len(decide(GOOD, cache=cache, device=other)[2]) == count
  newer = SimpleNamespace(device_kind="NVIDIA H000", platform="gpu", client=SimpleNamespace(platform_version="cuda 14"))
  assert len(decide(GOOD, cache=cache, device=newer)[2]) == count
  monkeypatch.setenv("XLA_FLAGS", "--xla_gpu_deterministic_ops=true")
  assert len(decide(GOOD, cache=cache)[2]) == count
  assert len(decide(GOOD, cache=cache)[2]) == 0


def test_a_kernel_that_raised_is_tried_again_by_the_next_run(tmp_path):
  assert decide(RAISED, cache=str(tmp_path))[2]
  assert set(decide(GOOD, cache=str(tmp_path))[0]) == {"cudnn_flash"}


@pytest.mark.parametrize("text", ["", "{", "[]", '{"problem": 3}', '{"problem": ""}', "\udcff"])
def test_a_damaged_verdict_is_ignored_with_a_note(tmp_path, text, caplog):
  decide(GOOD, cache=str(tmp_path))
  for file in (tmp_path / kernel_verdicts.FOLDER).iterdir():
    file.write_bytes(text.encode("utf-8", "surrogateescape"))
  layers, _, ran = decide(BAD, cache=str(tmp_path))
  assert ran
  assert set(layers) == {"dot_product"}
  assert "testing the kernel again" in caplog.text
  caplog.clear()
  assert not decide(GOOD, cache=str(tmp_path))[2]  # the verdict was written again
  assert not caplog.text


def test_a_verdict_of_another_key_under_this_name_is_not_believed(tmp_path, caplog):
  decide(GOOD, cache=str(tmp_path))
  for file in (tmp_path / kernel_verdicts.FOLDER).iterdir():
    file.write_text(json.dumps(json.loads(file.read_text()) | {"device": "another"}))
  assert decide(BAD, cache=str(tmp_path))[2]
  assert "for another kernel or version" in caplog.text


def test_a_folder_that_cannot_be_written_costs_only_the_memory(tmp_path, caplog):
  """If a verdict cannot be stored, the kernel is still used, and a warning is logged."""
  (tmp_path / kernel_verdicts.FOLDER).write_text("a file where the folder should be")
  layers, _, ran = decide(GOOD, cache=str(tmp_path))
  assert ran
  assert set(layers) == {"cudnn_flash"}
  assert "cannot store the verdict" in caplog.text


def test_one_process_that_fails_decides_for_all(monkeypatch):
  from jax.experimental import multihost_utils

  monkeypatch.setattr(jax, "process_count", lambda: 3)
  monkeypatch.setattr(multihost_utils, "process_allgather", lambda x: np.asarray([False, True, bool(x)]))
  layers, uses, _ = decide(GOOD)
  assert set(layers) == {"dot_product"}
  assert "in process 1 of this run" in str(next(use for use in uses if use.shape))


def test_the_cpu_runs_attention_written_out_and_tests_nothing():
  program = make_program(small_config("gemma4-tiny", "dtype=bfloat16"))
  assert [(use.kernel, use.shape) for use in program.model.kernels] == [("dot_product", None)]
  assert program.model.kernels[0].to_json()["kernel"] == "dot_product"


def test_an_explicit_kernel_of_another_platform_is_refused_when_the_run_is_put_together():
  config = small_config("gemma4-tiny", "dtype=bfloat16", "attention=cudnn_flash")
  with pytest.raises(UserError, match="it runs on NVIDIA GPUs, not on cpu"):
    make_program(config)
  assert make_model(config, runs_attention=False).kernels == ()


# These keys start one run of a real program. Its layers would choose splash, which does not run on a CPU.
RUN = ["gemma4-tiny", "num_decoder_layers=1", "inhomogeneous_layer_cycle_interval=1", "emb_dim=32", "mlp_dim=48"]
RUN += ["max_target_length=16", "per_device_batch_size=2", "steps=1", "dataset_documents_max=40", "eval_fraction=0.2"]
RUN += ["enable_checkpointing=false", "resume=false", "enable_tensorboard=false", "compilation_cache_dir=null"]


@pytest.fixture
def splash_everywhere(monkeypatch):
  monkeypatch.setattr(
    attention_kernels, "choose", lambda kernel, case, without: registry.kernel("dot_product" if without else "splash")
  )


@pytest.mark.slow
def test_a_run_says_at_its_start_and_in_env_json_what_it_fell_back_to(splash_everywhere, tmp_path, capsys):
  assert main(["train", *RUN, f"output_dir={tmp_path}", "run_name=r"]) == 0
  out = capsys.readouterr().out
  assert "kernel  dot_product instead of splash in 1 of 1 layers: failed its self-test on cpu: splash, float32, " in out
  cases = "causal, segments, fully masked rows, strongly negative scores, length % 128 == 16"
  assert f"{cases}: ValueError: Only interpret mode is supported on CPU backend" in out
  (use,) = json.loads((tmp_path / "r/env.json").read_text())["kernels"]
  assert (use["kernel"], use["shape"]["kernel"], use["tested"]) == ("dot_product", "splash", "cpu")
  assert "Only interpret mode" in use["problem"]


def test_a_run_with_a_kernel_that_was_named_and_failed_is_refused(splash_everywhere, tmp_path, capsys):
  assert main(["train", *RUN, f"output_dir={tmp_path}", "run_name=r", "attention=splash"]) == 2
  assert "attention=splash failed its self-test on cpu: splash, float32" in capsys.readouterr().err
  assert not (tmp_path / "r").exists()
