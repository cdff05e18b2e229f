"""Runs that train an adapter: frozen weights, checkpoints, resumes and refusals."""

import json
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import maxtext_like
from maxtext_like.analysis import key_bisection
from maxtext_like.checkpoint.adapters.adapter_step import read_adapter, read_base, stored_init_scheme
from maxtext_like.checkpoint.store import manifest
from maxtext_like.cli.main import main
from maxtext_like.config.load import load_config
from maxtext_like.errors import UserError
from maxtext_like.models.model import make_model
from maxtext_like.training.step.program import make_program
from tests.training.adapters.runs import DORA, LORA, WORDS, losses, train


def test_a_checkpoint_holds_the_adapter_alone(workplace):
  stored = manifest.read(workplace / "adapter/checkpoints/4")
  names = [name for name in stored.leaves if name.startswith("params.")]
  assert all(name.startswith("params.adapter.") for name in names)
  assert len(names) == 2 * 7  # A and B of seven weights; the two layers are rows of one stack
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


@pytest.mark.slow
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


@pytest.mark.slow
def test_random_weights_below_an_adapter_are_drawn_with_the_scheme_of_its_run():
  def drawn(scheme: Any, *words: str) -> dict[str, Any]:
    model = make_model(load_config("gemma3-tiny", [*WORDS, "dataset_path=text.txt", *words]).config, runs_attention=False)
    return read_base(model, None, 3, scheme, lambda *_: None)[0]["stack_0"]["layer_0"]["post_mlp_norm"]["scale"]

  # Gemma stores a norm's scale minus 1; 2 layers have 4 branches, and depth_scaled starts them at 4 ** -0.5.
  np.testing.assert_array_equal(drawn("maxtext"), 0.0)
  np.testing.assert_array_equal(drawn("maxtext", "init_scheme=maxtext"), 0.0)
  np.testing.assert_array_equal(drawn("depth_scaled", "init_scheme=maxtext"), -0.5)
  assert stored_init_scheme({"training": {"init_scheme": "depth_scaled"}}) == "depth_scaled"
  assert stored_init_scheme({"training": {"seed": 3}}) == "maxtext"  # a checkpoint of a version without the key


@pytest.mark.slow
def test_an_adapter_on_random_weights_needs_their_scheme_and_seed(workplace, tmp_path, capsys):
  assert train(workplace, "scheme", *LORA, "init_scheme=maxtext", "steps=2", "seed=7") == 0
  assert np.isfinite(maxtext_like.load(workplace / "scheme", dtype="float32").logits([[5, 6]])).all()
  capsys.readouterr()
  assert main(["export", str(workplace / "scheme"), "--out", str(tmp_path / "peft"), "--adapter"]) == 0
  said = capsys.readouterr().out
  assert said == f"{tmp_path}/peft: an adapter for 14 linear maps, rank 3, trained on weights initialized from seed 7\n"
  assert train(workplace, "scheme", *LORA, "seed=1", "steps=3") == 2
  said = capsys.readouterr().err
  assert (
    '  training.seed: checkpoint 7, this run 1\n  training.init_scheme: checkpoint "maxtext", this run "depth_scaled"\n' in said
  )
  assert "fix: seed=7 init_scheme=maxtext (the checkpoint's values)" in said
  assert train(workplace, "scheme", *LORA, "init_scheme=maxtext", "seed=7", "steps=3") == 0


def test_another_rank_is_refused(workplace, capsys):
  assert train(workplace, "adapter", f"init_from={workplace}/base", *LORA, "lora_rank=4", "steps=6") == 2
  assert "adapter.lora_rank: checkpoint 3, this run 4" in capsys.readouterr().err


