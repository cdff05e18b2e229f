"""The checks of a run before JAX is imported."""

import subprocess
import sys

import pytest

from maxtext_like.checkpoint.store import manifest
from maxtext_like.config.load import load_config
from maxtext_like.errors import UserError
from maxtext_like.training.run.preflight import preflight


def finished(place, *words, step=100):
  """Make a run directory with one complete checkpoint that was saved with these settings."""
  config = manifest.record(load_config("gemma4-tiny", words).config)
  path = place / "gemma4-tiny/checkpoints" / str(step)
  path.mkdir(parents=True)
  manifest.write(path, manifest.Manifest(step=step, finite=True, config=config, extra={}, leaves={}, files={}, versions={}))


def test_a_tower_cannot_be_added(tmp_path):
  finished(tmp_path)
  with pytest.raises(
    UserError, match=r"vision.use_multimodal: checkpoint false, this run true\n.*\n  fix: use_multimodal=false"
  ):
    preflight(load_config("gemma4-tiny", [f"output_dir={tmp_path}", "use_multimodal=true"]))


@pytest.mark.parametrize(
  ("words", "known"),
  [
    ([], True),
    (["steps=50", "log_interval=7", "checkpoint_interval=3"], True),
    (["steps=101"], False),  # there is work to do
    # These may change the arrays of the state, which only the program can tell.
    (["weight_dtype=bfloat16"], False),
    (["mu_dtype=bfloat16"], False),
    (["opt_type=lion"], False),
  ],
)
def test_a_finished_run_is_known(tmp_path, words, known):
  finished(tmp_path)
  said = preflight(load_config("gemma4-tiny", [f"output_dir={tmp_path}", *words]))
  steps = 50 if "steps=50" in words else 100
  assert said == (f"{tmp_path}/gemma4-tiny: already at step 100 of {steps}; raise steps to continue" if known else None)


@pytest.mark.parametrize(
  ("rows", "said"), [(100, ""), (99, "the rows of step 100 are missing"), (0, "100 of the 100 finished")]
)
def test_rows_that_a_finished_run_lacks_are_reported(tmp_path, caplog, rows, said):
  finished(tmp_path)
  path = tmp_path / "gemma4-tiny/metrics.jsonl"
  path.write_text("".join(f'{{"step": {step}}}\n' for step in range(1, rows + 1)))
  assert "already at step 100" in (preflight(load_config("gemma4-tiny", [f"output_dir={tmp_path}"])) or "")
  missing = [record.getMessage() for record in caplog.records if "missing" in record.getMessage()]
  assert len(missing) == bool(said)
  assert all(line.startswith(f"{path}: the rows of") and said in line for line in missing)
  assert path.read_text().count("\n") == rows


def test_another_model_is_refused(tmp_path):
  finished(tmp_path)
  with pytest.raises(UserError, match=r"model.sliding_window_size: checkpoint 32, this run 7"):
    preflight(load_config("gemma4-tiny", [f"output_dir={tmp_path}", "steps=200", "sliding_window_size=7"]))


def test_every_wrong_path_is_listed_with_its_place(tmp_path):
  (tmp_path / "notes.txt").touch()
  words = ["init_from=/nowhere", "dataset=text", f"dataset_path=[{tmp_path}/*.txt, {tmp_path}/*.md]", "tokenizer=/no.json"]
  words += ["eval_path=/no.txt", "eval_interval=1"]
  with pytest.raises(UserError) as refused:
    preflight(load_config("gemma4-tiny", [*words, f"output_dir={tmp_path}"]))
  text = str(refused.value)
  assert "4 problems" in text
  for part in (
    "init_from: /nowhere does not exist",
    f"'{tmp_path}/*.md': the glob matches nothing",
    "'/no.json': no such file",
    "data.eval_path '/no.txt': no such file",
  ):
    assert part in text
  assert text.count('where: argument "') == 4


def test_init_from_has_to_be_there_at_a_resume_too(tmp_path):
  finished(tmp_path)
  with pytest.raises(UserError, match="init_from: /nowhere does not exist"):
    preflight(load_config("gemma4-tiny", [f"output_dir={tmp_path}", "init_from=/nowhere", "steps=200"]))
  load = load_config("gemma4-tiny", [f"output_dir={tmp_path}", f"init_from={tmp_path}/gemma4-tiny", "steps=200"])
  assert preflight(load) is None


def test_a_directory_that_cannot_be_made(tmp_path):
  (tmp_path / "file").touch()
  with pytest.raises(UserError, match=f"{tmp_path}/file is not a directory"):
    preflight(load_config("gemma4-tiny", [f"output_dir={tmp_path}/file/below"]))


@pytest.mark.parametrize("words", [[], ["init_from=/nowhere"], ["tokenizer=/nowhere"], ["resume=false"]], ids=str)
def test_jax_is_not_imported_for_an_answer(tmp_path, words):
  finished(tmp_path)
  program = "import sys; from maxtext_like.cli.main import main; code = main(sys.argv[1:]); "
  program += "sys.exit(code if not {'jax', 'flax', 'orbax'} & set(sys.modules) else 99)"
  command = [sys.executable, "-c", program, "train", "gemma4-tiny", f"output_dir={tmp_path}", *words]
  done = subprocess.run(command, capture_output=True, text=True, timeout=60)
  assert done.returncode == (2 if words else 0), done.stderr
  assert ("already at step 100" in done.stdout) == (not words)
