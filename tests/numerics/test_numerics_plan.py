"""Tests X-ray with key tensors only: it measures fewer tensors and reports exactly the same first cause."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from maxtext_like.numerics import plan
from maxtext_like.numerics.xray import xray
from tests.tiers import slow


def gated(ws, x):
  def block(x, w):
    gate, up = x @ w["gate"] + 0.5, x @ w["up"]
    product = (gate * 2 - 1) * up * 1.5
    return x + product @ w["down"], None

  return lax.scan(jax.checkpoint(block), x, ws)[0].astype(jnp.float32).sum()


def stack():
  keys = jax.random.split(jax.random.key(0), 3)
  make = lambda key: (0.1 * jax.random.normal(key, (7, 5, 5))).astype(jnp.float16)
  ws = {name: make(key) for name, key in zip(("gate", "up", "down"), keys, strict=True)}
  return ws | {name: ws[name].at[4].mul(6e3) for name in ("gate", "up")}


def masked(x):
  hidden = jnp.where(x > 0, jnp.log(x), 0.0) * 2 + 1
  return jnp.nan_to_num(hidden) + jnp.exp(x * 1e3) * 3 - 1


def sure_and_unsure(x):
  first = jnp.log(x) + 1  # masked by the clip, whose result is read only by an addition
  clipped = jnp.clip(first, -1, 1) + 0.5
  return (clipped * 2 + x / (x - x)) * 3


@pytest.mark.parametrize(
  ("fn", "args"),
  [
    slow(jax.value_and_grad(gated), (stack(), jnp.ones((3, 5), jnp.float16))),
    (masked, (jnp.asarray([0.0, 1.0]),)),
    (sure_and_unsure, (jnp.asarray([0.0, 2.0]),)),
  ],
)
def test_the_cause_is_that_of_the_full_x_ray(fn, args):
  full, thin = xray(fn)(*args), xray(fn, key_tensors_only=True)(*args)
  assert str(thin.first_cause) == str(full.first_cause)
  assert thin.first_cause is not None
  assert full.first_cause is not None
  assert (thin.finite, thin.first_cause.path) == (full.finite, full.first_cause.path)
  count = lambda report: sum(t.op not in ("input", "tag") for t in report.tensors)
  assert count(thin) < count(full)


def by_norm(before, inside):
  def scaled(x):
    x = before(x)
    with jax.named_scope("norms"):
      norm = jnp.sum(jnp.abs(inside(x)))
    return x / norm + 1

  return scaled


@pytest.mark.parametrize("faulty", ["before", "inside"])
def test_the_cause_is_that_of_the_full_x_ray_before_and_in_a_skipped_part(faulty):
  fn = by_norm(**{"before": jnp.sin, "inside": jnp.cos} | {faulty: lambda x: jnp.sqrt(x - 2)})
  x = jnp.asarray([1.0, 3.0, 4.0])
  full, thin = xray(fn)(x), xray(fn, key_tensors_only=True, skipped="^norms ")(x)
  assert thin.first_cause is not None
  assert str(thin.first_cause) == str(full.first_cause)
  assert thin.finite == full.finite
  paths = lambda report: {t.path.split("/")[0] for t in report.tensors}
  assert "norms" in paths(full)
  assert "norms" not in paths(thin)


def test_an_equation_of_jax_has_the_source_of_its_caller():
  jax.jit(jnp.where)(jnp.ones(2) > 0, jnp.ones(2), 0.0)
  cause = xray(lambda x: jnp.where(x > 2, x, jnp.nan) * 2)(jnp.ones(2)).first_cause
  assert cause is not None
  assert cause.source.rsplit(":", 1)[0].endswith("test_numerics_plan.py")


def test_intentional_infinities_are_clean_and_finite_programs_take_one_look():
  """Intentional infinities are not reported. A finite program is measured once, without a second program."""
  mask = jnp.tril(jnp.ones((4, 4), bool))

  def attention(scores):
    weights = jnp.exp((scores := jnp.where(mask, scores, -jnp.inf)) - scores.max(-1, keepdims=True))
    return (weights / weights.sum(-1, keepdims=True)) @ jnp.ones((4, 2))

  assert xray(attention, key_tensors_only=True)(jnp.ones((4, 4))).faults == ()
  looks = []
  report = xray(lambda x: jnp.tanh(x @ x) + 1, key_tensors_only=True, before_run=looks.append)(jnp.ones((3, 3)))
  assert report.finite
  assert len(looks) == 1


def test_a_recurrent_network_of_flax_at_one_time_step():
  model = nn.RNN(nn.SimpleCell(features=3, activation_fn=lambda x: jnp.sqrt(x * x) * 0.1))
  x = jnp.ones((2, 6, 4)).at[1, 4].set(3e38)
  variables = model.init(jax.random.key(0), x)
  cause = xray(lambda v, x: model.apply(v, x), key_tensors_only=True)(variables, x).first_cause
  assert cause is not None
  assert (cause.layer, cause.direction) == (4, "forward")
  assert cause.op in ("dot_general", "add", "mul")


def test_tags_by_row_give_what_numpy_gives():
  x = jnp.arange(-6.0, 18.0).reshape(4, 3, 2)
  report = xray(lambda x: plan.tag(x * 2, "gradient", "stack.w", by_row=True).sum(), key_tensors_only=True)(x)
  (tag,) = (t for t in report.tensors if t.op == "tag")
  assert (tag.name, tag.direction, tag.shape, tag.loops) == ("stack.w", "gradient", (3, 2), ("rows",))
  doubled = 2 * np.asarray(x)
  np.testing.assert_allclose(tag.stats.max, np.abs(doubled).max((1, 2)))
  np.testing.assert_allclose(tag.stats.rms, np.sqrt((doubled**2).mean((1, 2))), rtol=1e-6)
  assert tag.stats.count.tolist() == [6] * 4
  assert tag.stats.zero.tolist() == [0, 1 / 6, 0, 0]
