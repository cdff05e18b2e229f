"""Microbatches: over axes that split rows alone, devices add gradients up once a step. Losses: test_parallelism.py."""

import pytest

from tests.training.test_parallelism import run


@pytest.mark.slow
def test_devices_add_up_once_a_step_where_no_parameter_is_split():
  slices, three = run("tests.training.accumulation", "dcn_data_parallelism=2 ici_fsdp_parallelism=4",
                      "ici_data_parallelism=2 ici_fsdp_parallelism=2 ici_tensor_parallelism=2")  # fmt: skip
  assert slices["data"].keys() == {"1"}
  assert slices["data"]["1"] > 400_000  # a quarter of the gradients
  # Whoever holds a part of a parameter has no room for the sums of all: twice, and in each of two layers.
  assert slices["other"].keys() >= {"2", "4"}
  # Where two axes split what is left (see program.py), what is counted here is what is added up twice.
  assert three["data"]["4"] > 200_000
