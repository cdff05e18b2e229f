"""Tests the auxiliary losses of routers: every definition against loops over tokens, for both routers, with padding."""

import dataclasses
import functools
from typing import get_args

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from maxtext_like.layers.attention.masks import Tokens
from maxtext_like.layers.context import Context
from maxtext_like.layers.moe import load_balance
from maxtext_like.layers.moe.load_balance import LOAD, NAMES
from maxtext_like.layers.moe.moe import MoE, MoEConfig
from maxtext_like.layers.moe.router_losses import LOSS, Z_LOSS, Definition, RouterLosses
from maxtext_like.layers.precision import Precision

L, B, T, D, E, K = 3, 4, 7, 5, 6, 2
SOFTMAX = MoEConfig(emb_dim=D, mlp_dim=3, num_experts=E, num_experts_per_tok=K, activation="silu")
SIGMOID = dataclasses.replace(SOFTMAX, router="sigmoid", n_groups=3, topk_groups=2)
REAL = np.arange(T) < np.array([[7], [4], [1], [0]])  # the last row is only padding
WEIGHT, Z_WEIGHT = 0.1, 0.01


def softmax(x):
  z = np.exp(x - x.max())
  return z / z.sum()


def largest(x):
  return set(np.argsort(-x, kind="stable")[:K].tolist())


def routed(router, logits, bias):
  """Return the experts that the router selects for a token."""
  if router == "softmax":
    return largest(logits)
  biased = 1 / (1 + np.exp(-logits)) + bias
  groups = biased.reshape(3, 2).sum(1)
  kept = np.repeat(groups >= np.sort(groups)[-2], 2)
  return largest(np.where(kept, biased, -np.inf))


def probabilities(definition, router, logits, bias):
  """Return the probabilities and the choices that a definition uses for one token."""
  if router == "softmax":
    return softmax(logits), largest(logits)
  scores = 1 / (1 + np.exp(-logits))
  own = routed(router, logits, bias)
  return {
    "maxtext": (softmax(scores + bias), own),
    "huggingface": (softmax(logits), largest(logits)),
    "deepseek_sequence": (scores / scores.sum(), largest(scores)),
    "switch": (scores / scores.sum(), own),
  }[definition]


def written_out(definition, router, logits_LBTE, bias_LE):
  """Return the loss without its weight, computed one token at a time."""
  counts, sums, tokens = np.zeros((L, B, E)), np.zeros((L, B, E)), REAL.sum(1)
  for layer, b, t in np.ndindex(L, B, T):
    if REAL[b, t]:
      p, chosen = probabilities(definition, router, logits_LBTE[layer, b, t], bias_LE[layer])
      sums[layer, b] += p
      for e in chosen:
        counts[layer, b, e] += 1
  if definition in ("maxtext", "deepseek_sequence"):
    total = 0.0
    for layer in range(L):
      rows = [E * sum(counts[layer, b] / tokens[b] * sums[layer, b] / tokens[b]) for b in range(B) if tokens[b]]
      total += np.mean(rows)
    return total / L if definition == "maxtext" else total / K
  if definition == "huggingface":  # the tokens of all layers, concatenated
    n = L * tokens.sum()
    return E * sum(counts.sum((0, 1)) / n * sums.sum((0, 1)) / n)
  n = tokens.sum()
  return sum(E * sum(counts[layer].sum(0) / (n * K) * sums[layer].sum(0) / n) for layer in range(L))


def statistics(cfg, params, x_LBTD, rows=slice(None)):
  """Return the statistics of all layers, stacked. Each layer has a separate input; ``rows`` selects rows of the batch."""
  found = []
  for p, x in zip(params, x_LBTD, strict=True):
    ctx = Context.of(x[rows], tokens=Tokens(jnp.asarray(REAL[rows], jnp.int32))).collecting()
    MoE(cfg, Precision(dtype="float32"))(p, x[rows], ctx)
    found.append({name: ctx.aux[name] for name in NAMES if name in ctx.aux})
  return jax.tree.map(lambda *values: jnp.stack(values), *found)


@pytest.fixture(scope="module")
def case():
  rng = np.random.default_rng(3)
  x = jnp.asarray(rng.normal(size=(L, B, T, D)), jnp.float32)
  kernels, biases = rng.normal(size=(L, D, E)), rng.normal(size=(L, E)) * 0.2

  def params(router):
    layers = []
    for kernel, bias in zip(kernels, biases, strict=True):
      p = jax.tree.map(lambda q: jnp.zeros(q.shape), MoE(SIGMOID if router == "sigmoid" else SOFTMAX, Precision()).params())
      p["router"] = {"kernel": jnp.asarray(kernel, jnp.float32)}
      p["router"] |= {"bias": jnp.asarray(bias, jnp.float32)} if router == "sigmoid" else {}
      layers.append(p)
    return layers

  logits = np.einsum("lbtd,lde->lbte", np.asarray(x, np.float64), kernels)
  return x, params, logits, biases


