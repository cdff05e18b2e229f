"""MaxText's names: what each means here. One table, used for whole model files and for single keys.

A MaxText model file means what MaxText does with it. Where MaxText leaves a choice to its code, to the model's name or
to a default that differs from ours, ``_completed`` states it. Precision flags that a file does not mention keep this
project's defaults, which are the more exact ones.
"""

from collections.abc import Callable

from maxtext_like.config.coerce import CoercionError, coerce
from maxtext_like.config.problems import Problem
from maxtext_like.config.schema import LEAVES
from maxtext_like.config.yaml_file import Entry, Scalar, Sequence, to_text

RENAMED = {
  "base_emb_dim": "emb_dim",
  "base_mlp_dim": "mlp_dim",
  "base_moe_mlp_dim": "moe_mlp_dim",
  "base_num_decoder_layers": "num_decoder_layers",
  "base_num_query_heads": "num_query_heads",
  "base_num_kv_heads": "num_kv_heads",
  "ple_pad_token_id": "pad_token_id",
  "base_output_directory": "output_dir",
  "checkpoint_period": "checkpoint_interval",
  "max_num_checkpoints_to_keep": "max_to_keep",
  "load_parameters_path": "init_from",
  "tokenizer_path": "tokenizer",
  "enable_data_shuffling": "shuffle",
  "init_weights_seed": "seed",
  "cosine_learning_rate_final_fraction": "learning_rate_final_fraction",
  "learning_rate_schedule_steps": "lr_schedule_steps",
  "jax_cache_dir": "compilation_cache_dir",
  "image_placeholder_token_id": "image_token_id",
}
"""Other name, same meaning."""

GEMMA, DEEPSEEK, ALL = ("gemma3", "gemma4"), ("deepseek",), ("gemma3", "gemma4", "deepseek")

FIXED: dict[str, dict[tuple[str, ...], tuple[object, ...]]] = {
  "use_post_attn_norm": {GEMMA: (True,), DEEPSEEK: (False,)},
  "use_post_ffw_norm": {GEMMA: (True,), DEEPSEEK: (False,)},
  "use_qk_norm": {GEMMA: (True,), DEEPSEEK: (False,)},
  "v_norm_with_scale": {("gemma4",): (False,)},
  "local_rope_proportion": {("gemma4",): (1.0,)},
  "enable_dropout": {ALL: (False,)},
  "dropout_rate": {ALL: (0.0,)},
  "attention_type": {DEEPSEEK: ("mla",), GEMMA: ("global",)},
  "routed_score_func": {DEEPSEEK: ("sigmoid",), GEMMA: ("",)},
  "rope_truncate": {DEEPSEEK: (True,)},
  "rope_attention_scaling": {ALL: (False,)},
  "attn_logits_soft_cap": {ALL: (0.0,)},
  "normalize_embedding_logits": {ALL: (True,)},
  "mlp_activations_limit": {ALL: (-1.0,)},
  "global_parameter_scale": {ALL: (1,)},
  "capacity_factor": {ALL: (-1.0,)},
  "use_random_routing": {ALL: (False,)},
  "mtp_num_layers": {ALL: (0,)},
  "quantization": {ALL: ("",)},
  "num_channels_for_vit": {GEMMA: (3,)},
  "vision_encoder_block": {("gemma3",): ("gemma3",), ("gemma4",): ("gemma4",)},
  "ici_tensor_parallelism": {ALL: (1,)},
  "ici_expert_parallelism": {ALL: (1,)},
  "ici_context_parallelism": {ALL: (1,)},
  "ici_pipeline_parallelism": {ALL: (1,)},
}
"""Keys that say what these families always do (or a machine axis that is not there): accepted with that value only."""

WITHOUT_EFFECT = {
  "conv_stride_for_vit": "the step between patches is their size",
  "ple_pad_substitute_image_rows": "the per-layer embedding always looks up padding at the tokens of an image",
  "ple_pad_mode": "the per-layer embedding always looks up padding at the tokens of an image",
}
"""Keys that say what the vision towers always do, each with what that is; accepted and noted."""

CONVERTED = ("mlp_activations", "global_rope_max_timescale")
"""Keys whose value takes another form here."""

KNOWN = frozenset((*RENAMED, *FIXED, *WITHOUT_EFFECT, *CONVERTED))


