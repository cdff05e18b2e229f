"""The step that ends a run: its state and batch are saved from before the step, explained, and read in other precisions."""

import dataclasses
import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from maxtext_like.analysis import failed_step
from maxtext_like.analysis.failed_step import FailedStep
from maxtext_like.cli.main import main
from maxtext_like.errors import DoesNotFitError, NonFiniteError, UserError
from maxtext_like.models.row_norms import row_labels, state_labels
from maxtext_like.sharding.mesh import abstract_mesh
from maxtext_like.storage import Place
from maxtext_like.training.loop.divergence import Divergence
from maxtext_like.training.loop.finiteness import FinitenessGuard
from maxtext_like.training.loop.loop import Loop
from maxtext_like.training.loop.progress import Progress
from maxtext_like.training.loop.saving import Saver
from maxtext_like.training.step import loss_scale
from maxtext_like.training.step.initial_state import read_state
from maxtext_like.training.step.program import Stepper
from maxtext_like.training.step.trainable import select
from tests.gcs_emulator import BUCKET
from tests.s3_emulator import store_of
from tests.tiers import slow
from tests.training.toy import toy_batch, toy_config, toy_decoder, toy_look, toy_step

OVERFLOWING = ["dtype=float16", "opt_type=sgd", "loss_scale_init=16777216", "steps=9"]


class Data:
  """Data with a different batch for each step."""

  def __init__(self):
    self.count = 0

  def progress(self):
    return {}

  def __next__(self):
    self.count += 1
    return toy_batch(self.count)


STEPS: dict[tuple, Any] = {}  # shared compiled steps: checks and limits belong to the loop, the initial loss scale to the state


def toy_loop(config, place: Path) -> Any:
  """Returns a training loop around the toy step that saves its failed step in ``place``."""
  step, state = toy_step(config)
  step = STEPS.setdefault((config.precision.dtype, config.training.learning_rate), step)
  decoder = toy_decoder()
  spec = decoder.params()
  selection = select(decoder, spec, config.model, ())
  trained = selection.split(spec)[0]
  optimizer = state_labels(decoder, state["opt_state"], trained)
  others = {"optimizer": optimizer, "state_parameters": row_labels(decoder, spec), "state_optimizer": optimizer}
  program: Any = SimpleNamespace(
    config=config,
    place=lambda batch: batch,
    checkpoint_state=lambda state: state,
    model=SimpleNamespace(mesh=SimpleNamespace(size=1), devices=()),
  )
  progress = Progress(config.training.steps, None)  # without a screen
  stop: Any = SimpleNamespace(should_stop=lambda _: False, requested=None)
  files: Any = SimpleNamespace(row=lambda _: None, text=lambda *_: None, flush=lambda: None)
  guard = FinitenessGuard(config, row_labels(decoder, trained), others, config.training.steps)
  watch = FailedStep(program, place)
  return Loop(
    program, Stepper(program, step, toy_look), state, Data(), None, None, None, files, progress, stop, guard,
    Divergence(config), 1.0, None, watch,
  )  # fmt: skip


@pytest.fixture
def caught(monkeypatch):
  """The step, state and batch that would be saved. The x-ray of the failed step raises DoesNotFitError."""
  found = {}

  def keep(program, directory, step, state, batch, message):
    found.update(step=step, state=jax.device_get(state), batch=batch)

  def look(program, state, batch):
    raise DoesNotFitError("x-ray: needs 9 GB")

  monkeypatch.setattr(failed_step, "keep", keep)
  monkeypatch.setattr(failed_step.step_xray, "xray_step", look)
  return found


@pytest.mark.parametrize("limit", [1, 3])
def test_skips_in_a_row_end_with_the_state_before_the_last_of_them(tmp_path, caught, limit):
  loop = toy_loop(toy_config(*OVERFLOWING, "finite_check_steps=0", f"max_skipped_steps={limit}"), tmp_path)
  before = jax.device_get(loop.state)
  with pytest.raises(NonFiniteError, match="no replay: x-ray: needs 9 GB\nsaved in ") as error:
    loop.run(0)
  assert error.value.exit_code == 3
  assert caught["step"] == limit
  assert int(caught["state"]["step"]) == limit - 1
  assert float(caught["state"]["loss_scale"]["scale"]) == 2.0**24 / 2 ** (limit - 1)
  assert int(caught["state"]["loss_scale"]["good_steps"]) == 0
  for name in ("params", "opt_state"):
    jax.tree.map(np.testing.assert_array_equal, caught["state"][name], before[name])
  np.testing.assert_array_equal(caught["batch"]["tokens"], toy_batch(limit)["tokens"])


