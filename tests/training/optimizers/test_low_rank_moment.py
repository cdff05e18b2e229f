"""A low-rank first moment against moving averages computed in NumPy."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from maxtext_like.layers.param import Param, constant, fan_in, stack
from maxtext_like.training.optimizers import low_rank_moment as low_rank_moment_module
from maxtext_like.training.optimizers.low_rank_moment import Factors, low_rank_moment
from maxtext_like.training.optimizers.optimizer import make_optimizer
from tests.tiers import nightly
from tests.training.toy import toy_config

B1, RANK = 0.8, 3
SPEC: Any = {
  "up": Param((24, 17), ("embed", "mlp")),
  "o": Param((4, 6, 19), ("heads", "head_dim", "embed"), "float32", fan_in(0, 1)),
  "experts": Param((2, 21, 16), ("expert", "embed", "mlp"), "float32", fan_in(1)),
  "table": Param((40, 12), ("vocab", "embed"), contracts=(1,)),
  "stacked": stack({"w": Param((18, 22), ("embed", "mlp"))}, 2)["w"],
  "narrow": Param((24, 3), ("embed", "mlp")),
  "norm": Param((24,), (None,), init=constant(1.0)),
  "frozen": None,
}
MATRICES = {"up": (24, 17), "o": (24, 19), "experts": (2, 21, 16), "table": (12, 40), "stacked": (2, 18, 22)}
"""Shapes as batches of matrices, of the leaves that have factors."""


def as_matrices(name: str, x: np.ndarray) -> np.ndarray:
  return np.asarray(x, np.float64).T if name == "table" else np.asarray(x, np.float64).reshape(MATRICES[name])


def as_arrays(name: str, x: np.ndarray) -> np.ndarray:
  return x.T if name == "table" else x.reshape(SPEC[name].shape)


def draw(rng: np.random.Generator, *, rank: int | None = None) -> Any:
  """Return random directions with an RMS of 1. With ``rank`` they have this rank, and all calls share the same row and column
  spaces."""
  out = {}
  for name, p in SPEC.items():
    if p is None:
      out[name] = None
      continue
    x = rng.normal(size=p.shape)
    if rank and name in MATRICES:
      shape, fixed = MATRICES[name], np.random.default_rng(5)
      left, right = fixed.normal(size=(*shape[:-1], rank)), fixed.normal(size=(*shape[:-2], rank, shape[-1]))
      x = as_arrays(name, left @ rng.normal(size=(rank, rank)) @ right)
    out[name] = np.asarray(x / np.sqrt(np.mean(x**2)), np.float32)
  return out


def advance(directions: list[Any], rank: int = RANK, spec: Any = SPEC) -> tuple[list[Any], Any]:
  """Return the updates made from each direction, and the last state."""
  moment: Any = low_rank_moment(B1, rank, spec)
  state, found = moment.init(directions[0]), []
  update = jax.jit(moment.update)
  for direction in directions:
    made, state = update(direction, state)
    found.append(made)
  return found, state


@pytest.mark.slow
def test_directions_within_the_rank_have_the_whole_moment():
  """If the subspace contains all directions, the result is the complete moving average with bias correction."""
  rng = np.random.default_rng(0)
  directions = [draw(rng, rank=2) for _ in range(5)]
  found, _ = advance(directions)
  for name, p in SPEC.items():
    if p is None:
      assert all(f[name] is None for f in found)
      continue
    mean = 0.0
    for t, (direction, made) in enumerate(zip(directions, found, strict=True), 1):
      mean = B1 * mean + (1 - B1) * np.float64(direction[name])
      if t == 1:
        continue  # in the first step the subspace may not be found yet
      expected = mean / (1 - B1**t)
      away = np.linalg.norm(made[name] - expected) / np.linalg.norm(direction[name])
      assert away < 0.08, (name, t, away)


def test_the_moment_is_that_of_the_kept_subspace_and_the_rest_goes_on_as_it_is():
  """The factors and updates follow from the stored bases by the formulas of the module, whatever the subspace is."""
  rng = np.random.default_rng(1)
  directions = [draw(rng) for _ in range(4)]
  moment: Any = low_rank_moment(B1, RANK, SPEC)
  state = moment.init(directions[0])
  for t, direction in enumerate(directions, 1):
    before = state.moment
    made, state = jax.jit(moment.update)(direction, state)
    for name, shape in MATRICES.items():
      root = 1e6
      P, Q, P_new, Q_new = (
        np.float64(x).reshape(*shape[:-2], size, RANK)
        for factors in (before[name], state.moment[name])
        for x, size in zip(factors, shape[-2:], strict=True)
      )
      U, T = as_matrices(name, direction[name]) / root, (*range(len(shape) - 2), -1, -2)
      mean = B1 * P @ Q.transpose(T) + (1 - B1) * U
      np.testing.assert_allclose(Q_new, mean.transpose(T) @ P_new, atol=3e-3 * np.abs(Q_new).max())
      new = U.transpose(T) @ P_new
      expected = root * (U - P_new @ new.transpose(T) + P_new @ Q_new.transpose(T) / (1 - B1**t))
      np.testing.assert_allclose(as_matrices(name, made[name]), expected, atol=0.03)
      gram = P_new.transpose(T) @ P_new
      assert np.linalg.eigvalsh(gram).max() < 1 + 1e-5


def test_the_subspace_is_where_directions_are_large():
  """A rank-3 mean with added noise: subspace iteration finds its subspace and keeps nearly all of the mean."""
  rng, fixed = np.random.default_rng(2), draw(np.random.default_rng(3), rank=3)
  noisy = [jax.tree.map(lambda f, n: (f + 0.3 * n) / 1.05, fixed, draw(rng)) for _ in range(12)]
  _, state = advance(noisy)
  for name, shape in MATRICES.items():
    signal = as_matrices(name, fixed[name])
    P = np.float64(state.moment[name].rows).reshape(*shape[:-1], RANK)
    inside = P @ (P.swapaxes(-1, -2) @ signal)
    assert np.linalg.norm(inside) > 0.97 * np.linalg.norm(signal), name


def test_layers_and_experts_are_matrices_of_their_own():
  rng = np.random.default_rng(4)
  directions = [jax.tree.map(lambda x: x / 2, draw(rng)) for _ in range(3)]  # halved, so that nothing is clipped
  found, state = advance(directions)
  alone, _ = advance([{"up": d["stacked"][1]} for d in directions], spec={"up": Param((18, 22), ("embed", "mlp"))})
  np.testing.assert_allclose(found[-1]["stacked"][1], alone[-1]["up"], atol=1e-4)
  alone, _ = advance([{"up": d["experts"][1]} for d in directions], spec={"up": Param((21, 16), ("embed", "mlp"))})
  np.testing.assert_allclose(found[-1]["experts"][1], alone[-1]["up"], atol=1e-4)
  assert state.moment["experts"].rows.shape == (2, 21, RANK)
  assert state.moment["o"].rows.shape == (4, 6, RANK)
  assert state.moment["o"].columns.shape == (19, RANK)


def test_directions_are_clipped_as_optax_clips_them():
  rng = np.random.default_rng(7)
  directions = [jax.tree.map(lambda x, size=size: np.float32(size) * x, draw(rng)) for size in (0.3, 40.0, 1e12)]
  (found, state), before = advance(directions), optax.clip_by_block_rms(1.0)
  clipped = [before.update(direction, before.init(direction))[0] for direction in directions]
  expected, expected_state = advance(clipped)
  for made, x in zip(jax.tree.leaves((found, state)), jax.tree.leaves((expected, expected_state)), strict=True):
    np.testing.assert_allclose(made, x, atol=0.02 * np.abs(x).max())


def test_what_multiplies_nothing_and_what_is_narrow_keeps_its_moment_whole():
  _, state = advance([draw(np.random.default_rng(0))])
  assert {name for name, x in state.moment.items() if isinstance(x, Factors)} == set(MATRICES)
  assert state.moment["norm"].shape == (24,)
  assert state.moment["narrow"].shape == (24, 3)


def test_zeros_at_first_are_no_end_of_it():
  """An expert without tokens has zero gradients. Its subspace is found at the first nonzero gradient, and later zeros lose
  nothing."""
  rng = np.random.default_rng(6)
  zeros = jax.tree.map(np.zeros_like, draw(rng))
  same = draw(rng, rank=2)
  found, state = advance([zeros, zeros, same, same, zeros])
  assert all(np.isfinite(x).all() for x in jax.tree.leaves((found, state)))
  for name in MATRICES:
    assert not np.any(found[1][name])
    expected = B1 * (1 + B1) * (1 - B1) / (1 - B1**5) * same[name]
    away = np.linalg.norm(found[4][name] - expected) / np.linalg.norm(expected)
    assert away < 0.03, name


@settings(max_examples=25, deadline=None)
@given(st.lists(st.tuples(st.floats(-30, 37), st.integers(1, 9), st.booleans()), min_size=2, max_size=5), st.integers(0, 9))
def test_no_number_is_large_whatever_comes(steps, seed):
  """For directions of any magnitude and rank, and for constant ones, the stored numbers are at most 1, and the updates stay
  within the bound of Adafactor's proof, computed for the size of the matrix."""
  rng = np.random.default_rng(seed)
  spec = {"up": SPEC["up"], "experts": SPEC["experts"]}
  directions = []
  for power, rank, alike in steps:
    u = draw(rng, rank=rank) if not alike else jax.tree.map(np.ones_like, draw(rng))
    directions.append({name: np.float32(10.0**power) * u[name] for name in spec})
  moment: Any = low_rank_moment(B1, RANK, spec)
  state = moment.init(directions[0])
  for direction in directions:
    made, state = _update(moment.update, direction, state)
    assert all(np.abs(x).max() <= 1 for x in jax.tree.leaves(state.moment))
    for name, p in spec.items():
      root = np.sqrt(p.shape[-1] * p.shape[-2])
      assert np.abs(made[name]).max() <= 1.01 * root * (2 + 1 / (1 - B1))


