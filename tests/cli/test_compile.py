"""``maxtext-like compile``: its words, its errors, its verdict; with libtpu on the machine, a real compilation too."""

import dataclasses
import importlib.util
import subprocess
import sys

import pytest

from maxtext_like.cli import compile as command
from maxtext_like.cli.main import main
from maxtext_like.config.load import load_config
from maxtext_like.errors import UserError
from maxtext_like.training import ahead_of_time
from maxtext_like.training.ahead_of_time import CompiledStep, count_collectives, out_of_memory_bytes, xla_flags
from maxtext_like.training.topologies import GIB, GPU_NAMES, TOPOLOGIES, find_gpus, find_topology, memory_of

needs_libtpu = pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="libtpu is not installed")


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
    (["gemma4-tiny", "topology=h200-16"], "one host, of 1 to 8 GPUs\n  fix: topology=h200-8"),
    (["gemma4-tiny", "topology=h100-0"], "one host, of 1 to 8 GPUs"),
    (["gemma4-tiny", "topology=H200_8"], "did you mean h200-8"),
    (["gemma4-tiny", "topology=h200", "xla_flags=all"], "xla_flags=all is for TPUs"),
    (["gemma4-tiny", "topology=h200-8", "stepz=3"], "did you mean 'steps'"),
  ],
)
def test_wrong_words(words, message, capsys):
  assert main(["compile", *words]) == 2
  assert message in capsys.readouterr().err


def test_own_words_in_every_spelling():
  own, others = command.split_own(["a.yml", "--topology=v6e-8", "steps=3", "xla-flags=all"])
  assert (own, others) == ({"topology": "v6e-8", "xla_flags": "all"}, ["a.yml", "steps=3"])


def test_without_libtpu_the_error_says_what_to_install(monkeypatch, capsys):
  monkeypatch.setattr(ahead_of_time.importlib.util, "find_spec", lambda name: None)
  assert main(["compile", "gemma4-tiny", "topology=v6e-1"]) == 2
  assert "pip install -e '.[tpu]'" in capsys.readouterr().err


def test_the_libtpu_that_jax_is_made_for(monkeypatch):
  monkeypatch.setattr(ahead_of_time.importlib.metadata, "requires", lambda _: ["numpy>=2", "libtpu==0.0.50.*; extra == 'tpu'"])
  for installed, wanted in {"0.0.50.1": None, "0.0.42.1": "==0.0.50.*"}.items():
    monkeypatch.setattr(ahead_of_time, "version", lambda _, installed=installed: installed)
    assert ahead_of_time.other_libtpu_wanted() == wanted


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


def test_collectives_are_counted_once():
  hlo = """HloModule jit_step

%all-reduce-scatter.1 (input.5: bf16[64]) -> bf16[8] {
  %all-reduce.7 = bf16[64] all-reduce(%input.5), channel_id=6
  ROOT %dynamic-slice.38 = bf16[8] dynamic-slice(%all-reduce.7, %multiply.14)
}

ENTRY %main (p: f32[8]) -> f32[] {
  %ag.1 = (f32[8], f32[64]) all-gather-start(f32[8] %p), replica_groups={}
  %ag.2 = f32[64] all-gather-done((f32[8], f32[64]) %ag.1)
  %fusion.1 = bf16[8] fusion(%g), kind=kCustom, calls=%all-reduce-scatter.1
  %ag.3 = f32[64] all-gather(f32[8] %all-gather.7), dimensions={0}
  %rs = f32[8] reduce-scatter(f32[64] %y)
  ROOT %ar = f32[] all-reduce(f32[] %x), to_apply=%sum
}
"""
  assert count_collectives(hlo) == {"all-gather": 2, "reduce-scatter": 2, "all-reduce": 1}
  assert count_collectives("ROOT %add = f32[] add(%a, %b)") == {}


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
  # What JAX 0.11.2 gave with this share on the cards themselves, which rounds it up to its blocks.
  for card, limit in {"h100": 78_217_478_144, "h200": 138_101_653_504}.items():
    host = find_gpus(card)
    assert host is not None
    assert 0 <= limit - host.bytes < 2 << 20
    assert memory_of(host.card) == host.card_bytes


@pytest.mark.parametrize("value", ["0", "1.5", "-0.5", "nan", "most", "0.9x"])
def test_a_share_of_the_memory_that_is_none(value, monkeypatch, capsys):
  monkeypatch.setenv("XLA_PYTHON_CLIENT_MEM_FRACTION", value)
  assert main(["compile", "gemma4-tiny", "topology=h200"]) == 2
  assert f"XLA_PYTHON_CLIENT_MEM_FRACTION={value}: not a share" in capsys.readouterr().err


