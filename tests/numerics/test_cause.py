"""Tests first causes: a known fault is reported with its operation, line, layer, direction and operands. Intentional infinities
are not reported."""

import functools
import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from maxtext_like.numerics.xray import xray


def line_of(fn, text):
  """Return 'test_cause.py:N' for the only line of fn that contains the text."""
  lines, start = inspect.getsourcelines(fn)
  (offset,) = (i for i, line in enumerate(lines) if text in line)
  return f"test_cause.py:{start + offset}"


def cause_of(report):
  """Return the first cause. Fail if there is none."""
  assert report.first_cause is not None, report.summary()
  return report.first_cause


def assert_names(report, fn, text, op):
  cause = cause_of(report)
  assert (cause.op, cause.source.rsplit("/", 1)[-1]) == (op, line_of(fn, text)), str(cause)
  return cause


def gated_stack(ws, x):
  def block(x, w):
    gate = x @ w["gate"]
    up = x @ w["up"]
    product = gate * up  # the fp16 hazard
    return x + product @ w["down"], None

  return lax.scan(jax.checkpoint(block), x, ws)[0]


def stack_weights(layers=11, width=5, scale=0.1):
  keys = jax.random.split(jax.random.key(0), 3)
  make = lambda k: (scale * jax.random.normal(k, (layers, width, width))).astype(jnp.float16)
  return {n: make(k) for n, k in zip(("gate", "up", "down"), keys, strict=True)}


def test_fp16_product_overflow_in_layer_7_of_a_scanned_stack():
  ws = stack_weights()
  ws["gate"] = ws["gate"].at[7].mul(6e3)
  ws["up"] = ws["up"].at[7].mul(6e3)
  x = jnp.ones((3, 5), jnp.float16)
  report = xray(gated_stack)(ws, x)
  cause = assert_names(report, gated_stack, "the fp16 hazard", "mul")
  assert (cause.layer, cause.direction, cause.masked, report.finite) == (7, "forward", False, False)
  assert cause.dtype == "float16"
  assert cause.shape == (3, 5)
  gate, up = cause.operands
  assert gate.nan == gate.inf == up.nan == up.inf == 0
  assert gate.high * up.high > 65504 > max(gate.high, up.high)
  assert str(cause).endswith("> 65504")
  assert "layer 7, forward: " in str(cause)
  wide = float(str(cause).split("-> ")[1].split(" >")[0])
  assert 65504 < wide <= 1.01 * gate.high * up.high
  assert cause.outputs == ("output",)


def beside(x, small, large):
  return x @ jnp.concatenate([small, large], axis=1)


def test_arrays_side_by_side_have_the_range_of_all():
  """On one GPU, the weights of queries, keys and values are concatenated before a product. The statistics of this operand must
  cover all of them, because the weight that overflows need not be the first."""
  given = jnp.full((2, 3), 1e20), jnp.full((3, 4), 1e-3), jnp.full((3, 5), 1e30).at[0, 0].set(-1)
  cause = assert_names(xray(beside)(*given), beside, "concatenate", "dot_general")
  weights = cause.operands[1]
  np.testing.assert_allclose([weights.high, weights.low], [1e30, 1e-3], rtol=1e-6)
  assert weights.negative == 1
  assert "1.0e20 @ 1.0e30 -> inf" in str(cause)


def test_the_forward_cause_is_named_when_the_gradient_is_xrayed_too():
  ws = stack_weights()
  ws["gate"] = ws["gate"].at[7].mul(6e3)
  ws["up"] = ws["up"].at[7].mul(6e3)
  loss = lambda ws, x: gated_stack(ws, x).astype(jnp.float32).sum()
  report = xray(jax.value_and_grad(loss))(ws, jnp.ones((3, 5), jnp.float16))
  cause = assert_names(report, gated_stack, "the fp16 hazard", "mul")
  assert (cause.layer, cause.direction) == (7, "forward")
  assert "output[0]" in cause.outputs


