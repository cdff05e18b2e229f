"""``maxtext-like compile``: arguments, errors and verdict; with libtpu on the machine, also a real compilation."""

import dataclasses
import json
import subprocess
import sys
from typing import Any

import pytest

import maxtext_like
from maxtext_like.capacity import aot_gpu, aot_tpu
from maxtext_like.capacity.aot_tpu import CompiledStep, Work, out_of_memory_bytes, xla_flags
from maxtext_like.capacity.compiled_program import Transfer
from maxtext_like.capacity.memory_layout import Held, MemoryLayout
from maxtext_like.capacity.roofline import Roofline
from maxtext_like.capacity.topologies import GIB, GPU_NAMES, TOPOLOGIES, find_gpus, find_topology, memory_of
from maxtext_like.cli import compile as command
from maxtext_like.cli.main import main
from maxtext_like.config.load import load_config
from maxtext_like.errors import UserError
from maxtext_like.layers.kernels.attention.registry import choose
from maxtext_like.training.step.program import make_program


def test_topologies_are_what_their_names_say():
  assert {name: t.libtpu_name for name, t in TOPOLOGIES.items() if t.chips <= 32} == {
    "v6e-1": "v6e:1x1", "v6e-4": "v6e:2x2", "v6e-8": "v6e:2x4", "v6e-16": "v6e:4x4", "v6e-32": "v6e:4x8",
  }  # fmt: skip
  assert all(t.chips == int(name.partition("-")[2]) for name, t in TOPOLOGIES.items())
  assert find_topology("v6e-256").hbm_bytes == 31.25 * GIB


@pytest.mark.parametrize(
  ("words", "message"),
  [
    (["gemma4-tiny"], "no topology"),
    (["gemma4-tiny", "topology=v6e-23"], "did you mean v6e-32"),
    (["gemma4-tiny", "topology=V6E_8"], "did you mean v6e-8"),
    (["gemma4-tiny", "--topology="], "no value"),
    (["gemma4-tiny", "topology"], "no value"),
    (["gemma4-tiny", "topology=v6e-8", "stepz=3"], "did you mean 'steps'"),
    (["gemma4-tiny", "topology=v6e-8", "xla_flags=some"], "one of base, all"),
    (
      ["gemma4-tiny", "topology=h200-16"],
      "1 to 8 of them (a run may have several hosts)\n  fix: topology=h200-8",
    ),
    (["gemma4-tiny", "topology=h100-0"], "GPUs of one host"),
    (["gemma4-tiny", "topology=A100-40"], "one host, or topology=a100-40gb if 40 GB is its memory"),
    (["gemma4-tiny", "topology=h202-8"], "did you mean h200-8"),
    (["gemma4-tiny", "topology=rtx4091"], "did you mean rtx4090-1"),
    (["gemma4-tiny", "topology=gpu"], "its memory is unknown\n  fix: add memory=24GB"),
    (["gemma4-tiny", "memory=24"], "memory=24: not the memory of a device\n  fix: memory=24GB"),
    (["gemma4-tiny", "topology=v6e-8", "memory=24GB"], "memory=24GB is for GPUs; a chip of v6e-8 has 31.25 GiB"),
    (["gemma4-tiny", "topology=cpu-8"], "unknown topology"),
    (["gemma4-tiny", "topology=h200", "xla_flags=all"], "xla_flags=all is only for TPUs"),
    (["gemma4-tiny", "topology=h200", "num_slices=2"], "num_slices=2 is only for TPUs"),
    (["gemma4-tiny", "topology=v6e-8", "num_slices=0"], "num_slices=0"),
    (["gemma4-tiny", "topology=v6e-8", "num_slices=two"], "two is not a value of num_slices"),
    (["gemma4-tiny", "topology=v6e-8", "machine_code=no"], "no is not a value of machine_code"),
    (["gemma4-tiny", "topology=h200-8", "stepz=3"], "did you mean 'steps'"),
  ],
)
def test_wrong_words(words, message, capsys):
  assert main(["compile", *words]) == 2
  assert message in capsys.readouterr().err


