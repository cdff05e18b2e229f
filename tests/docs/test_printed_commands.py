"""The program accepts every command that the documentation prints: its options and its configuration are valid.

Commands run through the real command line, but substitutes replace the functions that would train, compile or read large
weights. The substitutes only check the arguments. Slow tests run the commands themselves, with tiny models.
"""

import doctest
import inspect
import json
import re
from pathlib import Path

import numpy as np
import pytest
from printed_commands import PAGES, ROOT, Printed, examples, filled, printed, scripts

import maxtext_like
from maxtext_like.api.config import load_for_sft
from maxtext_like.cli.main import main
from maxtext_like.config.load import load_config
from maxtext_like.verbs import VERBS

PRINTED = [command for page in PAGES for command in printed(page)]
COMMANDS = [pytest.param(c, id=f"{c.page}: {c.text[:70]}") for c in PRINTED]
# Maps the beginning of a command to the reason why it is not checked here.
EXCEPTIONS = {
  "maxtext-like train gs://bucket/models/mine.yml": "reads a file of a bucket; tests/test_storage.py does with an emulator",
}
REACHED = ("audit", "bisect", "compile_step", "evaluate", "export_adapter", "export_checkpoint", "forward",
           "import_checkpoint", "initial_risk", "load", "look_at_data", "perplexity", "plan", "replay", "risk", "sft", "train",
           "xray_step")  # fmt: skip
"""API functions behind the verbs that the tests replace by substitutes."""


class _ReachedError(Exception):
  """The function behind a verb was called with valid arguments."""


@pytest.fixture(scope="module")
def workplace(tmp_path_factory) -> Path:
  """A folder with the files that the commands of the pages need."""
  here = tmp_path_factory.mktemp("printed")
  for name in ("configs", "gpu", "tpu", "benchmarks", "tests", "train.py"):
    (here / name).symlink_to(ROOT / name)
  (here / "hf").symlink_to(ROOT / "tests/golden/gemma3_text/checkpoint")
  chat = json.dumps({"messages": [{"role": "user", "content": "0+1?"}, {"role": "assistant", "content": "1"}]})
  for name in (
    "chats.jsonl",
    "chats/a.jsonl",
    "sums.jsonl",
    "data/a.jsonl",
    "web/a.jsonl.zst",
    "code/a/a.jsonl",
    "code/b/a.jsonl",
  ):
    (here / name).parent.mkdir(exist_ok=True, parents=True)
    (here / name).write_text(f"{chat}\n" * 40)
  (here / "mine.yml").write_text("training:\n  steps: 7\n")
  (here / "models/gemma3-4b").mkdir(parents=True)
  (here / "models/gemma3-4b/model.yml").write_text((ROOT / "configs/models/gemma3-tiny.yml").read_text())
  (here / "copy").mkdir()
  (here / "copy/model.yml").write_text((ROOT / "configs/models/deepseek3-tiny.yml").read_text())
  (here / "prompts.jsonl").write_text('{"prompt": "a"}\n')
  np.savez(here / "in.npz", input_ids=[[1, 2]])
  (here / "cats").mkdir()
  for name in ("cat.jpg", "f.png", "cats/1.png"):
    (here / name).touch()
  for name in ("run", "dir", "tasks"):
    (here / name).mkdir()
  return here


def reach(name):
  """Return a substitute for a function of the API that takes the same arguments and only resolves a configuration."""
  real = getattr(maxtext_like, name)

  def stand_in(*args, **keys):
    given = inspect.signature(real).bind(*args, **keys).arguments
    words = [str(word) for word in given.get("overrides", ())]
    if name in ("sft", "look_at_data"):
      (load_for_sft if name == "sft" or given.get("for_sft") else load_config)(given["config"], words)
    elif words:  # overrides for a checkpoint; a tiny model replaces its configuration
      load_config("gemma3-tiny", words, inference=name in ("load", "evaluate", "perplexity", "forward"))
    raise _ReachedError

  return stand_in


