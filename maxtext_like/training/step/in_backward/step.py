"""The train step that updates each layer as soon as the backward pass has its gradient, so that no two layers' gradients exist
at a time (``optimizer_in_backward``; LOMO, Lv et al. 2023, arXiv:2306.09782).

The forward pass keeps what each layer reads, and of the layer what ``remat_policy`` says, on the device or, by
``remat_offload``, in the host's memory. The backward pass goes through the layers from the last one to the first: it computes
again what was not kept, differentiates the layer, updates it where it lies, and hands the cotangent of what it read on. What
lies in no stack (embedding, head, final norm, vision tower) is updated last, when the embedding's gradient is complete.

A norm of all gradients, which clipping asks for (``clip: exact``) and float16's loss scale too, is not known before the last of
them. The backward pass then runs twice: once to measure, once to update, so that gradients which are not finite leave all as it
was, as in the ordinary step. In a single pass a layer whose loss, gradients or update are not finite is not updated, and what
follows neither: the layers behind it have moved already. So they have in two passes where it is the update that is not finite.
"""

import dataclasses
import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from maxtext_like.checkpoint.compatibility import GRADIENT_SHARES
from maxtext_like.layers.block import Block, Carry
from maxtext_like.layers.context import Aux, Context
from maxtext_like.layers.decoder import Decoder
from maxtext_like.layers.partition import as_declared
from maxtext_like.layers.stack import Stack
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
from maxtext_like.training.step.in_backward.gradient_shares import GradientShares
from maxtext_like.training.step.in_backward.part_stats import Seen, by_row, together
from maxtext_like.training.step.in_backward.part_update import PartUpdate
from maxtext_like.training.step.in_backward.residuals import Residuals
from maxtext_like.training.step.train_step import Batch, Metrics, State, TrainStep, optional_metrics
from maxtext_like.training.step.trainable import mask_row, merge

Tree = Any
Result = Callable[[Any], tuple[jax.Array, dict]]


@dataclass(frozen=True, eq=False)
class _Ran(Decoder):
  """A decoder whose layers have run: ``hidden`` hands out what came of them."""

  result: Result | None = None

  def hidden(self, p: dict, batch: dict, *given: Any, **named: Any) -> tuple[jax.Array, dict]:
    del batch, given, named
    assert self.result is not None
    return self.result(p)


class _Run(NamedTuple):
  """Equal rows of a stack, run one after another: their layers, and which rows they are."""

  stack: Stack
  layers: tuple[Block, ...]
  first: int
  count: int


class _Forward(NamedTuple):
  """What the backward pass starts from.

  Attributes:
    out: terms of the loss and what else ``TrainStep.total`` hands out.
    read: of each run, what its layers read: a carry for each layer of a row, every leaf with a leading axis of rows.
    kept: of each run, the arrays that each layer of a row keeps besides, with a leading axis of rows.
    residuals: of each run, what these are of each layer's pull-back; nothing where layers keep nothing.
    last: cotangent of the last carry.
    handed_out: of each run, cotangents of the floats that its layers handed out.
    outside: gradients of what lies in no stack, as far as it comes after the layers.
    pull_enter: cotangents of the first carry and of the layers' own inputs to the gradients of what comes before the layers.
    ctx: of the batch.
    per_layer: the layers' own inputs [L, B, T, P] or None.
  """

  out: dict[str, Any]
  read: list[list[Carry]]
  kept: list[list[list[jax.Array]]]
  residuals: list[list[Residuals]]
  last: Carry
  handed_out: list[dict[str, Aux]]
  outside: Tree
  pull_enter: Callable[..., Any]
  ctx: Context
  per_layer: jax.Array | None


