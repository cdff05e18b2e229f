"""``xray`` of other people's code: modules of Flax NNX and Linen, methods, and arguments that are not arrays."""

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen, nnx

import maxtext_like
from maxtext_like.errors import UserError


class Net(nnx.Module):
  def __init__(self, rngs):
    self.dense, self.norm = nnx.Linear(3, 4, rngs=rngs), nnx.BatchNorm(4, rngs=rngs)
    self.dropout = nnx.Dropout(0.1, rngs=rngs)

  def __call__(self, x):
    return self.dropout(self.norm(self.dense(x)))

  def loss(self, x, scale):
    return scale * jnp.mean(self(x) ** 2)


class Linen(linen.Module):
  @linen.compact
  def __call__(self, x, train=False):
    return linen.BatchNorm(use_running_average=not train)(linen.Dense(4)(x))


X = jnp.arange(15.0).reshape(5, 3)


@pytest.mark.slow
def test_a_module_is_a_function_and_stays_as_it_was():
  net, twin = Net(nnx.Rngs(0)), Net(nnx.Rngs(0))
  report = maxtext_like.xray(net, X)
  assert "module.dense.kernel.value" in {tensor.path for tensor in report.tensors}
  np.testing.assert_allclose(net.norm.mean.get_value(), 0)
  np.testing.assert_allclose(report.outputs, twin(X), rtol=1e-6)
  assert float(jnp.abs(twin.norm.mean.get_value()).max()) > 0
  bad = maxtext_like.xray(net.loss, X, scale=jnp.inf).first_cause
  assert bad is not None


def test_a_module_that_is_closed_over_is_told_to_be_given():
  net = Net(nnx.Rngs(0))
  with pytest.raises(UserError, match=r"is not an argument .*BatchStat.*\n  fix: pass it as an argument"):
    maxtext_like.xray(lambda x: net(x), X)
  assert maxtext_like.xray(lambda model, x: model(x), net, X).finite


def test_a_linen_module_has_its_variables_outside():
  module = Linen()
  variables = module.init(nnx.Rngs(0).params(), X)
  report = maxtext_like.xray(module.apply, variables, X, train=True, mutable=["batch_stats"])
  assert report.finite
  assert set(report.outputs[1]) == {"batch_stats"}
  with pytest.raises(UserError, match=r"Linen is a Linen module.*\n  fix: xray\(module.apply"):
    maxtext_like.xray(module, X)


@pytest.mark.parametrize(
  ("function", "given"),
  [
    (lambda x, mode: jnp.sum(x) if mode else x, True),
    (lambda x, mode: sum(x for _ in range(mode)), 3),
    (lambda x, mode: x * mode if mode > 0 else x, 0.5),
    (lambda x, mode: x * mode["rate"] if mode["on"] else x, {"on": False, "rate": 2.0}),
    (lambda x, mode: x if mode == "a" else -x, "a"),
  ],
)
def test_what_is_no_array_stays_what_it_is(function: Any, given):
  np.testing.assert_allclose(maxtext_like.xray(function, X, mode=given).outputs, function(X, given))


def test_another_number_is_another_program():
  from maxtext_like.numerics.xray import xray

  seen = xray(lambda x, n, rate: sum(x for _ in range(n)) * (rate if rate > 0 else 1.0))
  for n, rate, times in ((2, 0.5, 1), (3, 0.5, 1.5), (3, -0.5, 3), (1, 2.0, 2)):
    np.testing.assert_allclose(seen(X, n, rate).outputs, X * times)


def test_what_is_no_function_is_told():
  wrong: Any = X
  with pytest.raises(UserError, match=r"is not a function\n  fix: write xray\(f, x\) instead of xray\(f\(x\)\)"):
    maxtext_like.xray(wrong, X)