def test_the_pages_have_commands():
  assert len(PRINTED) > 80
  assert {command.words[0] for command in PRINTED} == set(VERBS)
  for beginning in EXCEPTIONS:
    assert any(command.text.startswith(beginning) for command in PRINTED), beginning


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.slow
def test_a_printed_command_is_understood(command: Printed, workplace, monkeypatch, capsys):
  assert command.words[0] in VERBS
  if command.mentioned:
    return
  if reason := next((why for beginning, why in EXCEPTIONS.items() if command.text.startswith(beginning)), None):
    pytest.skip(reason)
  monkeypatch.chdir(workplace)
  monkeypatch.setenv("JAX_PLATFORMS", "cpu")
  for name in REACHED:
    monkeypatch.setattr(maxtext_like, name, reach(name))
  monkeypatch.setattr("maxtext_like.cli.local_processes.run", reach("train"))
  words = [filled(word) for word in command.words]
  if (
    command.words[0] in ("train", "sft") and words[1:] and "=" in words[1] and not words[1].startswith("model_name=")
  ):  # "sft ... key=value": any model
    words[1:1] = ["gemma3-tiny", "dataset_path=chats.jsonl"]
  try:
    code = main(words)
  except _ReachedError:
    code = 0
  except SystemExit as end:  # --help
    code = end.code
  out = capsys.readouterr()
  assert code == 0, f"{command.text}\n{out.err}"


def outputs_of_commands() -> dict[str, dict[str, str]]:
  """Returns {command: {page: output}} for all pages. Commands of the README come first."""
  found: dict[str, dict[str, str]] = {}
  for page in PAGES:
    for text, output in examples(page):
      found.setdefault(text, {})[page] = output
  return found


OUTPUTS = outputs_of_commands()
SHORTER = {"maxtext-like train gemma4-tiny": ["max_target_length=16", "per_device_batch_size=1"]}
"""Words that are added to a command whose output does not show them. ``.ci/run readme`` runs this one with its own sizes."""
RARE = {
  "maxtext-like replay runs/broken float32_gate_product=auto": "maxtext-like train tests/golden/stress_fp16_mlp/checkpoint"
}
"""A nightly command, and the beginning of the command that makes its run. See also tests/analysis/test_failed_step.py."""
EXAMPLES = [
  pytest.param(
    text, pages, id=f"{' '.join(pages)}: {text[:50]}", marks=pytest.mark.nightly if text in RARE else pytest.mark.slow
  )
  for text, pages in OUTPUTS.items()
]


@pytest.mark.parametrize(("text", "pages"), EXAMPLES)
def test_a_printed_output_is_what_a_command_prints(text, pages, workplace, monkeypatch, capsys):
  """The output must match on every version of Python and JAX, so the page has ``...`` for parts that differ.

  The commands run in one folder and in order, so that a later one may use the run of an earlier one, also of the README. A
  command that several pages print runs once.
  """
  monkeypatch.chdir(workplace)
  monkeypatch.setenv("JAX_PLATFORMS", "cpu")
  (command,) = [c for c in printed(next(iter(pages))) if c.text == text]
  if text in RARE:
    (before,) = [c for c in printed(next(iter(pages))) if c.text.startswith(RARE[text])]
    assert main([*before.words]) == 3
    capsys.readouterr()
  words = [word if word.startswith("runs/") and Path(word).exists() else filled(word) for word in command.words]
  main([*words, *SHORTER.get(text, [])])
  shown = "".join(capsys.readouterr())
  how = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
  for page, output in pages.items():
    assert doctest.OutputChecker().check_output(output, shown, how), (page, shown)


def test_pages_show_outputs():
  assert {*SHORTER, *RARE} <= OUTPUTS.keys()
  assert {page for pages in OUTPUTS.values() for page in pages} >= {
    "README.md",
    "docs/guides/audit.md",
    "docs/guides/bisect.md",
    "docs/explanation/initial-values.md",
    "docs/guides/chat.md",
    "docs/guides/risk.md",
    "docs/tutorials/find-a-nan.md",
    "docs/tutorials/first-run.md",
  }


