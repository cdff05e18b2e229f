"""The best checkpoint and early stopping: which evaluation counts as better, and a resumed run gives the results of a run
without a stop."""

import json
import math
import os
import shutil
from unittest.mock import MagicMock

import pytest
from test_loop import Device, Result
from test_loop import run as play

from maxtext_like.api.pretrained import load
from maxtext_like.api.train import Run
from maxtext_like.checkpoint.store import manifest
from maxtext_like.checkpoint.store.best_steps import record_best, recorded_best
from maxtext_like.checkpoint.weight_sources import find_step
from maxtext_like.config.load import load_config
from maxtext_like.errors import UserError
from maxtext_like.training.loop.best import Best, stopped_early
from maxtext_like.training.loop.evaluation import Evaluation, perplexity
from tests.training.run.test_run import metrics, numbers, train, unbroken, workplace  # noqa: F401

LOSSES = {2: 3.0, 4: 2.0, 6: 2.5, 8: 2.25, 10: 1.0}
WORDS = ["eval_interval=2", "eval_steps=2", "keep_best=true", "max_to_keep=1", "early_stopping_patience=2"]


class Quick(Device):
  """A device whose steps take no time."""

  def step(self, state, batch, check):
    names = ("loss", "grad_norm", "param_norm", "learning_rate", "tokens", "skipped")
    finite = {name: Result(0.0) for name in ("state_parameters", "state_optimizer")}
    metrics = {name: Result(0.0) for name in (*names, "decided")} | {"skipped": Result(0.0, 0.0)}
    return state, metrics | {"finite": finite, "magnitude_bound": 1.0}


def test_what_is_better_and_for_how_long_nothing_was():
  best = Best(patience=2, threshold=0.5)
  for step, loss in enumerate([math.nan, 3.0, 2.75, math.nan], start=1):
    assert not best.exhausted or step > 4
    best.observe(step, loss)
  assert (best.step, best.loss, best.waited) == (3, 2.75, 2)  # the lowest, but not lower by more than the threshold
  assert best.exhausted
  assert best.why_stopped(4, 9) == (
    "stopped early at step 4 of 9: eval_loss has not fallen by more than 0.5 in 2 evaluations, "
    "the lowest is 2.7500 after step 3"
  )
  again = Best(patience=2)
  again.set_state(json.loads(json.dumps(best.get_state())), 4)
  assert again.get_state() == best.get_state()
  again.observe(5, 2.0)
  assert (again.step, again.waited) == (5, 0)


def test_a_longer_patience_goes_on_and_a_checkpoint_that_kept_nothing_counts_from_there():
  training = load_config("gemma4-tiny", ["eval_interval=2", "early_stopping_patience=2"]).config.training
  kept = {"step": None, "eval_loss": None, "waited": 2, "evaluated": 4}
  newest = lambda **extra: manifest.Manifest(step=4, finite=True, config={}, extra=extra, leaves={}, files={}, versions={})
  assert stopped_early(newest(best=kept), training) == (
    "stopped early at step 4 of 100: eval_loss has not fallen in 2 evaluations, none was finite"
  )
  assert stopped_early(newest(best=kept | {"waited": 1}), training) is None
  assert stopped_early(newest(), training) is None
  best = Best.of(training)
  best.set_state(None, 7)
  assert best.evaluated == 7


def test_a_perplexity_beyond_float64_is_infinite():
  assert perplexity(0.0) == 1.0
  assert perplexity(1e4) == math.inf


@pytest.mark.parametrize(
  ("words", "message"),
  [
    (["keep_best=true"], "keep_best = true .*eval_interval = 0"),
    (["early_stopping_patience=1"], "early_stopping_patience = 1 .*eval_interval = 0"),
    (["early_stopping_threshold=0.1"], "early_stopping_threshold = 0.1 .*early_stopping_patience = 0"),
    (["keep_best=true", "eval_interval=1", "enable_checkpointing=false"], "keep_best = true with enable_checkpointing: false"),
  ],
)
def test_keys_that_would_do_nothing_are_refused(words, message):
  with pytest.raises(UserError, match=message):
    load_config("gemma4-tiny", words)


def test_the_loop_saves_the_best_at_once_and_ends_when_nothing_is_better():
  manager = MagicMock(due=lambda step: step == 6, complete_steps=list)
  best, losses = Best(patience=2), iter([3.0, 2.0, 2.5, 2.25])
  keys = ["eval_interval=2", "keep_best=true", "early_stopping_patience=2"]
  files = play(20, *keys, manager=manager, best=best, evaluate=lambda _: {"eval_loss": next(losses)}, device=Quick())
  saves = [*manager.save.call_args_list, manager.save_and_wait.call_args]
  assert [(call.args[0], call.kwargs["best"]) for call in saves] == [(2, (2, 3.0)), (4, (4, 2.0)), (6, (4, 2.0)), (8, (4, 2.0))]
  assert manager.wait.call_count == 2  # before saving a new best step, but not before a save that is only due
  assert saves[-1].args[2]["best"] == {"step": 4, "eval_loss": 2.0, "waited": 2, "evaluated": 8}
  assert [call.args[0]["step"] for call in files.row.call_args_list] == list(range(1, 9))