def test_the_loss_scale_is_that_before_the_failure(tmp_path, caught):
  loop = toy_loop(toy_config("dtype=float16", "opt_type=sgd", "finite_check_steps=-1", "steps=9"), tmp_path)
  step = loop.stepper.step

  def poisoned(state, batch, check):
    if loop.data.count == 4:  # only this step has a non-finite loss
      state = state | {"params": jax.tree.map(lambda x: x * jnp.inf, state["params"])}
    return step(state, batch, check)

  loop.stepper.step = poisoned
  with pytest.raises(NonFiniteError, match="step 4: non-finite parameters in 11 of 11 arrays"):
    loop.run(0)
  assert int(caught["state"]["step"]) == 3
  assert float(caught["state"]["loss_scale"]["scale"]) == loop.program.config.training.loss_scale_init


@pytest.mark.parametrize("waits", [slow(True), False])
def test_a_step_without_a_proof_is_taken_again_and_no_other_is_lost(tmp_path, waits):
  """The third step has no proof that it is finite, so it updates nothing and is repeated with all checks.

  The fourth step, which may have started already, updates nothing either. The losses equal those of a run without repetition.
  """

  def losses(usual):
    loop = toy_loop(toy_config(*words), tmp_path)
    rows, checked = [], loop.stepper.step
    loop.files.row = rows.append
    loop.program.lower_step = lambda checked: SimpleNamespace(compile=lambda: step_again)
    taken, again = [], []

    def step_again(state, batch, known):
      assert np.isinf(known).all()
      again.append(int(state["step"]))
      return checked(state, batch, known)

    def step(state, batch, known):
      taken.append(int(state["step"]))
      return (usual or checked)(state, batch, jnp.full(2, jnp.inf) if taken == [0, 1, 2] else known)

    loop.stepper.step = step
    loop.run(0)
    return [row["loss"] for row in rows], [row["step"] for row in rows], taken, again

  words = ["opt_type=sgd", "finite_check_steps=0", "steps=6", f"max_skipped_steps={1 if waits else 3}"]
  form, _ = toy_step(toy_config(*words), decoder=toy_decoder())
  expected, _, _, never = losses(None)
  found, steps, taken, again = losses(jax.jit(dataclasses.replace(form, checked=False)))
  assert found == expected
  assert steps == [1, 2, 3, 4, 5, 6]
  assert not never
  assert again == [2]
  # The last call is the forward pass with the final weights, which updates nothing.
  assert taken == ([0, 1, 2, 3, 4, 5, 6] if waits else [0, 1, 2, 2, 3, 4, 5, 6])


def test_an_update_that_was_taken_over_cannot_be_replayed(tmp_path, caught):
  loop = toy_loop(toy_config("opt_type=sgd", "finite_check_steps=0", "steps=9"), tmp_path)
  step = loop.stepper.step

  def spoilt(state, batch, known):  # simulates a memory fault of the device
    state, metrics = step(state, batch, known)
    rows = metrics["finite"]["state_optimizer"].at[0].set(False)
    return state, metrics | {"finite": metrics["finite"] | {"state_optimizer": rows}}

  loop.stepper.step = spoilt
  with pytest.raises(NonFiniteError, match=r"(?s)first trace.embedding.table after an update .*no replay") as error:
    loop.run(0)
  assert "already non-finite before the step" in str(error.value)
  assert not caught


def test_an_optimizer_that_a_device_forgot_is_seen_before_it_is_saved(tmp_path, monkeypatch):
  """A step only proves its own result finite. Memory that changes after the step is found by reading it before the save."""
  loop = toy_loop(toy_config("opt_type=sgd", "finite_check_steps=0", "steps=9"), tmp_path)
  step, saved = loop.stepper.step, []
  loop.manager = SimpleNamespace(
    due=lambda n: n % 2 == 0, poll=lambda: None, save=lambda n, *_, **__: saved.append(n), complete_steps=lambda: saved
  )
  monkeypatch.setattr(Saver, "_extra", dict)

  def forgets(state, batch, known):
    state, metrics = step(state, batch, known)
    if int(state["step"]) == 4:  # after the step, before the save
      trace = state["opt_state"][0].trace
      trace["head"]["kernel"] = trace["head"]["kernel"].at[1, 1].set(np.inf)
    return state, metrics

  loop.stepper.step = forgets
  with pytest.raises(NonFiniteError, match=r"step 4: non-finite optimizer state in 1 of \d+ arrays, first trace.head.kernel"):
    loop.run(0)
  assert saved == [2]


def test_a_full_disk_is_one_line_and_the_exit_code_stays(tmp_path, monkeypatch, caught):
  def full(*_):
    raise OSError(28, "No space left on device")

  monkeypatch.setattr(failed_step, "keep", full)
  with pytest.raises(NonFiniteError) as error:
    toy_loop(toy_config(*OVERFLOWING, "finite_check_steps=0", "max_skipped_steps=2"), tmp_path).run(0)
  assert str(error.value).count("what to try") == 1
  assert str(error.value).splitlines()[-1].endswith("for replay: [Errno 28] No space left on device")


@pytest.fixture(params=["", "gs", slow("s3")])
def run(request, tmp_path) -> Path | Place:
  """The directory of a run: local, or in an emulated store."""
  if not request.param:
    return tmp_path
  store_of(request.param)
  return Place(f"{request.param}://{BUCKET}/failed/{tmp_path.name}")


