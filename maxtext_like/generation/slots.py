"""The programs of generation on the device: prefill a part of some prompts, start answers, decode, enlarge the caches.

Each row of the caches is a slot that one answer uses at a time. A program updates the state of all slots in place.

``speculative`` has the decode program with a draft model.

B rows of a prefill call, S slots, N tokens of a decode call, D model, V vocabulary.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from maxtext_like.errors import NonFiniteError, UserError
from maxtext_like.generation.sampling import Rule, Values, draw
from maxtext_like.layers.cache import Step, grown
from maxtext_like.layers.decoder import Decoder
from maxtext_like.layers.partition import on_every_device

TOKENS_PER_CALL = 64
"""Largest number of tokens of each row that one decode call makes."""
MOST_PROPOSED = TOKENS_PER_CALL // 2
"""Largest number of tokens that a draft model proposes before a pass."""
NONE, NOT_FINITE = -1, -2
"""Entries of a result instead of a token: the row made no token; its logits were not finite."""


def not_finite(name: str, decoder: Decoder) -> NonFiniteError:
  """Return the error about logits that are not finite; ``name`` names the token or the request."""
  if decoder.precision.dtype == "float16":
    fix = "set dtype=bfloat16 or dtype=float32, or use the float32_* keys of the model's file"
  else:
    fix = "use an earlier checkpoint, or other weights: maxtext-like risk prints how large the numbers of these weights become"
  return NonFiniteError(f"{name}: the logits are not finite\n  fix: {fix}")


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Row:
  """An answer's own settings, as arrays [S] or [B].

  Attributes:
    limit: largest number of tokens of the answer.
    seed: seed of its draws, uint32.
    stream: number of its draws among those with the same seed, uint32.
  """

  limit: jax.Array
  seed: jax.Array
  stream: jax.Array


@dataclass(frozen=True)
class Draft:
  """A draft model, which proposes tokens to the model (``speculative``).

  Attributes:
    decoder: the draft model.
    tokens: number of tokens that it proposes before each pass of the model.

  Raises:
    UserError: ``tokens`` is out of range.
  """

  decoder: Decoder
  tokens: int

  def __post_init__(self):
    if not 1 <= self.tokens <= MOST_PROPOSED:
      what = f"draft_tokens={self.tokens}: must be between 1 and {MOST_PROPOSED}"
      raise UserError(what, fix="pass draft_tokens=4 (--draft-tokens 4)")


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class State:
  """The state of all slots.

  Attributes:
    cache: caches of the decoder.
    row: settings of the answers.
    token: int32 [S], the last drawn token, which is not in the cache yet.
    held: int32 [S], number of tokens in the cache.
    made: int32 [S], number of drawn tokens.
    alive: bool [S], the slot has an answer that has not ended.
    prompt, counts: bool and int32 [S, V], as for ``draw``; None without penalties.
    draft: caches of the draft model, which hold the same tokens; None without one.
  """

  cache: Any
  row: Row
  token: jax.Array
  held: jax.Array
  made: jax.Array
  alive: jax.Array
  prompt: jax.Array | None = None
  counts: jax.Array | None = None
  draft: Any = None


def _empty_caches(decoder: Decoder, draft: Draft | None, slots: int, capacity: int, **form: bool) -> tuple[Any, Any]:
  """Return the caches of the model, and those of the draft model or None. ``form``: "apart" and "int8"."""
  if draft is None:
    return decoder.empty_cache(slots, capacity, **form), None
  own, other = (of.empty_cache(slots, capacity, spare=draft.tokens, **form) for of in (decoder, draft.decoder))
  return own, other


@partial(jax.jit, static_argnums=(0, 1, 2), static_argnames=("apart", "int8", "penalties", "draft"))
def empty_state(
  decoder: Decoder,
  slots: int,
  capacity: int,
  *,
  apart: bool,
  int8: bool = False,
  penalties: bool,
  draft: Draft | None = None,
) -> State:
  """Create the state without any answers."""
  zeros = lambda dtype, *more: jnp.zeros((slots, *more), dtype)
  row = Row(zeros(jnp.int32), zeros(jnp.uint32), zeros(jnp.uint32))
  size = decoder.cfg.embedding.vocab_size
  own, of_draft = _empty_caches(decoder, draft, slots, capacity, apart=apart, int8=int8)
  return State(
    cache=own,
    row=row,
    token=zeros(jnp.int32),
    held=zeros(jnp.int32),
    made=zeros(jnp.int32),
    alive=zeros(bool),
    prompt=zeros(bool, size) if penalties else None,
    counts=zeros(jnp.int32, size) if penalties else None,
    draft=of_draft,
  )


@partial(jax.jit, static_argnums=0, donate_argnums=2)
def prefill(decoder: Decoder, params: Any, state: State, batch: dict[str, Any], step: Step):
  """Store a chunk of some prompts in the caches.

  Returns:
    The state, the hidden states of the last real tokens [B, D], and the number of clamped values.
  """
  x_BTD, cache, clamped = decoder.extend(params, batch, state.cache, step)
  x_BD = jnp.take_along_axis(x_BTD, jnp.maximum(step.count - 1, 0)[:, None, None], axis=1)[:, 0]
  prompt = state.prompt
  if prompt is not None:
    assert step.rows is not None
    # A new prompt replaces the tokens of the answer that used the slot before.
    own = jnp.where((step.start == 0)[:, None], False, jnp.take(prompt, step.rows, axis=0, mode="clip"))
    index = jnp.where(step.real(batch["tokens"].shape[1]), batch["tokens"], own.shape[1])
    own = own.at[jnp.arange(len(own))[:, None], index].set(True, mode="drop")
    prompt = prompt.at[step.rows].set(own, mode="drop")
  return replace(state, cache=cache, prompt=prompt), x_BD, clamped


@partial(jax.jit, static_argnums=0, donate_argnums=2)
def prefill_draft(draft: Decoder, params: Any, state: State, batch: dict[str, Any], step: Step) -> State:
  """Store a chunk of some prompts in the caches of the draft model."""
  cache = state.draft
  if step.fresh:
    # If the draft model's numbers were not finite, the previous answer of the slot continued, and left entries that would make
    # all scores of this answer NaN (see ``clear``).
    axis = _axis_of_slots(cache)
    zero = lambda x: x.at[(*[slice(None)] * axis, step.rows)].set(jnp.zeros((), x.dtype), mode="drop")
    cache = jax.tree.map(zero, cache)
  return replace(state, draft=draft.extend(params, batch, cache, step)[1])


@partial(jax.jit, static_argnums=(0, 1), static_argnames="copies", donate_argnums=3)
def start(
  decoder: Decoder,
  rule: Rule,
  params: Any,
  state: State,
  hidden: jax.Array,
  place: jax.Array,
  source: jax.Array,
  slots: jax.Array,
  lengths: jax.Array,
  row: Row,
  values: Values,
  stops: jax.Array,
  *,
  copies: bool,
) -> tuple[State, dict[str, jax.Array]]:
  """Begin answers: draw their first tokens.

  Args:
    decoder, rule, params, state: the model, the sampling, and the state.
    hidden: hidden states of the last tokens of some prompts.
    place: int32 [B], index in them of each answer's prompt.
    source: int32 [B], slots that hold the prompts.
    slots: int32 [B], slots of the answers, distinct; a slot beyond the last is ignored.
    lengths: int32 [B], tokens of the prompts.
    row: settings of the answers, [B].
    values: numbers of the sampling.
    stops: int32 [.], tokens that end an answer.
    copies: some slots differ from their sources, so the caches are copied.

  Returns:
    The state, and the result of ``draw`` [B], where "token" may be ``NOT_FINITE``.
  """
  if copies:
    axis = _axis_of_slots(state.cache)

    def copied(x: jax.Array, axis: int) -> jax.Array:
      at = (*[slice(None)] * axis, slots)
      return x.at[at].set(jnp.take(x, source, axis=axis, mode="clip"), mode="drop")

    cache, draft = jax.tree.map(lambda x: copied(x, axis), (state.cache, state.draft))
    state = replace(
      state,
      cache=cache,
      draft=draft,
      prompt=None if state.prompt is None else copied(state.prompt, 0),
    )
  if state.counts is not None:
    state = replace(state, counts=state.counts.at[slots].set(0, mode="drop"))
  own = lambda x: None if x is None else jnp.take(x, slots, axis=0, mode="clip")
  made = jnp.zeros_like(lengths)
  found = _next(decoder, rule, params, hidden[place], row, made, own(state.prompt), own(state.counts), values, stops)
  alive = (found["token"] >= 0) & ~jnp.isin(found["token"], stops) & (row.limit > 1)
  put = lambda old, new: old.at[slots].set(new, mode="drop")
  counts = state.counts
  if counts is not None:
    counts = counts.at[slots, found["token"]].add(1, mode="drop")
  return (
    replace(
      state,
      row=jax.tree.map(put, state.row, row),
      token=put(state.token, jnp.maximum(found["token"], 0)),
      held=put(state.held, lengths),
      made=put(state.made, made + 1),
      alive=put(state.alive, alive),
      counts=counts,
    ),
    jax.tree.map(on_every_device, found),
  )


@partial(jax.jit, static_argnums=(0, 1), donate_argnums=3)
def decode(
  decoder: Decoder,
  rule: Rule,
  params: Any,
  state: State,
  values: Values,
  stops: jax.Array,
  tokens: jax.Array,
  ended: jax.Array,
) -> tuple[State, dict[str, jax.Array]]:
  """Continue all answers.

  Args:
    decoder, rule, params, state, values, stops: as for ``start``.
    tokens: int32 scalar, number of tokens of each row, at most ``TOKENS_PER_CALL``.
    ended: int32 scalar, return as soon as this number of answers has ended.

  Returns:
    The state, and the results of ``draw`` [N, S], where "token" may be ``NONE`` or ``NOT_FINITE``, with "clamped" int32.
  """
  S = len(state.alive)

  def one(carry):
    state, made, turn = carry
    step = Step(state.held, state.alive.astype(jnp.int32))
    batch = {"tokens": state.token[:, None], "positions": state.held[:, None]}
    x_BTD, cache, clamped = decoder.extend(params, batch, state.cache, step)
    found = _next(decoder, rule, params, x_BTD[:, 0], state.row, state.made, state.prompt, state.counts, values, stops)
    token = jnp.where(state.alive, found["token"], NONE)
    drawn = (state.made + state.alive).astype(jnp.int32)
    counts = counted(state.counts, token)
    alive = (token >= 0) & ~jnp.isin(token, stops) & (drawn < state.row.limit)
    made = {name: made[name].at[turn].set(x) for name, x in (found | {"token": token}).items()} | {
      "clamped": made["clamped"] + clamped
    }
    held = state.held + state.alive
    after = replace(state, cache=cache, token=jnp.maximum(token, 0), held=held, made=drawn, alive=alive, counts=counts)
    return after, made, turn + 1

  made: dict[str, jax.Array] = {"token": jnp.full((TOKENS_PER_CALL, S), NONE), "clamped": jnp.zeros((), jnp.int32)}
  made |= {name: jnp.zeros((TOKENS_PER_CALL, S)) for name in ("logprob", "model_logprob") if rule.logprobs}
  state, made, _ = jax.lax.while_loop(more_turns(state, tokens, ended), one, (state, made, jnp.zeros((), jnp.int32)))
  return state, jax.tree.map(on_every_device, made)


def more_turns(state: State, turns: jax.Array, ended: jax.Array) -> Callable[[tuple], jax.Array]:
  """Return the condition of a decode loop over (state, results, turn).

  Args:
    state: the state before the loop.
    turns: int32 scalar, largest number of turns.
    ended: int32 scalar, stop as soon as this number of answers has ended.
  """
  begun = jnp.sum(state.alive)

  def more(carry) -> jax.Array:
    state, _, turn = carry
    alive = jnp.sum(state.alive)
    return (turn < turns) & (alive > 0) & (begun - alive < ended)

  return more


def counted(counts: jax.Array | None, token: jax.Array) -> jax.Array | None:
  """Count the tokens [S] in ``counts`` [S, V], which is None without penalties. Negative entries are not tokens."""
  if counts is None:
    return None
  return counts.at[jnp.arange(len(token)), jnp.where(token < 0, counts.shape[1], token)].add(1, mode="drop")


def _next(decoder, rule, params, x_BD, row: Row, made, prompt, counts, values, stops) -> dict[str, jax.Array]:
  """Draw the next token of some rows from their last hidden states. It is ``NOT_FINITE`` if the logits are not finite."""
  logits_BV = decoder.head(params, x_BD[:, None])[:, 0]
  barred = barred_tokens(made, values, stops, logits_BV.shape[1])
  found = draw(logits_BV, draw_keys(row, made), rule, values, barred=barred, prompt=prompt, counts=counts)
  return found | {"token": jnp.where(found.pop("finite"), found["token"], NOT_FINITE)}


def draw_keys(row: Row, made: jax.Array) -> jax.Array:
  """Return the keys of a draw, [B].

  They depend on the number of tokens ``made`` that each answer has, and not on the slot, the padding or the other rows."""

  def key(seed, made, stream):
    return jax.random.fold_in(jax.random.fold_in(jax.random.key(seed), made), stream)

  return jax.vmap(key)(row.seed, made, row.stream)


def barred_tokens(made: jax.Array, values: Values, stops: jax.Array, size: int) -> jax.Array:
  """Return bool [B, V]: the tokens that would end an answer before it has its smallest length. ``size``: V."""
  ends = jnp.zeros(size, bool).at[stops].set(True, mode="drop")
  return ends[None] & (made < values["min_tokens"])[:, None]


@partial(jax.jit, donate_argnums=0)
def end(state: State, kept: jax.Array) -> State:
  """End the answers of slots where ``kept``, bool [S], is False."""
  return replace(state, alive=state.alive & kept)


@partial(jax.jit, donate_argnums=0)
def clear(state: State, kept: jax.Array) -> State:
  """Set the caches of slots where ``kept``, bool [S], is False to zero.

  The next answer of a slot multiplies entries that it does not see by 0, which gives NaN if they are not finite."""
  axis = _axis_of_slots(state.cache)

  def cleared(x: jax.Array) -> jax.Array:
    return jnp.where(jnp.expand_dims(kept, [i for i in range(x.ndim) if i != axis]), x, jnp.zeros((), x.dtype))

  cache, draft = jax.tree.map(cleared, (state.cache, state.draft))
  return replace(state, cache=cache, draft=draft)


def _axis_of_slots(cache: Any) -> int:
  return 0 if any(isinstance(rows, tuple) for rows in cache.values()) else 1


@partial(jax.jit, static_argnums=(0, 2), static_argnames=("apart", "int8", "draft"))
def enlarge(decoder: Decoder, state: State, capacity: int, *, apart: bool, int8: bool, draft: Draft | None = None) -> State:
  """Return the state with caches of a larger capacity."""
  shapes = jax.eval_shape(lambda: _empty_caches(decoder, draft, len(state.alive), capacity, apart=apart, int8=int8))
  own, of_draft = jax.tree.map(lambda x, like: grown(x, like.shape[-2]), (state.cache, state.draft), shapes)
  return replace(state, cache=own, draft=of_draft)