@pytest.mark.parametrize("rank", [8, 128, 384, nightly(640)])
@pytest.mark.slow
def test_columns_that_are_all_alike_have_a_basis_too(rank):
  """For directions of rank 1 all sketched columns are multiples of one column. Their Gram matrix has rank 1, so its Cholesky
  factor exists only because of the added ridge."""
  spec = {"w": Param((2 * rank + 8, 2 * rank + 5), ("embed", "mlp"))}
  rng = np.random.default_rng(0)
  alike = np.outer(rng.normal(size=2 * rank + 8), rng.normal(size=2 * rank + 5)).astype(np.float32)
  for u in (np.ones_like(alike), alike / np.sqrt(np.mean(alike**2))):
    found, state = advance([{"w": u}] * 3, rank, spec)
    np.testing.assert_allclose(found[-1]["w"], u, atol=0.02 * np.abs(u).max())
    assert np.linalg.norm(np.float64(state.moment["w"].rows), 2) < 1 + 1e-4


@pytest.mark.parametrize("tokens", [1, 3])
@pytest.mark.parametrize("error", [3e-5, 1e-3])
@pytest.mark.slow
def test_a_basis_stays_finite_when_its_gram_matrix_is_not_accurate(monkeypatch, tokens, error):
  """Experts have fewer tokens than the rank, and products are less accurate than float32, as they may be on a GPU. Without a
  lower bound on its pivots, elimination of such a Gram matrix divided by small and negative pivots and gave NaN in all of these
  cases."""
  rank, rng = 32, np.random.default_rng(0)
  exact = low_rank_moment_module._exact

  def inaccurate(equation, x, y):
    made = exact(equation, x, y)
    if x is not y:
      return made
    noise = error * rng.normal(size=made.shape).astype(np.float32)
    return made + (noise + noise.swapaxes(-1, -2)) / 2

  monkeypatch.setattr(low_rank_moment_module, "_exact", inaccurate)
  spec = {"gate": Param((4, 96, 80), ("expert", "embed", "mlp"), "float32", fan_in(1))}
  moment: Any = low_rank_moment(B1, rank, spec)
  u = rng.normal(size=(4, 96, tokens)) @ rng.normal(size=(4, tokens, 80))
  u[0] = 0  # an expert without tokens
  direction = {"gate": np.float32(u / np.sqrt(np.mean(u**2)))}
  state = moment.init(direction)
  for _ in range(3):
    made, state = moment.update(direction, state)
    assert all(np.isfinite(x).all() for x in jax.tree.leaves((made, state)))
    lengths = np.linalg.norm(np.float64(state.moment["gate"].rows), axis=-2)
    assert lengths.max() < 1 + 1e-6
    assert np.abs(made["gate"]).max() < 3 * np.abs(direction["gate"]).max()


