"""How many rows so many passes over the documents fill, found before the first step: a run by epochs has to know its end.

Which documents share a row follows from their lengths and their order. So every document is tokenised once, what decides about
rows is remembered of it, and the packer goes through all passes over that. The number is kept by the identity of the data in
~/.cache/maxtext-like/data, where a run that goes on finds it.
"""

import contextlib
import json
import logging
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from maxtext_like import atomic
from maxtext_like.data.image_text.images import UnreadImage
from maxtext_like.data.pack import Document, ImageSpan, Packer, is_learned
from maxtext_like.data.readers.input_files import cache_folder

logger = logging.getLogger(__name__)
FORMAT = 3  # of a kept number; changes when the same data fill other rows
_NO_IMAGE = UnreadImage(Path(), 0)
TELL_SECONDS, ALIVE_SECONDS = 30.0, 1.0


class Outlines:
  """Tokenises as another does, each document once, and gives an outline of it: its length, its images, and whether anything
  that a row takes of it is learned, over ids that mean nothing.

  Args:
    tokenise: a document of its number.
    length: tokens of a row.
    max_images: places for images in a row.
    count: documents of a pass.
    alive: called about every second.
  """

  def __init__(self, tokenise: Callable[[int], Document], length: int, max_images: int, count: int, alive: Callable[[], None]):
    self._tokenise, self._row, self._count, self._alive = tokenise, (length, max_images), count, alive
    self._plain: dict[int, int] = {}  # tokens of a document without images; below 0: nothing in it is learned
    self._others: dict[int, Document] = {}
    self._told = self._lived = time.monotonic()

  def __call__(self, number: int) -> Document:
    """The outline of a document. Raises as ``tokenise``."""
    if (size := self._plain.get(number)) is not None:
      return _outline(number, abs(size), size > 0)
    if (known := self._others.get(number)) is not None:
      return known
    document = self._tokenise(number)
    self._tell()
    if document.ids is None:
      self._others[number] = document
      return document
    learned = is_learned(document, *self._row)
    size = len(document.ids)
    if document.ends:
      flags = np.concatenate([np.full(len(s.ids), is_learned(s, *self._row)) for s in document.samples() if s.ids is not None])
      images = tuple(ImageSpan(s.start, s.end, _NO_IMAGE) for s in document.images)
      self._others[number] = Document(number, np.zeros(size, np.int32), images=images, learned=flags, ends=document.ends)
      return self._others[number]
    if not document.images:
      self._plain[number] = size if learned else -size
      return _outline(number, size, learned)
    found = _outline(number, size, learned, tuple(ImageSpan(s.start, s.end, _NO_IMAGE) for s in document.images))
    self._others[number] = found
    return found

  def _tell(self) -> None:
    now = time.monotonic()
    if now - self._lived >= ALIVE_SECONDS:
      self._lived = now
      self._alive()
    if now - self._told > TELL_SECONDS:
      self._told = now
      done, count = len(self._plain) + len(self._others), self._count
      logger.warning("counting rows, once for these data: %s of %s documents so far", f"{done:,}", f"{count:,}")


def _outline(number: int, size: int, learned: bool, images: tuple[ImageSpan, ...] = ()) -> Document:
  ids, flags = np.broadcast_to(np.int32(0), (size,)), np.broadcast_to(np.bool_(learned), (size,))
  return Document(number, ids, images=images, learned=flags)


class Ending:
  """Where data end: how many rows there are, from the beginning or from a position.

  Args:
    packer: over outlines, of ``epochs`` passes.
    identity: JSON of all that the rows follow from.
    epochs: passes.
  """

  def __init__(self, packer: Packer, identity: dict[str, Any], epochs: int):
    self._packer = packer
    self.rows = count_rows(packer, identity, epochs)

  def rows_left(self, position: dict[str, Any], *, counted: bool) -> int:
    """Rows behind a position.

    Args:
      position: state of a ``Packer`` over the documents themselves, or of a ``ShuffleBuffer`` of one.
      counted: ``rows`` are of the same data from the beginning. Else what follows is packed once more.

    Raises:
      KeyError, TypeError, IndexError, StopIteration, UserError: it is no such state, or of other data.
    """
    inner, taken = (position["rows"], position["next"]) if "block" in position else (position, 0)
    if counted:
      return max(self.rows - inner["tally"]["rows"] - taken, 0)
    self._packer.set_state(inner)
    return _rest(self._packer) - taken


def count_rows(packer: Packer, identity: dict[str, Any], epochs: int) -> int:
  """The rows of a packer that ends, or what they were when the same data were counted before.

  Args:
    packer: over outlines, of ``epochs`` passes.
    identity: JSON of all that the rows follow from.
    epochs: passes.
  """
  import xxhash

  text = json.dumps([FORMAT, epochs, identity], sort_keys=True)
  entry = cache_folder() / f"rows-{xxhash.xxh3_128_hexdigest(text.encode('utf-8', 'surrogateescape'))}.json"
  with contextlib.suppress(OSError, ValueError, KeyError, TypeError):  # what is no whole entry is counted again
    return int(json.loads(entry.read_bytes())["rows"])
  rows = _rest(packer)
  try:
    entry.parent.mkdir(parents=True, exist_ok=True)
    atomic.write_text(entry, json.dumps({"rows": rows}) + "\n")
  except OSError as error:
    logger.warning("%s: cannot be written (%s), so rows are counted again at every start", entry.parent, error.strerror)
  return rows


def _rest(packer: Packer) -> int:
  """The rows that a packer has until its end."""
  rows = 0
  with contextlib.suppress(StopIteration):
    while True:
      next(packer)
      rows += 1
  return rows
