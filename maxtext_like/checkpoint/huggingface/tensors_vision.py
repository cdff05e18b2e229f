"""Which Hugging Face tensor holds which parameter of the vision towers of Gemma 3 and 4, and how files spell their names.

Names here are those that transformers has in memory, without its leading ``model.``; files differ, see ``found_as``.
"""

from collections.abc import Collection

from maxtext_like.checkpoint.huggingface.rule import Rule

_BIASED = {"scale": "weight", "bias": "bias"}
_CLIPPED = {"attention": ("q", "k", "v", "o"), "mlp": ("gate", "up", "down")}
_PART = {"attention": "self_attn", "mlp": "mlp"}
_BOUNDS = ("input_min", "input_max", "output_min", "output_max")

SIGLIP_LAYER = {
  **{f"pre_attention_norm.{ours}": Rule(f"layer_norm1.{theirs}") for ours, theirs in _BIASED.items()},
  **{f"attention.{name}": Rule(f"self_attn.{name}_proj.weight", "linear") for name in "qkv"},
  **{f"attention.{name}_bias": Rule(f"self_attn.{name}_proj.bias", "flat") for name in "qkv"},
  "attention.o": Rule("self_attn.out_proj.weight", "linear2"),
  "attention.o_bias": Rule("self_attn.out_proj.bias"),
  **{f"pre_mlp_norm.{ours}": Rule(f"layer_norm2.{theirs}") for ours, theirs in _BIASED.items()},
  "mlp.up": Rule("mlp.fc1.weight", "linear"),
  "mlp.up_bias": Rule("mlp.fc1.bias"),
  "mlp.down": Rule("mlp.fc2.weight", "linear"),
  "mlp.down_bias": Rule("mlp.fc2.bias"),
}

SIGLIP = {
  "patch.kernel": Rule("vision_tower.embeddings.patch_embedding.weight", "conv"),
  "patch.bias": Rule("vision_tower.embeddings.patch_embedding.bias"),
  "positions": Rule("vision_tower.embeddings.position_embedding.weight"),
  "final_norm.scale": Rule("vision_tower.post_layernorm.weight"),
  "final_norm.bias": Rule("vision_tower.post_layernorm.bias"),
  "projector.norm.scale": Rule("multi_modal_projector.mm_soft_emb_norm.weight"),
  "projector.kernel": Rule("multi_modal_projector.mm_input_projection_weight"),  # input-major in the file too
}

GEMMA4_LAYER = {
  "pre_attention_norm.scale": Rule("input_layernorm.weight"),
  "attention.q": Rule("self_attn.q_proj.linear.weight", "linear"),
  "attention.k": Rule("self_attn.k_proj.linear.weight", "linear"),
  "attention.v": Rule("self_attn.v_proj.linear.weight", "linear"),
  "attention.o": Rule("self_attn.o_proj.linear.weight", "linear2"),
  "attention.q_norm.scale": Rule("self_attn.q_norm.weight"),
  "attention.k_norm.scale": Rule("self_attn.k_norm.weight"),
  "post_attention_norm.scale": Rule("post_attention_layernorm.weight"),
  "pre_mlp_norm.scale": Rule("pre_feedforward_layernorm.weight"),
  **{f"mlp.{name}": Rule(f"mlp.{name}_proj.linear.weight", "linear") for name in ("gate", "up", "down")},
  "post_mlp_norm.scale": Rule("post_feedforward_layernorm.weight"),
  **{
    f"{part}.clip.{name}.{bound}": Rule(f"{_PART[part]}.{name}_proj.{bound}", buffer=True)
    for part, names in _CLIPPED.items()
    for name in names
    for bound in _BOUNDS
  },
}

GEMMA4 = {
  "patch": Rule("vision_tower.patch_embedder.input_proj.weight", "linear"),
  "positions": Rule("vision_tower.patch_embedder.position_embedding_table"),
  "projector": Rule("embed_vision.embedding_projection.weight", "linear"),
  "std_bias": Rule("vision_tower.std_bias", buffer=True),
  "std_scale": Rule("vision_tower.std_scale", buffer=True),
}

LAYERS = "vision_tower.encoder.layers."
_TOWER, _OLD_TOWER = "vision_tower.", "vision_tower.vision_model."


def is_vision(name: str) -> bool:
  """Whether a name of the tensor table belongs to a tower or its projector, and so stands outside the text model."""
  return name.startswith((_TOWER, "multi_modal_projector.", "embed_vision."))


def found_as(name: str, names: Collection[str]) -> str:
  """How a file spells a tensor of the tower: the first of the known spellings among ``names``, else Hugging Face's present one.

  Released Gemma 3 files have ``vision_tower.vision_model.``; transformers dropped the segment, put ``model.`` before
  everything, and writes the first form again when it read it.
  """
  tower = [name] if not name.startswith(_TOWER) else [name, _OLD_TOWER + name.removeprefix(_TOWER)]
  spellings = [prefix + spelling for spelling in tower for prefix in ("model.", "")]
  return next((spelling for spelling in spellings if spelling in names), spellings[0])


def hub_name(name: str, *, gemma4: bool) -> str:
  """How released files spell a tensor of the tower."""
  if gemma4:
    return "model." + name
  return _OLD_TOWER + name.removeprefix(_TOWER) if name.startswith(_TOWER) else name