def test_own_words_in_every_spelling():
  own, others = command.split_own(
    ["a.yml", "--topology=v6e-8", "steps=3", "xla-flags=all", "num-slices=2", "machine_code=false"]
  )
  assert command.split_own(["--topology", "h200-8", "--memory", "24GB", "a.yml"])[0] == {"topology": "h200-8", "memory": "24GB"}
  assert own == {"topology": "v6e-8", "xla_flags": "all", "num_slices": 2, "machine_code": False}
  assert others == ["a.yml", "steps=3"]


def test_without_libtpu_the_error_says_what_to_install(monkeypatch, capsys):
  monkeypatch.setattr(aot_tpu.importlib.util, "find_spec", lambda name: None)
  assert main(["compile", "gemma4-tiny", "topology=v6e-1"]) == 2
  assert "pip install -e '.[tpu]'" in capsys.readouterr().err


def test_the_libtpu_that_jax_is_made_for(monkeypatch):
  monkeypatch.setattr(aot_tpu.importlib.metadata, "requires", lambda _: ["numpy>=2", "libtpu==0.0.50.*; extra == 'tpu'"])
  for installed, wanted in {"0.0.50.1": None, "0.0.42.1": "==0.0.50.*"}.items():
    monkeypatch.setattr(aot_tpu, "version", lambda _, installed=installed: installed)
    assert aot_tpu.other_libtpu_wanted() == wanted


def test_help_names_the_topologies():
  done = subprocess.run(
    [sys.executable, "-X", "importtime", "-m", "maxtext_like", "compile", "--help"], capture_output=True, text=True
  )
  assert done.returncode == 0
  assert "v6e-256" in done.stdout
  imported = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines()}
  assert "maxtext_like.config.load" in imported
  assert "jax" not in imported


@pytest.mark.parametrize(
  ("message", "gib"),
  [
    ("RESOURCE_EXHAUSTED: Ran out of memory in memory space hbm. Used 86.10G of 31.25G hbm. Exceeded hbm", 86.10),
    ("XLA:TPU compile permanent error. Ran out of memory in memory space hbm. Used 1.5T of 31.25G hbm.", 1536),
    ("the total memory required for HLO temporaries (34.07G) exceeds available HBM (31.25G).", None),
    ("Ran out of memory on HBM, the total memory required for HLO temporaries (34.07G) exceeds available", 34.07),
    ("RESOURCE_EXHAUSTED: Ran out of memory in memory space vmem. Used 20.1M of 16.00M vmem.", None),
    ("INVALID_ARGUMENT: No such compile option: 'xla_x'", None),
  ],
)
def test_what_the_compiler_says_about_memory(message, gib):
  found = out_of_memory_bytes(message)
  assert found is None if gib is None else found == int(gib * GIB)


def test_flags_have_the_types_that_the_compiler_takes():
  base, everything = xla_flags("base"), xla_flags("all")
  assert base["xla_jf_spmd_threshold_for_windowed_einsum_mib"] == "1000000"
  assert everything["xla_enable_async_all_gather"] is True
  assert base.items() < everything.items()
  with pytest.raises(UserError, match="xla_flags=most"):
    xla_flags("most")


