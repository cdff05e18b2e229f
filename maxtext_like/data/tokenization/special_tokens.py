"""Special tokens by meaning, for every way in which a tokenizer spells them, and their spellings in text.

A prompt is written by the person who runs the model, and "<start_of_turn>user" in it is the token, as in Hugging Face. In
training text and in conversations data.special_tokens_in_text decides: "<eos>" is five characters unless the key is `parse`.
"""

import re
from collections.abc import Callable, Iterator, Mapping
from itertools import islice

from maxtext_like.models.registry import FAMILIES

_OTHERS = {
  "bos": ("<s>", "<|begin_of_text|>"),
  "eos": ("</s>", "<|end_of_text|>", "<|endoftext|>"),
  "pad": ("[PAD]",),
}
"""Spellings in tokenizers of other model families."""


def _spellings() -> dict[str, tuple[str, ...]]:
  found: dict[str, tuple[str, ...]] = {}
  for spellings in (*(family.spellings for family in FAMILIES.values()), _OTHERS):
    for name, spelled in spellings.items():
      found[name] = tuple(dict.fromkeys((*found.get(name, ()), *spelled)))
  return found


SPELLINGS = _spellings()
"""Spellings by meaning. tokenizer_config.json takes precedence for bos, eos and pad."""


def listed(counts: Mapping[str, int], most: int = 10) -> str:
  """Returns names with the number of their occurrences, for a message."""
  names = [f"{name!r} {count} times" if count > 1 else f"{name!r} once" for name, count in counts.items()]
  return ", ".join(names[:most]) + (f" and {len(names) - most} others" if len(names) > most else "")


class Spellings:
  """Finds the spellings of special tokens in text. If one spelling begins with another, the longest one is found."""

  def __init__(self, special: Mapping[str, int]):
    """Prepares the search; ``special`` has the ids by spelling."""
    self.special = special
    # Gemma has thousands of spellings of few lengths, and nearly all begin with "<": the first characters make the search fast.
    self._lengths = sorted(set(map(len, special)), reverse=True)
    letters = ({spelling[i] for spelling in special} for i in range(min(self._lengths, default=0)))
    self._begin = re.compile("".join(f"[{''.join(map(re.escape, sorted(those)))}]" for those in islice(letters, 4)))

  def find(self, text: str) -> Iterator[str]:
    """Yields every spelling in a text, in order."""
    return (text[start:end] for start, end in self._spans(text))

  def _spans(self, text: str) -> Iterator[tuple[int, int]]:
    at = 0
    while self.special and (match := self._begin.search(text, at)) is not None:
      start = match.start()
      at = next((start + n for n in self._lengths if text[start : start + n] in self.special), start)
      if at > start:
        yield start, at
      else:
        at = start + 1

  def encode(self, text: str, plain: Callable[[str], list[int]]) -> list[int]:
    """Encodes a text in which each spelling becomes its token; ``plain`` encodes the text between them."""
    ids: list[int] = []
    at = 0
    for start, end in self._spans(text):
      if start > at:
        ids += plain(text[at:start])
      ids.append(self.special[text[start:end]])
      at = end
    return ids + plain(text[at:]) if at < len(text) else ids
