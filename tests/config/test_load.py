"""Merging: origins, unknown keys, required keys, and resolved configurations that load to the same values (faults F52, F53)."""

import dataclasses
from typing import Any

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from maxtext_like.config import maxtext
from maxtext_like.config.files import configs_folder, model_names
from maxtext_like.config.load import base_values, load_config, to_config_dict
from maxtext_like.config.schema import LEAVES, SECTIONS
from maxtext_like.config.values import load_values
from maxtext_like.errors import UserError

TINY = (configs_folder() / "models" / "gemma4-tiny.yml").read_text("utf-8").replace("training:\n", "training:\n  steps: 100\n")
LINE = {line.strip().partition(":")[0]: number for number, line in enumerate(TINY.splitlines(), 1)}
END = len(TINY.splitlines())


@pytest.fixture
def model(tmp_path, monkeypatch):
  """Return a function that writes ``m.yml`` in the working directory."""
  monkeypatch.chdir(tmp_path)

  def write(text, data=None):
    (tmp_path / "m.yml").write_bytes(text.encode() if data is None else data)
    return "m.yml"

  return write


def test_origins_name_file_and_line():
  loaded = load_config("gemma4-tiny", ["seed=3"])
  lines = TINY.splitlines()
  file, line = loaded.origins["model.emb_dim"].split(":")
  assert file == "configs/models/gemma4-tiny.yml"
  assert lines[int(line) - 1] == "  emb_dim: 128"
  assert loaded.origins["training.seed"] == 'argument "seed=3"'
  assert loaded.origins["training.adam_eps"].startswith("configs/base.yml:")
  assert set(loaded.origins) == {f"{section}.{leaf}" for leaf, (section, _) in LEAVES.items()}


def test_values_are_a_locked_config_dict():
  values: Any = load_config("gemma4-tiny").to_config_dict()
  assert values.training.steps == 100
  assert values.is_locked
  with pytest.raises(AttributeError, match="stepz"):
    values.training.stepz = 5


def test_model_name_is_the_files_unless_set(model):
  assert load_config(model(TINY)).config.model.model_name == "m"
  assert load_config(model(TINY), ["model_name=other"]).config.model.model_name == "other"


@pytest.mark.parametrize(
  ("text", "reason"),
  [
    (
      TINY.replace("  emb_dim: 128", "  embdim: 128"),
      rf"m.yml:{LINE['emb_dim']}: unknown key 'model.embdim', did you mean 'emb_dim'\?",
    ),
    (TINY + "\nflaot32_logits: true\n", rf"m.yml:{END + 2}: unknown key 'flaot32_logits', did you mean 'float32_logits'\?"),
    (TINY + "\ntrainng:\n  steps: 5\n", rf"m.yml:{END + 2}: unknown section 'trainng', did you mean 'training'\?"),
    (TINY + "\nmesh:\n  steps: 5\n", rf"m.yml:{END + 3}: 'steps' is a key of training, not of mesh"),
    (TINY + "\nmesh: 5\n", rf"m.yml:{END + 2}: mesh is a section"),
    (TINY + "\nsteps: 5\n", rf"m.yml:{END + 2}: duplicate key 'steps', first at m.yml:{LINE['steps']}"),
    (TINY.replace("steps: 100", "steps: 5.0"), rf"m.yml:{LINE['steps']}: steps: '5.0' is not an int\n  fix: write 5$"),
    (TINY.replace("steps: 100", "steps: {a: 1}"), rf"m.yml:{LINE['steps']}: steps: a mapping where int is needed"),
    (
      TINY.replace("steps: 100", "steps:\n    deep:\n      er: 1"),
      rf"m.yml:{LINE['steps']}: steps: a mapping where int is needed",
    ),
    (TINY.replace("steps: 100", "steps:"), rf"neither steps nor epochs is set\n  where: m.yml:{LINE['steps']} \(steps\)"),
    (
      TINY.replace("length: 128", "length:"),
      rf"m.yml:{LINE['max_target_length']}: max_target_length: null where int is needed",
    ),
    (
      TINY.replace("dtype: float32", "dtype: float64", 1),
      rf"m.yml:{LINE['dtype']}: dtype: 'float64' is not one of float32, bfloat16",
    ),
    ("", r"the model file does not set decoder_block \(gemma3 \| gemma4 \| deepseek \| qwen3\), vocab_size \(int\)"),
    ("model:\n", "the model file does not set decoder_block"),
  ],
)
def test_faults_in_a_file(model, text, reason):
  with pytest.raises(UserError, match=reason):
    load_config(model(text))


