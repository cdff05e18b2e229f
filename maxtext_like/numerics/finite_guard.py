"""FiniteGuard wraps any optax transformation so that non-finite updates are not applied. It works in any training loop.

``optax.apply_if_finite`` only checks gradients, and applies a non-finite update after too many in a row. Here a step is
accepted if its gradients, the parameters after it and the optimizer's new state are finite. A rejected step leaves parameters
and state unchanged, bit for bit, however many were rejected before. ``check`` ends a run on the host and names the arrays.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from maxtext_like.errors import NonFiniteError

_SHOWN = 8


class FiniteGuardState(NamedTuple):
  """State of the guarded optimizer.

  Attributes:
    inner: state of the wrapped optimizer.
    skipped: int32, updates rejected since the start.
    skipped_in_row: int32, updates rejected since the last one that was applied.
    gradients, parameters: bool for each leaf, in the order of ``jax.tree.leaves``: True if it was finite in the last step.
    optimizer: bool, True if the optimizer's new state was finite.
  """

  inner: Any
  skipped: jax.Array
  skipped_in_row: jax.Array
  gradients: jax.Array
  parameters: jax.Array
  optimizer: jax.Array


@dataclass(frozen=True)
class Verdict:
  """The result of the last step, on the host.

  Attributes:
    applied: True if parameters and optimizer were changed.
    skipped, skipped_in_row: updates rejected since the start, and since the last one that was applied.
    gradients, parameters: names of the arrays that were, or would have become, non-finite.
    optimizer: True if the optimizer's new state was finite.
  """

  applied: bool
  skipped: int
  skipped_in_row: int
  gradients: tuple[str, ...]
  parameters: tuple[str, ...]
  optimizer: bool

  def __str__(self) -> str:
    if self.applied:
      return f"applied; {self.skipped} skipped so far"
    found = [(kind, names) for kind, names in (("gradients", self.gradients), ("parameters", self.parameters)) if names]
    if found:
      kind, names = found[0]  # the first kind is the cause of the others
      shown = ", ".join(names[:_SHOWN]) + (f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else "")
      what = f"non-finite {kind} of {shown}"
    else:
      what = "non-finite optimizer state"
    return f"skipped ({self.skipped_in_row} in a row): {what}"


class FiniteGuard(optax.GradientTransformationExtraArgs):
  """Wraps another transformation and is used in its place: ``FiniteGuard(optax.adamw(1e-3))``.

  ``update`` returns zeros for a rejected update. Pass ``params``, as for optimizers with weight decay. Without them the updates
  are checked instead of the parameters after the update.

  Args:
    inner: any optax transformation whose updates are added to the parameters.
  """

  def __new__(cls, inner: optax.GradientTransformation) -> "FiniteGuard":
    if not callable(getattr(inner, "init", None)) or not callable(getattr(inner, "update", None)):
      raise TypeError(f"FiniteGuard({inner!r:.60}): not an optax transformation\n  fix: FiniteGuard(optax.adamw(1e-3))")
    inner = optax.with_extra_args_support(inner)

    def init(params: Any) -> FiniteGuardState:
      zero, sound = jnp.zeros((), jnp.int32), jnp.ones((len(jax.tree.leaves(params)),), bool)
      return FiniteGuardState(inner.init(params), zero, zero, sound, sound, jnp.ones((), bool))

    def update(updates: Any, state: Any, params: Any = None, **extra: Any) -> tuple[Any, FiniteGuardState]:
      changes, after = inner.update(updates, state.inner, params, **extra)
      gradients = _sound(updates)
      parameters = _sound(changes if params is None else optax.apply_updates(params, changes))
      optimizer = jnp.all(_sound(after))
      applied = jnp.all(gradients) & jnp.all(parameters) & optimizer
      keep = lambda new, old: jnp.where(applied, new, old)
      changes = jax.tree.map(lambda c: jnp.where(applied, c, jnp.zeros_like(c)), changes)
      return changes, FiniteGuardState(
        jax.tree.map(keep, after, state.inner),
        state.skipped + ~applied,
        jnp.where(applied, 0, state.skipped_in_row + 1),
        gradients,
        parameters,
        optimizer,
      )

    return super().__new__(cls, init, update)

  @staticmethod
  def verdict(state: Any, params: Any) -> Verdict:
    """Return the result of the last step. Blocks until the step is finished.

    Args:
      state: state of the optimizer, also in the form of ``nnx.Optimizer.opt_state``.
      params: the trained tree; its paths are the names.

    Raises:
      ValueError: the state is not this class's, or belongs to another tree.
    """
    if not all(hasattr(state, field) for field in FiniteGuardState._fields):
      inside = hasattr(state, "opt_state")
      raise ValueError(
        f"{type(state).__name__} is not the state of a FiniteGuard\n  fix: "
        + (
          "pass its opt_state"
          if inside
          else "make FiniteGuard the outermost transformation, FiniteGuard(optax.chain(...)), or pass its part of the state"
        )
      )
    # The flags are in the order of the leaves, whose paths are their names.
    paths = [path for path, _ in jax.tree_util.tree_leaves_with_path(params)]
    names = [jax.tree_util.keystr(path, simple=True, separator=".") for path in paths]
    read = lambda x: np.asarray(jax.tree.leaves(x)[0])
    flags = read(state.gradients)
    if len(flags) != len(names):
      raise ValueError(
        f"params has {len(names)} arrays, but the guard's state has {len(flags)}\n"
        "  fix: pass the trained tree; for a Flax module, nnx.state(model, nnx.Param)"
      )
    bad = lambda flags: tuple(name for name, sound in zip(names, read(flags), strict=True) if not sound)
    in_row = int(read(state.skipped_in_row))
    return Verdict(
      applied=not in_row,
      skipped=int(read(state.skipped)),
      skipped_in_row=in_row,
      gradients=bad(state.gradients),
      parameters=bad(state.parameters),
      optimizer=bool(read(state.optimizer)),
    )

  @classmethod
  def check(cls, state: Any, params: Any, *, max_skipped: int = 1) -> Verdict:
    """Return ``verdict`` and raise if ``max_skipped`` updates in a row were rejected. It blocks, so call it only as often as
    needed.

    Raises:
      NonFiniteError: too many updates were rejected. The parameters are those before the first rejected update.
    """
    found = cls.verdict(state, params)
    if found.skipped_in_row >= max_skipped:
      raise NonFiniteError(f"update {found}; it was not applied. To find the cause, use `maxtext_like.xray` on the step")
    return found


def _sound(tree: Any) -> jax.Array:
  """Return a bool for each leaf: True if it has no NaN and no infinity. Leaves of integers are always True."""
  inexact = lambda x: jnp.issubdtype(jnp.result_type(x), jnp.inexact)
  flags = [jnp.all(jnp.isfinite(x)) if inexact(x) else jnp.ones((), bool) for x in jax.tree.leaves(tree)]
  return jnp.stack(flags) if flags else jnp.ones((0,), bool)
