"""Overrides: every spelling of a value is understood or refused, and none is ignored (faults F52, F55)."""

import contextlib
import random
import re
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from maxtext_like.config.load import load_config
from maxtext_like.config.overrides import is_key, leaf_of, parse_overrides
from maxtext_like.config.schema import LEAVES
from maxtext_like.errors import UserError


@pytest.mark.parametrize(
  "words",
  [
    ["steps=5"],
    ["training.steps=5"],
    ["--steps=5"],
    ["--training.steps=5"],
    ["-steps=5"],
    ["--steps", "5"],
    ["training.steps", "5"],
    ["steps", "5"],
    ["steps = 5"],
    ["steps= 5"],
    ["steps=7", "steps=5"],  # the last one wins, as scripts expect that append to their arguments
  ],
)
def test_understood(words):
  loaded = load_config("gemma4-tiny", words)
  assert loaded.config.training.steps == 5
  assert loaded.origins["training.steps"].startswith('argument "')


@pytest.mark.parametrize(
  ("words", "reason"),
  [
    (["=5"], "no key before '='.*\n.*write KEY=5"),
    (["steps="], "no value after '='.*\n.*write steps=VALUE"),
    (["--steps="], "no value after '='"),
    (["steps=", "5"], "no value after '='"),
    (["steps", "=", "5"], "no value\n.*steps=VALUE without spaces"),
    (["steps", "=5"], "no value\n.*steps=VALUE without spaces"),
    (["steps"], "no value\n.*steps=VALUE"),
    (["steps", "seed=3"], "'steps': no value"),
    (["steps", "seed", "3"], "'steps': no value"),
    (["--scan_layers", "--steps=5"], "no value"),
    (["steps:", "5"], "write steps=VALUE"),
    (["5"], "not a key=value"),
    (["recipes/lora"], "not a key=value, did you mean recipes/lora.yml?.*\n.*fix: write recipes/lora.yml"),
    (["recipes/qlor"], "did you mean recipes/qlora.yml?"),
    (["dataset=json"], "did you mean 'jsonl'?\n  fix: write jsonl$"),
    (["steps=5", "now"], "'now': not a key=value"),
    (["--fast"], "unknown key 'fast'"),
    (["stepz=5"], "argument \"stepz=5\": unknown key 'stepz', did you mean 'steps'?"),
    (["training.stepz=5"], "did you mean 'training.steps'"),
    (["model.steps=5"], "did you mean 'training.steps'"),
    (["train.steps=5"], "unknown key 'train.steps', did you mean 'training.steps'"),
    (["training.model.steps=5"], "unknown key"),
    (["flaot32_logits=true"], "did you mean 'float32_logits'"),
    (["STEPS=5"], "did you mean 'steps'"),
    (["learning-rate=1"], "did you mean 'learning_rate'"),
    (["xyzzy=1"], "--help-keys"),
    (["training=5"], "unknown key 'training'"),
    (["steps=five"], "steps: 'five' is not an int"),
    (["hardware=/nowhere.yml"], "no such overlay"),
    (["nowhere.yml"], "no such overlay"),
    (["hardware=."], "is a directory"),
  ],
)
def test_refused(words, reason):
  with pytest.raises(UserError, match=reason.replace("?", "\\?").replace("(", "\\(")):
    load_config("gemma4-tiny", words)


def slips(key: str) -> Iterator[str]:
  """Yield a name with one letter added, dropped or doubled, or two neighboring letters swapped, at each place."""
  for i, letter in enumerate(key):
    yield f"{key[: i + 1]}s{key[i + 1 :]}"
    if letter != "_":
      yield key[:i] + key[i + 1 :]
      yield key[:i] + letter + key[i:]
      yield key[:i] + key[i + 1 : i + 2] + letter + key[i + 2 :]


