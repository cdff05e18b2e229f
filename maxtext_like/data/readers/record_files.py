"""``RecordFiles``: the base class of readers whose records have a field with the text (JSON lines, parquet, ArrayRecord)."""

import abc
from collections.abc import Sequence

from maxtext_like.data.documents import ReadRecord
from maxtext_like.data.image_text.captions import Captions
from maxtext_like.data.readers.input_files import FileDocuments


class RecordFiles(FileDocuments):
  """Files of records that have a field with the text."""

  def __init__(
    self,
    files: Sequence[str],
    text_field: str,
    captions: Captions | None = None,
    *,
    key: str = "dataset_path",
    read: ReadRecord | None = None,
  ):
    """Finds the records of all files.

    Args:
      files: paths of the files.
      text_field: field or column with the text.
      captions: finds the images of a record; None if it has none.
      key: key of the ``data:`` section that names the files.
      read: makes records from the objects or rows of the files, instead of text and images.

    Raises:
      UserError: a file is damaged or of another kind; there are no records; the field does not exist.
    """
    self._files, self._field, self._captions, self._make = list(files), text_field, captions, read
    self._find_records(key)

  @abc.abstractmethod
  def _find_records(self, key: str) -> None:
    """Finds the records of all files, and sets ``groups`` and ``_stops``. Raises UserError as ``__init__``."""