@pytest.mark.slow
def test_weights_that_were_cast_are_cast_again(workplace, tmp_path, caplog):
  """A run casts its base weights to bfloat16. Everything that loads its adapter must cast the base weights in the same way,
  or the model differs from the trained one."""
  words = (f"init_from={workplace}/base", *LORA, "weight_dtype=bfloat16", "allow_dtype_change=true", "base_weights=nf4")
  assert train(workplace, "cast", *words, "steps=2", "learning_rate=1e-3") == 0
  merge: dict[str, Any] = {"dtype": "float32", "base_weights": None}
  merged = maxtext_like.load(workplace / "cast", **merge).logits([[5, 6, 7]])
  (warning,) = [line for line in caplog.text.splitlines() if "cast/checkpoints/2: the adapter" in line]
  assert re.search(r"bfloat16; rounding changes 0\.\d+ .*weight_dtype=float32", warning)
  inputs = {"input_ids": [[5, 6, 7]]}
  forward = maxtext_like.forward(workplace / "cast", inputs, **merge)
  below = "nf4 weights (those that are not quantized are bfloat16)"
  assert forward.notes == (f"the adapter is merged in float32 into {below}; weight_dtype=bfloat16 would round the sums",)
  rounded = maxtext_like.forward(workplace / "cast", inputs, **merge, weight_dtype="bfloat16")
  assert "merged in float32" not in "".join(rounded.notes)
  np.testing.assert_allclose(rounded.arrays["logits"], merged, atol=1e-6)
  assert 1e-5 < np.abs(forward.arrays["logits"] - merged).max() < 1e-1  # the merged weights are rounded to bfloat16
  caplog.clear()
  maxtext_like.load(workplace / "cast", **merge, weight_dtype="float32").logits([[5, 6, 7]])
  assert "rounding" not in caplog.text
  maxtext_like.export_checkpoint(workplace / "cast", tmp_path / "hf", dtype="bfloat16")
  exported = maxtext_like.load(tmp_path / "hf", dtype="float32", weight_dtype="bfloat16", tokenizer="bytes").logits([[5, 6, 7]])
  np.testing.assert_array_equal(exported, merged)


def dropped(*words: str) -> np.ndarray:
  """Return the losses of a batch: without dropout, and with the dropout masks of steps 3, 4 and 3."""
  small = [*WORDS, *LORA, "dataset=synthetic", "lora_dropout=0.5", *words]
  program = make_program(load_config("gemma3-tiny", small).config)
  batch = {name: jnp.ones(x.shape, x.dtype) for name, x in program.abstract_batch.items()}
  batch["tokens"] = jnp.arange(batch["tokens"].size, dtype=jnp.int32).reshape(batch["tokens"].shape)

  def losses(seed):
    params = program.initial_state(seed)["params"]
    params["adapter"] = jax.tree.map(lambda x: x + 0.1, params["adapter"])  # while B is zero, the adapter adds nothing
    batches = [batch, *(program.step.keyed(batch, jnp.int32(step)) for step in (3, 4, 3))]
    return [program.step.apply(params, b)[0] for b in batches]

  return np.array(jax.jit(losses)(np.uint32(0)))


@pytest.mark.slow
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
  """A run with DoRA and dropout on 8-bit weights that was stopped and resumed."""
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
  assert leaves["params.adapter.stack_0.layer_0.attention.q.lora_magnitude"]["shape"] == [2, 4, 32]


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


@pytest.mark.slow
def test_what_a_smaller_rank_leaves_is_zero_and_stays_so():
  words = [*WORDS, *LORA, "lora_rank_pattern={layers.0.attention: 5}"]
  program = make_program(load_config("gemma3-tiny", [*words, "dataset=synthetic"]).config)
  batch = {name: jnp.ones(x.shape, x.dtype) for name, x in program.abstract_batch.items()}
  q = lambda tree: tree["adapter"]["stack_0"]["layer_0"]["attention"]["q"]

  def gradients(seed):
    """Return the initial A of q, and the gradients of q's factors for a nonzero B."""
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


@pytest.mark.slow
def test_an_adapter_beside_other_weights_than_its_own_is_told(workplace, other, capsys):
  ask = ["--prompt", "ab", "--max-tokens", "1", "--adapter", f"{workplace}/adapter"]
  told = "adapter was trained on "
  assert main(["generate", "--checkpoint", f"{workplace}/base", *ask]) == 0
  assert told not in capsys.readouterr().err
  assert main(["generate", "--checkpoint", str(other), *ask]) == 0
  assert told in capsys.readouterr().err


class TakenError(Exception):
  """Carries the parameters that a search would start with."""


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
