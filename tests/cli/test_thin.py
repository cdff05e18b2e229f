"""The command line is a thin layer: a verb calls the API and prints. Errors say if a key was typed or passed from Python."""

import ast
from pathlib import Path

import numpy as np
import pytest

import maxtext_like
from maxtext_like.cli.main import main
from maxtext_like.errors import UserError
from maxtext_like.verbs import VERBS

CLI = Path(__file__).parents[2] / "maxtext_like" / "cli"
CHECKPOINT = str(Path(__file__).parents[1] / "golden" / "deepseek3_plain" / "checkpoint")
# Modules that a verb may import in addition to the API: for parsing its words, and for lists in its help.
BESIDES = {
  *(
    "errors",
    "extras",
    "abandoned_threads",
    "config.paths",
    "config.hub",
    "config.files",
    "config.problems",
    "config.overrides",
    "typed_command",
    "verbs",
  ),
  "sharding",  # only one of several processes prints
  "storage",  # an argument may be a URL
  *("generation.prompts", "generation.transformers_options", "capacity.topologies", "training.sinks.output", "__version__"),
}


def test_a_verb_calls_the_api():
  for path in CLI.glob("*.py"):
    tree = ast.parse(path.read_text("utf-8"))
    checked = [node for node in tree.body if isinstance(node, ast.If)]  # TYPE_CHECKING: imports for annotations
    tree.body = [node for node in tree.body if node not in checked]
    names = set()
    for node in ast.walk(tree):
      if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "maxtext_like":
        names |= {alias.name for alias in node.names} if node.module == "maxtext_like" else {node.module}
    of_api = names & set(maxtext_like.__all__)
    others = {name.removeprefix("maxtext_like.") for name in names - of_api}
    assert {name for name in others - BESIDES if name.split(".")[0] != "cli"} == set(), path
    verb = path.stem.rstrip("_")
    assert of_api or verb not in VERBS, path


@pytest.mark.parametrize(
  "words",
  [
    *(["train", "gemma4-tiny"], ["config", "gemma4-tiny"], ["compile", "gemma4-tiny", "topology=v6e-1"]),
    *(["audit", "gemma4-tiny", "--platform", "cpu"], ["xray", "gemma4-tiny"], ["bisect", "gemma4-tiny"]),
    *(["risk", "--checkpoint", CHECKPOINT], ["risk", CHECKPOINT], ["generate", "--checkpoint", CHECKPOINT, "--prompt", "a"]),
    ["bisect", "--checkpoint", CHECKPOINT],
  ],
)
def test_what_was_typed_is_of_the_command_line(words, capsys):
  assert main([*words, "stepz=5"]) == 2
  assert "command line \"stepz=5\": unknown key 'stepz', did you mean 'steps'?" in capsys.readouterr().err


def test_of_a_checkpoint_too(tmp_path, capsys):
  np.savez(tmp_path / "in.npz", input_ids=[[1, 2]])
  files = ["--inputs", str(tmp_path / "in.npz"), "--output", str(tmp_path / "out.npz")]
  for words in (["import", CHECKPOINT, "--out", str(tmp_path / "x")], ["forward", "--checkpoint", CHECKPOINT, *files]):
    assert main([*words, "stepz=5"]) == 2
    assert 'command line "stepz=5": ' in capsys.readouterr().err


@pytest.mark.parametrize(
  "call",
  [
    *(maxtext_like.load, maxtext_like.risk, lambda at, **keys: maxtext_like.import_checkpoint(at, "x", **keys)),
    *(lambda at, **keys: maxtext_like.forward(at, {"input_ids": [[1]]}, **keys), maxtext_like.generate),
    lambda at, **keys: maxtext_like.bisect(checkpoint=at, **keys),
    *(lambda _, f=f, **keys: f("gemma4-tiny", **keys) for f in (maxtext_like.train, maxtext_like.xray_step)),
    lambda _, **keys: maxtext_like.audit("gemma4-tiny", platform="cpu", **keys),
    lambda _, **keys: maxtext_like.compile_step("gemma4-tiny", topology="v6e-1", **keys),
  ],
)
def test_what_python_gives_is_an_argument(call):
  extra = {"prompts": "a"} if call is maxtext_like.generate else {}
  with pytest.raises(UserError, match="argument \"stepz=5\": unknown key 'stepz', did you mean 'steps'"):
    call(CHECKPOINT, stepz=5, **extra)


def test_a_library_error_names_no_option():
  calls = [
    lambda: maxtext_like.audit("gemma4-tiny"),
    lambda: maxtext_like.audit("gemma4-tiny", platform="gpu"),
    lambda: maxtext_like.audit("gemma4-tiny", platform="cuda", topology="v6e-8"),
    lambda: maxtext_like.bisect(),
    lambda: maxtext_like.replay("tests"),
    lambda: maxtext_like.list_keys("stepz"),
    lambda: maxtext_like.load_config("gemma4-tiny", "--stepz"),
  ]
  for call in calls:
    with pytest.raises(UserError) as error:
      call()
    assert " --" not in str(error.value)
    assert "maxtext-like" not in str(error.value)
