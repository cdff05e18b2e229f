"""Where a run goes on in its data: at a saved position, if the data are those that it was saved in."""

import contextlib
from collections.abc import Iterator
from typing import Any

from maxtext_like.errors import UserError

_HELD_OUT = (
  "(eval_fraction counts where eval_interval is set: eval_interval=N goes on with the documents that were held out from "
  "training, whether or not anything evaluated them)"
)
_NOTHING_HELD_OUT = (
  "(every document was trained on, since eval_interval was not set: leave it out again, or evaluate files of their own "
  "(eval_path) where the dataset is of files)"
)


def position(
  state: dict[str, Any], identity: dict[str, Any], initial: dict[str, Any], *, accept_changes: bool
) -> tuple[dict[str, Any], str]:
  """Where to go on in the present data, and how they differ from those of a checkpoint: "", or lines.

  Args:
    state: ``DataSource.get_state`` of the checkpoint.
    identity: of the present data.
    initial: the position at their beginning.
    accept_changes: other data are taken, from the start of the document where it was, by its number, or from the beginning
      when packing, shuffling or the kind of data set changed.

  Raises:
    UserError: it is damaged; or the data are others, every difference by name, and that is not accepted.
  """
  if not isinstance(state, dict) or not isinstance(state.get("identity"), dict) or "state" not in state:
    raise UserError("the checkpoint's data state is damaged: it has no identity and state")
  saved = dict(state["identity"])
  if "special_tokens_in_text" in identity:
    saved.setdefault("special_tokens_in_text", "literal")  # what there was before the key
  saved.pop("process", None)  # when each process had a stream of its own; a run was one process then
  if "vision" in identity and "vision" in saved:  # once it had the keys of every tower
    saved = saved | {"vision": {key: value for key, value in saved["vision"].items() if key in identity["vision"]}}
  if not (changed := _differences(saved, identity)):
    return state["state"], ""
  listed = "\n  ".join(changed)
  if saved.get("eval_fraction") != identity.get("eval_fraction"):
    listed += "\n  " + (_HELD_OUT if saved.get("eval_fraction") else _NOTHING_HELD_OUT)
  if not accept_changes:
    raise UserError(
      f"cannot resume: the data are not those of the checkpoint, the order would change:\n  {listed}\n"
      "Restore them, start a new run (init_from takes the weights without the data position), or allow_data_change=true"
    )
  with damage_told():
    return _to_document_start(state["state"], initial), listed


@contextlib.contextmanager
def damage_told() -> Iterator[None]:
  """UserError where what is done with a saved position shows that it is none."""
  try:
    yield
  except (KeyError, TypeError, IndexError, StopIteration) as error:
    raise UserError(f"the checkpoint's data state is damaged: {error!r}") from error


def _to_document_start(position: dict[str, Any], initial: dict[str, Any]) -> dict[str, Any]:
  """`position` moved back to a document start if the rows of the present settings can go on there; else `initial`."""
  rows = position["rows"]
  if rows.keys() != initial["rows"].keys() or _of_mixture(rows) != _of_mixture(initial["rows"]):
    return initial
  if "block" in rows:
    return {"rows": {**rows, "next": 0, "rows": {**rows["rows"], "used": 0}}, "ended": False}
  return {"rows": {**rows, "used": 0} if "used" in rows else rows, "ended": False}


def _of_mixture(rows: dict[str, Any]) -> bool:
  """Whether a state is one of several sources."""
  return "sources" in rows.get("rows", rows).get("documents", {})


def _differences(saved: dict[str, Any], present: dict[str, Any], prefix: str = "") -> list[str]:
  """One line for each key whose value differs: what it was, what it is."""
  lines = []
  for key in sorted(saved.keys() | present.keys()):
    was, now = saved.get(key, "absent"), present.get(key, "absent")
    if isinstance(was, dict) and isinstance(now, dict):
      lines += _differences(was, now, f"{prefix}{key} ")
    elif was != now:
      lines.append(f"{prefix}{key}: was {was}, is {now}")
  return lines
