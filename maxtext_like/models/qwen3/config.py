"""The ``model:`` keys of Qwen3, dense and with experts."""

from dataclasses import dataclass
from typing import Any

from maxtext_like.config.model import ExpertsConfig, GroupedQueryConfig

SPELLINGS = {"eos": ("<|endoftext|>",), "start_of_turn": ("<|im_start|>",), "end_of_turn": ("<|im_end|>",)}


@dataclass(frozen=True, kw_only=True)
class Config(ExpertsConfig, GroupedQueryConfig):
  """``model:`` of Qwen3. With ``num_experts`` every layer has experts, and ``mlp_dim`` is not used."""

  parts = frozenset({"experts"})

  def effective(self, key: str) -> Any:
    """Return the value of a key, with defaults that depend on other keys filled in."""
    return None if key == "mlp_dim" and self.num_experts else super().effective(key)
