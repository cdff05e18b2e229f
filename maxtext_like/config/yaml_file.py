"""Reads the YAML of a configuration file into nodes with line numbers, and writes values as YAML.

A configuration contains only mappings, lists and scalars. Tags, anchors, merge keys and several documents are errors with
``file:line: reason``, because they build objects or hide the content of a file. The reader uses parser events, so that deep
nesting is an error instead of a recursion overflow. Scalars stay text until the type of their key is known: ``1e-4`` becomes a
float for a float key, and ``no``, ``010``, ``1:30`` and ``2026-11-21`` are never converted to something else.
"""

import re
from dataclasses import dataclass
from pathlib import Path

import yaml

from maxtext_like.errors import UserError

MAX_BYTES = 1 << 20
MAX_DEPTH = 20


@dataclass(frozen=True)
class Scalar:
  """The text of a value. ``plain`` is False if it was quoted."""

  text: str
  plain: bool
  line: int


@dataclass(frozen=True)
class Sequence:
  """A list of nodes."""

  items: "tuple[Node, ...]"
  line: int


@dataclass(frozen=True)
class Mapping:
  """Nodes by key, in the order of the file, and the line of each key."""

  items: "dict[str, Node]"
  key_lines: dict[str, int]
  line: int


Node = Scalar | Sequence | Mapping


def read_yaml(path: Path, label: str) -> Mapping:
  """Return the top-level mapping of a file.

  Args:
    path: the file.
    label: name of the file in errors.

  Raises:
    UserError: ``label:line: reason``: the file cannot be read, is too large, or is not plain UTF-8 data in a mapping.
  """
  try:
    with path.open("rb") as file:
      data = file.read(MAX_BYTES + 1)
  except OSError as error:
    raise UserError(
      f"{label}: cannot be read: {error.strerror}", fix="name a file that exists and that you may read"
    ) from error
  if len(data) > MAX_BYTES:
    raise UserError(
      f"{label}:1: larger than {MAX_BYTES >> 20} MiB, the limit for a configuration",
      fix="keep only 'key: value' lines of this project in the file",
    )
  return parse_yaml(data, label)


def parse_yaml(data: bytes, label: str) -> Mapping:
  """Return the top-level mapping of a YAML text; see ``read_yaml``."""
  if b"\0" in data:
    raise UserError(f"{label}:{_line_of(data, data.index(bytes(1)))}: NUL byte in the file", fix="save the file as UTF-8 text")
  try:
    text = data.decode("utf-8-sig")
  except UnicodeDecodeError as error:
    raise UserError(f"{label}:{_line_of(data, error.start)}: not valid UTF-8", fix="save the file as UTF-8 text") from error
  node = _Reader(text, label).document()
  if node is None:
    return Mapping({}, {}, 1)
  if not isinstance(node, Mapping):
    kind = "a list" if isinstance(node, Sequence) else "a single value"
    raise UserError(
      f"{label}:{node.line}: {kind} at the top level; a configuration consists of 'key: value' lines",
      fix="write key: value on each line",
    )
  return node


def parse_value(text: str, label: str) -> Node:
  """Return the node of a command-line value: a YAML list, mapping or quoted text; any other text is kept unchanged."""
  if text[:1] in "[{\"'" and text:
    node = _Reader(text, label).document()
    if node is not None:
      return node
  return Scalar(text, plain=True, line=1)


def _line_of(data: bytes, offset: int) -> int:
  return data.count(b"\n", 0, offset) + 1


