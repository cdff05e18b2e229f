"""Programs of real models: with the three module APIs, with and without scan, on one device and on eight."""

import json
import re
import subprocess
import sys

import jax
import numpy as np
import pytest

from maxtext_like.analysis.lowered import lower
from maxtext_like.errors import UserError
from maxtext_like.training.step.program import make_program
from maxtext_like.training.step.train_step import UNKNOWN
from tests.processes import ROOT, environment
from tests.tiers import nightly
from tests.training.small import batches, losses, small_config
from tests.training.test_parallelism import FEWER


@pytest.mark.parametrize("model", ["gemma4-tiny", "deepseek3.2-tiny"])
@pytest.mark.slow
def test_the_faces_are_one_program(model):
  config = small_config(model, *FEWER[model])
  texts = {api: make_program(config, module_api=api).lower_step().as_text() for api in ("plain", "linen", "nnx")}
  assert texts["plain"] == texts["linen"] == texts["nnx"]


@pytest.mark.nightly  # tests/layers/test_decoder.py and tests/models/test_golden.py compare values and gradients
def test_scan_on_and_off_give_the_same_losses():
  few = ["num_decoder_layers=4", "inhomogeneous_layer_cycle_interval=2"]  # two rows of a scanned block
  scanned, looped = (losses(small_config("gemma4-tiny", *few, f"scan_layers={scan}")) for scan in ("true", "false"))
  np.testing.assert_allclose(scanned, looped, rtol=1e-5)


def run_small(model: str, *words: str) -> dict:
  command = [sys.executable, "-m", "tests.training.small", model, *words]
  done = subprocess.run(command, cwd=ROOT, env=environment(8), capture_output=True, text=True, timeout=550, check=False)
  assert done.returncode == 0, done.stderr[-3000:]
  return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.slow
@pytest.mark.parametrize("model", ["qwen3-tiny", nightly("qwen3-moe-tiny")])
def test_eight_devices_give_the_losses_of_one(model):
  """Complete steps have the losses and gradient norms of one device. ``test_parallelism`` compares the gradients of every
  family.

  The loss is computed in chunks, with a tied and an untied head, so the head's gradients are summed over chunks and devices.
  """
  found = run_small(model, "num_decoder_layers=2", "num_vocab_tiling=3")
  one, eight = np.asarray(found["one"]), np.asarray(found["eight"])  # loss and gradient norm of step 1, 2, 3
  np.testing.assert_allclose(eight[0::2], one[0::2], rtol=1e-5)
  # Gradient norms depend on the order of sums more than losses do.
  np.testing.assert_allclose(eight[1::2], one[1::2], rtol=1e-4)
  assert found["whole"] == []


@pytest.mark.slow
def test_no_family_holds_a_large_array_whole_on_each_device():
  assert run_small("whole", *(",".join((model, *words)) for model, words in FEWER.items())) == {model: [] for model in FEWER}


def test_axes_that_do_not_fit_the_devices():
  with pytest.raises(UserError, match="does not divide the number of devices"):
    make_program(small_config("gemma4-tiny", f"ici_data_parallelism={2 * jax.device_count() + 1}"))


def test_more_chunks_than_positions():
  with pytest.raises(UserError, match=r"num_vocab_tiling = 17 .*max_target_length = 16"):
    make_program(small_config("gemma4-tiny", "num_vocab_tiling=17"))


@pytest.mark.slow
def test_a_step_looks_placeholders_up_as_padding():
  """Image, video and audio tokens in text, without a tower, are looked up as padding, as in generate. The loss is that of
  padding tokens. The gradient differs, because only real padding trains the row of padding."""
  words = ["num_decoder_layers=3", "num_kv_shared_layers=0", "use_double_wide_mlp=false", "per_device_batch_size=2"]
  words += ["vocab_size_per_layer_input=300", "emb_dim=32", "mlp_dim=32"]
  program = make_program(small_config("gemma4-e2b-tiny", *words))
  held = program.config.vision.placeholder_ids
  assert len(held) == 3
  (plain,) = batches(program.global_batch, count=1)
  at = (np.arange(len(held)), np.array([1, 4, 9]))
  step, state = program.lower_step(checked=True).compile(), program.lower_init().compile()

  def result(tokens):
    batch = plain | {"tokens": plain["tokens"].copy()}
    batch["tokens"][at[0] % program.global_batch, at[1]] = tokens
    _, metrics = step(state(np.uint32(1)), program.place(batch), UNKNOWN)
    return float(metrics["loss"]), float(metrics["grad_norm"])

  assert result(held) == result(held[::-1])
  assert result(held) != result(np.array(held) + 20)
  padded, placed = result(0), result(held)
  assert placed[0] == padded[0]
  assert placed[1] != padded[1], "the row of padding is trained by padding alone"


@pytest.mark.parametrize(
  ("words", "operation"),
  [("packing=true", "fmhaScaleBiasSoftmax"), ("packing=false", "fmhaSoftmax"), ("dataset=synthetic", "fmhaSoftmax")],
)
def test_rows_of_one_document_take_the_fused_kernel_without_a_mask(words, operation):
  few = ["num_decoder_layers=1", "inhomogeneous_layer_cycle_interval=1", "dtype=bfloat16", "max_target_length=256"]
  _, module = lower(small_config("gemma4-tiny", *few, words), "cuda")
  text = str(module)
  assert set(re.findall(r"__cudnn\$(\w+)", text)) == {operation, f"{operation}Backward"}
  masked = re.search(r"tensor<[0-9x]*256x256x\w+>", text)  # scores of T x T
  assert (masked is None) == (words != "packing=true")


def test_a_batch_of_several_documents_is_not_given_to_a_program_for_one():
  program = make_program(small_config("gemma3-tiny", "packing=false"))
  (packed,) = batches(program.global_batch, count=1)
  with pytest.raises(UserError, match=r"several documents.*packing=false"):
    program.place(packed)
  last = packed | {"segments": np.where(packed["segments"] == 2, 0, packed["segments"])}
  assert program.place(last)["segments"].shape == last["segments"].shape
  behind_padding = packed | {"segments": last["segments"][:, ::-1]}
  with pytest.raises(UserError, match="rows with several documents"):
    program.place(behind_padding)
