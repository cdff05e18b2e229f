"""The meaning of MaxText's keys for DeepSeek."""

from maxtext_like.config.maxtext_family import MaxText, Meaning, ModelFile
from maxtext_like.config.yaml_file import Entry

_LATENT = {"kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "rope_factor": 40}
_TOKENS = {"pad_token_id": None, "bos_token_id": 0, "eos_token_id": 1}


def _complete(file: ModelFile) -> None:
  file.dropped.add("norm_topk_prob")  # sigmoid routing always divides by the sum
  file.dropped.add("head_dim")  # latent attention has its own head sizes
  if "mscale" in file.given:
    # MaxText scales the softmax by mscale and leaves the rotary table unchanged. Here both magnitudes are equal then.
    file.extra.append(Entry("mscale_all_dim", file.given["mscale"].node, file.given["mscale"].origin))


MAXTEXT = MaxText(
  fixed={
    "use_post_attn_norm": (False,),
    "use_post_ffw_norm": (False,),
    "use_qk_norm": (False,),
    "attention_type": ("mla",),
    "routed_score_func": ("sigmoid",),
    "rope_truncate": (True,),
    "normalize_embedding_logits": (True,),
  },
  values={key: {"-1": Meaning(1)} for key in ("n_routing_groups", "topk_routing_group")},
  defaults={**_LATENT, **_TOKENS, "max_position_embeddings": 163840},
  complete=_complete,
  differing=lambda values: (
    {"indexer_sparse_training": False, "indexer_loss_scaling_factor": 0.0} if values["use_indexer"] else {}
  ),
)