@dataclass(frozen=True, eq=False)
class StepInBackward(TrainStep):
  """One update, layer by layer. ``optimizer`` is a ``ByLayer``.

  Attributes:
    clip_by: "exact": by the norm of all gradients; "running": by what that is to be expected to be, of the layers that the
      backward pass has been through and the shares that they had of it in the steps before; "layer": by that of each layer's,
      and of those of all that lies in no stack.
  """

  clip_by: str = "exact"

  @property
  def exact(self) -> bool:
    """Gradients are clipped by the norm of all, which in float16 a first pass knows anyway."""
    return self.clip > 0 and (self.clip_by == "exact" or (self.clip_by == "running" and self._measures_first))

  @property
  def _measures_first(self) -> bool:
    """Two passes, whatever gradients are clipped by."""
    return self.objective.decoder.precision.dtype == "float16"

  @functools.cached_property
  def shares(self) -> GradientShares | None:
    """What is remembered in ``gradient_shares``, where it clips by a running norm."""
    if not self.clip or self.clip_by != "running" or self.exact:
      return None
    return GradientShares.of(self.objective.decoder, self.trained)

  def begun(self) -> State:
    return {GRADIENT_SHARES: self.shares.first} if self.shares else {}

  @functools.cached_property
  def trained(self) -> dict[Part, np.ndarray]:
    """Which rows of a part have a gradient, bool [rows]; of what lies in no stack bool [1]."""
    masks, rows = self.selection.masks, {s.name: s.repeats for s in self.objective.decoder.stacks}
    any_of = lambda part: functools.reduce(np.logical_or, jax.tree.leaves(take(masks, part)), np.zeros((), bool))
    return {part: np.broadcast_to(any_of(part), rows[part[0]] if part else 1) for part in parts_of(masks)}

  @property
  def layer_limit(self) -> float:
    """The largest norm of a layer's gradients where each is clipped by its own. Layers that are all at theirs have ``clip``
    together: Adam divides by what it remembers, and would learn the less the longer from large gradients of the first steps
    that each layer kept to itself."""
    return self.clip / sum(int(rows.sum()) for rows in self.trained.values()) ** 0.5

  @property
  def backward_passes(self) -> int:
    """Of a step: one that measures first, where that is asked for."""
    return 2 if self.exact or self._measures_first else 1

  def untouched(self, failed: str) -> bool:
    """A second pass updates nothing where gradients are not finite; numbers that the update makes are seen layer by layer, in
    the careful form, which looks for them."""
    return failed == "loss" or (failed == "gradients" and self.backward_passes == 2)

  def __call__(self, state: State, batch: Batch, known: jax.Array) -> tuple[State, Metrics]:
    """As ``TrainStep`` does, but that a single pass that is not applied may have updated the layers behind the one that was not
    finite.

    How large gradients are is not known before the first layer is updated, but what they are clipped to is: from that every
    update is proved finite, or nothing is done. The careful form looks at each before it writes it.
    """
    if self.watch:  # an x-ray looks at all gradients together
      new, metrics = super().__call__({**state, "opt_state": host_memory.fetched(state["opt_state"])}, batch, known)
      return {**new, "opt_state": host_memory.returned(new["opt_state"], state["opt_state"])}, metrics
    params, frozen = self.selection.split(state["params"])
    scaling = state.get("loss_scale")
    pass_ = _Pass(self, state["step"], scaling["scale"] if scaling else None, state.get(GRADIENT_SHARES))
    forward = pass_.forward(params, frozen, batch)
    losses = forward.out
    loss = sum(losses["loss"].values())
    norm, squares, kept = None, None, None
    usual = ~jnp.any(jnp.isnan(known))
    if not self.careful:
      certain, kept = self.optimizer.certainly_finite(jnp.float32(largest_clipped(self.clip)), known[1], known[0], pass_.rate)
      usual = jnp.all(jnp.isfinite(known)) & certain
    alive = jnp.isfinite(loss) & usual
    if self.backward_passes == 2:
      _, _, _, seen = pass_.backward(forward, params, frozen, None, alive, None)
      squares = Squares(*map(by_row, seen.gradients))
      alive, norm = alive & jnp.all(squares.finite), squares.norm() if self.exact else None
      # Where the second pass writes, the first one has read.
      params, opt_state, alive = jax.lax.optimization_barrier((params, state["opt_state"], alive))
    else:
      opt_state = state["opt_state"]
    new_params, new_opt_state, applied, seen = pass_.backward(forward, params, frozen, opt_state, alive, norm)
    updating = Squares(*map(by_row, seen.gradients))
    squares = updating if squares is None else squares
    if self.router_bias:
      frozen = self.router_bias(frozen, losses["moe_load"], applied)
    stored = map(merge, seen.parameters or (), squares_of_arrays(frozen, rows=True))
    total, sizes = squares.norm(), Squares(*map(by_row, stored))
    new_state = {"step": state["step"] + usual, "params": merge(new_params, frozen), "opt_state": new_opt_state}
    if scaling:
      scale = loss_scale.updated(scaling, applied)
      new_state["loss_scale"] = jax.tree.map(lambda new, old: jnp.where(usual, new, old), scale, scaling)
    if self.shares:
      new_state[GRADIENT_SHARES] = self.shares.updated(state[GRADIENT_SHARES], seen.gradients, applied)
    # Of two passes that are compiled apart, one may overflow alone.
    finite = {"loss": jnp.isfinite(loss), "gradients": squares.finite & updating.finite, "state_parameters": sizes.finite}
    sound = jnp.ones(state_rows(state["opt_state"], params), bool)  # of what is not finite nothing is written
    if kept is None:
      peaks = peaks_of_rows(seen.peaks, state["opt_state"], params)
      finite |= {"parameters": by_row(seen.updated), "optimizer": jnp.isfinite(peaks), "state_optimizer": sound}
      known = jnp.where(applied, jnp.stack([sizes.largest(), jnp.max(peaks, initial=0.0)]), jnp.inf)
    else:
      finite |= {"parameters": jnp.ones(squares.finite.shape, bool), "optimizer": sound, "state_optimizer": sound}
      known = jnp.where(usual, jnp.stack([sizes.largest(), jnp.maximum(kept, known[1])]), jnp.inf)
    clipped = total.above(self.clip) if self.exact else jnp.any(by_row(seen.clipped))
    metrics = {
      "loss": loss,
      "grad_norm": total.value,
      "param_norm": sizes.norm().value,
      "learning_rate": pass_.rate,
      "tokens": self.objective.tokens(batch),
      "clipped": clipped & applied,
      "skipped": ~applied,
      "known": known,
      "usual": usual,
      "finite": finite,
    }
    if seen.survival is not None:
      metrics[update_retention.NAME] = dict(zip(("arrived", "intended"), map(by_row, seen.survival), strict=True))
    return new_state, metrics | optional_metrics(losses, scaling)


