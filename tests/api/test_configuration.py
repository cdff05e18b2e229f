"""Configurations from Python: every model's goes to a ``ConfigDict`` and back as it was, and mistakes are told."""

from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from maxtext_like.api.configuration import load_config
from maxtext_like.config.files import model_names
from maxtext_like.errors import UserError


@pytest.mark.parametrize("name", model_names())
def test_to_a_config_dict_and_back(name):
  loaded = load_config(name, learning_rate=3e-4, seed=np.int64(7))
  values: Any = loaded.to_config_dict()
  assert values.is_locked
  assert load_config(values).config == loaded.config
  assert load_config(loaded.config).config == loaded.config
  values.training.steps, values.data.dataset_path = 9, ["a b.txt", "ü.txt"]
  changed = load_config(values, "dataset=text", run_name="x").config
  assert (changed.training.steps, changed.data.dataset_path, changed.logging.run_name) == (9, ("a b.txt", "ü.txt"), "x")
  assert changed.model == loaded.config.model


def test_what_was_loaded_is_taken_again():
  loaded = load_config("gemma4-tiny", steps=3)
  assert load_config(loaded) is loaded
  assert load_config(loaded, output_dir=Path("there")).config.logging.output_dir == "there"


def test_a_none_may_become_a_number_and_types_are_judged():
  values: Any = load_config("gemma4-tiny").to_config_dict()
  values.training.lr_schedule_steps = 50
  assert load_config(values).config.training.lr_schedule_steps == 50
  values.training.steps = "many"
  with pytest.raises(UserError, match=r"^ConfigDict: steps: "):
    load_config(values)


def test_mistakes_are_those_of_an_argument():
  with pytest.raises(UserError, match="argument \"stpes=2\": unknown key 'stpes', did you mean 'steps'"):
    load_config("gemma4-tiny", stpes=2)
  with pytest.raises(UserError, match="argument 'steps'"):
    load_config("gemma4-tiny", "steps")


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.dtype("bfloat16"), "bfloat16"])
def test_a_dtype_may_be_that_of_arrays(dtype):
  assert load_config("gemma4-tiny", dtype=dtype).config.precision.dtype == "bfloat16"


@pytest.mark.parametrize("given", [None, 3, {"model_name": "gemma4-tiny"}])
def test_what_is_no_configuration_is_told(given: Any):
  with pytest.raises(UserError, match=r"is no configuration\n  fix: a model's name"):
    load_config(given)


def test_a_hugging_face_directory_is_told_what_it_is_for(tmp_path):
  (tmp_path / "config.json").write_text("{}")
  with pytest.raises(UserError, match=r"is a Hugging Face checkpoint, .*\n  fix: .*init_from="):
    load_config(tmp_path)
