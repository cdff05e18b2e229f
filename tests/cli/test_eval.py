"""Errors of ``maxtext-like eval`` before a model is loaded, and its progress lines. tests/evaluation runs it on tasks."""

import importlib.util
import io
from pathlib import Path

import pytest

from maxtext_like import evaluate
from maxtext_like.cli import counted
from maxtext_like.cli.eval import gen_kwargs
from maxtext_like.cli.main import main
from maxtext_like.errors import UserError

CHECKPOINT = str(Path(__file__).parents[1] / "golden" / "gemma3_text" / "checkpoint")


@pytest.fixture
def without_harness(monkeypatch: pytest.MonkeyPatch):
  find = importlib.util.find_spec
  monkeypatch.setattr(importlib.util, "find_spec", lambda name, *rest: None if name == "lm_eval" else find(name, *rest))


@pytest.mark.parametrize(
  ("more", "reason"),
  [
    (["--tasks", "arc_easy"], "needs lm-evaluation-harness, which is not installed\n  fix: pip install -e '.[eval]'"),
    ([], "needs --tasks"),
    (["--tasks", "a", "--log-samples"], "--log-samples needs --output"),
    (["--tasks", "a", "--limit", "0"], "limit=0.0 is not above 0\n  fix: pass a number of documents, or a fraction below 1"),
    (["--tasks", "a", "--batch-size", "0"], "batch_size=0 is too small\n  fix: pass at least 1"),
    (["--tasks", "a", "--fewshot-as-multiturn"], "fewshot_as_multiturn needs a chat template"),
    (["--tasks", "a", "--gen-kwargs", "temperature"], "'temperature' is not key=value"),
    (["--tasks", "a", "--model", "hf"], "unknown word '--model'"),
    (["--tasks", "a", "--output", "/nowhere/else/a.json"], "the folder of this file does not exist"),
  ],
)
def test_what_it_refuses(more: list[str], reason: str, without_harness, capsys: pytest.CaptureFixture):
  assert main(["eval", CHECKPOINT, *more]) == 2
  assert reason in capsys.readouterr().err


def test_a_run_with_tasks_is_refused_before_it_writes_a_file(without_harness, tmp_path: Path, capsys: pytest.CaptureFixture):
  words = ["gemma3-tiny", "steps=1", "eval_tasks=[arc_easy]", "eval_tasks_interval=1", f"output_dir={tmp_path}"]
  small = ["num_decoder_layers=1", "inhomogeneous_layer_cycle_interval=1", "max_target_length=32", "per_device_batch_size=1"]
  assert main(["train", *words, *small, "compilation_cache_dir=null"]) == 2
  assert "pip install -e '.[eval]'" in capsys.readouterr().err
  assert not list(tmp_path.rglob("*.jsonl"))


def test_arguments_of_python():
  with pytest.raises(UserError, match=r"evaluate: num_fewshot=1\.5: not a whole number"):
    evaluate(CHECKPOINT, "a", num_fewshot=1.5)  # pyright: ignore[reportArgumentType]
  with pytest.raises(UserError, match="unknown argument 'num_fewshots', did you mean 'num_fewshot'"):
    evaluate(CHECKPOINT, [CHECKPOINT + "/a.yaml"], num_fewshots=1)


def test_generation_kwargs_have_json_values():
  found = gen_kwargs("temperature=0.7,do_sample=true,until=x,top_k=5")
  assert found == {"temperature": 0.7, "do_sample": True, "until": "x", "top_k": 5}


@pytest.mark.parametrize(("terminal", "shown"), [(True, "\rrows 0 of 1,200\rrows 8 of 1,200\r               \r"), (False, "")])
def test_progress(terminal: bool, shown: str, monkeypatch: pytest.MonkeyPatch):
  stream = io.StringIO()
  monkeypatch.setattr(stream, "isatty", lambda: terminal)
  monkeypatch.setattr("sys.stderr", stream)
  with counted.Counted() as count:
    count("rows", 0, 1200)
    count("rows", 8, 1200)
  assert stream.getvalue() == shown
