"""Stochastic rounding: the results are neighbors with the exact mean, the bits do not depend on the devices, and the train step
keeps small updates."""

import subprocess
import sys

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from maxtext_like.config.load import load_config
from maxtext_like.errors import UserError
from maxtext_like.training.step.rounding import StochasticRounding, random_bits, stays_finite, stochastic_round
from maxtext_like.training.step.train_step import UNKNOWN
from tests.processes import environment
from tests.training.toy import toy_batch, toy_config, toy_step

KINDS = {
  "bfloat16": ml_dtypes.bfloat16,
  "float16": np.float16,
  "float8_e4m3fn": ml_dtypes.float8_e4m3fn,
  "float8_e5m2": ml_dtypes.float8_e5m2,
}


ROUND = jax.jit(stochastic_round, static_argnums=1)


def rounded(x, name: str, bits) -> np.ndarray:
  return np.asarray(ROUND(np.asarray(x, np.float32), np.dtype(KINDS[name]), np.asarray(bits, np.uint32)))


def neighbors(x: np.ndarray, name: str) -> tuple[np.ndarray, np.ndarray]:
  """Return the numbers of a format next below and above x, found among all numbers of the format."""
  kind = np.dtype(KINDS[name])
  codes = np.arange(2 ** (8 * kind.itemsize), dtype=f"uint{8 * kind.itemsize}").view(kind).astype(np.float32)
  codes = np.unique(codes[np.isfinite(codes)])
  at = np.searchsorted(codes, x, side="right") - 1
  below = codes[at]
  return below, np.where(below == x, x, codes[np.minimum(at + 1, len(codes) - 1)])


