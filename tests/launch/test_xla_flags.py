"""libtpu accepts every flag of tpu/xla_flags.yml, as a compile option and in LIBTPU_INIT_ARGS."""

import json
import subprocess
import sys

import pytest

from maxtext_like.config.files import configs_folder

pytestmark = [pytest.mark.tpu, pytest.mark.slow]

_COMPILE = """
import sys
from maxtext_like.config.load import load_config
from maxtext_like.capacity import aot_tpu as ahead_of_time
from maxtext_like.capacity.topologies import TOPOLOGIES

ahead_of_time.prepare_environment()
import jax, jax.numpy as jnp

mesh = ahead_of_time.tpu_mesh(TOPOLOGIES["v6e-1"], load_config("gemma4-tiny").config.mesh)
x = jax.ShapeDtypeStruct((128, 128), jnp.bfloat16, sharding=jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec()))
options = ahead_of_time.xla_flags("all") if sys.argv[1] == "options" else {}
jax.jit(lambda x: x @ x).trace(x).lower(lowering_platforms=("tpu",)).compile(compiler_options=options)
"""


@pytest.mark.parametrize("way", ["options", "environment"])
def test_libtpu_takes_the_flags(way):
  source = ". tpu/env.sh; " if way == "environment" else ""
  done = subprocess.run(
    ["bash", "-euc", f'{source}exec "$0" -c "$1" {way}', sys.executable, _COMPILE],
    cwd=configs_folder().parent, capture_output=True, text=True, timeout=300,
  )  # fmt: skip
  assert done.returncode == 0, done.stderr


def test_a_step_of_several_chips_compiles_to_the_end_with_them_and_waits_for_no_gather_of_a_weight(tmp_path):
  file = tmp_path / "it.json"
  words = ["gemma4-tiny", "num_decoder_layers=1", "inhomogeneous_layer_cycle_interval=1", "topology=v6e-8", "xla_flags=all"]
  done = subprocess.run(
    [sys.executable, "-m", "maxtext_like", "compile", *words, "--json", str(file)], capture_output=True, text=True, timeout=300
  )
  assert done.returncode == 0, done.stderr
  told = json.loads(file.read_text())
  assert told["quick_peak_bytes"]
  gathers = {t["asynchronous"]: t["bytes"] for t in told["work"]["transfers"] if t["kind"] == "all-gather"}
  assert gathers[True] > 10 * gathers.get(False, 0)
