"""``load_config`` merges base.yml, the model file, overlays and ``key=value`` words into one checked ``Config``."""

import dataclasses
import functools
import itertools
from collections.abc import Callable
from collections.abc import Mapping as Entries
from collections.abc import Sequence as Words
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from maxtext_like.config import foreign_names, hub, maxtext, maxtext_file
from maxtext_like.config.choices import DATASETS
from maxtext_like.config.coerce import CoercionError, coerce, describe
from maxtext_like.config.files import configs_folder, find_config, label_of, model_names, named_file
from maxtext_like.config.idle_keys import idle_notes
from maxtext_like.config.overrides import UnknownKeyError, leaf_of, parse_overrides
from maxtext_like.config.precision_keys import foreign_keys
from maxtext_like.config.problems import Problem, did_you_mean, did_you_misspell, error_of
from maxtext_like.config.rules import cross_problems
from maxtext_like.config.schema import (
  FAMILIES_OF_KEY,
  LARGEST,
  LARGEST_INT,
  LEAVES,
  SECTIONS,
  Config,
  largest_float,
  section_type,
)
from maxtext_like.config.yaml_file import Entry, Mapping, Node, Scalar, read_yaml, to_text
from maxtext_like.errors import UserError
from maxtext_like.masking import MASK, masked, masked_values

if TYPE_CHECKING:
  from ml_collections import ConfigDict

KindOfFiles = Callable[[Any, str], str]
"""(dataset_path, data_format) -> dataset: chooses the kind of data set by the files."""
MOST_UNKNOWN = 50  # maximum number of unknown keys of a file that an error lists


@dataclass(frozen=True, repr=False)
class Loaded:
  """A configuration and the origin of its values.

  Attributes:
    config: the typed, checked sections.
    origins: place of each value by ``section.key``, such as ``configs/base.yml:31``, ``argument "steps=5"`` or
      ``command line "steps=5"``.
    notes: messages about accepted keys, such as keys without effect, each with its place.
    path: the model file.
  """

  config: Config
  origins: dict[str, str]
  notes: tuple[str, ...]
  path: Path

  if not TYPE_CHECKING:  # a type checker would accept any attribute name because of it

    def __getattr__(self, name: str) -> Any:
      """Raise an AttributeError that says where a section or key is found, if one was looked up here."""
      section, _ = LEAVES.get(name, ("", None))
      there = name if name in SECTIONS else f"{section}.{name}" if section else ""
      hint = f"; write .config.{there}" if there else did_you_mean(name, (*SECTIONS, *self.__dataclass_fields__))
      raise AttributeError(f"the result of load_config has no attribute {name!r}{hint}")

  def __repr__(self) -> str:
    return f"Loaded({self.config.model.model_name}, {self.config.precision.dtype}, of {self.path})"

  def to_yaml(self, *, mask: bool = False) -> str:
    """Return the resolved configuration as YAML with the origin of each value. ``load_config`` reads it back unchanged.

    Precision keys that the model does not support are comments in it, because setting them is an error.

    Args:
      mask: replace values that look like secrets by ``***``.
    """
    inactive = foreign_keys(self.config.model)
    lines = ["# Resolved configuration; comments show where each value was set."]
    for section in SECTIONS:
      lines += ["", f"{section}:"]
      given = vars(getattr(self.config, section))
      values = masked_values(given) if mask else given
      for key in own_keys(section, self.config.model.decoder_block):
        text = f"{key}: {to_text(values[key])}"
        if key in inactive:
          lines.append(f"  # {text}  (no effect: this model does not have {inactive[key]})")
        else:
          origin = self.origins[f"{section}.{key}"]
          if (
            values[key] != given[key] and "=" in origin
          ):  # the origin quotes the word that set the value, in a form that masking may miss
            origin = f'{origin.partition("=")[0]}={MASK}"'
          lines.append(f"  {text}  # {masked(origin) if mask else origin}")
    return "\n".join(lines) + "\n"

  def to_config_dict(self) -> "ConfigDict":
    """Return the values as an ``ml_collections.ConfigDict``; see ``to_config_dict``."""
    return to_config_dict(self.config)


