"""``maxtext-like generate`` with images and files of prompts, as a user runs it, and its errors."""

import json
from pathlib import Path

import jax
import numpy as np
import pytest
from PIL import Image

from maxtext_like import load
from maxtext_like.cli.main import main
from maxtext_like.errors import UserError
from maxtext_like.generation.prompts import Prompt, encode, read_prompts
from tests.generation.letters import copy_golden, write_letters
from tests.models.test_golden import QUICK

TOKENS = 5


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory):
  """Write gemma4_vision_large with a tokenizer, two images of different shapes and a file of prompts."""
  folder = copy_golden("gemma4_vision_large", tmp_path_factory.mktemp("golden") / "vision", eos=[1, 4])
  for name, size in (("wide.png", (20, 50)), ("tall.jpg", (40, 15))):
    Image.fromarray(np.random.default_rng(2).integers(0, 255, (*size, 3)).astype(np.uint8)).save(folder / name)
  rows = [{"prompt": "a <image>b<image> c", "images": ["wide.png", "tall.jpg"]}, {"prompt": "the fox"}]
  rows.append({"prompt": "what is this?", "images": ["tall.jpg"]})
  (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
  copy_golden("gemma3_text", folder.parent / "text", eos=[1, 4])
  write_letters(copy_golden("gemma3_text", folder.parent / "other", eos=[1, 4]), other=5)
  return folder


def words(checkpoint: Path, *more: str) -> list[str]:
  cache = f"compilation_cache_dir={checkpoint.parent}/cache"
  greedy = ["--temperature", "0", "--max-tokens", str(TOKENS)]
  return ["generate", "--checkpoint", str(checkpoint), *greedy, "dtype=float32", cache, *more]


@pytest.mark.slow
def test_answers_to_images_are_those_of_the_whole_pass(checkpoint: Path, capsys: pytest.CaptureFixture):
  assert main(words(checkpoint, "--batch", str(checkpoint / "prompts.jsonl"))) == 0
  out, err = capsys.readouterr()
  assert "tokens, the first " in err
  assert main(words(checkpoint, "--batch", str(checkpoint / "prompts.jsonl"), "--draft", str(checkpoint))) == 0
  with_draft, err = capsys.readouterr()
  assert with_draft == out
  assert "4.00 tokens in each pass of the model" in err, "all tokens after the first one"
  prompts = read_prompts(checkpoint / "prompts.jsonl")
  model = load(checkpoint, "dtype=float32", images=True)
  encoded = encode(prompts, model.tokenizer, model.model.config.vision)
  answers, at = [], 0
  for number, prompt in enumerate(prompts, 1):
    head = f"--- {number}\n{prompt.text}"
    assert out.startswith(head, at)
    end = out.find(f"\n--- {number + 1}\n", at)
    answers.append(out[at + len(head) : end if end >= 0 else len(out) - 1])
    at = end + 1
  decoder, params = model.model.decoder, model.params
  texts = [list(row) + model.tokenizer.encode(answer) for row, answer in zip(encoded.tokens, answers, strict=True)]
  assert sum(map(len, answers)) >= TOKENS
  length = max(map(len, texts)) + 1
  tokens = np.stack([np.pad(text, (0, length - len(text))) for text in texts]).astype(np.int32)
  live = np.arange(length) < np.array([[len(text)] for text in texts])
  types = (tokens == decoder.cfg.image_token_id).astype(np.int32)
  batch = {"tokens": tokens, "segments": live.astype(np.int32), "token_types": types}
  whole = jax.jit(lambda p, b: decoder(p, b)[0], compiler_options=QUICK)
  logits = np.asarray(whole(params, batch | (encoded.images or {})))
  for row, (prompt, text, answer) in enumerate(zip(encoded.tokens, texts, answers, strict=True)):
    best = logits[row, len(prompt) - 1 : len(text), : model.tokenizer.vocab_size].argmax(axis=-1)
    assert best[: len(text) - len(prompt)].tolist() == text[len(prompt) :]
    assert len(answer) == TOKENS or best[-1] in (1, 4), "it ends early only at a stop token"


def test_a_draft_model_takes_images_as_the_model_does(checkpoint: Path):
  model, draft = (load(checkpoint, "dtype=float32", images=True) for _ in range(2))
  object.__setattr__(draft.config.vision, "vision_output_length", 3)
  with pytest.raises(UserError, match="cannot take the images that are prepared for the model: it has vision_output_length=3"):
    model.generate(Prompt("<image>", (str(checkpoint / "wide.png"),)), draft=draft)
  with pytest.raises(UserError, match="loaded without a vision tower"):
    model.generate(Prompt("<image>", (str(checkpoint / "wide.png"),)), draft=load(checkpoint, "dtype=float32"))


@pytest.mark.parametrize(
  ("more", "reason"),
  [
    (["--prompt", "a", "--image", "none.png"], "none.png: no such file"),
    (["--prompt", "<image><image>", "--image", "wide.png"], "the text has 2 '<image>' for 1 images"),
    (["--prompt", "a", "--stop", "user"], "stop token 'user': the tokenizer has no such token"),
    (["--batch", "prompts.jsonl", "--image", "wide.png"], "--image needs --prompt"),
    (["--prompt", "a", "--batch", "prompts.jsonl"], "either --prompt or --batch"),
    (["--prompt", "a", "--top-p", "2"], "top_p=2.0: must be above 0 and at most 1"),
    (["--prompt", "a", "--temperature", "nan"], "temperature=nan: must be a finite number of at least 0"),
    (["--prompt", "a", "num_beams=4"], "num_beams=4 is an option of transformers"),
    (["--prompt", "a", "eos_token_id=[1,9999]"], "eos_token_id: 9999: the vocabulary has ids"),
    (["--prompt", "a", "max_new_tokens=4"], "max_tokens: set twice"),
    (["--prompt", "a", "--max-tokens", "0"], "tokens to generate is 0"),
    (["--prompt", "a", "--output", "answers.jsonl"], "--output needs --batch"),
    (["--batch", "prompts.jsonl", "--logprobs"], "--logprobs needs --output"),
    (["--prompt", "a", "--slots", "3"], "slots=3: not a power of two"),
    (["--prompt", "a", "--n", "0"], "the number of answers to a prompt is 0"),
    (["--prompt", "a", "--logit-bias", "x"], "'x' is not ID=X"),
    (["--prompt", "a", "--logit-bias", "9999=1"], "logit_bias has the token 9999"),
    (["--prompt", "a", "--repetition-penalty", "0"], "repetition_penalty=0.0"),
    (["--prompt", "a", "--speed", "1"], "unknown word '--speed'"),
    (["--prompt", "a", "--max-new-tokens", "5"], "write --max-tokens or max_new_tokens=VALUE"),
    (["--prompt", "a", "--dtype", "float32"], "unknown word '--dtype'\n  fix: write dtype=VALUE"),
    (["--prompt", "a", "tokenizer=/nowhere/else"], "no such file or folder"),
    (["--prompt", "a", "--draft-tokens", "2"], "draft_tokens=2 has no effect without a draft model"),
    (["--prompt", "a", "--draft", ".", "--draft-tokens", "0"], "draft_tokens=0: must be between 1 and 32"),
    (["--prompt", "a", "--image", "wide.png", "--draft", "../text"], "images: the model has no vision tower"),
    (["--prompt", "a", "--draft", "../other"], "has another tokenizer"),
    (["--prompt", "a", "num_assistant_tokens=3"], "use draft and draft_tokens"),
  ],
)
def test_what_it_refuses(more: list[str], reason: str, checkpoint: Path, capsys: pytest.CaptureFixture, monkeypatch):
  monkeypatch.chdir(checkpoint)
  assert main(words(checkpoint, *more)) == 2
  assert reason in capsys.readouterr().err


def test_images_for_checkpoints_without_a_tower_and_text_without_a_tokenizer(tmp_path: Path, capsys: pytest.CaptureFixture):
  text = copy_golden("gemma3_text", tmp_path / "text")
  (tmp_path / "x.png").touch()
  assert main(["generate", "--checkpoint", str(text), "--prompt", "a", "--image", str(tmp_path / "x.png")]) == 2
  assert "no vision tower (its config.json has no vision_config)" in capsys.readouterr().err
  (text / "tokenizer.json").unlink()
  assert main(["generate", "--checkpoint", str(text), "--prompt", "a"]) == 2
  assert "has neither tokenizer.json nor tokenizer.model" in capsys.readouterr().err
