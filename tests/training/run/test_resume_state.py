"""How a run directory shows that checkpoints are missing."""

import errno
import json
import os

import pytest

from maxtext_like.checkpoint.store import manifest
from maxtext_like.config.load import load_config
from maxtext_like.errors import RetryableError, UserError
from maxtext_like.training.run import resume_state

CONFIG = "checkpoint:\n  enable_checkpointing: {}  # where from\n  checkpoint_interval: {}\ntraining:\n  steps: {}\n"


@pytest.fixture
def run(tmp_path):
  """The directory of a run that finished 45 steps and has no checkpoints."""
  rows = [json.dumps({"step": step}) for step in range(1, 46)]
  (tmp_path / "metrics.jsonl").write_text("\n".join([*rows, '{"step": 46, "lo']))
  return tmp_path


def settings(*words):
  return load_config("gemma4-tiny", words).config.checkpoint


def complete(run, step):
  path = run / "checkpoints" / str(step)
  path.mkdir(parents=True)
  manifest.write(path, manifest.Manifest(step=step, finite=True, config={}, extra={}, leaves={}, files={}, versions={}))


def test_the_newest_saved_step_tells_loss_from_a_run_without_a_checkpoint(run):
  resume_state.record_newest(run, None)
  assert (
    resume_state.read(run, run / "checkpoints").evidence == ()
  )  # 45 steps without a save: the run was killed before the first save, or the disk was full
  resume_state.record_newest(run, 40)
  evidence = resume_state.read(run, run / "checkpoints").evidence
  assert evidence == (
    "newest_checkpoint.json: step 40 was saved", "metrics.jsonl: contains step 45", "checkpoints/: does not exist",
  )  # fmt: skip
  complete(run, 20)
  stands = resume_state.read(run, run / "checkpoints")
  assert (stands.newest, stands.evidence) == (20, ())
  stands.require(settings())


@pytest.mark.parametrize(
  ("config", "lost"),
  [
    (CONFIG.format("true", 10, 1000), True),
    (CONFIG.format("true", 100, 1000), False),
    (CONFIG.format("true", 100, 45), True),  # the last step is saved, whatever the interval is
    (CONFIG.format("false", 10, 1000), False),
    ("", True),
    ("checkpoint: [", True),
    (None, True),
  ],
)
def test_a_directory_of_an_earlier_version_is_judged_by_its_interval(run, config, lost):
  if config is not None:
    (run / "config.yml").write_text(config)
  stands = resume_state.read(run, run / "checkpoints")
  assert bool(stands.evidence) == lost
  if lost:
    with pytest.raises(UserError, match="the checkpoints of this run are missing"):
      stands.require(settings())


def test_without_metrics_finiteness_json_knows_of_steps(tmp_path):
  (tmp_path / "config.yml").write_text(CONFIG.format("true", 1, 10))
  checks = {"loss0": {"result": "finite"}, "loss1": {"result": "not run"}}
  (tmp_path / "finiteness.json").write_text(json.dumps(checks))
  assert "finiteness.json: contains step 1" in resume_state.read(tmp_path, tmp_path / "checkpoints").evidence
  (tmp_path / "finiteness.json").write_text("{")
  assert resume_state.read(tmp_path, tmp_path / "checkpoints").evidence == ()


def test_a_later_step_that_is_gone(run):
  assert resume_state.missing_step(run, run / "checkpoints", 20) is None
  resume_state.record_newest(run, 40)
  assert resume_state.missing_step(run, run / "checkpoints", None) is None
  assert resume_state.missing_step(run, run / "checkpoints", 40) is None
  assert resume_state.missing_step(run, run / "checkpoints", 20) == 40
  (run / "checkpoints/40.corrupt").mkdir(parents=True)  # the process that renamed it has reported it
  assert resume_state.missing_step(run, run / "checkpoints", 20) is None


@pytest.mark.parametrize("text", ["", "{}", "[1]", "{", '{"step": "40"}'])
def test_a_damaged_record_is_no_license_to_start_again(run, text):
  (run / resume_state.NEWEST).write_text(text)
  with pytest.raises(UserError, match=rf"{resume_state.NEWEST}: cannot be read"):
    resume_state.read(run, run / "checkpoints").require(settings())


def test_what_is_found_in_place_of_the_checkpoints_is_told(run):
  resume_state.record_newest(run, 40)
  checkpoints = run / "checkpoints"
  for make, told in (
    (lambda: checkpoints.symlink_to(run / "unmounted"), f"a link to {run}/unmounted, which does not exist"),
    (checkpoints.mkdir, "empty"),
    (
      lambda: [(checkpoints / str(step) / "state").mkdir(parents=True) for step in (20, 30, 40)],
      "20, 30, 40 without COMPLETE.json",
    ),
  ):
    if checkpoints.is_symlink():
      checkpoints.unlink()
    make()
    assert resume_state.read(run, run / "checkpoints").evidence[-1] == f"checkpoints/: {told}"


def test_who_asks_for_it_starts_afresh(run):
  resume_state.record_newest(run, 40)
  stands = resume_state.read(run, run / "checkpoints")
  stands.require(settings("resume=false"))
  with pytest.raises(UserError, match=r"another run_name$"):
    stands.require(settings("enable_checkpointing=false"))
  with pytest.raises(UserError, match=r"or resume=false, which .*metrics.jsonl"):
    stands.require(settings())


@pytest.mark.parametrize("words", ["enable_checkpointing=false", "resume=false"])
def test_checkpoints_that_would_not_be_used_are_refused(tmp_path, words):
  resume_state.read(tmp_path, tmp_path / "checkpoints").require(settings(words))
  complete(tmp_path, 20)
  with pytest.raises(UserError, match=words):
    resume_state.read(tmp_path, tmp_path / "checkpoints").require(settings(words))


@pytest.mark.parametrize(
  ("code", "kind"),
  [(errno.EACCES, UserError), (errno.ENAMETOOLONG, UserError), (errno.EIO, RetryableError), (errno.ESTALE, RetryableError)],
)
def test_a_restart_can_mend_a_disk_and_not_a_path(run, monkeypatch, code, kind):
  complete(run, 20)

  def fail(*_):
    raise OSError(code, "told by the system", "there")

  monkeypatch.setattr(os, "scandir", fail)
  with pytest.raises(kind, match=r"^there: told by the system(\n  fix: .*)?$"):
    resume_state.read(run, run / "checkpoints")


def test_a_disk_that_does_not_take_the_record_is_told(tmp_path, caplog):
  resume_state.record_newest(tmp_path / "gone", 1)
  assert "No such file or directory" in caplog.text
