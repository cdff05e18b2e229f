"""A file that grows by complete pieces, on a disk that becomes full in the middle of a piece."""

import os

import pytest

from maxtext_like.training.sinks.appended import AppendedFile


def failing_write(monkeypatch, room):
  """Make writes fail after ``room`` more bytes."""
  real = os.write

  def write(descriptor, data):
    nonlocal room
    if room == 0:
      raise OSError(28, "No space left on device")
    data = bytes(data)[:room]
    room -= len(data)
    return real(descriptor, data)

  monkeypatch.setattr(os, "write", write)


def test_half_a_piece_is_taken_away(tmp_path, monkeypatch):
  path = tmp_path / "a"
  path.write_bytes(b"before\n")
  file = AppendedFile(path, b"header")
  file.append(b"one\n")
  with monkeypatch.context() as patch:
    failing_write(patch, 2)
    with pytest.raises(OSError, match="No space left"):
      file.append(b"two\n")
    assert path.read_bytes() == b"before\none\n"
  file.append(b"two\n")
  assert path.read_bytes() == b"before\none\ntwo\n"


def test_half_a_piece_that_cannot_be_taken_away_at_once_goes_before_the_next(tmp_path, monkeypatch):
  path = tmp_path / "a"
  file = AppendedFile(path, b"header ")
  file.append(b"one\n")
  with monkeypatch.context() as patch:
    failing_write(patch, 2)
    patch.setattr(os, "ftruncate", lambda *_: os.close(-1))
    for _ in range(2):
      with pytest.raises(OSError, match=r"No space left|Bad file"):
        file.append(b"two\n")
    assert path.read_bytes() == b"header one\ntw"
  file.append(b"three\n")
  file.close()
  assert path.read_bytes() == b"header one\nthree\n"


def test_a_file_that_was_removed_is_made_again(tmp_path):
  path = tmp_path / "a"
  file = AppendedFile(path, b"header ")
  file.append(b"one\n")
  path.unlink()
  file.append(b"two\n")
  file.close()
  assert path.read_bytes() == b"header two\n"
