"""The meaning of MaxText's keys for Gemma 4."""

from collections.abc import Mapping

from maxtext_like.config.maxtext_family import MaxText, Meaning, ModelFile
from maxtext_like.models.gemma3.maxtext import FIXED, complete


def _complete(file: ModelFile) -> None:
  small = file.text("decoder_block") == "gemma4_small"
  # MaxText selects E2B's layer pattern by the model name.
  e2b = "e2b" in file.name or file.number("base_num_decoder_layers") == 35
  complete(file, cycle=5 if small and e2b else 6, tokens=(258880, 255999, 258882))
  file.assumed |= {"video_token_id": 258884, "audio_token_id": 258881}  # Gemma 4's values; MaxText has no keys for them
  if "use_clipped_linears_for_vit" not in file.given:
    file.assumed["use_clipped_linears_for_vit" if small else "standardize_for_vit"] = True
  if file.number("num_experts") > 1:
    if file.number("shared_experts") == 1:
      file.dropped.add("shared_experts")  # the dense MLP of layers with experts, which always exists here
    file.assumed["norm_topk_prob"] = False


def _notes(values: Mapping[str, object]) -> tuple[str, ...]:
  """Return a note about images in the small models, where MaxText differs from the released models."""
  images = values["use_multimodal"] and values["use_bidirectional_image_attn"]
  if not (values["hidden_size_per_layer_input"] and images):
    return ()
  return (
    "tokens of an image see each other in both directions, as in MaxText; in the released E2B and E4B they do not: "
    "use_bidirectional_image_attn=false",
  )


MAXTEXT = MaxText(
  decoder_blocks=("gemma4_small",),
  fixed=FIXED | {"v_norm_with_scale": (False,), "local_rope_proportion": (1.0,), "vision_encoder_block": ("gemma4",)},
  ignored={"image_size_for_vit": "images keep their aspect ratio, up to vision_output_length tokens"},
  values={key: {"0": Meaning(None)} for key in ("global_head_dim", "global_num_kv_heads", "vocab_size_per_layer_input")},
  defaults={"head_dim": 128, "global_rope_proportion": 0.25, "eos_token_id": (1, 106)},
  complete=_complete,
  image_rows=(("size of an image", "follows its aspect ratio", "one for all images"),),
  notes=_notes,
)
