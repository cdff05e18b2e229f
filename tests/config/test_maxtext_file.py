"""MaxText's model files for our families have the same meaning here as in MaxText. The files below are our own short ones."""

import dataclasses
import re

import pytest

from maxtext_like.config.load import load_config
from maxtext_like.errors import UserError

GEMMA = {
  "mlp_activations": '["gelu","linear"]',
  "normalization_layer_epsilon": "1e-6",
  "logits_via_embedding": "True",
  "use_post_attn_norm": "true",
  "use_post_ffw_norm": "true",
  "local_rope_max_timescale": "10_000",
  "rope_max_timescale": "1_000_000",
}
GEMMA3 = GEMMA | {
  "decoder_block": '"gemma3"',
  "vocab_size": "262_144",
  "sliding_window_size": 1024,
  "rope_linear_scaling_factor": 8.0,
}
VISION3 = {
  "vision_encoder_block": '"gemma3"',
  "image_size_for_vit": 896,
  "num_channels_for_vit": 3,
  "patch_size_for_vit": 14,
  "conv_stride_for_vit": 14,
  "hidden_size_for_vit": 1152,
  "intermediate_size_for_vit": 4304,
  "num_hidden_layers_for_vit": 27,
  "num_attention_heads_for_vit": 16,
  "image_placeholder": "<start_of_image>",
}
GEMMA4 = GEMMA | {
  "decoder_block": '"gemma4"',
  "vocab_size": 262144,
  "head_dim": 256,
  "global_head_dim": 512,
  "v_norm_with_scale": "false",
  "global_rope_max_timescale": 1000000,
  "global_rope_proportion": 0.25,
  "local_rope_proportion": "1.0",
  "final_logits_soft_cap": 30.0,
}
VISION4 = {
  "patch_size_for_vit": 16,
  "conv_stride_for_vit": 16,
  "rope_theta_for_vit": 100,
  "image_size_for_vit": "[672, 960]",
  "image_placeholder": '"<|image|>"',
  "vision_output_length": 280,
  "num_position_embeddings_for_vit": 10240,
}
TOWER = {
  "hidden_size_for_vit": 1152,
  "intermediate_size_for_vit": 4304,
  "num_hidden_layers_for_vit": 27,
  "num_attention_heads_for_vit": 16,
}
SMALL = {
  "hidden_size_for_vit": 768,
  "intermediate_size_for_vit": 3072,
  "num_hidden_layers_for_vit": 16,
  "num_attention_heads_for_vit": 12,
  "decoder_block": '"gemma4_small"',
  "sliding_window_size": 512,
  "hidden_size_per_layer_input": 256,
  "vocab_size_per_layer_input": 262144,
  "use_bidirectional_image_attn": "False",
  "ple_pad_substitute_image_rows": "True",
  "ple_pad_mode": '"identity"',
  "image_placeholder_token_id": 258880,
  "ple_pad_token_id": 0,
}
DEEPSEEK = {
  "base_emb_dim": 7168,
  "base_num_query_heads": 128,
  "base_num_kv_heads": 128,
  "base_mlp_dim": 18432,
  "base_moe_mlp_dim": 2048,
  "base_num_decoder_layers": 61,
  "first_num_dense_layers": 3,
  "mlp_activations": '["silu","linear"]',
  "vocab_size": 129280,
  "enable_dropout": "false",
  "logits_via_embedding": "false",
  "normalization_layer_epsilon": "1.0e-6",
  "num_experts": 256,
  "num_experts_per_tok": 8,
  "shared_experts": 1,
  "routed_scaling_factor": 2.5,
  "routed_score_func": '"sigmoid"',
  "routed_bias": "true",
  "decoder_block": '"deepseek"',
  "attention_type": '"mla"',
  "q_lora_rank": 1536,
  "kv_lora_rank": 512,
  "qk_nope_head_dim": 128,
  "qk_rope_head_dim": 64,
  "v_head_dim": 128,
  "mscale": 1.0,
  "rope_type": '"yarn"',
  "rope_max_timescale": "10_000 # as the released configuration",
  "max_position_embeddings": 163840,
  "original_max_position_embeddings": 4096,
  "rope_factor": 40,
  "beta_fast": 32,
  "rope_interleave": "true",
  "rope_truncate": "true",
  "rope_attention_scaling": "false",
}


