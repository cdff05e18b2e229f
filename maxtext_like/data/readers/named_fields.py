"""Fields of records and columns of tables in error messages: the existing names, and the name that the user may have meant."""

from collections.abc import Mapping, Sequence

from maxtext_like.strict_json import printable

SHOWN = 8
CHAT = "maxtext-like sft instead of train, or data_format=chat"
_CONVERSATIONS = ({"messages"}, {"conversations"}, {"conversation"}, {"prompt", "completion"}, {"instruction", "output"},
                  {"instruction", "response"})  # fmt: skip
_USUAL = ("content", "body", "document", "raw_content", "article", "story", "code", "sentence", "caption", "completion")
"""Names of the text field in published data sets, most common first."""


def shown(names: Sequence[str]) -> str:
  """Returns the first names, quoted, and the number of the remaining ones."""
  listed = ", ".join(f"'{printable(name)[:80]}'" for name in names[:SHOWN]) or "none"
  return listed if len(names) <= SHOWN else f"{listed} and {len(names) - SHOWN:,} more"


def fix_of_missing(names: Sequence[str], texts: Sequence[str]) -> str:
  """Returns what to type if data.text_field names no existing field.

  Args:
    names: the existing fields.
    texts: fields that hold texts.
  """
  if any(fields <= set(names) for fields in _CONVERSATIONS):
    return CHAT
  usual = next((name for name in _USUAL if name in texts), texts[0] if len(texts) == 1 else None)
  if usual is not None:
    return f"text_field={printable(usual)}"
  return f"text_field=NAME, one of {shown(texts)}" if texts else "dataset_path=FILES with records that have a text"


def text_fields(record: Mapping[str, object]) -> list[str]:
  """Returns the fields of a record that hold texts."""
  return [name for name, value in record.items() if isinstance(value, str)]
