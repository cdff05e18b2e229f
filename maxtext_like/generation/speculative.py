"""Decoding with a draft model: a small model proposes some tokens, and one pass of the model checks all of them.

A pass of a large model over a few tokens takes hardly longer than over one, because it reads the same weights. Each answer has
exactly the distribution of the model: a proposal x is accepted with probability min(1, p(x) / q(x)), where p is the model's
distribution and q the draft model's, both after penalties and filters; the first token after the accepted ones is drawn from
max(p - q, 0), divided by its sum, or from p if all were accepted (Leviathan et al. 2023, arXiv:2211.17192, algorithm 1). Greedy
answers are the same tokens as without a draft model, up to the rounding of products with another number of rows.

K proposed tokens, S slots, V vocabulary, N tokens of a decode call.
"""

from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from maxtext_like.generation.sampling import Rule, Values, categorical, log_probabilities, log_softmax_at
from maxtext_like.generation.slots import (
  NONE,
  NOT_FINITE,
  TOKENS_PER_CALL,
  Draft,
  State,
  barred_tokens,
  counted,
  draw_keys,
  more_turns,
)
from maxtext_like.layers.cache import Step
from maxtext_like.layers.decoder import Decoder
from maxtext_like.layers.partition import on_every_device

_PROPOSED, _CHECKED = 1, 2
"""Numbers that make independent keys of a draw's key: for the proposal, and for its check with the draw that replaces it."""


