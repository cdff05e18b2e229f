"""The recipes in configs/recipes: each loads with every model, sets no key without an effect, and can be planned."""

from typing import Any

import pytest

from maxtext_like.config.files import configs_folder, model_names
from maxtext_like.config.load import load_config

RECIPES = sorted(path.stem for path in (configs_folder() / "recipes").glob("*.yml"))


def test_each_kind_is_there():
  assert RECIPES == ["full", "lora", "pretraining", "qlora"]


@pytest.mark.parametrize("recipe", RECIPES)
def test_it_is_laid_over_every_model(recipe, tmp_path, monkeypatch):
  monkeypatch.chdir(tmp_path)  # the name works in any directory
  for name in model_names():
    loaded = load_config(name, [f"recipes/{recipe}.yml"])
    c = loaded.config
    assert (c.training.steps, c.training.epochs) == (None, 1 if recipe == "pretraining" else 3)
    assert bool(c.adapter.lora_rank) == ("lora" in recipe)
    assert loaded.origins["training.learning_rate"].startswith(f"configs/recipes/{recipe}.yml:")
    assert load_config(name, [f"configs/recipes/{recipe}.yml", "steps=5"]).config.training.epochs is None


@pytest.mark.slow
@pytest.mark.parametrize(
  ("name", "recipe"),
  [("gemma3-4b", "full"), ("gemma4-26b", "lora"), ("gemma4-e2b", "pretraining"), ("deepseek3.2-671b", "qlora"),
   ("qwen3-30b-a3b", "lora")],
)  # fmt: skip
def test_it_can_be_planned(name, recipe):
  """Every recipe is planned once, and every family with one recipe. The models have as many layers as one group of layers."""
  import maxtext_like

  layers = load_config(name).config.model
  depth = getattr(layers, "inhomogeneous_layer_cycle_interval", 0) or getattr(layers, "first_num_dense_layers", 0) + 1
  keys: dict[str, Any] = {"num_decoder_layers": depth}
  if getattr(layers, "num_kv_shared_layers", 0):  # one group with its own keys and values, and one that shares them
    keys = {"num_decoder_layers": 2 * depth, "num_kv_shared_layers": depth}
  topology = "h200-1" if recipe == "qlora" else "h200-8"  # eight parts of some weights would split blocks of nf4
  found = maxtext_like.plan(name, f"recipes/{recipe}.yml", topology=topology, **keys)
  assert found.fits
