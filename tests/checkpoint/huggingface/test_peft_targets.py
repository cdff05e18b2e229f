"""Names and settings of an adapter in peft's files, without peft. tests/parity/test_peft.py compares them with peft."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import maxtext_like
from maxtext_like.capacity import memory
from maxtext_like.checkpoint.adapters import init_adapter
from maxtext_like.checkpoint.huggingface import peft
from maxtext_like.checkpoint.huggingface.peft_targets import find_targets
from maxtext_like.config.load import load_config
from maxtext_like.errors import UserError
from maxtext_like.models.adapter import Adapter
from maxtext_like.models.naming import ADAPTER
from maxtext_like.training.run.banner import banner
from maxtext_like.training.step.program import TrainProgram, make_program

SMALL = ["emb_dim=32", "mlp_dim=48", "max_target_length=16", "per_device_batch_size=2", "dataset=synthetic", "dtype=float32"]
LORA = ["lora_rank=3", "lora_alpha=6"]
SHARED, DENSE = "mlp.shared_experts", "mlp"
PROJECTIONS = ("down_proj", "gate_proj", "up_proj")


def program_of(model: str, modules: str, *words: str) -> tuple[TrainProgram, Adapter]:
  layers = 2 if "deepseek" in model else 6 if model.startswith("gemma4") else 1
  given = [*SMALL, *LORA, f"num_decoder_layers={layers}", f"lora_modules={modules}", *words]
  program = make_program(load_config(model, given).config)
  assert program.adapter is not None
  return program, program.adapter


def written(program: TrainProgram, adapter: Adapter, out: Path) -> tuple[dict[str, Any], peft.Written, dict[str, Any]]:
  """Write the adapter with random factors. Return adapter_config.json, the result of write_adapter, and the factors."""
  rng = np.random.default_rng(0)
  factors = jax.tree.map(lambda p: jnp.asarray(rng.normal(size=p.shape), jnp.float32), adapter.params())
  block = program.config.model.decoder_block
  settings = program.config.adapter
  done = peft.write_adapter(
    out, adapter, factors, program.model.decoder, block, base=None, nested=False, settings=settings
  )  # fmt: skip
  return json.loads((out / peft.CONFIG).read_text()), done, factors


def assert_read_alike(program: TrainProgram, adapter: Adapter, factors: dict[str, Any], out: Path) -> None:
  """Check that the adapter in the files adds to every weight what the original adapter adds."""
  zeros = jax.tree.map(lambda p: jnp.zeros(p.shape, jnp.float32), program.model.decoder.params())
  want = adapter.merge({**zeros, ADAPTER: factors}, "float32").params
  found = jax.tree.map(np.array, zeros)
  for own in peft.read_adapter(out, program.model.decoder, program.config.model.decoder_block).maps:
    for piece, values, _ in own.additions():
      node = found
      for key in piece.path:
        node = node[key]
      node[piece.index] = values
  jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5), found, want)
  assert sum(bool(x.any()) for x in jax.tree.leaves(found)) == len(adapter.weights)


@pytest.mark.slow
def test_what_peft_would_take_for_experts_is_written_as_parameters(tmp_path):
  """With adapted experts, DeepSeek's dense layers, shared experts and routers are written as parameters, each with its rank."""
  patterns = ["lora_rank_pattern={shared.up: 2, layers.0.mlp.down: 1}", "lora_alpha_pattern={router: 5, kv_a: 4}"]
  program, adapter = program_of("deepseek3-tiny", "[all-linear, router, experts]", *patterns, "lora_rslora=true")
  config, done, factors = written(program, adapter, tmp_path / "out")
  names = [f"layers.0.{DENSE}.{name}.weight" for name in PROJECTIONS]
  names += [f"layers.1.{SHARED}.{name}.weight" for name in PROJECTIONS]
  names += ["layers.1.mlp.experts.down_proj", "layers.1.mlp.experts.gate_up_proj", "layers.1.mlp.gate.weight"]
  assert sorted(config["target_parameters"]) == sorted(f"model.{name}" for name in names)
  assert {name.split(".")[3] for name in config["target_modules"]} == {"self_attn"}
  assert done == (len(names) + len(config["target_modules"]), ())
  # peft matches patterns with complete parameter names. Gate and up of the experts are one array with the sum of their ranks.
  ranks = {f"layers.1.{SHARED}.up_proj.weight": 2, "layers.0.mlp.down_proj.weight": 1, "layers.1.mlp.experts.gate_up_proj": 6}
  assert config["rank_pattern"] == {f"model.{name}": rank for name, rank in ranks.items()}
  assert {name for name, alpha in config["alpha_pattern"].items() if alpha == 5} == {"model.layers.1.mlp.gate.weight"}
  assert_read_alike(program, adapter, factors, tmp_path / "out")