@pytest.mark.parametrize("name", KINDS)
def test_the_result_is_a_neighbor_and_its_mean_is_exact(name: str):
  rng = np.random.default_rng(0)
  largest = float(ml_dtypes.finfo(KINDS[name]).max)
  tiny = float(ml_dtypes.finfo(KINDS[name]).tiny)
  sizes = [1.0, 37.0, 0.5 * largest, tiny, *([] if name == "bfloat16" else [tiny / 5])]
  x = np.concatenate([rng.normal(size=9) * size for size in sizes]).astype(np.float32)
  x = x[np.abs(x) <= largest]
  if name == "bfloat16":
    x = x[np.abs(x) > 2 * tiny]  # smaller numbers are subnormal in float32, and machines flush them
  low, high = neighbors(x, name)
  # Evenly spaced bits represent all possible bits, so the mean over them is the expectation.
  count = 4096
  bits = (np.arange(count, dtype=np.uint64) * (2**32 // count)).astype(np.uint32)
  found = rounded(np.tile(x, (count, 1)), name, np.tile(bits[:, None], (1, len(x)))).astype(np.float64)
  assert ((found == low) | (found == high)).all()
  np.testing.assert_array_less(np.abs(found.mean(axis=0) - x), 1.5 / count * (high - low) + 1e-300 + 1e-12 * np.abs(x))


@pytest.mark.parametrize("name", KINDS)
def test_numbers_of_the_format_and_non_finite_ones_stay(name: str):
  exact = np.array([0.0, -0.0, 1.0, -1.5, float(ml_dtypes.finfo(KINDS[name]).max)], np.float32)
  for bits in (0, 2**32 - 1):
    np.testing.assert_array_equal(rounded(exact, name, np.full(5, bits)).astype(np.float32), exact)
    special = rounded(np.array([np.nan, np.inf, -np.inf]), name, np.full(3, bits)).astype(np.float32)
    assert np.isnan(special[0])
    largest = float(ml_dtypes.finfo(KINDS[name]).max)
    expected = [largest, -largest] if name.startswith("float8") else [np.inf, -np.inf]
    assert special[1:].tolist() == expected


def test_beyond_the_largest_number():
  assert rounded([1e6], "float16", [0])[0] == np.inf  # the check of the updated parameters sees it
  assert float(rounded([500.0], "float8_e4m3fn", [0])[0]) == 448.0
  assert float(rounded([-1e9], "float8_e5m2", [7])[0]) == -57344.0


@pytest.mark.parametrize("name", KINDS)
def test_whether_it_stays_finite_is_known_before(name: str):
  largest = float(ml_dtypes.finfo(KINDS[name]).max)
  with np.errstate(over="ignore"):
    edge = (largest * np.array([1, 1 + 2**-12, 1.001, 1.01, 1.1, 2])).astype(np.float32)
  x = jnp.concatenate([edge, -edge, jnp.array([0, 1e-30, np.inf, -np.inf, np.nan], np.float32)])
  wanted = np.asarray(stays_finite(x, KINDS[name]))
  for bits in (0, 2**31, 2**32 - 1):
    found = rounded(x, name, np.full(x.shape, bits, np.uint32))
    np.testing.assert_array_equal(np.isfinite(found.astype(np.float64)), wanted)


def test_bits_depend_on_seed_step_and_path_and_not_on_the_devices():
  exact = {"a": jnp.full((8, 16), 1.001), "b": {"c": jnp.full((8, 16), 1.001)}, "full": jnp.full(3, 1.001), "none": None}
  like = {"a": jnp.ones((8, 16), jnp.bfloat16), "b": {"c": jnp.ones((8, 16), jnp.bfloat16)}, "full": jnp.ones(3), "none": None}
  run = jax.jit(lambda seed_step, e: StochasticRounding(1)(e, like, seed_step))
  first, again, later = (run(step, exact) for step in (3, 3, 4))
  np.testing.assert_array_equal(first["a"], again["a"])
  assert first["none"] is None
  np.testing.assert_array_equal(first["full"], exact["full"])
  assert (first["a"] != later["a"]).any()
  assert (first["a"] != first["b"]["c"]).any()
  other = jax.jit(lambda e: StochasticRounding(2)(e, like, jnp.asarray(3)))(exact)
  assert (first["a"] != other["a"]).any()
  alone = jax.jit(lambda e: StochasticRounding(1)(e, {"a": like["a"]}, jnp.asarray(3)))({"a": exact["a"]})
  np.testing.assert_array_equal(first["a"], alone["a"])  # other parameters do not change the bits


def test_small_updates_arrive_within_a_spacing_or_two():
  """Errors after 400 steps, in spacings of numbers near 1.5, are small for constant updates and reduced for updates that change
  sign.

  With independent bits in each step their standard deviation would be sqrt(steps / 6) = 8.2, and the largest four times that.
  """
  count, steps, spacing = 2000, 400, 2.0**-7
  rng = np.random.default_rng(0)
  turning, now = np.empty((steps, count), np.float32), rng.normal(size=count)
  for i in range(steps):
    now = 0.9 * now + np.sqrt(1 - 0.9**2) * rng.normal(size=count)
    turning[i] = 0.3 * now
  updates = {"same": np.broadcast_to(rng.uniform(-0.1, 0.1, count).astype(np.float32), (steps, count)), "turning": turning}
  rounding = StochasticRounding(3)

  def step(stored, given):
    number, update = given
    return rounding({"w": stored.astype(jnp.float32) + update}, {"w": stored}, number)["w"], None

  start = jnp.full(count, 1.5, jnp.bfloat16)
  go = jax.jit(lambda u: jax.lax.scan(step, start, (jnp.arange(steps), u))[0])
  errors = {}
  for name, u in updates.items():
    moved = (np.asarray(go(u * np.float32(spacing)), np.float64) - 1.5) / spacing
    errors[name] = moved - u.sum(0, dtype=np.float64)
    assert abs(errors[name].mean()) < 5 * errors[name].std() / np.sqrt(count), name
  assert np.abs(errors["same"]).max() < 3
  assert errors["same"].std() < 0.8
  assert errors["turning"].std() < 0.65 * np.sqrt(steps / 6)


@pytest.mark.slow
def test_the_train_step_keeps_what_rounding_to_nearest_would_lose():
  rate, steps = 1e-4, 60
  words = ("opt_type=sgd", "sgd_momentum=0", f"learning_rate={rate}", "weight_dtype=bfloat16")
  step, state = toy_step(toy_config(*words, "stochastic_rounding=true"))
  state = {**state, "params": jax.tree.map(lambda p: p.astype(jnp.bfloat16), state["params"])}
  before, first = jax.device_get(state["params"]), None
  for _ in range(steps):
    state, metrics = step(state, toy_batch(), UNKNOWN)
    assert not bool(metrics["skipped"])
    # No update reaches half of bfloat16's spacing at 0.125. So rounding to nearest would never change a larger weight.
    assert rate * float(metrics["grad_norm"]) < 0.125 * 2**-9
    first = first or jax.device_get(state["params"])
  again, _ = step({**state, "step": jnp.zeros((), jnp.int32), "params": before}, toy_batch(), UNKNOWN)
  jax.tree.map(np.testing.assert_array_equal, jax.device_get(again["params"]), first)
  pairs = zip(jax.tree.leaves(before), jax.tree.leaves(jax.device_get(state["params"])), strict=True)
  moved = sum(int(((a != b) & (np.abs(a.astype(np.float32)) > 0.125)).sum()) for a, b in pairs)
  assert moved >= 5


def test_random_bits_are_even_and_tell_nothing_of_each_other():
  """Each of the 32 bits is set in half of 2**16 numbers. It agrees in half of them with the same bit of the next column, of the
  next row and of two other keys, and with the next lower bit.

  The standard deviation of such a fraction is 1/512. All fractions are within 4.5 standard deviations of a half.
  """
  keys = [jax.random.key_data(jax.random.fold_in(jax.random.key(0), i)) for i in range(3)]
  first, second, other = (np.asarray(random_bits(key, (128, 512))) for key in keys)
  bits = lambda x: (x[..., None] >> np.arange(32, dtype=np.uint32)) & 1
  shares = [bits(first).mean((0, 1))]
  beside = ((first[:, 1:], first[:, :-1]), (first[1:], first[:-1]), (first, second), (first, other), (first, first << 1))
  shares += [(bits(a) == bits(b)).mean((0, 1)) for a, b in beside]
  assert np.abs(np.concatenate(shares) - 0.5).max() < 4.5 / 512
  assert len(np.unique(first)) > 0.999 * first.size
  np.testing.assert_array_equal(np.asarray(random_bits(keys[0], (2**16,))).reshape(128, 512), first)


ON_DEVICES = """
import hashlib, jax, jax.numpy as jnp
from maxtext_like.training.step.rounding import StochasticRounding
mesh = jax.make_mesh((jax.device_count(),), ("fsdp",), axis_types=(jax.sharding.AxisType.Auto,))
place = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("fsdp"))
like = jax.device_put(jnp.ones((16, 12), jnp.bfloat16), place)
exact = jax.device_put(jnp.linspace(0.9, 1.1, 192).reshape(16, 12), place)
run = jax.jit(lambda e, p: StochasticRounding(1)({"w": e}, {"w": p}, jnp.asarray(3))["w"], out_shardings=place)
print(jax.device_count(), hashlib.sha256(jax.device_get(run(exact, like)).tobytes()).hexdigest())
"""


@pytest.mark.slow
def test_the_same_on_one_device_and_on_eight():
  found = {}
  for devices in (1, 8):
    done = subprocess.run(
      [sys.executable, "-c", ON_DEVICES], env=environment(devices), capture_output=True, text=True, check=True
    )
    count, digest = done.stdout.split()
    found[int(count)] = digest
  assert found[1] == found[8]


def test_refused_where_nothing_is_rounded():
  with pytest.raises(UserError, match="stochastic_rounding = true has no effect with weight_dtype: float32"):
    load_config("gemma4-tiny", ["stochastic_rounding=true"])
  assert load_config("gemma4-tiny", ["stochastic_rounding=true", "weight_dtype=bfloat16"]).config.training.stochastic_rounding
