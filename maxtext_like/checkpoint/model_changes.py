"""Compares the model of a run with that of a checkpoint, by the classes of its keys (``config.key_class``). Needs no JAX.

Models are compared by the effective values of their keys. A key without effect is ignored, and null equals the default that it
means.
"""

import json
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from maxtext_like.config.key_class import Adds, KeyClass, Marks, marks
from maxtext_like.config.load import unchecked_section
from maxtext_like.config.model import ModelConfig
from maxtext_like.config.yaml_file import to_text
from maxtext_like.errors import UserError
from maxtext_like.models.registry import FAMILIES

Sections = Mapping[str, Mapping[str, Any]]


@dataclass(frozen=True)
class Change:
  """A key whose effective values differ.

  Attributes:
    section, key: section and name of the key.
    was, now: values of the checkpoint and of this run, for display.
    stored: the value to type to get the checkpoint's.
    marks: class and conditions that the key declares.
    label: name in the table of an error; empty for ``section.key``.
    source: where the checkpoint's value was read.
  """

  section: str
  key: str
  was: Any
  now: Any
  stored: Any
  marks: Marks
  label: str = ""
  source: str = "checkpoint"

  @property
  def kind(self) -> KeyClass:
    """The class of the key."""
    return self.marks.kind

  @property
  def word(self) -> str:
    """The word to type for the checkpoint's value."""
    return shlex.quote(f"{self.key}={to_text(self.stored)}")

  @property
  def note(self) -> str:
    """The meaning of an accepted change, for the log; empty for a label of the model."""
    if self.key == "model_name":
      return ""
    if self.marks.selects_trained:
      return "changes which parameters are trained"
    return {
      KeyClass.TRAINING: "training only",
      KeyClass.MATHEMATICS: "the model gives other results: allow_model_change=true",
    }.get(self.kind, "")

  @property
  def line(self) -> str:
    """The line of this change in the table of an error."""
    label = self.label or f"{self.section}.{self.key}"
    return f"  {label}: {self.source} {json.dumps(self.was)}, this run {json.dumps(self.now)}"


@dataclass(frozen=True)
class Comparison:
  """All differences between the models of a checkpoint and of a run.

  Attributes:
    changes: the changes of every class.
    adds: the part that this model has and the checkpoint lacks; None if there is none.
    untrained: True if the forward pass uses that part before it has been trained.
    names: ``model_name`` of the checkpoint and of this run.
    sections: ``model:`` of the checkpoint and of this run.
  """

  changes: tuple[Change, ...]
  adds: Adds | None = None
  untrained: bool = False
  names: tuple[str, str] = ("", "")
  sections: tuple[Mapping[str, Any], Mapping[str, Any]] = ({}, {})

  def of(self, kind: KeyClass) -> tuple[Change, ...]:
    """Returns the changes of one class."""
    return tuple(change for change in self.changes if change.kind is kind)

  def without_added(self) -> "Comparison":
    """Returns the differences that remain if the parameters of the added part are initialized."""
    if self.adds is None:
      return self
    switch = next(change.key for change in self.changes if change.marks.adds is self.adds)
    own = lambda change: change.key == switch or any(when.key == switch for when in change.marks.when)
    return replace(self, changes=tuple(c for c in self.changes if not own(c)))

  def words(self, changes: Sequence[Change]) -> list[str]:
    """Returns the words to type for the checkpoint's values of some keys, and of other keys that must change with them."""
    words = {change.key: change.word for change in changes}
    there, here = self.sections
    if here.get("decoder_block") not in FAMILIES:
      return [*words.values()]
    while True:
      # Apply the words to this run's model. A contradiction is then between a key of the run and one of the checkpoint.
      mixed = unchecked_section("model", {**here, **{c.key: c.stored for c in changes if c.section == "model"}})
      wrong = [key for problem in (*mixed.problems(), *mixed.ignored_values()) for key in problem.keys]
      more = [key for key in dict.fromkeys(wrong) if key not in words and there.get(key) != here.get(key)]
      if not more:
        return [*words.values()]
      changes = [*changes, *(Change("model", k, there[k], here[k], there[k], Marks()) for k in more if k in there)]
      words |= {change.key: change.word for change in changes}

  def lines(self) -> Iterator[str]:
    """Yields a line for each accepted change, for the log of a run."""
    for change in self.changes:
      if change.note:
        yield f"changed {change.key}: was {to_text(change.was)}, is {to_text(change.now)} ({change.note})"


