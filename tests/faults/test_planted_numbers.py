"""NaN or infinity in the initial state of a run: in the optimizer state of its checkpoint, or in weights of both formats."""

import json
import shutil

import jax
import numpy as np
import pytest
from conftest import MODEL, TrainRuns

from maxtext_like.checkpoint.huggingface.tensor_file import SafetensorsFile
from maxtext_like.checkpoint.store import manifest
from maxtext_like.checkpoint.store.manager import CheckpointManager
from maxtext_like.cli.main import main
from maxtext_like.config.load import load_config
from maxtext_like.training.step.initial_state import read_state
from maxtext_like.training.step.program import make_program
from tests.tiers import slow


@pytest.fixture(scope="module")
def trained(tmp_path_factory, environment, server, shared):
  """A run of four steps and its final state."""
  runs = TrainRuns(tmp_path_factory.mktemp("planted"), environment, server, *shared)
  code, text = runs.run("whole", steps=4)
  assert code == 0, text
  return runs, read_state(runs.checkpoints("whole") / "4", make_program(config_of(runs)))


def config_of(runs):
  return load_config(MODEL, [f"{key}={value}" for key, value in {**runs.keys, "steps": 9}.items()]).config


def with_number(state, path, value):
  """Returns the state with one number of one array replaced."""

  def replaced(where, x):
    if jax.tree_util.keystr(where) != path:
      return x
    numbers = np.array(x)
    numbers.flat[numbers.size // 2] = value
    return numbers

  changed = jax.tree_util.tree_map_with_path(replaced, state)
  assert any(x is not y for x, y in zip(jax.tree.leaves(changed), jax.tree.leaves(state), strict=True))
  return changed


def plant(runs, name, state):
  """Copies the run "whole" and adds a checkpoint of this state. The new checkpoint is marked as finite."""
  shutil.copytree(runs.output_dir / "whole", runs.output_dir / name)
  extra = manifest.read(runs.checkpoints("whole") / "4").extra
  state = jax.device_put(state | {"step": np.int32(5)})
  with CheckpointManager(runs.checkpoints(name), config=config_of(runs)) as manager:
    assert manager.save_and_wait(5, state, extra)


DOWN = "['stack_1']['layer_0']['mlp']['down']"


@pytest.mark.parametrize(
  ("moment", "value", "replayed"),
  [("mu", np.nan, False), slow("nu", np.inf, True)],
)
def test_in_the_optimizer_it_is_named_and_not_saved(trained, moment, value, replayed):
  runs, state = trained
  run = f"{moment}-{replayed}"
  plant(runs, run, with_number(state, f"['opt_state'][0].{moment}{DOWN}", value))
  code, text = runs.run(run, steps=9, replay_failed_step=str(replayed).lower())
  assert code == 3, text
  assert (
    f"step 6: non-finite optimizer state in 1 of 56 arrays, first {moment}.layers.1.mlp.down already before the step" in text
  )
  assert (f"first cause: optimizer state {moment}.layers.1.mlp.down (an input) contains 1 " in text) == replayed
  assert "learning_rate" not in text.split("what to try")[1].splitlines()[0]
  assert runs.complete(run) == [4, 5]
  report = json.loads((runs.output_dir / run / "finiteness.json").read_text())
  assert report["parameters"]["first"] == (["layers.1.mlp.down"] if moment == "mu" else ["nu.layers.1.mlp.down"])


def test_in_weights_of_our_own_it_is_named_before_anything_is_compiled(trained):
  runs, state = trained
  plant(runs, "ours", with_number(state, f"['params']{DOWN}", np.inf))
  code, text = runs.run("from-ours", steps=9, init_from=runs.output_dir / "ours")
  assert code == 3, text
  assert (
    f"error: init_from: {runs.checkpoints('ours')}/5: 1 arrays contain non-finite numbers, the first is layers.1.mlp.down"
    in text
  )
  assert "compiled in" not in text


@pytest.mark.parametrize(("dtype", "bits"), [("bfloat16", b"\x80\x7f"), ("float32", b"\x00\x00\xc0\xff")])
def test_in_a_safetensors_file_it_is_named_with_the_file(trained, dtype, bits, capsys):
  runs, _ = trained
  place = runs.output_dir / f"hf-{dtype}"
  assert main(["export", str(runs.output_dir / "whole"), "--out", str(place), "--dtype", dtype]) == 0
  capsys.readouterr()
  file = SafetensorsFile(place / "model.safetensors")
  name = next(name for name in file.entries if name.endswith("layers.1.mlp.down_proj.weight"))
  entry = file.entries[name]
  content = bytearray((place / "model.safetensors").read_bytes())
  content[entry.start + 7 * len(bits) : entry.start + 8 * len(bits)] = bits
  (place / "model.safetensors").write_bytes(content)
  code, text = runs.run(f"from-{dtype}", steps=9, init_from=place, tokenizer="bytes")
  assert code == 3, text
  what = "1 infinite" if dtype == "bfloat16" else "1 NaN"
  assert f"error: {place}/model.safetensors: tensor '{name}' holds {what} of 384 numbers, the first at [0, 7]" in text
  assert "compiled in" not in text
