"""The order of devices in the mesh: slices outside, the devices of each slice inside, whatever the axes are."""

from types import SimpleNamespace

import numpy as np
import pytest

from maxtext_like.config.load import load_config
from maxtext_like.errors import UserError
from maxtext_like.layers.sharding_rules import MESH_AXES
from maxtext_like.models.model import make_model
from maxtext_like.sharding import mesh
from maxtext_like.sharding.mesh import abstract_mesh

DEVICES = [SimpleNamespace(platform="cpu", id=i) for i in range(8)]


def grid(*words: str) -> np.ndarray:
  dcn, ici = (tuple(sizes.values()) for sizes in load_config("gemma4-tiny", list(words)).config.mesh.over_networks(8))
  return np.vectorize(lambda d: d.id)(mesh._grid(DEVICES, dcn, ici))


def test_slices_are_outside_and_tensor_innermost():
  assert MESH_AXES == ("data", "fsdp", "expert", "context", "tensor")
  alone = grid("ici_data_parallelism=2", "ici_tensor_parallelism=2")
  np.testing.assert_array_equal(alone[:, :, 0, 0], np.arange(8).reshape(2, 2, 2))
  slices = grid("dcn_data_parallelism=2", "ici_tensor_parallelism=2")
  np.testing.assert_array_equal(slices[:, :, 0, 0], np.arange(8).reshape(2, 2, 2))
  one_axis = grid("dcn_fsdp_parallelism=2", "ici_data_parallelism=2")  # 2 slices x 2 devices along fsdp, the slices outside
  np.testing.assert_array_equal(one_axis[:, :, 0, 0, 0], [[0, 1, 4, 5], [2, 3, 6, 7]])


@pytest.mark.parametrize(
  ("words", "rows"),
  [
    (["per_device_batch_size=2"], 16),
    (["ici_tensor_parallelism=2"], 8),
    (["ici_tensor_parallelism=4", "per_device_batch_size=0.25"], 2),
    (["ici_context_parallelism=2", "per_device_batch_size=1.5"], 12),
  ],
)
def test_rows_are_counted_over_all_devices(words, rows):
  config = load_config("gemma4-tiny", ["per_device_batch_size=1", *words]).config
  assert make_model(config, mesh=abstract_mesh(config.mesh, 8), platform="cpu").rows == rows


@pytest.mark.parametrize("each", ["0.25", "0.3", "0.75", "1.01"])
def test_rows_that_cannot_be_shared_out_are_refused(each):
  config = load_config("gemma4-tiny", ["ici_tensor_parallelism=2", f"per_device_batch_size={each}"]).config
  model = make_model(config, mesh=abstract_mesh(config.mesh, 8), platform="cpu")
  with pytest.raises(UserError, match=r"4 parts of the mesh \(fsdp 4\)\n  fix: per_device_batch_size=0.5, or a multiple"):
    _ = model.rows
