"""Text to typed values: each spelling has one meaning, or an error says what to write (fault F53)."""

import re
from typing import Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from maxtext_like.config.coerce import CoercionError, coerce, describe
from maxtext_like.config.yaml_file import Mapping, Scalar, Sequence, parse_value


def quoted(text):
  return Scalar(text, plain=False, line=1)


@pytest.mark.parametrize(
  ("text", "kind", "value"),
  [
    ("1e-4", float, 1e-4),
    ("1E6", float, 1e6),
    (".5", float, 0.5),
    ("5.", float, 5.0),
    ("-0", float, 0.0),
    ("3", float, 3.0),
    ("1_000.5", float, 1000.5),
    ("262_144", int, 262144),
    ("+7", int, 7),
    ("-1", int, -1),
    ("0", int, 0),
    ("true", bool, True),
    ("False", bool, False),
    ("no", str, "no"),
    ("1:30", str, "1:30"),
    ("2026-11-21", str, "2026-11-21"),
    ("010", str, "010"),
    ("null", str | None, None),
    ("~", int | None, None),
    ("5", int | None, 5),
    ("auto", Literal["auto", True, False], "auto"),
    ("true", Literal["auto", True, False], True),
    ("[1, 2]", tuple[int, ...], (1, 2)),
    ("[]", tuple[str, ...], ()),
    ("[a, 'b c']", str | tuple[str, ...] | None, ("a", "b c")),
    ("a", str | tuple[str, ...] | None, "a"),
    ("2", int | float, 2),
    ("0.5", int | float, 0.5),
    ("{}", dict[str, int], {}),
    ("{a: [x, y], b: null, c: z}", dict[str, str | tuple[str, ...] | None], {"a": ("x", "y"), "b": None, "c": "z"}),
  ],
)
def test_values(text, kind, value):
  made = coerce(parse_value(text, "x"), kind)
  assert made == value
  assert type(made) is type(value)


@pytest.mark.parametrize(
  ("text", "kind", "reason"),
  [
    ("5.0", int, "write 5$"),
    ("1e3", int, "write 1000$"),
    ("5.5", int, "'5.5' is not an int; write a whole number"),
    ("010", int, "'010' is not an int; write a whole number"),  # 8 or 10: ambiguous
    ("0x10", int, "not an int"),
    ("1:30", int, "not an int"),
    ("1__0", int, "not an int"),
    ("five", int, "not an int"),
    ("true", int, "not an int"),
    ("'5'", int, 'quoted text "5" where int'),
    ("1e999", float, "1e999.*range"),
    ("nan", float, "not a float"),
    (".inf", float, "not a float"),
    ("01.5", float, "not a float"),
    ("1:30", float, "not a float"),
    ("yes", bool, "write true or false"),
    ("1", bool, "write true or false"),
    ("'true'", bool, "quoted text"),
    ("null", int, "null where int"),
    ("null", str, "null where str"),
    ("", int, "null where int"),
    ("bf16", Literal["float32", "bfloat16"], "'bf16' is not one of float32, bfloat16"),
    ("'true'", Literal["auto", True, False], "not one of auto, true, false"),
    ("5", tuple[int, ...], r"write \[5\]"),
    ("[1, x]", tuple[int, ...], "'x' is not an int"),
    ("[1]", int, "a list where int"),
    ("{a: 1}", str, "a mapping where str"),
    ("{a: 1}", Literal["a"], "a mapping is not one of a"),
    ("[[1]]", tuple[int, ...], "a list where int"),
    ("null", str | tuple[str, ...], "null where str or list of str"),
  ],
)
def test_refusals(text, kind, reason):
  with pytest.raises(CoercionError) as found:
    coerce(parse_value(text, "x"), kind)
  assert re.search(reason, f"{found.value}; {found.value.fix}")


@pytest.mark.parametrize("text", ["a\nb", "a\x1b[31m", "a\x7f", "\ud800"])
def test_text_with_control_characters_is_refused(text):
  with pytest.raises(CoercionError, match=r"U\+"):
    coerce(quoted(text), str)


def test_quoted_null_and_numbers_are_text():
  assert coerce(quoted("null"), str | None) == "null"
  assert coerce(quoted("5"), str) == "5"


@pytest.mark.parametrize("text", [str(2**63), str(-(2**63) - 1), "1" * 5000, "-" + "9" * 4301])
def test_an_int_has_64_bits(text):
  with pytest.raises(CoercionError, match="64-bit"):
    coerce(Scalar(text, True, 1), int)


@given(st.integers(-(2**63), 2**63 - 1))
def test_every_int_is_read(number):
  assert coerce(Scalar(f"{number}", True, 1), int) == number
  assert coerce(Scalar(f"{number:_}", True, 1), int) == number


@given(st.text(), st.sampled_from([int, float, bool, int | None, tuple[int, ...], Literal["a", "b"]]))
@pytest.mark.slow
def test_no_text_escapes_its_type(text, kind):
  for node in (Scalar(text, True, 1), Sequence((Scalar(text, True, 1),), 1), Mapping({}, {}, 1)):
    try:
      value = coerce(node, kind)
    except CoercionError:
      continue
    assert value is None or isinstance(value, int | float | bool | tuple) or value in ("a", "b")


def test_types_in_words():
  assert describe(str | tuple[str, ...] | None) == "str or list of str or null"
  assert describe(Literal["auto", True, False]) == "auto | true | false"
  assert describe(tuple[Literal["sliding", "global"], ...] | None) == "list of (sliding | global) or null"
