"""The optimizer state of a run that resumes with other trained parameters, and the training stages of DeepSeek V3.2."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from maxtext_like.checkpoint.store import manifest, stored_state
from maxtext_like.cli.main import main
from maxtext_like.config.load import load_config
from maxtext_like.layers.param import Param
from maxtext_like.training.optimizers.optimizer import Optimizer, make_optimizer
from maxtext_like.training.step.kept_moments import completed, summary

PARAMS: Any = {"old": jnp.ones((128, 64)), "new": jnp.ones((2, 3))}
PLACE = jax.sharding.SingleDeviceSharding(jax.devices()[0])


def optimizer_of(*words: str) -> Optimizer:
  training = load_config("qwen3-tiny", ["adam_weight_decay=0", *words]).config.training
  spec = {name: Param(x.shape, ("embed", "mlp"), "float32") for name, x in PARAMS.items()}
  return make_optimizer(training, spec, "float32")


def without_new(state: Any) -> Any:
  """Return the state as it is restored from the checkpoint of a run that trained only "old"."""
  missing = lambda path: any(getattr(key, "key", None) == "new" for key in path)
  lacking = lambda path, x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=PLACE) if missing(path) else x
  return jax.tree_util.tree_map_with_path(lacking, state)


def of_adam(state: Any) -> Any:
  found = jax.tree.leaves(state, is_leaf=lambda x: isinstance(x, optax.ScaleByAdamState))
  return next(x for x in found if isinstance(x, optax.ScaleByAdamState))


@pytest.mark.parametrize("nu_dtype", ["float32", "dynamic8"])
def test_new_moments_beside_old_ones_make_updates_of_the_usual_size(nu_dtype):
  """For a constant gradient of 1, Adam's update is 1 from the first step on. If new moments used the step count of the old
  ones, the update of a new parameter would be 6.6 after 10 steps."""
  optimizer = optimizer_of("adam_b1=0.9", "adam_b2=0.999", f"nu_dtype={nu_dtype}")
  ones = jax.tree.map(jnp.ones_like, PARAMS)
  update, state = jax.jit(optimizer.update), jax.jit(optimizer.init)(PARAMS)
  for _ in range(40):
    _, state = update(ones, state, PARAMS)
  state = completed(without_new(state), PARAMS, optimizer)
  adam = of_adam(state)
  assert int(adam.count) == 10
  np.testing.assert_allclose(adam.mu["old"], 1 - 0.9**10, rtol=1e-4)  # as after 10 steps
  np.testing.assert_array_equal(adam.mu["new"], 0)
  sizes = []
  for _ in range(60):
    direction, state = update(ones, state, PARAMS)
    np.testing.assert_allclose(direction["old"], 1, rtol=1e-3 if nu_dtype == "float32" else 0.02)
    sizes.append(float(direction["new"][0, 0]))
  assert min(sizes) > 0.4
  assert max(sizes) < 1.13


def test_without_missing_moments_a_state_stays_as_it_is():
  optimizer = optimizer_of()
  state = optimizer.init(PARAMS)
  assert completed(state, PARAMS, optimizer) is state
  names = [f"opt_state.{i}" for i, _ in enumerate(jax.tree.leaves(state))]
  assert summary(dict.fromkeys(names), {"opt_state": state}, optimizer) is None


def test_rules_without_a_count_begin_new_moments_at_zero():
  optimizer = optimizer_of("opt_type=lion", "mu_dtype=null")
  _, state = optimizer.update(jax.tree.map(jnp.ones_like, PARAMS), optimizer.init(PARAMS), PARAMS)
  kept = completed(without_new(state), PARAMS, optimizer)
  leaves = [np.asarray(x) for x in jax.tree.leaves(kept) if x.ndim]
  assert sorted(x.any() for x in leaves) == [False, True]
  stored: dict[str, Any] = {f"opt_state.0.{name}": {} for name in ("mu.old", "count", "mu.gone")}
  line = summary(stored, {"opt_state": without_new(state)}, optimizer)
  assert line == (
    "note    optimizer state: 2 arrays kept, 1 start at zero (not trained so far), 1 dropped (not trained from here on)"
  )


SMALL = ["vocab_size=300", "emb_dim=32", "mlp_dim=48", "num_decoder_layers=2", "num_query_heads=2", "num_kv_heads=2"]
SMALL += ["moe_mlp_dim=16", "max_target_length=32", "per_device_batch_size=2", "dataset_documents_max=20", "eval_fraction=0"]


def arrays(run: Any, step: int, prefix: str = "params.") -> dict[str, np.ndarray]:
  """Return the arrays of a checkpoint by name."""
  directory = run / "checkpoints" / str(step)
  leaves = {name: x for name, x in manifest.read(directory).leaves.items() if name.startswith(prefix)}
  like = {name: jax.ShapeDtypeStruct(x["shape"], x["dtype"], sharding=PLACE) for name, x in leaves.items()}
  return {name: np.asarray(x) for name, x in stored_state.read(directory, manifest.read(directory), like).items()}


@pytest.mark.slow
def test_v3_then_the_warm_up_of_the_indexer_then_sparse_attention(tmp_path, capsys):
  """The commands of docs/guides/resume.md with a tiny model."""

  def train(model: str, run: str, *words: str) -> str:
    assert main(["train", model, *SMALL, f"output_dir={tmp_path}", f"run_name={run}", *words]) == 0
    return capsys.readouterr().out

  train("deepseek3-tiny", "v3", "steps=2")
  from_v3 = f"init_from={tmp_path}/v3"
  said = train("deepseek3.2-tiny", "v32", from_v3, "indexer_sparse_training=false", "steps=12")
  assert "\nnew     indexer: not in the checkpoint; 10 parameter arrays initialized from seed 0\n" in said
  v3, warmed = arrays(tmp_path / "v3", 2), arrays(tmp_path / "v32", 12)
  new = {name for name in warmed if ".indexer." in name}
  assert warmed.keys() - v3.keys() == new
  assert len(new) == 10
  for name, x in v3.items():
    np.testing.assert_array_equal(warmed[name], x, err_msg=name)
  moments = arrays(tmp_path / "v32", 12, "opt_state.")
  assert all(".indexer." in name for name in moments if name != "opt_state.0.count")

  said = train("deepseek3.2-tiny", "v32", from_v3, "steps=14", "max_to_keep=9")
  assert "\nchanged indexer_sparse_training: was false, is true (changes which parameters are trained)\n" in said
  assert "\nnote    optimizer state: 21 arrays kept, 62 start at zero (not trained so far), 0 dropped (not trained from" in said
  assert "from step 12 in" in said
  assert "finished: 14 steps" in said
  sparse = arrays(tmp_path / "v32", 14)
  trained = [name for name in sparse if not name.endswith("moe.router.bias")]
  assert all((sparse[name] != warmed[name]).any() for name in trained)
  assert int(arrays(tmp_path / "v32", 14, "opt_state.0.count")["opt_state.0.count"]) == 10 + 2

  # The sparse stage as a separate run begins with the weights of the warm-up. Going back to the warm-up drops moments.
  assert "changed indexer_sparse_training" in train(
    "deepseek3.2-tiny", "sparse", f"init_from={tmp_path}/v32/checkpoints/12", "steps=1"
  )
  said = train("deepseek3.2-tiny", "sparse", f"init_from={tmp_path}/v32", "indexer_sparse_training=false", "steps=2")
  assert "21 arrays kept, 0 start at zero (not trained so far), 62 dropped" in said
