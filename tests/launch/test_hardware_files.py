"""The mesh files of tpu/ and gpu/ can be combined with every kind of model, and set the mesh of the named hardware."""

import math
from pathlib import Path

import pytest

from maxtext_like.config.files import configs_folder
from maxtext_like.config.load import load_config
from maxtext_like.layers.sharding_rules import MESH_AXES

ROOT = configs_folder().parent
FILES = {
  "tpu/v6e-8.yml": {"fsdp": 8}, "tpu/v6e-32.yml": {"fsdp": 32}, "tpu/v6e-32-experts.yml": {"fsdp": 4, "expert": 8},
  "tpu/v6e-256-deepseek.yml": {"fsdp": 8, "expert": 32}, "gpu/h200.yml": {"fsdp": 1}, "gpu/h200x8.yml": {"fsdp": 8},
  "gpu/one_h200.yml": {"fsdp": 1},
}  # fmt: skip


def test_every_file_is_known_here():
  found = {str(path.relative_to(ROOT)) for folder in ("tpu", "gpu") for path in (ROOT / folder).glob("*.yml")}
  assert found - {"tpu/xla_flags.yml"} == set(FILES)


@pytest.mark.parametrize("model", ["gemma4-tiny", "gemma4-31b", "deepseek3-tiny"])
@pytest.mark.parametrize(("name", "sizes"), FILES.items())
def test_a_hardware_file_is_laid_over_a_model(model, name, sizes):
  loaded = load_config(model, [str(ROOT / name), "steps=7"])
  assert loaded.config.mesh.axis_sizes(math.prod(sizes.values())) == dict.fromkeys(MESH_AXES, 1) | sizes
  assert Path(loaded.origins["mesh.ici_fsdp_parallelism"].rpartition(":")[0]).name == Path(name).name
  assert loaded.config.training.steps == 7
