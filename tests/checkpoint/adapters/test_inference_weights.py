"""Loaded models with quantized weights, without and with adapters, compared with dequantized weights in float32."""

import dataclasses
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import maxtext_like
from maxtext_like import load, load_config
from maxtext_like.api.pretrained import Pretrained
from maxtext_like.checkpoint.adapters.adapter_step import EXTRA, Base
from maxtext_like.checkpoint.adapters.inference_weights import with_storage
from maxtext_like.checkpoint.adapters.merge_adapters import with_adapters
from maxtext_like.checkpoint.huggingface import peft
from maxtext_like.checkpoint.read_weights import read_weights
from maxtext_like.checkpoint.store import manifest
from maxtext_like.checkpoint.store.manager import CheckpointManager
from maxtext_like.errors import UserError
from maxtext_like.generation.engine import Prompts, generate
from maxtext_like.generation.sampling import Sampling
from maxtext_like.models import quantized_kernels
from maxtext_like.models.naming import ADAPTER
from maxtext_like.training.step.initial_state import trained_params
from maxtext_like.training.step.program import TrainProgram, make_program
from tests.tiers import tiers

GOLDEN = Path(__file__).parents[2] / "golden"
WORDS = ["dtype=float32", "matmul_precision=highest"]
PROMPTS = [[5, 6], [7, 8, 9, 10], [3]]


def checkpoint(case: str) -> Path:
  return GOLDEN / case / "checkpoint"


def greedy(model: Pretrained) -> list[list[int]]:
  """Return the prompts with their greedy answers. There are two slots, so the third prompt reuses one of them."""
  rows = [list(prompt) for prompt in PROMPTS]
  how: dict[str, Any] = {"max_tokens": 5, "stop": frozenset(), "sampling": Sampling(temperature=0), "slots": 2}
  for pieces in generate(model.decoder_without_kernels, model.decoding_params, Prompts(PROMPTS), **how):
    for row, new in zip(rows, pieces, strict=True):
      row += new
  return rows


def assert_most_likely(rows: list[list[int]], decoder: Any, params: Any) -> None:
  """Check that every token of the answers is the most likely one in a pass over the complete rows."""
  tokens = np.zeros((len(rows), max(map(len, rows))), np.int32)
  for row, ids in zip(tokens, rows, strict=True):
    row[: len(ids)] = ids
  best = np.asarray(jax.jit(lambda p, tokens: jnp.argmax(decoder(p, {"tokens": tokens})[0], -1))(params, tokens))
  for ids, found, prompt in zip(rows, best, PROMPTS, strict=True):
    assert ids[len(prompt) :] == found[len(prompt) - 1 : len(ids) - 1].tolist()
  assert len({tuple(ids[len(prompt) :]) for ids, prompt in zip(rows, PROMPTS, strict=True)}) > 1


CASES = [
  ("gemma3_text", "int8"),
  ("qwen3_moe", "nf4"),
  ("gemma4_moe", "int8"),
  ("deepseek32", "nf4"),
  ("deepseek3", "fp8_block"),
]


@pytest.mark.parametrize(("case", "form"), tiers(CASES, slow=CASES[:3]))
def test_greedy_answers_are_those_of_the_dequantized_weights(case: str, form: str):
  model = load(checkpoint(case), *WORDS, base_weights=form)
  assert model.notes[-1] == f"the weights are stored as {form}"
  assert model.model.base is not None
  whole = jax.jit(model.model.base.whole)(read_weights(model.directory, model.model))
  assert_most_likely(greedy(model), model.model.decoder, whole)
  with pytest.raises(UserError, match="a Flax module has one array for each weight"):
    model.nnx()


def adapter_of(directory: Path, *words: str) -> tuple[Any, Any, Any]:
  """Return a program that trains an adapter on a golden model, the adapter, and random arrays for it."""
  own = [*WORDS, "dataset=synthetic", "lora_rank=2", "lora_alpha=3", "max_target_length=8", "per_device_batch_size=1"]
  program = make_program(load_config(directory, *own, *words).config)
  assert program.adapter is not None
  rng = np.random.default_rng(0)
  arrays = jax.tree_util.tree_map_with_path(
    lambda path, p: jnp.asarray(rng.normal(size=p.shape) * 0.3 + ("magnitude" in str(path[-1])), jnp.float32),
    program.adapter.params(),
  )
  return program, program.adapter, arrays


ADAPTERS = {
  "dora": ("gemma3_text", "int8", ["lora_dora=true", "lora_modules=[layers.0, layers.1.mlp]"]),
  "experts": ("qwen3_moe", "nf4", ["lora_modules=[q_proj, experts]", "lora_rank_pattern={layers.0: 3}"]),
  "tables": ("gemma4_e2b", "nf4", ["modules_to_save=[embed_tokens]", "lora_alpha_pattern={layers.1: 7}"]),
}


