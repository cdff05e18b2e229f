"""What the compiled step of a sharded model moves between chips, read in libtpu's own text."""

import importlib.util
import re

import pytest

from maxtext_like.config.files import configs_folder
from maxtext_like.config.load import load_config
from maxtext_like.training.topologies import TOPOLOGIES

LAYERS = 6


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="libtpu is not installed")
def test_stacked_parameters_are_gathered_a_layer_at_a_time_and_gradients_scattered():
  from maxtext_like.analysis.lowered import compile_for

  mesh = str(configs_folder().parent / "tpu" / "v6e-8.yml")
  words = [mesh, f"num_decoder_layers={LAYERS}", "dtype=bfloat16", "emb_dim=512", "mlp_dim=2048", "remat_policy=full"]
  _, _, text = compile_for(load_config("qwen3-tiny", words).config, TOPOLOGIES["v6e-8"])
  gathered = re.findall(r"= \(?\w+\[([\d,]+)\][^=]*? all-gather(?:-start)?\(", text)
  assert gathered
  assert not [shape for shape in gathered if shape.startswith(f"{LAYERS},") and shape.count(",") > 1]
  assert "all-reduce-scatter" in text