def sizes(emb, mlp, layers, heads, kv):
  names = ("base_emb_dim", "base_mlp_dim", "base_num_decoder_layers", "base_num_query_heads", "base_num_kv_heads")
  return dict(zip(names, (emb, mlp, layers, heads, kv), strict=True))


FLOAT32 = {"float32_qk_product": "true", "float32_logits": "true"}
EXPERTS = {
  "base_moe_mlp_dim": 704,
  "num_experts": 128,
  "num_experts_per_tok": 8,
  "shared_experts": 1,
  "norm_topk_prob": "true",
  "load_balance_loss_weight": 0.001,
}
BIG = TOWER | {"sliding_window_size": 1024, "share_kv_projections": "true"}
INDEXER = {"use_indexer": "true", "indexer_n_heads": 64, "indexer_head_dim": 128, "indexer_topk": 2048}

FILES = {
  "gemma3-4b": GEMMA3 | sizes(2560, 10240, 34, 8, 4) | {"head_dim": 256} | VISION3,
  "gemma3-12b": GEMMA3 | sizes(3840, 15360, 48, 16, 8) | {"head_dim": 256} | VISION3,
  "gemma3-27b": GEMMA3 | sizes(5376, 21504, 62, 32, 16) | {"head_dim": 128} | FLOAT32 | VISION3,
  "gemma4-31b": GEMMA4
  | sizes(5376, 21504, 60, 32, 16)
  | BIG
  | {"global_num_kv_heads": 4, "inhomogeneous_layer_cycle_interval": 6}
  | VISION4,
  "gemma4-26b": GEMMA4 | sizes(2816, 2112, 30, 16, 8) | BIG | {"global_num_kv_heads": 2} | FLOAT32 | EXPERTS | VISION4,
  "gemma4-e2b": GEMMA4
  | sizes(1536, 6144, 35, 8, 1)
  | SMALL
  | {"num_kv_shared_layers": 20, "use_double_wide_mlp": "true"}
  | VISION4,
  "gemma4-e4b": GEMMA4
  | sizes(2560, 10240, 42, 8, 2)
  | SMALL
  | {"num_kv_shared_layers": 18, "use_double_wide_mlp": "false"}
  | VISION4,
  "deepseek3-671b": DEEPSEEK,
  "deepseek3.2-671b": DEEPSEEK | INDEXER,
}

# Keys for which MaxText's file intentionally differs from the released model, or which it does not set.
DIFFERENT = {
  "gemma3": {"vocab_size": 262144},
  "gemma4": {"max_position_embeddings": 131072},
  "deepseek": {"n_routing_groups": 1, "topk_routing_group": 1, "routed_bias_update_rate": 0.0}
  | {"load_balance_loss": "maxtext"},
}
UNSAID_OF_VISION = {"image_placeholder", "head_dim_for_vit"}
E2B_CAUSAL = ("gemma4-e2b", "gemma4-e4b")  # as released; images are not causal in any family of MaxText's code


@pytest.fixture
def load(tmp_path, monkeypatch):
  monkeypatch.chdir(tmp_path)

  def write(name, keys, *words, extra=""):
    text = "".join(f"{key}: {value}\n" for key, value in keys.items())
    (tmp_path / f"{name}.yml").write_text(f"# a model\n\n{text}{extra}")
    return load_config(f"{name}.yml", words)

  return write


@pytest.mark.parametrize("name", FILES)
def test_maxtext_file_is_the_same_model(name, load):
  loaded = load(name, FILES[name])
  theirs, ours = dataclasses.asdict(loaded.config.model), dataclasses.asdict(load_config(name).config.model)
  for key, value in DIFFERENT[ours["decoder_block"]].items():
    assert theirs[key] == value
    del theirs[key], ours[key]
  if name in E2B_CAUSAL:  # FILES sets this key
    assert theirs["use_bidirectional_image_attn"] is False
  if ours["decoder_block"] == "gemma3" and ours["query_pre_attn_scalar"] == ours["head_dim"]:  # null has the same meaning
    ours["query_pre_attn_scalar"] = None
  assert theirs == ours
  their_tower, our_tower = (dataclasses.asdict(c.vision) for c in (loaded.config, load_config(name).config))
  assert {key for key in our_tower if our_tower[key] != their_tower[key]} <= UNSAID_OF_VISION
  assert our_tower["hidden_size_for_vit"] == 0 or loaded.config.vision.head_dim == load_config(name).config.vision.head_dim
  assert loaded.config.precision == dataclasses.replace(load_config(name).config.precision)


