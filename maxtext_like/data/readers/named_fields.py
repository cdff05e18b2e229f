"""Fields of records and columns of tables in error messages: which there are, and which of them the person may have meant."""

from collections.abc import Mapping, Sequence

from maxtext_like.strict_json import printable

SHOWN = 8
CHAT = "maxtext-like sft in place of train, or data_format=chat"
_CONVERSATIONS = ({"messages"}, {"conversations"}, {"conversation"}, {"prompt", "completion"}, {"instruction", "output"},
                  {"instruction", "response"})  # fmt: skip
_USUAL = ("content", "body", "document", "raw_content", "article", "story", "code", "sentence", "caption", "completion")
"""Names that published data sets give their text, most usual first."""


def shown(names: Sequence[str]) -> str:
  """The first names, quoted, and how many there are."""
  listed = ", ".join(f"'{printable(name)[:80]}'" for name in names[:SHOWN]) or "none"
  return listed if len(names) <= SHOWN else f"{listed} and {len(names) - SHOWN:,} more"


def fix_of_missing(names: Sequence[str], texts: Sequence[str]) -> str:
  """Return the words to type if data.text_field names no field.

  Args:
    names: the fields that there are.
    texts: those of them that hold texts.
  """
  if any(fields <= set(names) for fields in _CONVERSATIONS):
    return CHAT
  usual = next((name for name in _USUAL if name in texts), texts[0] if len(texts) == 1 else None)
  if usual is not None:
    return f"text_field={printable(usual)}"
  return f"text_field=NAME, one of {shown(texts)}" if texts else "dataset_path=FILES of records that have a text"


def text_fields(record: Mapping[str, object]) -> list[str]:
  """The fields of a record that hold texts."""
  return [name for name, value in record.items() if isinstance(value, str)]