def to_config_dict(config: Config) -> "ConfigDict":
  """Return the values by section as a locked ``ConfigDict``, which ``maxtext_like.load_config`` accepts.

  It is locked so that a misspelled key is an error. Keys that the model does not support are left out, because setting them
  is an error.
  """
  from ml_collections import ConfigDict

  useless = foreign_keys(config.model)
  sections = {}
  for section in SECTIONS:
    values = vars(getattr(config, section))
    sections[section] = {key: values[key] for key in own_keys(section, config.model.decoder_block) if key not in useless}
  return ConfigDict(sections, type_safe=False).lock()  # None may become a number; load_config checks the types


def load_config(
  path: str | Path, overrides: Words[str] = (), kind_of_files: KindOfFiles | None = None, *, inference: bool = False
) -> Loaded:
  """Load, merge and check a configuration.

  Args:
    path: a model's name (``gemma4-tiny``) or the path of a model file: with sections, flat, or of MaxText.
    overrides: ``key=value`` and ``section.key=value`` words and paths of overlays, which replace values of the model file.
    kind_of_files: chooses ``dataset`` by the files if ``dataset_path`` is set and ``dataset`` reads no files; None: such a
      configuration is an error.
    inference: the model is loaded and not trained, so ``base_weights`` needs no adapter.

  Returns:
    The configuration with the origin of each value.

  Raises:
    UserError: the configuration is invalid. The message has place, value and fix of every problem.
  """
  hardware, words, problems = parse_overrides(list(overrides))
  file, words = _model_file(str(path), words)
  entries = _file_entries(file)
  theirs = maxtext_file.is_maxtext_file(entries)
  merged = dict(_base_entries())
  defaults = {leaf: entry.origin for leaf, entry in merged.items()}
  notes: list[str] = []
  # Precedence of each value: a word beats an overlay, and an overlay beats the model file.
  precedence = dict.fromkeys(merged, 0)
  levels = itertools.count(1)

  def override(translated: tuple[list[Entry], list[str], list[Problem]]) -> None:
    done, said, wrong = translated
    merged.update((e.key, e) for e in done)
    precedence.update(dict.fromkeys((e.key for e in done), next(levels)))
    notes.extend(said)
    problems.extend(wrong)

  def family() -> str:
    node = merged["decoder_block"].node
    return node.text if isinstance(node, Scalar) else ""

  # Merge in order: model file, overlays, words. Each step translates MaxText's keys for the family known so far.
  block = next((e.node.text for e in entries if e.key == "decoder_block" and isinstance(e.node, Scalar)), "")
  override(maxtext_file.translate_file(entries, file.stem) if theirs else maxtext.translate_keys(entries, block))
  before_overrides = dict(merged)
  _require_its_name(merged, words, file)
  for name in hardware:
    override(maxtext.translate_keys(_file_entries(_hardware_file(name)), family()))
  override(maxtext.translate_keys(words, family()))

  # Convert the merged text to typed values; all problems up to here are reported together.
  if merged["model_name"].origin == defaults["model_name"]:
    merged["model_name"] = Entry("model_name", Scalar(file.stem, plain=True, line=1), f"name of {label_of(file)}")
  values = _coerced(merged, problems)
  if problems:
    raise error_of(problems)
  for key in hub.KEYS:
    if values[key] is not None and (found := hub.find(values[key])):
      notes.append(f"{merged[key].origin}: {key} was found in the Hugging Face cache: {found}")
      values[key] = str(found)
  # Some keys imply others: epochs replaces steps, files choose the kind of data set, and so on.
  explicit = frozenset(leaf for leaf, entry in merged.items() if entry.origin != defaults[leaf])

  def imply(leaf: str, to: str, value: object, why: str = "") -> None:
    """Replace a value that is a default, or has lower precedence than the key ``to`` that implies it."""
    if leaf not in explicit or precedence[to] > precedence[leaf]:
      values[leaf], merged[leaf] = value, Entry(leaf, merged[leaf].node, f"follows from {to}{why}")

  if values["epochs"] is not None and values["steps"] is not None:
    imply("steps", "epochs", None)
    if values["steps"] is not None:
      imply("epochs", "steps", None)
  kind = DATASETS.get(values["dataset"])
  if kind_of_files is not None and kind is not None and not kind.files:
    if values["dataset_path"]:
      imply("dataset", "dataset_path", kind_of_files(values["dataset_path"], values["data_format"]))
    elif values["data_format"] == "chat":
      imply("dataset", "data_format", "jsonl")
  if not values["enable_checkpointing"]:
    imply("resume", "enable_checkpointing", False, ": false")
  if values["eval_path"]:
    imply("eval_fraction", "eval_path", 0.0)
  # Check all sections together, build them, and add notes on keys without effect and on differences to MaxText.
  _check(values, merged, explicit, inference=inference)
  config = Config(**{section: make_section(section, values) for section in SECTIONS})
  origins = {f"{LEAVES[leaf][0]}.{leaf}": merged[leaf].origin for leaf in LEAVES}
  set_later = frozenset(leaf for leaf in explicit if merged[leaf] is not before_overrides[leaf])
  notes += idle_notes(config, {leaf: merged[leaf].origin for leaf in explicit}, set_later, explicit - set_later)
  if theirs or is_base(str(path)):
    said = frozenset(leaf for leaf in explicit if theirs or merged[leaf] is not before_overrides[leaf])
    if theirs:
      notes += maxtext_file.notes(values, label_of(file))
    notes.append(maxtext_file.table(label_of(file), maxtext_file.differences(values, said, decoder=theirs)))
  return Loaded(config, origins, tuple(notes), file)


