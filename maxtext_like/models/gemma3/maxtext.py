"""The meaning of MaxText's keys for Gemma 3, and the values that MaxText's code assumes for Gemma 3 and 4."""

from maxtext_like.config.maxtext_family import MaxText, ModelFile, entry_of

FIXED = {
  "use_post_attn_norm": (True,),
  "use_post_ffw_norm": (True,),
  "use_qk_norm": (True,),
  "attention_type": ("global",),
  "routed_score_func": ("",),
  "normalize_embedding_logits": (True,),
  "num_channels_for_vit": (3,),
}


def complete(file: ModelFile, *, cycle: int, tokens: tuple[int, int, int]) -> None:
  """Fill in the values of MaxText's code. ``cycle``: interval of layer types. ``tokens``: ids of, before and after an image."""
  if file.number("global_rope_max_timescale") > 0:
    file.dropped.add("rope_max_timescale")  # Gemma 4 has a separate table for each type of layer
  elif "global_rope_max_timescale" in file.given:
    file.dropped.add("global_rope_max_timescale")
  file.assumed["inhomogeneous_layer_cycle_interval"] = cycle  # a constant in MaxText's code; a file may repeat it
  # Tokens of an image see each other in both directions, in all layers of Gemma 3 and in the sliding layers of Gemma 4.
  file.assumed["use_bidirectional_image_attn"] = True
  if file.number("local_rope_max_timescale") <= 0 < file.number("rope_max_timescale"):
    file.dropped.add("local_rope_max_timescale")
    file.assumed["local_rope_max_timescale"] = file.number("rope_max_timescale")
  # Special tokens of the vision towers.
  file.assumed |= zip(("image_token_id", "boi_token_id", "eoi_token_id"), tokens, strict=True)


def _complete(file: ModelFile) -> None:
  complete(file, cycle=6, tokens=(262144, 255999, 256000))
  file.assumed["vision_output_length"] = 256
  if file.number("rope_linear_scaling_factor") not in (0.0, 1.0):
    file.dropped.add("rope_type")
    file.extra.append(entry_of("rope_type", "linear", file.source))
  released_27b = (file.number("base_emb_dim"), file.number("head_dim")) == (5376, 128)
  if file.name == "gemma3-27b" or released_27b:
    heads = max(file.number("base_num_query_heads"), 1)
    file.assumed["query_pre_attn_scalar"] = file.number("base_emb_dim") // heads


MAXTEXT = MaxText(
  fixed=FIXED | {"vision_encoder_block": ("gemma3",)},
  defaults={"head_dim": 128, "eos_token_id": (1, 106)},  # the tokenizer's end tokens
  complete=_complete,
)
