"""Imports point one way: every import of every file, also inside functions, is checked against one order of layers."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "maxtext_like"

# From the bottom up. A module may import modules below it and modules of its own package. Packages in one tuple do not import
# each other, except those of the first tuple.
ORDER = (
  (
    "__version__",
    "abandoned_threads",
    "atomic",
    "errors",
    "extras",
    "masking",
    "local_copies",
    "storage",
    "strict_json",
    "targets",
    "verbs",
  ),
  ("typed_command",),
  ("layers",),
  ("numerics",),
  ("config",),
  ("sharding",),
  ("models",),
  ("data", "checkpoint"),
  ("generation",),
  ("training.objectives", "training.optimizers", "training.sinks"),
  ("training.step",),
  ("capacity",),
  ("evaluation",),
  ("training.loop",),
  ("training.run",),
  ("analysis",),
  ("api",),
  ("__init__",),
  ("cli",),
  ("__main__",),
)
HEIGHT = {name: height for height, names in enumerate(ORDER) for name in names}
# A family's parts belong to different layers.
OF_A_FAMILY = {"config": "config", "maxtext": "config", "huggingface": "checkpoint"}
# These import only the packages of this project that are named here, even if others are below them.
ONLY = {"layers": {"layers"}, "numerics": {"numerics", "layers", "errors"}, **dict.fromkeys(ORDER[0], ORDER[0])}


def sources() -> list[Path]:
  """Returns every file of the package. src/layers is listed separately, because rglob does not follow its link."""
  return sorted([*PACKAGE.rglob("*.py"), *(PACKAGE / "layers").rglob("*.py")])


def part_of(module: str) -> str:
  """Returns the entry of ORDER for a module or name: 'config' for 'maxtext_like.config.schema'.

  Names of the package itself, such as ``maxtext_like.load``, belong to '__init__'.
  """
  part = module.split(".")[1] if "." in module else "__init__"
  if part == "models":
    _, _, first, name, *_ = *module.split("."), "", ""
    if (PACKAGE / "models" / first).is_dir():
      return OF_A_FAMILY.get(name, "models")
  if part == "training":  # its folders have their own entries; other files count as its top
    folder = ".".join(module.split(".")[1:3])
    return folder if folder in HEIGHT else "training.run"
  return part if part in HEIGHT or (PACKAGE / part).is_dir() or (PACKAGE / f"{part}.py").is_file() else "__init__"


def imports(tree: ast.AST, module: str) -> Iterator[tuple[int, str]]:
  """Yields (line, full name) of every import of this project. ``module`` is the importer, to resolve relative imports."""
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
  """Returns one line for every import of a source that violates the order."""
  part, tree = part_of(module), ast.parse(text)
  if module == "maxtext_like.models.registry":  # the types of a family's parts, which other layers define and import
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
  """To fix a violation, move the function to a lower layer, or let the caller above pass it as an argument."""
  wrong = []
  for path in sources():
    name = path.relative_to(PACKAGE.parent)
    wrong += faults(path.read_text(encoding="utf-8"), ".".join(name.with_suffix("").parts), str(name))
  assert not wrong, "\n".join(wrong)


def test_modules_are_loaded_by_name_only_where_a_table_has_their_names():
  """The other tests cannot see imports through ``import_module``, so every file that uses it is listed and was reviewed."""
  found = set()
  for path in sources():
    text = path.read_text(encoding="utf-8")
    if "import_module" not in text and "__import__" not in text:
      continue
    tree = ast.parse(text)
    called = {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    called |= {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    if called & {"import_module", "__import__"}:
      found.add(str(path.relative_to(PACKAGE)))
  tables = {"layers/kernels/attention/registry.py", "layers/kernels/grouped_matmul/registry.py", "config/families.py"}
  tables |= {"data/registry.py", "data/worker_main.py", "training/objectives/registry.py", "training/optimizers/registry.py"}
  assert found == tables | {"__init__.py", "cli/main.py", "analysis/risk/model_risk.py"}


def test_every_file_has_its_place_in_the_order():
  paths = sources()
  parts = {part.partition(".")[0] for part in HEIGHT}
  assert {p.relative_to(PACKAGE).parts[0].removesuffix(".py") for p in paths} == parts - {"__version__"}
  folders = {f"training.{p.name}" for p in (PACKAGE / "training").iterdir() if (p / "__init__.py").exists()}
  assert folders == {part for part in HEIGHT if part.startswith("training.")}
  assert len(paths) > 150


def module_graph() -> dict[str, set[str]]:
  """Returns every module with the modules that it imports: at its top, inside functions and for type checkers."""
  paths = {
    ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts).removesuffix(".__init__"): path for path in sources()
  }
  missing = []
  graph: dict[str, set[str]] = {}
  for module, path in paths.items():
    # Relative imports start at the module's package. For the __init__.py of a package that is the package itself.
    importer = f"{module}.__init__" if path.name == "__init__.py" else module
    found = set()
    for line, name in imports(ast.parse(path.read_text(encoding="utf-8")), importer):
      if name not in paths and name.rpartition(".")[0] not in paths:
        missing.append(f"{module}:{line}: {name}")
      while name not in paths:  # a name in a module, such as maxtext_like.errors.UserError
        name = name.rpartition(".")[0]
      found.add(name)
    graph[module] = found - {module, "maxtext_like"}  # names of the package are imported at first use (verbs.py)
  assert not missing, f"imported modules that do not exist: {missing}"
  return graph


def cycles(graph: dict[str, set[str]]) -> set[frozenset[str]]:
  """Returns sets of modules that import each other, directly or through others (strongly connected components)."""
  order: list[str] = []
  seen: set[str] = set()

  def visit(graph: dict[str, set[str]], start: str, done: list[str]) -> None:
    stack = [(start, iter(sorted(graph[start])))]
    seen.add(start)
    while stack:
      _, rest = stack[-1]
      after = next((other for other in rest if other not in seen), None)
      if after is None:
        done.append(stack.pop()[0])
      else:
        seen.add(after)
        stack.append((after, iter(sorted(graph[after]))))

  for module in graph:
    if module not in seen:
      visit(graph, module, order)
  importers: dict[str, set[str]] = {module: set() for module in graph}
  for module, imported in graph.items():
    for other in imported:
      importers[other].add(module)
  seen.clear()
  found = set()
  for module in reversed(order):
    if module not in seen:
      part: list[str] = []
      visit(importers, module, part)
      if len(part) > 1:
        found.add(frozenset(part))
  return found


def test_no_modules_import_each_other():
  """To fix a cycle, move the code that both modules need into a lower module, or pass it as an argument."""
  found = cycles(module_graph())
  assert not [sorted(name.removeprefix("maxtext_like.") for name in cycle) for cycle in found]


def test_cycles_are_found():
  graph = {"a": {"b"}, "b": {"c"}, "c": {"a", "d"}, "d": {"e"}, "e": {"d"}, "f": {"a"}}
  assert cycles(graph) == {frozenset("abc"), frozenset("de")}


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
    ("config.schema", "from maxtext_like.models.registry import FAMILIES", True),
    ("config.schema", "from maxtext_like.models.gemma3.config import Config", False),
    ("config.schema", "from maxtext_like.models.gemma3.model import decoder", True),
    ("models.gemma3.config", "from maxtext_like.config.model import ModelConfig", False),
    ("models.gemma3.config", "from maxtext_like.models.build import build_decoder", True),
    ("models.gemma3.huggingface", "from maxtext_like.checkpoint.huggingface.fields import Fields", False),
    ("models.gemma3.model", "from maxtext_like.checkpoint.huggingface.fields import Fields", True),
    ("models.registry", "from maxtext_like.config.model import ModelConfig", False),
    ("config.schema", "from maxtext_like.training.optimizers import registry", True),
    ("config.schema", "from maxtext_like.training.optimizers import adamw", True),
    ("config.choices", "from maxtext_like.data.readers.jsonl import JsonLines", True),
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
  """pytest imports test files by their base name and cannot collect a second one. Only a run of all tests would show that."""
  files: dict[str, list[str]] = {}
  for path in Path(__file__).parent.rglob("test_*.py"):
    files.setdefault(path.name, []).append(str(path))
  assert not [paths for paths in files.values() if len(paths) > 1]