@pytest.mark.parametrize("name", tiers(ADAPTERS, slow=("dora", "experts")))
def test_an_adapter_of_peft_on_quantized_weights(name: str, tmp_path: Path):
  """The logits equal those with the adapter merged into the dequantized weights, up to the order of float32 sums."""
  case, form, words = ADAPTERS[name]
  directory = checkpoint(case)
  program, adapter, arrays = adapter_of(directory, *words)
  block, settings = program.config.model.decoder_block, program.config.adapter
  out, how = tmp_path / "peft", {"base": None, "nested": False, "settings": settings}
  peft.write_adapter(out, adapter, arrays, program.model.decoder, block, **how)
  model = load(directory, *WORDS, base_weights=form, adapters=out)
  line = f"the weights are stored as {form}, and the adapter is added in every product; base_weights=null merges it"
  assert model.notes[-1] == line
  assert model.model.base is not None
  whole = jax.jit(model.model.base.whole)(read_weights(directory, model.model))
  merged = with_adapters(jax.tree.map(jnp.copy, whole), load(directory, *WORDS).model, [out], directory)
  decoder, tokens = model.model.decoder, np.array([[5, 6, 7, 8, 9]], np.int32)
  logits = jax.jit(lambda p: decoder(p, {"tokens": tokens})[0])
  found = logits(model.params)
  np.testing.assert_allclose(found, logits(merged), atol=2e-4)
  assert float(jnp.abs(found - logits(whole)).max()) > 0.05


QLORA = ["base_weights=nf4", "base_weights_modules=[experts, q_proj]", "lora_modules=[q_proj, experts]"]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[TrainProgram, Path]:
  """Return a program that trains an adapter on nf4 weights, and a saved step of its run with random factors."""
  place = tmp_path_factory.mktemp("run")
  directory = checkpoint("qwen3_moe")
  program, _, arrays = adapter_of(directory, *QLORA, f"output_dir={place}")
  base = Base.of(read_weights(directory, program.model), str(directory), 0)
  with CheckpointManager(place / "checkpoints", config=program.config, asynchronous=False) as manager:
    manager.save_and_wait(3, {"params": {ADAPTER: arrays}}, {EXTRA: base.to_json()})
  return program, place / "checkpoints/3"


@pytest.fixture
def run(trained: tuple[TrainProgram, Path]) -> Path:
  return trained[1].parent.parent


def test_a_run_answers_as_the_model_that_was_trained(trained: tuple[TrainProgram, Path], run: Path):
  model = load(run, *WORDS)
  assert model.notes[-1].startswith("the weights are stored as nf4, and the adapter is added in every product, as in training")
  assert model.model.base is not None
  assert {path[-1] for path in model.model.base.weights} == {"q", "gate", "up", "down"}
  program, step = trained
  params = trained_params(program, step, manifest.read(step))
  assert_most_likely(greedy(model), program.model.decoder, program.weights(params))


@pytest.mark.parametrize(
  ("words", "base", "line"),
  [
    (["base_weights=null"], None, "the adapter, trained on nf4 weights, is merged into weights in float32"),
    (["base_weights=bfloat16"], None, "the adapter, trained on nf4 weights, is merged into weights in float32"),
    (["base_weights=int8"], "int8", "as int8, and the adapter, trained on nf4 weights, is added in every product; base_w"),
    (["base_weights=nf4"], "nf4", "the adapter is added in every product, as in training; base_weights=null merges it"),
    (["base_weights=nf4", "base_weights_modules=[q_proj]"], "nf4", "trained on nf4 weights with other base_weights_modules,"),
  ],
)
def test_the_choice_is_that_of_the_run_or_of_the_user(run: Path, words: list[str], base: str | None, line: str):
  model = load(run, *WORDS, *words)
  assert line in model.notes[-1]
  assert (model.model.base and model.model.base.form.name) == base


def test_an_adapter_run_sets_the_storage_of_the_weights_that_it_is_added_to(run: Path):
  model = load(checkpoint("qwen3_moe"), *WORDS, adapters=[run])
  assert model.model.base is not None
  assert model.model.base.form.name == "nf4"
  assert "as in training" in model.notes[-1]


def test_gradients_need_plain_weights(run: Path):
  inputs = {"input_ids": [[5, 6, 7]], "labels": [[5, 6, 7]]}
  with pytest.raises(UserError, match=r"forward: gradients with base_weights = int8\n"):
    maxtext_like.forward(run, inputs, *WORDS, base_weights="int8", gradients=True)


def test_the_kernel_for_quantized_weights_is_tested_only_for_inference(monkeypatch: pytest.MonkeyPatch):
  tested = []
  monkeypatch.setattr(quantized_kernels, "settle", lambda base, **how: tested.append(how["dtype"]) or base)
  words = ["dtype=bfloat16", "lora_rank=2", "base_weights=nf4", "num_decoder_layers=2", "dataset=synthetic"]
  program = make_program(load_config("gemma3-tiny", *words).config)
  assert program.model.base is not None
  assert not tested
  with_storage(program.model, checkpoint("gemma3_text"), chosen=True)
  assert tested == ["bfloat16"]


def test_training_still_needs_an_adapter():
  with pytest.raises(UserError, match="base_weights = nf4 has no effect with lora_rank: 0"):
    load_config("gemma3-tiny", base_weights="nf4")


def test_the_kernels_of_generation_are_named(monkeypatch: pytest.MonkeyPatch):
  """A CPU uses no kernels, so the test replaces the functions that choose them."""
  assert not any(note.startswith("kernels: ") for note in load(checkpoint("gemma3_text")).notes)
  monkeypatch.setattr("maxtext_like.models.decode_kernels.settle", lambda decoder, target: (decoder, "kernel a, passed"))
  monkeypatch.setattr(
    quantized_kernels, "settle", lambda base, **how: dataclasses.replace(base, note="xla instead of kernel b, which failed")
  )
  assert load(checkpoint("gemma3_text")).notes[-1] == "kernels: kernel a, passed"
  quantized = load(checkpoint("gemma3_text"), "base_weights=int8")
  assert quantized.notes[-1] == "kernels: kernel a, passed; xla instead of kernel b, which failed"
