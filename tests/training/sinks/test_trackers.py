"""Weights & Biases and MLflow, offline: the rows they receive, that training does not wait for them, and when they are
imported.

Two tests use the real packages and are skipped if these are not installed (``pip install -e '.[wandb,mlflow]'``).
"""

import importlib.util
import json
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

from maxtext_like.config.load import load_config
from maxtext_like.errors import UserError
from maxtext_like.training.run.preflight import preflight
from maxtext_like.training.sinks import run_files
from maxtext_like.training.sinks.run_files import RunFiles
from maxtext_like.training.sinks.trackers import MLflow, Tracked, WeightsAndBiases, trackers

ROWS = [{"step": 1, "loss": 2.0, "eval_loss/web": 3.5}, {"step": 2, "loss": float("nan")}, {"step": 3, "loss": 1.0}]
CONFIG = load_config("gemma3-tiny", ["wandb_project=p", "mlflow_experiment=e", "dataset_path=null"])


def write(directory: Path, names=("wandb", "mlflow"), rows=ROWS) -> list[str]:
  """Write rows through the files of a run, and return the lines about lost rows."""
  found = trackers(CONFIG.config.logging, Tracked.of(directory, CONFIG.config))
  with RunFiles(directory, tensorboard=False, step=0, trackers={name: found[name] for name in names}) as files:
    for row in rows:
      files.row(row)
    return files.end("report.html", lambda unwritten: "")


@pytest.fixture
def wandb(monkeypatch):
  """A replacement for the package that records its calls."""
  told = SimpleNamespace(inits=[], rows=[], finished=0, error=None, wait=threading.Event())
  told.wait.set()

  def log(row):
    told.wait.wait()
    told.rows.append(row)

  def init(**given):
    told.inits.append(given)
    if told.error is not None:
      raise told.error
    return SimpleNamespace(
      log=log, finish=lambda: setattr(told, "finished", told.finished + 1), define_metric=lambda *_, **__: 0
    )

  module = ModuleType("wandb")
  vars(module).update(init=init, Settings=lambda **given: given)
  monkeypatch.setitem(sys.modules, "wandb", module)
  monkeypatch.delenv("WANDB_MODE", raising=False)
  return told


def test_it_is_told_each_row_once_offline_and_goes_on_as_the_same_run(wandb, tmp_path):
  assert write(tmp_path, ["wandb"]) == []
  assert wandb.rows[0] == {
    "step": 1,
    "train/loss": 2.0,
    "train/perplexity": pytest.approx(7.389, rel=1e-3),
    "eval/loss/web": 3.5,
  }
  assert wandb.rows[1] == {"step": 2}  # NaN is left out
  assert wandb.finished == 1
  assert write(tmp_path, ["wandb"], [{"step": 4}]) == []
  one, other = wandb.inits
  assert (one["mode"], one["name"], one["dir"], one["project"]) == ("offline", tmp_path.name, str(tmp_path), "p")
  assert one["config"]["training"]["learning_rate"] == CONFIG.config.training.learning_rate
  assert one["id"] == other["id"] == json.loads((tmp_path / "trackers.json").read_text())["wandb"]


def test_one_that_fails_is_told_once_and_asked_no_more(wandb, tmp_path, caplog):
  wandb.error = ValueError("no such entity")
  assert write(tmp_path, ["wandb"]) == ["wandb: 3 rows not written: ValueError: no such entity"]
  assert caplog.text.count("wandb: ValueError: no such entity; training ") == 1
  assert len(wandb.inits) == 1
  assert [json.loads(line)["step"] for line in (tmp_path / "metrics.jsonl").read_text().splitlines()] == [1, 2, 3]


def test_nobody_waits_for_one_that_hangs(wandb, tmp_path, monkeypatch):
  wandb.wait.clear()
  monkeypatch.setattr(run_files, "_TRACKER_CLOSE_SECONDS", 0.2)
  begin = time.monotonic()
  (line,) = write(tmp_path, ["wandb"])
  wandb.wait.set()
  assert time.monotonic() - begin < 9
  assert line.startswith("wandb: 3 rows not written: writing did not finish")


def test_a_package_that_is_not_there_is_refused_before_anything_begins(monkeypatch, tmp_path):
  (tmp_path / "wandb").mkdir()  # an offline run leaves such a folder; it is not the package
  monkeypatch.syspath_prepend(tmp_path)
  monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "mlflow" else SimpleNamespace(origin=None))
  loaded = load_config("gemma3-tiny", ["wandb_project=p", "mlflow_experiment=e", f"output_dir={tmp_path}"])
  with pytest.raises(UserError) as refused:
    preflight(loaded)
  text = str(refused.value)
  assert "wandb_project = p: the package wandb is not installed" in text
  assert 'where: argument "wandb_project=p"' in text
  assert "fix: pip install -e '.[wandb]', or remove wandb_project" in text
  assert "fix: pip install -e '.[mlflow]', or remove mlflow_experiment" in text


def test_neither_is_loaded_unless_a_row_is_for_it():
  code = (
    "import sys, maxtext_like.training.run.run\nfrom maxtext_like.training.sinks import trackers\n"
    "assert trackers.trackers(__import__('types').SimpleNamespace(wandb_project='p', mlflow_experiment='e'), None)\n"
    "assert not {'wandb', 'mlflow'} & sys.modules.keys()"
  )
  subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.filterwarnings("ignore")  # warnings of third-party packages
def test_wandb_itself(tmp_path):
  pytest.importorskip("wandb", reason="wandb is not installed: pip install -e '.[wandb]'")
  assert write(tmp_path, ["wandb"]) == []
  time.sleep(1)  # wandb names the folder of a start by the second in which it begins
  assert write(tmp_path, ["wandb"], [{"step": 4, "loss": 0.5}]) == []
  number = json.loads((tmp_path / "trackers.json").read_text())["wandb"]
  assert len(list(tmp_path.glob(f"wandb/offline-run-*-{number}/run-{number}.wandb"))) == 2  # one per start, synced as one run


@pytest.mark.filterwarnings("ignore")
def test_mlflow_itself(tmp_path):
  pytest.importorskip("mlflow", reason="mlflow-skinny is not installed: pip install -e '.[mlflow]'")
  assert write(tmp_path, ["mlflow"]) == []
  assert write(tmp_path, ["mlflow"], [{"step": 4, "loss": 0.5}]) == []
  from mlflow import MlflowClient  # type: ignore[import-not-found]

  client = MlflowClient(tracking_uri=f"sqlite:///{tmp_path / 'mlflow.db'}")
  number = json.loads((tmp_path / "trackers.json").read_text())["mlflow"]
  assert [(m.step, m.value) for m in client.get_metric_history(number, "train/loss")] == [(1, 2.0), (3, 1.0), (4, 0.5)]
  run = client.get_run(number)
  assert run.info.status == "FINISHED"
  assert run.data.params["training.opt_type"] == "adamw"


def test_each_is_a_tracker_of_the_run():
  found = trackers(CONFIG.config.logging, Tracked.of(Path("runs/a"), CONFIG.config))
  assert isinstance(found["wandb"], WeightsAndBiases)
  assert isinstance(found["mlflow"], MLflow)
  assert trackers(load_config("gemma3-tiny").config.logging, Tracked.of(Path("runs/a"), CONFIG.config)) == {}