def is_chosen(loaded: Loaded, key: str) -> bool:
  """Return True if a value is not a default: ``key`` is ``section.key``, set by a word or an overlay and not by the file of the
  model (a stored configuration has every key)."""
  return not loaded.origins[key].startswith(("configs/base.yml", str(loaded.path)))


@functools.cache
def base_values() -> MappingProxyType[str, object]:
  """Return the defaults of ``configs/base.yml`` by key; keys that a model file must set are None."""
  problems: list[Problem] = []
  values = _coerced(_base_entries(), problems, allow_unset=True)
  if problems:
    raise error_of(problems)
  return MappingProxyType(values)


@functools.cache
def own_keys(section: str, decoder_block: str) -> tuple[str, ...]:
  """Return the keys of a section that a family has, in the order of ``configs/base.yml``."""
  return tuple(
    leaf
    for leaf in _base_entries()
    if leaf in LEAVES and LEAVES[leaf][0] == section and decoder_block in FAMILIES_OF_KEY.get(leaf, (decoder_block,))
  )


def make_section(section: str, values: Entries[str, Any]) -> Any:
  """Build a section from values by key; missing keys have the default of ``configs/base.yml``.

  Raises:
    InvalidSectionError: the values are invalid.
  """
  whole: dict[str, Any] = {**base_values(), **values}
  return section_type(section, whole["decoder_block"])(**_of_section(whole, section))


def unchecked_section(section: str, values: Entries[str, Any]) -> Any:
  """Build a section as ``make_section``, without checks: older checkpoints may hold values that are errors now."""
  whole: dict[str, Any] = {**base_values(), **{k: tuple(v) if isinstance(v, list) else v for k, v in values.items()}}
  return _unchecked(section_type(section, whole["decoder_block"]), _of_section(whole, section))


def is_base(path: str) -> bool:
  """Return True if a path means ``configs/base.yml``: MaxText's commands start with it, with any directory."""
  file = Path(path).expanduser()
  return file.name == "base.yml" and (not file.exists() or file.resolve() == (configs_folder() / "base.yml").resolve())


def _model_file(path: str, words: list[Entry]) -> tuple[Path, list[Entry]]:
  """Return the model file and the other words. If the path is base.yml, ``model_name`` names the model, as in MaxText."""
  if not is_base(path):
    return find_config(path), words
  named = [word.node.text for word in words if word.key == "model_name" and isinstance(word.node, Scalar)]
  if not named:
    raise UserError(f"{path}: contains only defaults, not a model\n  fix: name a model, such as gemma4-tiny")
  return find_config(named[-1]), [word for word in words if word.key != "model_name"]


