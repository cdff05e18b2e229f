"""Imports point one way: every import of every file, those inside functions too, held against one list of layers."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "maxtext_like"

# From the bottom up. A module imports what stands below it, and its own package; of several in one line none imports another.
ORDER = (
  (
    "__version__",
    "abandoned_threads",
    "atomic",
    "errors",
    "masking",
    "local_copies",
    "storage",
    "strict_json",
    "targets",
  ),
  ("typed_command",),
  ("layers",),
  ("numerics",),
  ("registry",),
  ("config",),
  ("sharding",),
  ("models",),
  ("data", "checkpoint"),
  ("generation",),
  ("training.objectives", "training.optimizers", "training.sinks"),
  ("training.step",),
  ("capacity",),
  ("training.loop",),
  ("training.run",),
  ("analysis",),
  ("api",),
  ("__init__",),
  ("cli",),
  ("__main__",),
)
HEIGHT = {name: height for height, names in enumerate(ORDER) for name in names}
# The registry.py of these is "registry": the configuration too asks for its names, so it loads what it names when asked to.
REGISTRIES = {"models", "data", "training.objectives", "training.optimizers"}
# A family's parts belong to different layers.
OF_A_FAMILY = {"config": "config", "maxtext": "config", "huggingface": "checkpoint"}
# Of ours, these import only what is named here, whatever stands below them.
ONLY = {"layers": {"layers"}, "numerics": {"numerics", "layers", "errors"}, **dict.fromkeys(ORDER[0], ORDER[0])}


def sources() -> list[Path]:
  """Every file of the package; src/layers through its link, into which rglob does not look."""
  return sorted([*PACKAGE.rglob("*.py"), *(PACKAGE / "layers").rglob("*.py")])


def part_of(module: str) -> str:
  """'config' of 'maxtext_like.config.schema'; what is of the package itself, as ``maxtext_like.load``, is of '__init__'."""
  part = module.split(".")[1] if "." in module else "__init__"
  if module.removeprefix("maxtext_like.").partition(".registry")[0] in REGISTRIES and ".registry" in module:
    return "registry"
  if part == "models":
    _, _, first, name, *_ = *module.split("."), "", ""
    if (PACKAGE / "models" / first).is_dir():
      return OF_A_FAMILY.get(name, "models")
  if part == "training":  # its folders have an order of their own; the package itself is its top
    folder = ".".join(module.split(".")[1:3])
    return folder if folder in HEIGHT else "training.run"
  return part if part in HEIGHT or (PACKAGE / part).is_dir() or (PACKAGE / f"{part}.py").is_file() else "__init__"


def imports(tree: ast.AST, module: str) -> Iterator[tuple[int, str]]:
  """(line, full name) of what is imported of ours; ``module``: who does, for relative imports."""
  for node in ast.walk(tree):
    if isinstance(node, ast.Import):
      found = [alias.name for alias in node.names]
    elif isinstance(node, ast.ImportFrom):
      base = ".".join(module.split(".")[: -node.level]) if node.level else ""
      source = ".".join(filter(None, (base, node.module)))
      found = [f"{source}.{alias.name}" for alias in node.names]
    else:
      continue
    yield from ((node.lineno, name) for name in found if name.split(".")[0] == "maxtext_like")


def faults(text: str, module: str, place: str) -> list[str]:
  """What a source imports against the order, a line each."""
  part, tree = part_of(module), ast.parse(text)
  if part == "registry":  # what it names in types it does not load
    tree.body = [node for node in tree.body if not (isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING")]
  found = []
  for line, name in imports(tree, module):
    other = part_of(name)
    if other == part and other not in ORDER[0]:
      continue
    if part in ONLY and other not in ONLY[part]:
      found.append(f"{place}:{line}: {part} imports {name}; of ours it may import {', '.join(sorted(ONLY[part]))} alone")
    elif part not in ORDER[0] and HEIGHT[other] >= HEIGHT[part]:
      found.append(f"{place}:{line}: {part} imports {name}, which does not stand below it")
  return found


def test_imports_point_one_way():
  """To mend: move the function to where it belongs, or let the caller above hand it down as an argument."""
  wrong = []
  for path in sources():
    name = path.relative_to(PACKAGE.parent)
    wrong += faults(path.read_text(encoding="utf-8"), ".".join(name.with_suffix("").parts), str(name))
  assert not wrong, "\n".join(wrong)


def test_modules_are_loaded_by_name_only_where_a_table_has_their_names():
  """``import_module`` is an import that nothing here can see: each place of it is one to look at."""
  found = set()
  for path in sources():
    tree = ast.parse(path.read_text(encoding="utf-8"))
    called = {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    called |= {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    if called & {"import_module", "__import__"}:
      found.add(str(path.relative_to(PACKAGE)))
  tables = {"layers/kernels/attention/registry.py", "layers/kernels/grouped_matmul/registry.py", "models/registry.py"}
  tables |= {"data/registry.py", "data/worker_main.py", "training/objectives/registry.py", "training/optimizers/registry.py"}
  assert found == tables | {"__init__.py", "cli/main.py", "analysis/risk/model_risk.py"}


def test_every_file_has_its_place_in_the_order():
  paths = sources()
  parts = {part.partition(".")[0] for part in HEIGHT}
  assert {p.relative_to(PACKAGE).parts[0].removesuffix(".py") for p in paths} == parts - {"__version__", "registry"}
  folders = {f"training.{p.name}" for p in (PACKAGE / "training").iterdir() if (p / "__init__.py").exists()}
  assert folders == {part for part in HEIGHT if part.startswith("training.")}
  assert len(paths) > 150


@pytest.mark.parametrize(
  ("module", "line", "at_fault"),
  [
    ("training.run", "from maxtext_like.analysis.risk import overflow_risk", True),
    ("training.run", "def f():\n  import maxtext_like.cli.main", True),
    ("training.run", "from ..analysis import risk", True),
    ("training.run", "from maxtext_like import cli", True),
    ("training.run", "from maxtext_like import load_config", True),
    ("training.run", "from maxtext_like import __version__", False),
    ("training.run", "from maxtext_like.numerics import probe_statistics\nfrom . import loop", False),
    ("numerics.plan", "from maxtext_like.config import schema", True),
    ("numerics.plan", "from maxtext_like.layers import probe", False),
    ("layers.mlp", "from maxtext_like.errors import UserError", True),
    ("config.schema", "from maxtext_like.models.registry import FAMILIES", False),
    ("config.schema", "from maxtext_like.models.gemma3.config import Config", False),
    ("config.schema", "from maxtext_like.models.gemma3.model import decoder", True),
    ("models.gemma3.config", "from maxtext_like.config.model import ModelConfig", False),
    ("models.gemma3.config", "from maxtext_like.models.build import build_decoder", True),
    ("models.gemma3.huggingface", "from maxtext_like.checkpoint.huggingface.fields import Fields", False),
    ("models.gemma3.model", "from maxtext_like.checkpoint.huggingface.fields import Fields", True),
    ("models.registry", "from maxtext_like.config.model import ModelConfig", True),
    ("config.schema", "from maxtext_like.training.optimizers import registry", False),
    ("config.schema", "from maxtext_like.training.optimizers import adamw", True),
    ("data.registry", "from maxtext_like.data.readers.jsonl import JsonLines", True),
    ("sharding.mesh", "from maxtext_like.models.model import Model", True),
    ("data.pack", "from maxtext_like.checkpoint.store import manifest", True),
    ("errors", "from maxtext_like.config import schema", True),
    ("cli.train", "import jax, maxtext_like.training.run.run", False),
  ],
)
def test_what_climbs_back_is_named(module, line, at_fault):
  found = faults(line, f"maxtext_like.{module}", "here.py")
  assert bool(found) == at_fault
  assert all(entry.startswith(f"here.py:{len(line.splitlines())}: ") for entry in found)


def test_no_two_files_of_tests_have_one_name():
  """pytest imports each by its name alone: the second could not be collected, which shows only where all are run."""
  files: dict[str, list[str]] = {}
  for path in Path(__file__).parent.rglob("test_*.py"):
    files.setdefault(path.name, []).append(str(path))
  assert not [paths for paths in files.values() if len(paths) > 1]