TINY = ["num_decoder_layers=2", "inhomogeneous_layer_cycle_interval=1", "emb_dim=32", "mlp_dim=48", "enable_tensorboard=false"]
TINY += ["steps=2", "max_target_length=96", "per_device_batch_size=1", "gradient_accumulation_steps=1"]
SMALL = {
  "train": [*TINY, "eval_fraction=0"],
  "sft": [
    *TINY,
    "eval_interval=1",
    "eval_fraction=0.2",
  ],
  "generate": ["--max-tokens", "3"],
}
"""Words that are added to a command of each verb when it really runs."""


@pytest.fixture(scope="module")
def weights(tmp_path_factory) -> Path:
  """An exported gemma3-tiny, used instead of the reader's weights."""
  here = tmp_path_factory.mktemp("weights")
  words = ["run_name=first", "dataset=synthetic", f"output_dir={here}", *SMALL["train"], "steps=1"]
  assert main(["train", "gemma3-tiny", *words]) == 0
  assert main(["export", str(here / "first"), "--out", str(here / "weights")]) == 0
  return here / "weights"


@pytest.mark.slow
@pytest.mark.parametrize(
  ("page", "beginnings"),
  [
    (
      "README.md",
      ["maxtext-like sft gemma3-4b recipes", "maxtext-like generate --checkpoint runs/mine", "maxtext-like export runs/mine"],
    ),
    (
      "docs/guides/evaluation.md",
      [
        "maxtext-like sft gemma3-4b init",
        "maxtext-like generate --checkpoint runs/gemma3-4b",
        "maxtext-like export runs/gemma3-4b",
      ],
    ),
    (
      "docs/tutorials/fine-tune-chat.md",
      [
        "maxtext-like data --sft",
        "maxtext-like sft ",
        "maxtext-like generate ",
        "maxtext-like export runs/mine --out mine-adapter",
      ],
    ),
  ],
)
def test_the_steps_of_a_page_run_one_after_the_other(page, beginnings, workplace, weights, tmp_path, monkeypatch, capsys):
  """gemma3-tiny replaces gemma3-4b, and its exported weights replace those of the reader."""
  monkeypatch.chdir(tmp_path)
  monkeypatch.setenv("JAX_PLATFORMS", "cpu")
  (tmp_path / "chats").symlink_to(workplace / "chats")
  (tmp_path / "data").mkdir()
  (tmp_path / "data/a.jsonl").write_text('{"text": "Dear reader"}\n' * 20)
  (tmp_path / "weights").symlink_to(weights)
  commands = {c.text: c for c in printed(page)}
  for beginning in beginnings:
    (command,) = [c for text, c in commands.items() if text.startswith(beginning)]
    words = [re.sub(r"(^|=)/models/\S+", r"\1weights", word).replace("gemma3-4b", "gemma3-tiny") for word in command.words]
    # The weights were trained on bytes, those of the reader have a tokenizer.
    bytewise = ["tokenizer=bytes"] if any("init_from=weights" in word for word in words) else []
    code = main([*words, *SMALL.get(words[0], []), *bytewise])
    assert code == 0, (command.text, capsys.readouterr().err)


@pytest.mark.parametrize("page", PAGES)
def test_a_printed_script_is_there_and_has_the_options(page):
  for name, words in scripts(page):
    path = ROOT / name
    assert path.is_file(), (page, name)
    source = path.read_text(encoding="utf-8")
    for word in words:
      if word.startswith("--"):
        option = word.partition("=")[0]
        assert f'"{option}"' in source, (page, name, option)


def test_extras_that_are_printed_are_there():
  project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
  extras = set(re.findall(r"^([\w-]+) = \[", project.partition("[project.optional-dependencies]")[2], flags=re.MULTILINE))
  for page in PAGES:
    for named in re.findall(r"pip install (?:-e )?'[\w.-]*\[([\w,]+)\]'", (ROOT / page).read_text(encoding="utf-8")):
      assert set(named.split(",")) <= extras, (page, named)
