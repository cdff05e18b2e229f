"""The train step with a fused backward pass: each layer is updated as soon as its gradient exists, so that the gradients of no
two layers are in memory together (``optimizer_in_backward``; LOMO, Lv et al. 2023, arXiv:2306.09782).

The forward pass keeps the input of each layer, and of the layer itself what ``remat_policy`` selects, in device memory or, with
``remat_offload``, in host memory. The backward pass visits the layers from last to first. It recomputes what was not kept,
differentiates the layer, updates it in place, and passes the cotangent of its input to the layer before. Parameters outside the
stacks (embedding, head, final norm, vision tower) are updated last, when the embedding's gradient is complete.

Clipping by the global norm (``clip: exact``) and float16's loss scale need all gradients before the first update. The backward
pass then runs twice: once to measure, once to update. Non-finite gradients then leave the complete state unchanged, as in the
ordinary step. With a single pass, the first layer with a non-finite loss, gradient or update is not updated, nor are the layers
visited after it; layers visited before it keep their update. The same holds with two passes if only the update is non-finite.
"""

import dataclasses
import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from maxtext_like.checkpoint.compatibility import GRADIENT_SHARES
from maxtext_like.layers.context import Aux, Context
from maxtext_like.layers.partition import as_declared
from maxtext_like.models.row_norms import (
  Norm,
  SoFar,
  Squares,
  clip,
  largest_clipped,
  peaks_of_rows,
  squares_of_arrays,
  state_rows,
)
from maxtext_like.sharding import host_memory
from maxtext_like.training.optimizers.by_layer import (
  ByLayer,
  Part,
  join_states,
  parts_of,
  put_row,
  take,
  take_row,
  take_state,
)
from maxtext_like.training.step import loss_scale, update_retention
from maxtext_like.training.step.in_backward.forward import Forward, PrecomputedDecoder, RowRun, split_floats
from maxtext_like.training.step.in_backward.gradient_shares import GradientShares
from maxtext_like.training.step.in_backward.part_update import PartStats, PartUpdate, by_row, combined
from maxtext_like.training.step.in_backward.residuals import Residuals
from maxtext_like.training.step.train_step import Batch, Metrics, State, TrainStep, optional_metrics
from maxtext_like.training.step.trainable import mask_row, merge

Tree = Any