def test_the_file_name_is_the_model_name_and_27b_is_known_by_its_size(load):
  by_name = load("gemma3-27b", FILES["gemma3-27b"])
  assert by_name.config.model.query_pre_attn_scalar == 168
  assert by_name.origins["model.query_pre_attn_scalar"] == "MaxText's choice for gemma3-27b"
  assert load("copy", FILES["gemma3-27b"]).config.model.query_pre_attn_scalar == 168
  assert load("copy", FILES["gemma3-12b"]).config.model.query_pre_attn_scalar is None
  assert load("copy", FILES["gemma4-e2b"]).config.model.inhomogeneous_layer_cycle_interval == 5
  assert load("copy", FILES["gemma4-e4b"]).config.model.inhomogeneous_layer_cycle_interval == 6


def test_what_the_towers_always_do_is_noted_with_place_and_reason(load):
  for name, keys in (
    ("gemma3-4b", ["conv_stride_for_vit"]),
    ("gemma4-31b", ["conv_stride_for_vit", "image_size_for_vit"]),
    ("gemma4-e2b", ["conv_stride_for_vit", "image_size_for_vit", "ple_pad_mode", "ple_pad_substitute_image_rows"]),
  ):
    *notes, _ = load(name, FILES[name]).notes
    assert all(note.startswith(f"{name}.yml:") and "has no effect" in note for note in notes)
    assert sorted(note.split(": ")[1].split()[0] for note in notes) == keys


@pytest.mark.parametrize("name", [name for name in FILES if name.startswith("gemma")])
def test_a_maxtext_file_builds_the_tower(name, load):
  config = load(name, FILES[name], "use_multimodal=true").config
  assert config.vision.use_multimodal
  if name == "gemma4-e2b":
    assert load(name, FILES[name] | {"image_placeholder_token_id": 77}).config.vision.image_token_id == 77


@pytest.mark.parametrize(
  ("name", "key", "value", "reason"),
  [
    ("gemma3-4b", "use_post_attn_norm", "false", "use_post_attn_norm = 'false' is not supported in decoder_block gemma3"),
    ("gemma3-4b", "attn_logits_soft_cap", "-1.0", "attn_logits_soft_cap = -1.0 is not above 0"),
    ("deepseek3-671b", "attn_logits_soft_cap", "50.0", "attn_logits_soft_cap = 50 in decoder_block deepseek"),
    ("gemma3-4b", "mlp_activations", "[relu, linear]", "mlp_activations: .*(?s:.*)write \\[gelu, linear\\]"),
    ("gemma3-4b", "mlp_activations", "gelu", "mlp_activations: .*(?s:.*)write \\[gelu, linear\\]"),
    ("gemma4-31b", "v_norm_with_scale", "true", "v_norm_with_scale = 'true' is not supported"),
    ("gemma4-31b", "local_rope_proportion", "0.5", "write local_rope_proportion: 1.0"),
    ("gemma4-31b", "num_channels_for_vit", "1", "num_channels_for_vit = '1' is not supported"),
    ("gemma4-31b", "vision_encoder_block", '"llama4"', "vision_encoder_block = 'llama4' is not supported"),
    ("deepseek3-671b", "use_multimodal", "true", "use_multimodal = true has no effect in decoder_block deepseek"),
    ("gemma4-31b", "inhomogeneous_layer_cycle_interval", "7", "the last of 60 layers would be sliding"),
    ("deepseek3-671b", "attention_type", '"global"', "attention_type = 'global' is not supported"),
    ("deepseek3-671b", "routed_score_func", "softmax", "routed_score_func = 'softmax' is not supported"),
    ("deepseek3-671b", "rope_truncate", "false", "rope_truncate = 'false' is not supported"),
    ("deepseek3-671b", "rope_attention_scaling", "true", "rope_attention_scaling = 'true' is not supported"),
    ("deepseek3-671b", "enable_dropout", "true", "enable_dropout = 'true' is not supported"),
    ("deepseek3-671b", "mtp_num_layers", "1", "mtp_num_layers = '1' is not supported"),
    ("deepseek3-671b", "v_norm_with_scale", "false", "v_norm_with_scale is not supported in decoder_block deepseek"),
    ("deepseek3-671b", "engram_layers", "[]", "unknown key 'engram_layers'"),
    ("gemma4-31b", "decoder_block", "llama2", "decoder_block: 'llama2' is not one of gemma3, gemma4, deepseek"),
  ],
)
def test_what_is_not_supported_is_named_with_its_line(name, key, value, reason, load):
  with pytest.raises(UserError, match=rf"{name}.yml:\d+: (.*\n)*.*{reason}|{reason}") as refused:
    load(name, FILES[name] | {key: value})
  assert f"{name}.yml:" in str(refused.value)


