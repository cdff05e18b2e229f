"""Gemma 3 in MaxText, and what MaxText does for every Gemma."""

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
  """What MaxText's code does for both: ``cycle`` is that of the layers, ``tokens`` are those of, before and after an image."""
  if file.number("global_rope_max_timescale") > 0:
    file.dropped.add("rope_max_timescale")  # every Gemma 4 layer has a table of its own
  elif "global_rope_max_timescale" in file.given:
    file.dropped.add("global_rope_max_timescale")
  file.assumed["inhomogeneous_layer_cycle_interval"] = cycle  # written in MaxText's code; a file may repeat it
  # So is that the tokens of an image see each other both ways, in all layers of Gemma 3 and the sliding ones of Gemma 4.
  file.assumed["use_bidirectional_image_attn"] = True
  if file.number("local_rope_max_timescale") <= 0 < file.number("rope_max_timescale"):
    file.dropped.add("local_rope_max_timescale")
    file.assumed["local_rope_max_timescale"] = file.number("rope_max_timescale")
  # And what there is to know about the vision towers.
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
  defaults={"head_dim": 128, "eos_token_id": (1, 106)},  # the tokens of the tokenizer
  complete=_complete,
)
