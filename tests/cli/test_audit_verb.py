"""``maxtext-like audit``: arguments, exit codes and tables; with libtpu on the machine, also a compiled program."""

import json
import subprocess
import sys

import pytest

from maxtext_like.cli.main import main
from maxtext_like.layers.kernels.attention import dot_product

SMALL = ["gemma4-tiny", "num_decoder_layers=1", "inhomogeneous_layer_cycle_interval=1", "dtype=bfloat16"]


@pytest.mark.parametrize(
  ("words", "message"),
  [
    (["gemma4-tiny"], "no platform\n  fix: name one of tpu, cuda, cpu"),
    (["gemma4-tiny", "--platform", "gpu"], "platform gpu is not one of tpu, cuda, cpu"),
    (["gemma4-tiny", "--topology", "v6e-23"], "did you mean v6e-32"),
    (["gemma4-tiny", "--topology=v6e-8", "--platform=cuda"], "topology v6e-8 is a TPU slice, but platform is cuda"),
    (["gemma4-tiny", "--platform"], "no value"),
    (["--platform", "tpu"], "the model is missing"),
    (["gemma4-tiny", "--platform", "tpu", "stepz=3"], "did you mean 'steps'"),
    (["gemma4-tiny", "--platform", "cpu", "attention=splash", "dtype=bfloat16"], "it runs on TPUs, not on cpu"),
    ([*SMALL, "--platform", "cpu", "layer_precision=[0 dtype=float32]"], "audit: layer_precision"),
  ],
)
def test_wrong_words(words, message, capsys):
  assert main(["audit", *words]) == 2
  assert message in capsys.readouterr().err


def test_an_honest_program(tmp_path, capsys):
  file = tmp_path / "audit.json"
  assert main(["audit", *SMALL, "--platform", "cuda", "max_target_length=128", "--json", str(file)]) == 0
  out = capsys.readouterr().out
  assert out.startswith("gemma4-tiny, bfloat16: train step lowered for cuda, before compilation, mesh data 1 x fsdp 1\n")
  assert "attention: cudnn_flash in 1 of 1 layers, not self-tested: there is no device" in out
  assert "cuDNN attention: float32 scores, softmax and accumulators inside the kernel" in out
  assert out.endswith("work in a dtype that no key asked for: none\n")
  found = json.loads(file.read_text())
  assert (found["platform"], found["kernels"][0]["kernel"], found["unasked"]) == ("cuda", "cudnn_flash", [])
  fused = [r for r in found["sites"] if r["site"] == "cuDNN attention"]
  assert {(r["stage"], r["operation"], r["places"]) for r in fused} == {
    ("forward", "__cudnn$fmhaScaleBiasSoftmax", 1), ("backward", "__cudnn$fmhaScaleBiasSoftmaxBackward", 1),
  }  # fmt: skip
  assert all(r["operands"] == "bf16 x bf16 x bf16" and r["accumulation"] == "f32" for r in fused)
  verdicts = {k["key"]: k for k in found["keys"]}
  assert verdicts["float32_logits"]["verdict"] == "honored"
  assert "fused kernels" in verdicts["float32_logits"]["evidence"]


def test_a_key_that_is_not_honored_ends_with_3(monkeypatch, capsys):
  softmax = dot_product.masked_softmax
  monkeypatch.setattr(dot_product, "masked_softmax", lambda s, mask: softmax(s.astype("bfloat16"), mask))
  assert main(["audit", *SMALL, "--platform=tpu"]) == 3
  (line,) = [row for row in capsys.readouterr().out.splitlines() if row.startswith("float32_logits")]
  assert "not honored" in line
  assert "of the softmax bf16, not f32" in line


def test_help_needs_no_jax():
  done = subprocess.run(
    [sys.executable, "-X", "importtime", "-m", "maxtext_like", "audit", "--help"], capture_output=True, text=True
  )
  assert done.returncode == 0
  assert "--topology NAME" in done.stdout
  imported = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines()}
  assert "jax" not in imported
  assert "numpy" not in imported


@pytest.mark.tpu
@pytest.mark.slow
def test_a_compiled_program_in_a_process_of_its_own():
  words = [*SMALL, "--topology", "v6e-4"]
  done = subprocess.run([sys.executable, "-m", "maxtext_like", "audit", *words], capture_output=True, text=True)
  assert done.returncode == 0, done.stdout + done.stderr
  assert "train step compiled for v6e-4, mesh data 1 x fsdp 4" in done.stdout
  assert "results of q.k f32" in done.stdout
