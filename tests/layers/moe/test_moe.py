"""Tests mixtures of experts: routers against numpy, the grouped product against every expert on every token, loads and
losses."""

import dataclasses
import functools
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from equations import dtypes, equations
from written_out import gelu, rms, sigmoid, silu, tree64

from maxtext_like.layers.kernels.grouped_matmul.registry import NAMES, Case, Name, kernel
from maxtext_like.layers.moe.moe import Experts, MoE, MoEConfig, Router
from maxtext_like.layers.moe.router_losses import RouterLosses
from maxtext_like.layers.norms import NormConfig
from maxtext_like.layers.precision import Precision
from tests.processes import environment

B, T, D, F, E, K = 2, 5, 7, 3, 6, 2
FLOAT32 = Precision(dtype="float32")
QWEN3 = MoEConfig(emb_dim=D, mlp_dim=F, num_experts=E, num_experts_per_tok=K, activation="silu")
SOFTMAX = dataclasses.replace(QWEN3, activation="gelu", router_norm=NormConfig(dim=D, with_scale=False), per_expert_scale=True)
SIGMOID = dataclasses.replace(QWEN3, router="sigmoid", n_groups=3, topk_groups=2, routed_scaling_factor=2.5, shared_experts=2)
X = np.random.default_rng(0).normal(size=(B, T, D))
RESIDUAL = np.random.default_rng(1).normal(size=(B, T, D)) * 3


def f32(a):
  return jnp.asarray(a, jnp.float32)


def softmax_route(cfg, p, x):
  u = rms(x, p["scale"], cfg.router_norm.epsilon) * cfg.emb_dim**-0.5 if cfg.router_norm else x
  z = np.exp(u @ p["kernel"])
  probs = z / z.sum(-1, keepdims=True)
  experts = np.argsort(-probs, axis=-1, kind="stable")[..., : cfg.num_experts_per_tok]
  weights = np.take_along_axis(probs, experts, -1)
  if cfg.norm_topk_prob:
    weights = weights / weights.sum(-1, keepdims=True)
  return weights * (p["per_expert_scale"][experts] if cfg.per_expert_scale else 1), experts, probs


