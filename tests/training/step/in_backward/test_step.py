"""Layers that are updated in the backward pass, against the ordinary step."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from maxtext_like.config.load import load_config
from maxtext_like.sharding.mesh import use_mesh
from maxtext_like.training.optimizers.optimizer import decays
from maxtext_like.training.step.in_backward import step as step_in_backward
from maxtext_like.training.step.program import TrainProgram, make_program
from maxtext_like.training.step.train_step import NO_UPDATE, UNKNOWN
from tests.layers.equations import equations
from tests.tiers import tiers
from tests.training.meshes import batch_of
from tests.training.test_parallelism import FEWER, MODELS

SMALL = (
  "dtype=float32", "weight_dtype=float32", "max_target_length=16", "vocab_size=304", "remat_policy=full",
  "per_device_batch_size=8", "warmup_steps_fraction=0",
)  # fmt: skip
THREE = ("qwen3-tiny", "num_decoder_layers=3")
UNCLIPPED = "gradient_clipping_threshold=0"
LAYERED = "optimizer_in_backward=true"


def compiled(model: str, *words: str) -> tuple[TrainProgram, Any, Any, Any]:
  """Return (program, compiled step, initial state, batch). Calls with the same settings, in any order, share one result. A
  later word overrides an earlier one."""
  return _compiled(model, _keys(words))


@functools.cache
def _compiled(model: str, keys: tuple[tuple[str, str], ...]) -> tuple[TrainProgram, Any, Any, Any]:
  program, state, batch = _begun(model, keys)
  with use_mesh(program.model.mesh):
    return program, program.lower_step(checked=True).compile(), state, batch


def begun(model: str, *words: str) -> tuple[TrainProgram, Any, Any]:
  """Return (program, initial state, batch) of ``compiled`` without compiling the step."""
  return _begun(model, _keys(words))


def _keys(words: tuple[str, ...]) -> tuple[tuple[str, str], ...]:
  return tuple(sorted(dict(word.split("=", 1) for word in (*SMALL, *words)).items()))


@functools.cache
def _begun(model: str, keys: tuple[tuple[str, str], ...]) -> tuple[TrainProgram, Any, Any]:
  program = make_program(load_config(model, ["=".join(key) for key in keys]).config)
  with use_mesh(program.model.mesh):
    places = jax.tree.map(lambda x: x.sharding, program.abstract_state)
    state = jax.device_get(jax.jit(program.initial_state, out_shardings=places)(np.uint32(1)))
  return program, state, batch_of(program)


def descend(model: str, *words: str, steps: int = 2, change: Any = None) -> tuple[Any, list[Any]]:
  """Return the state after this many steps, and the metrics of each step. The steps start from the initial state, or from the
  result of ``change`` for it."""
  program, step, state, batch = compiled(model, *words)
  with use_mesh(program.model.mesh):
    state = jax.device_put(change(state) if change else state, jax.tree.map(lambda x: x.sharding, program.abstract_state))
    placed, known, metrics = program.place(batch), UNKNOWN, []
    for _ in range(steps):
      state, found = step(state, placed, known)
      known = found["magnitude_bound"]
      metrics.append(jax.device_get(found))
    return jax.device_get(state), metrics


def assert_bits(a: Any, b: Any) -> None:
  assert jax.tree.structure(a) == jax.tree.structure(b)
  for (path, x), y in zip(jax.tree_util.tree_leaves_with_path(a), jax.tree.leaves(b), strict=True):
    np.testing.assert_array_equal(x, y, err_msg=jax.tree_util.keystr(path))


def assert_the_same_steps(model: str, *words: str) -> None:
  """Assert that updates in the backward pass agree with the ordinary step. The states after the first step are equal bit for
  bit. In the second step the moments are not zero, and a multiplication and an addition are rounded once or twice, depending on
  how XLA fuses them. So a sign or an 8-bit code may differ for a few numbers. The metrics of both steps agree too."""
  (whole, _), (layered, _) = (descend(model, *words, *w, steps=1) for w in ((), (LAYERED,)))
  assert_bits(layered, whole)
  (whole, ordinary), (layered, metrics) = descend(model, *words), descend(model, *words, LAYERED)
  pairs = zip(jax.tree.leaves(layered["params"]), jax.tree.leaves(whole["params"]), strict=True)
  far = [np.ravel(~np.isclose(a, b, rtol=1e-5, atol=1e-6)) for a, b in pairs]
  assert np.concatenate(far).mean() < 1e-3
  for a, b in zip(metrics, ordinary, strict=True):
    assert a.keys() == b.keys()
    assert jax.tree.map(np.shape, a) == jax.tree.map(np.shape, b)
    assert jax.tree.all(jax.tree.map(np.all, a["finite"]))
    assert not a["skipped"]
    assert a["decided"]
    for key in ("loss", "grad_norm", "param_norm", "learning_rate", "tokens"):
      np.testing.assert_allclose(a[key], b[key], rtol=1e-6, err_msg=key)
    assert np.all(a["magnitude_bound"] <= b["magnitude_bound"] * 1.01)
    assert np.all(np.isfinite(a["magnitude_bound"]))


def test_steps_are_those_of_the_ordinary_step():
  """AdamW with float32 moments, and a tied table."""
  assert_the_same_steps(*THREE, UNCLIPPED)


def test_a_layer_that_is_not_finite_is_not_updated_and_nothing_after_it():
  """A moment of the middle layer is infinite. The last layer is already updated by then; the middle and the first layer are not
  updated. The metrics name the array."""
  words = (*THREE, UNCLIPPED, LAYERED)
  program, _, before, _ = compiled(*words)

  def broken(state):
    moment = jax.tree.map(np.copy, state["opt_state"])
    moment[0].mu["stack_0"]["layer_0"]["mlp"]["down"][1, 0, 0] = np.inf
    return {**state, "opt_state": moment}

  after, (metrics,) = descend(*words, steps=1, change=broken)
  assert metrics["skipped"]
  assert np.all(np.isinf(metrics["magnitude_bound"]))
  moved = jax.tree.map(lambda a, b: np.any(a != b, axis=tuple(range(1, a.ndim))), after["params"], before["params"])
  for path, rows in jax.tree_util.tree_leaves_with_path(moved["stack_0"]):
    assert rows.tolist() == [False, False, True], path
  assert not any(np.any(x) for name, tree in moved.items() if name != "stack_0" for x in jax.tree.leaves(tree))
  finite = metrics["finite"]
  assert finite["loss"]
  assert np.all(finite["gradients"])
  assert np.all(finite["state_parameters"])
  names = [n for n, fine in zip(program.labels, finite["parameters"], strict=True) if not fine]
  assert names == ["layers.1.mlp.down"]
  names = [n for n, fine in zip(program.state_labels["optimizer"], finite["optimizer"], strict=True) if not fine]
  assert names == ["mu.layers.1.mlp.down"]
  assert [program.step.untouched(failed) for failed in ("loss", "gradients", "optimizer")] == [True, False, False]


EIGHT_BITS = ("mu_dtype=dynamic8", "nu_dtype=dynamic8")
LION, SGD = "opt_type=lion", "opt_type=sgd"
FAMILIES = {
  "gemma3-tiny": (*MODELS["gemma3-tiny"], "use_multimodal=true", LION),
  "gemma4-tiny": (*MODELS["gemma4-tiny"], "global_num_kv_heads=2", "mu_dtype=bfloat16", "nu_dtype=bfloat16"),
  "gemma4-moe-tiny": (*FEWER["gemma4-moe-tiny"], "global_num_kv_heads=2", SGD),
  "gemma4-e2b-tiny": (*FEWER["gemma4-e2b-tiny"], "num_kv_heads=2", SGD),
  "deepseek3.2-tiny": (*MODELS["deepseek3.2-tiny"], LION, "mu_dtype=bfloat16"),
  "qwen3-moe-tiny": (*MODELS["qwen3-moe-tiny"], *EIGHT_BITS),
}
"""An update rule with its moments for each family (default: AdamW in float32). The families have tied tables, a vision tower,
keys that are also values, and keys that later layers share. With one key head, as in Gemma 4's own configuration, XLA compiles
the products in the complete program and in a single layer differently, starting with the forward pass. All numbers then differ
by rounding errors of sums. With two key heads they are equal bit for bit."""


@pytest.mark.parametrize("model", tiers(FAMILIES, slow=("gemma3-tiny",)))
def test_every_family_and_rule_descends_by_the_bits_of_the_ordinary_step(model):
  assert_the_same_steps(model, *FAMILIES[model], UNCLIPPED)


@pytest.mark.nightly
def test_one_head_of_keys_descends_alike_to_the_rounding_of_sums():
  words = ("gemma4-tiny", *MODELS["gemma4-tiny"], UNCLIPPED, SGD)
  (whole, _), (layered, _) = descend(*words), descend(*words, LAYERED)
  jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), layered["params"], whole["params"])


def test_every_family_has_a_rule():
  assert {*FAMILIES, THREE[0], "deepseek3-tiny"} == {*MODELS}  # deepseek3-tiny has the layers of 3.2 without the indexer


@pytest.mark.parametrize(
  ("words", "held_up"),
  [((), 1), (("scan_layers=false",), 5), (("num_decoder_layers=1",), 5)],
  ids=["stacks", "no loop", "one row"],
)
def test_what_layers_kept_is_read_where_it_lies(words, held_up):
  """A barrier around slices of a stack would copy them. So ``jax.checkpoint`` adds no barriers in the backward pass
  (prevent_cse is False), and in a loop the step's own barrier contains only the cotangent. Without a loop the barrier also
  contains what the layer read and kept: its input, the output of attention, gate and up. Otherwise XLA would build stacks of
  these arrays, or, with a single row, merge the recomputation with the forward pass."""
  program = make_program(
    load_config(THREE[0], [*SMALL, *THREE[1:], UNCLIPPED, LAYERED, "remat_policy=save_mlp", *words]).config
  )
  batch = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), program.abstract_batch)
  with use_mesh(program.model.mesh):
    found = [*equations(program.step, program.abstract_state, batch, UNKNOWN)]
  recomputed = [e.params["prevent_cse"] for e in found if e.primitive.name in ("checkpoint", "remat2")]
  assert recomputed
  assert not any(recomputed)
  barriers = [[x.aval for x in e.invars] for e in found if e.primitive.name == "optimization_barrier"]
  own = [avals for avals in barriers if any(x.dtype == bool for x in avals)]
  assert own
  for avals in own:
    assert sum(x.shape[:2] == batch["tokens"].shape for x in avals) == held_up


@pytest.mark.parametrize("policy", ["save_mlp", "none"])  # keeps some arrays, or all; test_decoder.py has the other policies
@pytest.mark.slow
def test_what_a_layer_keeps_changes_no_number(policy):
  words = (*THREE, UNCLIPPED, LAYERED)
  (full, _), (keeping, _) = descend(*words), descend(*words, f"remat_policy={policy}")
  jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-7), keeping, full)


@pytest.mark.parametrize(("policy", "offload"), [("full", "layer_inputs"), ("save_mlp", "all")])
@pytest.mark.nightly  # tests/layers/test_decoder.py has the same of the ordinary backward pass
def test_where_things_wait_changes_no_bit(policy, offload):
  words = (*THREE, UNCLIPPED, LAYERED, f"remat_policy={policy}")
  (here, _), (there, _) = descend(*words), descend(*words, f"remat_offload={offload}")
  assert_bits(there, here)


@pytest.mark.nightly
@pytest.mark.parametrize("model", ["gemma4-e2b-tiny", "gemma4-moe-tiny"])
def test_keys_that_are_lent_and_experts_keep_too(model):
  words = (model, *FAMILIES[model], UNCLIPPED, LAYERED)
  (full, _), (keeping, _) = descend(*words), descend(*words, "remat_policy=save_mlp")
  jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), keeping["params"], full["params"])


PLAIN = (*THREE, "opt_type=sgd", "sgd_momentum=0", "adam_weight_decay=0", "learning_rate=1", LAYERED)


def gradients_and_steps(*words, change=None):
  """Return the decrease of the parameters in one SGD step at rate 1, which is the gradient, and the same with the clipping of
  ``words``. The second step starts from the state made by ``change``. Also return the state after the second step."""
  _, _, before, _ = compiled(*PLAIN, UNCLIPPED)
  free, _ = descend(*PLAIN, UNCLIPPED, steps=1)
  held, (metrics,) = descend(*PLAIN, *words, steps=1, change=change)
  assert metrics["clipped"]
  apart = lambda after: jax.tree.map(lambda a, b: np.float64(b) - np.float64(a), after["params"], before["params"])
  return apart(free), apart(held), held


def norm_of(gradients: Any) -> float:
  return sum(np.sum(np.square(g)) for g in jax.tree.leaves(gradients)) ** 0.5


@pytest.mark.slow
def test_an_exact_norm_is_that_of_all():
  free, held, _ = gradients_and_steps("gradient_clipping_threshold=0.5")
  norm = norm_of(free)
  assert norm > 0.5
  jax.tree.map(lambda s, g: np.testing.assert_allclose(s, g * 0.5 / norm, atol=3e-7), held, free)


@pytest.mark.slow
def test_each_layer_is_clipped_by_its_own_norm():
  """There are four parts: three layers, and the parameters outside the stacks. Each is clipped to half of the threshold, so
  that the norm of all together is at most the threshold."""
  free, held, _ = gradients_and_steps("clip=layer", "gradient_clipping_threshold=1")
  for row in range(3):
    gradient, step = (jax.tree.leaves(jax.tree.map(lambda x, r=row: x[r], t["stack_0"])) for t in (free, held))
    norm = norm_of(gradient)
    assert norm > 0.5
    for g, s in zip(gradient, step, strict=True):
      np.testing.assert_allclose(s, g * 0.5 / norm, atol=3e-7)


RUNNING = ("clip=running", "gradient_clipping_threshold=1")


@pytest.mark.parametrize("shares", [None, (0.1, 0.25, 0.05, 0.6)])
@pytest.mark.slow
def test_a_running_norm_is_that_of_the_layers_so_far(shares):
  """Layers are visited from last to first, then the parameters outside the stacks. At each of them the norm of the gradients so
  far is clipped to the square root of the sum of the shares so far. All shares are a quarter before the first step. The next
  shares are the mean of the old ones and those of this step."""
  set_to = None if shares is None else lambda state: {**state, "gradient_shares": np.asarray(shares, np.float32)}
  free, held, state = gradients_and_steps(*RUNNING, change=set_to)
  outside = lambda tree: {name: x for name, x in tree.items() if name != "stack_0"}
  row = lambda tree, r: jax.tree.map(lambda x: x[r], tree["stack_0"])
  before, squares, so_far, share = shares or (0.25,) * 4, [0.0] * 4, 0.0, 0.0
  for place in (2, 1, 0, 3):
    gradient, step = (jax.tree.leaves(outside(t) if place == 3 else row(t, place)) for t in (free, held))
    squares[place] = sum(np.sum(np.square(g)) for g in gradient)
    so_far, share = so_far + squares[place], share + before[place]
    limit = share**0.5
    assert so_far**0.5 > limit
    for g, s in zip(gradient, step, strict=True):
      np.testing.assert_allclose(s, g * limit / so_far**0.5, atol=4e-7)
  after = [(b + s / sum(squares)) / 2 for b, s in zip(before, squares, strict=True)]
  np.testing.assert_allclose(state["gradient_shares"], after, rtol=1e-4)


@pytest.mark.slow
def test_shares_stay_as_they_are_where_a_step_is_left_out():
  broken = lambda state: {**state, "params": jax.tree.map(lambda x: np.full_like(x, np.nan), state["params"])}
  after, (metrics,) = descend(*PLAIN, *RUNNING, steps=1, change=broken)
  assert metrics["skipped"]
  np.testing.assert_array_equal(after["gradient_shares"], np.full(4, 0.25, np.float32))


USUAL = {
  "sgd": (*PLAIN, *RUNNING),
  "adafactor": (*THREE, LAYERED, *RUNNING, "opt_type=adafactor", "weight_dtype=bfloat16", "stochastic_rounding=true"),
  "momentum of low rank": (*THREE, LAYERED, *RUNNING, "opt_type=adafactor", "adafactor_momentum_rank=4"),
  "8 bits": (*THREE, LAYERED, *EIGHT_BITS, "clip=layer"),
  "float16": (*THREE, LAYERED, "dtype=float16", LION, "learning_rate=1e-3"),
  "balanced experts": ("deepseek3-tiny", *MODELS["deepseek3-tiny"], LAYERED, *RUNNING),
}
"""Settings with which updates of clipped gradients are proved finite, including Adafactor, whose proof needs small gradients.
They also have other state that must stay unchanged if a step does nothing: a loss scale, router biases and gradient shares."""


@functools.cache
def usual_form(name: str) -> Any:
  """Return the compiled fast form of ``USUAL[name]``, which does not check every number."""
  program, *_ = compiled(*USUAL[name])
  with use_mesh(program.model.mesh):
    return program.lower_step().compile()


@pytest.mark.parametrize("name", tiers(USUAL, slow=("sgd", "8 bits", "float16")))
def test_the_usual_form_does_what_the_careful_one_does_or_nothing(name):
  words = USUAL[name]
  program, looking, first, batch = compiled(*words)
  assert not program.step.checked
  checked, exact = descend(*words)
  with use_mesh(program.model.mesh):
    usual, look = usual_form(name), program.lower_check().compile()
    places = jax.tree.map(lambda x: x.sharding, program.abstract_state)
    state, placed, found = jax.device_put(first, places), program.place(batch), []
    known = look(state["params"], state["opt_state"])["magnitude_bound"]
    for _ in range(2):
      state, metrics = usual(state, placed, known)
      known = metrics["magnitude_bound"]
      found.append(jax.device_get(metrics))
    behind, nothing = usual(jax.device_put(checked, places), placed, UNKNOWN)
    measured = [step(jax.device_put(checked, places), placed, NO_UPDATE) for step in (usual, looking)]
  for a, b in zip(found, exact, strict=True):
    assert a["decided"]
    assert jax.tree.map(np.shape, a) == jax.tree.map(np.shape, b)
    assert jax.tree.all(jax.tree.map(np.array_equal, a["finite"], b["finite"]))
    assert (a["magnitude_bound"] >= b["magnitude_bound"] * 0.999).all()
    assert np.isfinite(a["magnitude_bound"]).all()
    for key in ("loss", "grad_norm", "param_norm", "clipped", "skipped"):
      np.testing.assert_allclose(a[key], b[key], rtol=1e-5, err_msg=key)
  pairs = zip(jax.tree.leaves(jax.device_get(state)["params"]), jax.tree.leaves(checked["params"]), strict=True)
  far = [np.ravel(~np.isclose(a.astype(np.float32), b.astype(np.float32), rtol=1e-5, atol=1e-6)) for a, b in pairs]
  assert np.concatenate(far).mean() < 1e-3
  assert not nothing["decided"]
  assert np.isinf(nothing["magnitude_bound"]).all()
  assert_bits(jax.device_get(behind), checked)
  for unchanged, metrics in jax.device_get(measured):
    assert metrics["loss"] == nothing["loss"]
    assert_bits(unchanged, checked)


@pytest.mark.slow
@pytest.mark.parametrize("share", [np.nan, 100.0])
def test_shares_that_a_damaged_checkpoint_has_loosen_no_threshold(share):
  words = USUAL["sgd"]
  program, _, first, batch = compiled(*words)
  damaged = {**first, "gradient_shares": np.full(4, share, np.float32)}
  with use_mesh(program.model.mesh):
    state = jax.device_put(damaged, jax.tree.map(lambda x: x.sharding, program.abstract_state))
    after, metrics = usual_form("sgd")(state, program.place(batch), np.full(2, 10, np.float32))
  assert metrics["decided"]
  assert not metrics["skipped"]
  assert metrics["clipped"]
  moved = jax.tree.map(lambda a, b: np.float64(a) - np.float64(b), jax.device_get(after)["params"], first["params"])
  for row in range(3):
    assert norm_of(jax.tree.map(lambda x, r=row: x[r], moved["stack_0"])) <= 1.001


@pytest.mark.slow
def test_an_update_pass_that_overflows_alone_is_told(monkeypatch):
  """The measuring pass and the updating pass are separate loops, which XLA compiles separately. So gradients may overflow only
  in the updating pass. Then the step is skipped and the metrics name these gradients."""
  part = step_in_backward._Pass._part

  def overflows(self, name, grads, params, state, *rest):
    grads = grads if state is None or name else jax.tree.map(lambda g: g + jnp.inf, grads)
    return part(self, name, grads, params, state, *rest)

  monkeypatch.setattr(step_in_backward._Pass, "_part", overflows)
  program, _, first, batch = compiled(*PLAIN, "gradient_clipping_threshold=0.5")
  with use_mesh(program.model.mesh):
    state = jax.device_put(first, jax.tree.map(lambda x: x.sharding, program.abstract_state))
    _, metrics = program.lower_step().compile()(state, program.place(batch), np.full(2, 10, np.float32))
  assert metrics["skipped"]
  names = [n for n, fine in zip(program.labels, metrics["finite"]["gradients"], strict=True) if not fine]
  assert names
  assert not any(n.startswith("layers.") for n in names)


def test_without_a_threshold_the_careful_form_is_the_usual_one():
  """Without clipping there is no bound on the gradients before the first layer is updated, so every step uses the checked
  form."""
  assert make_program(load_config(THREE[0], [*SMALL, *THREE[1:], LAYERED, UNCLIPPED]).config).step.checked


@pytest.mark.slow
def test_float16_knows_the_norm_of_all_whatever_it_clips_by():
  words = (*THREE, "dtype=float16", LAYERED, "gradient_clipping_threshold=0.5")
  program, _, _, _ = compiled(*words)
  _, (metrics, _) = descend(*words)
  assert metrics["clipped"]
  running = make_program(load_config(THREE[0], [*SMALL, *THREE[1:], *words[2:], "clip=running"]).config)
  texts = []
  for p in (program, running):
    with use_mesh(p.model.mesh):
      texts.append(p.lower_step(checked=True).as_text())
  assert texts[0] == texts[1]


@pytest.mark.slow
def test_adafactor_factors_and_clips_each_layer_by_itself():
  words = (*THREE, "opt_type=adafactor", UNCLIPPED, LAYERED, "emb_dim=128", "mlp_dim=136")
  program, _, before, batch = compiled(*words)
  after, _ = descend(*words, steps=1)
  with use_mesh(program.model.mesh):
    grads, _ = jax.jit(lambda p, b: program.step.gradients(*program.selection.split(p), b, None))(
      before["params"], program.place(batch)
    )
  rate = float(program.step.schedule(jnp.zeros((), jnp.int32)))
  spec = program.spec["stack_0"]["layer_0"]["mlp"]["down"]
  assert decays(spec)
  for row in range(3):
    p, g = (t["stack_0"]["layer_0"]["mlp"]["down"][row] for t in (before["params"], grads))
    rule: Any = optax.chain(optax.scale_by_factored_rms(), optax.clip_by_block_rms(1.0), optax.add_decayed_weights(0.1))
    direction, state = rule.update(jnp.asarray(g), rule.init(jnp.asarray(p)), jnp.asarray(p))
    np.testing.assert_allclose(after["params"]["stack_0"]["layer_0"]["mlp"]["down"][row], p - rate * direction, atol=2e-6)
    kept = after["opt_state"][0][0].v_row["stack_0"]["layer_0"]["mlp"]["down"]
    np.testing.assert_allclose(kept[row], state[0].v_row, rtol=1e-4)


@pytest.mark.slow
def test_stochastic_rounding_draws_the_bits_of_the_ordinary_step():
  words = (*THREE, UNCLIPPED, "opt_type=sgd", "sgd_momentum=0", "weight_dtype=bfloat16", "stochastic_rounding=true")
  (whole, _), (layered, _) = descend(*words), descend(*words, LAYERED)
  assert_bits(layered, whole)


@pytest.mark.slow
def test_only_the_layers_that_a_mask_names_move():
  words = (*THREE, UNCLIPPED, "trainable_parameters_mask=['layers.[02].mlp']", LAYERED)
  _, _, before, _ = compiled(*words)
  after, _ = descend(*words)
  moved = jax.tree.map(lambda a, b: np.any(a != b, axis=tuple(range(1, a.ndim))), after["params"], before["params"])
  for path, rows in jax.tree_util.tree_leaves_with_path(moved):
    assert rows.tolist() == [True, False, True] if "['mlp']" in jax.tree_util.keystr(path) else not np.any(rows), path


@pytest.mark.parametrize(("mask", "moves"), [("final_norm", "final_norm"), ("layers", "stack_0")])
@pytest.mark.slow
def test_a_part_may_be_frozen_whole(mask, moves):
  """If all layers, or all parameters outside the stacks, are frozen, this part has no array to update. The other part still
  trains."""
  words = (*THREE, "clip=running", f"trainable_parameters_mask=[{mask}]", LAYERED)
  words = (*words, *EIGHT_BITS)
  _, _, before, _ = compiled(*words)
  after, metrics = descend(*words)
  moved = jax.tree.map(lambda a, b: bool(np.any(a != b)), after["params"], before["params"])
  assert [name for name, tree in moved.items() if any(jax.tree.leaves(tree))] == [moves]
  assert not any(m["skipped"] for m in metrics)


@pytest.mark.slow
@pytest.mark.parametrize(
  ("clip", "mask", "row", "part"),
  [("running", "layers.2", 2, ""), ("layer", "layers.0.mlp", 0, "['mlp']")],
)
def test_what_is_frozen_has_no_share_of_the_threshold(clip, mask, row, part):
  """If only one layer is trained, it may use the complete threshold: it is clipped by its own norm, whichever layer it is."""
  words = (f"clip={clip}", "gradient_clipping_threshold=0.5", f"trainable_parameters_mask=['{mask}']")
  free, held, _ = gradients_and_steps(*words)

  def trained(path, gradient):
    path, own = jax.tree_util.keystr(path), np.zeros_like(gradient)
    if "['stack_0']" in path and part in path:
      own[row] = gradient[row]
    return own

  gradients = jax.tree_util.tree_map_with_path(trained, free)
  norm = norm_of(gradients)
  assert norm > 0.5
  jax.tree.map(lambda s, g: np.testing.assert_allclose(s, g * 0.5 / norm, atol=3e-7), held, gradients)


@pytest.mark.slow
def test_float16_takes_all_of_an_update_or_nothing():
  words = (*THREE, "dtype=float16", UNCLIPPED, LAYERED)
  program, _, before, _ = compiled(*words)
  assert [program.step.untouched(failed) for failed in ("loss", "gradients", "optimizer")] == [True, True, False]
  too_large = lambda state: {**state, "loss_scale": {**state["loss_scale"], "scale": np.float32(2.0**40)}}
  after, (metrics,) = descend(*words, steps=1, change=too_large)
  assert metrics["skipped"]
  assert not np.all(metrics["finite"]["gradients"])
  assert_bits(after["params"], before["params"])
  assert_bits(after["opt_state"], before["opt_state"])
  assert after["loss_scale"]["scale"] < 2.0**40
  after, metrics = descend(*words)
  assert metrics[1]["loss"] < metrics[0]["loss"]
