"""``train.py`` rejects invalid settings with exit code 2 and a message without a traceback, before it writes anything."""

import pytest

from tests.tiers import slow

ABSURD = "1" * 5000  # more digits than Python converts to an int


@pytest.mark.parametrize(
  ("keys", "said"),
  [
    ({"output_dir": "abfs://bucket/runs"}, "output_dir = abfs://bucket/runs: "),
    slow({"run_name": "x" * 300}, "run_name has 300 bytes"),
    ({"output_dir": "x" * 300}, "File name too long"),
    ({"steps": ABSURD}, "64-bit int"),
    slow({"num_decoder_layers": 2**30}, "num_decoder_layers: 1073741824 is above the limit 10000"),
    slow({"sample_prompts": "[" * 30000}, "nested more than 20 deep"),
  ],
  ids=lambda value: str(value)[:30],
)
def test_absurd_values(train, keys, said):
  process = train.spawn("a", **keys)
  assert process.wait(timeout=240) == 2, train.log.read_text()
  text = train.log.read_text()
  assert said in text
  assert "Traceback" not in text
  assert len(text) < 2000
  assert not (train.output_dir / "a").exists()


@pytest.mark.slow
def test_bombs_in_a_file(train, tmp_path):
  bomb = tmp_path / "bomb.yml"
  for text, said in (
    ("data:\n  text_field: &a [x, x]\n  tokenizer: [*a, *a]\n", "anchor '&a'"),
    ("data:\n  text_field:\n    " + "- " * 50000, "nested more than 20 deep"),
    ("training:\n  seed: " + ABSURD, "64-bit int"),
    ("data:\n" + "".join(f"  key{i}: {i}\n" for i in range(20000)), "50 problems"),
  ):
    bomb.write_text(text)
    process = train.spawn("a", hardware=bomb)
    assert process.wait(timeout=240) == 2, train.log.read_text()
    assert said in train.log.read_text()
    assert "Traceback" not in train.log.read_text()


@pytest.mark.parametrize(
  ("variables", "said"),
  [
    ({"JAX_COORDINATOR_ADDRESS": "host:1234"}, "JAX_NUM_PROCESSES, JAX_PROCESS_ID is not set"),
    (
      {"SLURM_JOB_ID": "1", "SLURM_NTASKS": "2", "SLURM_STEP_NUM_TASKS": "2", "SLURM_PROCID": "1"},
      "Slurm: JAX cannot find the other processes",
    ),
  ],
  ids=["jax", "slurm"],
)
def test_a_launcher_that_says_too_little(train, variables, said):
  process = train.spawn("a", environment=variables)
  assert process.wait(timeout=240) == 2, train.log.read_text()
  assert said in train.log.read_text()
  assert "Traceback" not in train.log.read_text()
  assert not (train.output_dir / "a").exists()