def test_all_faults_of_a_file_come_together(model):
  text = TINY.replace("emb_dim", "embdim").replace("mlp_dim", "mlpdim")
  with pytest.raises(UserError, match=r"(?s)2 problems.*m.yml:6: unknown key.*m.yml:7: unknown key"):
    load_config(model(text))


@pytest.mark.parametrize("number", ["1e-4", "1E-4", "0.0001", "1.0e-4"])
def test_floats_without_a_point_are_floats(model, number):
  text = TINY.replace("learning_rate: 3e-3", f"learning_rate: {number}")
  assert load_config(model(text)).config.training.learning_rate == 1e-4


def test_flat_and_dotted_files_mean_the_same(model):
  sectioned = load_config(model(TINY)).config
  flat = "\n".join(line.removeprefix("  ") for line in TINY.splitlines() if not line.rstrip().endswith(":"))
  assert load_config(model(flat)).config == sectioned
  dotted = TINY.replace("  steps: 100\n", "") + "training.steps: 100\n"
  assert load_config(model(dotted)).config == sectioned


def test_base_alone_is_no_model():
  with pytest.raises(UserError, match=r"base.yml: .*defaults"):
    load_config(configs_folder() / "base.yml")


def test_base_has_exactly_the_keys_of_the_schema():
  assert list(base_values()) == list(LEAVES)


@pytest.mark.parametrize("name", model_names())
def test_resolved_configuration_loads_to_itself(name, model):
  loaded = load_config(name)
  again = load_config(model(loaded.to_yaml()))
  assert again.config == loaded.config
  assert again.to_yaml().count("\n") == loaded.to_yaml().count("\n")


def overrides():
  """Return a strategy for random values with which gemma4-tiny is still valid."""
  text = st.text(st.characters(exclude_categories=("Cc", "Cs"), exclude_characters="/"), min_size=1, max_size=9)
  names = text.filter(lambda t: t.strip() == t and t[0] not in "[{\"'" and t.lower() not in (".", "..", "~", "null"))
  return st.fixed_dictionaries(
    {},
    optional={
      "steps": st.integers(1, 2**31 - 1),
      "seed": st.integers(0, 2**31),
      "learning_rate": st.floats(1e-30, 1e30),
      "adam_eps": st.floats(1e-300, 1.0),
      "run_name": names,
      "output_dir": names,
      "tokenizer": names,
      "mu_dtype": st.sampled_from(["null", "bfloat16"]),
      "float32_gate_product": st.sampled_from(["auto", "true", "false"]),
      "scan_layers": st.sampled_from(["true", "false"]),
      "enable_checkpointing": st.sampled_from(["true", "false"]),
      "final_logits_soft_cap": st.sampled_from(["null", "0.1", "7"]),
      "trainable_parameters_mask": st.sampled_from(["[]", "['.*', \"a'b\"]", "[mlp, '\\d+']"]),
      "layer_types": st.sampled_from(["null", "[sliding, global, global, sliding, sliding, global]"]),
    },
  )


@given(overrides())
@settings(max_examples=60)
def test_random_configurations_survive_to_yaml_and_back(tmp_path_factory, changes):
  loaded = load_config("gemma4-tiny", [f"{key}={value}" for key, value in changes.items()])
  file = tmp_path_factory.mktemp("round") / "m.yml"
  file.write_text(loaded.to_yaml(), encoding="utf-8")
  assert load_config(file).config == loaded.config