class _Pass:
  """The passes of one step."""

  def __init__(self, step: StepInBackward, number: jax.Array, scale: jax.Array | None, shares: jax.Array | None):
    """Of a step at the state's number (int32 scalar), the loss times ``scale``; shares: its ``gradient_shares``."""
    self.step, self.number, self.scale, self.shares = step, number, scale, shares
    self.rate = step.schedule(number)
    assert isinstance(step.optimizer, ByLayer)
    self.optimizers = step.optimizer.parts
    self.masks = step.selection.masks
    self.spec, _ = step.selection.split(step.objective.params())
    decoder = self.decoder = step.objective.decoder
    # "full" needs no remat: a layer is differentiated where its turn is, and nothing of it was kept.
    self.keeps = decoder.cfg.remat_policy != "full"
    # What is kept leaves this loop and comes back to that of the backward pass here, so no policy has to see to where it lies.
    self.offload = decoder.cfg.remat_offload
    policy = decoder.cfg.remat_policy if self.keeps else "none"
    self.layers = dataclasses.replace(decoder, cfg=dataclasses.replace(decoder.cfg, remat_policy=policy, remat_offload="none"))
    self.runs = []
    for s in decoder.stacks:
      first = 0
      for count, layers in s.split(decoder.layers):
        self.runs.append(_Run(s, layers, first, count))
        first += count

  def _scan(self, body: Callable[..., Any], carry: Any, xs: Any, run: _Run, *, reverse: bool = False) -> Any:
    return jax.lax.scan(body, carry, xs, run.count, reverse=reverse, unroll=1 if self.decoder.cfg.scan_layers else run.count)

  def forward(self, params: Tree, frozen: Tree, batch: Batch) -> _Forward:
    """The loss, and its cotangents behind the last layer.

    Args:
      params, frozen: as ``Selection.split`` gives them.
      batch: as in ``TrainStep.__call__``.
    """
    step, decoder = self.step, self.decoder
    ctx = decoder.context(batch)
    outside, kept = take(params, ()), take(frozen, ())

    def enter(outside):
      carry, per_layer, first = decoder.enter(merge(outside, kept), batch, ctx)
      return (carry, per_layer), first

    (carry, per_layer), pull_enter, first = jax.vjp(enter, outside, has_aux=True)
    read, saved, floats, others = [], [], [], []
    residuals: list[list[Residuals]] = []
    for run in self.runs:
      name, shapes = run.stack.name, []
      residuals.append(shapes)

      def body(carry, row, run=run, shapes=shapes):
        carries, arrays, found, rest = [], [], {}, {}
        mine, theirs, inputs = jax.tree.map(as_declared, row)
        shapes.clear()  # a loop may be traced twice
        for j in range(len(run.layers)):
          key, own = f"layer_{j}", None if inputs is None else {j: inputs[j]}
          carries.append(self._put_away(run, carry, "layer_inputs"))
          call = self._layer(run, j, theirs[key], ctx)
          if self.keeps:
            given = (mine[key], theirs[key], carry, own, ctx)
            (carry, found[key]), pull, rest[key] = jax.vjp(call, mine[key], carry, own, has_aux=True)
            shape, array = Residuals.of(pull, given)
            shapes.append(shape)
            # Else XLA on a GPU multiplies twice: once for what reads a product next, and once into the stack (jaxlib 0.11).
            array = jax.lax.optimization_barrier(array)
            arrays.append(self._put_away(run, array, "kept"))
          else:
            (carry, found[key]), rest[key] = call(mine[key], carry, own)
        return carry, (carries, arrays, found, rest)

      inputs = decoder.rows(run.stack, {name: None}, per_layer)["per_layer"]
      rows = jax.tree.map(lambda x, run=run: x[run.first : run.first + run.count], (params[name], frozen[name], inputs))
      carry, found = self._scan(body, carry, rows, run)
      for kind, value in zip((read, saved, floats, others), found, strict=True):
        kind.append(value)

    def leave(outside, carry, floats):
      found: dict[str, list[dict[str, Aux]]] = {}
      for run, f, o in zip(self.runs, floats, others, strict=True):
        found.setdefault(run.stack.name, []).append(merge(f, o))
      collected = [(s, jax.tree.map(lambda *x: jnp.concatenate(x), *found[s.name])) for s in decoder.stacks]
      given = {f.name: getattr(decoder, f.name) for f in dataclasses.fields(decoder)}
      ran = _Ran(**given, result=lambda p: decoder.leave(p, carry, collected, first, ctx))
      return step.total(step.objective.with_decoder(ran), merge(outside, kept), batch, step.sizes(batch), self.scale)

    total, pull_leave, out = jax.vjp(leave, outside, carry, floats, has_aux=True)
    d_outside, last, handed_out = pull_leave(jnp.ones_like(total))
    return _Forward(out, read, saved, residuals, last, handed_out, d_outside, pull_enter, ctx, per_layer)

  def _put_away(self, run: _Run, arrays: Tree, what: str) -> Tree:
    """Arrays that wait for the backward pass, where ``remat_offload`` says; of layers in no loop on the device."""
    away = run.count > 1 and self.offload in (what, "all")
    return jax.device_put(arrays, jax.memory.Space.Host) if away else arrays

  def _layer(self, run: _Run, j: int, theirs: Tree, ctx: Context) -> Callable[..., Any]:
    """Layer j of a row as a function of what has gradients: (its trained parameters, the carry, its own input {j: [B, T, P]} or
    None) -> ((the carry, floats that it hands out), what it hands out besides)."""

    def call(mine, carried, own):
      row = {"params": {f"layer_{j}": merge(mine, theirs)}, "cache": None, "per_layer": own, "probes": None}
      carried, aux = self.layers.run_layer(run.stack, j, run.layers[j], carried, row, ctx, isolated=self.keeps)
      floats, others = _floats(aux)
      return (carried, floats), others

    return call

  def backward(
    self, forward: _Forward, params: Tree, frozen: Tree, opt_state: Tree, alive: jax.Array, norm: Norm | None
  ) -> tuple[Tree, Tree, jax.Array, Seen]:
    """From the last layer to the first, and what lies in none.

    Args:
      forward: of the same parameters.
      params, frozen: as ``Selection.split`` gives them.
      opt_state: of the optimizer; None: nothing is updated, the gradients are measured.
      alive: bool scalar: updates may be written.
      norm: of all gradients, that they are clipped by; None: not by it.

    Returns:
      The next parameters and optimizer state (the given ones where nothing is updated), whether everything was updated, and
      what was seen, as trees of all parts.
    """
    cotangent, d_inputs = forward.last, []
    updated: dict[str, Tree] = {}  # by stack, and the state of its parts
    states: dict[Part, Tree] = {}
    seen: dict[Part, list[Seen]] = {part: [] for part in self.optimizers}
    so_far = SoFar.nothing()
    made = zip(self.runs, forward.read, forward.kept, forward.residuals, forward.handed_out, strict=True)
    for run, read, kept, residuals, handed_out in reversed([*made]):
      name = run.stack.name
      parts = [(name, f"layer_{j}") for j in range(len(run.layers))]
      inputs = self.decoder.rows(run.stack, {name: None}, forward.per_layer)["per_layer"]
      written = None
      if opt_state is not None:
        written = (
          updated.get(name, params[name]),
          {part: states[part] if part in states else take_state(opt_state, part) for part in parts},
        )

      stacks = [(x, kept[j] if kept else []) for j, x in enumerate(read)]  # what each layer of a row reads and kept

      def body(carry, x, run=run, name=name, parts=parts, residuals=residuals, stacks=stacks):
        written, cotangent, alive, so_far = carry
        row, apart, handed_out, inputs = x
        held, states = written or (params[name], None)
        found: dict[str, Seen] = {}
        d_inputs: list[Any] = [None] * len(parts)
        for j in reversed(range(len(parts))):
          part, key = parts[j], parts[j][1]
          # Not before the layer behind it is through and written: else weights of all layers of a row are read at its begin,
          # their gradients kept until its end, and what is made here is merged with the forward pass, which would keep it.
          # Moments on the host neither: copies of several layers would be under way, and on the device, at a time.
          # What a layer reads is taken out of its stack behind it, by whatever reads it: before it that would be a copy. Where
          # there is no loop there are no stacks, and XLA would make them. On its way from the host nothing holds it up.
          given = None if apart is None else host_memory.fetched(apart[j])
          waits = given, cotangent, alive, row, held, states
          given, cotangent, alive, row, held, states = jax.lax.optimization_barrier(waits)
          carried, arrays = given or jax.tree.map(functools.partial(host_memory.row, i=row - run.first), stacks[j])
          mine, theirs = take_row(held[key], row), take_row(frozen[name][key], row)
          own = None if inputs is None else {j: inputs[j]}
          if residuals:
            pull = residuals[j].pull(arrays, (mine, theirs, carried, own, forward.ctx))
          else:
            _, pull, _ = jax.vjp(self._layer(run, j, theirs, forward.ctx), mine, carried, own, has_aux=True)
          grads, cotangent, d_inputs[j] = pull((cotangent, handed_out[key]))
          state = None if states is None else take_row(states[part], row)
          tree = lambda x, key=key: {name: {key: x}}
          new, state, alive, so_far, found[key] = self._part(part, tree(grads), tree(mine), state, alive, norm, so_far, row)
          if states is not None:
            # Looked at where it lies: the update is made there, not beside it and then copied.
            held = {**held, key: jax.lax.optimization_barrier(put_row(held[key], new[name][key], row))}
            stored = squares_of_arrays(tree(take_row(held[key], row)), rows=False)
            found[key] = found[key]._replace(parameters=stored)
            states = {**states, part: put_row(states[part], state, row)}
        d_own = None if inputs is None else jnp.stack([d[j] for j, d in enumerate(d_inputs)])
        return (None if states is None else (held, states), cotangent, alive, so_far), (found, d_own)

      here = slice(run.first, run.first + run.count)
      apart = None if run.count > 1 and self.decoder.cfg.scan_layers and self.offload == "none" else stacks
      xs = run.first + jnp.arange(run.count), apart, handed_out, None if inputs is None else inputs[here]
      begin = written, cotangent, alive, so_far
      (written, cotangent, alive, so_far), (found, d_own) = self._scan(body, begin, xs, run, reverse=True)
      d_inputs.insert(0, None if d_own is None else d_own.reshape(-1, *d_own.shape[2:]))
      for part in parts:
        seen[part].insert(0, found[part[1]])
      if written is not None:
        updated[name] = written[0]
        states |= written[1]
    d_inputs = None if forward.per_layer is None else jnp.concatenate(d_inputs)
    (d_before,) = forward.pull_enter((cotangent, d_inputs))
    grads = self.step.in_stored_order(jax.tree.map(jnp.add, forward.outside, d_before))
    state = None if opt_state is None else take_state(opt_state, ())
    outside, state, alive, _, found = self._part((), grads, take(params, ()), state, alive, norm, so_far)
    seen[()] = [found]
    if opt_state is not None:
      params = {name: (outside | updated)[name] for name in params}
      opt_state = join_states([*(states[part] for part in self.optimizers if part), state])
    return params, opt_state, alive, together(seen)

  @jax.named_scope("optimizer")
  def _part(
    self,
    part: Part,
    grads: Tree,
    params: Tree,
    state: Tree,
    alive: jax.Array,
    norm: Norm | None,
    so_far: SoFar,
    row: jax.Array | None = None,
  ) -> tuple[Tree, Tree, jax.Array, SoFar, Seen]:
    """Updates a part by its gradients, or measures them where ``state`` is None.

    Args:
      part: of which the trees are; of a stacked one a row.
      grads: as they were differentiated, times the loss scale.
      params, state: before the update.
      alive, norm: as in ``backward``.
      so_far: of the parts before.
      row: int32 scalar, which one.

    Returns:
      What is stored next, of parameters and optimizer; whether the update, if any, was taken over; ``so_far`` with this part;
      what was seen.
    """
    step, masks = self.step, take(self.masks, part)
    if self.scale is not None:
      grads = jax.tree.map(lambda g: g.astype(jnp.float32) / self.scale, grads)
    grads = mask_row(jax.tree.map(lambda g: g.astype(step.grad_dtype), grads), masks, row)
    if state is None:  # nothing but its squares says what a device needs of a sum: its own part, not all
      share = self.decoder.cfg.rules.constrain
      grads = jax.tree.map(lambda g, p: share(g, *p.axes[row is not None :]), grads, take(self.spec, part))
    gradients = squares_of_arrays(grads, rows=False)
    if state is None:
      return params, None, alive, so_far, Seen(gradients)
    own = Squares(*map(by_row, gradients))
    alive = alive & jnp.all(own.finite)
    limit, clipped = step.clip, jnp.zeros((), bool)
    if step.shares and self.shares is not None:
      so_far = so_far.with_part(own, step.shares.of_row(self.shares, part, row))
      # A proof holds by it: no sum of shares is above 1, nor one that a damaged checkpoint made NaN.
      norm, limit = so_far.norm(), step.clip * jnp.sqrt(jnp.where(so_far.share < 1, so_far.share, 1.0))
    elif step.clip and not step.exact:
      norm, limit = own.norm(), step.layer_limit
    if norm is not None:
      clipped = norm.above(limit)
    update = PartUpdate(
      step, self.optimizers[part], self.number, self.rate, row,
      clipped=lambda grads: grads if norm is None else clip(grads, norm, limit),
      masked=lambda direction: direction if row is None else mask_row(direction, masks, row),
    )  # fmt: skip
    new = update(grads, state, params, alive)
    stored = squares_of_arrays(new.params, rows=False) if row is None else None  # of a row once it is written
    return new.params, new.state, new.alive, so_far, Seen(gradients, clipped, new.finite, stored, new.peaks, new.survival)


def _floats(aux: Any) -> tuple[Any, Any]:
  """What layers handed out, as what has a gradient and what has none, with None in the place of the other."""
  pick = lambda wanted: jax.tree.map(lambda x: x if jnp.issubdtype(x.dtype, jnp.floating) == wanted else None, aux)
  return pick(True), pick(False)