def test_gpus_are_what_their_names_say(monkeypatch):
  monkeypatch.delenv("XLA_PYTHON_CLIENT_MEM_FRACTION", raising=False)
  one, eight = find_gpus("h200"), find_gpus("h200-8")
  assert one is not None
  assert eight is not None
  assert (one.name, one.gpus, eight.gpus, one.card) == ("h200-1", 1, 8, "NVIDIA H200")
  assert all((host := find_gpus(name)) and host.name == name for name in GPU_NAMES)
  assert not set(GPU_NAMES) & set(TOPOLOGIES)
  assert find_gpus("v6e-8") is find_gpus("h200-x") is None
  for spelled, name in {
    "RTX 4090": "rtx4090-1", "4090-2": "rtx4090-2", "NVIDIA GeForce RTX 3090": "rtx3090-1", "rtx-5090-8": "rtx5090-8",
    "H200_8": "h200-8", "A100-80GB": "a100-1", "a100-sxm4-40gb": "a100-40gb-1", "a100-40gb-4": "a100-40gb-4", "L40S": "l40s-1",
    "Tesla T4": "t4-1", "v100-16gb-2": "v100-2", "NVIDIA RTX A6000": "rtxa6000-1", "rtx 6000 ada": "rtx6000ada-1",
  }.items():  # fmt: skip
    assert (host := find_gpus(spelled)) is not None, spelled
    assert host.name == name
  assert find_gpus("a10-0x") is find_gpus("rtx4090ti") is None
  for size, count in {"24GB": 24 * 10**9, "22.5 GiB": 22.5 * GIB, "16384mib": 16 * GIB}.items():
    assert (host := find_gpus("gpu-2", size)) is not None
    assert (host.card_bytes, host.gpus, host.capability) == (count, 2, "8.0")
  # The limits that JAX 0.11.2 reported on the cards for this share. JAX rounds them up to its blocks.
  for card, limit in {"h100": 78_217_478_144, "h200": 138_101_653_504}.items():
    host = find_gpus(card)
    assert host is not None
    assert 0 <= limit - host.bytes < 2 << 20
    assert memory_of(host.card) == host.card_bytes


@pytest.mark.parametrize("value", ["0", "1.5", "-0.5", "nan", "most", "0.9x"])
def test_a_share_of_the_memory_that_is_none(value, monkeypatch, capsys):
  monkeypatch.setenv("XLA_PYTHON_CLIENT_MEM_FRACTION", value)
  assert main(["compile", "gemma4-tiny", "topology=h200"]) == 2
  assert f"XLA_PYTHON_CLIENT_MEM_FRACTION={value}: not a fraction" in capsys.readouterr().err


@pytest.mark.slow
def test_a_step_on_gpus_by_estimate(monkeypatch, capsys):
  """For comparison: XLA lays out 69.48 GB for this step with packed rows (docs/results/memory.md)."""
  monkeypatch.delenv("XLA_PYTHON_CLIENT_MEM_FRACTION", raising=False)
  monkeypatch.setenv("JAX_PLATFORMS", "cpu")
  monkeypatch.setattr(aot_gpu, "installed", lambda: None)
  words = ["compile", "gemma3-4b", "topology=h200", "per_device_batch_size=2", "packing=false"]  # same kernel in every JAX
  assert main(words) == 0
  fits = capsys.readouterr().out
  for part in (
    "3,880,263,168 parameters",
    "not compiled JAX's CUDA libraries are not installed (pip install -e '.[cuda]'",
    "total             69.33 GB",
    "138.10 GB",
    "fits by estimate",
  ):
    assert part in fits
  assert "temporaries" not in fits
  monkeypatch.setenv("XLA_PYTHON_CLIENT_MEM_FRACTION", ".4")
  assert main(words) == 4
  too_big = capsys.readouterr().out
  for part in (
    "60.04 GB  (0.4 of the 150.11 GB of one NVIDIA H200)",
    "does not fit by estimate: 115%",
    "per_device_batch_size=1 (now 2)",
  ):
    assert part in too_big
  assert main(["compile", "gemma4-tiny", "topology=h200-8", "ici_fsdp_parallelism=3"]) == 2
  assert "topology=h200-8: mesh: " in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.skipif(aot_gpu.installed() is None, reason="needs the extra cuda")
