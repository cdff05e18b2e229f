"""Tests the family Qwen3, dense and with experts, whose code is in one folder. The golden tests compare its results with
transformers, and tests/checkpoint checks its export."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from maxtext_like.api.forward import open_weights
from maxtext_like.api.models import parameter_counts
from maxtext_like.checkpoint.huggingface.config import export_config, interpret
from maxtext_like.checkpoint.huggingface.model_file import load_checkpoint_config
from maxtext_like.cli.main import main
from maxtext_like.config.load import load_config, make_section
from maxtext_like.errors import UserError
from maxtext_like.generation.engine import Prompts, generate
from maxtext_like.generation.sampling import Sampling
from maxtext_like.layers.precision import Precision
from maxtext_like.models.build import build_decoder
from tests.models.test_golden import GOLDEN, Case
from tests.tiers import tiers

ROOT = Path(__file__).parents[2]
MODELS = ("qwen3-tiny", "qwen3-moe-tiny")
SMALL = ["num_decoder_layers=2", "emb_dim=32", "mlp_dim=48", "head_dim=12", "max_target_length=16", "per_device_batch_size=4"]
SMALL += ["dataset_documents_max=40", "enable_tensorboard=false", "lr_schedule_type=constant", "warmup_steps_fraction=0"]


@pytest.mark.parametrize("name", ["qwen3-0.6b", "qwen3-8b", "qwen3-30b-a3b"])
def test_an_answer_ends_at_the_end_of_a_turn_or_of_the_text(name):
  """The eos_token_id of the released generation_config.json: <|im_end|> and <|endoftext|>, where base models end."""
  assert load_config(name).config.model.eos_token_ids == (151645, 151643)


def test_the_family_is_one_small_folder():
  """A family consists of its folder, the bounds of its layers, its name in choices.py, configurations, and tests."""
  files = sorted((ROOT / "maxtext_like" / "models" / "qwen3").glob("*.py"))
  assert {file.name for file in files} >= {"config.py", "model.py", "huggingface.py"}
  files.append(ROOT / "maxtext_like" / "analysis" / "risk" / "qwen3.py")
  assert sum(len(file.read_text("utf-8").splitlines()) for file in files) <= 250
  naming = [file for file in (ROOT / "maxtext_like").rglob("*.py") if "qwen3" in file.read_text("utf-8") and file not in files]
  assert [file.name for file in naming] == ["choices.py"]


@pytest.mark.parametrize(
  ("name", "tied", "parameters"),  # the sizes on the model cards: 0.6B, 8.2B, 30.5B
  [("qwen3-0.6b", True, 596_049_920), ("qwen3-8b", False, 8_190_735_360), ("qwen3-30b-a3b", False, 30_532_122_624)],
)
def test_released_models(name: str, tied: bool, parameters: int):
  config = load_config(name).config
  decoder: Any = build_decoder(config.model, Precision())
  assert [(len(s.layers), s.repeats) for s in decoder.stacks] == [(1, config.model.num_decoder_layers)]
  block, c = decoder.layers[0].cfg, decoder.cfg
  assert (c.tied, "head" in decoder.params(), c.embedding.scale_by_sqrt_dim, c.final_soft_cap) == (tied, not tied, False, None)
  assert (block.sandwich, block.mixer.window, block.mixer.scale, block.mixer.rope.theta) == (False, None, 128**-0.5, 1e6)
  assert all(norm.round_before_scale and not norm.scale_plus_one for norm in (c.norm, block.norm, block.mixer.norm))
  assert {p.trainable for p in jax.tree.leaves(decoder.params())} == {True}
  assert parameter_counts(config.model, config.precision).total == parameters
  if experts := block.ffn.experts:
    assert (experts.router, experts.router_norm, experts.per_expert_scale, experts.norm_topk_prob) == (
      "softmax",
      None,
      False,
      True,
    )


@pytest.mark.parametrize("name", ["qwen3", "qwen3_moe"])
@pytest.mark.slow
def test_greedy_answers_are_transformers(name: str):
  case, checkpoint = Case(name), GOLDEN / name / "checkpoint"
  prompt = json.loads((GOLDEN / name / "meta.json").read_text())["prompt"]
  config, loaded = load_checkpoint_config(checkpoint, ["dtype=float32", "matmul_precision=highest"])
  weights, want = open_weights(checkpoint, config, loaded), case.expected["greedy"]
  prompts = Prompts(case.inputs["input_ids"][:, :prompt].tolist())
  made: list[list[int]] = [[], []]
  sampling = Sampling(temperature=0.0)
  params = weights.load()
  for new in generate(weights.decoder, params, prompts, max_tokens=want.shape[1], stop=frozenset(), sampling=sampling):
    made = [row + more for row, more in zip(made, new, strict=True)]
  np.testing.assert_array_equal(made, want)


@pytest.mark.parametrize("model", tiers(MODELS, slow=("qwen3-moe-tiny",)))
def test_training_is_the_same_in_both_faces_and_learns(model: str, tmp_path: Path):
  losses = []
  for name, words in {"a": ["scan_layers=true", "module_api=nnx"], "b": ["scan_layers=false", "module_api=linen"]}.items():
    words += [f"output_dir={tmp_path}", f"run_name={name}", "steps=6", "learning_rate=1e-2"]
    assert main(["train", model, *SMALL, *words, "compilation_cache_dir=null"]) == 0
    losses.append([json.loads(line)["loss"] for line in (tmp_path / name / "metrics.jsonl").read_text().splitlines()])
  np.testing.assert_allclose(losses[0], losses[1], rtol=1e-5)
  assert losses[0][-1] < losses[0][0] - 0.2


@pytest.mark.parametrize(
  ("model", "word", "reason"),
  [
    ("qwen3-tiny", "kv_lora_rank=8", "kv_lora_rank = 8 has no effect in decoder_block qwen3\n.*\n  fix: .*a key of deepseek"),
    ("qwen3-tiny", "sliding_window_size=8", "sliding_window_size = 8 has no effect.*\n.*\n  fix: .*a key of gemma3 and gemma4"),
    ("qwen3-tiny", "use_multimodal=true", "use_multimodal = true has no effect in decoder_block qwen3"),
    ("qwen3-tiny", "rope_type=yarn", "rope_type: yarn .*decoder_block qwen3\n.*\n  fix: set rope_type to default"),
    ("qwen3-tiny", "float32_gate_logits=true", "float32_gate_logits = true has no effect: the model does not have a router"),
    ("qwen3-moe-tiny", "num_experts_per_tok=9", "num_experts_per_tok = 9 is more than num_experts = 8"),
    ("qwen3-moe-tiny", "head_dim=0", "head_dim is not set"),
    ("qwen3-moe-tiny", "num_kv_heads=3", "num_query_heads = 4 is not divisible by num_kv_heads = 3"),
  ],
)
def test_what_no_qwen3_has_is_refused(model: str, word: str, reason: str):
  with pytest.raises(UserError, match=reason):
    load_config(model, [word])


DENSE, MOE = (json.loads((GOLDEN / name / "checkpoint" / "config.json").read_text()) for name in ("qwen3", "qwen3_moe"))


@pytest.mark.parametrize(
  ("file", "change", "reason"),
  [
    (DENSE, {"use_sliding_window": True}, "use_sliding_window: True is not supported"),
    (DENSE, {"attention_bias": True}, "attention_bias: True is not supported"),
    (DENSE, {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "'yarn' is not supported for Qwen3"),
    (DENSE, {"layer_types": ["sliding_attention"] * 3}, "only 'full_attention' is supported"),
    (MOE, {"mlp_only_layers": [0]}, "mlp_only_layers: is not empty"),
    (MOE, {"decoder_sparse_step": 2}, "decoder_sparse_step: 2 is not supported"),
  ],
)
def test_what_config_json_says_and_cannot_be_trained_is_refused(file: dict, change: dict, reason: str):
  with pytest.raises(UserError, match=reason):
    interpret(file | change, "config.json")


@pytest.mark.parametrize("name", ["qwen3-0.6b", "qwen3-8b", "qwen3-30b-a3b"])
def test_a_released_config_json_is_our_model_file(name: str):
  model: Any = load_config(name).config.model
  written = json.loads(json.dumps(export_config(model, "bfloat16")))
  read = make_section("model", interpret(written, "config.json").model | {"model_name": name})
  assert {key: read.effective(key) for key in vars(read)} == {key: model.effective(key) for key in vars(model)} | (
    {} if model.num_experts else {"load_balance_loss": read.load_balance_loss}
  )


def test_the_coefficient_of_the_load_balancing_loss_is_kept():
  """The weight of the loss is the key ``router_aux_loss_coef`` of config.json, with the definition that transformers uses. A
  file without the key has the default of 0.001."""
  read = lambda values: make_section("model", interpret(values, "config.json").model | {"model_name": "m"})
  model = read(MOE | {"router_aux_loss_coef": 0.003})
  assert (model.load_balance_loss, model.load_balance_loss_weight) == ("huggingface", 0.003)
  assert export_config(model, "bfloat16")["router_aux_loss_coef"] == 0.003
  assert read({k: v for k, v in MOE.items() if k != "router_aux_loss_coef"}).load_balance_loss_weight == 0.001
  assert read(MOE | {"router_aux_loss_coef": 0}).load_balance_loss_weight == 0
  of_maxtext = dataclasses.replace(model, load_balance_loss="maxtext")
  assert export_config(of_maxtext, "bfloat16")["router_aux_loss_coef"] == 0.0  # the weight belongs to another definition


@pytest.mark.slow
def test_a_model_file_of_maxtext(tmp_path: Path):
  ours = load_config("qwen3-30b-a3b").config.model
  text = f"""decoder_block: "qwen3_moe"
base_emb_dim: {ours.emb_dim}
base_mlp_dim: 768
base_num_query_heads: {ours.num_query_heads}
base_num_kv_heads: {ours.num_kv_heads}
base_num_decoder_layers: {ours.num_decoder_layers}
head_dim: 128
mlp_activations: ["silu", "linear"]
vocab_size: {ours.vocab_size}
normalization_layer_epsilon: 1.0e-6
use_qk_norm: True
num_experts: 128
num_experts_per_tok: 8
base_moe_mlp_dim: 768
norm_topk_prob: true
rope_max_timescale: 1_000_000
enable_dropout: False
"""
  (tmp_path / "qwen3-30b-a3b.yml").write_text(text)
  theirs = load_config(tmp_path / "qwen3-30b-a3b.yml").config.model
  differing = {key for key in vars(ours) if ours.effective(key) != theirs.effective(key)}
  losses = {"load_balance_loss", "load_balance_loss_weight"}
  assert differing == {"max_position_embeddings", "pad_token_id", "bos_token_id"} | losses
