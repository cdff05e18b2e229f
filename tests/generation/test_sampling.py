"""Sampling: which tokens may be drawn and how often, and that NaN is reported."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from maxtext_like.errors import UserError
from maxtext_like.generation.sampling import Sampling, allowed_tokens, draw

PROBS = np.array([0.05, 0.4, 0.15, 0.3, 0.1])
LOGITS = jnp.log(jnp.asarray([PROBS, PROBS[::-1]], jnp.float32))


@pytest.mark.parametrize(
  ("options", "expected"),
  [
    ({}, [0, 1, 2, 3, 4]),
    ({"top_k": 2}, [1, 3]),
    ({"top_k": 9}, [0, 1, 2, 3, 4]),
    ({"top_p": 0.65}, [1, 3]),
    ({"top_p": 0.75}, [1, 2, 3]),
    ({"top_p": 1e-6}, [1]),
    ({"min_p": 0.3}, [1, 2, 3]),
    ({"min_p": 1.0}, [1]),
    # The first of the renormalized probabilities 4/7 and 3/7 alone reaches 0.5.
    ({"top_k": 2, "top_p": 0.5}, [1]),
  ],
)
def test_which_tokens_may_be_drawn(options, expected):
  rows = np.asarray(allowed_tokens(LOGITS, Sampling(**options)))
  assert np.flatnonzero(rows[0]).tolist() == expected
  assert np.flatnonzero(rows[1][::-1]).tolist() == expected


def test_draws_follow_the_probabilities():
  n = 20000
  keys = jax.random.split(jax.random.key(0), n)
  tokens, finite = draw(jnp.broadcast_to(LOGITS[0], (n, 5)), keys, Sampling(temperature=0.5))
  expected = PROBS**2 / np.sum(PROBS**2)
  np.testing.assert_allclose(np.bincount(tokens, minlength=5) / n, expected, atol=0.015)
  assert np.all(finite)


def test_temperature_zero_takes_the_top_token():
  tokens, _ = draw(LOGITS, jax.random.split(jax.random.key(1), 2), Sampling(temperature=0.0))
  assert tokens.tolist() == [1, 3]


@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_row_that_is_not_finite_is_told(bad, temperature):
  logits = LOGITS.at[1, 2].set(bad)
  _, finite = draw(logits, jax.random.split(jax.random.key(1), 2), Sampling(temperature=temperature))
  assert finite.tolist() == [True, False]


@pytest.mark.parametrize("options", [{"temperature": -1.0}, {"top_p": 0.0}, {"top_p": 1.5}, {"min_p": -0.1}, {"top_k": -1}])
def test_impossible_sampling_is_refused(options):
  with pytest.raises(UserError, match="temperature >= 0"):
    Sampling(**options)


@pytest.mark.parametrize("temperature", [0.0, 5.0])
def test_ids_that_the_tokenizer_has_not_got_are_never_drawn(temperature):
  logits = jnp.tile(jnp.arange(7.0), (40, 1))  # the largest logits are beyond the vocabulary
  keys = jax.random.split(jax.random.key(0), 40)
  drawn, finite = draw(logits, keys, Sampling(temperature=temperature, vocabulary=3, top_k=5))
  assert finite.all()
  assert set(np.asarray(drawn).tolist()) == ({2} if temperature == 0 else {0, 1, 2})
  _, finite = draw(logits.at[0, 6].set(jnp.nan), keys, Sampling(temperature=temperature, vocabulary=3))
  assert finite.tolist() == [False] + [True] * 39, "the logits of all ids are looked at"


@pytest.mark.parametrize("seed", [-1, 2**32, 2**32 + 7, 2**63])
def test_a_seed_of_more_than_32_bits_is_refused(seed):
  with pytest.raises(UserError, match=f"seed {seed}\n.*32 bits"):
    Sampling(seed=seed)
  assert Sampling(seed=2**32 - 1).seed == 2**32 - 1
