"""Tokens that travel to their experts: each device of the expert axis holds its share of the experts and is sent the rows that
chose them. Nothing is dropped, whatever the router does.

How many rows a device sends to another is known only when the program runs, and a program's arrays have fixed sizes. Arrays
that hold the worst case (every row of every device chooses one device) would be as many times too large as there are devices.
So rows travel in rounds of a fixed capacity, the first a little above an even share, and where the load is uneven smaller ones
behind it, as many as the fullest pair of devices needs. The result is that of one device either way.

``jax.lax.ragged_all_to_all`` would send no padding; it needs the worst case as its output, and a CPU does not run it (JAX 0.10,
0.12).

N tokens of a device, k experts a token, M = N * k choices, D model, E experts, P devices of the axis, C rows of a round from
one device to another.
"""

import functools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from maxtext_like.layers.param import Param
from maxtext_like.layers.partition import Held, Mesh, axes_of, vary, varying_axes
from maxtext_like.layers.sharding_rules import Rules
from maxtext_like.layers.weight import Weight

SLACK = 1.25
"""Rows that the first round takes from one device to another, in shares of an even load."""

LATER = 4
"""A round behind the first takes that part of the rows of the first, and of its memory: what is left over is little."""

MORE = "more_rounds"
"""``jax.named_scope`` of the loop over the rounds behind the first: it does not turn where no device is sent more than that."""

Run = Callable[..., tuple[jax.Array, jax.Array]]
"""(parameters of the own experts, rows [R, D], int32 [R] which of them each row is for, their number, some=True) -> (their
outputs [R, D], zeros for a row whose number is beyond them; the number of rescued values)."""


Axes = tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Layout:
  """Where tokens and the weights of experts lie on a mesh.

  Attributes:
    tokens: of [B, T].
    weights: how each weight lies.
    experts: mesh axes that the experts are split over.
    travel: tokens are split over these too, and travel; else every device has all tokens of the axis and runs its share.
    partial: mesh axes over which every device computes a part of each output: sums to be added up.
    every: all mesh axes that anything is split over.
  """

  tokens: PartitionSpec
  weights: Mapping[str, Held]
  experts: Axes
  travel: bool
  partial: Axes
  every: Axes

  @classmethod
  def of(
    cls, spec: Mapping[str, Param], weights: Mapping[str, Any], rows: tuple[int, ...], rules: Rules, mesh: Mesh
  ) -> "Layout":
    """The rules' layout.

    Args:
      spec: declared weights of the experts; the experts are their first dimension.
      weights: themselves.
      rows: B and T.
      rules, mesh: as they are.

    Raises:
      ValueError: the experts do not divide, or lie partly on axes that tokens are split over.
    """
    tokens = rules.spec(rows, ("batch", "sequence"), mesh)
    of_tokens = tuple(axis for entry in tokens for axis in axes_of(entry))
    experts = rules.mesh_axes("expert", mesh)
    count, devices = next(iter(spec.values())).shape[0], math.prod(mesh.shape[a] for a in experts)
    if count % devices:
      names = " and ".join(repr(a) for a in experts)
      raise ValueError(
        f"{count} experts (num_experts) do not divide among the {devices} devices of the mesh axis {names}: "
        f"set ici_expert_parallelism to a divisor of {count}"
      )
    shared = [a in of_tokens for a in experts]
    if any(shared) and not all(shared):
      raise ValueError(f"experts lie on the mesh axes {experts}, of which tokens are split over some only: {of_tokens}")
    # Whatever is no plain array says itself how it multiplies, and is split by expert alone.
    plain = not any(isinstance(w, Weight) for w in weights.values())
    hidden = _hidden_axes(spec, rules, mesh) if plain else ()
    hidden = () if set(hidden) & set(of_tokens) else hidden
    if plain:
      own = {"expert", *(("mlp",) if hidden else ())}
      held = {name: Held.of(rules, mesh, q.shape, q.axes, own, of_tokens) for name, q in spec.items()}
    else:
      held = dict.fromkeys(spec, Held(PartitionSpec(experts or None)))
    travel = bool(experts) and all(shared)
    return cls(
      tokens=tokens,
      weights=held,
      experts=experts,
      travel=travel,
      partial=hidden + (() if travel else experts),
      every=tuple(a for a in mesh.axis_names if a in {*of_tokens, *experts, *hidden}),
    )


def _hidden_axes(spec: Mapping[str, Param], rules: Rules, mesh: Mesh) -> Axes:
  """Return the mesh axes that split the hidden size in every weight of the experts.

  A mesh axis splits one dimension of an array, and dimensions that come first in a weight take it. With ``embed: tensor`` the
  hidden size is split in ``down`` and not in ``gate``, so the parts of a device would not fit together: return () then.
  """
  found: set[Axes] = set()
  for weight in spec.values():
    split = [*rules.spec(weight.shape, weight.axes, mesh), *(None,) * len(weight.shape)]
    found.add(axes_of(split[weight.axes.index("mlp")]))
  return found.pop() if len(found) == 1 else ()