def residual_stack(ws, x):
  def block(x, w):
    return x + x * w, None  # cotangents grow by 1 + w

  return lax.scan(block, x, ws)[0]


def test_finite_forward_with_overflowing_backward_names_the_backward_and_its_layer():
  ws = jnp.asarray([1.0, 20.0, 1.0, 30.0, 1.0], jnp.float16)[:, None] * jnp.ones((5, 3), jnp.float16)
  loss = lambda ws, x: 3e3 * residual_stack(ws, x).astype(jnp.float32).sum()
  x = jnp.full((3,), 1e-3, jnp.float16)
  report = xray(jax.value_and_grad(loss, argnums=1))(ws, x)
  cause = cause_of(report)
  assert np.isfinite(report.outputs[0])
  # 3e3 -> (layer 4) 6e3 -> (layer 3) 1.86e5 > 65504: cotangents overflow first at layer 3.
  assert (cause.layer, cause.direction) == (3, "backward"), str(cause)
  assert cause.loops[0].reverse
  assert cause.outputs == ("output[1]",)


def test_log_of_zero():
  fn = lambda x: jnp.log(x)  # log
  cause = assert_names(xray(fn)(jnp.asarray([1.0, 0.0, 2.0])), fn, "# log", "log")
  assert (cause.result, cause.nan, cause.inf) == ("-inf", 0, 1)
  assert cause.explanation == "log(0) -> -inf"


def test_zero_over_zero_masked_by_nan_to_num_is_a_masked_fault():
  def mean(x, mask):
    ratio = (x * mask).sum() / mask.sum()
    return jnp.nan_to_num(ratio)

  report = xray(mean)(jnp.ones(3), jnp.zeros(3))
  cause = assert_names(report, mean, "ratio =", "div")
  assert cause.masked
  assert report.finite
  assert cause.explanation == "0 / 0 -> nan"
  assert "masked fault" in str(cause)


def test_an_earlier_masked_fault_does_not_take_the_blame():
  def fn(x):
    safe = jnp.where(x > 0, jnp.log(x), 0.0)  # harmless: masked
    return safe + jnp.exp(x * 1e3)  # the real one

  report = xray(fn)(jnp.asarray([0.0, 1.0]))
  cause = assert_names(report, fn, "the real one", "exp")
  assert not cause.masked
  assert [f.op for f in report.faults] == ["log", "exp"]
  assert [f.masked for f in report.faults] == [True, False]


def test_sqrt_gradient_at_zero():
  norm = lambda x: jnp.sqrt((x * x).sum())  # sqrt
  report = xray(jax.grad(norm))(jnp.zeros(3))
  cause = assert_names(report, norm, "# sqrt", "div")
  assert cause.result == "inf"
  assert cause.explanation.endswith(" / 0 -> inf")


@pytest.mark.parametrize(
  ("value", "to", "expected"),
  [
    (7e4, jnp.float16, "inf"),
    (3.4e38, jnp.bfloat16, "inf"),
    (470.0, jnp.float8_e4m3fn, "nan"),
    (7e4, jnp.float8_e5m2, "inf"),
  ],
)
def test_narrowing_casts(value, to, expected):
  fn = lambda x: x.astype(to)  # cast
  cause = assert_names(xray(fn)(jnp.asarray([1.0, value])), fn, "# cast", "convert_element_type")
  assert cause.result == expected
  assert str(np.dtype(to)) in cause.explanation
  assert xray(fn)(jnp.asarray([1.0, 440.0])).first_cause is None


def test_exp_overflow_and_negative_logarithm():
  cause = cause_of(xray(lambda x: jnp.exp(x))(jnp.asarray([1.0, 90.0])))
  assert (cause.op, cause.result) == ("exp", "inf")
  cause = cause_of(xray(lambda x: jnp.log(x))(jnp.asarray([1.0, -2.0])))
  assert (cause.op, cause.result) == ("log", "nan")
  assert "1 negative" in cause.explanation


