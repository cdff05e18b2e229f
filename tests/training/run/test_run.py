"""Complete runs of ``maxtext-like train``: files, resumes, refusals and exit codes."""

import json
import os
import shutil
import signal
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import jax
import pytest

import maxtext_like
from maxtext_like.cli.main import main
from maxtext_like.data.prefetch import Prefetch
from maxtext_like.data.tokenization.tokenizer import BytesTokenizer
from maxtext_like.training.loop import loop
from maxtext_like.training.loop.evaluation import Evaluation
from maxtext_like.training.loop.loop import Loop
from maxtext_like.training.loop.signals import StopRequested
from maxtext_like.training.loop.watchdog import Watchdog
from maxtext_like.training.run import run
from tests.tiers import nightly

WORDS = ["max_target_length=16", "per_device_batch_size=4", "num_decoder_layers=2", "emb_dim=32", "mlp_dim=48"]
WORDS += ["inhomogeneous_layer_cycle_interval=1"]
WORDS += ["lr_schedule_type=constant", "warmup_steps_fraction=0", "dataset_documents_max=40", "eval_fraction=0.2"]
KEYS = {"step", "loss", "grad_norm", "param_norm", "learning_rate", "tokens", "step_seconds", "tokens_per_second"}
KEYS |= {"tflops_per_device", "skipped", "clipped"}


@pytest.fixture(scope="module")
def workplace(tmp_path_factory):
  """A folder for runs. Its compilation cache (see ``train``) is shared, so that the same program is compiled once."""
  place = tmp_path_factory.mktemp("runs")
  return place


def train(place: Path, name: str, *words: str) -> int:
  settings = [f"output_dir={place}", f"run_name={name}", f"compilation_cache_dir={place}/cache"]
  return main(["train", "gemma4-tiny", *WORDS, *settings, *words])


def metrics(place: Path, name: str) -> list[dict]:
  return [json.loads(line) for line in (place / name / "metrics.jsonl").read_text().splitlines()]


def numbers(rows: list[dict]) -> list[tuple]:
  return [(r["step"], r["loss"], r["grad_norm"], r["param_norm"]) for r in rows]


@pytest.fixture(scope="module")
def unbroken(workplace):
  assert train(workplace, "unbroken", "steps=4", "eval_interval=2", "eval_steps=2") == 0
  return metrics(workplace, "unbroken")


@pytest.mark.parametrize(
  ("message", "code"),
  [("INTERNAL: CUDA_ERROR_ILLEGAL_ADDRESS: an illegal memory access", 42), ("INVALID_ARGUMENT: shapes", None)],
)
@pytest.mark.slow
def test_a_device_that_fails_in_training_is_a_fault_that_a_restart_mends(
  workplace, unbroken, monkeypatch, capsys, message, code
):
  def fails(*_):
    raise jax.errors.JaxRuntimeError(message)

  monkeypatch.setattr(Loop, "_launch", fails)
  words = ["steps=4", "eval_interval=2", "eval_steps=2"]
  if code is None:
    with pytest.raises(jax.errors.JaxRuntimeError):
      train(workplace, "failing", *words)
    return
  assert train(workplace, "failing", *words) == code
  assert f"error: the device failed: {message}" in capsys.readouterr().err


def test_the_files_of_a_run(workplace, unbroken):
  run = workplace / "unbroken"
  assert [r["step"] for r in unbroken] == [1, 2, 3, 4]
  assert all(set(r) >= KEYS for r in unbroken)
  assert [("eval_loss" in r) for r in unbroken] == [False, True, False, True]
  assert (run / "checkpoints/4/COMPLETE.json").exists()
  checks = json.loads((run / "finiteness.json").read_text())
  assert [checks[name]["result"] for name in ("loss0", "gradients", "parameters", "loss1")] == ["finite"] * 4
  assert 'steps: 4  # command line "steps=4"' in (run / "config.yml").read_text()
  assert json.loads((run / "env.json").read_text())["packages"]["jax"] == jax.__version__
  assert "<svg" in (run / "report.html").read_text()
  assert list((run / "tensorboard").iterdir())
  assert not (run / "run.lock").exists()


