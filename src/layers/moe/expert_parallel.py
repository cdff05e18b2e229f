"""Expert parallelism: each device has a part of the experts, and tokens are sent to the devices of their experts.

No token is dropped, whatever the router chooses. The number of rows that one device sends to another is known only at run time,
but arrays have fixed sizes. Arrays for the worst case (all rows of all devices choose the same device) would be too large by
a factor of the number of devices. Rows are therefore sent in rounds with a fixed capacity. The first round takes a little more
than an even share. If the load is uneven, smaller rounds follow until the fullest pair of devices is done. The result equals
that of one device.

``jax.lax.ragged_all_to_all`` would send no padding, but its output must have the worst-case size, and CPUs do not support it
(JAX 0.10, 0.12).

N tokens of a device, k experts per token, M = N * k choices, D model, E experts, P devices of the axis, C rows of a round from
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
from maxtext_like.layers.partition import Mesh, ShardedWeight, axes_of, vary, varying_axes
from maxtext_like.layers.sharding_rules import Rules
from maxtext_like.layers.weight import Weight

SLACK = 1.25
"""Capacity of the first round from one device to another, relative to an even load."""

LATER = 4
"""Divisor: a later round has this fraction of the rows and the memory of the first, because few rows remain."""

MORE = "more_rounds"
"""``jax.named_scope`` of the loop over the later rounds. The loop has no iteration if all rows fit into the first round."""

Run = Callable[..., tuple[jax.Array, jax.Array]]
"""(parameters of this device's experts, rows [R, D], int32 [R]: expert index of each row, number of experts, some=True) ->
(outputs [R, D], zeros for rows without an expert here; number of clamped values)."""


Axes = tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Layout:
  """The sharding of tokens and of the experts' weights on a mesh.

  Attributes:
    tokens: spec of arrays [B, T].
    weights: sharding of each weight.
    experts: mesh axes that split the experts.
    travel: these axes also split the tokens, so tokens are sent to their experts. False: every device along these axes has the
      same tokens and computes the outputs of its experts.
    partial: mesh axes over which each device computes a part of every output; the parts are added.
    every: all mesh axes that split anything.
  """

  tokens: PartitionSpec
  weights: Mapping[str, ShardedWeight]
  experts: Axes
  travel: bool
  partial: Axes
  every: Axes

  @classmethod
  def of(
    cls, spec: Mapping[str, Param], weights: Mapping[str, Any], rows: tuple[int, ...], rules: Rules, mesh: Mesh
  ) -> "Layout":
    """Derive the layout from sharding rules.

    Args:
      spec: declared weights of the experts; their first dimension is that of experts.
      weights: the weights.
      rows: B and T.
      rules, mesh: sharding rules and the current mesh.

    Raises:
      ValueError: the experts do not divide among the devices, or only some of their mesh axes split tokens.
    """
    # Find the mesh axes that split tokens, and those that split experts.
    tokens = rules.spec(rows, ("batch", "sequence"), mesh)
    of_tokens = tuple(axis for entry in tokens for axis in axes_of(entry))
    experts = rules.mesh_axes("expert", mesh)
    count, devices = next(iter(spec.values())).shape[0], math.prod(mesh.shape[a] for a in experts)
    # Check that the experts divide among the devices.
    if count % devices:
      names = " and ".join(repr(a) for a in experts)
      raise ValueError(
        f"num_experts={count} is not a multiple of the {devices} devices of the mesh axis {names}, so the experts cannot be "
        f"split\n  fix: set ici_expert_parallelism to a divisor of {count}"
      )
    # Tokens are sent to experts only if each device of an expert axis has different tokens.
    shared = [a in of_tokens for a in experts]
    if any(shared) and not all(shared):
      raise ValueError(
        f"sharding: the mesh axes {experts} split experts, but only some of them split tokens ({of_tokens})\n  fix: let all "
        "or none of them split tokens"
      )
    # Find the sharding of the weights. A weight that is not a plain array is split over experts only.
    plain = not any(isinstance(w, Weight) for w in weights.values())
    hidden = _hidden_axes(spec, rules, mesh) if plain else ()
    # An axis that splits tokens cannot split the hidden size too, because its devices have different rows.
    hidden = () if set(hidden) & set(of_tokens) else hidden
    if plain:
      own = {"expert", *(("mlp",) if hidden else ())}
      held = {name: ShardedWeight.of(rules, mesh, q.shape, q.axes, own, of_tokens) for name, q in spec.items()}
    else:
      held = dict.fromkeys(spec, ShardedWeight(PartitionSpec(experts or None)))
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

  A mesh axis splits only one dimension of an array, the first one that the rules allow. With ``embed: tensor`` the hidden size
  is split in ``down`` but not in ``gate``. The parts on a device would then not match, so the function returns ().
  """
  found: set[Axes] = set()
  for weight in spec.values():
    split = [*rules.spec(weight.shape, weight.axes, mesh), *(None,) * len(weight.shape)]
    found.add(axes_of(split[weight.axes.index("mlp")]))
  return found.pop() if len(found) == 1 else ()


def capacity(choices: int, devices: int) -> int:
  """Return C, the number of rows that the first round sends from one device to another."""
  return min(choices, -(-int(choices * SLACK) // devices))


def travel(
  run: Run, p: Any, x_ND: jax.Array, experts_Nk: jax.Array, num_experts: int, axes: Axes, mesh_axes: Axes
) -> tuple[jax.Array, jax.Array]:
  """Send tokens to their experts and return the experts' outputs. Call it inside shard_map.

  Args:
    run: applies this device's experts to rows.
    p: their parameters, a pytree.
    x_ND: tokens of this device.
    experts_Nk: int32, experts chosen by each token.
    num_experts: E, over all devices.
    axes: mesh axes that split the experts.
    mesh_axes: all axes over which tokens differ. Devices along them run the same number of rounds.

  Returns:
    [N, k, D], and the number of clamped values on this device.
  """
  # Experts per device, and the capacity of the first round.
  N, k = experts_Nk.shape
  P = jax.lax.axis_size(axes)
  own, C = num_experts // P, capacity(N * k, P)
  # Sort the choices by expert and count the rows for each device.
  chosen = experts_Nk.reshape(-1)
  order = jnp.argsort(chosen, stable=True)
  counts_P = jnp.bincount(chosen // own, length=P)
  plan = {"chosen": chosen, "order": order, "counts": counts_P, "starts": jnp.cumsum(counts_P) - counts_P}
  more = -(-C // LATER)
  rounds = jax.lax.pmax(jnp.max(-(-jnp.maximum(counts_P - C, 0) // more)), mesh_axes)
  p, x_ND = jax.tree.map(lambda w: vary(w, mesh_axes), p), vary(x_ND, mesh_axes)
  # The first round is plain code, whose backward pass saves its residuals. A loop with a dynamic number of rounds cannot do
  # this.
  out_MD, clamped = _round(run, (own, C, axes), plan, jnp.zeros((), jnp.int32), p, x_ND)
  one = lambda plan, number, p, x_ND: _round(run, (own, more, axes), plan, C + number * more, p, x_ND)
  rest: Any = _later(one, mesh_axes, plan, rounds, p, x_ND)
  more_MD, also = rest
  return (out_MD + more_MD).reshape(N, k, -1), clamped + also


def _round(run: Run, static: tuple[int, int, Axes], plan, begin, p, x_ND) -> tuple[jax.Array, jax.Array]:
  """Run one round. It sends up to C rows from each device to each other one, starting with row number ``begin``.

  Returns:
    [M, D]: outputs at the positions of this round's choices, zeros elsewhere; and the number of clamped values."""
  # Destination device and position of every row of this round.
  own, C, axes = static
  chosen, M = plan["chosen"], plan["chosen"].size
  P = plan["counts"].size
  exchange = functools.partial(jax.lax.all_to_all, axis_name=axes, split_axis=0, concat_axis=0, tiled=True)
  # Choose the rows of this round. Unused slots have zeros and the expert number ``own``, which no expert has.
  nth_C = begin + jnp.arange(C)
  real_PC = nth_C < plan["counts"][:, None]
  choice_PC = plan["order"][jnp.minimum(plan["starts"][:, None] + nth_C, M - 1)]
  rows_PCD = jnp.where(real_PC[..., None], x_ND[choice_PC // (M // x_ND.shape[0])], 0)
  expert_PC = jnp.where(real_PC, chosen[choice_PC] % own, own)
  # Send the rows, run the experts, send the outputs back.
  with jax.named_scope("to_experts"):
    rows_PCD, expert_PC = exchange(rows_PCD), exchange(expert_PC)
  out, clamped = run(p, rows_PCD.reshape(P * C, -1), expert_PC.reshape(-1), own, some=True)
  with jax.named_scope("from_experts"):
    out = exchange(out.reshape(P, C, -1))
  # Each output has its own position. Unused slots get positions beyond the end, where they are dropped.
  place_PC = jnp.where(real_PC, choice_PC, M + jnp.arange(P * C).reshape(P, C))
  empty = vary(jnp.zeros((M, out.shape[-1]), out.dtype), varying_axes(out))
  return empty.at[place_PC].set(out, mode="drop", unique_indices=True), clamped


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _later(one, mesh_axes, plan, rounds, p, x_ND) -> Any:
  """Add the outputs of all later rounds. The backward pass runs each of them again."""
  like = jax.eval_shape(one, plan, rounds, p, x_ND)
  return _summed(lambda number: one(plan, number, p, x_ND), rounds, like, mesh_axes)


def _summed(one: Callable[[jax.Array], Any], rounds: jax.Array, like: Any, mesh_axes: Axes) -> Any:
  """Return the sum of one(number) for number < rounds. ``like`` has its shapes and dtypes."""
  zeros = jax.tree.map(lambda x: vary(jnp.zeros(x.shape, x.dtype), mesh_axes), like)
  body = lambda carry: (carry[0] + 1, jax.tree.map(jnp.add, carry[1], one(carry[0])))
  with jax.named_scope(MORE):
    return jax.lax.while_loop(lambda carry: carry[0] < rounds, body, (jnp.zeros((), jnp.int32), zeros))[1]


def _later_forward(one, mesh_axes, plan, rounds, p, x_ND):
  return _later(one, mesh_axes, plan, rounds, p, x_ND), (plan, rounds, p, x_ND)


def _later_backward(one, mesh_axes, saved, cotangents):
  # Differentiate floating-point leaves only: a quantized weight has integers.
  plan, rounds, p, x_ND = saved
  leaves, tree = jax.tree.flatten(p)
  trained = [i for i, w in enumerate(leaves) if jnp.issubdtype(w.dtype, jnp.floating)]

  # Rebuild the weights from the leaves that are differentiated, and compute the outputs of one round.
  def outputs(number, floats, x):
    both = leaves.copy()
    for i, w in zip(trained, floats, strict=True):
      both[i] = w
    return one(plan, number, tree.unflatten(both), x)[0]

  # The gradient of one round. Its forward pass is recomputed, so that no round keeps its rows.
  def pulled_back(number):
    return jax.vjp(functools.partial(outputs, number), floats, x_ND)[1](cotangents[0])

  floats = [leaves[i] for i in trained]
  # The gradients of all rounds are added. Leaves without a gradient get None.
  found, dx = _summed(pulled_back, rounds, (floats, x_ND), mesh_axes)
  grads: list[Any] = [None] * len(leaves)
  for i, g in zip(trained, found, strict=True):
    grads[i] = g
  return None, None, tree.unflatten(grads), dx


_later.defvjp(_later_forward, _later_backward)
