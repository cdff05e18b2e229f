"""``maxtext-like bisect``: arguments that are refused, and complete runs with their exit codes and output."""

import pytest

from maxtext_like.cli.main import main
from maxtext_like.config.load import load_config
from tests.models.test_golden import GOLDEN

SMALL = ["num_decoder_layers=1", "inhomogeneous_layer_cycle_interval=1", "emb_dim=16", "mlp_dim=24", "max_target_length=16"]
SMALL += ["per_device_batch_size=2", "dataset=synthetic", "learning_rate=1e-4", "compilation_cache_dir=null"]


@pytest.fixture
def bisect(capsys):
  """Return a function bisect(*words) -> exit code, standard output and standard error."""

  def run(*words):
    code = main(["bisect", *words])
    return code, *capsys.readouterr()

  return run


@pytest.mark.parametrize(
  ("words", "reason"),
  [
    ([], "needs a configuration"),
    (["steps=3"], "needs a configuration"),
    (["gemma4-tiny", "--tolerance", "0"], "not a relative error above 0"),
    (["gemma4-tiny", "--tolerance", "nan"], "not a relative error above 0"),
    (["gemma4-tiny", "--tolerance", "much"], "invalid float value: 'much'"),
    (["gemma4-tiny", "--checkpoint"], "expected one argument"),
    (["gemma4-tiny", "--checkpoint", "/nowhere/else"], "argument --checkpoint: /nowhere/else: no such file or directory"),
    (["--checkpoint", "tests", "dtype=float16"], "needs a configuration: tests has no config.json"),
    (["--checkpoint", "tests", "gemma4-tiny", "flaot32_logits=true"], "did you mean 'float32_logits'?"),
    (["gemma4-tiny", "flaot32_logits=true"], "did you mean 'float32_logits'?"),
  ],
)
def test_wrong_words(words, reason, bisect):
  code, _, said = bisect(*words)
  assert code == 2
  assert reason in said


def test_one_of_several_processes(bisect, monkeypatch):
  for name, value in {"JAX_COORDINATOR_ADDRESS": "h:1", "JAX_NUM_PROCESSES": "2", "JAX_PROCESS_ID": "0"}.items():
    monkeypatch.setenv(name, value)
  code, _, said = bisect("gemma4-tiny")
  assert code == 2
  assert "JAX started several\n  fix: run it on one host" in said


@pytest.mark.slow
def test_a_step_that_is_fine(bisect):
  code, said, _ = bisect("gemma4-tiny", *SMALL, "dtype=bfloat16", "--tolerance", "0.5")
  assert code == 0
  assert "gemma4-tiny in bfloat16: errors against float32: loss " in said
  assert "nothing to repair: within the tolerance of 0.5" in said


@pytest.mark.nightly  # tests/analysis/test_quantized_overflow.py covers this checkpoint, also without a configuration
def test_a_hugging_face_checkpoint_needs_no_configuration(bisect):
  """The gated product overflows float16, and one key repairs it. The loss scale is not listed: a run adapts it itself."""
  checkpoint = GOLDEN / "stress_fp16_mlp" / "checkpoint"
  words = ["dtype=float16", "float32_gate_product=false", "float16_clamp=false", "max_target_length=12"]
  code, said, _ = bisect("--checkpoint", str(checkpoint), *words, "compilation_cache_dir=null")
  assert code == 0
  lines = said.splitlines()
  at = lines.index("precision:")
  assert lines[at + 1 : at + 3] == ["  float32_gate_product: true", ""]


@pytest.mark.slow
def test_a_mended_step(bisect, tmp_path):
  words = [*SMALL, "dtype=bfloat16", "weight_dtype=bfloat16"]
  code, said, _ = bisect("gemma4-tiny", *words, "--tolerance=0.3")
  assert code == 0
  lines = said.splitlines()
  at = lines.index("precision:")
  assert lines[at + 1] == "  weight_dtype: float32"
  head, row = lines[at + 3 :]
  assert head.split("  ")[0] == "key"
  assert row.startswith("weight_dtype=float32")
  assert " x " in row  # the measured cost
  assert "update: " in row
  # The printed lines are a valid hardware file.
  (tmp_path / "mend.yml").write_text("\n".join(lines[at : at + 2]))
  assert (
    load_config("gemma4-tiny", [*SMALL, "dtype=bfloat16", str(tmp_path / "mend.yml")]).config.precision.weight_dtype
    == "float32"
  )


@pytest.mark.slow
def test_nothing_mends_it_and_the_weights_of_a_run(bisect, tmp_path, capsys):
  own = [f"output_dir={tmp_path}", "run_name=r", "steps=1", "enable_tensorboard=false"]
  assert main(["train", "gemma4-tiny", *SMALL, *own]) == 0
  capsys.readouterr()
  words = [*SMALL, "dtype=float32", "weight_dtype=bfloat16", "--checkpoint", str(tmp_path / "r"), "--tolerance", "1e-12"]
  code, said, _ = bisect("gemma4-tiny", *words)
  assert code == 3
  assert "no precision key brings it within the tolerance of 1e-12" in said
  assert "smallest error, with weight_dtype=float32: " in said