_OTHER_MODELS = (
  *("llama", "qwen-", "qwen1", "qwen2", "mistral", "mixtral", "gpt", "olmo", "kimi"),
  *("gemma-", "gemma2", "deepseek2", "deepseek4"),
)


def _require_its_name(merged: Entries[str, Entry], words: list[Entry], file: Path) -> None:
  """Raise an error if ``model_name`` names another model: here it is a label, but in MaxText it chooses the model."""
  own = merged["model_name"].node
  for word in words:
    if word.key != "model_name" or not isinstance(word.node, Scalar):
      continue
    name = word.node.text
    if name in (file.stem, own.text if isinstance(own, Scalar) else None):
      continue
    if name in model_names() or name.startswith(_OTHER_MODELS):
      raise UserError(
        f"{word.origin}: model_name is only a label; the model is {label_of(file)}, and {name} is another model"
        f"\n  fix: write the model as the first word, such as {name if name in model_names() else 'gemma3-4b'}"
      )


def _hardware_file(name: str) -> Path:
  path = named_file(name)
  if not path.is_file():
    inside = configs_folder() / name.removeprefix("configs/")
    if name.removeprefix("configs/").startswith("recipes/") and inside.is_file():
      return inside  # recipes work in any directory and in a wheel
    if name in ("tpu", "gpu", "gpu_multiprocess", "cpu"):  # MaxText's hardware
      raise UserError(
        f"hardware={name}: the device is detected, and hardware= takes a file with keys for it"
        "\n  fix: leave it out; to run on the CPU of a machine with an accelerator, put JAX_PLATFORMS=cpu before the command"
      )
    kind = "is a directory, not a file" if path.is_dir() else "no such overlay"
    shipped = ", ".join(f"recipes/{path.name}" for path in sorted((configs_folder() / "recipes").glob("*.yml")))
    raise UserError(f"{name}: {kind}\n  fix: write the model first, then overlays: .yml files of your own, or {shipped}")
  return path


@functools.cache
def _base_entries() -> MappingProxyType[str, Entry]:
  path = configs_folder() / "base.yml"
  entries = {e.key: e for e in _file_entries(path)}
  if missing := [leaf for leaf in LEAVES if leaf not in entries]:
    raise UserError(f"{label_of(path)}: no default for {', '.join(missing)}")
  return MappingProxyType(entries)


def _file_entries(path: Path) -> list[Entry]:
  """Return every key of a file with sections, dotted names or flat names."""
  label = label_of(path)
  top = read_yaml(path, label)
  if maxtext_file.RUN_KEYS & top.items.keys():
    raise UserError(
      f"{label}: this is a run configuration of MaxText, not a model\n  fix: name the model, as in gemma3-4b steps=20, "
      "and write your changes of that file after it as KEY=VALUE"
    )
  entries: list[Entry] = []
  problems: list[Problem] = []
  seen: dict[str, str] = {}

  def add(key: str, node, line: int, section: str | None) -> None:
    origin = f"{label}:{line}"
    try:
      leaf = leaf_of(f"{section}.{key}" if section and key not in maxtext.KNOWN else key)
    except UnknownKeyError as error:
      problems.append(_unknown(key, section, error, origin, node))
      if len(problems) == MOST_UNKNOWN:  # not a configuration; each suggestion compares with all keys
        raise error_of(problems) from None
      return
    ours = maxtext.present(leaf)
    if ours in seen:
      problems.append(Problem(f"{origin}: duplicate key {ours!r}, first at {seen[ours]}", fix="remove one of the two"))
      return
    seen[ours] = origin
    entries.append(Entry(leaf, node, origin))

  for key, node in top.items.items():
    line = top.key_lines[key]
    if key in SECTIONS:
      if isinstance(node, Mapping):
        for name, value in node.items.items():
          add(name, value, node.key_lines[name], key)
      elif not (isinstance(node, Scalar) and node.plain and node.text == ""):
        problems.append(
          Problem(f"{label}:{line}: {key} is a section, not a key", fix="write its keys on the next lines, indented")
        )
    elif isinstance(node, Mapping) and key not in LEAVES and key not in maxtext.KNOWN:
      problems.append(
        Problem(
          f"{label}:{line}: unknown section {key!r}{did_you_mean(key, SECTIONS)}", fix=f"use one of {', '.join(SECTIONS)}"
        )
      )
    else:
      add(key, node, line, None)
  if problems:
    raise error_of(problems)
  return entries


