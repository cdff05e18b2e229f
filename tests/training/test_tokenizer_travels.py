"""The tokenizer is stored with the weights: in checkpoints, exports and new runs, and generation uses it. Also samples during
training."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

import maxtext_like
from maxtext_like.checkpoint.read_weights import read_weights
from maxtext_like.checkpoint.store import manifest, sidecar_files
from maxtext_like.cli.main import main
from maxtext_like.config.load import load_config
from maxtext_like.data.tokenization.tokenizer import load_tokenizer
from maxtext_like.errors import UserError
from maxtext_like.training.loop import samples
from maxtext_like.training.loop.samples import Samples
from maxtext_like.training.run.report import render
from maxtext_like.training.run.resolve_tokenizer import resolve
from maxtext_like.training.step.program import make_program
from tests.generation.letters import write_letters
from tests.tiers import nightly

# The table has 61 rows and the tokenizer 46 tokens. No size is a power of two.
WORDS = ["max_target_length=18", "per_device_batch_size=3", "num_decoder_layers=2", "emb_dim=36", "mlp_dim=52", "vocab_size=61"]
WORDS += ["inhomogeneous_layer_cycle_interval=1"]
WORDS += ["lr_schedule_type=constant", "warmup_steps_fraction=0", "enable_tensorboard=false", "dataset=text", "shuffle=false"]
WORDS += ["checkpoint_interval=2", "max_to_keep=2"]
SAMPLES = ["sample_every=2", 'sample_prompts=["ab <start_of_turn>", ""]', "sample_tokens=11"]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory):
  place = tmp_path_factory.mktemp("travel")
  (place / "text.txt").write_text("the quick brown fox, the lazy dog. " * 40)
  write_letters(place / "tokenizer")
  (place / "tokenizer/generation_config.json").write_text('{"eos_token_id": [1, 4]}')
  (place / "tokenizer/tokenizer_config.json").write_text('{"bos_token": "<bos>"}')
  (place / "tokenizer/model.py").write_text("raise SystemExit")
  (place / "tokenizer/additional_chat_templates").mkdir()
  (place / "tokenizer/additional_chat_templates/tool_use.jinja").write_text("{{ tools }}")
  return place


def train(place: Path, name: str, *words: str) -> int:
  settings = [f"output_dir={place}/runs", f"run_name={name}", f"compilation_cache_dir={place}/cache"]
  return main(["train", "gemma4-tiny", *WORDS, f"dataset_path={place}/text.txt", *settings, *words])


def numbers(place: Path, name: str) -> list[tuple]:
  rows = [json.loads(line) for line in (place / "runs" / name / "metrics.jsonl").read_text().splitlines()]
  return [(r["step"], r["loss"], r["grad_norm"], r["param_norm"]) for r in rows]


@pytest.fixture(scope="module")
def trained(place: Path) -> Path:
  assert train(place, "plain", f"tokenizer={place}/tokenizer", "steps=4") == 0
  return place / "runs/plain"


def files_of(step: Path) -> set[str]:
  return {path.name for path in (step / sidecar_files.FOLDER).rglob("*") if path.is_file()}


def generate(*words: str) -> int:
  return main(["generate", "--max-tokens", "9", "--temperature", "0", *words])


VARIANTS = {"nnx, scan": [], "linen, loop": ["module_api=linen", "scan_layers=false"]}
VARIANTS["linen, loop"] += ["dtype=float16"]


@pytest.mark.parametrize("variant", ["nnx, scan", nightly("linen, loop")])
@pytest.mark.slow
def test_samples_change_no_bit_of_the_training(variant: str, place: Path, trained: Path, capsys: pytest.CaptureFixture):
  name, words = f"samples {len(VARIANTS[variant])}", [f"tokenizer={place}/tokenizer", "steps=4", *VARIANTS[variant]]
  if VARIANTS[variant]:
    assert train(place, "unsampled", *words) == 0
  capsys.readouterr()
  assert train(place, name, *words, *SAMPLES) == 0
  assert numbers(place, name) == numbers(place, "unsampled" if VARIANTS[variant] else "plain")
  run = place / "runs" / name
  rows = [json.loads(line) for line in (run / "samples.jsonl").read_text().splitlines()]
  assert [(row["step"], row["prompt"]) for row in rows] == [(s, p) for s in (2, 4) for p in ("ab <start_of_turn>", "")]
  assert any(row["text"] for row in rows)
  assert all(row["tokens"] <= 11 and "error" not in row for row in rows)
  out = capsys.readouterr().out
  assert 'sample  step 2  "ab <start_of_turn>" -> "' in out
  page = (run / "report.html").read_text()
  assert "<h2>Samples</h2>" in page
  assert page.index("<td>4<td class=text>") < page.index("<td>2<td class=text><b>ab &lt;start_of_turn&gt;</b>")
  assert "Samples" not in (trained / "report.html").read_text()


def test_logits_that_are_not_finite_are_told_and_never_sampled(place: Path, trained: Path, caplog: pytest.LogCaptureFixture):
  words = [*WORDS, f"dataset_path={place}/text.txt", *SAMPLES, f"tokenizer={place}/tokenizer"]
  program = make_program(load_config("gemma4-tiny", words).config)
  params = read_weights(trained, program.model)
  params["final_norm"]["scale"] = params["final_norm"]["scale"].at[3].set(np.nan)
  said = []
  rows = Samples(program, load_tokenizer(f"{place}/tokenizer"), said.append)(7, params)
  assert not said
  assert [(row["step"], row["text"], row["tokens"]) for row in rows] == [(7, "", 0)] * 2
  assert all("sample_prompts[0], token 0 of the answer: the logits are not finite" in row["error"] for row in rows)
  assert "step 7: no samples: sample_prompts[0]" in caplog.text
  page = render(name="n", outcome="", rows=[], finiteness={}, config_yaml="", environment={}, samples=rows)
  assert "<span class=bad>sample_prompts[0]" in page


def test_a_prompt_that_cannot_be_sampled_ends_the_run_before_it_begins(place: Path, capsys: pytest.CaptureFixture):
  shutil.copytree(place / "tokenizer", place / "no bos")
  (place / "no bos/tokenizer_config.json").write_text('{"bos_token": null}')
  assert train(place, "none", f"tokenizer={place}/no bos", *SAMPLES) == 2
  assert "sample_prompts[1]: empty, and the tokenizer has no token for the beginning of a text" in capsys.readouterr().err
  assert not (place / "runs/none").exists()


@pytest.mark.slow  # continues the run of test_samples_change_no_bit_of_the_training
def test_a_run_that_goes_on_writes_its_samples_again(place: Path, trained: Path):
  shutil.copytree(place / "runs/samples 0", place / "runs/again")
  shutil.rmtree(place / "runs/again/checkpoints/4")
  before = (place / "runs/again/samples.jsonl").read_text()
  # A killed run may leave such a line after those of its last checkpoint.
  with (place / "runs/again/samples.jsonl").open("a") as file:
    file.write('{"step": 4, "pro')
  assert train(place, "again", "steps=4", *SAMPLES) == 0
  assert (place / "runs/again/samples.jsonl").read_text() == before


def test_every_step_carries_the_files_and_the_manifest_has_their_hashes(trained: Path):
  for step in ("2", "4"):
    listed = manifest.read(trained / "checkpoints" / step).files
    names = {name.removeprefix("tokenizer/") for name in listed if name.startswith("tokenizer/")}
    more = "additional_chat_templates/tool_use.jinja"
    assert names == {"tokenizer.json", "tokenizer_config.json", "generation_config.json", more}
    assert files_of(trained / "checkpoints" / step) == {Path(name).name for name in names}


@pytest.mark.slow
def test_generate_and_export_need_no_tokenizer(place: Path, trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture):
  alone = tmp_path / "elsewhere"
  shutil.copytree(trained / "checkpoints/4", alone)
  answers = []
  for source in (trained, trained / "checkpoints/4", alone):
    assert generate("--checkpoint", str(source), "--prompt", "the fox", f"compilation_cache_dir={place}/cache") == 0
    out, err = capsys.readouterr()
    answers.append(out)
    assert "tokens, the first " in err
    assert "note" not in err
  assert len(set(answers)) == 1
  assert answers[0].startswith("the fox")
  assert main(["export", str(trained), "--out", str(tmp_path / "hf")]) == 0
  assert (tmp_path / "hf/tokenizer.json").read_bytes() == (place / "tokenizer/tokenizer.json").read_bytes()
  assert json.loads((tmp_path / "hf/generation_config.json").read_text()) == {"eos_token_id": [1, 4]}
  assert not (tmp_path / "hf/model.py").exists()
  assert (tmp_path / "hf/additional_chat_templates/tool_use.jinja").read_text() == "{{ tools }}"
  maxtext_like.import_checkpoint(tmp_path / "hf", tmp_path / "in")
  for folder in ("hugging_face", "checkpoints/0/tokenizer"):
    assert (tmp_path / "in" / folder / "additional_chat_templates/tool_use.jinja").is_file()
  assert "no tokenizer" not in capsys.readouterr().out


@pytest.mark.slow
def test_another_tokenizer_is_told(place: Path, trained: Path, capsys: pytest.CaptureFixture):
  write_letters(place / "another", user=9)
  words = ["--checkpoint", str(trained), "--prompt", "a", f"compilation_cache_dir={place}/cache"]
  assert generate(*words, f"tokenizer={place}/another") == 0
  assert "note: the model was trained with another tokenizer" in capsys.readouterr().err


def test_a_damaged_tokenizer_is_refused(trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture):
  shutil.copytree(trained / "checkpoints/4", tmp_path / "4")
  file = tmp_path / "4/tokenizer/tokenizer.json"
  file.write_text(file.read_text().replace('"<start_of_turn>"', '"<start_of_burn>"'))
  assert generate("--checkpoint", str(tmp_path / "4"), "--prompt", "a") == 2
  assert "tokenizer.json has changed since it was written" in capsys.readouterr().err


@pytest.mark.slow
def test_a_resumed_run_has_the_same_tokenizer_or_is_refused(place: Path, trained: Path, capsys: pytest.CaptureFixture):
  write_letters(place / "another", user=9)
  for other, extra in (("bytes", "vocab_size=61"), (f"{place}/another", "allow_data_change=true")):
    assert train(place, "plain", "steps=5", f"tokenizer={other}", extra) == 2
    capsys.readouterr()
  assert train(place, "plain", "steps=5", f"tokenizer={place}/another", "allow_data_change=true") == 2
  assert "was trained with the tokenizer 'tokenizer.json, xxh3 " in capsys.readouterr().err
  # The tokenizer's original folder may be gone, because the run has a copy.
  shutil.copytree(trained, place / "runs/moved")
  shutil.rmtree(place / "runs/moved/checkpoints/4")
  (place / "tokenizer").rename(place / "gone")
  try:
    assert train(place, "moved", "steps=4") == 0
  finally:
    (place / "gone").rename(place / "tokenizer")
  assert files_of(place / "runs/moved/checkpoints/4") == files_of(trained / "checkpoints/4")


def test_a_damaged_tokenizer_in_the_newest_step_is_not_the_one_that_a_run_goes_on_with(place: Path, trained: Path):
  run = place / "runs/damaged"
  shutil.copytree(trained, run)
  file = run / "checkpoints/4/tokenizer/tokenizer.json"
  file.write_text(file.read_text().replace('"<start_of_turn>"', '"<start_of_burn>"'))
  config = load_config("gemma4-tiny", [*WORDS, f"dataset_path={place}/text.txt"]).config
  assert resolve(config.data, config.checkpoint, run / "checkpoints").tokenizer == str(run / "checkpoints/2/tokenizer")
  fresh = resolve(config.data, config.checkpoint, place / "runs/nowhere/checkpoints")
  assert fresh.tokenizer == "bytes"


def test_weights_without_a_tokenizer_are_not_trained_on_bytes(tmp_path: Path):
  """Only an explicit tokenizer=bytes does that, as in generate."""
  (tmp_path / "config.json").write_text("{}")
  words = [*WORDS, "dataset_path=a.txt", f"init_from={tmp_path}"]
  config = load_config("gemma4-tiny", words).config
  with pytest.raises(UserError, match=r"neither tokenizer.json nor tokenizer.model.*\n  fix: tokenizer=PATH.*tokenizer=bytes"):
    resolve(config.data, config.checkpoint, tmp_path / "nowhere")
  config = load_config("gemma4-tiny", [*words, "tokenizer=bytes"]).config
  assert resolve(config.data, config.checkpoint, tmp_path / "nowhere").tokenizer == "bytes"


@pytest.mark.slow
def test_a_new_run_takes_that_of_the_weights_it_begins_with(place: Path, trained: Path):
  assert train(place, "second", "steps=4", f"init_from={trained}") == 0
  assert files_of(place / "runs/second/checkpoints/4") == files_of(trained / "checkpoints/4")
  fingerprint = load_tokenizer(str(place / "tokenizer")).fingerprint
  step = manifest.read(place / "runs/second/checkpoints/4")
  assert step.extra["data"]["identity"]["tokenizer"] == fingerprint


def test_a_run_on_conversations_answers_what_a_user_says(place: Path, trained: Path, tmp_path: Path, monkeypatch):
  """Sample prompts are framed by the chat template, and samples end at the end of the model's turn."""
  chats = [{"messages": [{"role": "user", "content": "ab"}, {"role": "assistant", "content": "cd"}]}]
  (tmp_path / "chats.jsonl").write_text("".join(json.dumps(chat) + "\n" for chat in chats * 4))
  words = [*WORDS, f"tokenizer={place}/tokenizer", "dataset=jsonl", f"dataset_path={tmp_path}/chats.jsonl", "data_format=chat"]
  words += ["chat_template=gemma3", "sample_every=1", 'sample_prompts=["ab"]', "sample_tokens=5"]
  program, tokenizer = make_program(load_config("gemma4-tiny", words).config), load_tokenizer(f"{place}/tokenizer")
  asked = {}

  def generate(decoder, params, prompts, **given):
    asked.update(given, ids=prompts.tokens)
    yield [[tokenizer.encode("c")[0]]]

  monkeypatch.setattr(samples, "generate", generate)
  (row,) = Samples(program, tokenizer, lambda line: None)(3, {})
  spell = {token: text for text, token in tokenizer.special.items()}
  text = "".join(spell.get(token) or tokenizer.decode([token]) for token in asked["ids"][0])
  assert text == "<bos><start_of_turn>user\nab<end_of_turn>\n<start_of_turn>model\n"
  assert tokenizer.special["<end_of_turn>"] in asked["stop"]
  assert (row["prompt"], row["text"]) == ("ab", "c")