@pytest.mark.parametrize(
  ("name", "changes", "expected"),
  [
    ("deepseek3-671b", {"n_routing_groups": 8, "topk_routing_group": 4}, {"n_routing_groups": 8, "topk_routing_group": 4}),
    ("deepseek3-671b", {"n_routing_groups": -1, "topk_routing_group": -1}, {"n_routing_groups": 1}),
    ("deepseek3-671b", {"mscale": 0.7}, {"mscale": 0.7, "mscale_all_dim": 0.7}),
    ("deepseek3-671b", {"norm_topk_prob": "false"}, {"norm_topk_prob": True}),
    ("deepseek3-671b", {"head_dim": 128}, {"v_head_dim": 128}),
    ("gemma4-e2b", {"global_num_kv_heads": 0}, {"global_num_kv_heads": None}),
    ("gemma4-31b", {"final_logits_soft_cap": 0.0}, {"final_logits_soft_cap": None}),
    ("gemma3-4b", {"attn_logits_soft_cap": 50.0}, {"attn_logits_soft_cap": 50.0}),
    ("gemma4-31b", {"attn_logits_soft_cap": 0}, {"attn_logits_soft_cap": None}),
    ("deepseek3-671b", {"attn_logits_soft_cap": 0.0}, {"attn_logits_soft_cap": None}),
    ("gemma4-31b", {"num_experts": 1}, {"num_experts": 0}),
    ("gemma3-4b", {"local_rope_max_timescale": -1}, {"local_rope_max_timescale": 1e6}),
    ("gemma4-31b", {"rope_max_timescale": 5000}, {"rope_max_timescale": 1e6}),
    ("gemma4-31b", {"global_rope_max_timescale": 0, "rope_max_timescale": 5000}, {"rope_max_timescale": 5000.0}),
    ("gemma3-4b", {"rope_linear_scaling_factor": 1.0}, {"rope_type": "default"}),
    ("gemma3-4b", {"query_pre_attn_scalar": 99}, {"query_pre_attn_scalar": 99.0}),
  ],
)
def test_what_maxtext_means(name, changes, expected, load):
  model = load(name, FILES[name] | changes).config.model
  assert {key: getattr(model, key) for key in expected} == expected


def test_without_norm_topk_prob_gemma4_does_not_renormalize(load):
  keys = {k: v for k, v in FILES["gemma4-26b"].items() if k != "norm_topk_prob"}
  assert load("gemma4-26b", keys).config.model.norm_topk_prob is False


def test_experts_without_the_dense_mlp_are_refused(load):
  with pytest.raises(UserError, match="shared_experts"):
    load("gemma4-26b", FILES["gemma4-26b"] | {"shared_experts": 2})


def test_a_maxtext_name_twice_is_a_duplicate(load):
  with pytest.raises(UserError, match="emb_dim"):
    load("gemma4-31b", FILES["gemma4-31b"], extra="emb_dim: 128\n")


def without(keys, *names):
  return {key: value for key, value in keys.items() if key not in names}


@pytest.mark.parametrize(
  ("name", "leave_out", "expected"),
  [
    ("gemma3-4b", ("normalization_layer_epsilon",), {"normalization_layer_epsilon": 1e-5}),
    ("gemma3-4b", ("logits_via_embedding",), {"logits_via_embedding": False}),
    ("gemma3-4b", ("head_dim",), {"head_dim": 128}),
    ("gemma4-31b", ("global_rope_proportion",), {"global_rope_proportion": 0.25}),
    ("deepseek3-671b", ("rope_factor", "kv_lora_rank"), {"rope_factor": 40.0, "kv_lora_rank": 512}),
    ("deepseek3-671b", (), {"bos_token_id": 0, "pad_token_id": None}),
    ("gemma4-e2b", ("use_bidirectional_image_attn",), {"use_bidirectional_image_attn": True}),
  ],
)  # fmt: skip
def test_what_a_file_leaves_to_maxtext(name, leave_out, expected, load):
  model = load(name, without(FILES[name], *leave_out)).config.model
  assert {key: getattr(model, key) for key in expected} == expected