def test_kept_and_read_back_on_other_devices_and_in_other_precision(run):
  config = toy_config(*OVERFLOWING)
  _, state = toy_step(config)
  begun = {"loss_scale": loss_scale.initial(config.training.loss_scale_init)}
  completed = lambda checkpoint_state, weights: begun | checkpoint_state  # as in ``TrainProgram``
  program: Any = SimpleNamespace(config=config, abstract_state=shapes(state), adapter=None, completed=completed)
  with pytest.raises(UserError, match="no failed step\n"):
    failed_step.find(run)
  failed_step.keep(program, run / "failed_step", 1, state, toy_batch(), "why\nand what to do")
  kept = failed_step.find(run)
  assert (kept.step, kept.error) == (1, "why\nand what to do")
  np.testing.assert_array_equal(kept.batch["tokens"], toy_batch()["tokens"])
  assert not json.loads((kept.state / "COMPLETE.json").read_text())["finite"]
  jax.tree.map(np.testing.assert_array_equal, read_state(kept.state, program), state)
  wide = {name: x for name, x in state.items() if name != "loss_scale"}
  as_float32: Any = SimpleNamespace(
    config=toy_config("opt_type=sgd"),
    abstract_state=shapes(wide),
    adapter=None,
    completed=lambda checkpoint_state, weights: checkpoint_state,
  )
  assert "loss_scale" not in read_state(kept.state, as_float32)
  failed_step.keep(as_float32, run / "failed_step", 1, wide, toy_batch(), "why")
  assert float(read_state(failed_step.find(run).state, program)["loss_scale"]["scale"]) == 2.0**24
  rows = kept.batch["tokens"].shape[0]
  assert failed_step.fitted(config, kept, abstract_mesh(config.mesh, 2)).training.per_device_batch_size == rows // 2
  with pytest.raises(UserError, match=f"a batch of {rows} rows .* 3 devices"):
    failed_step.fitted(config, kept, abstract_mesh(config.mesh, 3))
  (run / "failed_step" / "batch.npz").write_bytes(b"cut")
  with pytest.raises(UserError, match=r"no failed step that can be read \("):
    failed_step.find(run)


def shapes(state):
  return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state)


def test_runs_that_kept_nothing(tmp_path, capsys):
  assert main(["replay", str(tmp_path)]) == 2
  assert "has no config.yml" in capsys.readouterr().err
  with pytest.raises(UserError, match="no failed step"):
    failed_step.find(tmp_path)


WORDS = ["gemma3-tiny", "max_target_length=16", "per_device_batch_size=4", "emb_dim=16", "mlp_dim=24", "num_decoder_layers=2"]
WORDS += ["head_dim=8", "inhomogeneous_layer_cycle_interval=1", "dataset_documents_max=40", "opt_type=sgd", "run_name=a"]
WORDS += ["gradient_clipping_threshold=0", "lr_schedule_type=constant", "warmup_steps_fraction=0", "finite_check_steps=-1"]


@pytest.mark.slow
def test_a_real_run_is_explained_and_replayed_from_a_store_and_from_a_disk(tmp_path, capsys, monkeypatch):
  """A huge first update leaves weights with which the second step overflows in float16 but not in float32.

  The residual stream is float32, so the first overflow is in a product of the first attention layer.
  """
  store = store_of("s3")
  monkeypatch.setenv("MAXTEXT_LIKE_COPIES", str(tmp_path / "copies"))
  monkeypatch.chdir(tmp_path)
  place = f"s3://{BUCKET}/{tmp_path.name}"
  words = [*WORDS, f"output_dir={place}", "learning_rate=3e3", "steps=4", "checkpoint_interval=1"]
  assert main(["train", *words, "dtype=float16", "float32_gate_product=false", "float16_clamp=false"]) == 3
  error = capsys.readouterr().err
  assert f"saved in {place}/a/failed_step; to replay it: maxtext-like replay {place}/a" in error
  cause = next(x for x in error.splitlines() if x.startswith("first cause"))
  attention = r"first cause: \S*src/layers/attention/attention\.py:\d+ dot_general, layer 0, forward: \S+ @ \S+ -> inf > 65504"
  assert re.fullmatch(attention, cause), cause

  monkeypatch.setenv("MAXTEXT_LIKE_COPIES", str(tmp_path / "another machine" / "copies"))
  assert main(["replay", f"{place}/a", "dtype=float32", "float32_gate_product=auto", "float16_clamp=true"]) == 0
  assert "tensors are finite" in capsys.readouterr().out
  assert (tmp_path / "runs/a-replay/xray.html").exists()

  for name in store.names(f"{tmp_path.name}/a/"):  # copy the run to a local directory
    file = tmp_path / "local" / name.removeprefix(f"{tmp_path.name}/")
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(store.read(name))
  assert main(["replay", str(tmp_path / "local/a"), "module_api=linen", "scan_layers=false"]) == 3
  assert cause in capsys.readouterr().err
  assert (tmp_path / "local/a/failed_step/replay/xray.html").exists()
