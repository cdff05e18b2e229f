"""Tests X-ray with shard_map and sharded arguments, in a separate process with eight simulated devices."""

import subprocess
import sys
import textwrap

import pytest

from tests.processes import environment

PROGRAM = """
import jax, jax.numpy as jnp, numpy as np
from jax import lax
from maxtext_like.numerics.xray import xray

mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
P = jax.P

def local(x, ws):
  def body(c, w):
    return lax.pcast(jnp.tanh(lax.psum(c @ w, "model")), "model", to="varying"), c.sum()
  c, sums = lax.scan(body, lax.pcast(x, "model", to="varying"), ws)
  n = lax.while_loop(lambda n: n.sum() < 40.0, lambda n: n * 2 + 1, lax.stop_gradient(jnp.abs(x) + 1))
  c = lax.cond(c.sum() > 0, lambda c: c + 1, lambda c: c - 1, c)
  return c + n.sum() * 0, lax.psum(sums, "data")

def fn(x, ws):
  specs = dict(in_specs=(P("data"), P(None, None, None)), out_specs=(P("data", "model"), P("model")))
  return jax.shard_map(local, mesh=mesh, **specs)(x, ws)

x = jax.random.normal(jax.random.key(0), (8, 3))
ws = jax.random.normal(jax.random.key(1), (5, 3, 3))
report = xray(fn)(x, ws)
plain = jax.jit(fn)(x, ws)
for a, b in zip(jax.tree.leaves(plain), jax.tree.leaves(report.outputs), strict=True):
  np.testing.assert_allclose(a, b, rtol=2e-5, atol=1e-6)
assert report.finite and not report.faults, report.summary()
(dot,) = [t for t in report.tensors if t.op == "dot_general"]
assert dot.loops == ("scan",) and dot.shape == (2, 3) and dot.stats.max.shape == (5,), dot
assert dot.stats.count.tolist() == [8 * 6] * 5  # eight shards

# a fault on one data shard only (rows 4 and 5), seen with the gradient around it
loss = lambda x, ws: sum(y.sum() for y in fn(x, ws))
x = jnp.zeros((8, 3)).at[4:6].set(3.0)
ws = jnp.stack([3 * jnp.eye(3)] * 5).at[3].set(3e38)
report = xray(jax.value_and_grad(loss), light=True)(x, ws)
cause = next(f for f in report.faults)
assert (cause.op, cause.direction, cause.layer) == ("dot_general", "forward", 3), str(cause)
assert "shard_map" in cause.path

# sharded arguments under jit, with an inner jit that fixes a placement
sharding = jax.NamedSharding(mesh, P("data", "model"))
y = jax.device_put(jnp.ones((8, 4)), sharding)
inner = jax.jit(lambda y: jnp.exp(y) @ jnp.ones((4, 2)), out_shardings=jax.NamedSharding(mesh, P("data")))
report = xray(lambda y: inner(y) * 2)(y)
np.testing.assert_allclose(report.outputs, jax.jit(lambda y: inner(y) * 2)(y), rtol=1e-6)
assert [t.op for t in report.tensors][:2] == ["input", "exp"]
print("fine")
"""


@pytest.mark.slow
def test_shard_map_and_sharded_arguments():
  program = textwrap.dedent(PROGRAM)
  done = subprocess.run(
    [sys.executable, "-c", program], capture_output=True, text=True, env=environment(8), check=False, timeout=300
  )
  assert done.stdout.endswith("fine\n"), done.stderr[-4000:]
