"""MaxText's command lines: its names and values of keys, and its way to name a model."""

import pytest

from maxtext_like.cli.arguments import split_configuration
from maxtext_like.config import maxtext, maxtext_file
from maxtext_like.config.files import configs_folder
from maxtext_like.config.load import load_config
from maxtext_like.config.schema import LEAVES
from maxtext_like.errors import UserError


def test_maxtexts_names():
  words = ("base_emb_dim=256", "base_output_directory=/x", "checkpoint_period=7", "attention=autoselected")
  config = load_config("gemma4-tiny", words).config
  assert (config.model.emb_dim, config.logging.output_dir, config.checkpoint.checkpoint_interval) == (256, "/x", 7)
  with pytest.raises(UserError, match=r'argument "enable_dropout=true": enable_dropout'):
    load_config("gemma4-tiny", ["enable_dropout=true"])


def test_the_length_of_the_schedule():
  lengths = {50: 50, -1: None}
  for theirs, ours in lengths.items():
    assert load_config("gemma4-tiny", [f"learning_rate_schedule_steps={theirs}"]).config.training.lr_schedule_steps == ours


@pytest.mark.parametrize(
  ("words", "steps"),
  [
    (["profiler=xplane"], "2-6"),
    (["profiler_steps=2", "profiler=xplane", "skip_first_n_steps_for_profiler=10"], "11-12"),
    (["profiler_steps=2"], None),
    (['profiler=""'], None),
    (["profile_steps=3"], "3"),
  ],
)
def test_the_profiler_is_one_key(words, steps):
  loaded = load_config("gemma4-tiny", words)
  assert loaded.config.logging.profile_steps == steps
  assert bool(loaded.notes) == ("profile_steps=3" not in words)


@pytest.mark.parametrize("words", ["profiler=nsys", "profile_steps=0-3", "profile_steps=5-4", "profile_steps=90-101"])
def test_what_cannot_be_profiled_is_refused(words):
  with pytest.raises(UserError, match="profile_steps"):
    load_config("gemma4-tiny", [words])


def test_the_table_leads_to_our_keys():
  assert set(maxtext.RENAMED.values()) <= set(LEAVES)
  assert not maxtext.KNOWN & set(LEAVES)
  assert {*maxtext.VALUES, *maxtext_file.DEFAULTS} <= set(LEAVES)


BASE = ["configs/base.yml", "base.yml", "src/maxtext/configs/base.yml", str(configs_folder() / "base.yml")]


@pytest.mark.parametrize("path", BASE)
def test_maxtexts_commands_name_the_model_behind_the_defaults(path, tmp_path, monkeypatch):
  monkeypatch.chdir(tmp_path)
  loaded = load_config(path, ["model_name=gemma3-tiny", "steps=7", "learning_rate=1e-5"])
  assert loaded.config == load_config("gemma3-tiny", ["steps=7", "learning_rate=1e-5"]).config
  rows = {line.split()[0]: line.split()[1:] for line in loaded.notes[-1].splitlines()[2:]}
  assert rows["dtype"] == ["float32", "bfloat16"]  # the first value is that of this project's model file
  assert {"model", "max_target_length"} <= set(rows)
  assert rows["remat_policy"] == [loaded.config.training.remat_policy, "full"]
  assert not {"steps", "learning_rate", "max_position_embeddings"} & set(rows)
  with pytest.raises(UserError, match=r"base.yml: .*defaults.*\n  fix: name a model"):
    load_config(path)
  with pytest.raises(UserError, match=r"gemma3-tinny: no such model.*\n.*gemma3-tiny"):
    load_config(path, ["model_name=gemma3-tinny"])


def test_the_name_of_another_model_is_no_label():
  for name in ("gemma3-4b", "llama3.1-8b"):
    with pytest.raises(UserError, match=f"{name} is another model\n  fix: "):
      load_config("gemma4-tiny", [f"model_name={name}"])
  for name in ("gemma4-tiny", "mine"):
    assert load_config("gemma4-tiny", [f"model_name={name}"]).config.model.model_name == name