@pytest.fixture
def played(monkeypatch):
  """Evaluations return the numbers in ``LOSSES``. The returned function sets the steps of the next evaluations. An evaluation
  after a step in ``leave`` returns None, as if a stop was requested during it."""
  left, steps = set(), iter(())

  def evaluate(self, params):
    step = next(steps)
    return None if step in left else {"eval_loss": LOSSES[step], "eval_perplexity": perplexity(LOSSES[step])}

  monkeypatch.setattr(Evaluation, "__call__", evaluate)

  def begin(*upcoming, leave=()):
    nonlocal steps
    steps = iter(upcoming)
    left.clear()
    left.update(leave)

  return begin


def kept(place, name):
  return {int(path.name) for path in (place / name / "checkpoints").iterdir() if path.name.isdecimal()}


def last(place, name, step):
  return manifest.read(place / name / "checkpoints" / str(step)).extra


@pytest.mark.slow
def test_a_run_stops_early_keeps_its_best_and_in_pieces_does_the_same(workplace, unbroken, played, capsys):  # noqa: F811
  played(2, 4, 6, 8)
  assert train(workplace, "whole", "steps=20", *WORDS) == 0
  shown = capsys.readouterr().out
  why = "stopped early at step 8 of 20: eval_loss has not fallen in 2 evaluations, the lowest is 2.0000 after step 4"
  assert f"finished: {why}; 8 steps; " in shown
  assert f"best    eval loss 2.0000 after step 4, in {workplace}/whole/checkpoints/best" in shown
  assert kept(workplace, "whole") == {4, 8}
  assert json.loads((workplace / "whole/checkpoints/best.json").read_text()) == {"step": 4, "eval_loss": 2.0}
  report = (workplace / "whole/report.html").read_text()
  assert why in report
  assert "<td>all<td>2.0000<td>4<td>2.2500<td>9.488<td>4" in report
  assert numbers(metrics(workplace, "whole"))[:4] == numbers(unbroken)

  # The run is started three times. The first start is stopped before its last evaluation, so the second one must do it. Before
  # the third start the checkpoints are lost, except those in the mirror.
  words = [*WORDS, f"checkpoint_mirror={workplace}/mirror"]
  played(2, 4, leave={4})
  assert train(workplace, "pieces", "steps=4", *words) == 0
  assert last(workplace, "pieces", 4)["best"] == {"step": 2, "eval_loss": 3.0, "waited": 0, "evaluated": 2}
  played(4, 6)
  assert train(workplace, "pieces", "steps=7", *words) == 0
  assert last(workplace, "pieces", 7)["best"] == {"step": 4, "eval_loss": 2.0, "waited": 1, "evaluated": 6}
  assert kept(workplace, "pieces") == kept(workplace / "mirror", "pieces") == {4, 7}
  shutil.rmtree(workplace / "pieces/checkpoints")
  played(8)
  assert train(workplace, "pieces", "steps=20", *words) == 0
  one, other = (last(workplace, name, 8) for name in ("whole", "pieces"))
  assert one == other
  both = [Run(workplace / name, "").metrics for name in ("whole", "pieces")]
  assert numbers(both[0]) == numbers(both[1])
  assert [row.get("eval_loss") for row in both[0]] == [row.get("eval_loss") for row in both[1]]
  assert Run(workplace / "pieces", "").best == workplace / "pieces/checkpoints/4"
  capsys.readouterr()

  assert train(workplace, "pieces", "steps=20", *WORDS) == 0
  assert f"{why}; raise early_stopping_patience" in capsys.readouterr().out
  played(10)
  assert train(workplace, "pieces", "steps=10", *WORDS, "early_stopping_patience=4") == 0
  assert kept(workplace, "pieces") == {10}
  assert find_step(workplace / "pieces/checkpoints/best") == workplace / "pieces/checkpoints/10"
  best, last_ = (load(workplace / "pieces/checkpoints" / name, dtype="float32") for name in ("best", "10"))
  assert bool((best.logits([[5, 6, 7]]) == last_.logits([[5, 6, 7]])).all())


def test_the_best_is_a_link_that_follows(tmp_path):
  for step in (20, 40):
    (tmp_path / str(step)).mkdir()
    record_best(tmp_path, step, 1.0 / step)
    assert (tmp_path / "best").resolve() == tmp_path / str(step)
    assert recorded_best(tmp_path) == step
  assert sorted(path.name for path in tmp_path.iterdir()) == ["20", "40", "best", "best.json"]


def test_a_best_that_was_copied_as_a_directory_becomes_a_link_again(tmp_path, caplog):
  """shutil.copytree follows links, so a copied ``best`` is a directory. Temporary links of killed processes are removed too."""
  (tmp_path / "best").mkdir()
  (tmp_path / "best" / "manifest.json").write_text("{}")
  (tmp_path / f"best.{os.getpid()}.tmp").symlink_to("10")
  (tmp_path / "best.1.tmp").symlink_to("10")
  for step in (20, 40):
    (tmp_path / str(step)).mkdir()
    record_best(tmp_path, step, 1.0 / step)
    assert (tmp_path / "best").resolve() == tmp_path / str(step)
  (record,) = caplog.records
  assert record.getMessage().startswith(f"{tmp_path}/best is a directory")
  assert "renamed to best.copied" in record.getMessage()
  assert sorted(path.name for path in tmp_path.iterdir()) == ["20", "40", "best", "best.copied", "best.json"]