def sigmoid_route(cfg, p, x):
  scores = sigmoid(x @ p["kernel"])
  biased = scores + p["bias"]
  size = cfg.num_experts // cfg.n_groups
  weights, chosen = np.zeros((*x.shape[:2], K)), np.zeros((*x.shape[:2], K), int)
  for index in np.ndindex(x.shape[:2]):
    groups = biased[index].reshape(cfg.n_groups, size)
    worth = np.sort(groups, axis=1)[:, -2:].sum(1)
    best = np.argsort(-worth, kind="stable")[: cfg.topk_groups]
    allowed = [e for e in range(cfg.num_experts) if e // size in best]
    order = sorted(allowed, key=lambda e, i=index: (-biased[i][e], e))[:K]
    chosen[index], weights[index] = order, scores[index][order]
  if cfg.norm_topk_prob:
    weights = weights / weights.sum(-1, keepdims=True)
  return weights * cfg.routed_scaling_factor, chosen, scores / scores.sum(-1, keepdims=True)


ROUTES = {"gemma4": (SOFTMAX, softmax_route), "qwen3": (QWEN3, softmax_route), "sigmoid": (SIGMOID, sigmoid_route)}


@pytest.mark.parametrize("router", ROUTES)
@pytest.mark.parametrize("norm_topk_prob", [True, False])
def test_router_against_numpy(router, norm_topk_prob, random_params):
  cfg, route = ROUTES[router]
  cfg = dataclasses.replace(cfg, norm_topk_prob=norm_topk_prob)
  p = random_params(Router(cfg, FLOAT32).params())
  weights, experts, aux = jax.jit(Router(cfg, FLOAT32))(p, f32(X))
  expected_weights, expected_experts, probs = route(cfg, tree64(p), X)
  np.testing.assert_array_equal(experts, expected_experts)
  np.testing.assert_allclose(weights, expected_weights, atol=2e-6)
  np.testing.assert_allclose(aux["probs"], probs, atol=2e-6)
  scores = X @ tree64(p)["kernel"] if router == "sigmoid" else probs
  assert set(p) == {"kernel"} | {"gemma4": {"scale", "per_expert_scale"}, "qwen3": set(), "sigmoid": {"bias"}}[router]
  np.testing.assert_allclose(aux["scores"], scores, atol=2e-6)


def test_the_bias_chooses_and_does_not_weigh(random_params):
  p = random_params(Router(SIGMOID, FLOAT32).params())
  route = jax.jit(Router(SIGMOID, FLOAT32))
  before, _, _ = route(p, f32(X))
  # The same bias for all experts changes nothing.
  after, _, _ = route(p | {"bias": p["bias"] + 3.0}, f32(X))
  np.testing.assert_array_equal(before, after)
  # A large bias for experts 0 and 5 sends every token there. The weights are still the scores without bias.
  weights, experts, _ = route(p | {"bias": jnp.asarray([9.0, 0, 0, 0, 0, 8.0])}, f32(X))
  np.testing.assert_array_equal(experts, np.broadcast_to([0, 5], experts.shape))
  scores = sigmoid(X @ tree64(p)["kernel"])[..., [0, 5]]
  np.testing.assert_allclose(weights, scores / scores.sum(-1, keepdims=True) * 2.5, atol=2e-6)


def test_the_bias_is_float32_and_out_of_the_gradient_s_reach(random_params):
  layer = Router(SIGMOID, Precision(dtype="bfloat16", weight_dtype="bfloat16"))
  bias = layer.params()["bias"]
  assert (bias.dtype, bias.trainable) == ("float32", False)
  p = random_params(layer.params())
  gradient = jax.grad(lambda p: jnp.sum(layer(p, f32(X))[0] ** 2))(p)
  assert (gradient["bias"] == 0).all()
  assert (gradient["kernel"] != 0).any()


@pytest.mark.parametrize("router", ROUTES)
def test_ties_go_to_the_lower_index(router, random_params):
  cfg = ROUTES[router][0]
  p = random_params(Router(cfg, FLOAT32).params())
  p["kernel"] = jnp.zeros_like(p["kernel"])
  if router == "sigmoid":
    p["bias"] = jnp.zeros_like(p["bias"])
  _, experts, _ = jax.jit(Router(cfg, FLOAT32))(p, f32(X))
  np.testing.assert_array_equal(experts, np.broadcast_to([0, 1], experts.shape))


def test_groups_are_judged_by_their_two_best():
  """Group 0 has the best expert, but its second expert is poor. Groups 1 and 2 have larger sums."""
  cfg = dataclasses.replace(SIGMOID, topk_groups=2, norm_topk_prob=False, routed_scaling_factor=1.0)
  p = {"kernel": jnp.zeros((D, E)), "bias": f32([5.0, -5.0, 2.0, 2.5, 2.1, 2.0])}
  _, experts, _ = Router(cfg, FLOAT32)(p, jnp.zeros((1, 1, D)))
  assert experts[0, 0].tolist() == [3, 4]


@pytest.mark.parametrize("router", ROUTES)
@pytest.mark.parametrize("flag", [True, False])
def test_float32_gate_logits(router, flag, random_params):
  cfg = ROUTES[router][0]
  layer = Router(cfg, Precision(dtype="bfloat16", float32_gate_logits=flag))
  p = random_params(layer.params())
  (dot,) = [e for e in equations(layer, p, f32(X)) if e.primitive.name == "dot_general"]
  assert set(dtypes(dot)) == {"float32" if flag else "bfloat16"}


# --- experts ---


def routing(seed=2):
  rng = np.random.default_rng(seed)
  experts = np.stack([rng.permutation(E)[:K] for _ in range(B * T)]).reshape(B, T, K)
  return rng.uniform(0.1, 1, (B, T, K)), experts


def written_experts(p, x, weights, experts, act=gelu):
  out = np.zeros_like(x)
  for b, t, k in np.ndindex(experts.shape):
    e = experts[b, t, k]
    out[b, t] += weights[b, t, k] * ((act(x[b, t] @ p["gate"][e]) * (x[b, t] @ p["up"][e])) @ p["down"][e])
  return out


def both_ways(cfg, precision, p, x, weights, experts, by: Name = "ragged_dot"):
  """Return (grouped, dense): each has the output, and the gradients of parameters, input and weights."""
  layer = Experts(cfg, precision)
  cotangent = f32(np.random.default_rng(3).normal(size=(B, T, D)))

  def loss(p, x, w, function):
    out = function(p, x, w, jnp.asarray(experts))
    out = out[0] if isinstance(out, tuple) else out
    return jnp.sum(out.astype(jnp.float32) * cotangent), out

  @jax.jit
  def run(p, x, w):
    grad = jax.grad(loss, (0, 1, 2), has_aux=True)
    return grad(p, x, w, functools.partial(layer, by=by)), grad(p, x, w, layer.dense)

  return run(p, f32(x), f32(weights))


@pytest.mark.parametrize("by", [n for n in NAMES if not kernel(n).refuses(Case(platform="cpu", dtype="float32"))])
@pytest.mark.parametrize("case", ["spread", "all to expert 2"])
def test_grouped_is_dense_and_both_are_the_formula(case, by, random_params):
  p = random_params(Experts(SOFTMAX, FLOAT32).params())
  weights, experts = routing()
  if case != "spread":
    experts[:] = [2, 5]  # no expert drops a token, even if it gets all of them
  (grouped, out), (dense, dense_out) = both_ways(SOFTMAX, FLOAT32, p, X, weights, experts, by)
  expected = written_experts(tree64(p), X, weights, experts)
  np.testing.assert_allclose(out, expected, atol=3e-6)
  np.testing.assert_allclose(dense_out, expected, atol=3e-6)
  assert all(np.abs(expected[b, t]).max() > 1e-3 for b in range(B) for t in range(T))
  jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=5e-6), grouped, dense)
  unused = sorted(set(range(E)) - set(experts.ravel().tolist()))
  for e in unused:
    assert all((g[e] == 0).all() for g in grouped[0].values())


