"""Converts the text of a value to the type of its key: bool, int, float, str, Literal, tuple, dict or ``X | None``."""

import json
import math
import re
import types
import typing
from collections.abc import Callable

from maxtext_like.config.problems import alternatives, candidates
from maxtext_like.config.yaml_file import Mapping, Node, Scalar, Sequence, is_null

_INT = re.compile(r"[-+]?(0|[1-9][0-9]*(_[0-9]+)*)")
_INT_LENGTH = 40  # maximum number of characters; Python itself raises another error from 4300 digits on
_FLOAT = re.compile(r"[-+]?([0-9][0-9_]*(\.[0-9]*)?|\.[0-9]+)([eE][-+]?[0-9]+)?")
_LEADING_ZERO = re.compile(r"[-+]?0[0-9_]")  # octal to some readers, decimal to others
_WORDS = re.compile(r"[\w.-]+(, ?[\w.-]+)*")
_BOOLS = {"true": True, "True": True, "TRUE": True, "false": False, "False": False, "FALSE": False}


class CoercionError(ValueError):
  """A value has the wrong type for its key.

  Attributes:
    fix: what to write.
  """

  def __init__(self, what: str, *, fix: str):
    super().__init__(what)
    self.fix = fix


def coerce(node: Node, kind: object) -> object:
  """Return the value of a YAML node as type ``kind``.

  Quoted numbers, whole numbers with a point (``5.0``), leading zeros, ``yes``/``no`` and non-finite numbers are errors,
  because YAML readers disagree about them.

  Raises:
    CoercionError: the node is not a value of this type.
  """
  origin = typing.get_origin(kind)
  if origin in (typing.Union, types.UnionType):
    return _union(node, typing.get_args(kind))
  if origin is typing.Literal:
    return _literal(node, typing.get_args(kind))
  if origin is tuple:
    return _tuple(node, typing.get_args(kind)[0])
  if origin is dict:
    return _dict(node, typing.get_args(kind)[1])
  if is_null(node):
    raise CoercionError(f"null where {describe(kind)} is needed", fix=_instead(kind))
  if not isinstance(node, Scalar):
    raise CoercionError(f"{_shown(node)} where {describe(kind)} is needed", fix=_instead(kind))
  return _SCALARS[kind](node)


def describe(kind: object) -> str:
  """Return the type of a key as the documentation shows it."""
  origin, args = typing.get_origin(kind), typing.get_args(kind)
  if origin in (typing.Union, types.UnionType):
    return " or ".join(describe(a) for a in args)
  if origin is typing.Literal:
    return " | ".join(_literal_text(a) for a in args)
  if origin is tuple:
    return f"list of ({describe(args[0])})" if typing.get_origin(args[0]) else f"list of {describe(args[0])}"
  if origin is dict:
    return f"mapping to ({describe(args[1])})"
  return {types.NoneType: "null"}.get(kind) or kind.__name__  # pyright: ignore


def _union(node: Node, kinds: tuple) -> object:
  optional = types.NoneType in kinds
  if is_null(node):
    if optional:
      return None
    raise CoercionError(f"null where {_any_of(kinds)} is needed", fix=f"write {_any_of(kinds)}")
  errors: list[CoercionError] = []
  for kind in (k for k in kinds if k is not types.NoneType):
    if len(kinds) - optional > 1 and not isinstance(node, _NODES.get(typing.get_origin(kind), Scalar)):
      continue
    try:
      return coerce(node, kind)
    except CoercionError as error:
      errors.append(error)
  if not errors:
    raise CoercionError(f"{_shown(node)} where {_any_of(kinds)} is needed", fix=f"write {_any_of(kinds)}")
  fixes = dict.fromkeys(error.fix for error in errors)
  raise CoercionError("; ".join(map(str, errors)), fix=", or ".join(fixes))


def _any_of(kinds: tuple) -> str:
  return " or ".join(describe(kind) for kind in kinds)