def compared(saved: Sections, current: Sections, *, subset: bool = False) -> Comparison:
  """Returns the differences between the models of two configurations.

  A key that only one of them has was added or removed by another version of the program. It is not compared.

  Args:
    saved: configuration of the checkpoint, by section (JSON values).
    current: configuration of this run.
    subset: ignore arrays that only the checkpoint has, such as those of a vision tower.
  """
  old, new = saved.get("model", {}), current.get("model", {})
  blocks = [values.get("decoder_block") for values in (old, new)]
  names = (str(old.get("model_name", "unnamed")), str(new.get("model_name", "unnamed")))
  # Models of different families: compare the family alone, or the common keys if a family is unknown.
  if blocks[0] != blocks[1] or blocks[0] not in FAMILIES:
    known = marks(ModelConfig)
    own = {"decoder_block"} if blocks[0] and blocks[1] else old.keys() & new.keys()
    unlike = [key for key in old if key in own and old[key] != new[key]]
    kinds = {key: known.get(key, Marks(KeyClass.SHAPE)) for key in unlike}
    changes = tuple(Change("model", k, old[k], new[k], old[k], kinds[k]) for k in unlike)
    return Comparison(changes, names=names)
  # The model section, then the vision section if both have a tower.
  found = [*_of_section("model", old, new, blocks[0])]
  there, here = saved.get("vision", {}), current.get("vision", {})
  switch = "use_multimodal"
  if there.get(switch) and here.get(switch):
    found += _of_section("vision", there, here, blocks[0])
  elif switch in there and switch in here and (here[switch] or not subset):
    found += _of_section("vision", {switch: there[switch]}, {switch: here[switch]}, blocks[0])
  adds = next((c.marks.adds for c in found if c.marks.adds is not None and c.now), None)
  untrained = adds is not None and unchecked_section("model", new).effective(adds.stage) != adds.before
  return Comparison(tuple(found), adds, untrained, names, (old, new))


def _of_section(name: str, old: Mapping[str, Any], new: Mapping[str, Any], block: str) -> Iterator[Change]:
  was, now = (unchecked_section(name, {**values, "decoder_block": block}) for values in (old, new))
  for key, marked in marks(type(now)).items():
    if key not in old or key not in new:
      continue
    there, here = was.effective(key), now.effective(key)
    if there != here:
      stored = old[key] if there is None else there
      yield Change(name, key, stored, new[key] if here is None else here, stored, marked)


def require_same(
  where: str,
  comparison: Comparison,
  *,
  allow: bool,
  resumes: bool = False,
  notes: Sequence[str] = (),
) -> None:
  """Refuses weights for a model with other shapes and, unless allowed, for a model that computes something else.

  Args:
    where: the checkpoint, for the message.
    comparison: differences between the two models.
    allow: the key ``allow_model_change``.
    resumes: True if a run resumes from the checkpoint; False if a model is built from its weights.
    notes: lines below the table.

  Raises:
    UserError: names every key that has to be changed, and what to type.
  """
  shapes, computed = comparison.of(KeyClass.SHAPE), () if allow else comparison.of(KeyClass.MATHEMATICS)
  untrained = comparison.untrained and not allow and not shapes
  if not (shapes or computed or untrained):
    return
  theirs, ours = comparison.names
  whose = f" ({theirs}; this run has {ours})" if theirs != ours and theirs else ""
  lines = [change.line for change in (*shapes, *computed)]
  lines += [f"  note: {note}" for note in notes]
  if shapes:
    first = f"{where}: the checkpoint has another model configuration{whose}:"
    lines.append("  why: the stored arrays do not fit this model")
  else:
    first = f"{where}: this model gives other results than the checkpoint's model{whose}:"
    if computed:
      lines.append("  why: the weights were trained with the checkpoint's values")
    if untrained and comparison.adds is not None:
      lines.append(f"  why: the {comparison.adds.part} is new, and the model would use it before it has been trained")
  lines.append("  fix: " + "\n       or ".join(_fixes(where, comparison, shapes, computed, resumes)))
  raise UserError("\n".join([first, *lines]))


def _fixes(
  where: str,
  comparison: Comparison,
  shapes: Sequence[Change],
  computed: Sequence[Change],
  resumes: bool,
) -> Iterator[str]:
  """Yields the alternatives to type."""
  changes, adds = (*shapes, *computed), comparison.adds
  family = next((change for change in changes if change.key == "decoder_block"), None)
  if family is not None:
    theirs = _model_of(where, family, comparison.names[0])
    yield f"use the model of the checkpoint, {theirs}, instead of {comparison.names[1]}"
  elif changes:
    yield f"{' '.join(comparison.words(changes))} (the checkpoint's values)"
  elif adds is not None:
    yield f"{adds.stage}={to_text(adds.before)} (trains the new {adds.part} alone first)"
  if not shapes:
    yield "allow_model_change=true (computes with this run's values)"
    return
  if resumes and adds is not None and not any(c.kind is KeyClass.SHAPE for c in comparison.without_added().changes):
    first = f"{adds.stage}={to_text(adds.before)}"
    yield f"run_name=NAME init_from={where} {first} (a new run with these weights, which initializes the {adds.part})"
  elif resumes:
    yield "run_name=NAME (a new run)"
  elif family is not None:
    yield "use another checkpoint"


def _model_of(where: str, family: Change, name: str) -> str:
  """Returns the model of a checkpoint as it is named in a command."""
  if family.source != "checkpoint":
    return f"OUT/model.yml (maxtext-like import {where} OUT writes it)"
  home = Path(where).parent.parent  # the run of a step; these files are not looked up in a store
  return next((str(file) for file in (home / "config.yml", home / "model.yml") if file.is_file()), name)
