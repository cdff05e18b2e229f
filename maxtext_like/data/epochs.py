"""Counts the rows that a number of passes over the documents fills, which a run by epochs has to know before its first step.

The documents that share a row depend on the lengths and the order of all documents. Each document is therefore tokenized once,
its outline is kept (length, images, learned tokens), and the packer runs over these outlines for all passes. The result is
stored by the identity of the data in ~/.cache/maxtext-like/data, where a resumed run finds it.
"""

import contextlib
import json
import logging
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from maxtext_like import atomic
from maxtext_like.data.image_text.images import MeasuredImage
from maxtext_like.data.pack import Document, ImageSpan, Packer, is_learned
from maxtext_like.data.readers.input_files import cache_folder

logger = logging.getLogger(__name__)
FORMAT = 3  # version of a stored number; changes when the same data fill other rows
_NO_IMAGE = MeasuredImage(Path(), 0)
LOG_SECONDS, ALIVE_SECONDS = 30.0, 1.0


class Outlines:
  """Tokenizes each document once and returns outlines of documents, with ids that have no meaning.

  An outline has the length of a document, its images, and whether a row learns anything from it.

  Args:
    tokenize: returns the document with a number.
    length: tokens in a row.
    max_images: number of images that a row can hold.
    count: number of documents in a pass.
    alive: called about once a second.
  """

  def __init__(self, tokenize: Callable[[int], Document], length: int, max_images: int, count: int, alive: Callable[[], None]):
    self._tokenize, self._row, self._count, self._alive = tokenize, (length, max_images), count, alive
    self._plain: dict[int, int] = {}  # tokens of each document without images; negative if nothing in it is learned
    self._others: dict[int, Document] = {}
    self._logged = self._called = time.monotonic()

  def __call__(self, number: int) -> Document:
    """Returns the outline of document ``number``. Raises what ``tokenize`` raises."""
    if (size := self._plain.get(number)) is not None:
      return _outline(number, abs(size), size > 0)
    if (known := self._others.get(number)) is not None:
      return known
    document = self._tokenize(number)
    self._report_progress()
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

  def _report_progress(self) -> None:
    now = time.monotonic()
    if now - self._called >= ALIVE_SECONDS:
      self._called = now
      self._alive()
    if now - self._logged > LOG_SECONDS:
      self._logged = now
      done, count = len(self._plain) + len(self._others), self._count
      logger.warning("data: counting rows (done once for these data): %s of %s documents", f"{done:,}", f"{count:,}")


def _outline(number: int, size: int, learned: bool, images: tuple[ImageSpan, ...] = ()) -> Document:
  ids, flags = np.broadcast_to(np.int32(0), (size,)), np.broadcast_to(np.bool_(learned), (size,))
  return Document(number, ids, images=images, learned=flags)


class RowCounter:
  """The end of the data: counts the rows from the beginning or from a position to the end.

  Args:
    packer: packs outlines, for ``epochs`` passes.
    identity: JSON of everything that the rows depend on.
    epochs: number of passes.
  """

  def __init__(self, packer: Packer, identity: dict[str, Any], epochs: int):
    self._packer = packer
    self.rows = count_rows(packer, identity, epochs)

  def rows_left(self, position: dict[str, Any], *, counted: bool) -> int:
    """Returns the number of rows after a position.

    Args:
      position: state of a ``Packer`` or of its ``ShuffleBuffer``, over the documents themselves.
      counted: True if ``rows`` counts the same data from the beginning. Otherwise the rest is packed again.

    Raises:
      KeyError, TypeError, IndexError, StopIteration, UserError: the state is damaged, or belongs to other data.
    """
    inner, taken = (position["rows"], position["next"]) if "block" in position else (position, 0)
    if counted:
      return max(self.rows - inner["tally"]["rows"] - taken, 0)
    self._packer.set_state(inner)
    return _count_rest(self._packer) - taken


def count_rows(packer: Packer, identity: dict[str, Any], epochs: int) -> int:
  """Returns the number of rows that a packer makes until its end, from the cache if the same data were counted before.

  Args:
    packer: packs outlines, for ``epochs`` passes.
    identity: JSON of everything that the rows depend on.
    epochs: number of passes.
  """
  text = json.dumps([FORMAT, epochs, identity], sort_keys=True)
  entry = cache_folder() / f"rows-{xxhash.xxh3_128_hexdigest(text.encode('utf-8', 'surrogateescape'))}.json"
  with contextlib.suppress(OSError, ValueError, KeyError, TypeError):  # a missing or damaged entry is counted again
    return int(json.loads(entry.read_bytes())["rows"])
  rows = _count_rest(packer)
  try:
    entry.parent.mkdir(parents=True, exist_ok=True)
    atomic.write_text(entry, json.dumps({"rows": rows}) + "\n")
  except OSError as error:
    logger.warning("%s: cannot be written (%s), so every start of the run counts the rows again", entry.parent, error.strerror)
  return rows


def _count_rest(packer: Packer) -> int:
  """Returns the number of rows that a packer makes until its end."""
  rows = 0
  with contextlib.suppress(StopIteration):
    while True:
      next(packer)
      rows += 1
  return rows