@pytest.mark.parametrize("router", ["softmax", "sigmoid"])
@pytest.mark.parametrize("definition", get_args(Definition))
def test_a_definition_against_a_loop_over_tokens(definition, router, case):
  x, params, logits, biases = case
  losses = RouterLosses(definition, WEIGHT, Z_WEIGHT)
  cfg = dataclasses.replace(SIGMOID if router == "sigmoid" else SOFTMAX, losses=losses)
  if router == "sigmoid":  # biased and unbiased choices must differ, or the test could not tell definitions apart
    both = [(routed(router, logits[i], biases[i[0]]), largest(logits[i])) for i in np.ndindex(L, B, T)]
    assert any(own != unbiased for own, unbiased in both)
  found = load_balance.totals(losses, statistics(cfg, params(router), x), K)
  np.testing.assert_allclose(found[LOSS], WEIGHT * written_out(definition, router, logits, biases), rtol=2e-6)
  squares = np.log(np.exp(logits).sum(-1))[:, REAL] ** 2
  np.testing.assert_allclose(found[Z_LOSS], Z_WEIGHT * squares.mean(1).sum(), rtol=2e-6)


@pytest.mark.parametrize("definition", ["maxtext", "huggingface"])
@pytest.mark.slow
def test_parts_of_a_batch_add_up_to_it_with_their_gradients(definition, case):
  """The sum over parts of a batch equals the loss of the batch, although the parts have unequal numbers of tokens. A definition
  that needs the load of the complete batch gets it for each part."""
  x, params, _, _ = case
  losses = RouterLosses(definition, WEIGHT, Z_WEIGHT)
  cfg = dataclasses.replace(SIGMOID, losses=losses)
  whole = statistics(cfg, params("sigmoid"), x)
  load = whole[LOAD] if losses.needs_batch_load else None

  @functools.partial(jax.jit, static_argnums=1)
  def total(p, rows=None, load=None):
    rows = slice(*(rows or (0, B)))
    real, found = REAL[rows], load_balance.totals(losses, statistics(cfg, p, x, rows), K, load)
    share = {True: real.any(1).sum() / REAL.any(1).sum(), False: real.sum() / REAL.sum()}
    return sum(value * share[name in losses.by_row] for name, value in found.items())

  p = params("sigmoid")
  expected, gradient = jax.value_and_grad(total)(p)
  parts = [jax.value_and_grad(total)(p, rows, load) for rows in ((0, 1), (1, B))]
  np.testing.assert_allclose(sum(value for value, _ in parts), expected, rtol=1e-6)
  added = jax.tree.map(jnp.add, parts[0][1], parts[1][1])
  jax.tree.map(lambda found, wanted: np.testing.assert_allclose(found, wanted, atol=1e-7), added, gradient)
  assert all(np.abs(layer["router"]["kernel"]).max() > 1e-3 for layer in gradient)
  if losses.needs_batch_load:  # without the load of the batch the parts would not add up
    alone = sum(total(p, rows) for rows in ((0, 1), (1, B)))
    assert abs(alone - expected) > 1e-3 * expected


def test_an_even_load_costs_the_smallest_loss_of_its_definition():
  """Each token has two of four experts. The loss per layer is k for definitions that count choices, and 1 for those that count
  shares."""
  probs = jnp.full((1, 6, 4), 0.25)
  chosen = jnp.asarray([[[0, 1], [2, 3], [0, 2], [1, 3], [0, 3], [1, 2]]])
  smallest: dict[Definition, float] = {"maxtext": 2.0, "huggingface": 2.0, "deepseek_sequence": 3.0, "switch": 3.0}
  for definition, loss in smallest.items():
    losses = RouterLosses(definition, 1.0)
    one = load_balance.statistics(losses, jnp.ones((1, 6)), probs, chosen)
    np.testing.assert_allclose(
      load_balance.totals(losses, {n: jnp.stack([x] * 3) for n, x in one.items()}, 2)[LOSS], loss, rtol=1e-6
    )


@pytest.mark.parametrize("losses", [RouterLosses(name, 0.0) for name in get_args(Definition)])
def test_a_weight_of_zero_leaves_nothing_behind(losses):
  assert load_balance.statistics(losses, jnp.ones((1, 2)), jnp.ones((1, 2, 3)), jnp.zeros((1, 2, 1), jnp.int32)) == {}
  assert load_balance.totals(losses, {}, 1) == {}
  assert not losses.by_row
  assert not losses.needs_batch_load
