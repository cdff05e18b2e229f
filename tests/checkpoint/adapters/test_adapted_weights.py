"""The weights that an entry of ``lora_modules`` selects, in every family."""

import re
from typing import Any

import pytest

from maxtext_like.checkpoint.adapters.adapted_weights import adapted_names, configured_adapter, with_base
from maxtext_like.config.load import load_config
from maxtext_like.errors import UserError
from maxtext_like.models.model import make_model

ATTENTION = "attention.k attention.o attention.q attention.v"
MLP = "mlp.down mlp.gate mlp.up"
MLA = "attention.kv_a attention.kv_b attention.o attention.q_a attention.q_b"
SHARED = "moe.shared.down moe.shared.gate moe.shared.up"
EXPERTS = "moe.experts.down moe.experts.gate moe.experts.up"
MEANT = [
  ("gemma4-tiny", "all-linear", f"{ATTENTION} {MLP}"),
  ("gemma4-tiny", "q_proj", "attention.q"),
  ("gemma4-tiny", "self_attn.v_proj", "attention.v"),
  ("gemma4-tiny", "attention", ATTENTION),
  ("gemma4-tiny", "layers.1", f"{ATTENTION} {MLP}"),
  ("gemma4-tiny", r"layers\.[01]\..*_proj", f"{ATTENTION} {MLP}"),
  ("gemma4-tiny", "model.layers.0.self_attn.q_proj", "attention.q"),  # the spelling of export --adapter and of peft
  ("gemma4-tiny", "base_model.model.model.language_model.layers.0.self_attn.q_proj", "attention.q"),
  ("gemma4-tiny", r"^model\.layers\.(0|1)\.", f"{ATTENTION} {MLP}"),
  ("gemma4-tiny", "embed_tokens", "embedding.table"),
  ("gemma4-tiny", "model.embed_tokens", "embedding.table"),
  ("gemma4-e2b-tiny", "all-linear", f"{ATTENTION} {MLP} ple.gate ple.projection"),
  ("gemma4-moe-tiny", "all-linear", f"{ATTENTION} {MLP}"),
  ("gemma4-moe-tiny", "experts", EXPERTS),
  ("gemma4-moe-tiny", "router", "moe.router.kernel"),
  ("deepseek3.2-tiny", "all-linear", f"{MLA} {MLP} {SHARED}"),
  ("deepseek3.2-tiny", "gate_proj", "mlp.gate moe.experts.gate moe.shared.gate"),
  ("deepseek3.2-tiny", "gate", "mlp.gate moe.experts.gate moe.shared.gate"),  # not the router, whose tensor is called "gate"
  ("deepseek3.2-tiny", "mlp", f"{MLP} {SHARED}"),
  ("deepseek3.2-tiny", "indexer", "attention.indexer.k attention.indexer.q attention.indexer.weights"),
  ("deepseek3.2-tiny", "wq_b", "attention.indexer.q"),
  ("deepseek3.2-tiny", "lm_head", "head.kernel"),
  ("qwen3-moe-tiny", "all-linear", ATTENTION),
]


@pytest.fixture(scope="module")
def names():
  known: dict[str, Any] = {}

  def of(model, entries):
    if model not in known:
      config = load_config(model).config
      known[model] = make_model(config, platform="cpu", runs_attention=False).decoder, config.model.decoder_block
    decoder, block = known[model]
    return adapted_names(decoder, block, entries)

  return of


@pytest.mark.parametrize(("model", "entry", "meant"), MEANT)
def test_an_entry(names, model, entry, meant):
  found = names(model, [entry])
  assert {re.sub(r"^layers\.\d+\.", "", name) for name in found} == set(meant.split())


def test_one_layer_alone(names):
  for entry in ("layers.3", "model.layers.3", "model.layers.3.mlp.up_proj", r"^model\.language_model\.layers\.3\."):
    assert {name.split(".")[1] for name in names("gemma4-tiny", [entry])} == {"3"}


def test_entries_add_up(names):
  one, other = ({"q_proj"}, {"v_proj"})
  both = names("gemma3-tiny", [*one, *other])
  assert both == names("gemma3-tiny", one) | names("gemma3-tiny", other)


@pytest.mark.parametrize(
  ("model", "entry", "said"),
  [
    ("gemma4-tiny", "qproj", "'qproj' matches no weight of this model\n  fix: use all-linear, or names such as q_proj"),
    ("gemma4-tiny", "model.self_attn.q_proj", "'model.self_attn.q_proj' matches no weight of this model"),
    ("gemma4-tiny", "model.layers.", "'model.layers.' matches no weight of this model"),
    ("gemma4-tiny", "experts", "'experts' matches no weight of this model"),
    ("deepseek3.2-tiny", "q_proj", "names such as q_a_proj, q_b_proj"),
    ("gemma4-tiny", "q_proj(", "'q_proj(' is not a regular expression"),
  ],
)
def test_what_means_nothing_is_told(names, model, entry, said):
  with pytest.raises(UserError, match=re.escape(said)):
    names(model, [entry])


@pytest.mark.parametrize(
  ("model", "words", "said"),
  [
    (
      "deepseek3-tiny",
      ["modules_to_save=[lm_head]", "base_weights_modules=[all-linear, lm_head]"],
      "head.kernel is stored as nf4, but modules_to_save trains it fully\n  fix: remove lm_head from one of them",
    ),
    (
      "gemma3-tiny",
      ["use_multimodal=true", "vision_tower=trained", "base_weights_modules=[all-linear, vision]"],
      "is stored as nf4, but vision_tower = trained trains it fully\n  fix: remove the tower from base_weights_modules",
    ),
  ],
)
def test_what_is_quantized_is_not_trained_whole(model, words, said):
  config = load_config(model, ["lora_rank=2", "lora_modules=[all-linear]", "base_weights=nf4", *words]).config
  settings, tower = config.adapter, config.training.vision_tower
  with pytest.raises(UserError, match=re.escape(said)) as refused:
    configured_adapter(with_base(make_model(config), settings), settings, tower)
  assert ("the tower" in str(refused.value)) == (tower == "trained")
