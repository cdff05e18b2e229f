"""Parts of saved arrays equal slices of the complete arrays; other models and damaged steps are refused."""

from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from maxtext_like.checkpoint.store.manager import CheckpointManager
from maxtext_like.checkpoint.store.partial_read import StoredArrays
from maxtext_like.errors import UserError

PARAMS = {"stack_0": {"w": jnp.arange(2 * 3 * 5, dtype=jnp.bfloat16).reshape(2, 3, 5)}, "scalar": jnp.float32(2.5)}


@pytest.fixture(scope="module")
def step(tmp_path_factory: pytest.TempPathFactory) -> Path:
  folder = tmp_path_factory.mktemp("has space é")
  with CheckpointManager(folder, config={"model": {}}) as manager:
    assert manager.save(3, {"params": PARAMS})
    assert manager.wait()
  return folder / "3"


def test_parts(step: Path):
  stored = StoredArrays(step)
  whole = np.asarray(PARAMS["stack_0"]["w"], np.float32)
  for index in ((1, slice(None), slice(1, 4)), (slice(0, 2), 2, slice(None)), (0, 0, 0)):
    part = stored.parameter(("stack_0", "w"), index)
    assert part.dtype == np.float32
    np.testing.assert_array_equal(part, whole[index])
  assert stored.parameter(("scalar",), ()) == 2.5


def test_what_is_not_there(step: Path):
  with pytest.raises(UserError, match=r"has no array params\.stack_0\.other"):
    StoredArrays(step).parameter(("stack_0", "other"), ())
  with pytest.raises(UserError, match="not a complete checkpoint"):
    StoredArrays(step.parent)


def test_a_flipped_byte(step: Path):
  file = max((path for path in (step / "state").rglob("*") if path.is_file()), key=lambda path: path.stat().st_size)
  raw = bytearray(file.read_bytes())
  raw[len(raw) // 2] ^= 1
  kept = file.read_bytes()
  try:
    file.write_bytes(raw)
    with pytest.raises(UserError, match="has changed since it was written"):
      StoredArrays(step)
  finally:
    file.write_bytes(kept)