def capacity(choices: int, devices: int) -> int:
  """C: rows of the first round from one device to another."""
  return min(choices, -(-int(choices * SLACK) // devices))


def travel(
  run: Run, p: Any, x_ND: jax.Array, experts_Nk: jax.Array, num_experts: int, axes: Axes, mesh_axes: Axes
) -> tuple[jax.Array, jax.Array]:
  """What the chosen experts make of every token, inside shard_map.

  Args:
    run: the own experts on rows.
    p: their parameters, a pytree.
    x_ND: tokens of this device.
    experts_Nk: int32, their choices.
    num_experts: E, of all devices.
    axes: mesh axes that the experts lie on.
    mesh_axes: all axes over which tokens differ: devices that wait for each other.

  Returns:
    [N, k, D] and the number of rescued values on this device.
  """
  N, k = experts_Nk.shape
  P = jax.lax.axis_size(axes)
  own, C = num_experts // P, capacity(N * k, P)
  chosen = experts_Nk.reshape(-1)
  order = jnp.argsort(chosen, stable=True)
  counts_P = jnp.bincount(chosen // own, length=P)
  plan = {"chosen": chosen, "order": order, "counts": counts_P, "starts": jnp.cumsum(counts_P) - counts_P}
  more = -(-C // LATER)
  rounds = jax.lax.pmax(jnp.max(-(-jnp.maximum(counts_P - C, 0) // more)), mesh_axes)
  p, x_ND = jax.tree.map(lambda w: vary(w, mesh_axes), p), vary(x_ND, mesh_axes)
  # The first round is plain code, whose backward pass keeps what it needs; a loop of unknown length cannot.
  out_MD, rescued = _round(run, (own, C, axes), plan, jnp.zeros((), jnp.int32), p, x_ND)
  one = lambda plan, number, p, x_ND: _round(run, (own, more, axes), plan, C + number * more, p, x_ND)
  rest: Any = _later(one, mesh_axes, plan, rounds, p, x_ND)
  more_MD, also = rest
  return (out_MD + more_MD).reshape(N, k, -1), rescued + also


def _round(run: Run, static: tuple[int, int, Axes], plan, begin, p, x_ND) -> tuple[jax.Array, jax.Array]:
  """[M, D]: outputs for the choices of one round at their places, zeros for the others; and the number of rescued values.
  Of the rows from each device to each other the round takes C, those from ``begin`` on."""
  own, C, axes = static
  chosen, M = plan["chosen"], plan["chosen"].size
  P = plan["counts"].size
  exchange = functools.partial(jax.lax.all_to_all, axis_name=axes, split_axis=0, concat_axis=0, tiled=True)
  nth_C = begin + jnp.arange(C)
  real_PC = nth_C < plan["counts"][:, None]
  choice_PC = plan["order"][jnp.minimum(plan["starts"][:, None] + nth_C, M - 1)]
  rows_PCD = jnp.where(real_PC[..., None], x_ND[choice_PC // (M // x_ND.shape[0])], 0)
  expert_PC = jnp.where(real_PC, chosen[choice_PC] % own, own)
  with jax.named_scope("to_experts"):
    rows_PCD, expert_PC = exchange(rows_PCD), exchange(expert_PC)
  out, rescued = run(p, rows_PCD.reshape(P * C, -1), expert_PC.reshape(-1), own, some=True)
  with jax.named_scope("from_experts"):
    out = exchange(out.reshape(P, C, -1))
  # A place of its own for every row, that of padding beyond the end, where it is dropped.
  place_PC = jnp.where(real_PC, choice_PC, M + jnp.arange(P * C).reshape(P, C))
  empty = vary(jnp.zeros((M, out.shape[-1]), out.dtype), varying_axes(out))
  return empty.at[place_PC].set(out, mode="drop", unique_indices=True), rescued


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _later(one, mesh_axes, plan, rounds, p, x_ND) -> Any:
  """The sum of the rounds behind the first; the backward pass runs each of them again."""
  like = jax.eval_shape(one, plan, rounds, p, x_ND)
  return _summed(lambda number: one(plan, number, p, x_ND), rounds, like, mesh_axes)


def _summed(one: Callable[[jax.Array], Any], rounds: jax.Array, like: Any, mesh_axes: Axes) -> Any:
  """The sum of one(number) over so many rounds; like: arrays of its shapes and dtypes."""
  zeros = jax.tree.map(lambda x: vary(jnp.zeros(x.shape, x.dtype), mesh_axes), like)
  body = lambda carry: (carry[0] + 1, jax.tree.map(jnp.add, carry[1], one(carry[0])))
  with jax.named_scope(MORE):
    return jax.lax.while_loop(lambda carry: carry[0] < rounds, body, (jnp.zeros((), jnp.int32), zeros))[1]


def _later_forward(one, mesh_axes, plan, rounds, p, x_ND):
  return _later(one, mesh_axes, plan, rounds, p, x_ND), (plan, rounds, p, x_ND)


def _later_backward(one, mesh_axes, saved, cotangents):
  plan, rounds, p, x_ND = saved
  leaves, tree = jax.tree.flatten(p)
  trained = [i for i, w in enumerate(leaves) if jnp.issubdtype(w.dtype, jnp.floating)]  # a quantised weight has integers

  def outputs(number, floats, x):
    both = leaves.copy()
    for i, w in zip(trained, floats, strict=True):
      both[i] = w
    return one(plan, number, tree.unflatten(both), x)[0]

  def pulled_back(number):
    return jax.vjp(functools.partial(outputs, number), floats, x_ND)[1](cotangents[0])

  floats = [leaves[i] for i in trained]
  found, dx = _summed(pulled_back, rounds, (floats, x_ND), mesh_axes)
  grads: list[Any] = [None] * len(leaves)
  for i, g in zip(trained, found, strict=True):
    grads[i] = g
  return None, None, tree.unflatten(grads), dx


_later.defvjp(_later_forward, _later_backward)
