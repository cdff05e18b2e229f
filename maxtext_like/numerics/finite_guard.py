"""An optimizer that applies no update which is not finite: around any optax transformation, in anybody's training step.

``optax.apply_if_finite`` looks at gradients only, and applies what it was made to keep away once it has come too often. Here
a step counts as sound when its gradients, the parameters after it and the optimizer's new state are finite; any other leaves
parameters and state as they were, bit for bit, whatever the number of steps before it. ``check`` ends a run on the host,
with the arrays by name.
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
    inner: of the optimizer that is guarded.
    skipped: int32, updates left out since the start.
    skipped_in_row: int32, updates left out since the last one that was applied.
    gradients, parameters: bool by leaf, in the order of ``jax.tree.leaves``: which of them the last step left finite.
    optimizer: bool: its new state was finite.
  """

  inner: Any
  skipped: jax.Array
  skipped_in_row: jax.Array
  gradients: jax.Array
  parameters: jax.Array
  optimizer: jax.Array


@dataclass(frozen=True)
class Verdict:
  """The last step as the host sees it.

  Attributes:
    applied: parameters and optimizer were changed.
    skipped, skipped_in_row: updates left out, ever and since the last one that was applied.
    gradients, parameters: names of the arrays that were, or would have become, non-finite.
    optimizer: the optimizer's new state was finite.
  """

  applied: bool
  skipped: int
  skipped_in_row: int
  gradients: tuple[str, ...]
  parameters: tuple[str, ...]
  optimizer: bool

  def __str__(self) -> str:
    if self.applied:
      return f"applied; {self.skipped} left out so far"
    found = [(kind, names) for kind, names in (("gradients", self.gradients), ("parameters", self.parameters)) if names]
    if found:
      kind, names = found[0]  # what the others follow from
      shown = ", ".join(names[:_SHOWN]) + (f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else "")
      what = f"non-finite {kind} of {shown}"
    else:
      what = "a non-finite state of the optimizer"
    return f"left out ({self.skipped_in_row} in a row): {what}"


class FiniteGuard(optax.GradientTransformationExtraArgs):
  """A transformation around another, to be used in its place: ``FiniteGuard(optax.adamw(1e-3))``.

  ``update`` returns zeros in the place of an update that is left out. It is given ``params``, as optimizers with weight decay
  are; without them the updates are looked at instead of the parameters after them.

  Args:
    inner: any optax transformation whose updates are added to the parameters.
  """

  def __new__(cls, inner: optax.GradientTransformation) -> "FiniteGuard":
    if not callable(getattr(inner, "init", None)) or not callable(getattr(inner, "update", None)):
      raise TypeError(f"FiniteGuard({inner!r:.60}): no transformation of optax\n  fix: as in FiniteGuard(optax.adamw(1e-3))")
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
    """What became of the last step. Waits for it.

    Args:
      state: of the optimizer; also as ``nnx.Optimizer.opt_state`` has it.
      params: the tree that was trained; its paths are the names.

    Raises:
      ValueError: the state is not this class's, or of another tree.
    """
    if not all(hasattr(state, field) for field in FiniteGuardState._fields):
      inside = hasattr(state, "opt_state")
      raise ValueError(
        f"{type(state).__name__} is not the state of a FiniteGuard\n  fix: "
        + (
          "give its opt_state"
          if inside
          else "let it be the outermost, FiniteGuard(optax.chain(...)), or take its part of the state"
        )
      )
    paths = [path for path, _ in jax.tree_util.tree_leaves_with_path(params)]
    names = [jax.tree_util.keystr(path, simple=True, separator=".") for path in paths]
    read = lambda x: np.asarray(jax.tree.leaves(x)[0])
    flags = read(state.gradients)
    if len(flags) != len(names):
      raise ValueError(
        f"params has {len(names)} arrays, the guard {len(flags)}\n"
        "  fix: give the tree that was trained; of a Flax module, nnx.state(model, nnx.Param)"
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
    """``verdict``, which must not show ``max_skipped`` updates left out in a row. Call it as often as waiting is worth it.

    Raises:
      NonFiniteError: it does; the parameters are those before the first of them.
    """
    found = cls.verdict(state, params)
    if found.skipped_in_row >= max_skipped:
      raise NonFiniteError(f"update {found}; nothing of it was applied. `maxtext_like.xray` of the step tells the cause")
    return found


def _sound(tree: Any) -> jax.Array:
  """bool by leaf: no NaN and no infinity in it; leaves of whole numbers are."""
  inexact = lambda x: jnp.issubdtype(jnp.result_type(x), jnp.inexact)
  flags = [jnp.all(jnp.isfinite(x)) if inexact(x) else jnp.ones((), bool) for x in jax.tree.leaves(tree)]
  return jnp.stack(flags) if flags else jnp.ones((0,), bool)
