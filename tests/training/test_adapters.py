"""Runs that train an adapter: what stays, what is kept, what goes on, what is written for peft, and what is refused."""

import dataclasses
import json
import re
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import maxtext_like
from maxtext_like.analysis import key_bisection
from maxtext_like.checkpoint.adapters.adapter_step import Base, read_adapter, read_base, stored_init_scheme
from maxtext_like.checkpoint.adapters.init_adapter import require_base
from maxtext_like.checkpoint.huggingface import peft
from maxtext_like.checkpoint.store import manifest
from maxtext_like.checkpoint.store.fingerprint import of_files
from maxtext_like.cli.main import main
from maxtext_like.config.load import load_config
from maxtext_like.errors import UserError
from maxtext_like.models.model import make_model
from maxtext_like.training.step.program import make_program

WORDS = ["max_target_length=16", "per_device_batch_size=2", "num_decoder_layers=2", "emb_dim=32", "mlp_dim=48"]
WORDS += ["inhomogeneous_layer_cycle_interval=2", "lr_schedule_type=constant", "warmup_steps_fraction=0"]
WORDS += ["dataset=text", "eval_fraction=0", "dtype=float32"]
LORA = ["lora_rank=3", "lora_alpha=6", "lora_modules=[all-linear]", "learning_rate=0.02", "checkpoint_interval=2"]
DORA = [*LORA, "lora_dora=true", "lora_dropout=0.2", "base_weights=int8"]


@pytest.fixture(scope="module")
def workplace(tmp_path_factory):
  place = tmp_path_factory.mktemp("runs")
  (place / "text.txt").write_text("The fox runs. The hen sits. " * 60)
  assert train(place, "base", "steps=1") == 0
  assert train(place, "adapter", f"init_from={place}/base", *LORA, "steps=4") == 0
  return place


def train(place: Path, name: str, *words: str) -> int:
  settings = [f"output_dir={place}", f"run_name={name}", f"compilation_cache_dir={place}/cache"]
  settings.append(f"dataset_path={place}/text.txt")
  return main(["train", "gemma3-tiny", *WORDS, *settings, *words])


