"""MaxText's model files: what MaxText does with one, and where this project's own defaults are others.

A MaxText model file means what MaxText does with it. Where MaxText leaves a choice to its code, to the model's name or
to its base.yml, ``translate_file`` states it for everything that makes the model. How a model is trained is not the
file's: there this project's defaults hold, and ``differences`` lists them.
"""

from collections.abc import Mapping

from maxtext_like.config.maxtext import CONVERTED, DEEPSEEK, GEMMA, RENAMED, entry_of, same_number, translate_keys
from maxtext_like.config.problems import Problem
from maxtext_like.config.schema import LEAVES
from maxtext_like.config.yaml_file import Entry, Scalar, to_text

MODEL_KEYS = frozenset(key for key in (*RENAMED, *CONVERTED) if key.startswith("base_") and key != "base_output_directory")
"""Keys that are in every MaxText model file, and in no file of ours."""

RUN_KEYS = frozenset(("base_config", "override_model_config"))
"""Keys that tell a file of MaxText's that is laid under or over a model, as its base.yml, from a model file."""

_LATENT = {"kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "rope_factor": 40}
MODEL_DEFAULTS: dict[tuple[str, ...], dict[str, object]] = {
  (*GEMMA, *DEEPSEEK): {"normalization_layer_epsilon": 1e-5, "logits_via_embedding": False},
  GEMMA: {"head_dim": 128},
  ("gemma4",): {"global_rope_proportion": 0.25},
  DEEPSEEK: {**_LATENT, "max_position_embeddings": 163840, "pad_token_id": None, "bos_token_id": 0, "eos_token_id": 1},
}
"""What MaxText's base.yml (for the tokens: the tokenizer) says of a model where the file does not, by family."""

DEFAULTS: dict[str, object] = {
  "max_position_embeddings": 163840,
  "indexer_sparse_training": False,
  "indexer_loss_scaling_factor": 0.0,
  "dtype": "bfloat16",
  "weight_dtype": "float32",
  "grad_dtype": "float32",
  "float32_qk_product": False,
  "float32_logits": False,
  "float32_gate_logits": False,
  "float32_weight_sum": True,
  "cast_logits_to_fp32": True,
  "logits_dot_in_fp32": False,
  "matmul_precision": "default",
  "steps": 150001,
  "scan_layers": True,
  "remat_policy": "full",
  "per_device_batch_size": 12,
  "max_target_length": 2048,
  "gradient_accumulation_steps": 1,
  "opt_type": "adamw",
  "learning_rate": 3e-5,
  "lr_schedule_type": "cosine",
  "warmup_steps_fraction": 0.1,
  "learning_rate_final_fraction": 0.1,
  "adam_b1": 0.9,
  "adam_b2": 0.95,
  "adam_eps": 1e-8,
  "adam_weight_decay": 0.1,
  "gradient_clipping_threshold": 1.0,
  "z_loss_multiplier": 0.0,
  "num_vocab_tiling": 1,
  "packing": True,
  "shuffle": True,
  "checkpoint_interval": 10000,
  "max_to_keep": "all",
  "dataset": "tfds (c4/en:3.1.0)",
  "tokenizer": "the model's, from the Hub",
}
"""MaxText's defaults for keys that are here too, by our name. Those that are the same may still be others in a model file."""

OTHER_RULES = (
  ("weight decay", "not on norms, scalars, biases", "on every parameter"),
  ("first step", "learning_rate / warm-up steps", "learning rate 0"),
)
"""What no key says: of what, here, in MaxText."""


def is_maxtext_file(entries: list[Entry]) -> bool:
  """Whether a file is a model file of MaxText's."""
  return any(e.key in MODEL_KEYS for e in entries)


def translate_file(entries: list[Entry], stem: str) -> tuple[list[Entry], list[str], list[Problem]]:
  """A whole MaxText model file in our keys.

  Args:
    entries: its keys.
    stem: its name without ``.yml``, which is the model's name in MaxText.

  Returns:
    The entries in our names, notes on what changes nothing or something else, problems.
  """
  block = _text_of(entries, "decoder_block")
  family = "gemma4" if block == "gemma4_small" else block
  return translate_keys(_completed(entries, family, stem), family)


def differences(values: Mapping[str, object], said: frozenset[str], *, decoder: bool = True) -> list[tuple[str, str, str]]:
  """What this project decides otherwise than MaxText where nobody said anything: of what, here, in MaxText.

  Args:
    values: of the resolved configuration, by leaf name.
    said: leaf names that MaxText's file, a hardware file or the command line sets.
    decoder: also what makes the model; not for a model file of ours, which is another file than MaxText's.
  """
  idle = set() if values["use_indexer"] else {"indexer_sparse_training", "indexer_loss_scaling_factor"}
  idle |= set() if values["num_experts"] else {"float32_gate_logits"}
  rows = [] if decoder else [("model", "this project's, as released", "MaxText's file of it")]
  for key, theirs in DEFAULTS.items():
    if key in said or key in idle or values[key] == theirs or (LEAVES[key][0] == "model" and not decoder):
      continue
    rows.append((key, to_text(values[key]), theirs if isinstance(theirs, str) else to_text(theirs)))
  if values["use_multimodal"]:
    if not values["trainable_parameters_mask"]:
      rows.append(("vision tower", "trained", "frozen (freeze_vision_encoder_params)"))
    if values["decoder_block"] == "gemma4":
      rows.append(("size of an image", "follows its aspect ratio", "one for all images"))
  return [*rows, *OTHER_RULES]


def table(of: str, rows: list[tuple[str, str, str]]) -> str:
  """The differences for people, several lines."""
  rows = [("", "here", "MaxText"), *rows]
  widths = [max(len(row[i]) for row in rows) for i in range(2)]
  lines = [f"{a:<{widths[0]}}  {b:<{widths[1]}}  {c}".rstrip() for a, b, c in rows]
  return "\n".join([f"{of}: what nobody said is decided otherwise than in MaxText:", *lines])


def _text_of(entries: list[Entry], key: str) -> str:
  for entry in entries:
    if entry.key == key and isinstance(entry.node, Scalar):
      return entry.node.text
  return ""


def _completed(entries: list[Entry], family: str, stem: str) -> list[Entry]:
  """The file with what MaxText itself adds, and without what it ignores."""
  given = {e.key: e for e in entries}
  said = {RENAMED.get(key, key) for key in given}
  name = _text_of(entries, "model_name") or stem
  place = given.get("decoder_block", entries[0])
  small = _text_of(entries, "decoder_block") == "gemma4_small"
  assumed: dict[str, object] = {}
  dropped: set[str] = set()
  extra: list[Entry] = []

  def number(key: str) -> float:
    text = _text_of(entries, key).replace("_", "")
    return float(text) if same_number(text, text) else 0.0

  for families, defaults in MODEL_DEFAULTS.items():
    if family in families:
      assumed |= defaults
  if number("global_rope_max_timescale") > 0:
    dropped.add("rope_max_timescale")  # every Gemma 4 layer has a table of its own
  elif "global_rope_max_timescale" in given:
    dropped.add("global_rope_max_timescale")
  if family in GEMMA:
    # The pattern is written in MaxText's code, E2B's by its name; a file may repeat it.
    e2b = "e2b" in name or number("base_num_decoder_layers") == 35
    assumed["inhomogeneous_layer_cycle_interval"] = 5 if small and e2b else 6
    # So is that the tokens of an image see each other both ways, in all layers of Gemma 3 and the sliding ones of Gemma 4.
    assumed["use_bidirectional_image_attn"] = True
    if number("local_rope_max_timescale") <= 0 < number("rope_max_timescale"):
      dropped.add("local_rope_max_timescale")
      assumed["local_rope_max_timescale"] = number("rope_max_timescale")
    # And what there is to know about the vision towers.
    tokens = {"gemma3": (262144, 255999, 256000), "gemma4": (258880, 255999, 258882)}[family]
    assumed |= zip(("image_token_id", "boi_token_id", "eoi_token_id"), tokens, strict=True)
    if family == "gemma3":
      assumed["vision_output_length"] = 256
    else:
      assumed |= {"video_token_id": 258884, "audio_token_id": 258881}  # Gemma 4's own: MaxText takes neither
      if "use_clipped_linears_for_vit" not in given:
        assumed["use_clipped_linears_for_vit" if small else "standardize_for_vit"] = True
  if family == "gemma3":
    if number("rope_linear_scaling_factor") not in (0.0, 1.0):
      dropped.add("rope_type")
      extra.append(entry_of("rope_type", "linear", Entry("", place.node, f"what MaxText does for {name}")))
    released_27b = (number("base_emb_dim"), number("head_dim")) == (5376, 128)
    if name == "gemma3-27b" or released_27b:
      assumed["query_pre_attn_scalar"] = number("base_emb_dim") // max(number("base_num_query_heads"), 1)
  if "num_experts" in given and number("num_experts") == 1:
    dropped.add("num_experts")  # MaxText's number for a dense model
    assumed["num_experts"] = 0
  if family == "gemma4" and number("num_experts") > 1:
    if number("shared_experts") == 1:
      dropped.add("shared_experts")  # the dense MLP beside the experts, which is always there
    assumed["norm_topk_prob"] = False
  if family == "deepseek":
    dropped.add("norm_topk_prob")  # sigmoid routing divides by the sum, whatever the key says
    dropped.add("head_dim")  # latent attention has its own head sizes
    if "mscale" in given:
      # MaxText scales the softmax by mscale and leaves the rotary table alone: ours with both magnitudes equal.
      extra.append(Entry("mscale_all_dim", given["mscale"].node, given["mscale"].origin))
  kept = [e for e in entries if e.key not in dropped]
  source = Entry("", place.node, f"what MaxText does for {name}")
  return kept + extra + [entry_of(key, value, source) for key, value in assumed.items() if key not in said - dropped]


def note_on_images(values: Mapping[str, object], of: str) -> list[str]:
  """A word on images in the small Gemma 4 models, where MaxText differs from what was released."""
  small = values["decoder_block"] == "gemma4" and values["hidden_size_per_layer_input"]
  if not (small and values["use_multimodal"] and values["use_bidirectional_image_attn"]):
    return []
  return [
    f"{of}: tokens of an image see each other both ways, as in MaxText; in the released E2B and E4B they do not: "
    "use_bidirectional_image_attn=false"
  ]