@dataclass(frozen=True, eq=False)
class StepInBackward(TrainStep):
  """One update, layer by layer. ``optimizer`` is a ``ByLayer``.

  Attributes:
    clip_by: the norm that gradients are clipped by. "exact": the global norm. "running": an estimate of the global norm from
      the layers visited so far and their recent share of it. "layer": the norm of each layer, and of all parameters outside
      the stacks together.
  """

  clip_by: str = "exact"

  @property
  def exact(self) -> bool:
    """True if gradients are clipped by the exact global norm. With float16 a first pass computes it in any case."""
    return self.clip > 0 and (self.clip_by == "exact" or (self.clip_by == "running" and self._measures_first))

  @property
  def _measures_first(self) -> bool:
    """True if the step needs a measuring pass for another reason than clipping."""
    return self.objective.decoder.precision.dtype == "float16"

  @functools.cached_property
  def shares(self) -> GradientShares | None:
    """The shares kept in ``gradient_shares``; None unless gradients are clipped by a running norm."""
    if not self.clip or self.clip_by != "running" or self.exact:
      return None
    return GradientShares.of(self.objective.decoder, self.trained)

  def extra_state(self) -> State:
    return {GRADIENT_SHARES: self.shares.first} if self.shares else {}

  @functools.cached_property
  def trained(self) -> dict[Part, np.ndarray]:
    """Rows with a gradient, bool [rows] per part; bool [1] for parameters outside the stacks."""
    masks, rows = self.selection.masks, {s.name: s.repeats for s in self.objective.decoder.stacks}
    any_of = lambda part: functools.reduce(np.logical_or, jax.tree.leaves(take(masks, part)), np.zeros((), bool))
    return {part: np.broadcast_to(any_of(part), rows[part[0]] if part else 1) for part in parts_of(masks)}

  @property
  def layer_limit(self) -> float:
    """Largest gradient norm of one layer with clip=layer. If all layers reach it, their global norm is ``clip``. With ``clip``
    for each layer, large gradients of the first steps would stay in Adam's second moment and slow down training."""
    return self.clip / sum(int(rows.sum()) for rows in self.trained.values()) ** 0.5

  @property
  def backward_passes(self) -> int:
    """Number of backward passes of a step: 2 if one measures first, otherwise 1."""
    return 2 if self.exact or self._measures_first else 1

  def untouched(self, failed: str) -> bool:
    """With two passes, non-finite gradients leave the state unchanged. A non-finite update is found layer by layer, in the
    checked form, when earlier layers are already updated."""
    return failed == "loss" or (failed == "gradients" and self.backward_passes == 2)

  def __call__(self, state: State, batch: Batch, magnitude_bound: jax.Array) -> tuple[State, Metrics]:
    """Train on one batch, as in ``TrainStep``. A rejected single pass may already have updated the layers visited before the
    one that was not finite.

    The gradient norm is unknown before the first layer is updated, but the clipping limit is known. It proves every update
    finite, or the fast form does nothing. The checked form checks each update before writing it.
    """
    if self.watch:  # the x-ray needs all gradients together
      new, metrics = super().__call__({**state, "opt_state": host_memory.to_device(state["opt_state"])}, batch, magnitude_bound)
      return {**new, "opt_state": host_memory.put_like(new["opt_state"], state["opt_state"])}, metrics
    # 1. Forward pass.
    params, frozen = self.selection.split(state["params"])
    scaling = state.get("loss_scale")
    pass_ = _Pass(self, state["step"], scaling["scale"] if scaling else None, state.get(GRADIENT_SHARES))
    forward = pass_.forward(params, frozen, batch)
    losses = forward.out
    loss = sum(losses["loss"].values())
    # 2. Can this step be applied? The fast form must prove it before the backward pass writes the first layer.
    norm, squares, kept_bound = None, None, None
    decided = ~jnp.any(jnp.isnan(magnitude_bound))
    if not self.checked:
      certain, kept_bound = self.optimizer.certainly_finite(
        jnp.float32(largest_clipped(self.clip)), magnitude_bound[1], magnitude_bound[0], pass_.rate
      )
      decided = jnp.all(jnp.isfinite(magnitude_bound)) & certain
    allowed = jnp.isfinite(loss) & decided
    # 3. Backward pass, run twice if the gradients must be measured before the first update.
    if self.backward_passes == 2:
      _, _, _, stats = pass_.backward(forward, params, frozen, None, allowed, None)
      squares = Squares(*map(by_row, stats.gradients))
      allowed, norm = allowed & jnp.all(squares.finite), squares.norm() if self.exact else None
      # The barrier orders the passes: the second one overwrites what the first one reads.
      params, opt_state, allowed = jax.lax.optimization_barrier((params, state["opt_state"], allowed))
    else:
      opt_state = state["opt_state"]
    new_params, new_opt_state, applied, stats = pass_.backward(forward, params, frozen, opt_state, allowed, norm)
    updating = Squares(*map(by_row, stats.gradients))
    squares = updating if squares is None else squares
    # 4. The remaining state.
    if self.router_bias:
      frozen = self.router_bias(frozen, losses["moe_load"], applied)
    stored = map(merge, stats.parameters or (), squares_of_arrays(frozen, rows=True))
    total, sizes = squares.norm(), Squares(*map(by_row, stored))
    new_state = {"step": state["step"] + decided, "params": merge(new_params, frozen), "opt_state": new_opt_state}
    if scaling:
      scale = loss_scale.updated(scaling, applied)
      new_state["loss_scale"] = jax.tree.map(lambda new, old: jnp.where(decided, new, old), scale, scaling)
    if self.shares:
      new_state[GRADIENT_SHARES] = self.shares.updated(state[GRADIENT_SHARES], stats.gradients, applied)
    # 5. Finiteness flags. The two passes are compiled separately, so only one of them may overflow.
    finite = {"loss": jnp.isfinite(loss), "gradients": squares.finite & updating.finite, "state_parameters": sizes.finite}
    sound = jnp.ones(state_rows(state["opt_state"], params), bool)  # non-finite numbers are never written
    if kept_bound is None:
      peaks = peaks_of_rows(stats.peaks, state["opt_state"], params)
      finite |= {"parameters": by_row(stats.updated), "optimizer": jnp.isfinite(peaks), "state_optimizer": sound}
      magnitude_bound = jnp.where(applied, jnp.stack([sizes.largest(), jnp.max(peaks, initial=0.0)]), jnp.inf)
    else:
      finite |= {"parameters": jnp.ones(squares.finite.shape, bool), "optimizer": sound, "state_optimizer": sound}
      magnitude_bound = jnp.where(decided, jnp.stack([sizes.largest(), jnp.maximum(kept_bound, magnitude_bound[1])]), jnp.inf)
    clipped = total.above(self.clip) if self.exact else jnp.any(by_row(stats.clipped))
    metrics = {
      "loss": loss,
      "grad_norm": total.value,
      "param_norm": sizes.norm().value,
      "learning_rate": pass_.rate,
      "tokens": self.objective.tokens(batch),
      "clipped": clipped & applied,
      "skipped": ~applied,
      "magnitude_bound": magnitude_bound,
      "decided": decided,
      "finite": finite,
    }
    if stats.survival is not None:
      metrics[update_retention.NAME] = dict(zip(("arrived", "intended"), map(by_row, stats.survival), strict=True))
    return new_state, metrics | optional_metrics(losses, scaling)


