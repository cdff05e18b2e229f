"""Answers with all options, streams of text, and files of answers, with a golden model."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from maxtext_like import Prompt, generate, generate_file, load
from maxtext_like.api.answers import texts_of
from maxtext_like.api.generate_file import _decisive_of
from maxtext_like.api.pretrained import Pretrained
from maxtext_like.cli.main import main
from maxtext_like.errors import NonFiniteError, UserError
from maxtext_like.generation.batch_file import job_key, prompt_key
from maxtext_like.generation.prompts import read_prompts
from maxtext_like.generation.scheduler import Piece, Scheduler, _Answer
from maxtext_like.generation.slots import NOT_FINITE
from tests.generation.letters import copy_golden, write_letters

PROMPTS = ["the fox", "a", "hello there", "the fox"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
  return copy_golden("gemma3_text", tmp_path_factory.mktemp("golden") / "text", eos=[1, 4])


def test_everything_that_decides_the_answers_of_a_model_is_in_the_key(folder: Path, tmp_path: Path):
  def key(*words: str, of: Path = folder) -> str:
    model = load(of, "dtype=float32", *words)
    texts = texts_of(model, generate, [Prompt.chat("a")], {"max_tokens": 3}, turn=8)[1]
    return prompt_key(job_key(texts.options, *_decisive_of(model)), "", texts.requests[0])

  copy, first = tmp_path / "copy", key()
  shutil.copytree(folder, copy)
  assert key(of=copy) == key(f"compilation_cache_dir={tmp_path}/cache", "steps=7") == first, (
    "the place and other settings do not count"
  )
  template = tmp_path / "template.jinja"
  template.write_text("{{ messages[0]['content'] }}!")
  changes = ["dtype=bfloat16", "weight_dtype=bfloat16", "matmul_precision=highest", "matmul_dtype=float8"]
  changes += [
    "base_weights=int8",
    "base_weights=nf4",
    "base_weights=nf4 base_weights_modules=[mlp]",
    "float32_logits=false",
    "residual_dtype=bfloat16",
    f"chat_template={template}",
    "special_tokens_in_text=parse",
  ]
  keys = {words: key(*words.split()) for words in changes}
  assert keys.pop("special_tokens_in_text=parse") == first, "it does not change this prompt"
  weights = copy / "model.safetensors"
  data = bytearray(weights.read_bytes())
  data[-1000:] = bytes(1000)
  weights.write_bytes(data)
  keys["weights"] = key(of=copy)
  (copy / "generation_config.json").write_text('{"eos_token_id": [1, 5]}')
  keys["eos"] = key(of=copy)
  write_letters(copy, other=5)
  keys["tokenizer"] = key(of=copy)
  assert first not in keys.values()
  assert len(set(keys.values())) == len(keys)


def test_a_draft_model_proposes_tokens(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture):
  """With itself as the draft model, a model accepts every proposal. A file of its answers has another key."""
  model, how = load(folder, "dtype=float32"), {"temperature": 0, "max_tokens": 7, "eos_token_id": None}
  plain = generate(model, PROMPTS[:2], **how)
  assert plain.tokens_per_pass is None
  found = generate(model, PROMPTS[:2], draft=model, draft_tokens=2, **how)
  assert [answer.tokens for answer in found.answers] == [answer.tokens for answer in plain.answers]
  assert found.tokens_per_pass == 3, "6 tokens after the first one"
  streamed = "".join(piece.text for piece in model.stream(PROMPTS[1], draft=model, **how))
  assert streamed == plain.answers[1].text
  output = tmp_path / "answers.jsonl"
  progress = generate_file(model, PROMPTS[:2], output, draft=model, draft_tokens=2, **how)
  assert "3.00 tokens in each pass of the model" in str(progress)
  assert generate_file(model, PROMPTS[:2], output, draft=load(folder, "dtype=float32"), draft_tokens=2, **how).earlier == 2
  for other in ({}, {"draft": model, "draft_tokens": 3}, {"draft": load(folder, "dtype=bfloat16"), "draft_tokens": 2}):
    with pytest.raises(UserError, match="not an answer of this job"):
      generate_file(model, PROMPTS[:2], output, **other, **how)
  words = ["--prompt", PROMPTS[1], "--max-tokens", "7", "--temperature", "0", "dtype=float32", "eos_token_id=null"]
  assert main(["generate", "--checkpoint", str(folder), "--draft", str(folder), "--draft-tokens", "2", *words]) == 0
  out, err = capsys.readouterr()
  assert out == PROMPTS[1] + plain.answers[1].text + "\n"
  assert "3.00 tokens in each pass of the model" in err


@pytest.mark.parametrize(
  ("options", "reason"),
  [
    ({"draft": "some/folder"}, "the model is a loaded object, but draft='some/folder' is not"),
    ({"draft": 3}, "the model is a loaded object, but draft=3 is not"),
    ({"draft_tokens": 2}, "no effect without a draft model"),
    ({"draft_tokens": 2.5}, "draft_tokens=2.5"),
  ],
)
def test_unusable_draft_options(folder: Path, options: dict[str, Any], reason: str):
  with pytest.raises(UserError, match=reason):
    generate(load(folder, "dtype=float32"), "a", **options)


def test_a_draft_model_with_fewer_rows_than_tokens(folder: Path):
  model = load(folder, "dtype=float32")
  draft = load(folder, "dtype=float32")
  object.__setattr__(draft.config.model, "vocab_size", model.tokenizer.vocab_size - 1)
  with pytest.raises(UserError, match="rows in its table"):
    generate(model, "a", draft=draft)
  with pytest.raises(UserError, match="not a loaded model"):
    model.generate("a", draft=folder)


def test_eos_token_id_replaces_the_tokens_of_the_model(folder: Path):
  model = load(folder, "dtype=float32")
  prompts = ["a", Prompt.chat("a")]

  def stop(**options: Any) -> set[int]:
    return set(texts_of(model, generate, prompts, options, turn=8)[1].options.stop)

  assert stop() == {1, 4}
  assert stop(stop_ids=[5], stop="pad") == {0, 1, 4, 5}
  assert stop(eos_token_id=7) == {7}
  assert stop(eos_token_id=[7, 9], stop_ids=[5]) == {5, 7, 9}
  assert stop(eos_token_id=None) == stop(eos_token_id=[]) == set()
  with pytest.raises(UserError, match="eos_token_id: True: the vocabulary has ids"):
    stop(eos_token_id=True)


@pytest.mark.slow
def test_options_and_streams(folder: Path):
  model = load(folder, "dtype=float32")
  found = model.generate(PROMPTS, n=2, seeds=[5, 6, 7, 5], max_tokens=9, top_p=0.9, logprobs=True)
  assert [(a.prompt, a.sample) for a in found.answers] == [(prompt, sample) for prompt in PROMPTS for sample in (0, 1)]
  assert found.answers[0].tokens == found.answers[6].tokens, "a seed decides the draws, and not the place"
  assert found.answers[0].tokens != found.answers[1].tokens
  for answer in found.answers:
    assert answer.logprobs is not None
    assert len(answer.logprobs) == len(answer.tokens)
    assert answer.ended == ("length" if len(answer.tokens) == 9 else "stop")
  greedy = {"max_tokens": 9, "do_sample": False}
  text = {0: "", 1: ""}
  for piece in model.stream(PROMPTS[:2], **greedy):
    text[piece.prompt] += piece.text
  whole = model.generate(PROMPTS[:2], **greedy)
  assert list(text.values()) == [answer.text for answer in whole.answers]
  cut = whole.answers[1].text[3:5]
  stopped = model.generate(PROMPTS[1], **greedy, stop_strings=cut)
  assert (stopped.text, stopped.answers[0].ended) == (whole.answers[1].text.partition(cut)[0], "stop")
  with pytest.raises(UserError, match="num_beams=4 is an option of transformers"):
    model.generate("a", num_beams=4)


@pytest.mark.slow
def test_a_killed_job_continues(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture):
  prompts, output = tmp_path / "prompts.jsonl", tmp_path / "answers.jsonl"
  prompts.write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in PROMPTS))
  words = ["generate", "--checkpoint", str(folder), "--batch", str(prompts), "--output", str(output), "dtype=float32"]
  words += ["--n", "2", "--max-tokens", "7", "--logprobs"]
  assert main(words) == 0
  whole = output.read_bytes()
  records = {record["index"]: record for record in map(json.loads, whole.splitlines())}
  assert [records[i]["prompt"] for i in range(4)] == PROMPTS
  assert all(len(record["answers"]) == 2 for record in records.values())
  # The job was killed while it wrote the second line.
  output.write_bytes(whole[: whole.index(b"\n") + 30])
  assert main(words) == 0
  assert "4 of 4 prompts (1 by an earlier job)" in capsys.readouterr().err
  assert {record["index"]: record for record in map(json.loads, output.read_bytes().splitlines())} == records
  assert main([*words, "--seed", "1"]) == 2
  assert "not an answer of this job" in capsys.readouterr().err
  # A prompt that fails has no line in the file, and the other prompts are answered.
  model = load(folder, "dtype=float32")
  model.params["final_norm"]["scale"] = model.params["final_norm"]["scale"].at[0].set(float("nan"))
  with pytest.raises(
    NonFiniteError, match=r"4 of 4 prompts failed, the others are answered\. The first, with index 0: prompt 0, token 0"
  ):
    generate_file(model, PROMPTS, tmp_path / "failed.jsonl", max_tokens=3)
  assert (tmp_path / "failed.jsonl").read_bytes() == b""
  # In float16, clamped values are counted.
  assert main([*words[:2], str(folder), *words[3:6], str(tmp_path / "half.jsonl"), "dtype=float16", "--max-tokens", "2"]) == 0
  assert "clamped" in capsys.readouterr().err


def test_failures_of_a_continued_job_name_the_line_of_the_prompt(folder: Path, tmp_path: Path, monkeypatch):
  """The first job answers two of four prompts, so the remaining two have other indices in the second job."""
  prompts, output = tmp_path / "prompts.jsonl", tmp_path / "answers.jsonl"
  prompts.write_text("".join(json.dumps({"prompt": prompt}) + "\n\n" for prompt in PROMPTS))
  model = load(folder, "dtype=float32")
  listed, capacities = read_prompts(prompts), []

  def run(self: Scheduler) -> Iterator[list[Piece]]:
    """Answer "a" and "hello there", and fail for the other prompts."""
    capacities.append(self._longest)
    for i, request in enumerate(self._requests):
      answer = _Answer(i, 0, i)
      self._answers[i] = answer
      tokens = [11, 12, 13] if len(request.tokens) in (2, 12) else [11, NOT_FINITE]
      yield [self._piece(answer, np.array(tokens), np.zeros(len(tokens), bool))]

  monkeypatch.setattr(Scheduler, "run", run)
  monkeypatch.setattr(Pretrained, "decoding_params", {"stack_0": (), "stack_1": (), "x": 1})
  lines = {f"with index {i}: {prompts}:{2 * i + 1}, token 1 of the answer" for i in (0, 3)}
  for _ in range(2):
    with pytest.raises(NonFiniteError, match="2 of 4 prompts failed") as raised:
      generate_file(model, listed, output, max_tokens=3)
    assert any(line in str(raised.value) for line in lines)
    assert sorted(json.loads(line)["index"] for line in output.read_text().splitlines()) == [1, 2]
  assert capacities == [12 + 3] * 2, "the second job has caches as large as the first, without the longest prompt"
  # Without the first prompt, the fourth is the only one that fails.
  for call in (model.generate, lambda *given, **how: list(model.stream(*given, **how))):
    with pytest.raises(NonFiniteError, match=f"{prompts}:7, token 1"):
      call(listed[1:], max_tokens=3)
    with pytest.raises(NonFiniteError, match="prompt 1, token 1"):
      call(PROMPTS[2:], max_tokens=3)
