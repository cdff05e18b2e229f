"""Names of config.json for our keys: each is the field that decides the key, and messages about a file use it."""

import copy
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from maxtext_like.checkpoint.huggingface.config import interpret
from maxtext_like.checkpoint.huggingface.family import in_config_json
from maxtext_like.checkpoint.huggingface.model_file import load_checkpoint_config
from maxtext_like.config.schema import LEAVES
from maxtext_like.errors import UserError
from maxtext_like.models.registry import FAMILIES

GOLDEN = Path(__file__).parents[2] / "golden"
CASES = {
  "gemma3": ("gemma3_text", "gemma3_vision"),
  "gemma4": ("gemma4_dense", "gemma4_vision_large", "gemma4_moe"),
  "deepseek": ("deepseek3", "deepseek32"),
  "qwen3": ("qwen3", "qwen3_moe"),
}
FIXED = ("decoder_block", "mlp_activation")  # any other value is another family or is refused
# Values that other fields need when this field has another value.
BESIDE = {"num_hidden_layers": {"layer_types": None, "per_layer_config": {}}, "num_attention_heads": {"num_key_value_heads": 1}}
# Values for fields that the golden files omit or set to null.
OTHER = {"tie_word_embeddings": False, "default_output_length": 1, "final_logit_softcapping": 20.0, "router_aux_loss_coef": 0.5}


def hub(case: str) -> dict[str, Any]:
  return json.loads((GOLDEN / case / "checkpoint" / "config.json").read_text())


def others(config: dict[str, Any], name: str) -> Iterator[dict[str, Any]]:
  """Yield the file with another value of a field, once for every object that may contain it."""
  for path in [(), *((key,) for key in config if isinstance(config[key], dict)), *ROPE]:
    other = copy.deepcopy(config)
    holder = other
    for key in path:
      holder = holder.get(key) or {}
    if name in holder or name in OTHER:
      holder[name] = OTHER[name] if name in OTHER and holder.get(name) is None else another(holder[name])
      holder |= BESIDE.get(name, {}) if path != ("vision_config",) else {}
      if "kv_lora_rank" in holder:  # DeepSeek needs equal numbers of both
        holder["num_key_value_heads"] = holder["num_attention_heads"]
      if path == ("vision_config",) and "num_key_value_heads" in holder:
        holder["num_key_value_heads"] = holder["num_attention_heads"]
      yield other


ROPE = [
  (*text, *scaling)
  for text in ((), ("text_config",))
  for scaling in (("rope_scaling",), ("rope_parameters", "full_attention"), ("rope_parameters", "sliding_attention"))
] + [("vision_config", "rope_parameters")]


def another(value: Any) -> Any:
  if isinstance(value, bool):
    return not value
  if isinstance(value, list):
    return value[1:] + value[-1:]
  return "vision" if value is None else None if value == "vision" else type(value)(value / 2)


def decides(case: str, ours: str, theirs: str) -> bool:
  """Return True if another value of the field changes our key."""
  config = hub(case)
  before = interpret(config, "config.json")
  for other in others(config, theirs):
    try:
      after = interpret(other, "config.json")
    except UserError:
      continue
    if (after.model | after.vision).get(ours) != (before.model | before.vision).get(ours):
      return True
  return False


NAMES = {name: family.huggingface.names for name, family in FAMILIES.items()}
PAIRS = [(family, ours, theirs) for family, names in NAMES.items() for ours, theirs in names.items() if ours not in FIXED]


@pytest.mark.parametrize(("family", "ours", "theirs"), PAIRS, ids=[f"{family}: {ours}" for family, ours, _ in PAIRS])
def test_the_field_decides_the_key(family: str, ours: str, theirs: str):
  assert ours in LEAVES
  assert any(decides(case, ours, theirs) for case in CASES[family])


def test_whole_words_are_translated_and_what_someone_wrote_stays():
  names = FAMILIES["deepseek"].huggingface.names
  assert in_config_json("num_experts = 6 (num_experts_per_tok)", names) == "n_routed_experts = 6 (num_experts_per_tok)"
  assert in_config_json("num_experts = 6, emb_dim = 3", names, {"num_experts"}) == "num_experts = 6, hidden_size = 3"


def failure(tmp_path: Path, case: str, change: dict[str, Any], *words: str) -> str:
  (tmp_path / "emb_dim").mkdir()  # a folder's name is not translated
  (tmp_path / "emb_dim" / "config.json").write_text(json.dumps(hub(case) | change))
  with pytest.raises(UserError) as error:
    load_checkpoint_config(tmp_path / "emb_dim", words)
  return str(error.value)


def test_a_contradiction_in_a_file_is_told_in_its_words(tmp_path: Path):
  message = failure(tmp_path, "deepseek3_plain", {"num_experts_per_tok": 7})
  assert "num_experts_per_tok = 7 is more than n_routed_experts = 6" in message
  assert f"{tmp_path}/emb_dim/config.json (n_routed_experts)" in message


def test_a_key_of_the_command_line_keeps_its_name(tmp_path: Path):
  message = failure(tmp_path, "deepseek3_plain", {}, "num_experts=0")
  assert "num_experts = 0, but 2 layers after the first_k_dense_replace = 1 have experts" in message
