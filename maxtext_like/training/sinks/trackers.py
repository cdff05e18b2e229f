"""Weights & Biases and MLflow: send the rows of metrics.jsonl there.

Both work offline unless their own environment variables say otherwise. They are imported only if they are configured. Each is
written to by a thread (``output.Guarded``), which creates the tracker's run with the first row: no step waits for it, and if it
fails training continues without it. The id of the tracker's run is stored in ``trackers.json``, so that a resumed run continues
it. Steps that are trained again appear twice.
"""

import contextlib
import dataclasses
import importlib.util
import json
import logging
import os
import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from maxtext_like import atomic
from maxtext_like.config.problems import Problem
from maxtext_like.config.schema import Config, LoggingConfig
from maxtext_like.config.yaml_file import to_text
from maxtext_like.extras import install
from maxtext_like.masking import masked
from maxtext_like.training.sinks.events import scalars
from maxtext_like.training.sinks.metrics import Row
from maxtext_like.training.sinks.output import LostError

IDS = "trackers.json"
_LOGIN_SECONDS = 30


@dataclass
class Tracked:
  """The information about a run that a tracker receives.

  Attributes:
    directory: directory of the run.
    config: by section, without secrets.
  """

  directory: Path
  config: dict[str, Any]

  @classmethod
  def of(cls, directory: Path, config: Config) -> "Tracked":
    """Return the information about a run with this configuration."""
    plain = lambda value: value if isinstance(value, int | float) else masked(to_text(value))
    sections = dataclasses.asdict(config)
    return cls(directory, {name: {key: plain(value) for key, value in keys.items()} for name, keys in sections.items()})

  @property
  def name(self) -> str:
    """Name of the run."""
    return self.directory.name

  def id_of(self, tracker: str) -> str | None:
    """Return the id of the run in a tracker; None if it has none yet."""
    return self._ids().get(tracker)

  def remember(self, tracker: str, number: str) -> None:
    """Store the id. Raises OSError."""
    atomic.write_text(self.directory / IDS, json.dumps(self._ids() | {tracker: number}, indent=1) + "\n")

  def _ids(self) -> dict[str, str]:
    with contextlib.suppress(FileNotFoundError, ValueError, TypeError, RecursionError):
      return dict(json.loads((self.directory / IDS).read_text(encoding="utf-8")))
    return {}


class Tracker(Protocol):
  """A destination of rows. Its errors are reported once; only after an OSError is the same row sent again."""

  def write(self, row: Row) -> None: ...

  def end(self) -> None: ...


@dataclass
class WeightsAndBiases:
  """A run of Weights & Biases in ``wandb/`` in the run's directory. ``wandb sync`` uploads it later; with WANDB_MODE=online it
  is uploaded during the run."""

  project: str
  run: Tracked
  _run: Any = field(default=None, init=False)
  _failed: str | None = field(default=None, init=False)

  def write(self, row: Row) -> None:
    if self._run is None:
      self._run = self._begin()
    # Its built-in step counter can only increase, and a run that goes back repeats steps, so the step is sent as a metric.
    self._run.log({"step": row["step"], **dict(scalars(row))})

  def end(self) -> None:
    if self._run is not None:
      self._run.finish()

  def _begin(self) -> Any:
    if self._failed is not None:
      raise LostError(self._failed)  # no new attempt, because each one may take long
    os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
    try:
      import wandb  # type: ignore[import-not-found]

      # A stored id continues the tracker's run.
      known = self.run.id_of("wandb") or uuid.uuid4().hex[:16]
      settings = wandb.Settings(
        console="off", silent=True, disable_git=True, save_code=False, login_timeout=_LOGIN_SECONDS, x_disable_meta=True
      )
      run = wandb.init(
        project=self.project, name=self.run.name, id=known, resume="allow", dir=str(self.run.directory), settings=settings,
        mode=os.environ.get("WANDB_MODE", "offline"), config=self.run.config,
      )  # fmt: skip
      run.define_metric("*", step_metric="step")
      self.run.remember("wandb", known)
    except Exception as error:
      self._failed = f"{type(error).__name__}: {error}"
      raise LostError(self._failed) from error
    return run


@dataclass
class MLflow:
  """A run of MLflow in ``mlflow.db`` in the run's directory, for ``mlflow ui --backend-store-uri sqlite:///...``, or at
  MLFLOW_TRACKING_URI."""

  experiment: str
  run: Tracked
  _client: Any = field(default=None, init=False)
  _id: str = field(default="", init=False)
  _failed: str | None = field(default=None, init=False)

  def write(self, row: Row) -> None:
    client = self._client = self._client or self._begin()
    from mlflow.entities import Metric  # type: ignore[import-not-found]

    now = int(time.time() * 1000)
    client.log_batch(self._id, metrics=[Metric(tag, number, now, row["step"]) for tag, number in scalars(row)])

  def end(self) -> None:
    if self._client is not None:
      self._client.set_terminated(self._id)

  def _begin(self) -> Any:
    if self._failed is not None:
      raise LostError(self._failed)
    os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
    try:
      from mlflow import MlflowClient  # type: ignore[import-not-found]
      from mlflow.entities import Param  # type: ignore[import-not-found]

      for name in ("mlflow", "alembic"):  # they log every table that they create
        logging.getLogger(name).setLevel(logging.WARNING)
      # Without a tracking server the database is in the run's directory.
      place = os.environ.get("MLFLOW_TRACKING_URI") or f"sqlite:///{self.run.directory.absolute() / 'mlflow.db'}"
      client = MlflowClient(tracking_uri=place)
      if (known := self.run.id_of("mlflow")) is not None:
        client.update_run(known, status="RUNNING")
      else:
        # A new run in the experiment, which is created if it does not exist.
        there = client.get_experiment_by_name(self.experiment)
        group = there.experiment_id if there is not None else client.create_experiment(self.experiment)
        known = client.create_run(group, run_name=self.run.name).info.run_id
        params = [
          Param(f"{section}.{key}", str(value)) for section, keys in self.run.config.items() for key, value in keys.items()
        ]
        for first in range(0, len(params), 100):  # the most that one call accepts
          client.log_batch(known, params=params[first : first + 100])
        self.run.remember("mlflow", known)
    except Exception as error:
      self._failed = f"{type(error).__name__}: {error}"
      raise LostError(self._failed) from error
    self._id = known
    return client


_PACKAGES = {"wandb_project": "wandb", "mlflow_experiment": "mlflow"}


def trackers(logging_config: LoggingConfig, run: Tracked) -> dict[str, Tracker]:
  """Return the trackers that a run asks for, by name."""
  found: dict[str, Tracker] = {}
  if logging_config.wandb_project is not None:
    found["wandb"] = WeightsAndBiases(logging_config.wandb_project, run)
  if logging_config.mlflow_experiment is not None:
    found["mlflow"] = MLflow(logging_config.mlflow_experiment, run)
  return found


def missing(logging_config: LoggingConfig) -> Iterator[tuple[str, Problem]]:
  """Yield the keys of trackers whose package is not installed, each with a message. Imports nothing."""
  for key, package in _PACKAGES.items():
    if (value := getattr(logging_config, key)) is None:
      continue
    spec = importlib.util.find_spec(package)
    if spec is None or spec.origin is None:  # an offline run leaves a folder named like the package, which is not the package
      fix = f"{install(package)}, or remove {key}"
      yield f"logging.{key}", Problem(f"{key} = {value}: the package {package} is not installed", fix=fix)