@given(st.text(max_size=20), st.sampled_from([None, *SECTIONS]))
def test_random_keys_in_a_file_are_refused(tmp_path_factory, key, section):
  name = key.rpartition(".")[2]  # a section may precede it
  if name in LEAVES or key in SECTIONS or name in maxtext.KNOWN or any("\ud800" <= c <= "\udfff" for c in key):
    return
  quoted = "".join(f"\\U{ord(c):08x}" for c in key)
  file = tmp_path_factory.mktemp("keys") / "m.yml"
  file.write_text(f'"{quoted}": 1\n' if section is None else f'{section}:\n  "{quoted}": 1\n', encoding="utf-8")
  with pytest.raises(UserError, match=r"m.yml:[12]: "):
    load_config(file)


def test_sections_are_of_their_types():
  config = load_config("gemma4-tiny").config
  assert all(isinstance(getattr(config, section), cls) for section, cls in SECTIONS.items())
  with pytest.raises(dataclasses.FrozenInstanceError):
    config.training = None  # pyright: ignore


def test_a_run_has_one_length_and_the_nearer_word_counts(tmp_path):
  length = lambda loaded: (loaded.config.training.steps, loaded.config.training.epochs)
  by_epochs = load_config("gemma3-tiny", ["epochs=3"])
  assert length(by_epochs) == (None, 3)
  assert by_epochs.origins["training.steps"] == "follows from epochs"
  path = tmp_path / "config.yml"
  path.write_text(by_epochs.to_yaml())
  assert length(load_config(path)) == (None, 3)
  assert length(load_config(path, ["steps=7"])) == (7, None)
  path.write_text(load_config("gemma3-tiny").to_yaml())
  assert length(load_config(path, ["epochs=2"])) == (None, 2)
  base = to_config_dict(load_config("gemma3-tiny").config)
  words = ["eval_path=b", "eval_interval=1", "dataset=text", "dataset_path=a", "epochs=2", "enable_checkpointing=false"]
  loaded = load_values(base.to_dict(), "Config", words)
  assert length(loaded) == (None, 2)
  assert (loaded.config.data.eval_fraction, loaded.config.checkpoint.resume) == (0.0, False)
  with pytest.raises(UserError, match="epochs = 3 and steps = 7"):
    load_config("gemma3-tiny", ["epochs=3", "steps=7"])
  with pytest.raises(UserError, match="neither steps nor epochs is set"):
    load_config("gemma3-tiny", ["steps=null"])


@pytest.mark.parametrize(
  ("words", "message"),
  [
    (["dataset=synthetic"], "epochs = 3 with dataset: synthetic"),
    (["spike_factor=2"], "epochs = 3 with spike_factor = 2"),
    (["dataset=text", "dataset_path={a: x, b: y}", "dataset_weights={a: 1, b: 1}"], "epochs = 3 with dataset_weights"),
  ],
)
def test_epochs_of_what_cannot_be_counted_in_passes_are_refused(words, message):
  with pytest.raises(UserError, match=message):
    load_config("gemma3-tiny", ["epochs=3", *words])


@pytest.mark.parametrize(
  "word",
  [
    "per_device_batch_size=1e308",
    "watchdog_exit_seconds=1e308",
    "watchdog_peers_seconds=1e12",
    "learning_rate=1e39",
  ],
)
def test_numbers_that_no_program_and_no_clock_can_hold_are_refused(word):
  with pytest.raises(UserError, match=f"{word.partition('=')[0]}: .* is above the limit"):
    load_config("gemma3-tiny", [word])


def test_a_seed_has_32_bits():
  """JAX makes keys from 32 bits, so a seed of 2**32 would be the same as 0."""
  assert load_config("gemma4-tiny", [f"seed={2**32 - 1}"]).config.training.seed == 2**32 - 1
  with pytest.raises(UserError, match=r"seed: 4294967296 .*4294967295"):
    load_config("gemma4-tiny", ["seed=4294967296"])
  keys = [np.asarray(jax.random.key_data(jax.random.key(np.uint32(seed)))).tolist() for seed in (0, 1, 2**31, 2**32 - 1)]
  assert len({str(key) for key in keys}) == 4


def test_gemma_files_have_both_tokens_that_end_an_answer_as_the_releases_do():
  for name in ("gemma3-4b", "gemma3-12b", "gemma3-27b", "gemma4-e2b", "gemma4-e4b", "gemma4-26b", "gemma4-31b"):
    assert load_config(name).config.model.eos_token_id == (1, 106), name
