"""The train step: a pure function of state and batch, the same for Linen, NNX and the plain tree.

The state is a pytree: {"step": int32, "params": tree, "opt_state": over the trained leaves, "loss_scale": with float16,
"gradient_shares": with ``clip: running``}.

No update that is not finite is taken over, in any step. Whether one is has to be known before its first number is written,
as the new state takes the old one's memory. So the step says how large the numbers are that it leaves: of parameters from
the pass that sums their norm, of the optimizer from the last look at it and every gradient since. From that and the gradient's
norm the next one proves that its update cannot leave its dtypes (``Optimizer.certainly_finite``). Where that is no proof
(enormous numbers, a state that nobody has looked at) the step does nothing and says so, and the loop takes the careful form of
it, which evaluates the update twice, once to look at it. Where the optimizer has no proof for ordinary numbers
(``Optimizer.usually_proved``) every step takes the careful form, which costs a tenth of a step on a GPU. A state that was
given, and every one before it is saved, is read as it is (``TrainProgram.lower_look``): one that is not finite after all is
told, and never saved.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from maxtext_like.layers import dropout
from maxtext_like.layers.context import PROBED
from maxtext_like.layers.moe.load_balance import LOAD
from maxtext_like.layers.param import in_stored_order
from maxtext_like.layers.partition import on_tpu
from maxtext_like.layers.probe import sinks
from maxtext_like.models.row_norms import (
  clip,
  largest_clipped,
  plain_squares,
  row_squares,
  split_squares,
  state_peaks,
  state_rows,
  sums_of_rows,
)
from maxtext_like.numerics import probe_statistics
from maxtext_like.training.objectives.objective import Objective
from maxtext_like.training.optimizers.optimizer import Optimizer
from maxtext_like.training.step import loss_scale, update_retention
from maxtext_like.training.step.rounding import StochasticRounding
from maxtext_like.training.step.router_bias import RouterBias
from maxtext_like.training.step.schedule import Schedule
from maxtext_like.training.step.trainable import Selection, merge

State = dict[str, Any]
Batch = dict[str, jax.Array]
Metrics = dict[str, Any]


class Sizes(NamedTuple):
  """Float32 scalars that a complete batch is divided by, each at least 1.

  Attributes:
    weight: ``Objective.weight``.
    tokens: positions that are no padding.
    rows: rows with such a position.
  """

  weight: jax.Array
  tokens: jax.Array
  rows: jax.Array


def _rows(batch: Batch) -> jax.Array:
  """Int32 scalar: rows that have a token."""
  return jnp.sum(jnp.any(batch["segments"] > 0, axis=-1))


UNKNOWN = np.full(2, np.inf, np.float32)  # ``known`` of a state that no step has left
NO_UPDATE = np.full(2, np.nan, np.float32)  # ``known`` of a step that returns the state unchanged and measures the loss


@dataclass(frozen=True, eq=False)
class TrainStep:
  """One update.

  Attributes:
    apply: the objective's call, through one of the faces.
    objective: what is minimised.
    selection: what is trained.
    optimizer: the direction of descent, without the learning rate, and the proof that an update is finite.
    schedule: the learning rate of a step.
    clip: largest global norm of the gradients; 0 turns clipping off.
    parts: microbatches that a batch is worked through in.
    grad_dtype: of the gradients as the optimizer sees them.
    router_bias: DeepSeek's balancing of experts without a gradient; None: none.
    probed_stacks: {stack: (repeats, layers of a row)} of a model whose layers are probed; None: none are.
    rounding: how updated parameters are rounded to their dtype; None: to nearest.
    summed_once: mesh axes that split rows and no parameter: over them the gradients of microbatches are added up once, behind
      the last one.
    survival: measures what the stored weights take of an update.
    dropout_seed: of the masks of dropout; None: there is none.
    careful: looks at an update that is not proved finite, instead of doing nothing.
    watch: x-ray's look at gradients and updates, (kind, tree) -> the same tree. With it an update is taken over whatever
      it holds, so that nothing hides behind the finiteness check, and the metrics have "watched", floats that carry every
      non-finite number of gradients and next state and are finite without one. None in every training run.
  """

  apply: Callable[..., tuple[jax.Array, jax.Array, dict[str, Any]]]
  objective: Objective
  selection: Selection
  optimizer: Optimizer
  schedule: Schedule
  clip: float
  parts: int
  grad_dtype: str
  router_bias: RouterBias | None = None
  probed_stacks: dict[str, tuple[int, int]] | None = None
  rounding: StochasticRounding | None = None
  summed_once: tuple[str, ...] = ()
  survival: bool = False
  dropout_seed: int | None = None
  careful: bool = True
  watch: Callable[[str, Any], Any] | None = None

  @property
  def backward_passes(self) -> int:
    """Of a step, or of each part of the batch."""
    return 1

  @property
  def forward_passes(self) -> int:
    """Of each part of the batch: one more where a loss first needs the load of the complete batch."""
    return 2 if self.parts > 1 and self.objective.decoder.router_losses[0].needs_batch_load else 1

  @property
  def _tells_large(self) -> bool:
    """Sums of squares tell numbers beyond 1e19 from infinite ones. So they do in the usual form of a rule that needs arrays
    whole: gradients that are not finite shall not take its careful form, which has the steps of all arrays in memory, and which
    a run may have no room for. Both sums are made in one pass there: a branch would have copies of all gradients."""
    return self.careful or self.watch is not None or self.optimizer.rule.whole

  def untouched(self, failed: str) -> bool:
    """Whether a step leaves the state as it was when its update is not taken over since "loss", "gradients", "parameters" or
    "optimizer" (their ``finite`` of ``__call__``) is not finite."""
    del failed
    return True

  def begun(self) -> State:
    """What the state of step 0 has besides, NumPy arrays: what a step remembers, and a run may lose and begin anew."""
    return {}

  def __call__(self, state: State, batch: Batch, known: jax.Array) -> tuple[State, Metrics]:
    """Trains on one batch.

    A non-finite loss, gradient or update leaves parameters and optimizer as they were, bit for bit, decided on the device.

    Args:
      state: training state.
      batch: what the objective wants (``Objective.batch``).
      known: float32 [2], what no parameter and no number of the optimizer exceeds: "known" of the step that left this
        state, or ``UNKNOWN``; or ``NO_UPDATE``: the state is returned unchanged, with the metrics of the batch.

    Returns:
      The next state, and metrics: float32 and int32 scalars; "known" for the next step; "usual", false where the state is
      the given one to the last bit and the careful form must take the step again; under "finite" bools: "loss", by row
      "gradients", "parameters" and "optimizer" of the update, taken over or not, and "state_parameters" (frozen ones too)
      and "state_optimizer" of the next state, seen or proved (see ``norms.row_labels`` and ``state_labels``); with probed
      survival also "update_survival", float32 [R] "arrived" and "intended" of ``update_survival.products``; with probed
      stacks also "numerics/SIDE/NAME/max" and ".../nonfinite", float32 [L]: forward values, their cotangents as the
      backward pass holds them (times the loss scale), and gradients of parameters.
    """
    params, frozen = self.selection.split(state["params"])
    scaling = state.get("loss_scale")
    grads, losses = self.gradients(params, frozen, self.keyed(batch, state["step"]), scaling["scale"] if scaling else None)
    loss = sum(losses["loss"].values())

    if self.probed_stacks:
      by_layer = probe_statistics.by_layer(grads, self.probed_stacks)
      losses["probes"] |= {"gradients": {"parameters": by_layer}}
    if self.watch:
      grads = self.watch("gradient", grads)
    looks_again = self.careful and not self.watch
    row_sums = row_squares if looks_again else split_squares if self._tells_large else plain_squares
    squares = row_sums(grads)
    norm, clipped = squares.norm(), jnp.zeros((), bool)
    if self.clip:
      clipped = norm.above(self.clip)
      grads = clip(grads, norm, self.clip)
    rate = self.schedule(state["step"])

    @jax.named_scope("optimizer")
    def update():
      direction, opt_state = self.optimizer.update(grads, state["opt_state"], params)
      direction = self.selection.mask_rows(direction)
      new = self.stored(self.moved(params, direction, rate), params, state["step"])
      survival = {}
      if self.survival and not self.watch:
        arrived, intended = map(sums_of_rows, update_retention.products(params, new, direction, rate))
        survival = {update_retention.NAME: {"arrived": arrived, "intended": intended}}
      return new, opt_state, survival

    finite = {"loss": jnp.isfinite(loss), "gradients": squares.finite}
    applied = finite["loss"] & jnp.all(finite["gradients"])
    usual = jnp.ones((), bool) if self.watch else ~jnp.any(jnp.isnan(known))
    applied = applied & usual
    unread = jnp.ones(squares.finite.shape, bool), jnp.ones(state_rows(state["opt_state"], params), bool)
    if self.watch:
      params, opt_state, survival = update()
    else:
      largest = jnp.minimum(squares.largest(), largest_clipped(self.clip) if self.clip else jnp.inf)
      certain, kept = self.optimizer.certainly_finite(largest, known[1], known[0], rate)

      def look():
        new_params, new_opt_state, _ = update()
        return row_squares(new_params).finite, jnp.isfinite(state_peaks(new_opt_state, params))

      if self.careful:
        finite["parameters"], finite["optimizer"] = jax.lax.cond(applied & ~certain, look, lambda: unread)
        applied = applied & jnp.all(finite["parameters"]) & jnp.all(finite["optimizer"])
      else:
        finite["parameters"], finite["optimizer"] = unread
        # A float16 overflow is what its scale is there for. Elsewhere an infinite sum may be one of finite numbers beyond
        # 1e19, which are clipped. Behind a step that did nothing no other does anything.
        certain = certain & ~jnp.any(jnp.isinf(squares.small))
        usual = jnp.all(jnp.isfinite(known)) & (certain | (~applied if scaling or self._tells_large else False))
        applied = applied & usual
      before = (params, state["opt_state"])
      *after, survival = update()
      params, opt_state = jax.tree.map(lambda new, old: jnp.where(applied, new, old), tuple(after), before)
    if self.router_bias:
      frozen = self.router_bias(frozen, losses["moe_load"], applied)

    new_params = merge(params, frozen)
    new_state = {**state, "step": state["step"] + usual, "params": new_params, "opt_state": opt_state}
    if scaling:
      scale = loss_scale.updated(scaling, applied)
      new_state["loss_scale"] = jax.tree.map(lambda new, old: jnp.where(usual, new, old), scale, scaling)
    sizes = row_sums(new_params)

    def seen():
      peaks = state_peaks(opt_state, params)
      return jnp.isfinite(peaks), jnp.max(peaks, initial=0.0)

    if self.watch:
      sound, largest_state = seen()
    else:
      proved = lambda: (unread[1], jnp.where(applied, jnp.maximum(kept, known[1]), known[1]))
      sound, largest_state = jax.lax.cond(certain, proved, seen) if self.careful else proved()
    # Plain sums are infinite for finite numbers beyond 1e19 too. Then nothing is known, and the next step is a careful one.
    whole = sizes.finite if self._tells_large else ~jnp.isnan(sizes.small)
    finite |= {"state_parameters": whole, "state_optimizer": sound}
    metrics = {
      "loss": loss,
      "grad_norm": norm.value,
      "param_norm": sizes.norm().value,
      "learning_rate": rate,
      "tokens": self.objective.tokens(batch),
      "clipped": clipped & applied,
      "skipped": ~applied,
      "known": jnp.where(usual, jnp.stack([sizes.largest(), largest_state]), jnp.inf),
      "usual": usual,
      "finite": finite,
    }
    if self.watch:
      metrics["watched"] = (squares, sizes, row_sums(opt_state))
    return new_state, metrics | survival | optional_metrics(losses, scaling)

  @jax.named_scope("parameters")  # by which ``what_to_try`` knows what overflows from moments that do
  def moved(self, params: Any, direction: Any, rate: jax.Array) -> Any:
    """Parameters ``rate`` times the direction further down, float32.

    Args:
      params, direction, rate: trees of the same structure, the second of float32, and a float32 scalar.
    """
    change = jax.tree.map(lambda d: rate * d, direction)
    if self.watch:
      change = self.watch("update", change)
    return jax.tree.map(lambda p, c: p.astype(jnp.float32) - c, params, change)

  @jax.named_scope("parameters")
  def stored(self, moved: Any, params: Any, step: jax.Array, row: jax.Array | None = None, begin: jax.Array | int = 0) -> Any:
    """Updated parameters in the dtypes that they are stored in.

    Args:
      moved: of the method of this name.
      params: before the update.
      step: int32 scalar, of the state.
      row: int32 scalar, which row of its stack the tree is; None: all of every stack.
      begin: as of ``StochasticRounding``.
    """
    if self.rounding:
      return self.rounding(moved, params, step, row, begin)
    return jax.tree.map(lambda x, p: x.astype(p.dtype), moved, params)

  def total(self, apply, params, batch: Batch, sizes: Sizes, scale, sink=None) -> tuple[jax.Array, dict[str, Any]]:
    """What is differentiated, a float32 scalar, and its terms.

    Args:
      apply: the objective's call.
      params: all of them.
      batch: a part of the complete one.
      sizes: divisors, those of the complete batch.
      scale: as of ``gradients``.
      sink: where cotangents at the probes go; empty or None: nothing is probed.
    """
    cotangent = (1.0 if scale is None else scale) / sizes.weight
    loss, _, aux = apply(params, batch, cotangent, sink)
    # A mean over the tokens of a microbatch counts by its share of the tokens, a mean over its rows by its share of the rows.
    share, share_of_rows = jnp.sum(batch["segments"] > 0) / sizes.tokens, _rows(batch) / sizes.rows
    by_row = self.objective.decoder.router_losses[0].by_row
    means = {name: value * (share_of_rows if name in by_row else share) for name, value in aux["means"].items()}
    total = loss / sizes.weight + sum(means.values())
    terms = {name: value / sizes.weight for name, value in aux["terms"].items()} | means
    out = {"loss": terms, "rescued": aux["rescued"], "probes": aux.get("probes", {})}
    if "moe_load" in aux:
      out["moe_load"] = aux["moe_load"] * share
    return total if scale is None else total * scale, jax.lax.stop_gradient(out)

  def sizes(self, batch: Batch) -> Sizes:
    """Of a complete batch."""
    counts = self.objective.weight(batch), jnp.sum(batch["segments"] > 0), _rows(batch)
    return Sizes(*(jnp.maximum(n, 1).astype(jnp.float32) for n in counts))

  def keyed(self, batch: Batch, step: jax.Array) -> Batch:
    """The batch with the keys of its rows, where there is dropout."""
    if self.dropout_seed is None:
      return batch
    return {**batch, dropout.ROWS: dropout.row_keys(self.dropout_seed, step, batch["segments"].shape[0])}

  def gradients(self, params, frozen, batch: Batch, scale: jax.Array | None) -> tuple[Any, dict[str, Any]]:
    """Gradients of the batch's loss in ``grad_dtype``, and its terms. Microbatches add up to the same, in float32.

    Args:
      params: the trained leaves.
      frozen: the others.
      batch: as in ``__call__``, ``keyed`` where dropout is wanted.
      scale: the loss is multiplied by it for the backward pass, and the gradients divided again; None: 1.

    Returns:
      Gradients, and {"loss": terms by name, "rescued", "moe_load" with experts, "probes" with probed stacks}.
    """
    sizes = self.sizes(batch)

    def scaled_loss(trained, batch, frozen, sizes, scale, of_batch):
      params, sink = trained
      return self.total(self.apply, merge(params, frozen), batch | of_batch, sizes, scale, sink)

    value_and_grad = jax.value_and_grad(scaled_loss, has_aux=True)
    layers = sum(repeats * period for repeats, period in (self.probed_stacks or {}).values())
    trained = (params, sinks(PROBED, (layers,)) if self.probed_stacks else {})
    if self.parts == 1:
      (_, out), (grads, cotangents) = value_and_grad(trained, batch, frozen, sizes, scale, {})
      seen = {"forward": out.pop("probes"), "backward": cotangents}
    else:
      of_batch = self._of_batch(params, frozen, batch, sizes)
      (out, grads), seen = self._accumulated(value_and_grad, trained, batch, frozen, sizes, scale, of_batch)
    out["probes"] = seen
    if scale is not None:
      grads = jax.tree.map(lambda g: g.astype(jnp.float32) / scale, grads)
    grads = jax.tree.map(lambda g: g.astype(self.grad_dtype), grads)
    return self.selection.mask_rows(self.in_stored_order(grads)), out

  def in_stored_order(self, grads: Any) -> Any:
    """Gradients of trained leaves, or of some of the parts of the model, on TPUs: see ``param.in_stored_order``."""
    if not on_tpu():
      return grads
    spec, _ = self.selection.split(self.objective.params())
    return in_stored_order(grads, {name: spec[name] for name in grads}, self.objective.decoder.cfg.rules)

  def _microbatches(self, batch: Batch) -> Batch:
    """Every array with a leading axis of microbatches. Row r is in microbatch r % parts, so that every microbatch is spread
    over all devices as the batch is."""
    return jax.tree.map(lambda x: jnp.moveaxis(x.reshape(-1, self.parts, *x.shape[1:]), 1, 0), batch)

  def _of_batch(self, params, frozen, batch: Batch, sizes: Sizes) -> Batch:
    """Arrays that every microbatch takes from the complete batch: its load, if a loss needs it.

    A load-balancing loss that is a product of two means over the batch is no sum over microbatches: the gradient of the mean
    probabilities is multiplied by the load of the complete batch, which no microbatch knows. The load has no gradient, so a
    forward pass over all microbatches finds it before the first gradient is taken. The result is that of one large batch.
    """
    if self.forward_passes == 1:
      return {}

    def add(load, part):
      _, _, aux = self.apply(merge(params, frozen), part)
      return load + aux[LOAD] * jnp.sum(part["segments"] > 0) / sizes.tokens, None

    split = self._microbatches(batch)
    (shape, _) = jax.eval_shape(lambda part: add(0.0, part), jax.tree.map(lambda x: x[0], split))
    with jax.named_scope("balance_load"):
      load, _ = jax.lax.scan(add, jnp.zeros(shape.shape, jnp.float32), split)
    return {LOAD: jax.lax.stop_gradient(load)}

  def _accumulated(self, value_and_grad, trained, batch: Batch, *given) -> tuple[tuple[dict[str, Any], Any], Any]:
    """Sums over the microbatches: (terms, gradients in float32), and what the probes saw.

    Args:
      value_and_grad: (trained, rows, *given) -> ((loss, terms), (gradients, cotangents at the probes)).
      trained: parameters, and where the probes' cotangents go.
      batch: of all microbatches.
      given: the same for all of them.
    """

    def sums(trained, split, *given):
      def add(total, part):
        (_, out), (grads, cotangents) = value_and_grad(trained, part, *given)
        seen = {"forward": out.pop("probes"), "backward": cotangents}
        sums = jax.tree.map(lambda t, x: t + x.astype(t.dtype), total[0], (out, grads))
        return (sums, jax.tree.map(probe_statistics.joined, total[1], seen)), None

      (_, out), (_, cotangents) = jax.eval_shape(value_and_grad, trained, jax.tree.map(lambda x: x[0], split), *given)
      seen = {"forward": out.pop("probes"), "backward": cotangents}
      zeros, unseen = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), (out, seen))
      zero_grads = jax.tree.map(lambda p: jnp.zeros_like(p, jnp.float32), trained[0])
      return jax.lax.scan(add, ((zeros, zero_grads), unseen), split)[0]

    split = self._microbatches(batch)
    if not self.summed_once:
      return sums(trained, split, *given)

    def own_sums(*arguments):
      total, seen = sums(*arguments)
      over = self.summed_once
      return jax.lax.psum(total, over), jax.tree.map(lambda x: probe_statistics.joined_over(x, over), seen)

    # To the partitioner the other axes, if there are any; nothing inside is added up over these but in the last line.
    mesh = jax.sharding.get_abstract_mesh()
    manual = {axis for axis, size in mesh.shape.items() if size == 1 or axis in self.summed_once}
    specs = (PartitionSpec(), PartitionSpec(None, self.summed_once), *(PartitionSpec() for _ in given))
    on_devices = jax.shard_map(own_sums, in_specs=specs, out_specs=PartitionSpec(), axis_names=manual, check_vma=False)
    return on_devices(trained, split, *given)


def optional_metrics(losses: dict[str, Any], scaling: loss_scale.LossScale | None) -> Metrics:
  """Metrics of what not every model has: terms of the loss beside the cross entropy, experts, float16."""
  terms = losses["loss"]
  metrics: Metrics = {}
  if len(terms) > 1:
    metrics = dict(terms)
  if "moe_load" in losses:
    load = losses["moe_load"]  # [layers, E], 1 / E each when balanced
    metrics["moe_load_max"] = jnp.max(load) * load.shape[-1]
    metrics["moe_load_min"] = jnp.min(load) * load.shape[-1]
  metrics["rescued"] = losses["rescued"]
  if scaling:
    metrics["loss_scale"] = scaling["scale"]
  return metrics | probe_statistics.metrics(losses["probes"])
