"""Shrinks a failing case: removes features one by one while the case still fails."""

import copy
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from tests.parity.draw import TILE, Case, least_length

ABSENT = object()


def shrink(case: Case, fails: Callable[[Case], bool], *, tries: int = 60) -> Case:
  """Returns the smallest case found that still fails.

  Args:
    case: a case that fails.
    fails: returns True if a case fails in the same way. It must return False for an invalid model.
    tries: maximum number of calls of ``fails``.
  """
  improved = True
  while improved and tries > 0:
    improved = False
    for _, smaller in simpler(case)[:tries]:
      tries -= 1
      if fails(smaller):
        case, improved = smaller, True
        break
  return case


def simpler(case: Case) -> list[tuple[str, Case]]:
  """Returns cases with one feature less, with their descriptions. Large reductions come first; some models are invalid."""

  def with_text(change: str, **values: Any) -> tuple[str, Case]:
    config = copy.deepcopy(case.config)
    text = config.get("text_config", config)
    for key, value in values.items():
      text.pop(key, None)
      if value is not ABSENT:
        text[key] = value
    return change, replace(case, config=config)

  text, found = case.text, []
  layers = text["num_hidden_layers"]
  if case.images:
    found.append(("no images", replace(case, images=0)))
    found.append(("one image", replace(case, images=1)))
  for length in (8, 32, TILE, TILE + 1, case.length // 2, case.length - 1):
    if least_length(case) <= length < case.length:
      found.append((f"length {length}", replace(case, length=length)))
  found += [(f"{rows} rows", replace(case, rows=rows)) for rows in range(1, case.rows)]
  for fewer in sorted({1, layers // 2, layers - 1}):
    if 1 <= fewer < layers:
      listed = {key: text[key][-fewer:] for key in ("layer_types", "mlp_layer_types") if key in text}
      shared = {"num_kv_shared_layers": 0} if "num_kv_shared_layers" in text else {}
      found.append(with_text(f"the last {fewer} layers", num_hidden_layers=fewer, **listed, **shared))
      listed = {key: text[key][:fewer] for key in ("layer_types", "mlp_layer_types") if key in text}
      found.append(with_text(f"the first {fewer} layers", num_hidden_layers=fewer, **listed, **shared))
  found += [("plain rows", replace(case, tokens="plain")), ("Hub form", replace(case, form="hub"))]
  found += [("float32 file", replace(case, stored="float32")), ("no words", replace(case, words=()))]
  plain: dict[str, Any] = {
    "tie_word_embeddings": "gemma" in case.family,
    "final_logit_softcapping": None,
    "rope_scaling": None,
    "rope_parameters": ABSENT,
    "num_kv_shared_layers": 0,
    "use_double_wide_mlp": False,
    "attention_k_eq_v": False,
    "num_global_key_value_heads": None,
    "hidden_size_per_layer_input": 0,
    "enable_moe_block": False,
    "use_bidirectional_attention": None,
    "attention_bias": False,
    "sliding_window": 4096,
    "num_experts_per_tok": 1,
    "top_k_experts": 1,
    "n_shared_experts": 1,
    "first_k_dense_replace": layers,
    "index_topk": 4096,
    "norm_topk_prob": ABSENT,
    "routed_scaling_factor": ABSENT,
    "rope_interleave": ABSENT,
    "max_position_embeddings": 4096,
    "rms_norm_eps": ABSENT,
    "pad_token_id": ABSENT,
    "eos_token_id": ABSENT,
    "query_pre_attn_scalar": 16,
  }
  for key, value in plain.items():
    if key in text and text[key] != value:
      found.append(with_text(f"plain {key}", **{key: value}))
  heads = text["num_attention_heads"]
  if heads > 1:
    keys = {"num_attention_heads": 1, "num_key_value_heads": 1} | (
      {"num_global_key_value_heads": None} if "gemma4" in case.family else {}
    )
    found.append(with_text("one head", **keys))
  return [(change, other) for change, other in found if other != case]
