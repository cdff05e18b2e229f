"""Tests host_memory.py on a CPU, where both memories are the same and only sharding and type differ."""

import jax
import jax.numpy as jnp
import numpy as np

from maxtext_like.sharding import host_memory
from maxtext_like.sharding.mesh import replicated
from tests.checkpoint.store.test_zarr_arrays import mesh


def arrays():
  place = replicated(mesh(1, 1))
  there = place.with_memory_kind(host_memory.KIND)
  return {"here": jax.device_put(jnp.arange(6.0).reshape(2, 3), place), "there": jax.device_put(jnp.ones((2, 3)), there)}


def test_what_is_saved_of_the_host_is_a_copy():
  """A numpy view would hold memory that is donated to the next step."""
  found, made = arrays(), {}
  made = host_memory.to_numpy(found)
  assert made["here"] is found["here"]
  assert isinstance(made["there"], np.ndarray)
  assert made["there"].flags.owndata
  np.testing.assert_array_equal(made["there"], np.ones((2, 3)))
  assert [host_memory.is_on_host(x) for x in found.values()] == [False, True]
  assert not host_memory.is_on_host(host_memory.on_device(found["there"]))
  assert not host_memory.is_on_host(made["there"])


def test_a_program_reads_rows_and_writes_them_back():
  found = arrays()

  @jax.jit
  def third(tree):
    assert [host_memory.is_traced_on_host(x) for x in tree.values()] == [False, True]
    rows = {name: host_memory.row(x, jnp.int32(1)) for name, x in tree.items()}
    assert not any(host_memory.is_traced_on_host(x) for x in (*rows.values(), *host_memory.to_device(tree).values()))
    back = host_memory.put_like({name: 3 * x for name, x in rows.items()}, tree)
    assert [host_memory.is_traced_on_host(x) for x in back.values()] == [False, True]
    return back

  out = jax.device_get(third(found))
  np.testing.assert_array_equal(out["here"], [9.0, 12.0, 15.0])
  np.testing.assert_array_equal(out["there"], [3.0, 3.0, 3.0])