def test_a_step_on_gpus_by_estimate(monkeypatch, capsys):
  """XLA took 82.7 GB for this step on an H100, and ended it for want of memory: docs/compile.md."""
  monkeypatch.delenv("XLA_PYTHON_CLIENT_MEM_FRACTION", raising=False)
  monkeypatch.setenv("JAX_PLATFORMS", "cpu")
  words = ["compile", "gemma3-4b", "topology=h200", "per_device_batch_size=2"]
  assert main(words) == 0
  fits = capsys.readouterr().out
  for part in (
    "3,880,263,168 parameters",
    "nothing was compiled",
    "together          82.36 GB",
    "138.10 GB",
    "fits by estimate",
  ):
    assert part in fits
  assert "temporaries" not in fits
  monkeypatch.setenv("XLA_PYTHON_CLIENT_MEM_FRACTION", ".4")
  assert main(words) == 4
  too_big = capsys.readouterr().out
  for part in ("60.04 GB  (0.4 of the 150.11 GB of an NVIDIA H200)", "does not fit: 137%", "per_device_batch_size=1 (now 2)"):
    assert part in too_big
  assert main(["compile", "gemma4-tiny", "topology=h200-8", "ici_fsdp_parallelism=3"]) == 2
  assert "topology=h200-8: mesh: " in capsys.readouterr().err


STEP = CompiledStep(
  topology=TOPOLOGIES["v6e-8"], mesh={"data": 1, "fsdp": 8}, parameters=1234567, argument_bytes=3 * GIB,
  peak_bytes=25 * GIB, temporary_bytes=40 * GIB, collectives={"all-gather": 7, "all-reduce": 2}, seconds=12.3,
)  # fmt: skip


@pytest.mark.parametrize(
  ("change", "code", "told"),
  [
    ({}, 0, ["1,234,567", "25.00 GiB of 31.25 GiB HBM a chip (80%)", "9 in the program", "7 all-gather", "fits"]),
    ({"peak_bytes": 32 * GIB}, 4, ["32.00 GiB of 31.25", "does not fit: try topology=v6e-16"]),
    ({"peak_bytes": 40 * GIB, "out_of_memory": "Ran out", "temporary_bytes": None}, 4, ["needed", "Ran out", "does not"]),
    ({"peak_bytes": None, "out_of_memory": "alone", "temporary_bytes": None}, 4, ["3.00 GiB a chip", "does not fit"]),
    ({"collectives": None}, 0, ["cannot print the program"]),
    ({"collectives": {}}, 0, ["none"]),
  ],
)
def test_table_and_exit_code(change, code, told, capsys, monkeypatch):
  monkeypatch.setattr(ahead_of_time, "compile_step", lambda *_: dataclasses.replace(STEP, **change))
  monkeypatch.setattr(ahead_of_time, "version", lambda package: "1.2")
  assert main(["compile", "gemma4-tiny", "topology=v6e-8"]) == code
  out = capsys.readouterr().out
  for words in told:
    assert words in out


@needs_libtpu
def test_a_mesh_that_the_slice_has_not_got():
  config = load_config("gemma4-tiny", ["ici_fsdp_parallelism=3"]).config
  with pytest.raises(UserError, match="topology=v6e-8: mesh"):
    ahead_of_time.compile_step(config, TOPOLOGIES["v6e-8"], xla_flags())


@needs_libtpu
def test_state_larger_than_a_chip_is_refused_without_compiling():
  config = load_config("gemma4-31b").config
  step = ahead_of_time.compile_step(config, TOPOLOGIES["v6e-4"], xla_flags())
  assert not step.fits
  assert step.peak_bytes is None
  assert step.argument_bytes > 80 * GIB


@needs_libtpu
@pytest.mark.slow
def test_a_real_compilation_in_a_process_of_its_own():
  words = ["gemma4-tiny", "topology=v6e-4", "num_decoder_layers=1", "inhomogeneous_layer_cycle_interval=1"]
  done = subprocess.run([sys.executable, "-m", "maxtext_like", "compile", *words], capture_output=True, text=True)
  assert done.returncode == 0, done.stderr
  assert "verdict      fits" in done.stdout
  assert "all-gather" in done.stdout
  assert "WARNING" not in done.stderr
