"""Tasks give the same numbers as the harness' own Hugging Face backend. Needs the extras ``parity`` and ``eval``."""

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from maxtext_like import evaluate, load, perplexity, train
from maxtext_like.cli.main import main
from maxtext_like.errors import UserError
from maxtext_like.generation import slots
from maxtext_like.generation.texts import STREAMED_TURN
from tests.generation.letters import SPECIAL, copy_golden

torch = pytest.importorskip("torch", reason="needs the extra parity")
transformers = pytest.importorskip("transformers", reason="needs the extra parity")
lm_eval = pytest.importorskip("lm_eval", reason="needs the extra parity, and eval")

MAX_LENGTH = 90
TASKS = {
  # Contexts that end with a space, choices of one and of several tokens that share a context, and examples.
  "choice": {
    "output_type": "multiple_choice",
    "doc_to_text": "{{question}} answer: ",
    "doc_to_choice": "{{choices}}",
    "doc_to_target": "{{answer}}",
    "fewshot_split": "train",
    "num_fewshot": 2,
    "metric_list": [{"metric": "acc"}, {"metric": "acc_norm"}],
  },
  # The examples make inputs longer than MAX_LENGTH, so their first tokens are cut off.
  "cloze": {
    "output_type": "loglikelihood",
    "doc_to_text": "{{question}}",
    "doc_to_target": " {{choices[0]}}",
    "fewshot_split": "train",
    "num_fewshot": 4,
    "metric_list": [{"metric": "perplexity"}, {"metric": "acc"}],
  },
  "rolling": {
    "output_type": "loglikelihood_rolling",
    "doc_to_text": "",
    "doc_to_target": "{{text}}",
    "metric_list": [{"metric": "word_perplexity"}, {"metric": "bits_per_byte"}],
  },
  "answer": {
    "output_type": "generate_until",
    "doc_to_text": "{{question}}",
    "doc_to_target": "{{choices[0]}}",
    "generation_kwargs": {"until": ["e", "q "], "max_gen_toks": 9},
    "metric_list": [{"metric": "exact_match"}],
  },
}
DOCS = [
  {"question": "who runs?", "choices": ["a", "b", "c"], "answer": 0, "text": "the fox runs. " * 15},
  {"question": "why is the hen here, and why does the fox run?", "choices": ["a", "the sun", "no"], "answer": 2, "text": "a"},
  {"question": "where", "choices": ["in", "in a box", "in a bag"], "answer": 1, "text": "in a box: " * 9},
  {"question": "is it so ", "choices": ["yes", "no", "n"], "answer": 1, "text": "the hen sits"},
]
TEMPLATE = (
  "{{ bos_token }}{% for m in messages %}<start_of_turn>{{ m['role'] }}\n{{ m['content'] }}<end_of_turn>\n{% endfor %}"
  "{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}"
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
  """A folder with a checkpoint whose tokenizer transformers can read, the tasks, and the cache of the datasets library."""
  folder = tmp_path_factory.mktemp("harness")
  checkpoint = copy_golden("gemma3_text", folder / "model", eos=[1, 4])
  tokenizer = json.loads((checkpoint / "tokenizer.json").read_text())
  # Every other id of the model gets a letter, because transformers may draw ids that the tokenizer lacks and we never do.
  vocabulary = tokenizer["model"]["vocab"]
  vocabulary |= {chr(0x100 + i): i for i in set(range(160)) - set(vocabulary.values())}
  tokenizer["post_processor"] = {
    "type": "TemplateProcessing",
    "single": [{"SpecialToken": {"id": "<bos>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
    "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
    "special_tokens": {"<bos>": {"id": "<bos>", "ids": [SPECIAL["<bos>"]], "tokens": ["<bos>"]}},
  }
  (checkpoint / "tokenizer.json").write_text(json.dumps(tokenizer))
  names = {f"{name}_token": f"<{name}>" for name in ("bos", "eos", "pad")}
  own: dict[str, Any] = names | {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": TEMPLATE}
  own["clean_up_tokenization_spaces"] = False
  (checkpoint / "tokenizer_config.json").write_text(json.dumps(own))
  tasks = folder / "tasks"
  tasks.mkdir()
  files = {"test": str(folder / "test.jsonl"), "train": str(folder / "train.jsonl")}
  (folder / "test.jsonl").write_text("".join(json.dumps(doc) + "\n" for doc in DOCS))
  (folder / "train.jsonl").write_text("".join(json.dumps(doc) + "\n" for doc in DOCS[::-1]))
  for name, task in TASKS.items():
    values = {"task": f"local_{name}", "dataset_path": "json", "dataset_kwargs": {"data_files": files}, "test_split": "test"}
    (tasks / f"{name}.yaml").write_text(json.dumps(values | task))
  return folder


@pytest.fixture(autouse=True)
def without_network(folder: Path, monkeypatch: pytest.MonkeyPatch):
  import datasets  # pyright: ignore[reportMissingImports]

  monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(folder / "datasets"))
  monkeypatch.setattr(datasets.config, "HF_DATASETS_OFFLINE", True)
  monkeypatch.setenv("HF_HUB_OFFLINE", "1")


def numbers(results: dict[str, Any]) -> dict[str, Any]:
  """Returns every number and text of the results and of the samples."""
  found = {}
  for task, values in results["results"].items():
    found |= {f"{task} {key}": value for key, value in values.items() if isinstance(value, int | float)}
  for task, records in results["samples"].items():
    for record in records:
      found[f"{task} {record['doc_id']} arguments"] = json.dumps(record["arguments"], default=str)
      for i, answers in enumerate(record["resps"]):
        for j, answer in enumerate(answers):
          parts = answer if isinstance(answer, list | tuple) else [answer]
          found |= {f"{task} {record['doc_id']} {i} {j} {k}": part for k, part in enumerate(parts)}
  return found


@pytest.mark.slow
@pytest.mark.filterwarnings(
  "ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning", "ignore::ResourceWarning"
)
@pytest.mark.parametrize("chat", [False, True])
def test_every_number_is_that_of_the_hugging_face_backend(folder: Path, chat: bool):
  from lm_eval.models.huggingface import HFLM  # pyright: ignore[reportMissingImports]
  from lm_eval.tasks import TaskManager  # pyright: ignore[reportMissingImports]

  files = [str(folder / "tasks" / f"{name}.yaml") for name in (["choice", "answer"] if chat else TASKS)]
  how: dict[str, Any] = {"apply_chat_template": chat, "bootstrap_iters": 100, "log_samples": True}
  how["system_instruction"] = "be brief." if chat else None
  backend = HFLM(
    pretrained=str(folder / "model"), dtype="float32", device="cpu", batch_size=3, max_length=MAX_LENGTH,
    attn_implementation="eager",
  )  # fmt: skip
  manager = TaskManager(include_defaults=False)
  theirs = lm_eval.simple_evaluate(model=backend, tasks=files, task_manager=manager, fewshot_as_multiturn=chat, **how)
  # Use the checkpoint's template. The published one of Gemma 3 has another system turn.
  template = ["chat_template=" + str(folder / "model" / "template.jinja")] if chat else []
  (folder / "model" / "template.jinja").write_text(TEMPLATE)
  ours = evaluate(
    folder / "model", files, "dtype=float32", "matmul_precision=highest", f"compilation_cache_dir={folder}/cache", *template,
    max_length=MAX_LENGTH, batch_size=3, **how,
  )  # fmt: skip
  expected, found = numbers(theirs), numbers({**ours.results, "samples": ours.samples})
  assert len(expected) > (20 if chat else 60)
  texts = lambda values: {name: value for name, value in values.items() if isinstance(value, str)}
  assert texts(found) == texts(expected)
  assert found.keys() == expected.keys()
  of_numbers = {name: value for name, value in expected.items() if not isinstance(value, str)}
  assert {name: found[name] for name in of_numbers} == pytest.approx(of_numbers, rel=1e-4, abs=1e-4)
  assert set(ours.metrics) >= {"local_choice/acc", "local_answer/exact_match"}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
def test_answers_with_stop_strings_free_their_slots(folder: Path, monkeypatch: pytest.MonkeyPatch):
  """Some answers end at a stop token and some at a string. None runs to max_gen_toks, and waiting prompts use the slots."""
  model = load(folder / "model", "dtype=float32", f"compilation_cache_dir={folder}/cache")
  task, calls, decode = json.loads((folder / "tasks" / "answer.yaml").read_text()), [], slots.decode

  def counted(*arguments: Any) -> Any:
    state, found = decode(*arguments)
    calls.append(int((np.asarray(found["token"]) != slots.NONE).sum()))
    return state, found

  # Three quarters of the letters end an answer, and so do two tokens of the model.
  until = [chr(0x100 + i) for i in range(50, 160)]
  task |= {"task": "ends", "generation_kwargs": {"until": until, "max_gen_toks": 64, "do_sample": True, "temperature": 3.0}}
  (folder / "ends.yaml").write_text(json.dumps(task))
  monkeypatch.setattr(slots, "decode", counted)
  told: list[tuple[str, int, int]] = []
  how: dict[str, Any] = {"max_length": 160, "batch_size": 2, "log_samples": True, "bootstrap_iters": 0}
  found = evaluate(model, [str(folder / "ends.yaml")], on_batch=lambda *given: told.append(given), **how)
  answers = [record["resps"][0][0] for record in found.samples["ends"]]
  assert len(answers) == 4
  assert not any(text in answer for answer in answers for text in until)
  assert max(map(len, answers)) < 20
  assert sum(calls) <= sum(map(len, answers)) + 4 * 2 * STREAMED_TURN
  assert told[0] == ("generate_until", 0, 4)
  assert told[-1] == ("generate_until", 4, 4)


@pytest.mark.slow
def test_perplexity_is_that_of_transformers(folder: Path):
  text = "the fox runs. the hen sits, and who knows why? " * 3
  (folder / "text.txt").write_text(text)
  model = load(folder / "model", "dtype=float32", "matmul_precision=highest", f"compilation_cache_dir={folder}/cache")
  found = perplexity(model, folder / "text.txt", max_length=40, stride=12)
  library = transformers.AutoTokenizer.from_pretrained(folder / "model")
  ids = library(text, return_tensors="pt").input_ids
  theirs = transformers.AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32, attn_implementation="eager")
  total, count, previous = 0.0, 0, 0
  for begin in range(0, ids.size(1), 12):
    end = min(begin + 40, ids.size(1))
    row, labels = ids[:, begin:end], ids[:, begin:end].clone()
    labels[:, : -(end - previous)] = -100
    with torch.no_grad():
      loss = theirs(row, labels=labels).loss.item()
    weight = int((labels != -100).sum()) - 1
    total, count, previous = total + loss * weight, count + weight, end
    if end == ids.size(1):
      break
  assert found.loss == pytest.approx(total / count, abs=1e-5)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
def test_tasks_during_training_leave_the_losses_alone_and_equal_those_of_the_checkpoint(folder: Path, tmp_path: Path):
  files = [str(folder / "tasks" / f"{name}.yaml") for name in ("choice", "cloze", "answer")]
  small = {"num_decoder_layers": 1, "inhomogeneous_layer_cycle_interval": 1, "emb_dim": 32, "mlp_dim": 48, "head_dim": 16}
  common: dict[str, Any] = small | {
    "steps": 3, "max_target_length": MAX_LENGTH, "per_device_batch_size": 2, "dtype": "float32", "output_dir": tmp_path,
    "compilation_cache_dir": folder / "cache", "matmul_precision": "highest",
  }  # fmt: skip
  plain = train("gemma3-tiny", run_name="plain", **common)
  tested = train("gemma3-tiny", run_name="tested", eval_tasks=files, eval_tasks_interval=3, eval_tasks_limit=3, **common)
  assert [row["loss"] for row in tested.metrics] == [row["loss"] for row in plain.metrics]
  found = [{key: value for key, value in row.items() if key.startswith("eval_tasks/")} for row in tested.metrics]
  assert found[:2] == [{}, {}]
  alone = evaluate(tested, files, max_length=MAX_LENGTH, limit=3, bootstrap_iters=0).metrics
  assert found[2] == pytest.approx({f"eval_tasks/{name}": value for name, value in alone.items()}, rel=1e-4)
  assert "local_cloze/perplexity" in (tmp_path / "tested" / "report.html").read_text()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
def test_the_verb_writes_what_it_prints(folder: Path, capsys: pytest.CaptureFixture):
  words = ["eval", str(folder / "model"), "--include-path", str(folder / "tasks"), "--limit", "2", "--max-gen-toks", "5"]
  words += ["dtype=float32", f"compilation_cache_dir={folder}/cache", "--bootstrap-iters", "0", "--max-length", "90"]
  output = folder / "results.json"
  assert main([*words, "--tasks", "local_ch*,local_answer", "--output", str(output), "--log-samples"]) == 0
  out = capsys.readouterr().out
  written = json.loads(output.read_text())
  shown = re.search(r"\|local_choice *\|Yaml *\|none *\| *2\|acc *\|↑ *\| *([\d.]+)\|", out)
  assert shown is not None, out
  assert float(shown[1]) == written["results"]["local_choice"]["acc,none"]
  assert written["config"]["limit"] == 2
  for task in ("choice", "answer"):
    assert len((folder / f"results.samples.local_{task}.jsonl").read_text().splitlines()) == 2
  assert main([*words, "--tasks", "local_choise"]) == 2
  assert "unknown task 'local_choise'; similar names: local_choice" in capsys.readouterr().err


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
@pytest.mark.slow
def test_what_it_refuses(folder: Path):
  model = load(folder / "model", "dtype=float32", f"compilation_cache_dir={folder}/cache")
  answer = folder / "tasks" / "answer.yaml"
  for kwargs, reason in (
    ({"num_beams": 3}, "num_beams=3 is not supported"),
    ({"temprature": 1.0}, "temprature is not supported, did you mean 'temperature'?"),
    ({"max_gen_toks": 200}, "no token is left for the prompt"),
  ):
    with pytest.raises(UserError, match=reason):
      evaluate(model, str(answer), max_length=MAX_LENGTH, gen_kwargs=kwargs)
  broken = folder / "broken.yaml"
  broken.write_text(answer.read_text().replace("test.jsonl", "nowhere.jsonl"))
  with pytest.raises(UserError, match=r"broken.yaml: cannot be loaded: FileNotFoundError"):
    evaluate(model, str(broken))
