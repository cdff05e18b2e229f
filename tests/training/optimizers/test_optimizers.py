"""Optimizers against several steps computed in NumPy, and learning rates against hand-computed numbers."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from maxtext_like.config.choices import OPTIMIZERS
from maxtext_like.layers.param import Param
from maxtext_like.models.row_norms import largest_clipped
from maxtext_like.training.optimizers.by_layer import ByLayer
from maxtext_like.training.optimizers.optimizer import decays, make_optimizer
from tests.tiers import slow
from tests.training.toy import toy_config

OPT_TYPES = tuple(OPTIMIZERS)
SPEC = {"matrix": Param((3, 2), ("embed", "mlp")), "norm": Param((3,), ("embed",)), "frozen": None}
RATE = 0.1
STEPS = 4


def run(grads: dict, params: dict, *overrides: str, weight_dtype: str = "float32") -> dict:
  """Return the parameters after STEPS updates. The gradients of the updates are ``grads`` times 1, 2, 3, ..."""
  config = toy_config(*overrides)
  optimizer = make_optimizer(config.training, SPEC, weight_dtype)
  state = optimizer.init(params)
  update = jax.jit(optimizer.update)
  for k in range(STEPS):
    step = jax.tree.map(lambda g, k=k: g * (k + 1), grads)
    direction, state = update(step, state, params)
    params = jax.tree.map(lambda p, d: p - RATE * d, params, direction)
  return params


@pytest.fixture
def arrays():
  rng = np.random.default_rng(0)
  tree = lambda: {"matrix": rng.normal(size=(3, 2)), "norm": rng.normal(size=3), "frozen": None}
  return tree(), tree()


def written(grads, params, rule, decay):
  """Return the same parameters in float64, with a rule (gradient, moments, step) -> direction. Norms have no weight decay."""
  out = {}
  for name in ("matrix", "norm"):
    p, moments = params[name].copy(), {}
    for k in range(STEPS):
      d = rule(grads[name] * (k + 1), moments, k + 1)
      p = p - RATE * (d + (decay * p if name == "matrix" else 0))
    out[name] = p
  return out


def check(found, expected, rtol=2e-6):
  assert found["frozen"] is None
  for name in ("matrix", "norm"):
    np.testing.assert_allclose(found[name], expected[name], rtol=rtol)


def test_adamw(arrays):
  grads, params = arrays
  b1, b2, eps = 0.8, 0.9, 1e-3

  def rule(g, moments, t):
    moments["m"] = b1 * moments.get("m", 0) + (1 - b1) * g
    moments["v"] = b2 * moments.get("v", 0) + (1 - b2) * g**2
    return moments["m"] / (1 - b1**t) / (np.sqrt(moments["v"] / (1 - b2**t)) + eps)

  found = run(grads, params, "opt_type=adamw", "adam_b1=0.8", "adam_b2=0.9", "adam_eps=1e-3", "adam_weight_decay=0.3")
  check(found, written(grads, params, rule, 0.3))


def test_lion(arrays):
  grads, params = arrays

  def rule(g, moments, t):
    m = moments.get("m", 0 * g)
    moments["m"] = 0.95 * m + 0.05 * g
    return np.sign(0.9 * m + 0.1 * g)

  check(run(grads, params, "opt_type=lion", "adam_weight_decay=0.2"), written(grads, params, rule, 0.2))


@pytest.mark.parametrize("momentum", [0.0, 0.7])
def test_sgd(arrays, momentum):
  grads, params = arrays

  def rule(g, moments, t):
    moments["m"] = momentum * moments.get("m", 0) + g
    return moments["m"]

  found = run(grads, params, "opt_type=sgd", f"sgd_momentum={momentum}", "adam_weight_decay=0.2")
  check(found, written(grads, params, rule, 0.2))


def test_adafactor_is_unfactored_for_small_arrays_and_clips_at_rms_1(arrays):
  grads, params = arrays

  def rule(g, moments, t):
    decay = 1 - float(t) ** -0.8
    moments["v"] = decay * moments.get("v", 0) + (1 - decay) * (g**2 + 1e-30)
    u = g / np.sqrt(moments["v"])
    return u / max(1.0, np.sqrt(np.mean(u**2)))

  check(run(grads, params, "opt_type=adafactor", "adam_weight_decay=0.2"), written(grads, params, rule, 0.2), rtol=1e-5)


def test_moments_are_float32_but_the_first_in_mu_dtype():
  params = {"matrix": jnp.ones((3, 2), jnp.bfloat16), "norm": jnp.ones(3, jnp.bfloat16), "frozen": None}
  for mu, expected in (("mu_dtype=null", "bfloat16"), ("mu_dtype=float32", "float32")):
    optimizer: Any = make_optimizer(toy_config(mu, "adam_weight_decay=0.1").training, SPEC, "bfloat16")
    state = optimizer.init(params)
    _, after = optimizer.update(jax.tree.map(lambda p: p * 0.5, params), state, params)
    for adam in (state[0], after[0]):
      assert adam.mu["matrix"].dtype == expected
      assert adam.nu["matrix"].dtype == "float32"


def test_decay_goes_by_dimensions_of_one_layer_not_by_name():
  assert decays(Param((4, 3, 2), ("layers", "embed", "mlp")))
  assert not decays(Param((4, 3), ("layers", "embed")))
  assert not decays(Param((4,), ("layers",)))
  assert not decays(Param((), ()))
  assert decays(Param((7, 3), ("vocab", "embed")))


def test_factored_moments_are_sharded_along_what_they_keep():
  mesh = jax.make_mesh((1, 1), ("data", "fsdp"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
  spec = {"w": Param((256, 128), ("embed", "mlp"))}
  params = {"w": jax.ShapeDtypeStruct((256, 128), jnp.float32)}
  optimizer = make_optimizer(toy_config("opt_type=adafactor").training, spec, "float32")
  state = jax.eval_shape(optimizer.init, params)
  place = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("fsdp"))
  everywhere = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
  found = optimizer.state_shardings(state, params, {"w": place}, everywhere)
  specs = {x.shape: s.spec for x, s in zip(jax.tree.leaves(state), jax.tree.leaves(found), strict=True)}
  assert specs[(256,)] == jax.sharding.PartitionSpec("fsdp")
  assert specs[(128,)] == jax.sharding.PartitionSpec(None)
  assert specs[()] == jax.sharding.PartitionSpec()


@pytest.mark.parametrize(("rule", "rank"), [*((rule, 0) for rule in OPT_TYPES), slow("adafactor", 3)])
@pytest.mark.parametrize("weight_dtype", ["float32", slow("float16")])
def test_what_is_certainly_finite_is(rule, rank, weight_dtype):
  """For random magnitudes up to the largest float32 number, an update that is proved finite is finite, and updates of ordinary
  magnitudes are proved."""
  rng = np.random.default_rng(0)
  shape = (130, 129)  # large enough that Adafactor factors it
  spec = {"a": Param(shape, ("embed", "mlp"))}

  def size(low, high):
    return 10.0 ** rng.uniform(low, high)

  def draw(low, high):
    return jnp.asarray(size(low, high) * rng.uniform(-1, 1, shape) * rng.choice([0, 1], shape), jnp.float32)

  def largest(tree):
    return max((float(np.abs(x).max()) for x in jax.tree.leaves(tree) if x.dtype != np.int32), default=0.0)

  counts = {True: 0, False: 0}
  for trial in range(30):
    wide = trial % 2
    powers = (rng.choice([-30, 20]), 38.3) if wide else (-9, 0)
    keys = {"learning_rate": size(-4, 8 if wide else -2), "adam_weight_decay": rng.choice([0, size(-3, 12 if wide else -1)])}
    keys |= {"adam_eps": size(-12, -6), "adam_b1": rng.choice([0, 0.9]), "opt_type": rule}
    keys |= {"adafactor_momentum_rank": rank}
    t = toy_config(*(f"{k}={v}" for k, v in keys.items())).training
    p = draw(*powers if wide else (-4, 0)).astype(weight_dtype)
    grads, p = {"a": draw(*powers)}, {"a": jnp.where(jnp.isfinite(p), p, 0)}
    optimizer = make_optimizer(t, spec, weight_dtype)
    state: Any = optimizer.init(p)
    if rule != "adafactor":  # its second moments are never below a fraction of 1e-30, so its initial state is kept
      leaves, structure = jax.tree.flatten(state)
      state = jax.tree.unflatten(structure, [x if x.dtype == np.int32 else jnp.abs(draw(*powers)) for x in leaves])
    sizes = (largest(grads), largest(state), largest(p), t.learning_rate)
    certainly: Any = optimizer.certainly_finite
    certain, kept = certainly(*map(jnp.float32, sizes))
    counts[proof := bool(certain)] += 1
    direction: Any
    direction, state = optimizer.update(grads, state, p)
    moved = (p["a"].astype(jnp.float32) - t.learning_rate * direction["a"]).astype(weight_dtype)
    finite = all(np.isfinite(np.asarray(x)).all() for x in (moved, *jax.tree.leaves(state)))
    assert finite or not proof, (keys, largest(grads), largest(p))
    assert not proof or largest(state) <= 1.001 * float(kept) + 6e-8, (  # 6e-8: float16 rounds to multiples of it
      keys,
      largest(grads),
      kept,
    )
    if not wide and not (weight_dtype == "float16" and rule in ("adamw", "adafactor")):
      assert proof, (keys, largest(grads), largest(p))
  assert counts[False]
  certainly = make_optimizer(toy_config(f"opt_type={rule}").training, spec, weight_dtype).certainly_finite
  for bad in (np.nan, np.inf):
    for at in range(3):
      assert not certainly(*(jnp.float32(bad if i == at else 1e-3) for i in range(3)), jnp.float32(1e-3))[0]


@pytest.mark.parametrize("rule", OPT_TYPES)
@pytest.mark.parametrize("clip", [0.0, 1.0, 2.0, 1e4, 1e12])
def test_what_is_usually_proved_has_a_proof(rule, clip):
  """Adafactor can prove an update finite only for small gradients, so it needs the default clipping threshold of 1. An update
  layer by layer has no bound on the gradients unless they are clipped to a threshold whose square is far below the float32
  maximum."""
  spec = {"a": Param((7, 5), ("embed", "mlp"))}
  optimizer = make_optimizer(toy_config(f"opt_type={rule}").training, spec, "bfloat16")
  assert optimizer.usually_proved(clip) == (rule != "adafactor" or clip == 1)
  assert ByLayer.of(optimizer).usually_proved(clip) == (0 < clip < 1e9 and optimizer.usually_proved(clip))
  if clip and optimizer.usually_proved(clip):
    certain, _ = optimizer.certainly_finite(*map(jnp.float32, (largest_clipped(clip), 1, 1e3, 0.1)))
    assert certain


@pytest.mark.parametrize(
  ("rule", "mu"), [("adamw", "float32"), ("adamw", "bfloat16"), ("lion", "bfloat16"), ("sgd", "float32")]
)
def test_what_is_known_of_a_state_holds_over_many_steps(rule, mu):
  """The known bound holds after 20,000 steps. The gradients stay at their maximum, so that the moments come as close to the
  bound as possible."""
  t = toy_config(f"opt_type={rule}", f"mu_dtype={mu}", "adam_b1=0.9", "adam_b2=0.999").training
  optimizer = make_optimizer(t, {"a": Param((7,), ("embed",))}, "float32")
  certainly: Any = optimizer.certainly_finite
  grads, p = {"a": jnp.asarray([3.3, -3.3, 3.3, 1e-3, 0.1, 3.3, -2.0])}, {"a": jnp.ones(7)}
  zero = jnp.zeros(())

  @jax.jit
  def many(state):
    def one(carry, _):
      state, kept = carry
      return (optimizer.update(grads, state, p)[1], certainly(jnp.float32(3.3), kept, zero, zero)[1]), None

    return jax.lax.scan(one, (state, zero), length=20_000)[0]

  state, kept = many(optimizer.init(p))
  largest = max(float(jnp.abs(x.astype(jnp.float32)).max()) for x in jax.tree.leaves(state) if x.dtype != jnp.int32)
  assert largest < 1.01 * float(kept)
  assert mu == "bfloat16" or largest > 0.9 * float(kept)  # a bfloat16 average stops growing earlier