@pytest.mark.parametrize("topology", ["a100", "h100", "h200-2", "b200"])
def test_a_step_is_compiled_for_gpus(topology, monkeypatch, capsys):
  monkeypatch.setenv("JAX_PLATFORMS", "cpu")
  assert main(["compile", "gemma4-tiny", f"topology={topology}", "num_decoder_layers=6", "ici_fsdp_parallelism=-1"]) == 0
  said = capsys.readouterr().out
  assert "of temporaries\n" in said
  assert "  verdict      fits, with 0%" in said


@pytest.mark.slow
@pytest.mark.skipif(aot_gpu.installed() is None, reason="needs the extra cuda")
@pytest.mark.parametrize(("topology", "of_512"), [("a100", "blockwise"), ("h100", "mosaic_flash"), ("b200", "blockwise")])
def test_a_kernel_for_hopper_gpus_is_compiled_for_no_others(topology, of_512, monkeypatch):
  monkeypatch.setenv("JAX_PLATFORMS", "cpu")
  host = find_gpus(topology)
  assert host is not None
  config = load_config("gemma4-31b", ["num_decoder_layers=6", "dtype=bfloat16", "ici_fsdp_parallelism=1"]).config

  def looked_at(*args, **how):  # instead of a minute of compilation
    model = make_program(*args, **how).model
    mixer: Any = model.decoder.layers[5].mixer
    assert choose(mixer.cfg.kernel, mixer.case(4096, images=False)).name == model.kernels[1].kernel  # the choice in tracing
    raise UserError(model.kernels[1].kernel)

  monkeypatch.setattr("maxtext_like.training.step.program.make_program", looked_at)
  with pytest.raises(UserError, match=f"^{of_512}$"):
    aot_gpu.compile_step(config, host)


WORK = Work(
  flops=600e12, model_flops=450e12, memory_bytes=10**12,
  transfers=(Transfer("all-gather", 7 * 10**9, 7, asynchronous=True), Transfer("all-reduce", 10**8, 2, False, True)),
  roofline=Roofline(bounds={"matrix units": 0.6, "HBM": 0.5}, waiting=0.2, step=0.8, mfu=0.61, binds="HBM"),
)  # fmt: skip
LAYOUT = MemoryLayout(
  bytes=24 * GIB, classes={"parameters": 3 * GIB, "gaps": 2 * GIB, "batch": 5},
  largest=(Held(count=6, bytes=GIB, type="bf16[8,8]", kind="activations", path="jvp()/while", place="a.py:3"),), at="",
)  # fmt: skip
STEP = CompiledStep(
  topology=TOPOLOGIES["v6e-8"], mesh={"data": 1, "fsdp": 8}, parameters=1234567, argument_bytes=3 * GIB,
  peak_bytes=25 * GIB, layout=LAYOUT, work=WORK, seconds=12.3,
)  # fmt: skip
FAILED = {"out_of_memory": "Ran out", "layout": None, "work": None}


@pytest.mark.parametrize(
  ("change", "code", "told"),
  [
    ({}, 0, ["1,234,567", "peak         25.00 GiB of 31.25 GiB HBM per chip (80%)", "verdict      fits"]),
    ({}, 0, ["24.00 GiB laid out, at the fullest instant: parameters 3.00 GiB, gaps 2.00 GiB\n"]),
    ({}, 0, ["largest      6 x 1.00 GiB bf16[8,8], activations: a.py:3 jvp()/while"]),
    ({}, 0, ["600 TFLOP per chip and step, 1.33 times the model's 450"]),
    ({}, 0, ["all-gather: 7 per step, 7 GB through each chip, overlapped with computation\n"]),
    ({}, 0, ["all-reduce: 2 per step, 0.1 GB through each chip, exposed, between slices"]),
    ({}, 0, ["0.800 s per step: matrix units 0.600 s, memory", "61.0% MFU; limited by memory bandwidth; not"]),
    ({"machine_code": False}, 0, ["laid out     25.00 GiB of 31.25", "stopped before machine code\n"]),
    (
      {"machine_code": "quick", "quick_peak": 24 * GIB},
      0,
      [
        "laid out     25.00 GiB of 31.25",
        "peak         24.00 GiB, where libtpu",
        "code; machine code made with little optimization\n",
      ],
    ),
    # The verdict is about the program of a run, not about the one with little optimization.
    (
      {"machine_code": "quick", "quick_peak": 40 * GIB, "quick_words": "Ran out"},
      0,
      ["peak         40.00 GiB, needed where libtpu optimizes little: Ran out", "before machine code\n", "verdict      fits"],
    ),
    ({"peak_bytes": 40 * GIB, **FAILED}, 4, ["needed", "Ran out", "does not"]),
    ({"peak_bytes": None, **FAILED}, 4, ["3.00 GiB per chip", "does not fit"]),
  ],
)
def test_table_and_exit_code(change, code, told, capsys, monkeypatch):
  monkeypatch.setattr(aot_tpu, "compile_step", lambda *_, **__: dataclasses.replace(STEP, **change))
  monkeypatch.setattr(aot_tpu, "version", lambda package: "1.2")
  assert main(["compile", "gemma4-tiny", "topology=v6e-8"]) == code
  out = capsys.readouterr().out
  for words in told:
    assert words in out