def test_a_key_with_one_slip_is_suggested():
  """Each such name is answered with the key, alone or in a list. The answer has something to type."""
  found, choice = 0, random.Random(0)
  for key in LEAVES:
    for name in choice.sample(sorted(set(slips(key))), 6):
      if is_key(name) or name.startswith("_") or name.endswith("_"):
        continue
      (problem,) = parse_overrides([f"{name}=1"])[2]
      assert re.search(rf"\b{key}\b", f"{problem.what} {problem.fix}"), (name, problem)
      assert problem.fix, problem
      found += 1
  assert found > 5 * len(LEAVES)


@pytest.mark.parametrize(
  ("word", "fix"),
  [
    ("learning_rates=1", "write learning_rate=1"),
    ("learning_ratee=1", "write learning_rate=1"),
    ("max_target_len=1", "write max_target_length=1"),
    ("dataset_paths=a", "write dataset_path=a"),
    ("run_names=a", "write run_name=a"),
    ("lora_ranks=8", "write lora_rank=8"),
    ("oi_token_id=8", "write boi_token_id=8 or eoi_token_id=8"),
    ("train.stepz=8", "write training.steps=8"),
    ("xyzzy=8", "maxtext-like train --help-keys"),
  ],
)
def test_what_to_type_instead_of_an_unknown_key(word, fix):
  (problem,) = parse_overrides([word])[2]
  assert problem.fix.startswith(fix), problem


def test_negative_numbers_are_values():
  assert load_config("gemma4-tiny", ["--finite_check_steps", "-1"]).config.training.finite_check_steps == -1


def test_text_values_keep_their_signs():
  loaded = load_config("gemma4-tiny", ["dataset=text", "dataset_path=/a b/*.txt?x=1#y", "run_name=no"])
  assert loaded.config.data.dataset_path == "/a b/*.txt?x=1#y"
  assert loaded.config.logging.run_name == "no"


def test_lists_and_null():
  loaded = load_config("gemma4-tiny", ["trainable_parameters_mask=['.*mlp.*', norm]", "compilation_cache_dir=null"])
  assert loaded.config.training.trainable_parameters_mask == (".*mlp.*", "norm")
  assert loaded.config.logging.compilation_cache_dir is None


def test_hardware_files_lie_between_model_and_command_line(tmp_path):
  first, second = tmp_path / "a.yml", tmp_path / "b.yaml"
  first.write_text("mesh:\n  ici_data_parallelism: 2\nsteps: 7\nseed: 1\n")
  second.write_text("training:\n  seed: 2\n")
  loaded = load_config("gemma4-tiny", ["max_to_keep=9", str(first), f"hardware={second}", "steps=8"])
  assert (loaded.config.mesh.ici_data_parallelism, loaded.config.training.seed) == (2, 2)
  assert (loaded.config.training.steps, loaded.config.checkpoint.max_to_keep) == (8, 9)
  assert loaded.origins["training.seed"] == f"{second}:2"


@given(
  st.text(st.characters(categories=("Ll", "Lu", "Nd"), include_characters="_.-"), min_size=1).filter(
    lambda key: key != "hardware"
  )
)
def test_random_keys_are_known_or_refused_with_the_key(key):
  if is_key(key):
    assert leaf_of(key) == key.rpartition(".")[2]
    return
  with pytest.raises(KeyError, match=re.escape(repr(key))):
    leaf_of(key)
  bare = key.lstrip("-")  # without the dashes of an option, it may be a key
  assert len(parse_overrides([f"{key}=1"])[2]) == (0 if is_key(bare) or bare == "hardware" else 1)


@given(st.lists(st.sampled_from([*LEAVES, "5", "=", "steps=3", "x", "-", "--", "--seed=1", "", "a=b"]), max_size=5))
def test_no_word_is_ignored(words):
  try:
    hardware, entries, problems = parse_overrides(words)
  except UserError:
    return
  assert not hardware
  if problems:
    return
  used = sum(1 if "=" in e.origin else 2 for e in entries)
  assert used == len(words)


@given(st.lists(st.text(max_size=12), max_size=4))
@pytest.mark.slow
def test_any_words_are_understood_or_refused(words):
  with contextlib.suppress(UserError):  # any other exception is a bug of the parser
    assert load_config("gemma4-tiny", words).config.model.emb_dim >= 1
