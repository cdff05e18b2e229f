"""Texts of answers: complete characters only, and strings that end an answer."""

import pytest

from maxtext_like.errors import UserError
from maxtext_like.generation.sampling import Sampling
from maxtext_like.generation.texts import Growing, Options


def grow(answer: Growing, *tokens: int, ended: str | None = None) -> str:
  answer.tokens += tokens
  answer.ended = ended
  return answer.new_text()


def test_an_incomplete_character_waits():
  answer = Growing(lambda ids: bytes(ids).decode("utf-8", errors="replace"))
  assert grow(answer, 0x61, 0xC3) == "a"
  assert grow(answer, 0xA4) == "ä"
  assert grow(answer, 0xC3) == ""
  assert grow(answer, ended="length") == "\N{REPLACEMENT CHARACTER}"
  # A tokenizer with byte fallback writes one mark for each byte.
  fallback = Growing(lambda ids: "€" if len(ids) == 3 else "\N{REPLACEMENT CHARACTER}" * len(ids))
  assert grow(fallback, 0xE2, 0x82) == ""
  assert grow(fallback, 0xAC) == "€"


def test_a_stop_string_and_its_beginning_are_held_back():
  answer = Growing(lambda ids: bytes(ids).decode(), ("END", "\n\n"))
  assert grow(answer, *b"one\n") == "one"
  assert grow(answer, *b"two E") == "\ntwo "
  assert grow(answer, *b"N") == ""
  assert answer.ended is None
  answer.logprobs += [-1.0] * 20
  assert grow(answer, *b"Dx\n\n") == ""
  assert (answer.ended, answer.text) == ("stop", "one\ntwo ")
  assert bytes(answer.tokens) == b"one\ntwo END", "tokens after the string are left out"
  assert len(answer.logprobs) == len(answer.tokens)
  last = Growing(lambda ids: bytes(ids).decode(), ("END",))
  assert grow(last, *b"a E", ended="length") == "a E", "nothing is held back at the end"


@pytest.mark.parametrize(
  ("options", "match"),
  [({"answers": 0}, "at least 1"), ({"slots": 6}, "power of two"), ({"stop_strings": ("",)}, "empty text")],
)
def test_impossible_options(options, match):
  with pytest.raises(UserError, match=match):
    Options(sampling=Sampling(), **options)