def _instead(kind: object) -> str:
  """Return the fix for a value of another type, with an example for numbers."""
  examples: dict[object, str] = {
    int: "a whole number, such as 20", float: "a number, such as 0.1", bool: "true or false", str: "text",
  }  # fmt: skip
  return f"write {examples.get(kind) or describe(kind)}"


def _literal(node: Node, choices: tuple) -> object:
  if isinstance(node, Scalar):
    for choice in choices:
      if isinstance(choice, bool):
        if node.plain and _BOOLS.get(node.text) is choice:
          return choice
      elif node.text == str(choice):
        return choice
  texts = [_literal_text(c) for c in choices]
  near = candidates(node.text, texts) if isinstance(node, Scalar) else ()
  asked = f", did you mean {alternatives(map(repr, near))}?" if near else ""
  raise CoercionError(f"{_shown(node)} is not one of {', '.join(texts)}{asked}", fix=f"write {alternatives(near or texts)}")


def _literal_text(choice: object) -> str:
  return ("true" if choice else "false") if isinstance(choice, bool) else str(choice)


def _tuple(node: Node, kind: object) -> tuple:
  if not isinstance(node, Sequence):
    # Suggest what the user wrote as a list: the words between commas, or the text as the only entry.
    word = node.text if isinstance(node, Scalar) and isinstance(kind, type) and not is_null(node) else None
    write = "a, b" if word is None else word if _WORDS.fullmatch(word) else json.dumps(word, ensure_ascii=False)
    raise CoercionError(f"{_shown(node)} where a list is needed", fix=f"write [{write}]")
  return tuple(coerce(item, kind) for item in node.items)


def _dict(node: Node, kind: object) -> dict:
  if not isinstance(node, Mapping):
    raise CoercionError(f"{_shown(node)} where a mapping is needed", fix="write {a: b}")
  return {name: coerce(item, kind) for name, item in node.items.items()}


def _plain(node: Scalar, kind: str) -> str:
  if not node.plain:
    raise CoercionError(f"quoted text {json.dumps(node.text)} where {kind} is needed", fix="write it without quotes")
  return node.text


def _int(node: Scalar) -> int:
  text = _plain(node, "int")
  if _INT.fullmatch(text):
    if len(text) > _INT_LENGTH or not -(2**63) <= int(text) < 2**63:
      raise CoercionError(f"{text!r} does not fit a 64-bit int", fix="write a smaller number")
    return int(text)
  fix = _instead(int)
  if _FLOAT.fullmatch(text) and not _LEADING_ZERO.match(text):
    number = float(text.replace("_", ""))
    if math.isfinite(number) and number.is_integer() and abs(number) < 2**63:
      fix = f"write {int(number)}"
  raise CoercionError(f"{text!r} is not an int", fix=fix)


def _float(node: Scalar) -> float:
  text = _plain(node, "float")
  if not _FLOAT.fullmatch(text) or _LEADING_ZERO.match(text):
    raise CoercionError(f"{text!r} is not a float", fix=_instead(float))
  number = float(text.replace("_", ""))
  if not math.isfinite(number):
    raise CoercionError(f"{text!r} is outside the range of a float", fix="write a number below 1e308")
  return number


def _bool(node: Scalar) -> bool:
  text = _plain(node, "bool")
  if text not in _BOOLS:
    raise CoercionError(f"{text!r} is not a bool", fix=_instead(bool))
  return _BOOLS[text]


def _str(node: Scalar) -> str:
  for c in node.text:
    if ord(c) < 0x20 or ord(c) == 0x7F or 0xD800 <= ord(c) <= 0xDFFF:
      what = f"{json.dumps(node.text)} contains the control character U+{ord(c):04X}, which is not allowed"
      raise CoercionError(what, fix="write the text without it")
  return node.text


_NODES: dict[object, type] = {tuple: Sequence, dict: Mapping}
_SCALARS: dict[object, Callable[[Scalar], object]] = {int: _int, float: _float, bool: _bool, str: _str}


def _shown(node: Node) -> str:
  if isinstance(node, Scalar):
    return repr(node.text)
  return "a list" if isinstance(node, Sequence) else "a mapping" if isinstance(node, Mapping) else repr(node)
