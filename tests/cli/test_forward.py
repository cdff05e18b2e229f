"""``maxtext-like forward`` from arguments to its file: exit codes, messages, and numbers that match transformers."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from maxtext_like.cli.main import main
from tests.checkpoint.huggingface.test_tied import rewritten
from tests.generation.letters import write_letters

CASE = Path(__file__).parents[1] / "golden" / "deepseek3_plain"


def forward(tmp_path: Path, *words: str, checkpoint: Path = CASE / "checkpoint", inputs: Path = CASE / "inputs.npz") -> int:
  names = ["--checkpoint", str(checkpoint), "--inputs", str(inputs), "--output", str(tmp_path / "out.npz")]
  return main(["forward", *names, *words])


def test_results_match_and_are_printed(tmp_path: Path, capsys: pytest.CaptureFixture):
  (tmp_path / "out.npz").write_bytes(b"from before")
  assert forward(tmp_path, "--gradients", "dtype=float32", "module_api=linen", "scan_layers=false") == 0
  with np.load(tmp_path / "out.npz", allow_pickle=False) as file:
    out = dict(file)
  with np.load(CASE / "outputs.npz") as file:
    want = {key.removeprefix("fp32.base."): value for key, value in file.items() if key.startswith("fp32.base.")}
  for name, value in want.items():
    if not name.startswith("rope.") and not name.endswith(("topk_idx", "topk_weights")):
      assert out[name].shape == value.shape, name
      np.testing.assert_allclose(out[name], value, rtol=0, atol=1e-4 + 1e-3 * np.abs(value).max() * ("grad" in name))
  assert out["router.layer01.topk_idx"].dtype == np.int32
  assert {value.dtype.name for name, value in out.items() if not name.endswith("idx")} == {"float32"}
  assert not [path for path in tmp_path.iterdir() if path.name != "out.npz"]
  printed = capsys.readouterr().out
  assert "loss 5.76138" in printed
  assert "grad_global_norm" in printed


def failure(tmp_path: Path, capsys: pytest.CaptureFixture, *words: str, **where: Path) -> str:
  assert forward(tmp_path, *words, **where) == 2
  assert not (tmp_path / "out.npz").exists()
  captured = capsys.readouterr()
  assert captured.out == ""
  return captured.err


def test_failures_say_what_and_leave_nothing(tmp_path: Path, capsys: pytest.CaptureFixture):
  inputs = tmp_path / "in.npz"
  np.savez(inputs, input_ids=np.array([[3, 96]]))
  assert "the vocabulary has ids 0 to 95" in failure(tmp_path, capsys, inputs=inputs)
  np.savez(inputs, input_ids=np.array([[3, 95]]))
  assert "gradients need labels" in failure(tmp_path, capsys, "--gradients", inputs=inputs)
  assert "has no config.json" in failure(tmp_path, capsys, checkpoint=tmp_path)
  assert "did you mean 'dtype'" in failure(tmp_path, capsys, "dtyp=float32")
  assert "absent.npz" in failure(tmp_path, capsys, inputs=tmp_path / "absent.npz")
  assert "--gradient" in failure(tmp_path, capsys, "--gradient=5", "dtype=float32")


def test_values_of_config_json_are_blamed_on_it(tmp_path: Path, capsys: pytest.CaptureFixture):
  checkpoint = tmp_path / "model"
  shutil.copytree(CASE / "checkpoint", checkpoint)
  config = json.loads((checkpoint / "config.json").read_text())
  (checkpoint / "config.json").write_text(json.dumps(config | {"num_experts_per_tok": 7}))
  message = failure(tmp_path, capsys, checkpoint=checkpoint)
  assert "num_experts_per_tok = 7 is more than n_routed_experts = 6" in message
  assert str(checkpoint / "config.json") in message
  assert ".yml" not in message.replace("configs/base.yml", "")


def test_words_that_are_missing_or_wrong(tmp_path: Path, capsys: pytest.CaptureFixture):
  assert main(["forward", "--checkpoint", str(CASE)]) == 2
  assert "forward needs --inputs" in capsys.readouterr().err
  assert main(["forward", "--checkpoint"]) == 2
  assert "expected one argument" in capsys.readouterr().err
  words = ["--checkpoint", str(CASE / "checkpoint"), "--inputs", str(CASE / "inputs.npz")]
  assert main(["forward", *words, "--output", str(tmp_path / "absent" / "out.npz")]) == 2
  assert "cannot be written" in capsys.readouterr().err
  with pytest.raises(SystemExit) as end:
    main(["forward", "--help"])
  assert end.value.code == 0
  assert "grad.<parameter name in transformers>" in capsys.readouterr().out


@pytest.fixture
def extreme(tmp_path: Path) -> Path:
  """Write a checkpoint with a norm so large that the MLP's input overflows float16. Its float16 logits are finite but wrong."""

  def enlarge(arrays: dict[str, np.ndarray], *_: str) -> None:
    arrays["model.layers.3.pre_feedforward_layernorm.weight"][:] = 6e4

  return write_letters(rewritten(tmp_path / "model", "gemma3_text", enlarge))


@pytest.mark.parametrize("dtypes", [("float32", "float16"), ("float32", "float16", "bfloat16")])
@pytest.mark.slow
def test_float16_tells_which_values_left_its_range(tmp_path: Path, capsys: pytest.CaptureFixture, extreme: Path, dtypes):
  np.savez(tmp_path / "in.npz", input_ids=np.array([[3, 95, 7, 12]]))
  logits = {}
  for dtype in dtypes:
    assert forward(tmp_path, f"dtype={dtype}", checkpoint=extreme, inputs=tmp_path / "in.npz") == 0
    with np.load(tmp_path / "out.npz") as file:
      logits[dtype], counted = file["logits"], int(file["clamped"]) if "clamped" in file else None
    printed = capsys.readouterr().out
    assert (counted is not None) == ("clamped" in printed) == (dtype == "float16")
    if dtype == "float16":
      assert counted
      assert f"float16: {counted} values overflowed" in printed
  assert np.isfinite(logits["float16"]).all()
  assert np.abs(logits["float16"] - logits["float32"]).max() > 0.1 * np.abs(logits["float32"]).max()
  assert forward(tmp_path, "dtype=float16", inputs=CASE / "inputs.npz") == 0
  assert "float16: 0 values clamped" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.parametrize(("dtype", "told"), [("float16", True), ("bfloat16", False)])
def test_generation_tells_it_too(capsys: pytest.CaptureFixture, extreme: Path, dtype: str, told: bool):
  words = ["generate", "--checkpoint", str(extreme), "--prompt", "abc", "--max-tokens", "3", "--temperature", "0"]
  assert main([*words, f"dtype={dtype}"]) == 0
  assert ("values overflowed" in capsys.readouterr().err) == told