@pytest.mark.parametrize(("dtype", "tolerance"), [("bfloat16", 3e-2), ("float16", 4e-3)])
@pytest.mark.parametrize("flag", ["auto", True, False])
def test_experts_in_low_precision(dtype, tolerance, flag, random_params):
  p = random_params(Experts(SOFTMAX, FLOAT32).params())
  weights, experts = routing()
  precision = Precision(dtype=dtype, float32_gate_product=flag)
  out, clamped = jax.jit(Experts(SOFTMAX, precision))(p, f32(X), f32(weights), jnp.asarray(experts))
  expected = written_experts(tree64(p), X, weights, experts)
  np.testing.assert_allclose(out, expected, atol=tolerance * np.abs(expected).max())
  assert out.dtype == "float32"
  assert clamped == 0


def test_experts_in_float16_beyond_its_range(random_params):
  p = {name: w * 60 for name, w in random_params(Experts(SOFTMAX, FLOAT32).params()).items()}
  weights, experts = routing()
  (gradients, out), _ = both_ways(SOFTMAX, Precision(dtype="float16"), p, X * 30, weights, experts)
  expected = written_experts(tree64(p), X * 30, weights, experts)
  assert np.abs(expected).max() > 1e6
  np.testing.assert_allclose(out, expected, atol=4e-3 * np.abs(expected).max())
  # The gradient of a routing weight contains the output of its expert. It must be finite even if that output exceeds float16.
  assert jnp.isfinite(gradients[2]).all()


@pytest.mark.parametrize("flag", [True, False])
def test_float32_weight_sum(flag, random_params):
  layer = Experts(SOFTMAX, Precision(dtype="bfloat16", float32_weight_sum=flag))
  p = random_params(layer.params())
  weights, experts = routing()
  found = list(equations(layer, p, f32(X), f32(weights), jnp.asarray(experts)))
  last = [e for e in found if e.primitive.name == "dot_general"][-1]
  assert set(dtypes(last)) == {"float32" if flag else "bfloat16"}


# --- the complete layer ---


@pytest.mark.parametrize("router", ROUTES)
def test_layer_statistics_and_losses(router, random_params):
  cfg, route = ROUTES[router]
  cfg = dataclasses.replace(cfg, losses=RouterLosses(weight=0.3))
  layer = MoE(cfg, FLOAT32)
  p = random_params(layer.params())
  real = np.array([[1, 1, 1, 0, 0], [1, 1, 1, 1, 0]], bool)
  given = f32(RESIDUAL) if router == "gemma4" else None
  out, aux = jax.jit(layer.standalone)(p, f32(X), given, jnp.asarray(real))
  q = tree64(p)
  weights, experts, probs = route(cfg, q["router"], RESIDUAL if router == "gemma4" else X)
  act = gelu if router == "gemma4" else silu
  expected = written_experts(q["experts"], X, weights, experts, act)
  if cfg.shared_experts:
    shared = q["shared"]
    assert shared["gate"].shape == (D, F * 2)
    expected = expected + (act(X @ shared["gate"]) * (X @ shared["up"])) @ shared["down"]
  np.testing.assert_allclose(out, expected, atol=5e-6)
  chosen = np.zeros(E)
  for b, t in np.ndindex(real.shape):
    if real[b, t]:
      chosen[experts[b, t]] += 1
  load = chosen / (real.sum() * K)
  np.testing.assert_allclose(aux["moe_load"], load, atol=1e-6)
  np.testing.assert_allclose(np.sum(aux["moe_load"]), 1, atol=1e-6)
  np.testing.assert_allclose(aux["load_balance_loss"], 0.3 * E * np.sum(load * probs[real].mean(0)), rtol=1e-5)
  assert aux["clamped"] == 0