def test_machine_code_is_one_of_three():
  wrong: Any = "true"
  with pytest.raises(UserError, match="machine_code='true'"):
    maxtext_like.compile_step("gemma4-tiny", topology="v6e-8", machine_code=wrong)


def test_what_does_not_fit_is_tried_with_other_values(monkeypatch, capsys, tmp_path):
  monkeypatch.setattr(aot_tpu, "version", lambda package: "1.2")
  asked = []

  def compiled(config, topology, flags, *, machine_code):
    t = config.training
    asked.append(
      (topology.name, t.remat_policy, t.remat_offload, t.per_device_batch_size, t.gradient_accumulation_steps, machine_code)
    )
    return dataclasses.replace(STEP, topology=topology, peak_bytes=(20 if topology.chips >= 32 else 40) * GIB)

  monkeypatch.setattr(aot_tpu, "compile_step", compiled)
  words = ["gemma4-tiny", "topology=v6e-8", "per_device_batch_size=4", "--json", str(tmp_path / "it.json")]
  assert main(["compile", *words]) == 4
  assert asked == [
    ("v6e-8", "none", "none", 4, 1, "quick"),
    ("v6e-8", "full", "none", 4, 1, False),
    ("v6e-8", "full", "layer_inputs", 4, 1, False),
    ("v6e-8", "full", "layer_inputs", 1, 4, False),
    ("v6e-16", "full", "layer_inputs", 1, 4, False),
    ("v6e-32", "full", "layer_inputs", 1, 4, False),
  ]
  values = "topology=v6e-32 remat_policy=full remat_offload=layer_inputs per_device_batch_size=1 gradient_accumulation_steps=4"
  out = capsys.readouterr().out
  assert "tried        remat_policy=full: does not fit, 40.00 GiB per chip" in out
  assert f"{values}: fits, 20.00 GiB per chip" in out
  assert f"does not fit: it fits with {values}" in out
  told = json.loads((tmp_path / "it.json").read_text())
  assert (told["fits"], told["peak_bytes"], told["work"]["roofline"]["mfu"]) == (False, 40 * GIB, 0.61)
  assert told["tried"][-1] == {"values": values.split(), "fits": True, "peak_bytes": 20 * GIB}
  assert told["layout"]["largest"][0]["place"] == "a.py:3"


@pytest.mark.parametrize("offload", ["kept", "all"])
def test_what_lies_on_the_host_is_what_layers_read_where_no_more_is_kept(offload, monkeypatch, capsys):
  monkeypatch.setattr(aot_tpu, "version", lambda package: "1.2")
  monkeypatch.setattr(aot_tpu, "compile_step", lambda *_, **__: dataclasses.replace(STEP, peak_bytes=40 * GIB))
  words = ["gemma4-tiny", "topology=v6e-256", "per_device_batch_size=1", "remat_policy=minimal", f"remat_offload={offload}"]
  assert main(["compile", *words]) == 4
  assert "tried        remat_policy=full remat_offload=layer_inputs: does not fit" in capsys.readouterr().out


