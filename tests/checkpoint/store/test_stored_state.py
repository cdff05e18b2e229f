"""Host memory that is in use while a step is read."""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest

from maxtext_like.checkpoint.store import stored_state


def test_the_limit_fits_the_largest_array():
  def gb(*sizes: int) -> int:
    return stored_state.restore_gb({str(size): jax.ShapeDtypeStruct((size,), jnp.bfloat16) for size in sizes})

  assert gb() == gb(1, 10**9) == 4
  assert gb(7, 4_900_000_000, 3) == 10
  # Orbax refuses an array whose size equals the limit.
  assert gb(5_000_000_000) == 11


def test_orbax_reads_within_the_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
  flat = {f"a{i}": jnp.arange(300.0) + i for i in range(5)}
  with ocp.Checkpointer(ocp.PyTreeCheckpointHandler(use_zarr3=True)) as checkpointer:
    checkpointer.save(tmp_path / "state", args=ocp.args.PyTreeSave(flat))
  like = {name: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding) for name, x in flat.items()}

  def read(limit: int) -> dict[str, jax.Array]:
    monkeypatch.setattr(stored_state, "restore_gb", lambda arrays: limit / 1e9)
    return stored_state._read_orbax(tmp_path / "state", like, True)

  jax.tree.map(np.testing.assert_array_equal, read(1300), flat)
  with pytest.raises(ValueError, match="Requested more bytes than we reserved"):
    read(1100)