def test_images_of_the_small_models_are_told_about(load):
  keys = without(FILES["gemma4-e2b"], "use_bidirectional_image_attn")
  assert not [note for note in load("gemma4-e2b", keys).notes if "both directions" in note]
  (told,) = [note for note in load("gemma4-e2b", keys, "use_multimodal=true").notes if "both directions" in note]
  assert "use_bidirectional_image_attn=false" in told
  words = ("use_multimodal=true", "use_bidirectional_image_attn=false")
  assert not [note for note in load("gemma4-e2b", keys, *words).notes if "both directions" in note]


def rows_of(notes):
  """Return the rows of the table of differing defaults: {name: [value here, value in MaxText]}."""
  lines = notes[-1].splitlines()
  assert "defaults differ" in lines[0]
  assert lines[1].split() == ["here", "MaxText"]
  return {cells[0]: cells[1:] for cells in (re.split(r"  +", line) for line in lines[2:])}


def test_what_is_decided_otherwise_is_listed(load):
  rows = rows_of(load("gemma3-4b", FILES["gemma3-4b"]).notes)
  assert rows["learning_rate"] == ["0.0003", "3e-05"]
  assert rows["remat_policy"] == ["none", "full"]
  assert rows["max_position_embeddings"] == ["131072", "163840"]
  assert {"weight decay", "steps", "float32_logits", "tokenizer", "dataset"} <= set(rows)
  assert not {"float32_gate_logits", "indexer_sparse_training", "vision_tower", "size of an image"} & set(rows)
  words = ("learning_rate=1", "remat_policy=full", "use_multimodal=true")
  less = rows_of(load("gemma3-4b", FILES["gemma3-4b"], *words).notes)
  assert set(rows) - set(less) == {"learning_rate", "remat_policy"}
  assert less["vision_tower"][0] == "trained"
  said = rows_of(load("gemma3-27b", FILES["gemma3-27b"]).notes)  # its file sets precision flags
  assert not {"float32_qk_product", "float32_logits"} & set(said)
  assert "max_position_embeddings" not in rows_of(load("deepseek3-671b", FILES["deepseek3-671b"]).notes)
  assert {"indexer_sparse_training", "float32_gate_logits"} <= set(
    rows_of(load("deepseek3.2-671b", FILES["deepseek3.2-671b"]).notes)
  )
  assert load_config("gemma3-4b").notes == ()


LAYOUT = {
  "override_logical_axis_rules": "True",
  "mesh_axes": "['data', 'fsdp', 'expert']",
  "data_sharding": "[['data', 'fsdp', 'expert']]",
  "logical_axis_rules": "[['activation_batch', ['data', 'fsdp']], ['heads', []], ['layers', 'stage']]",
}
BATCH_SPLIT = {"use_batch_split_schedule": "true", "shard_mode": '"explicit"', "remove_size_one_mesh_axis_from_type": "false"}


@pytest.mark.parametrize(
  ("name", "extra"), [("deepseek3-671b-2dfsdp", LAYOUT), ("deepseek3-671b-batchsplit", LAYOUT | BATCH_SPLIT)]
)
def test_files_with_a_layout_are_read_and_their_extra_keys_told(name, extra, load):
  loaded = load(name, DEEPSEEK | extra)
  told = [note.split(": ")[1].split()[0] for note in loaded.notes if "has no effect" in note]
  assert sorted(told) == sorted(extra)
  assert dataclasses.replace(loaded.config.model, model_name="") == dataclasses.replace(
    load("a", DEEPSEEK).config.model, model_name=""
  )


def test_base_yml_of_maxtext_is_one_sentence(tmp_path, monkeypatch):
  monkeypatch.chdir(tmp_path)
  lines = [f"key_of_maxtext_{i}: {i}" for i in range(600)]
  (tmp_path / "base.yml").write_text("\n".join(["override_model_config: false", "base_emb_dim: 2048", *lines]))
  for words in (["base.yml"], ["base.yml", "model_name=gemma3-4b"], ["gemma4-tiny", "base.yml"]):
    with pytest.raises(UserError) as refused:
      load_config(words[0], words[1:])
    what, fix = str(refused.value).splitlines()
    assert re.match("base.yml: .*run configuration of MaxText", what)
    assert "as in gemma3-4b steps=20" in fix