@pytest.mark.tpu
def test_a_mesh_that_the_slice_has_not_got():
  config = load_config("gemma4-tiny", ["ici_fsdp_parallelism=3"]).config
  with pytest.raises(UserError, match="topology=v6e-8 num_slices=1: mesh"):
    aot_tpu.compile_step(config, TOPOLOGIES["v6e-8"], xla_flags())


@pytest.mark.tpu
def test_less_laid_out_than_there_are_arguments_is_no_verdict(monkeypatch):
  monkeypatch.setattr(aot_tpu, "_until_laid_out", lambda *_: "")
  monkeypatch.setattr(aot_tpu.memory_layout, "read_dump", lambda _: ("", None, dataclasses.replace(LAYOUT, bytes=5000)))
  with pytest.raises(RuntimeError, match=r"lays out 5,000 bytes .*parameters"):
    aot_tpu.compile_step(load_config("gemma4-tiny").config, TOPOLOGIES["v6e-8"], xla_flags(), machine_code=False)


@pytest.mark.tpu
def test_state_larger_than_a_chip_is_refused_without_compiling():
  config = load_config("gemma4-31b").config
  step = aot_tpu.compile_step(config, TOPOLOGIES["v6e-4"], xla_flags())
  assert not step.fits
  assert step.peak_bytes is None
  assert step.argument_bytes > 80 * GIB


def compiled_in_a_process(tmp_path, *words: str) -> dict:
  file = tmp_path / "it.json"
  words = (*words, "num_decoder_layers=1", "inhomogeneous_layer_cycle_interval=1", "--json", str(file))
  done = subprocess.run(
    [sys.executable, "-m", "maxtext_like", "compile", "gemma4-tiny", *words], capture_output=True, text=True
  )
  assert done.returncode == 0, done.stderr
  assert "verdict      fits" in done.stdout
  assert "WARNING" not in done.stderr
  return json.loads(file.read_text())


@pytest.mark.tpu
@pytest.mark.slow
def test_a_real_compilation_in_a_process_of_its_own(tmp_path):
  told = compiled_in_a_process(tmp_path, "topology=v6e-8")
  assert {t["kind"] for t in told["work"]["transfers"]} >= {"all-gather", "reduce-scatter"}
  assert not any(t["between_slices"] for t in told["work"]["transfers"])
  # Nothing is recomputed. The FLOPs exceed the model's only by the products of masked pairs.
  assert 1 <= told["work"]["flops"] / told["work"]["model_flops"] < 1.2
  assert any(key["verdict"] == "honored" for key in told["audit"])
  assert told["peak_bytes"] == told["layout"]["bytes"]
  assert told["argument_bytes"] < told["quick_peak_bytes"] < told["peak_bytes"] + (128 << 20)  # includes vector memory


@pytest.mark.tpu
@pytest.mark.slow
def test_machine_code_of_a_run(tmp_path):
  told = compiled_in_a_process(tmp_path, "topology=v6e-8", "machine_code=true")
  assert told["machine_code"] is True
  assert told["quick_peak_bytes"] is None
  assert told["peak_bytes"] != told["layout"]["bytes"]


@pytest.mark.tpu
@pytest.mark.slow
def test_two_slices_until_memory_is_laid_out(tmp_path):
  words = ("topology=v6e-4", "num_slices=2", "dcn_data_parallelism=2", "machine_code=false")
  told = compiled_in_a_process(tmp_path, *words)
  between = [t["kind"] for t in told["work"]["transfers"] if t["between_slices"]]
  assert between == ["all-reduce"]
  assert told["peak_bytes"] == told["layout"]["bytes"] == sum(told["layout"]["classes"].values())