@pytest.mark.parametrize(("history", "approximate"), [(64, False), (4, True)])
def test_fault_inside_iteration_k_of_a_while(history, approximate):
  def fn(x):
    def body(state):
      i, x = state
      return i + 1, jnp.where(i == 11, x / (i - 11), x * 1.5)  # division

    return lax.while_loop(lambda s: s[0] < 17, body, (0, x))[1]

  report = xray(fn, while_history=history)(jnp.asarray([1.0, 2.0]))
  # x / (i - 11) is computed in every iteration and selected in iteration 11.
  cause = assert_names(report, fn, "# division", "div")
  (loop,) = cause.loops
  assert (loop.kind, loop.index, loop.length, loop.approximate) == ("while", 11, 17, approximate)


def test_fault_only_in_the_branch_taken():
  def fn(i, x):
    return lax.switch(i, [lambda x: x + 1, lambda x: jnp.log(x * 0), lambda x: x / 0], x)

  assert xray(fn)(0, jnp.ones(3)).first_cause is None
  assert cause_of(xray(fn)(1, jnp.ones(3))).op == "log"
  assert cause_of(xray(fn)(2, jnp.ones(3))).op == "div"


def attention(scores, mask):
  scores = jnp.where(mask, scores, -jnp.inf)
  shifted = scores - scores.max(-1, keepdims=True)  # shift
  weights = jnp.exp(shifted)
  return weights / weights.sum(-1, keepdims=True)


@pytest.mark.slow
def test_intentional_infinities_are_clean():
  seen = functools.partial(xray, light=True)
  mask = jnp.tril(jnp.ones((4, 4), bool))
  scores = jax.random.normal(jax.random.key(0), (4, 4))
  for fn in (
    attention,
    lambda s, m: jax.nn.softmax(s, where=m),
    lambda s, m: jax.nn.softmax(jnp.where(m, s, -jnp.inf)),
  ):
    report = seen(fn)(scores, mask)
    assert report.faults == (), report.summary()
    report = seen(jax.grad(lambda s, m, fn=fn: (fn(s, m) ** 2).sum()))(scores, mask)
    assert report.faults == (), report.summary()
  closed = np.where(mask, 0.0, -np.inf).astype(np.float32)  # an additive mask, closed over
  assert seen(lambda s: jax.nn.softmax(s + closed))(scores).faults == ()
  assert seen(lambda s: jnp.where(mask, s, -jnp.inf))(scores).faults == ()
  assert seen(lambda s: lax.reduce(s, -jnp.inf, lax.max, (0, 1)))(scores).faults == ()
  assert seen(lambda s: lax.reduce_window(s, -jnp.inf, lax.max, (2, 2), (2, 2), "SAME"))(scores).faults == ()


def test_a_fully_masked_row_is_found_where_infinity_meets_infinity():
  mask = jnp.tril(jnp.ones((4, 4), bool)).at[2].set(False)
  report = xray(attention)(jnp.ones((4, 4)), mask)
  cause = assert_names(report, attention, "# shift", "sub")
  assert cause.result == "nan"
  assert cause.explanation == "inf - inf -> nan"


def test_an_online_softmax_carries_its_infinite_start_without_a_fault():
  def fn(scores):
    def body(carry, s):
      top, total = carry
      new = jnp.maximum(top, s.max())
      return (new, total * jnp.exp(top - new) + jnp.exp(s - new).sum()), None

    return lax.scan(body, (jnp.float32(-jnp.inf), jnp.float32(0)), scores)[0]

  assert xray(fn)(jnp.ones((5, 3))).faults == ()
  report = xray(fn)(jnp.full((5, 3), -jnp.inf))
  assert cause_of(report).op == "input"  # an infinite argument is not a constant, so it is reported


