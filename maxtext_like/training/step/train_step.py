"""The train step: a pure function of state and batch, the same for Linen, NNX and the plain parameter tree.

The state is a pytree: {"step": int32, "params": tree, "opt_state": state of the trained leaves}, with "loss_scale" for
float16 and "gradient_shares" for ``clip: running``.

No step applies a non-finite update. The new state reuses the memory of the old one, so the step must know that an update is
finite before it writes the first number. The step therefore returns a bound on the magnitude of all numbers that it leaves:
for parameters from the pass that computes their norm, for the optimizer state from the last full check and all gradients
since then. The next step uses this bound and its gradient norm to prove that the update stays within the range of its dtypes
(``Optimizer.certainly_finite``). There are two compiled forms:

- The fast form applies an update that is proved finite. Otherwise it leaves the state unchanged and sets "decided" to False.
  The loop then repeats the step in the checked form. This happens for very large numbers and for an unchecked state.
- The checked form evaluates an unproved update twice: once to check it, once to apply it. It costs a tenth more on a GPU.
  Every step takes it if the optimizer cannot prove ordinary updates finite (``Optimizer.usually_proved``).

A restored state, and each state before it is saved, is checked number by number (``TrainProgram.lower_check``).
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
from maxtext_like.training.optimizers.schedule import Schedule
from maxtext_like.training.step import loss_scale, update_retention
from maxtext_like.training.step.rounding import StochasticRounding
from maxtext_like.training.step.router_bias import RouterBias
from maxtext_like.training.step.trainable import Selection, merge

State = dict[str, Any]
Batch = dict[str, jax.Array]
Metrics = dict[str, Any]


class Sizes(NamedTuple):
  """Divisors of a complete batch: float32 scalars, each at least 1.

  Attributes:
    weight: ``Objective.weight``.
    tokens: number of positions that are not padding.
    rows: number of rows with at least one such position.
  """

  weight: jax.Array
  tokens: jax.Array
  rows: jax.Array


def _rows(batch: Batch) -> jax.Array:
  """Int32 scalar: number of rows with at least one token."""
  return jnp.sum(jnp.any(batch["segments"] > 0, axis=-1))


UNKNOWN = np.full(2, np.inf, np.float32)  # ``magnitude_bound`` for a state whose magnitudes are unknown
NO_UPDATE = np.full(
  2, np.nan, np.float32
)  # ``magnitude_bound`` that makes a step measure the loss and leave the state unchanged


@dataclass(frozen=True, eq=False)
class TrainStep:
  """One update of the parameters.

  Attributes:
    apply: the objective's call, through the selected module API.
    objective: the loss that is minimized.
    selection: the trained parameters.
    optimizer: computes the descent direction, without the learning rate, and proves that an update is finite.
    schedule: maps the step index to the learning rate.
    clip: largest global norm of the gradients; 0 turns clipping off.
    parts: number of microbatches of a batch.
    grad_dtype: dtype of the gradients that the optimizer receives.
    router_bias: DeepSeek's load balancing without an auxiliary loss; None turns it off.
    probed_stacks: {stack: (repeats, layers of a row)} if layer statistics are recorded; None if not.
    rounding: rounds updated parameters to their dtype; None rounds to nearest.
    summed_once: mesh axes that split rows but no parameter. Gradients of microbatches are summed over these axes once,
      after the last microbatch.
    survival: measure how much of each update survives rounding to the stored dtype.
    dropout_seed: seed of the dropout masks; None without dropout.
    checked: compile the checked form, which checks an unproved update instead of leaving the state unchanged.
    watch: hook of the x-ray: (kind, tree) -> the same tree, called for gradients and updates. With a hook, a non-finite
      update is applied, so that the x-ray sees every number. The metrics then have "watched": floats that depend on every
      non-finite number of the gradients and the next state. None in every training run.
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
  checked: bool = True
  watch: Callable[[str, Any], Any] | None = None

  @property
  def backward_passes(self) -> int:
    """Number of backward passes of each microbatch."""
    return 1

  @property
  def forward_passes(self) -> int:
    """Number of forward passes of each microbatch: 2 if a loss first needs the load of the complete batch, otherwise 1."""
    return 2 if self.parts > 1 and self.objective.decoder.router_losses[0].needs_batch_load else 1

  @property
  def _detects_overflow(self) -> bool:
    """Return True if sums of squares must distinguish finite numbers beyond 1e19 from infinite ones.

    The checked form and the x-ray need this. So does the fast form of an optimizer rule that needs complete arrays: its
    checked form holds the updates of all arrays in memory, so a non-finite gradient must not trigger it. Both sums are then
    made in one pass, because a branch would copy all gradients.
    """
    return self.checked or self.watch is not None or self.optimizer.rule.whole

  def untouched(self, failed: str) -> bool:
    """Return True if a rejected update leaves the complete state unchanged.

    Args:
      failed: which part was not finite: "loss", "gradients", "parameters" or "optimizer", as in ``__call__``.
    """
    del failed
    return True

  def extra_state(self) -> State:
    """Return additional state entries at step 0, as NumPy arrays. They start again if a checkpoint lacks them."""
    return {}

  def __call__(self, state: State, batch: Batch, magnitude_bound: jax.Array) -> tuple[State, Metrics]:
    """Trains on one batch.

    A non-finite loss, gradient or update leaves parameters and optimizer state unchanged, bit for bit. The device decides.

    Args:
      state: training state.
      batch: arrays of ``Objective.batch``.
      magnitude_bound: float32 [2], upper bounds on the magnitude of all parameters and of all optimizer numbers:
        "magnitude_bound" from the
        metrics of the previous step, or ``UNKNOWN``. With ``NO_UPDATE`` the state is returned unchanged, with the metrics
        of the batch.

    Returns:
      The next state and the metrics: float32 and int32 scalars, and
        "magnitude_bound": bounds for the next step.
        "decided": False if the state is unchanged, bit for bit, and the step must be repeated in the checked form.
        "finite": bools: "loss"; per row "gradients"; per row "parameters" and "optimizer" of the update, applied or not;
          "state_parameters" (with frozen ones) and "state_optimizer" of the next state, checked or proved. See
          ``row_norms.row_labels`` and ``state_labels``.
        "update_survival", with ``survival``: float32 [R] "arrived" and "intended" of ``update_retention.products``.
        "numerics/SIDE/NAME/max" and ".../nonfinite", with ``probed_stacks``: float32 [L] of forward values, of their
          cotangents (times the loss scale), and of parameter gradients.
    """
    # 1. Loss and gradients of the trained parameters.
    params, frozen = self.selection.split(state["params"])
    scaling = state.get("loss_scale")
    grads, losses = self.gradients(params, frozen, self.keyed(batch, state["step"]), scaling["scale"] if scaling else None)
    loss = sum(losses["loss"].values())

    # Statistics per layer and arrays to watch are read before clipping changes the gradients.
    if self.probed_stacks:
      by_layer = probe_statistics.by_layer(grads, self.probed_stacks)
      losses["probes"] |= {"gradients": {"parameters": by_layer}}
    if self.watch:
      grads = self.watch("gradient", grads)
    # 2. Global norm and clipping. The row sums also show which rows are finite.
    checks_update = self.checked and not self.watch
    row_sums = row_squares if checks_update else split_squares if self._detects_overflow else plain_squares
    squares = row_sums(grads)
    norm, clipped = squares.norm(), jnp.zeros((), bool)
    if self.clip:
      clipped = norm.above(self.clip)
      grads = clip(grads, norm, self.clip)
    rate = self.schedule(state["step"])

    # 3. The update. It is a function because the checked form evaluates it twice.
    @jax.named_scope("optimizer")
    def update():
      # Direction, then the new parameters in their stored dtype.
      direction, opt_state = self.optimizer.update(grads, state["opt_state"], params)
      direction = self.selection.mask_rows(direction)
      new = self.rounded(self.updated(params, direction, rate), params, state["step"])
      survival = {}
      if self.survival and not self.watch:
        arrived, intended = map(sums_of_rows, update_retention.products(params, new, direction, rate))
        survival = {update_retention.NAME: {"arrived": arrived, "intended": intended}}
      return new, opt_state, survival

    # 4. Decide on the device whether the update is applied.
    finite = {"loss": jnp.isfinite(loss), "gradients": squares.finite}
    applied = finite["loss"] & jnp.all(finite["gradients"])
    decided = jnp.ones((), bool) if self.watch else ~jnp.any(jnp.isnan(magnitude_bound))
    applied = applied & decided
    # Rows that no check has read count as finite.
    unchecked = jnp.ones(squares.finite.shape, bool), jnp.ones(state_rows(state["opt_state"], params), bool)
    if self.watch:
      params, opt_state, survival = update()
    else:
      # The optimizer knows from the largest gradient and the bounds of the state whether its update can overflow.
      largest = jnp.minimum(squares.largest(), largest_clipped(self.clip) if self.clip else jnp.inf)
      certain, kept_bound = self.optimizer.certainly_finite(largest, magnitude_bound[1], magnitude_bound[0], rate)

      def check():
        new_params, new_opt_state, _ = update()
        return row_squares(new_params).finite, jnp.isfinite(state_peaks(new_opt_state, params))

      if self.checked:
        finite["parameters"], finite["optimizer"] = jax.lax.cond(applied & ~certain, check, lambda: unchecked)
        applied = applied & jnp.all(finite["parameters"]) & jnp.all(finite["optimizer"])
      else:
        finite["parameters"], finite["optimizer"] = unchecked
        # A float16 overflow is handled by the loss scale. For other dtypes an infinite sum may come from finite numbers
        # beyond 1e19, which clipping can handle in the checked form. After an unchanged state no later step applies anything.
        certain = certain & ~jnp.any(jnp.isinf(squares.small))
        decided = jnp.all(jnp.isfinite(magnitude_bound)) & (
          certain | (~applied if scaling or self._detects_overflow else False)
        )
        applied = applied & decided
      before = (params, state["opt_state"])
      *after, survival = update()
      # Select each number: an update that is not applied leaves the old ones, bit for bit.
      params, opt_state = jax.tree.map(lambda new, old: jnp.where(applied, new, old), tuple(after), before)
    # The bias of the router follows the load of the batch, not a gradient. It is left as it is if the update is not applied.
    if self.router_bias:
      frozen = self.router_bias(frozen, losses["moe_load"], applied)

    # 5. The next state, and bounds on its magnitudes for the next step.
    new_params = merge(params, frozen)
    new_state = {**state, "step": state["step"] + decided, "params": new_params, "opt_state": opt_state}
    if scaling:
      scale = loss_scale.updated(scaling, applied)
      new_state["loss_scale"] = jax.tree.map(lambda new, old: jnp.where(decided, new, old), scale, scaling)
    sizes = row_sums(new_params)

    def check_state():
      peaks = state_peaks(opt_state, params)
      return jnp.isfinite(peaks), jnp.max(peaks, initial=0.0)

    if self.watch:
      sound, largest_state = check_state()
    else:
      proved = lambda: (unchecked[1], jnp.where(applied, jnp.maximum(kept_bound, magnitude_bound[1]), magnitude_bound[1]))
      sound, largest_state = jax.lax.cond(certain, proved, check_state) if self.checked else proved()
    # Plain sums are also infinite for finite numbers beyond 1e19. The bound is then infinite and the next step is checked.
    whole = sizes.finite if self._detects_overflow else ~jnp.isnan(sizes.small)
    finite |= {"state_parameters": whole, "state_optimizer": sound}
    metrics = {
      "loss": loss,
      "grad_norm": norm.value,
      "param_norm": sizes.norm().value,
      "learning_rate": rate,
      "tokens": self.objective.tokens(batch),
      "clipped": clipped & applied,
      "skipped": ~applied,
      "magnitude_bound": jnp.where(decided, jnp.stack([sizes.largest(), largest_state]), jnp.inf),
      "decided": decided,
      "finite": finite,
    }
    if self.watch:
      metrics["watched"] = (squares, sizes, row_sums(opt_state))
    return new_state, metrics | survival | optional_metrics(losses, scaling)

  @jax.named_scope("parameters")  # ``remedies`` distinguishes parameter overflows from moment overflows by this scope
  def updated(self, params: Any, direction: Any, rate: jax.Array) -> Any:
    """Return the parameters after the update, in float32: params - rate * direction.

    Args:
      params: parameter tree.
      direction: float32 tree of the same structure.
      rate: float32 scalar.
    """
    change = jax.tree.map(lambda d: rate * d, direction)
    if self.watch:
      change = self.watch("update", change)
    return jax.tree.map(lambda p, c: p.astype(jnp.float32) - c, params, change)

  @jax.named_scope("parameters")
  def rounded(
    self, updated: Any, params: Any, step: jax.Array, row: jax.Array | None = None, begin: jax.Array | int = 0
  ) -> Any:
    """Round updated parameters to the dtypes that they are stored in.

    Args:
      updated: result of ``updated``.
      params: parameters before the update.
      step: int32 scalar, the step index of the state.
      row: int32 scalar, row of the stack if the tree is one row; None if the tree has all rows of every stack.
      begin: see ``StochasticRounding``.
    """
    if self.rounding:
      return self.rounding(updated, params, step, row, begin)
    return jax.tree.map(lambda x, p: x.astype(p.dtype), updated, params)

  def total(self, apply, params, batch: Batch, sizes: Sizes, scale, sink=None) -> tuple[jax.Array, dict[str, Any]]:
    """Return the differentiated loss (float32 scalar) and its terms.

    Args:
      apply: the objective's call.
      params: all parameters.
      batch: one microbatch.
      sizes: divisors of the complete batch.
      scale: see ``gradients``.
      sink: receives the cotangents at the probes; empty or None without probes.
    """
    cotangent = (1.0 if scale is None else scale) / sizes.weight
    loss, _, aux = apply(params, batch, cotangent, sink)
    # A mean over tokens is weighted by this microbatch's share of the tokens, a mean over rows by its share of the rows.
    share, share_of_rows = jnp.sum(batch["segments"] > 0) / sizes.tokens, _rows(batch) / sizes.rows
    router, _ = self.objective.decoder.router_losses
    means = {name: value * (share_of_rows if name in router.by_row else share) for name, value in aux["means"].items()}
    total = loss / sizes.weight + sum(means.values())
    terms = {name: value / sizes.weight for name, value in aux["terms"].items()} | means
    out = {"loss": terms, "clamped": aux["clamped"], "probes": aux.get("probes", {})}
    if "moe_load" in aux:
      out["moe_load"] = aux["moe_load"] * share
    return total if scale is None else total * scale, jax.lax.stop_gradient(out)

  def sizes(self, batch: Batch) -> Sizes:
    """Return the divisors of a complete batch."""
    counts = self.objective.weight(batch), jnp.sum(batch["segments"] > 0), _rows(batch)
    return Sizes(*(jnp.maximum(n, 1).astype(jnp.float32) for n in counts))

  def keyed(self, batch: Batch, step: jax.Array) -> Batch:
    """Add the random keys of its rows to a batch. Return it unchanged without dropout."""
    if self.dropout_seed is None:
      return batch
    return {**batch, dropout.ROWS: dropout.row_keys(self.dropout_seed, step, batch["segments"].shape[0])}

  def gradients(self, params, frozen, batch: Batch, scale: jax.Array | None) -> tuple[Any, dict[str, Any]]:
    """Compute the gradients of the batch's loss in ``grad_dtype``, and the loss terms. Microbatches are summed in float32.

    Args:
      params: the trained leaves.
      frozen: the other leaves.
      batch: as in ``__call__``; result of ``keyed`` with dropout.
      scale: float16 loss scale: multiplies the loss before the backward pass and divides the gradients after it. None is 1.

    Returns:
      Gradients, and {"loss": terms by name, "clamped", "moe_load" with experts, "probes" with probed stacks}.
    """
    sizes = self.sizes(batch)

    def scaled_loss(trained, batch, frozen, sizes, scale, of_batch):
      params, sink = trained
      return self.total(self.apply, merge(params, frozen), batch | of_batch, sizes, scale, sink)

    # Probed layers return their cotangents as gradients of a sink argument.
    value_and_grad = jax.value_and_grad(scaled_loss, has_aux=True)
    layers = sum(repeats * period for repeats, period in (self.probed_stacks or {}).values())
    trained = (params, sinks(PROBED, (layers,)) if self.probed_stacks else {})
    # One batch, or sums over microbatches.
    if self.parts == 1:
      (_, out), (grads, cotangents) = value_and_grad(trained, batch, frozen, sizes, scale, {})
      seen = {"forward": out.pop("probes"), "backward": cotangents}
    else:
      of_batch = self._of_batch(params, frozen, batch, sizes)
      (out, grads), seen = self._accumulated(value_and_grad, trained, batch, frozen, sizes, scale, of_batch)
    out["probes"] = seen
    # Divide by the loss scale in float32, because small gradients would underflow in float16.
    if scale is not None:
      grads = jax.tree.map(lambda g: g.astype(jnp.float32) / scale, grads)
    grads = jax.tree.map(lambda g: g.astype(self.grad_dtype), grads)
    return self.selection.mask_rows(self.in_stored_order(grads)), out

  def in_stored_order(self, grads: Any) -> Any:
    """Return gradients in the parameters' stored order on TPUs. See ``param.in_stored_order``."""
    if not on_tpu():
      return grads
    spec, _ = self.selection.split(self.objective.params())
    return in_stored_order(grads, {name: spec[name] for name in grads}, self.objective.decoder.cfg.rules)

  def _microbatches(self, batch: Batch) -> Batch:
    """Reshape every array to a leading axis of microbatches. Row r goes to microbatch r % parts, so that each microbatch is
    spread over all devices like the complete batch."""
    return jax.tree.map(lambda x: jnp.moveaxis(x.reshape(-1, self.parts, *x.shape[1:]), 1, 0), batch)

  def _of_batch(self, params, frozen, batch: Batch, sizes: Sizes) -> Batch:
    """Return arrays that every microbatch takes from the complete batch: the expert load, if a loss needs it.

    A load-balancing loss that multiplies two means over the batch is not a sum over microbatches: the gradient of the mean
    probabilities is multiplied by the load of the complete batch. The load has no gradient, so one forward pass over all
    microbatches computes it first. The result equals that of one large batch.
    """
    if self.forward_passes == 1:
      return {}

    # The mean load of the microbatches, weighted by their tokens.
    def add(load, part):
      _, _, aux = self.apply(merge(params, frozen), part)
      return load + aux[LOAD] * jnp.sum(part["segments"] > 0) / sizes.tokens, None

    split = self._microbatches(batch)
    # The shape of the load is known only from tracing the model.
    (shape, _) = jax.eval_shape(lambda part: add(0.0, part), jax.tree.map(lambda x: x[0], split))
    with jax.named_scope("balance_load"):
      load, _ = jax.lax.scan(add, jnp.zeros(shape.shape, jnp.float32), split)
    return {LOAD: jax.lax.stop_gradient(load)}

  def _accumulated(self, value_and_grad, trained, batch: Batch, *given) -> tuple[tuple[dict[str, Any], Any], Any]:
    """Sum over the microbatches: ((terms, float32 gradients), probe statistics).

    Args:
      value_and_grad: (trained, rows, *given) -> ((loss, terms), (gradients, cotangents at the probes)).
      trained: parameters, and the sinks that receive the probes' cotangents.
      batch: all microbatches.
      given: further arguments, the same for all microbatches.
    """

    def sums(trained, split, *given):
      def add(total, part):
        (_, out), (grads, cotangents) = value_and_grad(trained, part, *given)
        seen = {"forward": out.pop("probes"), "backward": cotangents}
        sums = jax.tree.map(lambda t, x: t + x.astype(t.dtype), total[0], (out, grads))
        return (sums, jax.tree.map(probe_statistics.joined, total[1], seen)), None

      # Zeros of the right shapes to start the sums from.
      (_, out), (_, cotangents) = jax.eval_shape(value_and_grad, trained, jax.tree.map(lambda x: x[0], split), *given)
      seen = {"forward": out.pop("probes"), "backward": cotangents}
      zeros, unseen = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), (out, seen))
      zero_grads = jax.tree.map(lambda p: jnp.zeros_like(p, jnp.float32), trained[0])
      return jax.lax.scan(add, ((zeros, zero_grads), unseen), split)[0]

    split = self._microbatches(batch)
    if not self.summed_once:
      return sums(trained, split, *given)

    # Each device sums its own microbatches; one psum at the end combines the devices.
    def own_sums(*arguments):
      total, seen = sums(*arguments)
      over = self.summed_once
      return jax.lax.psum(total, over), jax.tree.map(lambda x: probe_statistics.joined_over(x, over), seen)

    # The partitioner keeps the other mesh axes, if any. Only the psum above communicates over the axes of ``summed_once``.
    mesh = jax.sharding.get_abstract_mesh()
    manual = {axis for axis, size in mesh.shape.items() if size == 1 or axis in self.summed_once}
    specs = (PartitionSpec(), PartitionSpec(None, self.summed_once), *(PartitionSpec() for _ in given))
    on_devices = jax.shard_map(own_sums, in_specs=specs, out_specs=PartitionSpec(), axis_names=manual, check_vma=False)
    return on_devices(trained, split, *given)


def optional_metrics(losses: dict[str, Any], scaling: loss_scale.LossScale | None) -> Metrics:
  """Metrics that depend on the model: auxiliary loss terms, expert load, float16 loss scale."""
  # The terms of the loss, if there are several.
  terms = losses["loss"]
  metrics: Metrics = {}
  if len(terms) > 1:
    metrics = dict(terms)
  # Expert load relative to a balanced load.
  if "moe_load" in losses:
    load = losses["moe_load"]  # [layers, E], 1 / E each when balanced
    metrics["moe_load_max"] = jnp.max(load) * load.shape[-1]
    metrics["moe_load_min"] = jnp.min(load) * load.shape[-1]
  metrics["clamped"] = losses["clamped"]
  if scaling:
    metrics["loss_scale"] = scaling["scale"]
  # Statistics of layers, if they are recorded.
  if any(losses["probes"].values()):
    metrics |= probe_statistics.metrics(losses["probes"])
  return metrics
