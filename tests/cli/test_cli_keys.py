"""``train --help-keys``: every key with type, default and description; patterns; MaxText's names."""

import pytest

from maxtext_like.cli.main import main
from maxtext_like.config.schema import LEAVES


def test_all_keys(capsys):
  assert main(["train", "--help-keys"]) == 0
  lines = capsys.readouterr().out.splitlines()
  told = [line.partition("  ")[0] for line in lines]
  assert sorted(told) == sorted(f"{section}.{leaf}" for leaf, (section, _) in LEAVES.items())
  assert told.index("model.head_dim") < told.index("model.mlp_activation"), "in the order of base.yml"


def test_pattern_matches_names_and_meanings(capsys):
  assert main(["train", "gemma4-tiny", "--help-keys", "^training.*steps$"]) == 0
  names = [line.partition(" ")[0] for line in capsys.readouterr().out.splitlines()]
  leaves = ("steps", "gradient_accumulation_steps", "lr_schedule_steps", "finite_check_steps", "max_skipped_steps")
  assert names == [f"training.{leaf}" for leaf in leaves]
  assert main(["train", "--help-keys", "learning_rate"]) == 0
  assert "training.warmup_steps_fraction" in capsys.readouterr().out, "its description has the words learning rate"
  assert main(["train", "--help-keys", "RMSNorm"]) == 0
  assert "model.normalization_layer_epsilon  (float; default 1e-06)" in capsys.readouterr().out


def test_maxtext_names_lead_to_ours(capsys):
  assert main(["train", "--help-keys", "base_emb"]) == 0
  assert capsys.readouterr().out == "base_emb_dim: MaxText's name of emb_dim\n"


@pytest.mark.parametrize(
  ("words", "reason"),
  [
    (["stepz"], "no such key, did you mean 'steps'?"),
    (["("], "not a regular expression"),
    (["a", "b"], "takes one pattern, not 2"),
  ],
)
def test_refusals(words, reason, capsys):
  assert main(["train", "--help-keys", *words]) == 2
  assert reason in capsys.readouterr().err


def test_a_terminal_gets_a_table(capsys, monkeypatch):
  monkeypatch.setattr("sys.stdout.isatty", lambda: True)
  monkeypatch.setenv("COLUMNS", "140")
  monkeypatch.setenv("TERM", "dumb")
  assert main(["train", "--help-keys", "trainable"]) == 0
  out = capsys.readouterr().out
  assert "trainable_parameters_mask" in out
  assert "[]" in out  # brackets are not read as markup