class _Reader:
  """Builds nodes from PyYAML's parser events, with the limits of a configuration."""

  def __init__(self, text: str, label: str):
    self.label = label
    self.events = self._events(text)

  def _events(self, text: str):
    try:
      yield from yaml.parse(text, Loader=yaml.SafeLoader)
    except yaml.reader.ReaderError as error:
      line = text.count("\n", 0, error.position) + 1
      raise self.error(
        line, f"character U+{int(error.character):04X} is not allowed in YAML", fix="remove the character"
      ) from error
    except yaml.MarkedYAMLError as error:
      mark = error.problem_mark or error.context_mark
      reason = " ".join(part for part in (error.problem, error.context) if part)
      raise self.error(
        mark.line + 1 if mark else 1,
        f"not valid YAML: {reason}",
        fix="correct the line; a value with ':', '#' or quotes needs quotes around it",
      ) from error
    except RecursionError as error:
      raise self.error(1, "nested too deeply", fix="write lists and mappings with fewer levels") from error

  def error(self, line: int, reason: str, *, fix: str) -> UserError:
    return UserError(f"{self.label}:{line}: {reason}", fix=fix)

  def document(self) -> Node | None:
    node, documents = None, 0
    for event in self.events:
      if isinstance(event, yaml.DocumentStartEvent):
        documents += 1
        line = event.start_mark.line + 1
        if documents > 1:
          raise self.error(
            line, "a second document ('---'); a configuration is one document", fix="remove the line '---' and what follows it"
          )
        if event.tags:
          raise self.error(line, "a %TAG directive; tags are not allowed in a configuration", fix="remove the directive")
      elif isinstance(event, yaml.NodeEvent):
        node = self.node(event, depth=1)
    return node

  def node(self, event: yaml.NodeEvent, depth: int) -> Node:
    line = event.start_mark.line + 1
    if isinstance(event, yaml.AliasEvent):
      raise self.error(line, f"alias '*{event.anchor}'; aliases are not allowed in a configuration", fix="write the value out")
    if event.anchor is not None:
      raise self.error(line, f"anchor '&{event.anchor}'; anchors are not allowed in a configuration", fix="remove the anchor")
    if tag := getattr(event, "tag", None):
      raise self.error(
        line, f"tag '{tag}'; tags can build objects and are not allowed in a configuration", fix="remove the tag"
      )
    if isinstance(event, yaml.ScalarEvent):
      return Scalar(event.value, plain=event.style is None, line=line)
    if depth > MAX_DEPTH:
      raise self.error(line, f"nested more than {MAX_DEPTH} deep", fix="write lists and mappings with fewer levels")
    if isinstance(event, yaml.SequenceStartEvent):
      items = []
      while not isinstance(event := next(self.events), yaml.SequenceEndEvent):
        items.append(self.node(event, depth + 1))
      return Sequence(tuple(items), line)
    return self.mapping(line, depth)

  def mapping(self, line: int, depth: int) -> Mapping:
    items: dict[str, Node] = {}
    key_lines: dict[str, int] = {}
    while not isinstance(event := next(self.events), yaml.MappingEndEvent):
      key = self.node(event, depth + 1)
      if not isinstance(key, Scalar):
        raise self.error(key.line, "a list or mapping as a key; keys are names", fix="write a name before the colon")
      if key.text == "<<" and key.plain:
        raise self.error(key.line, "merge key '<<'; merging is not allowed in a configuration", fix="write the values out")
      if key.text in items:
        raise self.error(
          key.line, f"duplicate key {key.text!r}, first on line {key_lines[key.text]}", fix="remove one of the two lines"
        )
      items[key.text] = self.node(next(self.events), depth + 1)
      key_lines[key.text] = key.line
    return Mapping(items, key_lines, line)


_PLAIN = re.compile(r"[A-Za-z_./][A-Za-z0-9_./-]*")
_NULLS = ("", "~", "null", "Null", "NULL")


def is_null(node: Node) -> bool:
  """Return True if a node is YAML's null."""
  return isinstance(node, Scalar) and node.plain and node.text in _NULLS


def to_text(value: object) -> str:
  """Return a value as YAML text, which ``parse_yaml`` and the type of the key read back as the same value."""
  if value is None:
    return "null"
  if isinstance(value, bool):
    return "true" if value else "false"
  if isinstance(value, tuple | list):
    return "[" + ", ".join(to_text(v) for v in value) + "]"
  if isinstance(value, dict):
    return "{" + ", ".join(f"{to_text(key)}: {to_text(v)}" for key, v in value.items()) + "}"
  if isinstance(value, str):
    if _PLAIN.fullmatch(value) and value not in _NULLS and value.lower() not in ("true", "false"):
      return value
    return '"' + "".join(_escaped(c) for c in value) + '"'
  return repr(value)


def _escaped(c: str) -> str:
  if c in '"\\':
    return "\\" + c
  if c.isprintable():
    return c
  return f"\\U{ord(c):08x}" if ord(c) > 0xFFFF else f"\\u{ord(c):04x}"


@dataclass(frozen=True)
class Entry:
  """A key, its value, and the place where it was set (``configs/base.yml:31``, ``command line "steps=5"``)."""

  key: str
  node: Node
  origin: str