def test_an_update_calls_no_library_of_linear_algebra():
  """On a CPU, two batched linear algebra calls of jaxlib that run at the same time deadlock on each other's threads. The
  updates of several arrays are not ordered, so they must not contain such calls."""
  direction = draw(np.random.default_rng(0))
  moment: Any = low_rank_moment(B1, RANK, SPEC)
  text = jax.jit(moment.update).lower(direction, moment.init(direction)).as_text()
  assert "dot_general" in text
  assert "custom_call" not in text


@pytest.mark.parametrize("b1", [0.0, 0.9, 1 - 1e-8])
@pytest.mark.slow
def test_the_mean_has_no_bias_at_any_decay(b1):
  """After one step the mean with bias correction is the direction itself. In float32, 1 - 1e-8 rounds to 1, so the bias
  correction must not be computed from the rounded decay."""
  direction = draw(np.random.default_rng(0))
  moment: Any = low_rank_moment(b1, RANK, SPEC)
  made, _ = jax.jit(moment.update)(direction, moment.init(direction))
  for name, p in SPEC.items():
    if p is not None:
      np.testing.assert_allclose(made[name], direction[name], atol=0.03, err_msg=name)


@pytest.mark.slow
def test_what_a_proof_says_of_a_stack_holds_when_one_expert_has_all_of_it():
  """After many steps without a gradient, one expert has all of the clipped direction of a stack. Its elements are then as large
  as clipping allows, up to the square root of the stack's size, and must stay within the proved bound."""
  spec = {"stack_0": {"layer_0": {"w": stack({"w": SPEC["experts"]}, 6)["w"]}}}
  words = ("opt_type=adafactor", f"adafactor_momentum_rank={RANK}", "adam_weight_decay=0")
  optimizer: Any = make_optimizer(toy_config(*words).training, spec, "float32")
  params = jax.tree.map(lambda p: np.zeros(p.shape, np.float32), spec)
  state = optimizer.init(params)
  state = jax.tree.map(lambda x: jnp.full_like(x, 100_000) if x.dtype == jnp.int32 else x, state)
  grads = jax.tree.map(np.copy, params)
  grads["stack_0"]["layer_0"]["w"][2, 1, :, 3] = 0.1
  known = jnp.float32(1e-9)
  for _ in range(12):
    proved, known = optimizer.certainly_finite(jnp.float32(0.1), known, jnp.float32(1), jnp.float32(1e-3))
    assert proved
    direction, state = optimizer.update(grads, state, params)
    numbers = [x for x in jax.tree.leaves(state) if x.dtype != jnp.int32]
    assert max(float(jnp.abs(x).max()) for x in numbers) <= float(known)
    assert all(np.isfinite(x).all() for x in (*numbers, *jax.tree.leaves(direction)))
  assert float(jnp.abs(direction["stack_0"]["layer_0"]["w"]).max()) > 8  # far above the RMS of 1