@pytest.mark.parametrize(
  ("word", "key", "value"),
  [
    ("per_device_batch_size=4.0", "per_device_batch_size", 4),
    ("eval_interval=-1", "eval_interval", 0),
    ("attention=autoselected", "attention", "auto"),
    ("attention=flash", "attention", "auto"),
    ("attention=cudnn_flash_te", "attention", "cudnn_flash"),
    ("opt_type=adam_pax", "opt_type", "adamw"),
    ("matmul_precision=float32", "matmul_precision", "highest"),
    ("dataset_type=synthetic", "dataset", "synthetic"),
    ("learning_rate_schedule_steps=50", "lr_schedule_steps", 50),
    ("learning_rate_schedule_steps=-1", "lr_schedule_steps", None),
    ("init_weights_seed=3", "seed", 3),
    ("data_shuffle_seed=3", "data_shuffle_seed", 3),
    ("log_period=10", "log_interval", None),
    ("quantization=''", "dtype", "float32"),
    ("per_device_batch_size=0.5", "per_device_batch_size", 0.5),
    ("dcn_data_parallelism=-1", "ici_data_parallelism", 1),
    ("ici_fsdp_transpose_parallelism=1", "ici_fsdp_parallelism", -1),
  ],
)
def test_maxtexts_values_are_translated(word, key, value):
  config = load_config("gemma3-tiny", [word, "dtype=bfloat16" if key == "attention" else "dtype=float32"]).config
  assert getattr(getattr(config, LEAVES[key][0]), key) == value


@pytest.mark.parametrize(
  ("word", "instead"),
  [
    ("eval_steps=-1", "eval_steps=10"),
    ("opt_type=muon", "adafactor"),
    ("remat_policy=save_qkv_proj", "remat_policy=minimal"),
    *((f"{key}={kind}", "dataset=jsonl") for key in ("dataset_type", "dataset") for kind in ("hf", "grain", "tfds")),
    ("rng_seed=3", "seed=N data_shuffle_seed=N"),
    ("quantization=int8", "only below an adapter (lora_rank with base_weights)"),
    ("ici_tensor_sequence_parallelism=4", "follows from the mesh"),
    ("hardware=tpu", "JAX_PLATFORMS"),
    ("enable_dropout=true", "leave it out"),
  ],
)
def test_maxtexts_values_without_a_counterpart_say_what_to_write(word, instead):
  with pytest.raises(UserError) as refused:
    load_config("gemma4-tiny", [word])
  assert instead in str(refused.value)


def test_what_is_another_name_for_something_slightly_else_is_noted():
  notes = load_config("gemma4-tiny", ["attention=flash", "opt_type=adam_pax", "log_period=3"]).notes
  said = [note.split(": ")[1] for note in notes]
  assert said == ["attention is translated to auto", "opt_type is translated to adamw", "log_period has no effect"]


@pytest.mark.parametrize(
  ("words", "expected"),
  [
    (["model_name=gemma3-tiny", "steps=3"], ("base.yml", ["model_name=gemma3-tiny", "steps=3"])),
    (["steps=3", "--model_name=gemma3-tiny"], ("base.yml", ["steps=3", "--model_name=gemma3-tiny"])),
    (["model_name", "gemma3-tiny"], ("base.yml", ["model_name", "gemma3-tiny"])),
    (["configs/base.yml", "model_name=gemma3-tiny"], ("configs/base.yml", ["model_name=gemma3-tiny"])),
    (["gemma3-tiny", "steps=3"], ("gemma3-tiny", ["steps=3"])),
  ],
)
def test_the_model_may_be_named_by_model_name_alone(words, expected):
  assert split_configuration("train", "", words) == expected
  assert load_config(*expected).config.model.model_name == "gemma3-tiny"


def test_without_a_model_there_is_no_run():
  with pytest.raises(UserError, match="the model is missing: 'steps=3'"):
    split_configuration("train", "", ["steps=3"])
