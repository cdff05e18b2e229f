"""Resuming in the data: checks that the data are those of the checkpoint and returns the position to continue from."""

import contextlib
from collections.abc import Iterator
from typing import Any

from maxtext_like.errors import UserError

_FIX_DAMAGED = "\n  fix: resume from another step, or start a new run (init_from loads the weights)"
_HELD_OUT = (
  "(eval_fraction applies only if eval_interval is set. With eval_interval=N the run resumes without the documents that were "
  "held out from training, whether or not they were evaluated)"
)
_NOTHING_HELD_OUT = (
  "(every document was used for training, because eval_interval was not set. Leave it out, or evaluate separate files with "
  "eval_path if the dataset reads files)"
)


def position(
  state: dict[str, Any], identity: dict[str, Any], initial: dict[str, Any], *, accept_changes: bool
) -> tuple[dict[str, Any], str]:
  """Returns the position to resume from, and the differences between the data of the checkpoint and the present data.

  Args:
    state: ``DataSource.get_state`` of the checkpoint.
    identity: identity of the present data.
    initial: position at the beginning of the present data.
    accept_changes: resume although the data differ, at the start of the document with the same number. If packing, shuffling or
      the kind of data set changed, the position is ``initial``.

  Returns:
    The position, and the differences as lines of text; "" if there are none.

  Raises:
    UserError: the state is damaged, or the data differ and ``accept_changes`` is False. The message lists every difference.
  """
  if not isinstance(state, dict) or not isinstance(state.get("identity"), dict) or "state" not in state:
    raise UserError(f"the checkpoint's data state is damaged: it lacks 'identity' or 'state'{_FIX_DAMAGED}")
  saved = dict(state["identity"])
  if "special_tokens_in_text" in identity:
    saved.setdefault("special_tokens_in_text", "literal")  # the only behavior before the key existed
  saved.pop("process", None)  # older checkpoints had a stream for each process, and a run had one process
  if "vision" in identity and "vision" in saved:  # older checkpoints stored the keys of every vision tower
    saved = saved | {"vision": {key: value for key, value in saved["vision"].items() if key in identity["vision"]}}
  if not (changed := _differences(saved, identity)):
    return state["state"], ""
  listed = "\n  ".join(changed)
  if saved.get("eval_fraction") != identity.get("eval_fraction"):
    listed += "\n  " + (_HELD_OUT if saved.get("eval_fraction") else _NOTHING_HELD_OUT)
  if not accept_changes:
    raise UserError(
      f"cannot resume: the data differ from those of the checkpoint, so the order of documents would change:\n  {listed}\n"
      "  fix: restore these settings, or start a new run (init_from loads the weights without the data position), or set "
      "allow_data_change=true to resume with the changed data"
    )
  with report_damage():
    return _to_document_start(state["state"], initial), listed


@contextlib.contextmanager
def report_damage() -> Iterator[None]:
  """Raises UserError if the block fails because a saved position is damaged."""
  try:
    yield
  except (KeyError, TypeError, IndexError, StopIteration) as error:
    raise UserError(f"the checkpoint's data state is damaged: {error!r}{_FIX_DAMAGED}") from error


def _to_document_start(position: dict[str, Any], initial: dict[str, Any]) -> dict[str, Any]:
  """Moves a position back to the start of a document, if rows with the present settings can start there; else ``initial``."""
  rows = position["rows"]
  if rows.keys() != initial["rows"].keys() or _of_mixture(rows) != _of_mixture(initial["rows"]):
    return initial
  if "block" in rows:
    return {"rows": {**rows, "next": 0, "rows": {**rows["rows"], "used": 0}}, "ended": False}
  return {"rows": {**rows, "used": 0} if "used" in rows else rows, "ended": False}


def _of_mixture(rows: dict[str, Any]) -> bool:
  """Returns True if a state belongs to a mixture of several sources."""
  return "sources" in rows.get("rows", rows).get("documents", {})


def _differences(saved: dict[str, Any], present: dict[str, Any], prefix: str = "") -> list[str]:
  """Returns one line for each key whose value differs, with both values."""
  lines = []
  for key in sorted(saved.keys() | present.keys()):
    was, now = saved.get(key, "absent"), present.get(key, "absent")
    if isinstance(was, dict) and isinstance(now, dict):
      lines += _differences(was, now, f"{prefix}{key} ")
    elif was != now:
      lines.append(f"{prefix}{key}: was {was}, is {now}")
  return lines