def test_going_on_is_bitwise_the_unbroken_run(workplace, unbroken, capsys):
  assert train(workplace, "broken", "steps=3", "module_api=linen", "eval_interval=4", "eval_steps=1") == 0
  too_short = "the run ends at step 3, before the first evaluation at step 4"
  assert too_short in capsys.readouterr().out
  # A killed run may leave such lines after those of its last checkpoint.
  with (workplace / "broken/metrics.jsonl").open("a") as file:
    file.write('{"step": 4, "loss": 1.0}\n{"step": 5, "lo')
  assert train(workplace, "broken", "steps=4", "eval_interval=4", "eval_steps=1") == 0
  assert "before the first evaluation" not in capsys.readouterr().out
  assert numbers(metrics(workplace, "broken")) == numbers(unbroken)


@pytest.mark.slow
def test_a_mixture_of_sources_is_told_and_each_evaluated(workplace, unbroken, tmp_path, capsys):
  for name, length in (("web", 60), ("code", 17)):
    texts = (f"{i} {name} " + name[i % 3] * (i * 7 % length) for i in range(40))
    (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
  files = f"{{web: {tmp_path}/web.jsonl, code: [{tmp_path}/code.jsonl]}}"
  words = ["dataset=jsonl", f"dataset_path={files}", "dataset_weights={web: 3, code: 1}", "eval_interval=2", "eval_steps=2"]
  assert train(workplace, "mixed", *words, "steps=2") == 0
  shown = capsys.readouterr().out
  counts = "32 training documents, 8 evaluation documents (held out by eval_fraction=0.2)"
  assert f"data    code: 0.25 of the tokens, {counts}" in shown
  assert f"data    web: 0.75 of the tokens, {counts}" in shown
  rows = metrics(workplace, "mixed")
  assert rows[1].keys() >= {"epoch/web", "epoch/code", "tokens/web", "tokens/code", "eval_loss/web", "eval_loss/code"}
  assert abs(rows[1]["tokens/web"] - 3 * rows[1]["tokens/code"]) <= 4 * 70
  both = sorted((rows[1]["eval_loss/web"], rows[1]["eval_loss/code"]))
  assert both[0] < rows[1]["eval_loss"] < both[1]
  assert train(workplace, "mixed", *words, "steps=3", "dataset_weights={web: 1, code: 1}") == 2
  assert "weights web: was 3.0, is 1.0" in capsys.readouterr().err


def test_a_finished_run_is_left_as_it_is(workplace, unbroken, capsys):
  run = workplace / "unbroken"
  before = {path: path.stat().st_mtime_ns for path in run.rglob("*") if path.is_file() and "lock" not in path.name}
  assert train(workplace, "unbroken", "steps=4") == 0
  assert "already at step 4 of 4" in capsys.readouterr().out
  assert {path: path.stat().st_mtime_ns for path in before} == before


@pytest.mark.slow
def test_a_run_that_exploded_ends_with_3_again_and_again_and_its_export_warns(workplace, capsys):
  words = ["learning_rate=1e4", "steps=4", "max_skipped_steps=100"]
  assert train(workplace, "exploded", *words) == 3
  out, err = capsys.readouterr()
  assert "step 1: the parameter norm rose from " in out
  assert "what to try: a lower learning_rate (now 10000)" in out
  assert "the run ended at step 4 (saved in " in err
  assert "far above" in err
  assert train(workplace, "exploded", *words) == 3
  assert "already at step 4 of 4; the run has failed:" in capsys.readouterr().err
  assert main(["export", str(workplace / "exploded"), "--out", str(workplace / "exported")]) == 0
  assert "the run has failed, and these weights are not usable" in capsys.readouterr().err
  assert any("the run has failed" in note for note in maxtext_like.load(workplace / "exploded").notes)
  assert train(workplace, "after", f"init_from={workplace / 'exploded'}", "steps=1") in (0, 3)
  assert f"warning {workplace / 'exploded'}: the run has failed" in capsys.readouterr().out


def main_thread_waits_for_a_batch() -> bool:
  frame: Any = sys._current_frames()[threading.main_thread().ident or 0]
  while frame is not None and (frame.f_code.co_name, Path(frame.f_code.co_filename).name) != ("get", "prefetch.py"):
    frame = frame.f_back
  return frame is not None


@pytest.mark.slow
def test_a_stop_while_the_data_stall_keeps_the_finished_steps(workplace, tmp_path, monkeypatch, capsys):
  """On SIGTERM while the loop waits for a batch that never arrives, the finished steps are saved. The resumed run reads the
  same data as a run without a stop."""
  path = tmp_path / "records.jsonl"
  path.write_text("".join(json.dumps({"text": f"{i} of the records that are short"}) + "\n" for i in range(200)))
  words = [
    "dataset=jsonl",
    f"dataset_path={path}",
    "shuffle=false",
    "eval_fraction=0",
    "dataset_documents_max=null",
    "replay_failed_step=false",
  ]
  reads, thawed, encode = iter(range(1000)), threading.Event(), BytesTokenizer.encode

  def from_a_disk_that_hangs(*given, **keys):
    if threading.current_thread().name == "maxtext-like-data" and next(reads) >= 16:
      seen = 0
      while seen < 20:  # a batch that is ready is taken in less time
        seen = seen + 1 if main_thread_waits_for_a_batch() else 0
        time.sleep(0.01)
      if not thawed.is_set():
        os.kill(os.getpid(), signal.SIGTERM)
      thawed.wait(60)
      raise SystemExit
    return encode(*given, **keys)

  with monkeypatch.context() as patched:
    patched.setattr(BytesTokenizer, "encode", from_a_disk_that_hangs)
    patched.setattr(Prefetch.stop, "__defaults__", (0.05,))  # seconds to wait for a thread that does not end
    assert train(workplace, "stalled", "steps=100", *words) == 42
    thawed.set()
  (checkpoint,) = (workplace / "stalled/checkpoints").iterdir()
  step = int(checkpoint.name)
  assert step > 2
  assert (
    f"stopped by SIGTERM after step {step}, saved in {checkpoint}; the same call continues from there"
    in capsys.readouterr().err
  )
  assert len(metrics(workplace, "stalled")) == step
  assert train(workplace, "stalled", f"steps={step + 3}", *words) == 0
  assert train(workplace, "fluent", f"steps={step + 3}", *words) == 0
  assert numbers(metrics(workplace, "stalled")) == numbers(metrics(workplace, "fluent"))


@pytest.mark.parametrize("call", ["reset", "__next__"])
def test_a_stop_while_the_data_to_evaluate_on_stall_leaves_the_evaluation(call):
  def stall(*_):
    raise StopRequested

  calls = {"reset": lambda _: None, "__next__": lambda _: {}} | {call: stall}
  data: Any = type("Stalled", (), calls)()
  program: Any = SimpleNamespace(
    config=SimpleNamespace(data=SimpleNamespace(eval_steps=2), watchdog=SimpleNamespace(watchdog_compile_seconds=9)),
    place=lambda batch: batch,
    lower_eval=lambda: SimpleNamespace(compile=lambda: lambda params, batch: (1.0, 1)),
  )  # fmt: skip
  quiet: Any = MagicMock()
  stop: Any = SimpleNamespace(requested=None, check_together=lambda part: None, interruptible=lambda work: work())
  assert Evaluation(program, {"": data}, quiet, stop, quiet, quiet)({}) is None


def test_another_model_in_the_same_run_is_refused(workplace, unbroken, capsys):
  assert train(workplace, "unbroken", "steps=5", "sliding_window_size=7") == 2
  assert "sliding_window_size" in capsys.readouterr().err


def test_no_resume_into_a_used_directory(workplace, unbroken, capsys):
  assert train(workplace, "unbroken", "steps=5", "resume=false") == 2
  assert "choose another run_name" in capsys.readouterr().err


def test_weights_of_another_run(workplace, unbroken):
  assert train(workplace, "second", "steps=1", f"init_from={workplace / 'unbroken'}") == 0
  (row,) = metrics(workplace, "second")
  # New random weights would give the first loss of the other run bit for bit, because the batch is the same.
  assert abs(row["loss"] - unbroken[0]["loss"]) > 1e-3
  checks = json.loads((workplace / "second/finiteness.json").read_text())
  assert checks["loss1"]["result"] == "not run"


@pytest.mark.slow
def test_a_non_finite_update_ends_with_3_and_is_not_saved(workplace, capsys):
  words = ["opt_type=sgd", "learning_rate=1e7", "weight_dtype=float16", "gradient_clipping_threshold=0", "steps=3"]
  words += ["replay_failed_step=false"]  # tested in tests/analysis/test_failed_step.py
  assert train(workplace, "huge", *words) == 3
  out, err = capsys.readouterr()
  assert "step 1: non-finite parameters in" in err
  assert "a lower learning_rate" in err
  assert "finiteness  parameters  not finite" in out
  checks = json.loads((workplace / "huge/finiteness.json").read_text())
  assert checks["parameters"]["first"][0] == "embedding.table"
  assert not list((workplace / "huge/checkpoints").iterdir())
  assert "stopped: step 1: non-finite" in (workplace / "huge/report.html").read_text()


@pytest.mark.parametrize(
  ("words", "message"),
  [
    (["dataset=text", "dataset_path=/nowhere/*.txt"], "/nowhere/*.txt"),
    (["init_from=/nowhere"], "init_from: /nowhere does not exist"),
    (["init_from=/", "tokenizer=bytes"], "init_from: / is not a checkpoint"),
    (["stepz=3"], "steps"),
  ],
)
def test_bad_input_ends_with_2(workplace, words, message, capsys):
  assert train(workplace, "bad", *words) == 2
  assert message in capsys.readouterr().err
  assert not (workplace / "bad").exists()


@pytest.mark.slow
def test_too_large_for_the_machine_ends_with_4(workplace, capsys):
  assert main(["train", "deepseek3-671b", f"output_dir={workplace}", "run_name=large"]) == 4
  assert "does not fit" in capsys.readouterr().err
  assert not (workplace / "large").exists()


def test_a_start_that_fails_before_anything_is_read_is_counted(workplace, capsys):
  """If starts that fail early were not counted, a scheduler would restart a run with an unreachable mirror forever. The
  mirror's path is below a file, so it cannot be created."""
  (workplace / "file").write_text("")
  words = [f"checkpoint_mirror={workplace}/file/mirror", "max_restarts_without_progress=1"]
  assert train(workplace, "unanswered", "dataset_path=nowhere", "dataset=text", *words) == 2
  assert not (workplace / "unanswered").exists()
  assert train(workplace, "unanswered", *words) == 42
  # An error that the user must fix is not counted, and does not reset the count.
  assert train(workplace, "unanswered", "per_device_batch_size=3000000", *words) == 4
  assert json.loads((workplace / "unanswered/restarts.json").read_text())["starts"] == 1
  assert train(workplace, "unanswered", *words) == 42
  capsys.readouterr()
  assert train(workplace, "unanswered", *words) == 3
  assert "started 2 times in a row without a new checkpoint" in capsys.readouterr().err


@pytest.mark.slow
def test_a_signal_leaves_the_step_its_time_and_a_restore_has_its_own(workplace, monkeypatch):
  events: list[object] = []

  class Recorded(Watchdog):
    def begin_shutdown(self):
      events.append("shutdown")
      super().begin_shutdown()

    def watch(self, kind, what=None, *, thread=None):
      events.append((what, kind, thread))
      return super().watch(kind, what, thread=thread)

  def end_of(loss):
    if events.count("end") == 1:  # the second step
      os.kill(os.getpid(), signal.SIGTERM)
      time.sleep(1.5)  # three ticks of the watchdog
    events.append("end")
    return end_of_step(loss)

  end_of_step = loop._wait_for_end
  monkeypatch.setattr(run, "Watchdog", Recorded)
  monkeypatch.setattr(loop, "_wait_for_end", end_of)
  assert train(workplace, "signaled", "steps=100") == 42
  assert events.count("end") >= 2
  assert "end" not in events[events.index("shutdown") :]
  events[:] = ["end", "end"]
  assert train(workplace, "signaled", "steps=4") == 0
  assert ("the restore", "read", threading.get_ident()) in events


@pytest.mark.slow
def test_conversations_that_were_cut_are_told_at_the_end(workplace, unbroken, tmp_path, capsys):
  said = {"messages": [{"role": "user", "content": "a?"}, {"role": "assistant", "content": "b"}]}
  (tmp_path / "a.jsonl").write_text((json.dumps(said) + "\n") * 4)
  words = ["dataset=jsonl", f"dataset_path={tmp_path}/a.jsonl", "data_format=chat", "chat_template=gemma3", "train_on=all"]
  assert train(workplace, "cut", *words, "packing=false", "shuffle=false", "eval_fraction=0", "epochs=1") == 0
  shown = capsys.readouterr().out
  assert "\ndata    of 4 conversations read: 4 cut at max_target_length=16\n" in shown
  assert "finished: 1 steps" in shown


@pytest.mark.slow
def test_a_run_by_epochs_counts_its_steps_and_with_more_of_them_goes_on(workplace, unbroken, tmp_path, capsys):
  texts = [f"{i} " + "fox " * (i % 5 + 1) for i in range(12)]
  (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
  words = ["dataset=jsonl", f"dataset_path={tmp_path}/a.jsonl", "packing=false", "eval_fraction=0", "dataset_documents_max=11"]
  assert train(workplace, "epochs", *words, "epochs=1") == 0
  shown = capsys.readouterr().out
  assert "epochs  1 of 11 documents: 11 rows, 3 steps of 4" in shown
  assert "finished: 3 steps; " in shown
  assert "steps: null  # follows from epochs" in (workplace / "epochs/config.yml").read_text()
  assert train(workplace, "epochs", *words, "epochs=1") == 0
  assert "already at step 3 of 3; raise epochs to continue" in capsys.readouterr().out
  assert main(["train", str(workplace / "epochs/config.yml"), "epochs=2"]) == 0  # the last batch of an epoch was filled up
  shown = capsys.readouterr().out
  assert "changed epochs: was 1, is 2" in shown
  assert "epochs  2 of 11 documents: 22 rows, 6 steps, 3 more of 4" in shown
  rows = metrics(workplace, "epochs")
  assert [row["step"] for row in rows] == [1, 2, 3, 4, 5, 6]
  assert [row["epoch"] for row in rows][-1] == 2
  once = sum(min(len(text) + 2, 16) - 1 for text in texts[:11])
  assert [sum(row["tokens"] for row in part) for part in (rows[:3], rows[3:])] == [once, once]


@pytest.mark.parametrize(
  ("size", "steps", "shown"),
  [
    (7, 3, "epochs  1 of 11 documents: 11 rows, 3 steps, 1 more of 7"),
    nightly(1, 9, "epochs  1 of 11 documents: 11 rows, 9 steps, 7 more of 1"),
  ],
)
@pytest.mark.slow  # tests/data/test_epochs.py tests the remaining rows
def test_with_other_batches_a_run_by_epochs_trains_the_rows_that_are_left(
  workplace, unbroken, tmp_path, capsys, size, steps, shown
):
  texts = [f"{i} fox" for i in range(11)]
  (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
  words = ["dataset=jsonl", f"dataset_path={tmp_path}/a.jsonl", "packing=false", "eval_fraction=0", "epochs=1"]
  name = f"batches-of-{size}"
  assert train(workplace, name, *words, "per_device_batch_size=2", "checkpoint_interval=1", "max_to_keep=9") == 0
  for step in range(3, 7):
    shutil.rmtree(workplace / name / "checkpoints" / str(step), ignore_errors=True)
  capsys.readouterr()
  assert train(workplace, name, *words, f"per_device_batch_size={size}") == 0
  assert shown in capsys.readouterr().out
  rows = metrics(workplace, name)
  assert [row["step"] for row in rows] == list(range(1, steps + 1))
  assert sum(row["tokens"] for row in rows) == sum(len(text) + 1 for text in texts)
  assert rows[-1]["epoch"] == 1