def test_an_overflow_beside_a_mask_is_not_taken_for_the_mask():
  def fn(s):
    masked = jnp.where(s > 0, s, -jnp.inf)
    return jnp.exp(masked)  # too large

  assert_names(xray(fn)(jnp.asarray([-1.0, 1.0, 100.0])), fn, "# too large", "exp")


def test_adding_two_mask_constants_is_found():
  low = float(jnp.finfo(jnp.bfloat16).min)
  fn = lambda s: (s + low) + low  # doubled
  cause = assert_names(xray(fn)(jnp.ones(3, jnp.bfloat16)), fn, "# doubled", "add")
  assert cause.result == "-inf"


def test_nonfinite_inputs_are_named_by_their_path():
  params = {"mlp": {"up": jnp.ones((2, 2)).at[0, 1].set(jnp.nan)}}
  report = xray(lambda params, x: x @ params["mlp"]["up"])(params, jnp.ones((3, 2)))
  cause = cause_of(report)
  assert (cause.op, cause.path, cause.nan) == ("input", "params['mlp']['up']", 1)
  assert "1 NaN of 4 numbers" in str(cause)


def test_a_nan_constant_becomes_a_fault_when_it_is_selected():
  fn = lambda x: jnp.where(x > 0, x, jnp.nan)
  assert xray(fn)(jnp.ones(3)).faults == ()
  assert cause_of(xray(fn)(jnp.zeros(3))).op == "select_n"
  buffer = lambda x: lax.dynamic_update_slice(jnp.full(5, jnp.nan), x, (1,))
  assert xray(buffer)(jnp.ones(3)).first_cause is None


def test_token_ids_and_keys_are_never_reported():
  def fn(ids, key, table):
    drop = jax.random.bernoulli(key, 0.5, (3,))
    return jnp.where(drop, table[ids], 0.0), ids * 2, jax.random.split(key)

  report = xray(fn)(jnp.asarray([2**31 - 1, 0, 1], jnp.int32), jax.random.key(0), jnp.ones(3))
  floats = ("float32",)
  assert {t.dtype for t in report.tensors} <= set(floats)
  assert [t.path for t in report.tensors if t.op == "input"] == ["table"]


def test_nested_scans_compare_iterations_outermost_first():
  def fn(x):
    def outer(c, i):
      def inner(c, j):
        return c / (10 * i + j - 12), None  # zero at outer 1, inner 2

      return lax.scan(inner, c, jnp.arange(4))[0], None

    return lax.scan(outer, x, jnp.arange(3))[0]

  cause = assert_names(xray(fn)(jnp.ones(2)), fn, "zero at", "div")
  assert [loop.index for loop in cause.loops] == [1, 2]
  assert "layer 1, layer 2" in str(cause)


def test_layers_do_not_blame_each_other_through_stacked_residuals():
  """The backward pass reads residuals of all layers from stacked arrays. An infinity that another layer stored there is not the
  cause of a fault."""

  # In the forward pass, layer 5 has a masked overflow whose value is saved. In the backward pass, layer 8 overflows for another
  # reason, and it runs before layer 5.
  @jax.custom_vjp
  def unstable(x, scale):
    return jnp.where(scale < 1e30, x, 0 * x)

  def forward(x, scale):
    product = x * scale
    return x + jnp.where(jnp.isfinite(product), 0, 0) * scale, (product, scale)

  def backward(saved, g):
    product, scale = saved
    return g * jnp.where(scale == 40, product * 1e37, 1), scale * 0  # 400 * 1e37

  unstable.defvjp(forward, backward)

  def fn(x, scales):
    return lax.scan(lambda c, s: (unstable(c, s), None), x, scales)[0].sum()

  scales = jnp.ones(10).at[5].set(3e38).at[8].set(40.0)
  report = xray(jax.grad(fn))(jnp.full((2,), 10.0), scales)
  assert (5, "forward", True) in {(f.layer, f.direction, f.masked) for f in report.faults}
  assert (cause_of(report).layer, cause_of(report).direction) == (8, "backward"), report.summary()