_compiled: dict = {}


def _update(update: Any, direction: Any, state: Any) -> Any:
  """Apply the update, compiled once for all examples."""
  if not _compiled:
    _compiled["update"] = jax.jit(update)
  return _compiled["update"](direction, state)


def test_factors_lie_along_the_axes_of_their_parameter():
  mesh = jax.make_mesh((1, 1, 1), ("data", "fsdp", "tensor"), axis_types=(jax.sharding.AxisType.Auto,) * 3)
  place = lambda *axes: jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(*axes))
  spec = {"o": SPEC["o"], "stacked": SPEC["stacked"], "table": SPEC["table"]}
  params = {name: jax.ShapeDtypeStruct(p.shape, jnp.float32) for name, p in spec.items()}
  words = ("opt_type=adafactor", f"adafactor_momentum_rank={RANK}")
  optimizer = make_optimizer(toy_config(*words).training, spec, "float32")
  places = {"o": place("tensor", None, "fsdp"), "stacked": place(None, "fsdp", "tensor"), "table": place("tensor")}
  state = jax.eval_shape(optimizer.init, params)
  found: Any = optimizer.state_shardings(state, params, places, place())
  moment = found[0][2].moment
  assert jax.tree.structure(found) == jax.tree.structure(state)
  specs = {name: tuple(x.spec for x in factors) for name, factors in moment.items()}
  P = jax.sharding.PartitionSpec
  assert specs["o"] == (P("tensor", None, None), P("fsdp", None))
  assert specs["stacked"] == (P(None, "fsdp", None), P(None, "tensor", None))
  assert specs["table"] == (P(None, None), P("tensor", None))


@pytest.mark.parametrize("rank", [0, 3])
@pytest.mark.slow
def test_adafactor_has_it_behind_its_clipped_update(rank):
  """Adafactor applies the low-rank moment to its clipped update, and adds weight decay afterwards."""
  spec = {"up": SPEC["up"]}
  rng = np.random.default_rng(8)
  params = {"up": rng.normal(size=(24, 17)).astype(np.float32)}
  grads = [{"up": rng.normal(size=(24, 17)).astype(np.float32)} for _ in range(3)]
  words = ("opt_type=adafactor", f"adafactor_momentum_rank={rank}", f"adam_b1={B1}", "adam_weight_decay=0.2")
  optimizer: Any = make_optimizer(toy_config(*words).training, spec, "float32")
  state, made, clipped, v = optimizer.init(params), [], [], 0.0
  for t, g in enumerate(grads, 1):
    direction, state = optimizer.update(g, state, params)
    made.append({"up": direction["up"] - 0.2 * params["up"]})
    decay = 1 - float(t) ** -0.8
    v = decay * v + (1 - decay) * (np.float64(g["up"]) ** 2 + 1e-30)  # not factored for small arrays
    u = g["up"] / np.sqrt(v)
    clipped.append({"up": np.float32(u / max(1.0, np.sqrt(np.mean(u**2))))})
  expected = advance(clipped, rank, spec)[0] if rank else clipped
  np.testing.assert_allclose(made[-1]["up"], expected[-1]["up"], atol=1e-2 if rank else 1e-4)
