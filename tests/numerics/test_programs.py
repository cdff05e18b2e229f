"""Tests X-ray on programs of other libraries: outputs equal those of the plain program, every tensor is measured, and faults
are found."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax import lax

from maxtext_like.numerics.xray import xray


def same(report, fn, *args, rtol=2e-6):
  """Compare the outputs of the report with those of the plain program. XLA may fuse and round differently. Sums may cancel, so
  the tolerance is relative to the largest magnitude."""
  plain = jax.jit(fn)(*args)
  assert jax.tree.structure(plain) == jax.tree.structure(report.outputs)
  for a, b in zip(jax.tree.leaves(plain), jax.tree.leaves(report.outputs), strict=True):
    assert (a.shape, a.dtype) == (b.shape, b.dtype)
    if jnp.issubdtype(a.dtype, jnp.floating):
      a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
      largest = np.abs(a[np.isfinite(a)]).max(initial=1)
      np.testing.assert_allclose(b, a, rtol=rtol, atol=2e-6 * largest)
    else:
      assert (jax.random.key_data(a) == jax.random.key_data(b)).all() if "key" in str(a.dtype) else (a == b).all()


def apply_linen(model, params, x) -> jax.Array:
  y = model.apply({"params": params}, x)
  assert isinstance(y, jax.Array)
  return y


def cause_path(report):
  assert report.first_cause is not None
  return report.first_cause.path


def find(report, op, direction=None):
  return [t for t in report.tensors if t.op == op and direction in (None, t.direction)]


def test_statistics_of_each_iteration_equal_a_loop_written_out():
  ws = jax.random.normal(jax.random.key(0), (5, 3, 3))
  x = jax.random.normal(jax.random.key(1), (2, 3))
  fn = lambda ws, x: lax.scan(lambda c, w: (jnp.sin(c @ w), c.sum()), x, ws)
  report = xray(fn)(ws, x)
  same(report, fn, ws, x)
  (dot,) = find(report, "dot_general")
  products = []
  for w in ws:
    products.append(np.asarray(x @ w))
    x = jnp.sin(x @ w)
  assert dot.loops == ("scan",)
  assert dot.shape == (2, 3)
  np.testing.assert_allclose(dot.stats.max, [np.abs(p).max() for p in products], rtol=1e-5)
  np.testing.assert_allclose(dot.stats.rms, [np.sqrt((p**2).mean()) for p in products], rtol=1e-5)
  np.testing.assert_allclose(dot.stats.min_nonzero, [np.abs(p).min() for p in products], rtol=1e-4)
  np.testing.assert_allclose(dot.stats.headroom["float16"], [np.log2(65504 / np.abs(p).max()) for p in products], rtol=1e-4)
  assert dot.stats.count.tolist() == [6] * 5
  assert dot.direction == "forward"
  assert dot.source.endswith(".py:" + dot.source.rsplit(":", 1)[1])


def test_a_reverse_scan_reports_by_row_of_xs_not_by_time():
  fn = lambda xs: lax.scan(lambda c, x: (c * x, None), jnp.float32(1), xs, reverse=True)[0]
  report = xray(fn)(jnp.asarray([2.0, 3.0, 5.0]))
  assert find(report, "mul")[0].stats.max.tolist() == [30.0, 15.0, 5.0]


class Mixer(nn.Module):
  @nn.compact
  def __call__(self, x):
    x = nn.LayerNorm(use_bias=False)(x)
    x = nn.MultiHeadDotProductAttention(num_heads=2, use_bias=False)(x, mask=nn.make_causal_mask(x[..., 0]))
    return nn.Dense(7)(nn.relu(nn.Dense(11)(x)))


@pytest.mark.slow
def test_a_linen_module_with_an_optax_step():
  model, opt = Mixer(), optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(1e-2, momentum=0.9))
  x = jax.random.normal(jax.random.key(0), (2, 5, 6))
  variables = model.init(jax.random.key(1), x)
  state = opt.init(variables["params"])

  def step(params, state, x):
    loss, grads = jax.value_and_grad(lambda p: jnp.square(apply_linen(model, p, x)).mean())(params)
    updates, state = opt.update(grads, state, params)
    return optax.apply_updates(params, updates), state, loss

  seen = xray(step, light=True)
  report = seen(variables["params"], state, x)
  assert report.finite
  assert not [f for f in report.faults if not f.masked]
  same(report, step, variables["params"], state, x, rtol=1e-4)
  assert {t.direction for t in report.tensors} >= {"forward", "backward", "update", "input"}
  assert any("Dense_1" in t.path for t in find(report, "dot_general", "backward"))
  assert any("kernel" in t.path for t in find(report, "input"))
  broken = jax.tree.map(lambda p: p * 1e25, variables["params"])
  cause = seen(broken, state, x).first_cause
  assert cause is not None
  assert "flax" in cause.source or "test_programs" in cause.source


@pytest.mark.slow
def test_an_nnx_module_split_and_merged():
  model = nnx.Sequential(nnx.Linear(3, 5, rngs=nnx.Rngs(0)), nnx.relu, nnx.Linear(5, 2, rngs=nnx.Rngs(1)))
  graph, state = nnx.split(model)
  fn = lambda state, x: nnx.merge(graph, state)(x).sum()
  x = jnp.ones((4, 3))
  report = xray(jax.value_and_grad(fn))(state, x)
  same(report, jax.value_and_grad(fn), state, x)
  assert len(find(report, "dot_general", "forward")) == 2
  assert len(find(report, "dot_general", "backward")) >= 2
  opt = optax.adamw(1e-2)
  update = lambda grads, moments, params: opt.update(grads, moments, params)
  moments = opt.init(state)
  report = xray(update, light=True)(report.outputs[1], moments, state)
  assert report.finite
  report = xray(update, light=True)(jax.tree.map(lambda g: g * jnp.inf, report.outputs[0]), moments, state)
  assert cause_path(report).startswith("grads")


@pytest.mark.slow
def test_library_functions():
  x = jnp.linspace(-2, 2, 7)
  for fn in (
    jax.nn.softplus,
    jax.nn.log_softmax,
    jax.scipy.special.logsumexp,
    jax.scipy.special.gammaln,
    jax.scipy.stats.norm.logcdf,
    jax.nn.silu,
    jnp.fft.fft,
    lambda x: jnp.linalg.solve(jnp.eye(7) + 0.1 * jnp.outer(x, x), x),
    lambda x: jnp.sort(x)[::-1] @ x,
  ):
    report = xray(fn, light=True)(x)
    plain = jax.jit(fn)(x)
    np.testing.assert_allclose(np.asarray(plain), np.asarray(report.outputs), rtol=1e-5, atol=2e-6)
    assert report.finite == bool(np.isfinite(plain).all())
  assert "custom_linear_solve" in xray(lambda x: jnp.linalg.solve(jnp.eye(7), x))(x).opaque


def test_an_adaptive_ode_loop_with_cond_and_fori():
  def solve(y):
    def step(state):
      t, y, h = state
      k = lax.fori_loop(0, 2, lambda i, k: -50 * (y + 0.5 * h * k), jnp.zeros_like(y))
      error = jnp.abs(h * k).max()
      return lax.cond(error < 0.5, lambda: (t + h, y + h * k, h * 1.1), lambda: (t, y, h / 2))

    return lax.while_loop(lambda s: s[0] < 0.2, step, (jnp.float32(0), y, jnp.float32(0.1)))

  y = jnp.asarray([1.0, 2.0])
  report = xray(solve)(y)
  same(report, solve, y)
  assert report.finite
  muls = [t for t in report.tensors if t.loops == ("while", "scan")]
  assert muls
  assert muls[0].stats.max.shape[1] == 2
  branches = [t for t in report.tensors if "branch0" in t.path and t.loops == ("while",)]
  taken = branches[0].stats.count > 0
  assert taken.any()
  assert not taken.all()


def test_jit_vmap_grad_remat_and_custom_derivatives_nested():
  @jax.custom_jvp
  def cube(x):
    return x**3

  cube.defjvp(lambda p, t: (cube(*p), 3 * p[0] ** 2 * t[0]))

  @jax.custom_vjp
  def clip(x):
    return jnp.clip(x, -1, 1)

  clip.defvjp(lambda x: (clip(x), None), lambda _, g: (g,))

  @jax.jit
  def inner(w, x):
    return clip(cube(jax.checkpoint(jnp.tanh)(x @ w)).sum())

  fn = jax.vmap(jax.value_and_grad(inner), (None, 0))
  w, x = jax.random.normal(jax.random.key(0), (3, 5)), jax.random.normal(jax.random.key(1), (4, 2, 3))
  report = xray(fn)(w, x)
  same(report, fn, w, x)
  assert any(t.shape[:1] == (4,) and t.direction == "backward" for t in report.tensors)
  assert report.opaque == {}


def test_ragged_dot_scatter_sort_and_complex():
  def fn(x, w, sizes):
    y = lax.ragged_dot(x, w, sizes)
    z = jnp.zeros(4).at[jnp.asarray([0, 2])].add(y[:2, 0])
    return lax.top_k(z, 2)[0] + jnp.abs(jnp.fft.ifft(z.astype(jnp.complex64)))[:2]

  args = jnp.ones((6, 3)), jnp.ones((2, 3, 5)), jnp.asarray([2, 4])
  report = xray(fn)(*args)
  same(report, fn, *args)
  assert find(report, "ragged_dot_general")
  assert find(report, "scatter-add")
  assert any(t.dtype == "complex64" for t in report.tensors)


def test_light_and_only_measure_less_and_find_the_same_cause():
  fn = lambda x: jnp.exp(x * 100.0) + jnp.sin(x * x)
  x = jnp.asarray([1.0, 0.5])
  causes = {str(seen(x).first_cause) for seen in (xray(fn), xray(fn, light=True), xray(fn, only="sin"))}
  assert len(causes) == 1
  assert {t.level for t in xray(fn, light=True)(x).tensors} == {"light"}
  levels = {t.op: t.level for t in xray(lambda x: jnp.cosh(x @ x), only="cosh")(jnp.ones((2, 2))).tensors}
  assert levels["dot_general"] == "light"
  with pytest.raises(ValueError, match="at least 2"):
    xray(fn, while_history=1)


def test_programs_are_reused_and_static_leaves_are_passed_on():
  calls = []

  def fn(x, mode, *, scale):
    calls.append(mode)
    return x * 2 if mode == "double" else x * scale

  seen = xray(fn)
  np.testing.assert_array_equal(seen(jnp.ones(2), "double", scale=3.0).outputs, [2, 2])
  np.testing.assert_array_equal(seen(jnp.zeros(2), "double", scale=4.0).outputs, [0, 0])
  assert calls == ["double"]
  np.testing.assert_array_equal(seen(jnp.ones(2), "scaled", scale=5.0).outputs, [5, 5])
  assert calls == ["double", "scaled"]


def test_no_host_callback_is_left_in_the_program():
  text = xray(lambda x: lax.scan(lambda c, _: (jnp.sin(c), None), x, None, length=3)[0]).lower(jnp.ones(3)).as_text()
  assert "callback" not in text


@pytest.mark.slow
def test_an_equation_knows_the_inputs_that_it_reads():
  """Inputs are traced through casts, slices, rows of a scan, calls and the backward pass, but not through computations."""

  def loss(p, x):
    def body(x, w):
      return jnp.tanh(jax.jit(lambda w: x @ w.astype(jnp.bfloat16))(w["rows"])), None

    first, *_ = p["rows"]
    x, _ = lax.scan(body, x @ first.astype(jnp.bfloat16), p)
    return (x @ jnp.sin(2 * p["rows"][1]).astype(jnp.bfloat16)).astype(jnp.float32).sum()

  args = {"rows": jnp.ones((3, 4, 4)) / 8}, jnp.ones((2, 4), jnp.bfloat16)
  report = xray(jax.grad(loss))(*args)
  same(report, jax.grad(loss), *args, rtol=2e-2)
  products = [(t.direction, t.loops, t.reads) for t in report.tensors if t.op == "dot_general"]
  rows = ("p['rows']",)
  assert [reads for direction, loops, reads in products if (direction, loops) == ("forward", ())] == [("x", *rows), ()]
  assert ("forward", ("scan",), rows) in products
  assert ("backward", ("scan",), rows) in products
  assert not [t for t in report.tensors if t.op in ("stack", "unstack") and t.level == "full"]
