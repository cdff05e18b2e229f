"""The meaning of MaxText's keys for Qwen3."""

from maxtext_like.config.maxtext_family import MaxText, ModelFile


def _complete(file: ModelFile) -> None:
  if file.text("decoder_block") == "qwen3_moe":
    file.assumed["norm_topk_prob"] = False


MAXTEXT = MaxText(
  decoder_blocks=("qwen3_moe",),
  fixed={
    "use_qk_norm": (True,),
    "use_post_attn_norm": (False,),
    "use_post_ffw_norm": (False,),
    "attention_type": ("global",),
    "routed_score_func": ("",),
    "normalize_embedding_logits": (False,),
  },
  defaults={"head_dim": 128, "pad_token_id": None, "bos_token_id": None, "eos_token_id": (151645, 151643)},
  complete=_complete,
)
