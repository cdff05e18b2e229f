"""Arguments that Python code gets wrong are told with a remedy; what is imported is a checkpoint for risk as well."""

from typing import Any

import jax.numpy as jnp
import pytest

import maxtext_like
from maxtext_like.errors import UserError

TINY: Any = {"num_decoder_layers": 1, "emb_dim": 32, "mlp_dim": 48, "max_target_length": 32, "per_device_batch_size": 1}
HEADS: Any = {"head_dim": 8, "query_heads": 2, "kv_heads": 1, "length": 32}


@pytest.fixture(scope="module")
def run(tmp_path_factory):
  folder = tmp_path_factory.mktemp("runs")
  return maxtext_like.train("qwen3-tiny", steps=1, dataset="synthetic", output_dir=folder, run_name="a", **TINY)


def test_progress_is_told_line_by_line(tmp_path):
  lines: list[str] = []
  maxtext_like.train("qwen3-tiny", steps=1, dataset="synthetic", output_dir=tmp_path, progress=lines.append, **TINY)
  assert lines
  assert not any("\n" in line for line in lines)


def test_what_is_no_prompt_is_told(run):
  model = run.load(tokenizer="bytes")
  wrong: Any
  for wrong in ([], [5, 6], 5):
    with pytest.raises(UserError, match=r"neither texts nor Prompts\n  fix: "):
      model.generate(wrong)
  with pytest.raises(UserError, match="stop token 'hen'"):
    model.generate("The", stop="hen")
  answers = model.generate(["a", "b"], max_tokens=1)
  with pytest.raises(ValueError, match="2 answers"):
    _ = answers.text


@pytest.mark.parametrize("tokens", [[5, 6], [[1.0]], [[]], [[512]], [[-1]]])
def test_what_are_no_tokens_is_told(run, tokens):
  with pytest.raises(UserError, match="tokens: "):
    run.load().logits(tokens)


def test_a_checkpoint_that_is_not_there_is_told_before_its_tokenizer_is_missed(tmp_path, caplog):
  with pytest.raises(UserError, match=r"checkpoint: .* does not exist\n  fix: "):
    maxtext_like.xray_step("qwen3-tiny", checkpoint=tmp_path / "none")
  assert not caplog.records


def test_a_model_shows_in_a_line_what_it_is(run):
  assert repr(maxtext_like.load_config("qwen3-tiny")).startswith("Loaded(qwen3-tiny, float32, of ")
  assert repr(run.load()) == f"Pretrained(qwen3-tiny, float32, of {run.directory})"


def test_a_checkpoint_goes_out_and_in_again_and_risk_reads_it(run, tmp_path):
  with pytest.raises(UserError, match=r"dtype 'fp16'\n  fix: one of bfloat16, float16, float32"):
    maxtext_like.export_checkpoint(run.directory, tmp_path / "out", dtype="fp16")  # pyright: ignore[reportArgumentType]
  maxtext_like.export_checkpoint(run.directory, tmp_path / "out", dtype="float32")
  maxtext_like.import_checkpoint(tmp_path / "out", tmp_path / "in")
  known = maxtext_like.risk(run.directory, dtype="float16")
  found = maxtext_like.risk(tmp_path / "in", dtype="float16")
  assert found.table(0) == known.table(0)
  wrong: Any
  for wrong in ([[1, 2]], {"input_ids": [[1, 2], [3]]}):
    with pytest.raises(UserError, match=r"no arrays by name: .*\n  fix: "):
      maxtext_like.forward(tmp_path / "out", wrong)


def test_a_model_of_the_hub_that_is_not_here_is_told_how_to_get():
  for call in (maxtext_like.risk, maxtext_like.load, lambda name: maxtext_like.import_checkpoint(name, "there")):
    with pytest.raises(UserError, match="hf download some/model"):
      call("some/model")


@pytest.mark.parametrize("tolerance", [0.0, -1.0, float("nan")])
def test_a_tolerance_is_above_zero(tolerance):
  with pytest.raises(UserError, match="not a relative error above 0"):
    maxtext_like.bisect("qwen3-tiny", tolerance=tolerance)


@pytest.mark.parametrize("wrong", [{"dtype": "fp16"}, {"dtype": jnp.int32}, {"query_heads": 3, "kv_heads": 2}, {"length": 0}])
def test_a_kernel_test_of_what_cannot_be(wrong):
  with pytest.raises(UserError, match=r"kernel_self_test: .*\n  fix: "):
    maxtext_like.kernel_self_test(lambda q, k, v, tokens, *, window, scale: q, **{"dtype": jnp.float32, **HEADS, **wrong})
