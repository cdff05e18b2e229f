"""Dynamic loss scaling: an overflow halves the scale and resets the count of finite steps; enough finite steps double the
scale. Both stay within bounds."""

import json

import jax.numpy as jnp
import pytest

from maxtext_like.cli.main import main
from maxtext_like.training.step import loss_scale


def after(scale: float, good: int, finite: bool) -> tuple[float, int]:
  state = {"scale": jnp.float32(scale), "good_steps": jnp.int32(good)}
  new = loss_scale.updated(state, jnp.asarray(finite))
  assert new["good_steps"].dtype == jnp.int32
  assert new["scale"].dtype == jnp.float32
  return float(new["scale"]), int(new["good_steps"])


@pytest.mark.parametrize(
  ("before", "expected"),
  [
    ((2.0**15, 0, True), (2.0**15, 1)),
    ((2.0**15, 1998, True), (2.0**15, 1999)),
    ((2.0**15, 1999, True), (2.0**16, 0)),
    ((2.0**15, 1999, False), (2.0**14, 0)),
    ((2.0**24, 1999, True), (2.0**24, 0)),
    ((2.0**-14, 7, False), (2.0**-14, 0)),
  ],
)
def test_updated(before, expected):
  assert after(*before) == expected


def test_initial():
  state = loss_scale.initial(1024.0)
  assert (float(state["scale"]), int(state["good_steps"])) == (1024.0, 0)


@pytest.mark.slow
def test_it_begins_anew_with_float16_and_with_another_first_one(tmp_path):
  """A run changes to another dtype after overflows and later returns to float16, or it resumes with a lower loss_scale_init. In
  both cases the loss scale starts at loss_scale_init. A resume with the same value keeps it."""
  words = ["qwen3-tiny", "num_decoder_layers=1", "max_target_length=16", "per_device_batch_size=1", "checkpoint_period=1"]
  words += [f"output_dir={tmp_path}", "run_name=a", f"compilation_cache_dir={tmp_path}/cache"]
  scales = []
  for steps, more in enumerate(
    (["dtype=float16"], ["dtype=float16", "loss_scale_init=256"], ["dtype=float16", "loss_scale_init=256"],
     ["dtype=bfloat16", "loss_scale_init=256"], ["dtype=float16", "loss_scale_init=256"]), 1
  ):  # fmt: skip
    assert main(["train", *words, f"steps={steps}", *more]) == 0
    scales.append(json.loads((tmp_path / "a/metrics.jsonl").read_text().splitlines()[-1]).get("loss_scale"))
  assert scales == [32768, 256, 256, None, 256]