class _Pass:
  """The forward and backward passes of one step."""

  def __init__(self, step: StepInBackward, number: jax.Array, scale: jax.Array | None, shares: jax.Array | None):
    """Args: number: the state's step (int32 scalar). scale: loss scale. shares: ``gradient_shares`` of the state."""
    self.step, self.number, self.scale, self.shares = step, number, scale, shares
    self.rate = step.schedule(number)
    assert isinstance(step.optimizer, ByLayer)
    self.optimizers = step.optimizer.parts
    self.masks = step.selection.masks
    self.spec, _ = step.selection.split(step.objective.params())
    decoder = self.decoder = step.objective.decoder
    # Policy "full" needs no remat here: a layer is differentiated at its turn, from its input alone.
    self.keeps = decoder.cfg.remat_policy != "full"
    # This class moves kept arrays to the host and back itself, so the layers' own offloading is turned off.
    self.offload = decoder.cfg.remat_offload
    policy = decoder.cfg.remat_policy if self.keeps else "none"
    self.layers = dataclasses.replace(decoder, cfg=dataclasses.replace(decoder.cfg, remat_policy=policy, remat_offload="none"))
    self.runs = []
    for s in decoder.stacks:
      first = 0
      for count, layers in s.split(decoder.layers):
        self.runs.append(RowRun(s, layers, first, count))
        first += count

  def _scan(self, body: Callable[..., Any], carry: Any, xs: Any, run: RowRun, *, reverse: bool = False) -> Any:
    return jax.lax.scan(body, carry, xs, run.count, reverse=reverse, unroll=1 if self.decoder.cfg.scan_layers else run.count)

  def forward(self, params: Tree, frozen: Tree, batch: Batch) -> Forward:
    """Compute the loss, and the cotangent of the last layer's output.

    Args:
      params, frozen: as from ``Selection.split``.
      batch: as in ``TrainStep.__call__``.
    """
    step, decoder = self.step, self.decoder
    ctx = decoder.context(batch)
    outside, kept = take(params, ()), take(frozen, ())

    # The computation before the layers, with its pullback.
    def enter(outside):
      carry, per_layer, first = decoder.enter(merge(outside, kept), batch, ctx)
      return (carry, per_layer), first

    (carry, per_layer), enter_pullback, first = jax.vjp(enter, outside, has_aux=True)
    # The layers, one scan per run. Each saves its input and, depending on the policy, the residuals of its pullback.
    layer_inputs, saved_residuals, floats, others = [], [], [], []
    residuals: list[list[Residuals]] = []
    for run in self.runs:
      name, shapes = run.stack.name, []
      residuals.append(shapes)

      def body(carry, row, run=run, shapes=shapes):
        carries, arrays, found, rest = [], [], {}, {}
        trained_row, frozen_row, inputs = jax.tree.map(as_declared, row)
        shapes.clear()  # a scan body may be traced twice
        for j in range(len(run.layers)):
          key, own = f"layer_{j}", None if inputs is None else {j: inputs[j]}
          carries.append(self._offload(run, carry, "layer_inputs"))
          call = self._layer(run, j, frozen_row[key], ctx)
          if self.keeps:
            given = (trained_row[key], frozen_row[key], carry, own, ctx)
            (carry, found[key]), pullback, rest[key] = jax.vjp(call, trained_row[key], carry, own, has_aux=True)
            shape, array = Residuals.of(pullback, given)
            shapes.append(shape)
            # Without the barrier XLA on a GPU computes products twice: for the next reader and for the stack (jaxlib 0.11).
            array = jax.lax.optimization_barrier(array)
            arrays.append(self._offload(run, array, "kept"))
          else:
            (carry, found[key]), rest[key] = call(trained_row[key], carry, own)
        return carry, (carries, arrays, found, rest)

      inputs = decoder.rows(run.stack, {name: None}, per_layer)["per_layer"]
      rows = jax.tree.map(lambda x, run=run: x[run.first : run.first + run.count], (params[name], frozen[name], inputs))
      carry, found = self._scan(body, carry, rows, run)
      for kind, value in zip((layer_inputs, saved_residuals, floats, others), found, strict=True):
        kind.append(value)

    # The computation after the layers: head and loss, and their cotangents.
    def leave(outside, carry, floats):
      # Collect the outputs of each stack in the order of its rows.
      found: dict[str, list[dict[str, Aux]]] = {}
      for run, f, o in zip(self.runs, floats, others, strict=True):
        found.setdefault(run.stack.name, []).append(merge(f, o))
      collected = [(s, jax.tree.map(lambda *x: jnp.concatenate(x), *found[s.name])) for s in decoder.stacks]
      given = {f.name: getattr(decoder, f.name) for f in dataclasses.fields(decoder)}
      precomputed = PrecomputedDecoder(**given, result=lambda p: decoder.leave(p, carry, collected, first, ctx))
      return step.total(step.objective.with_decoder(precomputed), merge(outside, kept), batch, step.sizes(batch), self.scale)

    total, leave_pullback, out = jax.vjp(leave, outside, carry, floats, has_aux=True)
    d_outside, last, output_cotangents = leave_pullback(jnp.ones_like(total))
    return Forward(
      out, layer_inputs, saved_residuals, residuals, last, output_cotangents, d_outside, enter_pullback, ctx, per_layer
    )

  def _offload(self, run: RowRun, arrays: Tree, what: str) -> Tree:
    """Move arrays that wait for the backward pass to host memory, if ``remat_offload`` selects them and the layers are in a
    loop."""
    away = run.count > 1 and self.offload in (what, "all")
    return jax.device_put(arrays, jax.memory.Space.Host) if away else arrays

  def _layer(self, run: RowRun, j: int, frozen_row: Tree, ctx: Context) -> Callable[..., Any]:
    """Return layer j of a row as a function of its differentiable inputs: (its trained parameters, the carry, its per-layer
    input {j: [B, T, P]} or None) -> ((carry, float outputs), other outputs)."""

    def call(trained_row, carried, own):
      row = {"params": {f"layer_{j}": merge(trained_row, frozen_row)}, "cache": None, "per_layer": own, "probes": None}
      carried, aux = self.layers.run_layer(run.stack, j, run.layers[j], carried, row, ctx, isolated=self.keeps)
      floats, others = split_floats(aux)
      return (carried, floats), others

    return call

  def backward(
    self, forward: Forward, params: Tree, frozen: Tree, opt_state: Tree, allowed: jax.Array, norm: Norm | None
  ) -> tuple[Tree, Tree, jax.Array, PartStats]:
    """Visit the layers from last to first, then the parameters outside the stacks.

    Args:
      forward: result of ``forward`` for the same parameters.
      params, frozen: as from ``Selection.split``.
      opt_state: optimizer state; None to measure the gradients without an update.
      allowed: bool scalar, True if updates may be written.
      norm: global norm to clip by; None to not clip by it.

    Returns:
      The next parameters and optimizer state (the given ones without an update), True if everything was updated, and
      statistics as trees of all parts.
    """
    cotangent, d_inputs = forward.last, []
    updated: dict[str, Tree] = {}  # by stack
    states: dict[Part, Tree] = {}
    stats: dict[Part, list[PartStats]] = {part: [] for part in self.optimizers}
    so_far = SoFar.nothing()
    made = zip(self.runs, forward.layer_inputs, forward.kept, forward.residuals, forward.output_cotangents, strict=True)
    # Visit the runs of equal rows, each with one reverse scan.
    for run, layer_inputs, kept, residuals, output_cotangents in reversed([*made]):
      name = run.stack.name
      parts = [(name, f"layer_{j}") for j in range(len(run.layers))]
      inputs = self.decoder.rows(run.stack, {name: None}, forward.per_layer)["per_layer"]
      written = None
      if opt_state is not None:
        written = (
          updated.get(name, params[name]),
          {part: states[part] if part in states else take_state(opt_state, part) for part in parts},
        )

      stacks = [(x, kept[j] if kept else []) for j, x in enumerate(layer_inputs)]  # inputs and residuals of each layer of a row

      def body(carry, x, run=run, name=name, parts=parts, residuals=residuals, stacks=stacks):
        written, cotangent, allowed, so_far = carry
        row, apart, output_cotangents, inputs = x
        held, states = written or (params[name], None)
        found: dict[str, PartStats] = {}
        d_inputs: list[Any] = [None] * len(parts)
        for j in reversed(range(len(parts))):
          part, key = parts[j], parts[j][1]
          # The barrier starts this layer after the following layer was written. Otherwise XLA reads the weights of all layers
          # of a row at the start, keeps their gradients to the end, and merges the recomputation with the forward pass, which
          # would then keep its intermediate values. Moments on the host would be copied for several layers at once.
          # The layer's input is sliced from its stack after the barrier; before it, the slice would be a copy. Without a loop
          # there are no stacks. A transfer from the host starts before the barrier and is not delayed by it.
          given = None if apart is None else host_memory.to_device(apart[j])
          waiting = given, cotangent, allowed, row, held, states
          given, cotangent, allowed, row, held, states = jax.lax.optimization_barrier(waiting)
          carried, arrays = given or jax.tree.map(functools.partial(host_memory.row, i=row - run.first), stacks[j])
          trained_row, frozen_row = take_row(held[key], row), take_row(frozen[name][key], row)
          own = None if inputs is None else {j: inputs[j]}
          # Gradients of the layer, with its intermediate values kept or recomputed.
          if residuals:
            pullback = residuals[j].pull(arrays, (trained_row, frozen_row, carried, own, forward.ctx))
          else:
            _, pullback, _ = jax.vjp(self._layer(run, j, frozen_row, forward.ctx), trained_row, carried, own, has_aux=True)
          grads, cotangent, d_inputs[j] = pullback((cotangent, output_cotangents[key]))
          # Update the layer.
          state = None if states is None else take_row(states[part], row)
          tree = lambda x, key=key: {name: {key: x}}
          new, state, allowed, so_far, found[key] = self._part(
            part, tree(grads), tree(trained_row), state, allowed, norm, so_far, row
          )
          if states is not None:
            # Squares are summed from the written array, so that XLA updates in place instead of making a copy.
            held = {**held, key: jax.lax.optimization_barrier(put_row(held[key], new[name][key], row))}
            stored = squares_of_arrays(tree(take_row(held[key], row)), rows=False)
            found[key] = found[key]._replace(parameters=stored)
            states = {**states, part: put_row(states[part], state, row)}
        d_own = None if inputs is None else jnp.stack([d[j] for j, d in enumerate(d_inputs)])
        return (None if states is None else (held, states), cotangent, allowed, so_far), (found, d_own)

      # Without offloading, a scanned run slices its stacks inside the body, after the barrier.
      here = slice(run.first, run.first + run.count)
      apart = None if run.count > 1 and self.decoder.cfg.scan_layers and self.offload == "none" else stacks
      xs = run.first + jnp.arange(run.count), apart, output_cotangents, None if inputs is None else inputs[here]
      begin = written, cotangent, allowed, so_far
      (written, cotangent, allowed, so_far), (found, d_own) = self._scan(body, begin, xs, run, reverse=True)
      d_inputs.insert(0, None if d_own is None else d_own.reshape(-1, *d_own.shape[2:]))
      # Runs are processed from the last to the first, so each result goes in front of the others.
      for part in parts:
        stats[part].insert(0, found[part[1]])
      if written is not None:
        updated[name] = written[0]
        states |= written[1]
    # The parameters outside the stacks: add the gradients from before and after the layers.
    d_inputs = None if forward.per_layer is None else jnp.concatenate(d_inputs)
    # Go back through the embedding, and update the arrays outside the layers together.
    (d_before,) = forward.enter_pullback((cotangent, d_inputs))
    grads = self.step.in_stored_order(jax.tree.map(jnp.add, forward.outside, d_before))
    state = None if opt_state is None else take_state(opt_state, ())
    outside, state, allowed, _, found = self._part((), grads, take(params, ()), state, allowed, norm, so_far)
    stats[()] = [found]
    if opt_state is not None:
      params = {name: (outside | updated)[name] for name in params}
      opt_state = join_states([*(states[part] for part in self.optimizers if part), state])
    return params, opt_state, allowed, combined(stats)

  @jax.named_scope("optimizer")
  def _part(
    self,
    part: Part,
    grads: Tree,
    params: Tree,
    state: Tree,
    allowed: jax.Array,
    norm: Norm | None,
    so_far: SoFar,
    row: jax.Array | None = None,
  ) -> tuple[Tree, Tree, jax.Array, SoFar, PartStats]:
    """Update a part by its gradients, or measure them if ``state`` is None.

    Args:
      part: the part that the trees belong to; for a stacked part, one row of it.
      grads: gradients times the loss scale.
      params, state: parameters and optimizer state before the update.
      allowed, norm: as in ``backward``.
      so_far: sums over the parts visited before.
      row: int32 scalar, the row of a stacked part.

    Returns:
      The next parameters and optimizer state; True if the update was applied; ``so_far`` including this part; statistics.
    """
    step, masks = self.step, take(self.masks, part)
    # Unscale, cast and mask the gradients.
    if self.scale is not None:
      grads = jax.tree.map(lambda g: g.astype(jnp.float32) / self.scale, grads)
    grads = mask_row(jax.tree.map(lambda g: g.astype(step.grad_dtype), grads), masks, row)
    if state is None:  # constrain the sharding, so that each device sums the squares of one shard only
      share = self.decoder.cfg.rules.constrain
      grads = jax.tree.map(lambda g, p: share(g, *p.axes[row is not None :]), grads, take(self.spec, part))
    # The measuring pass needs only the squares.
    gradients = squares_of_arrays(grads, rows=False)
    if state is None:
      return params, None, allowed, so_far, PartStats(gradients)
    own = Squares(*map(by_row, gradients))
    allowed = allowed & jnp.all(own.finite)
    # Choose the norm and the limit for clipping.
    limit, clipped = step.clip, jnp.zeros((), bool)
    if step.shares and self.shares is not None:
      so_far = so_far.with_part(own, step.shares.of_row(self.shares, part, row))
      # The shares sum to at most 1, so the limit stays within the proof. A damaged checkpoint may have made them NaN.
      norm, limit = so_far.norm(), step.clip * jnp.sqrt(jnp.where(so_far.share < 1, so_far.share, 1.0))
    elif step.clip and not step.exact:
      norm, limit = own.norm(), step.layer_limit
    if norm is not None:
      clipped = norm.above(limit)
    # Update the part.
    update = PartUpdate(
      step, self.optimizers[part], self.number, self.rate, row,
      clipped=lambda grads: grads if norm is None else clip(grads, norm, limit),
      masked=lambda direction: direction if row is None else mask_row(direction, masks, row),
    )  # fmt: skip
    new = update(grads, state, params, allowed)
    stored = squares_of_arrays(new.params, rows=False) if row is None else None  # for a row, summed after it is written
    return (
      new.params,
      new.state,
      new.allowed,
      so_far,
      PartStats(gradients, clipped, new.finite, stored, new.peaks, new.survival),
    )