def is_maxtext_file(entries: list[Entry]) -> bool:
  """Whether a flat file speaks MaxText: it has a key that only MaxText has."""
  return any(e.key in KNOWN for e in entries)


def translate_file(entries: list[Entry], stem: str) -> tuple[list[Entry], list[str], list[Problem]]:
  """A whole MaxText model file in our keys.

  Args:
    entries: its keys.
    stem: its name without ``.yml``, which is the model's name in MaxText.

  Returns:
    The entries in our names, notes on keys without effect, problems.
  """
  block = _text_of(entries, "decoder_block")
  family = "gemma4" if block == "gemma4_small" else block
  done, notes, problems = translate_keys(_completed(entries, family, stem), family)
  return done, notes, problems


def translate_keys(entries: list[Entry], family: str) -> tuple[list[Entry], list[str], list[Problem]]:
  """Single keys in our names; keys of ours pass unchanged. See ``translate_file``."""
  done: list[Entry] = []
  notes: list[str] = []
  problems: list[Problem] = []
  for entry in entries:
    if entry.key in WITHOUT_EFFECT:
      notes.append(f"{entry.origin}: {entry.key} has no effect: {WITHOUT_EFFECT[entry.key]}")
    elif entry.key == "image_size_for_vit" and family == "gemma4":
      notes.append(f"{entry.origin}: {entry.key} has no effect: images keep their aspect ratio, up to vision_output_length")
    elif entry.key in FIXED:
      problems += _check_fixed(entry, family)
    else:
      ours = Entry(RENAMED.get(entry.key, entry.key), entry.node, entry.origin)
      try:
        done += [ours] if (convert := _CONVERTERS.get(ours.key)) is None else convert(ours)
      except CoercionError as error:
        problems.append(Problem(f"{entry.origin}: {entry.key}: {error}"))
  return done, notes, problems


def _check_fixed(entry: Entry, family: str) -> list[Problem]:
  for families, values in FIXED[entry.key].items():
    if family not in families:
      continue
    for value in values:
      kind = type(value)
      try:
        if coerce(entry.node, kind) == value:
          return []
      except CoercionError:
        continue
    return [
      Problem(
        f"{entry.origin}: {entry.key} = {_shown(entry)} is not supported in decoder_block {family}",
        fix=f"only {entry.key}: {' or '.join(to_text(v) for v in values)} is, which is what this family always does",
      )
    ]
  return [Problem(f"{entry.origin}: {entry.key} is not supported in decoder_block {family or 'that is not named'}")]


def _shown(entry: Entry) -> str:
  return repr(entry.node.text) if isinstance(entry.node, Scalar) else "(a list or mapping)"


def _activation(entry: Entry) -> list[Entry]:
  names = coerce(entry.node, tuple[str, ...]) if isinstance(entry.node, Sequence) else ()
  if not (isinstance(names, tuple) and len(names) == 2 and names[1] == "linear" and names[0] in ("gelu", "silu")):
    raise CoercionError("only [gelu, linear] and [silu, linear], a gated MLP, are supported")
  return [_entry("mlp_activation", names[0], entry)]


def _without(absent: str, instead: object) -> Callable[[Entry], list[Entry]]:
  """Replaces MaxText's number for "none" by ours."""

  def convert(entry: Entry) -> list[Entry]:
    none = isinstance(entry.node, Scalar) and entry.node.plain and _same_number(entry.node.text, absent)
    return [_entry(entry.key, instead, entry) if none else entry]

  return convert


def _same_number(text: str, number: str) -> bool:
  try:
    return float(text) == float(number)
  except ValueError:
    return False


def _choice(key: str, names: dict[str, str]) -> Callable[[Entry], list[Entry]]:
  def convert(entry: Entry) -> list[Entry]:
    if isinstance(entry.node, Scalar) and entry.node.text in names:
      return [_entry(key, names[entry.node.text], entry)]
    return [entry]

  return convert


_CONVERTERS: dict[str, Callable[[Entry], list[Entry]]] = {
  "mlp_activations": _activation,
  "decoder_block": _choice("decoder_block", {"gemma4_small": "gemma4"}),
  "attention": _choice("attention", {"autoselected": "auto"}),
  "global_rope_max_timescale": lambda e: [Entry("rope_max_timescale", e.node, e.origin)],
  "global_head_dim": _without("0", None),
  "global_num_kv_heads": _without("0", None),
  "final_logits_soft_cap": _without("0", None),
  "num_experts": _without("1", 0),
  "n_routing_groups": _without("-1", 1),
  "topk_routing_group": _without("-1", 1),
  "lr_schedule_steps": _without("-1", None),
}


