"""The train step on a toy decoder: the update, accumulation, clipping, and non-finite numbers, which never change the state."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from maxtext_like.models.row_norms import clip, row_labels, row_squares, split_squares, state_labels
from maxtext_like.training.objectives.language_modeling import LanguageModeling
from maxtext_like.training.optimizers.optimizer import Optimizer
from maxtext_like.training.step.train_step import NO_UPDATE, UNKNOWN
from tests.tiers import slow
from tests.training.toy import toy_batch, toy_config, toy_decoder, toy_look, toy_step, with_precision

CHECK, NO_CHECK = jnp.asarray(UNKNOWN), jnp.asarray([100.0, 100.0])  # no bounds; bounds that prove updates finite
SGD = ("opt_type=sgd", "sgd_momentum=0", "learning_rate=0.5")


def same(a, b) -> bool:
  return all(np.array_equal(x, y, equal_nan=True) for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True))


def reference(params, batch):
  """Return the mean loss over the real targets and its gradients."""

  def mean(p):
    return LanguageModeling(toy_decoder())(p, batch)[0] / np.sum(batch["targets"] != -100)

  return jax.value_and_grad(mean)(params)


@pytest.fixture(scope="module")
def plain():
  return toy_step(toy_config(*SGD))


def test_a_step_of_gradient_descent(plain):
  step, state = plain
  batch = toy_batch()
  new, metrics = step(state, batch, CHECK)
  loss, grads = reference(state["params"], batch)
  np.testing.assert_allclose(metrics["loss"], loss, rtol=1e-6)
  assert int(metrics["tokens"]) == 4 * 7 - 5
  assert int(new["step"]) == 1
  grads["stack_0"]["layer_0"]["bias"] *= 0  # not trainable
  expected = jax.tree.map(lambda p, g: p - 0.5 * g, state["params"], grads)
  jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-7), new["params"], expected)
  norm = np.sqrt(sum(np.sum(np.square(g)) for g in jax.tree.leaves(grads)))
  np.testing.assert_allclose(metrics["grad_norm"], norm, rtol=1e-5)
  all_norm = np.sqrt(sum(np.sum(np.square(p)) for p in jax.tree.leaves(new["params"])))
  np.testing.assert_allclose(metrics["param_norm"], all_norm, rtol=1e-5)
  assert same(new["params"]["stack_0"]["layer_0"]["bias"], state["params"]["stack_0"]["layer_0"]["bias"])


def test_the_check_changes_no_number(plain):
  step, state = plain
  (seen, a), (proved, b) = step(state, toy_batch(), CHECK), step(state, toy_batch(), NO_CHECK)
  known = a.pop("magnitude_bound"), b.pop("magnitude_bound")
  assert same((seen, a), (proved, b))
  assert np.all(known[0] <= known[1])  # measured, and derived from the bounds before the step


def test_no_real_target_is_loss_0_and_not_0_over_0(plain):
  step, state = plain
  batch = toy_batch(ignored=4 * 7)
  new, metrics = step(state, batch, CHECK)
  assert float(metrics["loss"]) == 0.0
  assert not bool(metrics["skipped"])
  assert same(new["params"], state["params"])


def test_accumulation_equals_the_large_batch(plain):
  whole, state = plain
  parts, _ = toy_step(toy_config(*SGD, "gradient_accumulation_steps=4", "per_device_batch_size=1"))
  batch = toy_batch(ignored=9)  # the microbatches have unequal numbers of targets, one nearly none
  (a, metrics_a), (b, metrics_b) = whole(state, batch, CHECK), parts(state, batch, CHECK)
  jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-7), a["params"], b["params"])
  np.testing.assert_allclose(metrics_a["loss"], metrics_b["loss"], rtol=1e-6)
  np.testing.assert_allclose(metrics_a["grad_norm"], metrics_b["grad_norm"], rtol=1e-5)


@pytest.mark.parametrize(
  "words",
  [
    ["dtype=float16"],
    slow([]),
    slow(["gradient_accumulation_steps=4", "per_device_batch_size=1"]),
  ],
)
def test_the_loss_is_told_the_cotangent_that_arrives(words):
  """A loss in chunks computes its gradients in the forward pass. It therefore needs the cotangent in advance, in
  float16 with the loss scale. In this test any other cotangent makes every gradient NaN."""

  @jax.custom_vjp
  def spoil_unless_equal(loss, expected):
    return loss

  def backward(expected, arrived):
    return jnp.where(arrived == expected, arrived, jnp.nan), None

  spoil_unless_equal.defvjp(lambda loss, expected: (loss, expected), backward)

  config = toy_config(*SGD, *words)
  step, state = toy_step(config, chunks=3, decoder=toy_decoder(config.precision.dtype))

  def apply(p, batch, cotangent, probes):
    loss, weight, aux = step.apply(p, batch, cotangent, probes)
    return spoil_unless_equal(loss, cotangent), weight, aux

  new, metrics = jax.jit(dataclasses.replace(step, apply=apply))(state, toy_batch(), CHECK)
  assert not bool(metrics["skipped"])
  whole, _ = toy_step(config)
  expected, told = whole(state, toy_batch(), CHECK)
  np.testing.assert_allclose(metrics["loss"], told["loss"], rtol=1e-6)
  jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-4), new["params"], expected["params"])


def test_clipping_scales_the_gradient_and_is_counted(plain):
  step, state = plain
  batch = toy_batch()
  _, metrics = step(state, batch, CHECK)
  norm = float(metrics["grad_norm"])
  clipping, _ = toy_step(toy_config(*SGD, f"gradient_clipping_threshold={norm / 4}"))
  free, _ = step(state, batch, CHECK)
  clipped, told = clipping(state, batch, CHECK)
  assert bool(told["clipped"])
  assert not bool(metrics["clipped"])
  np.testing.assert_allclose(told["grad_norm"], norm, rtol=1e-6)
  moved = lambda new: jax.tree.map(lambda a, b: np.asarray(a - b), new["params"], state["params"])
  jax.tree.map(lambda a, b: np.testing.assert_allclose(4 * a, b, rtol=1e-3, atol=1e-6), moved(clipped), moved(free))


@pytest.mark.parametrize("poison", [np.nan, np.inf])
@pytest.mark.parametrize("check", [CHECK, NO_CHECK])
def test_a_non_finite_batch_changes_no_bit_of_parameters_and_optimizer(poison, check):
  step, state = toy_step(toy_config("opt_type=adamw", "adam_weight_decay=0.1"))
  state, _ = step(state, toy_batch(1), check)
  batch = toy_batch()
  bad = jax.tree.map(lambda x: x, state)
  table = np.array(state["params"]["embedding"]["table"])
  table[batch["tokens"][0, 0]] = poison
  bad["params"]["embedding"]["table"] = jnp.asarray(table)
  new, metrics = step(bad, batch, check)
  assert bool(metrics["skipped"])
  assert not bool(metrics["finite"]["loss"])
  assert same(new["params"], bad["params"])
  assert same(new["opt_state"], bad["opt_state"])
  assert int(new["step"]) == 2


def test_flags_name_the_arrays_that_are_not_finite():
  params = toy_step(toy_config(*SGD))[1]["params"]
  labels = row_labels(toy_decoder(), params)
  assert labels[:2] == ["embedding.table", "head.kernel"]
  kernel = np.array(params["stack_0"]["layer_0"]["kernel"])
  kernel[1] = np.nan
  params["stack_0"]["layer_0"]["kernel"] = jnp.asarray(kernel)
  assert [label for label, good in zip(labels, row_squares(params).finite, strict=True) if not good] == ["layers.1.kernel"]


@pytest.mark.parametrize("known", [CHECK, NO_CHECK])
def test_a_non_finite_update_from_finite_gradients_is_caught_in_every_step(known):
  step, state = toy_step(toy_config("opt_type=sgd", "sgd_momentum=0", "learning_rate=1e38"))
  state["params"]["embedding"]["table"] *= 1e4
  new, metrics = step(state, toy_batch(), known)
  assert bool(metrics["finite"]["gradients"].all())
  assert not bool(metrics["finite"]["parameters"].all())
  assert bool(metrics["finite"]["state_parameters"].all())
  assert bool(metrics["skipped"])
  assert same(new["params"], state["params"])


@pytest.mark.parametrize(("moment", "poison"), [("mu", np.nan), ("nu", np.inf), ("nu", -1e30)])
def test_an_optimizer_that_holds_what_is_not_finite_is_named_and_nothing_is_applied(moment, poison):
  step, state = toy_step(toy_config("opt_type=adamw"))
  adam = state["opt_state"][0]
  moments = getattr(adam, moment)
  moments["stack_0"]["layer_0"]["kernel"] = moments["stack_0"]["layer_0"]["kernel"].at[2, 1, 3].set(poison)
  new, metrics = step(state, toy_batch(), CHECK)
  assert bool(metrics["skipped"])
  assert same(new["params"], state["params"])
  assert same(new["opt_state"], state["opt_state"])
  labels = state_labels(toy_decoder(), state["opt_state"], step_params(state))
  bad = [x for x, good in zip(labels, metrics["finite"]["state_optimizer"], strict=True) if not good]
  assert bad == ([f"{moment}.layers.2.kernel"] if not np.isfinite(poison) else [])
  assert np.isfinite(metrics["magnitude_bound"][1]) == np.isfinite(poison)
  # The square root of a negative second moment makes the parameters NaN. With the bounds of another state, the step
  # takes this update as proved and applies it.
  assert bool(metrics["finite"]["parameters"].all()) == (poison == np.inf)
  if poison != np.inf:
    _, metrics = step(state, toy_batch(), NO_CHECK)
    assert not bool(metrics["finite"]["state_parameters"].all())


def step_params(state):
  """Return the trained parameters of the toy: all except the biases."""
  layer = {**state["params"]["stack_0"]["layer_0"], "bias": None}
  return state["params"] | {"stack_0": {"layer_0": layer}}


HUGE = 2.0**70


@pytest.mark.parametrize("threshold", [0, 0.01])
def test_numbers_whose_squares_leave_float32_are_finite(threshold):
  """With the loss times 2^70 the gradients are about 1e21, and their squares overflow float32. They still count as finite, and
  clipping gives the parameters of the unscaled loss."""
  config = toy_config("opt_type=sgd", "sgd_momentum=0", "learning_rate=1e-3", f"gradient_clipping_threshold={threshold}")
  step, state = toy_step(config, decoder=toy_decoder())

  def apply(*words):
    loss, weight, aux = step.apply(*words)
    return loss * HUGE, weight, aux

  new, metrics = jax.jit(dataclasses.replace(step, apply=apply))(state, toy_batch(), NO_CHECK)
  small, told = jax.jit(step)(state, toy_batch(), NO_CHECK)
  assert not bool(metrics["skipped"])
  assert bool(metrics["finite"]["gradients"].all())
  np.testing.assert_allclose(metrics["grad_norm"], float(told["grad_norm"]) * HUGE, rtol=1e-6)
  if threshold:
    assert bool(metrics["clipped"])
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-9), new["params"], small["params"])
  else:
    sizes = row_squares(new["params"])
    assert float(sizes.norm().value) == float(metrics["param_norm"]) > 1e17


def test_a_norm_beyond_float32_is_infinite_and_clips_right_all_the_same():
  tree = {"a": jnp.full((4, 4), 3e38), "b": jnp.full((2,), -1e30)}
  squares = row_squares(tree)
  assert bool(squares.finite.all())
  np.testing.assert_allclose(np.sqrt(squares.on_host()), [12e38, 2**0.5 * 1e30], rtol=1e-6)
  assert np.isinf(squares.norm().value)
  assert bool(squares.norm().above(1.0))
  clipped = jax.jit(lambda t: clip(t, row_squares(t).norm(), 1.0))(tree)
  np.testing.assert_allclose(clipped["a"], np.full((4, 4), 0.25), rtol=1e-6)
  np.testing.assert_allclose(clipped["b"], np.full(2, -1e30 / 12e38), rtol=1e-6)
  assert np.isnan(row_squares({"a": jnp.asarray([1.0, np.nan, np.inf])}).small[0])
  assert not row_squares({"a": jnp.asarray([1.0, -np.inf])}).finite[0]


@pytest.mark.parametrize("largest", [1e-3, 1e9, 1e20])
def test_what_is_clipped_is_finite_by_any_threshold(largest):
  """The norm is beyond float32, so it is stored in units of 2^96. The clipped numbers are still finite and accurate."""
  tree = {"a": jnp.asarray([1e38, -3.0, 1e22]), "b": jnp.asarray([2e37])}
  clipped = jax.jit(lambda t: clip(t, split_squares(t).norm(), largest))(tree)
  norm = (1e38**2 + 2e37**2 + 1e22**2) ** 0.5
  np.testing.assert_allclose(clipped["a"], np.asarray([1e38, -3.0, 1e22]) * (largest / norm), rtol=1e-6, atol=1e-37)
  np.testing.assert_allclose(clipped["b"], np.asarray([2e37]) * (largest / norm), rtol=1e-6)


def test_ordinary_steps_are_proved_finite_and_evaluated_once():
  step, state = toy_step(toy_config("opt_type=adamw", "learning_rate=1e-2"), decoder=toy_decoder())
  seen = []

  class Watched(Optimizer):
    def certainly_finite(self, *sizes):
      certain, kept = super().certainly_finite(*sizes)
      seen.append(certain)
      return certain, kept

  own = step.optimizer
  optimizer = Watched(own.rule, own.weight_decay, own.mu_dtype, own.nu_dtype, own.weight_dtype, own.spec)
  watched = dataclasses.replace(step, optimizer=optimizer)

  @jax.jit
  def run(state, batch, known):
    state, metrics = watched(state, batch, known)
    return state, metrics["magnitude_bound"], metrics["skipped"], seen.pop()

  known, proved = CHECK, []
  for i in range(4):
    state, known, skipped, proof = run(state, toy_batch(i), known)
    assert not bool(skipped)
    proved.append(bool(proof))
    leaves = [np.abs(x).max() for x in jax.tree.leaves(state["opt_state"]) if x.dtype == jnp.float32]
    assert float(known[1]) >= max(leaves)
    assert bool(proof) or float(known[1]) == max(leaves)
    assert float(known[0]) >= max(np.abs(x).max() for x in jax.tree.leaves(state["params"]))
  assert proved == [False, True, True, True]


@pytest.fixture(scope="module")
def forms():
  """(fast form, checked form, initial state)."""
  config = toy_config("opt_type=adamw", "learning_rate=1e-2", "gradient_clipping_threshold=1")
  step, state = toy_step(config, decoder=toy_decoder())
  return jax.jit(dataclasses.replace(step, checked=False)), jax.jit(step), state


def test_the_usual_form_does_what_the_careful_one_does(forms):
  usual, checked, state = forms
  one, other, known = state, state, toy_look(state["params"], state["opt_state"])["magnitude_bound"]
  for i in range(3):
    one, a = usual(one, toy_batch(i), known)
    other, b = checked(other, toy_batch(i), CHECK)
    known, exact = a.pop("magnitude_bound"), b.pop("magnitude_bound")
    assert bool(a["decided"])
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-6), (one, a), (other, b))
    assert np.all(np.asarray(known) >= np.asarray(exact))


def test_the_loss_is_measured_without_an_update(forms):
  *steps, state = forms
  expected, _ = reference(state["params"], toy_batch())
  for step in steps:
    new, metrics = step(state, toy_batch(), jnp.asarray(NO_UPDATE))
    np.testing.assert_allclose(metrics["loss"], expected, rtol=1e-6)
    assert same(new, state)
    assert metrics["skipped"]


@pytest.mark.parametrize("what", ["nothing known", "a huge parameter", "a gradient that is not finite"])
def test_the_usual_form_does_nothing_where_it_has_no_proof(forms, what):
  usual, checked, state = forms
  known = toy_look(state["params"], state["opt_state"])["magnitude_bound"]
  given, batch = jax.tree.map(lambda x: x, state), toy_batch()
  if what == "nothing known":
    known = CHECK
  elif what == "a huge parameter":
    known = known.at[0].set(2e38)
  else:
    given["params"]["embedding"]["table"] = given["params"]["embedding"]["table"].at[batch["tokens"][0, 0]].set(np.nan)
  new, metrics = usual(given, batch, known)
  assert not bool(metrics["decided"])
  assert same(new, given)
  assert np.isinf(metrics["magnitude_bound"]).all()
  after, metrics = usual(new, toy_batch(1), metrics["magnitude_bound"])  # a step that was launched after it
  assert same(after, given)
  assert not bool(metrics["decided"])
  after, metrics = checked(new, batch, CHECK)
  assert bool(metrics["skipped"]) == ("gradient" in what)
  assert int(after["step"]) == 1


def test_a_gradient_whose_square_leaves_float32_is_not_called_infinite_but_clipped(forms):
  _, _, state = forms
  step, _ = toy_step(toy_config("opt_type=adamw", "gradient_clipping_threshold=1"), decoder=toy_decoder())

  def steep(*words):
    loss, weight, aux = step.apply(*words)
    return loss * 1e24, weight, aux

  steeper = dataclasses.replace(step, apply=steep)
  known = toy_look(state["params"], state["opt_state"])["magnitude_bound"]
  new, metrics = jax.jit(dataclasses.replace(steeper, checked=False))(state, toy_batch(), known)
  assert not bool(metrics["decided"])
  assert same(new, state)
  new, metrics = jax.jit(steeper)(new, toy_batch(), CHECK)
  assert bool(metrics["clipped"])
  assert not bool(metrics["skipped"])
  assert float(metrics["grad_norm"]) > 1e20


@pytest.mark.parametrize("wrong", [np.nan, np.inf])
def test_a_gradient_that_is_not_finite_takes_no_careful_form_of_adafactor(wrong):
  """The checked form of Adafactor holds the updates of all arrays in memory, and a run may not have room for it. So the fast
  form itself rejects a non-finite gradient: it skips the update and decides the step."""
  step, state = toy_step(toy_config("opt_type=adafactor", "gradient_clipping_threshold=1"), decoder=toy_decoder())
  assert step.optimizer.usually_proved(1.0)

  def broken(*words):
    loss, weight, aux = step.apply(*words)
    return loss * wrong, weight, aux

  known = toy_look(state["params"], state["opt_state"])["magnitude_bound"]
  new, metrics = jax.jit(dataclasses.replace(step, checked=False, apply=broken))(state, toy_batch(), known)
  assert bool(metrics["decided"])
  assert bool(metrics["skipped"])
  assert int(new["step"]) == 1
  assert same(new["params"], state["params"])
  assert same(new["opt_state"], state["opt_state"])
  assert np.isfinite(metrics["magnitude_bound"]).all()
  _, metrics = jax.jit(dataclasses.replace(step, checked=False))(new, toy_batch(), metrics["magnitude_bound"])
  assert bool(metrics["decided"])
  assert not bool(metrics["skipped"])


def test_an_overflow_of_float16_is_usual():
  step, state = toy_step(with_precision(toy_config(*SGD), dtype="float16"), decoder=toy_decoder("float16"))
  usual = jax.jit(dataclasses.replace(step, checked=False))
  state["loss_scale"]["scale"] = jnp.float32(2.0**24)
  state["params"]["head"]["kernel"] *= 30.0
  known = toy_look(state["params"], state["opt_state"])["magnitude_bound"]
  new, metrics = usual(state, toy_batch(), known)
  assert bool(metrics["skipped"])
  assert bool(metrics["decided"])
  assert (float(new["loss_scale"]["scale"]), int(new["step"])) == (2.0**23, 1)
  same_again, metrics = usual(state, toy_batch(), CHECK)  # but not after a step that must be repeated
  assert not bool(metrics["decided"])
  assert same(same_again, state)


def test_float16_overflow_halves_the_scale_and_skips():
  config = with_precision(toy_config(*SGD), dtype="float16")
  step, state = toy_step(config)
  assert float(state["loss_scale"]["scale"]) == 2.0**15
  state["loss_scale"]["scale"] = jnp.float32(2.0**24)
  state["params"]["head"]["kernel"] *= 30.0
  new, metrics = step(state, toy_batch(), CHECK)
  assert bool(metrics["finite"]["loss"])
  assert bool(metrics["skipped"])
  assert same(new["params"], state["params"])
  assert float(new["loss_scale"]["scale"]) == 2.0**23
  assert float(metrics["loss_scale"]) == 2.0**24
  for _ in range(24):
    new, metrics = step(new, toy_batch(), CHECK)
    if not metrics["skipped"]:
      break
  assert not bool(metrics["skipped"])
  assert int(new["loss_scale"]["good_steps"]) == 1


def test_float16_gradients_do_not_depend_on_the_scale():
  config = with_precision(toy_config(*SGD), dtype="float16")
  step, state = toy_step(config)
  results = []
  for scale in (2.0**8, 2.0**12):
    results.append(step({**state, "loss_scale": {**state["loss_scale"], "scale": jnp.float32(scale)}}, toy_batch(), CHECK))
  (a, _), (b, _) = results
  jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=2e-3, atol=2e-5), a["params"], b["params"])


def test_masked_rows_of_a_stack_stay_as_they_are():
  step, state = toy_step(toy_config("opt_type=adamw", "adam_weight_decay=0.5", r"trainable_parameters_mask=['layers\.1\.']"))
  new, metrics = step(state, toy_batch(), CHECK)
  layer, before = new["params"]["stack_0"]["layer_0"], state["params"]["stack_0"]["layer_0"]
  for name in ("kernel", "scale"):
    assert same(layer[name][::2], before[name][::2])
    assert not same(layer[name][1], before[name][1])
  assert same(new["params"]["head"], state["params"]["head"])
  assert len(jax.tree.leaves(new["opt_state"])) < len(jax.tree.leaves(new["params"])) * 2
  _, grads = reference(state["params"], toy_batch())
  own = [grads["stack_0"]["layer_0"][name][1] for name in ("kernel", "scale")]
  np.testing.assert_allclose(metrics["grad_norm"], np.sqrt(sum(np.sum(np.square(g)) for g in own)), rtol=1e-5)


def test_gradients_pass_through_grad_dtype():
  config = with_precision(toy_config(*SGD), grad_dtype="bfloat16")
  step, state = toy_step(config)
  new, _ = step(state, toy_batch(), CHECK)
  _, grads = reference(state["params"], toy_batch())
  rounded = grads["head"]["kernel"].astype(jnp.bfloat16).astype(jnp.float32)
  np.testing.assert_allclose(new["params"]["head"]["kernel"], state["params"]["head"]["kernel"] - 0.5 * rounded, rtol=1e-6)


def test_z_loss_is_a_metric_of_its_own():
  step, state = toy_step(toy_config(*SGD, "z_loss_multiplier=0.1"))
  _, metrics = step(state, toy_batch(), CHECK)
  assert float(metrics["z_loss"]) > 0
  np.testing.assert_allclose(metrics["loss"], metrics["cross_entropy"] + metrics["z_loss"], rtol=1e-6)