def _unknown(key: str, section: str | None, error: UnknownKeyError, origin: str, node: Node) -> Problem:
  if error.foreign is not None or section is None:
    return error.problem(origin, node.text if isinstance(node, Scalar) else "VALUE")
  if key in LEAVES:
    return Problem(
      f"{origin}: {key!r} is a key of {LEAVES[key][0]}, not of {section}", fix=f"move it to the section {LEAVES[key][0]}"
    )
  here = [leaf for leaf, (s, _) in LEAVES.items() if s == section]
  return Problem(
    f"{origin}: unknown key {section + '.' + key!r}{did_you_misspell(key, here) or did_you_misspell(key, LEAVES)}",
    fix="correct the key; docs/reference/configuration.md lists all keys",
  )


def _coerced(entries: Entries[str, Entry], problems: list[Problem], *, allow_unset: bool = False) -> dict[str, Any]:
  values: dict[str, object] = {}
  unset: list[str] = []
  for leaf, (_, kind) in LEAVES.items():
    entry = entries[leaf]
    try:
      values[leaf] = value = coerce(entry.node, kind)
      if isinstance(value, int) and abs(value) > (most := LARGEST.get(leaf, LARGEST_INT)):
        problems.append(Problem(f"{entry.origin}: {leaf}: {value} is above the limit {most}", fix=f"write at most {most}"))
      elif isinstance(value, float) and abs(value) > (most := largest_float(leaf)):
        what = f"{entry.origin}: {leaf}: {value} is above the limit {most:.6g}"
        problems.append(Problem(what, fix=f"write at most {most:.6g}"))
    except CoercionError as error:
      if isinstance(entry.node, Scalar) and entry.node.text == "null" and entry.origin.startswith("configs/base.yml:"):
        values[leaf] = None
        unset.append(leaf)
      else:
        word = entry.node.text if isinstance(entry.node, Scalar) else ""
        ours = foreign_names.LIST_WORDS.get(word) if leaf in ("lora_modules", "base_weights_modules") else None
        said, fix = (f"'{word}' where a list is needed", f"write [{ours}]") if ours else (error, error.fix)
        problems.append(Problem(f"{entry.origin}: {leaf}: {said}", fix=fix))
  if unset and not allow_unset:
    needed = ", ".join(f"{leaf} ({describe(LEAVES[leaf][1])})" for leaf in unset)
    problems.append(Problem(f"the model file does not set {needed}", fix="add them under model:"))
  return values


def _of_section(values: Entries[str, Any], section: str) -> dict[str, Any]:
  kind = section_type(section, values["decoder_block"])
  return {field.name: values[field.name] for field in dataclasses.fields(kind)}


def _check(values: dict[str, Any], merged: dict[str, Entry], explicit: frozenset[str], *, inference: bool) -> None:
  """Raise one error with the problems of all sections and between them, each with the places of its values."""
  block = values["decoder_block"]
  sections = {name: _unchecked(section_type(name, block), _of_section(values, name)) for name in SECTIONS}
  config = _unchecked(Config, sections)
  problems = [problem for section in sections.values() for problem in section.problems()]
  problems += cross_problems(config, values, base_values(), explicit, inference=inference)
  if problems:
    raise error_of([dataclasses.replace(p, where=_places(p.keys, merged)) for p in problems])


def _unchecked(cls: Any, values: dict[str, Any]) -> Any:
  """Build a dataclass without ``__post_init__``, so that the problems of all sections can be collected before one raises."""
  made = object.__new__(cls)
  for name, value in values.items():
    object.__setattr__(made, name, value)
  return made


def _places(keys: tuple[str, ...], merged: dict[str, Entry]) -> str:
  entries = [merged[key] for key in keys]  # the origin of a word contains the key
  return "; ".join(e.origin if e.origin.endswith('"') else f"{e.origin} ({e.key})" for e in entries)