def passes_of(tokens: int, draft: Draft) -> int:
  """Return the number of passes that make at most ``tokens`` tokens of each row, but at least one pass."""
  return max(1, tokens // (draft.tokens + 1))


@partial(jax.jit, static_argnums=(0, 1, 2), donate_argnums=5)
def decode(
  decoder: Decoder,
  draft: Draft,
  rule: Rule,
  params: Any,
  draft_params: Any,
  state: State,
  values: Values,
  stops: jax.Array,
  passes: jax.Array,
  ended: jax.Array,
) -> tuple[State, dict[str, jax.Array]]:
  """Continue all answers.

  Args:
    decoder, rule, params, state, values, stops, ended: as for ``slots.decode``.
    draft, draft_params: the draft model.
    passes: int32 scalar, number of passes of the model, at most ``passes_of(TOKENS_PER_CALL, draft)``.

  Returns:
    As for ``slots.decode``. N is the largest number of passes times K + 1. Each pass makes 1 to K + 1 tokens of a row, and the
    other places of the pass have ``NONE``.
  """
  S, most = len(state.alive), passes_of(TOKENS_PER_CALL, draft)

  def one(carry):
    state, made, turn = carry
    tokens, log_q, state = _propose(draft, rule, draft_params, state, values, stops, decoder.cfg.embedding.vocab_size)
    state, found, clamped = _check(decoder, rule, params, state, tokens, log_q, values, stops)
    made = {name: made[name].at[turn].set(x) for name, x in found.items()} | {"clamped": made["clamped"] + clamped}
    return state, made, turn + 1

  made: dict[str, jax.Array] = {"token": jnp.full((most, draft.tokens + 1, S), NONE), "clamped": jnp.zeros((), jnp.int32)}
  if rule.logprobs:
    made |= {name: jnp.zeros(made["token"].shape) for name in ("logprob", "model_logprob")}
  state, made, _ = jax.lax.while_loop(more_turns(state, passes, ended), one, (state, made, jnp.zeros((), jnp.int32)))
  joined = {name: x if x.ndim == 0 else x.reshape(-1, S) for name, x in made.items()}
  return state, jax.tree.map(on_every_device, joined)


def _propose(draft: Draft, rule: Rule, params: Any, state: State, values: Values, stops: jax.Array, size: int):
  """Draw K tokens with the draft model. ``size``: V of the model.

  Returns:
    The tokens, int32 [K, S]; the logarithms of the probabilities that they were drawn with, float32 [K, S, V], -inf where the
    draft model's logits are not finite; and the state, whose draft caches hold all of these tokens.
  """
  count = state.alive.astype(jnp.int32)

  def extended(cache: Any, token: jax.Array, place: jax.Array) -> tuple[jax.Array, Any]:
    batch = {"tokens": token[:, None], "positions": place[:, None]}
    return draft.decoder.extend(params, batch, cache, Step(place, count, spare=draft.tokens))[:2]

  def one(carry, i):
    cache, token, counts = carry
    x_BTD, cache = extended(cache, token, state.held + i)
    own = draft.decoder.head(params, x_BTD)[:, 0].astype(jnp.float32)
    # Tables may have different numbers of rows beyond the tokenizer's vocabulary.
    logits = jnp.pad(own[:, :size], ((0, 0), (0, max(0, size - own.shape[1]))), constant_values=-jnp.inf)
    made = state.made + i
    barred = barred_tokens(made, values, stops, size)
    log_q = log_probabilities(logits, rule, values, barred=barred, prompt=state.prompt, counts=counts)
    keys = jax.vmap(jax.random.fold_in, (0, None))(draw_keys(state.row, made), _PROPOSED)
    # Without finite logits the token is arbitrary, and the check rejects it.
    token = jnp.minimum(categorical(keys, log_q - jnp.max(log_q, axis=-1, keepdims=True)), log_q.shape[1] - 1)
    finite = jnp.all(jnp.isfinite(own), axis=-1, keepdims=True)
    return (cache, token, counted(counts, token)), (token, jnp.where(finite, log_q, -jnp.inf))

  (cache, last, _), (tokens, log_q) = jax.lax.scan(one, (state.draft, state.token, state.counts), jnp.arange(draft.tokens))
  # If all tokens are accepted, the next proposal follows the last of them.
  _, cache = extended(cache, last, state.held + draft.tokens)
  return tokens, log_q, replace(state, draft=cache)


def _check(
  decoder: Decoder,
  rule: Rule,
  params: Any,
  state: State,
  proposed: jax.Array,
  log_q: jax.Array,
  values: Values,
  stops: jax.Array,
) -> tuple[State, dict[str, jax.Array], jax.Array]:
  """Pass the model over the proposed tokens, accept some of them, and draw the token that follows these.

  Args:
    proposed, log_q: from ``_propose``.

  Returns:
    The state; the results of ``draw`` [K + 1, S], where "token" may be ``NONE`` or ``NOT_FINITE``; and the number of clamped
    values.
  """
  K = len(proposed)
  tokens_ST = jnp.concatenate([state.token[None], proposed]).T
  positions = state.held[:, None] + jnp.arange(K + 1)
  step = Step(state.held, state.alive * (K + 1), spare=K)
  x_STD, cache, clamped = decoder.extend(params, {"tokens": tokens_ST, "positions": positions}, state.cache, step)
  logits_TSV = jnp.moveaxis(decoder.head(params, x_STD), 1, 0)
  # Nothing is proposed for the last place: q is 0 there, and the token is drawn from p.
  proposed = jnp.pad(proposed, ((0, 1), (0, 0)))
  log_q = jnp.pad(log_q, ((0, 1), (0, 0), (0, 0)), constant_values=-jnp.inf)

  def one(carry, of_token):
    state, going = carry
    logits_SV, log_q_SV, token = of_token
    barred = barred_tokens(state.made, values, stops, logits_SV.shape[1])
    log_p_SV = log_probabilities(logits_SV, rule, values, barred=barred, prompt=state.prompt, counts=state.counts)
    keys = jax.vmap(jax.random.fold_in, (0, None))(draw_keys(state.row, state.made), _CHECKED)
    token, accepted = accept_or_draw(keys, log_p_SV, log_q_SV, token)
    found = {}
    if rule.logprobs:
      own = jnp.take_along_axis(log_p_SV, token[:, None], axis=1)[:, 0]
      found = {"logprob": own, "model_logprob": log_softmax_at(logits_SV.astype(jnp.float32), token)}
    finite = jnp.all(jnp.isfinite(logits_SV), axis=-1)
    found["token"] = token = jnp.where(going, jnp.where(finite, token, NOT_FINITE), NONE)
    made = state.made + going
    alive = jnp.where(going, (token >= 0) & ~jnp.isin(token, stops) & (made < state.row.limit), state.alive)
    after = replace(
      state,
      token=jnp.where(going, jnp.maximum(token, 0), state.token),
      held=state.held + going,
      made=made,
      alive=alive,
      counts=counted(state.counts, token),
    )
    return (after, going & accepted & alive), found

  small = replace(state, cache=None, draft=None)
  (small, _), found = jax.lax.scan(one, (small, state.alive), (logits_TSV, log_q, proposed))
  return replace(small, cache=cache, draft=state.draft), found, clamped


def accept_or_draw(
  keys: jax.Array, log_p_SV: jax.Array, log_q_SV: jax.Array, proposed: jax.Array
) -> tuple[jax.Array, jax.Array]:
  """Accept proposed tokens, or draw others in their place, so that the result has the distribution p.

  Args:
    keys: a PRNG key for each row.
    log_p_SV: logarithms of the probabilities p.
    log_q_SV: logarithms of the probabilities q, with which the tokens were drawn. A row of -inf rejects its token.
    proposed: int32 [S].

  Returns:
    int32 [S], the tokens; and bool [S], whether they are the proposed ones.
  """
  own = jax.vmap(jax.random.split)(keys)
  at = lambda x_SV: jnp.take_along_axis(x_SV, proposed[:, None], axis=1)[:, 0]
  log_p, log_q = at(log_p_SV), at(log_q_SV)
  # The token was drawn, so q is not 0 there, unless nothing is to be accepted.
  drawn = log_q > -jnp.inf
  ratio = jnp.exp(jnp.minimum(log_p - jnp.where(drawn, log_q, 0), 0))
  accepted = drawn & (jax.vmap(jax.random.uniform)(own[:, 0]) < ratio)
  p = jnp.exp(log_p_SV)
  rest = jnp.maximum(p - jnp.exp(log_q_SV), 0)
  # p and q may be equal up to rounding.
  largest = jnp.max(rest, axis=-1, keepdims=True)
  rest = jnp.where(largest > 0, rest / jnp.where(largest > 0, largest, 1), p / jnp.max(p, axis=-1, keepdims=True))
  return jnp.where(accepted, proposed, categorical(own[:, 1], jnp.log(rest))), accepted