def test_a_batch_of_padding_has_no_load_and_a_finite_loss(random_params):
  layer = MoE(dataclasses.replace(SOFTMAX, losses=RouterLosses(weight=1.0)), FLOAT32)
  _, aux = jax.jit(layer.standalone)(random_params(layer.params()), f32(X), real=jnp.zeros((B, T), bool))
  assert (aux["moe_load"] == 0).all()
  assert aux["load_balance_loss"] == 0


@pytest.mark.slow
def test_even_routing_costs_one_times_the_weight():
  """The loss has its minimum, 1, if loads and probabilities are even."""
  layer = MoE(MoEConfig(emb_dim=4, mlp_dim=2, num_experts=4, num_experts_per_tok=1, losses=RouterLosses(weight=1.0)), FLOAT32)
  p = jax.tree.map(lambda q: jnp.zeros(q.shape), layer.params()) | {"router": {"kernel": 1e-4 * jnp.eye(4)}}
  _, aux = layer.standalone(p, jnp.eye(4)[None])
  np.testing.assert_allclose(aux["moe_load"], [0.25] * 4)
  np.testing.assert_allclose(aux["load_balance_loss"], 1.0, rtol=1e-5)


@pytest.mark.parametrize(
  ("change", "message"),
  [
    ({"num_experts_per_tok": 7}, "num_experts_per_tok=7 .*num_experts=6"),
    ({"num_experts_per_tok": 0}, "num_experts_per_tok=0 .*num_experts=6"),
    ({"n_groups": 4}, "6 experts .*n_groups=4"),
    ({"n_groups": 3, "topk_groups": 4}, "n_groups=3 .*topk_groups=4"),
    ({"n_groups": 6, "topk_groups": 1}, "topk_groups=1 .*num_experts_per_tok=2"),
    ({"router": "sigmoid"}, "router_norm and per_expert_scale .*router is sigmoid"),
    ({"router_norm": NormConfig(dim=D)}, "router_norm .*without a scale"),
  ],
)
def test_impossible_choices_are_refused(change, message):
  with pytest.raises(ValueError, match=message):
    dataclasses.replace(SOFTMAX, **change)


SHARDED = """
import sys
sys.path[:0] = {tests!r}
import jax, jax.numpy as jnp, numpy as np
from jax.sharding import NamedSharding, PartitionSpec
import conftest, test_moe
from maxtext_like.layers.context import Context
from maxtext_like.layers.moe.router_losses import RouterLosses
from maxtext_like.layers.moe.moe import MoE
assert len(jax.devices()) == 8
mesh = jax.make_mesh((2, 4), ("data", "fsdp"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
rng = np.random.default_rng(0)
x, cotangent = (jnp.asarray(rng.normal(size=(8, 3, test_moe.D)), jnp.float32) for _ in range(2))
for cfg, by in [(test_moe.SOFTMAX, "ragged_dot"), (test_moe.SOFTMAX, "tiles"), (test_moe.SIGMOID, "tiles")]:
  layer = MoE(cfg, test_moe.FLOAT32)
  p = conftest._random_params(layer.params())
  def loss(p, x):
    ctx = Context.of(x, grouped=by).collecting()
    out, aux = layer(p, x, ctx), ctx.aux
    return jnp.sum(out * cotangent), (out, aux["moe_load"], aux["clamped"])
  step = jax.jit(jax.grad(loss, (0, 1), has_aux=True))
  alone = step(p, x)
  with jax.set_mesh(mesh):
    batch = jax.device_put(x, NamedSharding(mesh, PartitionSpec(("data", "fsdp"))))
    text = step.lower(p, batch).as_text()
    together = step(p, batch)
    odd = jax.jit(layer.standalone)(p, x[:5])[0]  # 5 rows do not divide among 8 devices
  assert "manual_computation" in text or "shard_map" in text
  jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), alone, together)
  np.testing.assert_allclose(odd, alone[1][0][:5], atol=1e-5)
print("equal on 8 devices")
"""


@pytest.mark.nightly  # test_expert_parallel.py compares more meshes
def test_eight_devices_compute_what_one_does():
  here = Path(__file__).parent
  done = subprocess.run(
    [sys.executable, "-W", "error::DeprecationWarning:__main__", "-c", SHARDED.format(tests=[str(here), str(here.parent)])],
    cwd=here.parents[2],
    env=environment(8),
    capture_output=True,
    text=True,
    timeout=300,
    check=False,
  )
  assert done.returncode == 0, done.stderr[-3000:]
  assert "equal on 8 devices" in done.stdout