def losses(place: Path, name: str) -> list[float]:
  return [json.loads(line)["loss"] for line in (place / name / "metrics.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def other(workplace):
  """A run of other weights than those below the adapter."""
  assert train(workplace, "other", "steps=1", "seed=3") == 0
  return workplace / "other"


def test_a_checkpoint_holds_the_adapter_alone(workplace):
  stored = manifest.read(workplace / "adapter/checkpoints/4")
  names = [name for name in stored.leaves if name.startswith("params.")]
  assert all(name.startswith("params.adapter.") for name in names)
  assert len(names) == 2 * 14  # a and b of seven weights, of a stack of one row and two layers
  assert stored.extra["base"]["source"] == str(workplace / "base")


def test_it_learns_and_the_weights_stay(workplace, capsys):
  found = losses(workplace, "adapter")
  assert found[-1] < found[0] - 0.05
  before, after = (maxtext_like.load(workplace / name).params for name in ("base", "adapter"))
  same = jax.tree_util.tree_map_with_path(lambda path, a, b: (path[-1].key, np.array_equal(a, b)), before, after)
  by_name: dict[str, set[bool]] = {}
  for name, equal in jax.tree.leaves(same, is_leaf=lambda x: isinstance(x, tuple)):
    by_name.setdefault(name, set()).add(equal)
  assert {name for name, equal in by_name.items() if equal == {False}} == {"q", "k", "v", "o", "gate", "up", "down"}
  assert {name for name, equal in by_name.items() if equal == {True}} >= {"table", "scale"}


def test_a_run_that_was_stopped_goes_on_to_the_bit(workplace, capsys):
  words = (f"init_from={workplace}/base", *LORA, "lr_schedule_steps=4")
  assert train(workplace, "parts", *words, "steps=2") == 0
  assert train(workplace, "parts", *words, "steps=4") == 0
  assert losses(workplace, "parts") == losses(workplace, "adapter")


@pytest.mark.slow
def test_samples_and_generation_are_of_the_adapted_model(workplace):
  words = (f"init_from={workplace}/base", *LORA, "steps=4", "sample_every=4", "sample_tokens=4")
  assert train(workplace, "sampled", *words) == 0
  assert losses(workplace, "sampled") == losses(workplace, "adapter")
  sampled = json.loads((workplace / "sampled/samples.jsonl").read_text().splitlines()[0])
  assert sampled["tokens"] == 4
  together, apart = (
    maxtext_like.load(workplace / "adapter", dtype="float32"),
    maxtext_like.load(workplace / "base", adapters=workplace / "adapter", dtype="float32"),
  )
  tokens = [[5, 6, 7, 8]]
  np.testing.assert_array_equal(together.logits(tokens), apart.logits(tokens))
  assert float(np.abs(together.logits(tokens) - maxtext_like.load(workplace / "base").logits(tokens)).max()) > 1e-2


@pytest.mark.slow
def test_other_weights_below_are_refused(workplace, other, capsys):
  words = (f"init_from={other}", *LORA, "steps=6")
  assert train(workplace, "adapter", *words) == 2
  said = capsys.readouterr().err
  assert "the base weights of this adapter have changed" in said
  assert f"then: {workplace}/base" in said
  assert "fix: name the original weights in init_from" in said
  assert train(workplace, "adapter", f"init_from={workplace}/base", *LORA, "steps=6", "base_weights=nf4") == 2
  said = capsys.readouterr().err
  assert 'have changed\n  adapter.base_weights: checkpoint null, this run "nf4"\n' in said
  assert "fix: base_weights=null (the checkpoint's values)" in said


def test_random_weights_below_an_adapter_are_drawn_with_the_scheme_of_its_run():
  def drawn(scheme: Any, *words: str) -> dict[str, Any]:
    model = make_model(load_config("gemma3-tiny", [*WORDS, "dataset_path=text.txt", *words]).config, runs_attention=False)
    return read_base(model, None, 3, scheme, lambda *_: None)[0]["stack_0"]["layer_0"]["post_mlp_norm"]["scale"]

  # Gemma stores a norm's scale minus 1; 2 layers have 4 branches, and depth_scaled starts them at 4 ** -0.5.
  np.testing.assert_array_equal(drawn("maxtext"), 0.0)
  np.testing.assert_array_equal(drawn("maxtext", "init_scheme=maxtext"), 0.0)
  np.testing.assert_array_equal(drawn("depth_scaled", "init_scheme=maxtext"), -0.5)
  assert stored_init_scheme({"training": {"init_scheme": "depth_scaled"}}) == "depth_scaled"
  assert stored_init_scheme({"training": {"seed": 3}}) == "maxtext"  # of a version without the key


@pytest.mark.slow
def test_an_adapter_on_random_weights_needs_their_scheme_and_seed(workplace, capsys):
  assert train(workplace, "scheme", *LORA, "init_scheme=maxtext", "steps=2") == 0
  assert np.isfinite(maxtext_like.load(workplace / "scheme", dtype="float32").logits([[5, 6]])).all()
  capsys.readouterr()
  assert train(workplace, "scheme", *LORA, "seed=1", "steps=3") == 2
  said = capsys.readouterr().err
  assert (
    '  training.seed: checkpoint 0, this run 1\n  training.init_scheme: checkpoint "maxtext", this run "depth_scaled"\n' in said
  )
  assert "fix: seed=0 init_scheme=maxtext (the checkpoint's values)" in said
  assert train(workplace, "scheme", *LORA, "init_scheme=maxtext", "steps=3") == 0


def test_another_rank_is_refused(workplace, capsys):
  assert train(workplace, "adapter", f"init_from={workplace}/base", *LORA, "lora_rank=4", "steps=6") == 2
  assert "adapter.lora_rank: checkpoint 3, this run 4" in capsys.readouterr().err


@pytest.mark.slow
def test_weights_that_were_cast_are_cast_again(workplace, tmp_path, caplog):
  """A recipe's bfloat16 over a run of float32: whoever reads the adapter has to read what it was trained on."""
  words = (f"init_from={workplace}/base", *LORA, "weight_dtype=bfloat16", "allow_dtype_change=true", "base_weights=nf4")
  assert train(workplace, "cast", *words, "steps=2", "learning_rate=1e-3") == 0
  merged = maxtext_like.load(workplace / "cast", dtype="float32").logits([[5, 6, 7]])
  (warning,) = [line for line in caplog.text.splitlines() if "cast/checkpoints/2: the adapter" in line]
  assert re.search(r"bfloat16; rounding changes 0\.\d+ .*weight_dtype=float32", warning)
  inputs = {"input_ids": [[5, 6, 7]]}
  forward = maxtext_like.forward(workplace / "cast", inputs, dtype="float32")
  assert "merged in float32 into bfloat16 weights" in "".join(forward.notes)
  rounded = maxtext_like.forward(workplace / "cast", inputs, dtype="float32", weight_dtype="bfloat16")
  assert "merged in float32" not in "".join(rounded.notes)
  np.testing.assert_allclose(rounded.arrays["logits"], merged, atol=1e-6)
  assert 1e-5 < np.abs(forward.arrays["logits"] - merged).max() < 1e-1  # the change due to rounding of the sums
  caplog.clear()
  maxtext_like.load(workplace / "cast", dtype="float32", weight_dtype="float32").logits([[5, 6, 7]])
  assert "rounding" not in caplog.text
  maxtext_like.export_checkpoint(workplace / "cast", tmp_path / "hf", dtype="bfloat16")
  exported = maxtext_like.load(tmp_path / "hf", dtype="float32", weight_dtype="bfloat16", tokenizer="bytes").logits([[5, 6, 7]])
  np.testing.assert_array_equal(exported, merged)


def test_peft_s_files_come_back_as_the_same_model(workplace, tmp_path):
  written = maxtext_like.export_adapter(workplace / "adapter", tmp_path / "peft")
  assert (written.maps, written.rank, written.base) == (14, 3, str(workplace / "base"))
  config = json.loads((tmp_path / "peft" / peft.CONFIG).read_text())
  assert (config["r"], config["lora_alpha"], config["use_rslora"]) == (3, 6.0, False)
  assert "model.layers.1.self_attn.o_proj" in config["target_modules"]
  merged = maxtext_like.load(workplace / "adapter", dtype="float32").logits([[5, 6, 7]])
  loaded = maxtext_like.load(workplace / "base", adapters=[tmp_path / "peft"], dtype="float32").logits([[5, 6, 7]])
  np.testing.assert_allclose(loaded, merged, atol=1e-5)


@pytest.mark.slow
def test_an_adapter_of_drawn_weights_says_which_they_are(workplace, tmp_path, capsys):
  assert train(workplace, "drawn", *LORA, "steps=1", "seed=7") == 0
  capsys.readouterr()
  assert main(["export", str(workplace / "drawn"), "--out", str(tmp_path / "peft"), "--adapter"]) == 0
  assert (
    capsys.readouterr().out
    == f"{tmp_path}/peft: an adapter for 14 linear maps, rank 3, trained on weights initialized from seed 7\n"
  )


def test_what_has_no_adapter_is_not_merged(workplace, tmp_path, capsys):
  words = ["--out", str(tmp_path / "hf"), "--merge"]
  assert main(["export", str(workplace / "base"), *words]) == 2
  assert "is a complete model without an adapter to merge" in capsys.readouterr().err
  assert main(["export", str(workplace / "adapter"), *words, "--adapter"]) == 2
  assert "not allowed with argument --merge" in capsys.readouterr().err
  assert main(["export", str(workplace / "adapter"), *words]) == 0


@pytest.mark.slow
def test_an_export_has_the_adapter_added(workplace, tmp_path):
  maxtext_like.export_checkpoint(workplace / "adapter", tmp_path / "hf", dtype="float32")
  merged = maxtext_like.load(workplace / "adapter", dtype="float32").logits([[5, 6, 7]])
  exported = maxtext_like.load(tmp_path / "hf", dtype="float32", tokenizer="bytes").logits([[5, 6, 7]])
  np.testing.assert_allclose(exported, merged, atol=1e-6)
  inputs = {"input_ids": [[5, 6, 7]], "labels": [[5, 6, 7]]}
  of_run, of_export = (
    maxtext_like.forward(place, inputs, gradients=True, dtype="float32").arrays
    for place in (workplace / "adapter", tmp_path / "hf")
  )
  assert of_run.keys() == of_export.keys()
  np.testing.assert_allclose(of_run["logits"], merged, atol=1e-6)
  for name, value in of_run.items():
    np.testing.assert_allclose(value, of_export[name], atol=1e-5, err_msg=name)


@pytest.mark.parametrize(
  ("change", "said"),
  [
    ({"peft_type": "IA3"}, "not a LoRA adapter"),
    ({"use_dora": True}, "has lora_A, lora_B instead of lora_A, lora_B, lora_magnitude_vector"),
    ({"fan_in_fan_out": True}, "fan_in_fan_out = True is not supported"),
    ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
    ({"lora_alpha": "big"}, "lora_alpha = big is not a finite number"),
    ({"r": -1}, "r = -1 is not a rank"),
    ({"r": 10**12}, "r = 1000000000000 is not a rank"),
    ({"r": True}, "r = True is not a rank"),
    ({"r": 64}, "has rank 64 by r and rank_pattern, but its tensors have rank 3"),
    ({"rank_pattern": {"q_proj": 7}}, "has rank 7 by r and rank_pattern, but its tensors have rank 3"),
    ({"rank_pattern": [3]}, "rank_pattern = \\[3\\] is not a JSON object"),
    ({"init_lora_weights": "pissa_niter_4"}, "this initialization changes the base weights"),
    ({"use_qalora": True}, "use_qalora = True is not supported"),
  ],
)
def test_what_peft_writes_and_is_not_here_is_refused(workplace, tmp_path, change, said):
  maxtext_like.export_adapter(workplace / "adapter", tmp_path / "peft")
  path = tmp_path / "peft" / peft.CONFIG
  path.write_text(json.dumps(json.loads(path.read_text()) | change))
  with pytest.raises(UserError, match=said):
    _ = maxtext_like.load(workplace / "base", adapters=tmp_path / "peft").params


def test_what_is_no_adapter_is_refused(workplace, tmp_path):
  with pytest.raises(UserError, match=r"a (whole|complete) model\b.*\badapter"):
    maxtext_like.export_adapter(workplace / "base", tmp_path / "peft")
  with pytest.raises(UserError, match="no adapter"):
    _ = maxtext_like.load(workplace / "base", adapters=tmp_path).params


def dropped(*words: str) -> np.ndarray:
  """Losses of a batch without dropout, and with that of steps 3, 4 and 3."""
  small = [*WORDS, *LORA, "inhomogeneous_layer_cycle_interval=1", "dataset=synthetic", "lora_dropout=0.5", *words]
  program = make_program(load_config("gemma3-tiny", small).config)
  batch = {name: jnp.ones(x.shape, x.dtype) for name, x in program.abstract_batch.items()}
  batch["tokens"] = jnp.arange(batch["tokens"].size, dtype=jnp.int32).reshape(batch["tokens"].shape)

  def losses(seed):
    params = program.initial_state(seed)["params"]
    params["adapter"] = jax.tree.map(lambda x: x + 0.1, params["adapter"])  # where B is zero nothing is added
    batches = [batch, *(program.step.keyed(batch, jnp.int32(step)) for step in (3, 4, 3))]
    return [program.step.apply(params, b)[0] for b in batches]

  return np.array(jax.jit(losses)(np.uint32(0)))


def test_dropout_is_of_training_alone_and_follows_from_the_step():
  without, *found = dropped()
  assert found[0] == found[2]
  assert len({without, *found}) == 3


@pytest.mark.slow
def test_dropout_is_the_same_through_every_face_and_of_layers_by_themselves():
  want = dropped()
  for words in (["module_api=linen", "remat_policy=full"], ["scan_layers=false"]):
    np.testing.assert_allclose(dropped(*words), want, rtol=1e-6)


@pytest.fixture(scope="module")
def dora(workplace):
  """A run with DoRA and dropout on weights in 8 bits, stopped and gone on with."""
  for steps in (2, 4):
    words = (f"init_from={workplace}/base", *DORA, "lr_schedule_steps=4", f"steps={steps}")
    assert train(workplace, "dora", *words, f"eval_path={workplace}/text.txt", "eval_interval=2", "eval_steps=1") == 0
  return workplace / "dora"


@pytest.mark.slow
def test_dora_begins_as_lora_does_and_trains_magnitudes(workplace, dora, capsys):
  assert train(workplace, "lora8", f"init_from={workplace}/base", *LORA, "base_weights=int8", "steps=1") == 0
  assert losses(workplace, "dora")[0] == pytest.approx(losses(workplace, "lora8")[0], rel=1e-6)
  assert losses(workplace, "dora")[-1] < losses(workplace, "dora")[0] - 0.05
  leaves = manifest.read(dora / "checkpoints/4").leaves
  assert leaves["params.adapter.stack_0.layer_0.attention.q.lora_magnitude"]["shape"] == [1, 4, 32]


@pytest.mark.slow
def test_dora_with_dropout_goes_on_to_the_bit(workplace, dora):
  words = (
    f"init_from={workplace}/base",
    *DORA,
    "steps=4",
    f"eval_path={workplace}/text.txt",
    "eval_interval=2",
    "eval_steps=1",
  )
  assert train(workplace, "dora-in-one-go", *words) == 0
  rows = [[json.loads(line) for line in (place / "metrics.jsonl").read_text().splitlines()]
          for place in (dora, workplace / "dora-in-one-go")]  # fmt: skip
  for name in ("loss", "grad_norm"):
    assert [row[name] for row in rows[0]] == [row[name] for row in rows[1]]


@pytest.mark.slow
def test_dora_is_the_same_model_however_it_is_written(workplace, dora, tmp_path):
  load = lambda *args, **more: maxtext_like.load(*args, dtype="float32", **more).logits([[5, 6, 7]])
  run = load(dora)
  np.testing.assert_allclose(load(workplace / "base", adapters=dora), run, atol=1e-5)
  maxtext_like.export_checkpoint(dora, tmp_path / "hf", dtype="float32")
  np.testing.assert_allclose(load(tmp_path / "hf", tokenizer="bytes"), run, atol=1e-5)
  words = [word for word in DORA if "int8" not in word and "dropout" not in word]
  assert train(workplace, "whole", f"init_from={workplace}/base", *words, "steps=3") == 0
  maxtext_like.export_adapter(workplace / "whole", tmp_path / "peft")
  np.testing.assert_allclose(load(workplace / "base", adapters=tmp_path / "peft"), load(workplace / "whole"), atol=1e-5)
  with pytest.raises(UserError, match=r"DoRA.*\n  why: it sets the norms"):
    _ = maxtext_like.load(workplace / "base", adapters=[tmp_path / "peft", workplace / "adapter"]).params


@pytest.mark.parametrize(
  ("words", "said"),
  [
    (
      ["lora_dropout=0.1", "lora_modules=[all-linear, embed_tokens]"],
      "lora_dropout = 0.1: dropout is not supported for embedding.table",
    ),
    (["lora_dropout=1"], "lora_dropout = 1.0 is outside [0, 1)"),
    (["lora_rank=0", "lora_dora=true"], "lora_dora = true has no effect with lora_rank: 0"),
    (["lora_rank_pattern={mlp.dwn: 4}"], "lora_rank_pattern: 'mlp.dwn' matches no weight of this model"),
    (["lora_modules=[q_proj]", "lora_alpha_pattern={mlp: 4}"], "'mlp' matches no weight that lora_modules matches"),
    (["lora_rank_pattern={mlp: 0}"], "lora_rank_pattern: mlp: 0 is not above 0"),
  ],
)
def test_what_cannot_be_is_refused(workplace, capsys, words, said):
  assert train(workplace, "refused", "lora_rank=2", *words, "steps=1") == 2
  assert said in capsys.readouterr().err


@pytest.fixture(scope="module")
def for_peft(workplace):
  maxtext_like.export_adapter(workplace / "adapter", workplace / "for-peft")
  return workplace / "for-peft"


@pytest.fixture(scope="module")
def gone_on(workplace, for_peft):
  """The first losses of runs that begin with what a run trained: (with its whole model, its adapter, its export for peft)."""
  same = [f"init_from={workplace}/base", "steps=2", "learning_rate=0.02"]
  assert train(workplace, "of-merged", f"init_from={workplace}/adapter", *LORA, "steps=1") == 0
  assert train(workplace, "of-run", *same, f"lora_from={workplace}/adapter") == 0
  assert train(workplace, "of-peft", *same, f"lora_from={for_peft}") == 0
  return [losses(workplace, name) for name in ("of-merged", "of-run", "of-peft")]


@pytest.mark.slow
def test_a_run_begins_with_a_given_adapter(workplace, gone_on):
  merged, of_run, of_peft = gone_on
  assert of_run[0] == pytest.approx(merged[0], rel=1e-5)
  assert of_run == pytest.approx(of_peft, rel=1e-6)
  assert of_run[1] < of_run[0] < losses(workplace, "adapter")[0] - 0.05
  stored = manifest.read(workplace / "of-peft/checkpoints/2").config["adapter"]
  assert (stored["lora_rank"], stored["lora_alpha"]) == (3, 6.0)
  assert stored["lora_modules"] == [
    "attention.k",
    "attention.o",
    "attention.q",
    "attention.v",
    "mlp.down",
    "mlp.gate",
    "mlp.up",
  ]


@pytest.mark.slow
def test_a_run_that_began_with_an_adapter_goes_on(workplace, gone_on):
  words = [f"init_from={workplace}/base", "learning_rate=0.02", f"lora_from={workplace}/for-peft"]
  assert train(workplace, "in-one-go", *words, "steps=3") == 0
  assert train(workplace, "of-peft", *words, "steps=3") == 0
  assert losses(workplace, "of-peft") == losses(workplace, "in-one-go")


PATTERNS = ["lora_rank_pattern={mlp.down: 2, layers.0.attention: 5}", "lora_alpha_pattern={q_proj: 1}"]


@pytest.mark.slow
def test_layers_have_ranks_and_scales_of_their_own(workplace, tmp_path, capsys):
  """Layers of a stack share arrays: what a smaller rank leaves of them stays zero, in training too."""
  words = (f"init_from={workplace}/base", *LORA, *PATTERNS, "adam_weight_decay=0.1", "steps=2")
  assert train(workplace, "patterns", *words) == 0
  assert "adapter LoRA of rank 2 to 5 times 0.2 to 3 on 14 arrays" in capsys.readouterr().out
  maxtext_like.export_adapter(workplace / "patterns", tmp_path / "peft")
  config = json.loads((tmp_path / "peft" / peft.CONFIG).read_text())
  layers = [f"model.layers.{i}." for i in (0, 1)]
  own = {f"{layers[0]}self_attn.{name}_proj": 5 for name in "kqov"} | {f"{layer}mlp.down_proj": 2 for layer in layers}
  assert (config["r"], config["rank_pattern"]) == (3, own)
  assert config["alpha_pattern"] == {f"{layer}self_attn.q_proj": 1.0 for layer in layers}
  load = lambda *args, **more: maxtext_like.load(*args, dtype="float32", **more).logits([[5, 6, 7]])
  run = load(workplace / "patterns")
  np.testing.assert_allclose(load(workplace / "base", adapters=tmp_path / "peft"), run, atol=1e-5)
  assert np.abs(run - load(workplace / "base")).max() > 1e-3
  assert main(["import", str(tmp_path / "peft"), "--out", str(tmp_path / "imported")]) == 0
  np.testing.assert_allclose(load(tmp_path / "imported"), run, atol=1e-5)
  assert "lora_rank_pattern: {" in (tmp_path / "imported/adapter.yml").read_text()
  assert train(workplace, "patterns", *words, "lora_alpha_pattern={q_proj: 1, k_proj: 2}", "steps=3") == 2
  assert 'lora_alpha_pattern: checkpoint {"q_proj": 1.0}, this run {"q_proj": 1.0, "k_proj": 2.0}' in capsys.readouterr().err


def test_what_a_smaller_rank_leaves_is_zero_and_stays_so():
  words = [*WORDS, *LORA, "lora_rank_pattern={layers.0.attention: 5}", "inhomogeneous_layer_cycle_interval=1"]
  program = make_program(load_config("gemma3-tiny", [*words, "dataset=synthetic"]).config)
  batch = {name: jnp.ones(x.shape, x.dtype) for name, x in program.abstract_batch.items()}
  q = lambda tree: tree["adapter"]["stack_0"]["layer_0"]["attention"]["q"]

  def gradients(seed):
    """Those of q's factors where B is not zero, and its A."""
    params = program.initial_state(seed)["params"]
    a = q(params)["lora_a"]
    q(params)["lora_b"] = jnp.zeros_like(q(params)["lora_b"]).at[0].set(0.1).at[1, :3].set(0.1)
    given = lambda own: {**params, "adapter": {"stack_0": {"layer_0": own}}}
    layer = params["adapter"]["stack_0"]["layer_0"]
    found = jax.grad(lambda own: program.step.apply(given(own), batch)[0])(layer)
    return a, found["attention"]["q"]

  a, found = jax.jit(gradients)(np.uint32(0))
  for values in (a, found["lora_a"], jnp.moveaxis(found["lora_b"], 1, -1)):
    moved = np.any(np.asarray(values) != 0, axis=tuple(range(1, values.ndim - 1)))
    np.testing.assert_array_equal(moved, [[True] * 5, [True] * 3 + [False] * 2])


@pytest.mark.parametrize(
  ("words", "change", "said"),
  [
    (["lora_rank=4"], {}, "lora_rank: adapter 3, this run 4"),
    (["lora_rank=3"], {}, "lora_alpha: adapter 6.0, this run None"),
    (["lora_rank=3", "lora_alpha=6", "lora_modules=[q_proj]"], {}, "lora_modules: "),
    (
      ["lora_rank=3", "lora_alpha=6"],
      {"alpha_pattern": {"q_proj": 3}},
      "adapter 6.0 except {'attention.q': 3.0}, this run 6.0",
    ),
    (["lora_rank_pattern={q_proj: 2}"], {}, "has no effect with lora_from"),
    ([], {"peft_type": "LOHA"}, "not a LoRA adapter (peft_type LOHA)"),
    ([], {"lora_alpha": 0}, "adapter_config.json: lora_alpha = 0 for layers.0."),
    ([], {"alpha_pattern": {"q_proj": -1}}, "adapter_config.json: alpha_pattern = -1 for layers.0.attention.q is not above 0"),
    (["lora_alpha=3"], {}, "lora_alpha = 3.0 has no effect with lora_from"),
  ],
)
def test_an_adapter_that_is_not_the_run_s_is_refused(workplace, for_peft, tmp_path, capsys, words, change, said):
  shutil.copytree(for_peft, tmp_path / "peft")
  path = tmp_path / "peft" / peft.CONFIG
  path.write_text(json.dumps(json.loads(path.read_text()) | change))
  assert train(workplace, "refused", f"init_from={workplace}/base", f"lora_from={tmp_path}/peft", *words, "steps=1") == 2
  assert said in capsys.readouterr().err


def test_an_adapter_that_was_trained_on_other_weights_is_refused(workplace, for_peft, capsys, caplog):
  drawn = ["learning_rate=0.02", "seed=5", "steps=1"]
  assert train(workplace, "on-others", *drawn, f"lora_from={workplace}/adapter") == 2
  said = capsys.readouterr().err
  assert f"lora_from: {workplace}/adapter was trained on other base weights\n  then: {workplace}/base, " in said
  assert "  now:  initialized from seed 5, " in said
  # In another form every bit differs: the same source is enough, and another one is not.
  same = load_config("gemma3-tiny", [*WORDS, f"dataset_path={workplace}/text.txt", f"lora_from={workplace}/adapter"]).config
  int8 = dataclasses.replace(same, adapter=dataclasses.replace(same.adapter, base_weights="int8"))
  model: Any = SimpleNamespace(config=int8)
  require_base(model, Base(str(workplace / "base"), 0, "0"))
  with pytest.raises(UserError, match="was trained on other base weights"):
    require_base(model, Base(str(workplace / "elsewhere"), 0, "0"))
  # What its files say goes before their place.
  files = of_files(workplace / "base")
  require_base(model, Base(str(workplace / "moved"), 0, "0", files))
  with pytest.raises(UserError, match="was trained on other base weights"):
    require_base(model, Base(str(workplace / "base"), 0, "0", f"step {'0' * 64}"))


@pytest.mark.slow
def test_an_adapter_beside_other_weights_than_its_own_is_told(workplace, other, capsys):
  ask = ["--prompt", "ab", "--max-tokens", "1", "--adapter", f"{workplace}/adapter"]
  told = "adapter was trained on "
  assert main(["generate", "--checkpoint", f"{workplace}/base", *ask]) == 0
  assert told not in capsys.readouterr().err
  assert main(["generate", "--checkpoint", str(other), *ask]) == 0
  assert told in capsys.readouterr().err


class TakenError(Exception):
  """Carries what a search would begin with."""


@pytest.mark.slow
def test_bisect_measures_the_trained_adapter_on_its_own_weights(workplace, monkeypatch):
  def take(*given):
    raise TakenError(given[1])

  monkeypatch.setattr(key_bisection, "Bisection", take)
  run = workplace / "adapter"
  with pytest.raises(TakenError) as taken:
    maxtext_like.bisect(f"{run}/config.yml", checkpoint=run, base_weights="int8")
  (params,) = taken.value.args
  step = run / "checkpoints/4"
  factors = read_adapter(step, manifest.read(step), make_program(load_config(str(run / "config.yml")).config).model)[1]
  jax.tree.map(np.testing.assert_array_equal, params["adapter"], factors)
  assert params["stack_0"]["layer_0"]["attention"]["q"]["codes"].dtype == np.int8


def test_what_peft_names_is_compared_with_the_weights(workplace, for_peft, tmp_path, caplog):
  config = load_config("gemma3-tiny", [*WORDS, f"dataset_path={workplace}/text.txt", f"lora_from={tmp_path}/peft"]).config
  shutil.copytree(for_peft, tmp_path / "peft")
  path = tmp_path / "peft" / peft.CONFIG
  model: Any = SimpleNamespace(config=config)
  said = json.loads(path.read_text())
  snapshot = "/cache/models--google--gemma-3-4b-it/snapshots/0123"
  for named, source, warned in (
    (f"{workplace}/base", f"{workplace}/base", False),
    (f"{workplace}/base", f"{workplace}/base/checkpoints/1", False),
    ("google/gemma-3-4b-it", snapshot, False),
    ("google/gemma-3-4b-it", "/models/Gemma-3-4b-it", False),
    (None, "/models/other", False),
    ("google/gemma-3-4b-pt", snapshot, True),
    ("google/gemma-3-4b-pt", None, True),
  ):
    path.write_text(json.dumps(said | {"base_model_name_or_path": named}))
    caplog.clear()
    require_base(model, Base(source, 0, "0"))
    assert (f"was trained on {named}, but the weights here are {source or 'initialized from seed 0'}" in caplog.text) == warned


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["adapter", "whole-dora"])
def test_an_imported_adapter_is_the_run_s(workplace, tmp_path, kind, capsys):
  """peft's file as a run: loaded, trained on, and written again."""
  base = f"init_from={workplace}/base"
  if kind == "whole-dora":
    assert train(workplace, kind, base, *LORA, "lora_dora=true", "lora_rslora=true", "steps=2") == 0
  maxtext_like.export_adapter(workplace / kind, tmp_path / "peft")
  assert main(["import", str(tmp_path / "peft"), "--out", str(tmp_path / "imported")]) == 0
  assert f"train with: maxtext-like train MODEL {tmp_path}/imported/adapter.yml" in capsys.readouterr().out
  load = lambda place: maxtext_like.load(place, dtype="float32").logits([[5, 6, 7]])
  np.testing.assert_allclose(load(tmp_path / "imported"), load(workplace / kind), atol=1e-5)
  maxtext_like.export_adapter(tmp_path / "imported", tmp_path / "again")
  files = [(tmp_path / name / peft.WEIGHTS).read_bytes() for name in ("peft", "again")]
  assert files[0] == files[1]
  found = []
  for name, words in (
    ("from-run", [f"lora_from={workplace}/{kind}", base]),
    ("from-file", [f"{tmp_path}/imported/adapter.yml"]),
  ):
    assert train(workplace, f"{kind}-{name}", *words, "steps=1") == 0
    found += losses(workplace, f"{kind}-{name}")
  assert found[0] == pytest.approx(found[1], rel=1e-6)


def test_an_adapter_whose_weights_are_not_here_is_not_imported(workplace, for_peft, tmp_path):
  shutil.copytree(for_peft, tmp_path / "peft")
  path = tmp_path / "peft" / peft.CONFIG
  path.write_text(json.dumps(json.loads(path.read_text()) | {"base_model_name_or_path": "some/model"}))
  with pytest.raises(UserError, match=r"the weights below are some/model, which is not a directory(?s:.*)init_from=DIR"):
    maxtext_like.import_checkpoint(tmp_path / "peft", tmp_path / "imported")
