"""The lines about changed settings when a run resumes with other values than those in its checkpoint."""

import re
from types import SimpleNamespace
from typing import Any, cast

import jax
import pytest

from maxtext_like.checkpoint.store import manifest
from maxtext_like.config.load import load_config
from maxtext_like.training.loop.resume_diff import changes

RATE = ["learning_rate=1e-3", "warmup_steps_fraction=0"]


def program(*words: str, rows: int = 8) -> Any:
  """Return a stand-in for a program with the attributes that ``changes`` reads."""
  return SimpleNamespace(
    config=load_config("gemma4-tiny", [*RATE, *words]).config,
    global_batch=rows,
    step=SimpleNamespace(optimizer=None),
    model=SimpleNamespace(mesh=SimpleNamespace(size=1), devices=jax.devices()),
  )


@pytest.fixture
def told(tmp_path):
  """A function from the settings of the checkpoint (of step 50) and those of the resumed run to the reported lines."""

  def told(then, now, rows=8, without=(), versions=None):
    stored = manifest.record(program(*then).config)
    for section, key in without:
      del stored[section][key]
    written = manifest.Manifest(
      step=50, finite=True, config=stored, extra={}, leaves={}, files={}, versions=versions or manifest.versions()
    )
    manifest.write(tmp_path, written)
    restored = SimpleNamespace(
      step=50,
      state={"opt_state": ()},
      config=stored,
      directory=tmp_path,
      extra={"batch": {"rows": 8, "devices": f"1 x {jax.devices()[0].device_kind}"}},
    )
    return list(changes(cast(Any, restored), program(*now, rows=rows)))

  return told


def test_nothing_changed_and_nothing_is_told(told):
  assert told([], ["run_name=elsewhere", "output_dir=/other", "log_interval=7", "compilation_cache_dir=null"]) == []


@pytest.mark.parametrize(
  ("then", "now", "line"),
  [
    ("adam_b2=0.9", "adam_b2=0.95", "changed adam_b2: was 0.9, is 0.95"),
    ("gradient_clipping_threshold=0", "gradient_clipping_threshold=1", "changed gradient_clipping_threshold: was 0.0, is 1.0"),
    ("dtype=float32", "dtype=bfloat16", "changed dtype: was float32, is bfloat16"),
    ("per_device_batch_size=1", "per_device_batch_size=2", "changed per_device_batch_size: was 1, is 2"),
    ("gradient_accumulation_steps=1", "gradient_accumulation_steps=2", "changed gradient_accumulation_steps: was 1, is 2"),
    ("shuffle=true", "shuffle=false", "changed shuffle: was true, is false"),
    ("trainable_parameters_mask=[mlp]", "trainable_parameters_mask=[]", "changed trainable_parameters_mask: was [mlp], is []"),
    ("pad_token_id=0", "pad_token_id=3", "changed pad_token_id: was 0, is 3"),
    (
      "max_position_embeddings=512 max_target_length=128",
      "max_position_embeddings=1024 max_target_length=128",
      "changed max_position_embeddings: was 512, is 1024 (training only)",
    ),
    (
      "sliding_window_size=16",
      "sliding_window_size=8",
      "changed sliding_window_size: was 16, is 8 (the model gives other results: allow_model_change=true)",
    ),
    ("max_to_keep=3", "max_to_keep=1", "changed max_to_keep: was 3, is 1"),
  ],
)
def test_a_line_for_each_changed_value(told, then, now, line):
  assert told(then.split(), now.split()) == [line]


def test_the_rows_of_an_update_and_versions(told):
  assert told([], [], rows=16) == ["changed global batch size: was 8 rows, is 16 rows"]
  versions = {**manifest.versions(), "jax": "0.0.1", "python": "3.0", "gone": "1"}
  lines = told([], [], versions=versions)
  assert [re.sub("is .*", "is", line) for line in lines] == [
    "changed version of python: was 3.0, is",
    "changed version of jax: was 0.0.1, is",
  ]


def test_a_key_that_is_newer_than_the_checkpoint_had_its_default(told):
  assert told([], [], without=[("training", "lr_schedule_steps")]) == []
  lines = told([], ["lr_schedule_steps=50"], without=[("training", "lr_schedule_steps")])
  assert lines[0] == "changed lr_schedule_steps: was null, is 50"


def test_the_learning_rate_is_compared_with_the_stored_configurations(told):
  # A cosine that ends at a tenth: 0.1 + 0.9 / 2 in the middle of 100 steps, 0.1 + 0.9 * (1 + cos(pi / 4)) / 2 at a quarter of
  # 200 steps.
  assert told(["steps=100"], ["steps=200"])[1:] == [
    "note    the learning rate of step 51 is 0.000868; with the checkpoint's configuration it would be 0.00055; "
    "lr_schedule_steps=100 keeps the schedule's length"
  ]
  assert told(["steps=100"], ["steps=200", "lr_schedule_steps=100"])[2:] == []
  assert told(["learning_rate=1e-5"], ["learning_rate=1e-4"])[1:] == [
    "note    the learning rate of step 51 is 5.5e-05; with the checkpoint's configuration it would be 5.5e-06"
  ]


def test_init_from_is_told_to_be_unused(told):
  (line,) = told([], ["init_from=/weights"])
  assert line.startswith("note    init_from=/weights is ignored")
  assert line.endswith("step 50")


def test_the_weights_below_an_adapter_are_used(told):
  assert told(["lora_rank=2"], ["lora_rank=2", "init_from=/weights"]) == []
