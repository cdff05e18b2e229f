"""Families, optimizers, objectives, data sets and kernels: each choice of a key is a file or folder, and no other code names
it."""

import dataclasses
import re
import sys
from pathlib import Path
from types import ModuleType
from typing import Any, get_args

import pytest

from maxtext_like import layers, models
from maxtext_like.capacity import memory
from maxtext_like.config import choices, families
from maxtext_like.config.load import load_config
from maxtext_like.config.problems import alternatives
from maxtext_like.config.schema import LEAVES
from maxtext_like.data.registry import load
from maxtext_like.errors import UserError
from maxtext_like.layers.kernels import names
from maxtext_like.models import registry
from maxtext_like.training import objectives, optimizers
from maxtext_like.training.objectives import language_modeling
from maxtext_like.training.run.banner import banner, shares
from maxtext_like.training.step.program import make_program

SMALL = ["num_decoder_layers=1", "inhomogeneous_layer_cycle_interval=1", "dataset=synthetic", "max_target_length=8"]


@pytest.mark.parametrize(("package", "names"), [(objectives, choices.OBJECTIVES), (optimizers, choices.OPTIMIZERS)])
def test_each_file_is_a_choice(package: ModuleType, names: Any):
  files = [path for path in Path(package.__path__[0]).glob("*.py") if "\ndef build(" in path.read_text("utf-8")]
  assert sorted(path.stem for path in files) == sorted(names)


def test_each_folder_of_a_family_is_a_choice():
  assert sorted(path.parent.name for path in Path(models.__path__[0]).glob("*/model.py")) == sorted(choices.FAMILIES)
  assert list(registry.FAMILIES) == list(families.FAMILIES) == list(choices.FAMILIES)


@pytest.mark.parametrize(
  ("folder", "kernel", "choice"),
  [("attention", names.Attention, names.AttentionChoice), ("grouped_matmul", names.Grouped, names.GroupedChoice)],
)
def test_each_file_of_a_kernel_is_a_choice(folder: str, kernel: Any, choice: Any):
  files = (Path(layers.__path__[0]) / "kernels" / folder).glob("*.py")
  found = [path.stem for path in files if re.search(r"^KERNEL\b", path.read_text("utf-8"), re.MULTILINE)]
  assert sorted(found) == sorted(get_args(kernel))
  assert get_args(choice) == ("auto", *get_args(kernel))


@pytest.mark.parametrize(
  ("key", "names"),
  [("objective", choices.OBJECTIVES), ("opt_type", tuple(choices.OPTIMIZERS)), ("dataset", tuple(choices.DATASETS))],
)
def test_the_configuration_takes_the_choices(key, names):
  assert get_args(LEAVES[key][1]) == names
  wrong = names[0] + names[0][-1]
  with pytest.raises(UserError, match=f"{key}: '{wrong}' is not one of {', '.join(names)}, did you mean '{names[0]}'"):
    load_config("gemma4-tiny", [f"{key}={wrong}"])


def test_only_one_table_names_optimizers():
  package = Path(objectives.__path__[0]).parents[1]
  naming = {path.relative_to(package).as_posix() for path in package.rglob("*.py") if '"lion"' in path.read_text("utf-8")}
  # foreign_exact.py: other trainers use the same name for this optimizer.
  assert naming == {"config/choices.py", "config/foreign_exact.py"}


def test_every_data_set_opens():
  for kind in choices.DATASETS.values():
    assert callable(load(kind, kind.opens))
    assert not kind.files or isinstance(load(kind, "SUFFIXES"), tuple)


def test_the_key_chooses_the_objective_and_the_start_line_tells_it(monkeypatch):
  @dataclasses.dataclass(frozen=True)
  class Other(language_modeling.LanguageModeling):
    pass

  module: Any = ModuleType("other")
  module.build = lambda model: Other(**vars(language_modeling.build(model)))
  monkeypatch.setitem(sys.modules, "maxtext_like.training.objectives.other", module)
  config = load_config("gemma4-tiny", SMALL).config
  other = dataclasses.replace(config, training=dataclasses.replace(config.training, objective="other"))
  told = []
  for c, kind in ((config, language_modeling.LanguageModeling), (other, Other)):
    program = make_program(c)
    assert type(program.objective) is kind
    lines = banner(program, "run", memory.estimate(program), None).splitlines()
    told += [line for line in lines if line.startswith("batch")]
  assert told[0].endswith(", adamw")
  assert told[1] == f"{told[0]}, other"


def test_names_in_a_sentence():
  assert [alternatives(names) for names in ("a", "ab", "abc")] == ["a", "a or b", "a, b or c"]


def test_documents_of_a_run_that_does_not_evaluate():
  told = "data    1,686 training documents, no evaluation set"
  assert shares({"": 1686}, {}, load_config("gemma3-tiny", []).config.data) == f"{told} (set eval_interval to hold out 5 %)"
  assert shares({"": 1686}, {}, load_config("gemma3-tiny", ["eval_fraction=0.0"]).config.data) == told
