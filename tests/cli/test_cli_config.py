"""``maxtext-like config``: the output is a configuration that can be loaded, with origins and notes as comments."""

import pytest

from maxtext_like.cli.main import main
from maxtext_like.config.load import load_config


def test_prints_a_configuration_that_loads(capsys, tmp_path):
  assert main(["config", "gemma4-tiny", "steps=7", "--seed", "3"]) == 0
  out = capsys.readouterr().out
  assert '\n  steps: 7  # command line "steps=7"\n' in out
  assert '\n  seed: 3  # command line "--seed 3"\n' in out
  (tmp_path / "m.yml").write_text(out)
  assert load_config(tmp_path / "m.yml").config == load_config("gemma4-tiny", ["steps=7", "seed=3"]).config


def test_notes_follow_as_comments(capsys, tmp_path):
  text = "model:\n" + "".join(
    f"  {line.strip()}\n"
    for line in """
    decoder_block: gemma3
    vocab_size: 512
    base_emb_dim: 16
    base_mlp_dim: 16
    base_num_decoder_layers: 6
    base_num_query_heads: 2
    base_num_kv_heads: 1
    head_dim: 8
    mlp_activations: [gelu, linear]
    sliding_window_size: 4
    conv_stride_for_vit: 14""".strip().splitlines()
  )
  (tmp_path / "m.yml").write_text(text)
  assert main(["config", str(tmp_path / "m.yml")]) == 0
  assert f"# note: {tmp_path}/m.yml:12: conv_stride_for_vit has no effect: " in capsys.readouterr().out


@pytest.mark.parametrize("words", [[], ["steps=5"], ["--steps=5", "gemma4-tiny"]])
def test_the_model_comes_first(words, capsys):
  assert main(["config", *words]) == 2
  assert "the model is missing" in capsys.readouterr().err


def test_help_names_what_it_takes(capsys):
  with pytest.raises(SystemExit, match="0"):
    main(["config", "--help"])
  out = capsys.readouterr().out
  assert "maxtext-like config CONFIG [overlay.yml ...] [key=value ...]" in out
  assert "gemma4-31b" in out