def _entry(key: str, value: object, source: Entry) -> Entry:
  """An entry with a value of ours, told to come from where the source was written."""
  node = Scalar("null" if value is None else str(value), plain=True, line=source.node.line)
  return Entry(key, node, source.origin)


def _text_of(entries: list[Entry], key: str) -> str:
  for entry in entries:
    if entry.key == key and isinstance(entry.node, Scalar):
      return entry.node.text
  return ""


def _completed(entries: list[Entry], family: str, stem: str) -> list[Entry]:
  """The file with what MaxText itself adds, and without what it ignores."""
  given = {e.key: e for e in entries}
  name = _text_of(entries, "model_name") or stem
  place = given.get("decoder_block", entries[0])
  assumed: dict[str, object] = {}
  dropped: set[str] = set()
  extra: list[Entry] = []

  def number(key: str) -> float:
    text = _text_of(entries, key).replace("_", "")
    return float(text) if _same_number(text, text) else 0.0

  if number("global_rope_max_timescale") > 0:
    dropped.add("rope_max_timescale")  # every Gemma 4 layer has a table of its own
  elif "global_rope_max_timescale" in given:
    dropped.add("global_rope_max_timescale")
  if family in GEMMA:
    # The pattern is written in MaxText's code, E2B's by its name; a file may repeat it.
    e2b = "e2b" in name or number("base_num_decoder_layers") == 35
    cycle = 5 if _text_of(entries, "decoder_block") == "gemma4_small" and e2b else 6
    if "inhomogeneous_layer_cycle_interval" not in given:
      assumed["inhomogeneous_layer_cycle_interval"] = cycle
  if family == "gemma3":
    if number("rope_linear_scaling_factor") not in (0.0, 1.0):
      assumed["rope_type"] = "linear"
      dropped.add("rope_type")
    released_27b = (number("base_emb_dim"), number("head_dim")) == (5376, 128)
    if "query_pre_attn_scalar" not in given and (name == "gemma3-27b" or released_27b):
      assumed["query_pre_attn_scalar"] = number("base_emb_dim") // max(number("base_num_query_heads"), 1)
  if family in GEMMA:
    # What MaxText writes in its code about the vision towers.
    tokens = {"gemma3": (262144, 255999, 256000), "gemma4": (258880, 255999, 258882)}[family]
    vision: dict[str, object] = dict(zip(("image_token_id", "boi_token_id", "eoi_token_id"), tokens, strict=True))
    if family == "gemma3":
      vision["vision_output_length"] = 256
    else:
      vision |= {"video_token_id": 258884, "audio_token_id": 258881}  # Gemma 4's own: MaxText takes neither
      if "use_clipped_linears_for_vit" not in given:
        small = _text_of(entries, "decoder_block") == "gemma4_small"
        vision["use_clipped_linears_for_vit" if small else "standardize_for_vit"] = "true"
    said = {RENAMED.get(key, key) for key in given}
    assumed |= {key: value for key, value in vision.items() if key not in said}
  if family == "gemma4" and number("num_experts") > 1:
    if number("shared_experts") == 1:
      dropped.add("shared_experts")  # the dense MLP beside the experts, which is always there
    if "norm_topk_prob" not in given:
      assumed["norm_topk_prob"] = "false"
  if family == "deepseek":
    dropped.add("norm_topk_prob")  # sigmoid routing divides by the sum, whatever the key says
    dropped.add("head_dim")  # latent attention has its own head sizes
    if "mscale" in given:
      # MaxText scales the softmax by mscale and leaves the rotary table alone: ours with both magnitudes equal.
      extra.append(Entry("mscale_all_dim", given["mscale"].node, given["mscale"].origin))
  kept = [e for e in entries if e.key not in dropped]
  source = Entry("", place.node, f"what MaxText does for {name}")
  return kept + extra + [_entry(key, value, source) for key, value in assumed.items()]


assert not KNOWN & set(LEAVES), "a MaxText name must not be a name of ours"