@pytest.mark.parametrize(
  ("model", "modules", "words", "as_modules", "as_parameters"),
  [
    ("qwen3-moe-tiny", "[router]", [], set(), {"mlp.gate.weight"}),
    ("qwen3-tiny", "[down_proj]", ["lora_dropout=0.1"], {"mlp.down_proj"}, set()),
    ("gemma4-moe-tiny", "[router, mlp.down]", [], {"router.proj", "mlp.down_proj"}, set()),
    ("DENSE", "[down_proj, o_proj]", ["lora_dropout=0.1"], {"self_attn.o_proj"}, {"mlp.down_proj.weight"}),
  ],
)
def test_modules_and_parameters_of_each_kind_of_model(model, modules, words, as_modules, as_parameters, tmp_path):
  if model == "DENSE":  # a DeepSeek without experts: peft decides by the model_type, which is the same as with experts
    text = (Path(maxtext_like.__path__[0]) / "../configs/models/deepseek3-tiny.yml").read_text()
    text = text.replace("num_experts: 8", "num_experts: 0")
    (tmp_path / "deepseek.yml").write_text(text.replace("first_num_dense_layers: 1", "first_num_dense_layers: 2"))
    model = str(tmp_path / "deepseek.yml")
  program, adapter = program_of(model, modules, *words)
  config, done, factors = written(program, adapter, tmp_path / "out")
  short = lambda names: {name.split(".", 3)[3] for name in names}
  assert (short(config["target_modules"]), short(config.get("target_parameters", []))) == (as_modules, as_parameters)
  assert config["lora_dropout"] == (0.0 if as_parameters else adapter.dropout)
  assert len(done.notes) == bool(as_parameters and adapter.dropout)
  assert all("lora_dropout = 0.1 is written as 0" in note and "target_parameters" in note for note in done.notes)
  assert_read_alike(program, adapter, factors, tmp_path / "out")
  read = peft.read_adapter(tmp_path / "out", program.model.decoder, program.config.model.decoder_block)
  again = init_adapter.factors(read, jax.tree.map(jnp.zeros_like, factors))
  jax.tree.map(np.testing.assert_array_equal, again, factors)


def test_a_pattern_is_held_against_the_name_that_peft_has_for_it(tmp_path):
  program, adapter = program_of("deepseek3-tiny", "[down_proj, o_proj]")
  config, _, _ = written(program, adapter, tmp_path / "out")
  for pattern, scaled in (
    ("down_proj", {"layers.1.mlp.experts.down_proj"}),
    (r"layers\.1\..*down_proj.weight", {f"layers.1.{SHARED}.down_proj.weight"}),
  ):
    changed = config | {"alpha_pattern": {pattern: 12, "o_proj": 9}}
    (tmp_path / "out" / peft.CONFIG).write_text(json.dumps(changed))
    maps = peft.read_adapter(tmp_path / "out", program.model.decoder, "deepseek").maps
    assert {own.tensor.name for own in maps if own.scale == 4} == scaled
    assert {own.tensor.name for own in maps if own.scale == 3} == {f"layers.{i}.self_attn.o_proj.weight" for i in (0, 1)}


@pytest.mark.parametrize(
  ("modules", "words", "told"),
  [
    ("[attention]", ["lora_dora=true"], None),
    ("[all-linear, router, experts]", [], None),
    (
      "[all-linear]",
      ["lora_dora=true"],
      "peft does not support DoRA for layers.N.mlp.down_proj, layers.N.mlp.gate_proj, layers.N.mlp.up_proj, "
      "layers.N.mlp.shared_experts.down_proj, layers.N.mlp.shared_experts.gate_proj, layers.N.mlp.shared_experts.up_proj",
    ),
    (
      "[experts.down, router, embed_tokens]",
      ["lora_dora=true"],
      "peft does not support DoRA for layers.N.mlp.experts.down_proj, layers.N.mlp.gate; "
      "peft cannot represent updates of embed_tokens",
    ),
  ],
)
def test_what_cannot_be_written_is_told_before_the_training_and_refused_after(modules, words, told, tmp_path):
  program, adapter = program_of("deepseek3-tiny", modules, *words)
  lines = banner(program, "run", memory.estimate(program), None).splitlines()
  at = next(i for i, line in enumerate(lines) if line.startswith("adapter "))
  note = f"note    export --adapter will refuse this run: {told}; export --merge writes its weights"
  assert [line for line in lines if "export" in line] == ([note] if told else [])
  assert told is None or lines[at + 1] == note
  assert find_targets(adapter, program.model.decoder, "deepseek").refusal == told
  if told:
    with pytest.raises(UserError) as refused:
      written(program, adapter, tmp_path / "out")
    assert str(refused.value).startswith(f"{tmp_path}/out: {told}\n  fix: export ")
    assert not (tmp_path / "out").exists()


def test_an_adapter_names_its_own_layers_alone():
  program, adapter = program_of("deepseek3-tiny", "[layers.0.mlp]")
  assert {own.target for own in find_targets(adapter, program.model.decoder, "deepseek", nested=False).maps} == {
    f"model.layers.0.mlp.{name}.weight" for name in PROJECTIONS
  }
  assert find_targets(dataclasses.replace(adapter, names=frozenset()), program.model.decoder, "deepseek").maps == []
