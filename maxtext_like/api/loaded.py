"""Functions that evaluate a model share this: they take a loaded model, or load one."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from maxtext_like.api.arguments import Saved, after_loading, require_number, words
from maxtext_like.api.pretrained import Pretrained, load
from maxtext_like.errors import UserError


def as_loaded(
  of: Callable[..., Any],
  model: str | Path | Saved | Pretrained,
  overrides: tuple[str, ...],
  keys: dict[str, Any],
  adapters: str | Path | Saved | Sequence[str | Path | Saved] = (),
  on_note: Callable[[str], None] | None = None,
) -> Pretrained:
  """Return a model: itself if it is loaded, or else the result of ``load``.

  Args:
    of: the called function, which errors name.
    model, overrides, keys, adapters: arguments of the caller, as for ``load``.
    on_note: called with every remark about a model that is loaded here.

  Raises:
    UserError: the model is loaded and there are overrides; and as ``load``.
  """
  laid_over = words(overrides, keys, of)
  if not isinstance(model, Pretrained):
    loaded = load(model, *laid_over, adapters=adapters)
    if on_note is not None:
      for note in loaded.notes:
        on_note(note)
    return loaded
  if laid_over or adapters:
    raise after_loading(of, laid_over[0] if laid_over else "adapters")
  return model


def require_counts(of: Callable[..., Any], least: int = 1, **numbers: Any) -> None:
  """Raise UserError if an argument is neither None nor a whole number of at least ``least``."""
  for name, value in numbers.items():
    if value is not None:
      require_number(of, name, value, whole=True)
      if value < least:
        raise UserError(f"{of.__name__}: {name}={value} is too small\n  fix: pass at least {least}")
