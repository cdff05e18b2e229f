"""Meshes on which optimizer_in_backward gives the losses of one device, and settings with which it is refused."""

import numpy as np
import pytest

from maxtext_like.config.load import load_config
from maxtext_like.errors import UserError
from tests.tiers import nightly
from tests.training.test_parallelism import run


@pytest.mark.slow
@pytest.mark.parametrize(
  ("model", "clip", "meshes"),
  [
    ("qwen3-tiny", "running", ("data-fsdp-tensor",)),
    nightly("qwen3-moe-tiny", "exact", ("data-fsdp-tensor",)),
  ],
)
def test_meshes_give_the_losses_of_one_device(model, clip, meshes):
  """The moments are in host memory. tests/training/optimizers/test_on_host.py compares such steps bit for bit on one device."""
  words = ("num_decoder_layers=3", f"clip={clip}", "gradient_clipping_threshold=0.5", "optimizer_memory_host_offload=true")
  found = run("tests.training.meshes_in_backward", model, *words, *meshes)
  one = found.pop("one")
  for name, losses in found.items():
    np.testing.assert_allclose(losses, one, rtol=1e-5, err_msg=name)


@pytest.mark.parametrize(
  ("words", "said"),
  [
    (["gradient_accumulation_steps=2"], "gradient_accumulation_steps = 2 with optimizer_in_backward"),
    (["lora_rank=4"], "lora_rank = 4"),
    (["numerics_every=10"], "numerics_every = 10"),
    (["optimizer_in_backward=false", "clip=layer"], "clip = layer without optimizer_in_backward"),
    (["optimizer_in_backward=false", "clip=running"], "(?s)clip = running without .*fix: set clip=exact"),
  ],
)
def test_what_it_cannot_be_had_with_is_refused(words, said):
  with pytest.raises(UserError, match=said):
    load_config("gemma4-tiny", ["remat_policy=full", "optimizer_in_backward=true", *words])
