"""Sampling: which tokens may be drawn and how often, and that NaN is reported."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from maxtext_like.errors import UserError
from maxtext_like.generation import sampling
from maxtext_like.generation.sampling import Rule, Sampling, allowed_tokens, categorical

PROBS = np.array([0.05, 0.4, 0.15, 0.3, 0.1])
LOGITS = jnp.log(jnp.asarray([PROBS, PROBS[::-1]], jnp.float32))


def draw(logits, keys, how: Sampling):
  found = sampling.draw(logits, keys, how.rule(), how.values(logits.shape[1]))
  return found["token"], found["finite"]


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
  how = Sampling(**options)
  rows = np.asarray(allowed_tokens(LOGITS, how.rule(), how.values(5)))
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


ODD = [0.0, -0.0, -1.0, 1e-50, 1e-38, 1e-30, 0.3, 1.0, 1e30, 1e39, 1e300, float("inf"), float("-inf"), float("nan")]
ODD_INTEGERS = [-1, 0, 1, 3, 2**31 - 1, 2**31, 10**30]
NUMBERS = {
  **dict.fromkeys(("temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty"), ODD),
  **dict.fromkeys(("top_k", "min_tokens"), ODD_INTEGERS),
}


def test_every_number_is_honored_or_refused_by_name():
  """Each number gets odd values, combined with ordinary, huge and tiny values of the others. No draw is barred or NaN."""
  logits = jnp.asarray([[2.0, -1.0, 0.0, 3.0, 3.0], [-3e38, 3e38, 1e-30, -1e30, 0.0]], jnp.float32)
  keys, prompt = jax.random.split(jax.random.key(0), 2), jnp.asarray([[True, True, False, True, False]] * 2)
  counts, barred = jnp.asarray([[0, 7, 2, 0, 0]] * 2, jnp.int32), jnp.asarray([[False, False, False, False, True]] * 2)
  run = jax.jit(sampling.draw, static_argnums=2)
  others = [
    {},
    {"temperature": 1e-38, "top_p": 1e-50, "logit_bias": {1: 1e39, 2: float("-inf")}},
    {"frequency_penalty": 1e300, "presence_penalty": -1e300, "repetition_penalty": 1e-40, "logit_bias": {1: -1e39}},
  ]
  refused = set()
  for name, values in NUMBERS.items():
    for value in values:
      for other in others:
        options = other | {name: value}
        try:
          how = Sampling(**options)
        except UserError as error:
          refused.add((name, str(value), f"{name}={value}" in str(error)))
          continue
        # One program for all of them.
        rule = Rule(top_k=how.top_k > 0, top_p=True, min_p=True, bias=True, penalties=True, logprobs=True)
        numbers = {"bias": np.zeros(5, np.float32)} | how.values(5)
        found = run(logits, keys, rule, numbers, barred=barred, prompt=prompt, counts=counts)
        assert found["finite"].all(), options
        assert np.isfinite(found["logprob"]).all(), options
        assert 4 not in found["token"], options
        assert 2 not in found["token"] or "logit_bias" not in options or 2 not in options["logit_bias"], options
  unbounded = {"inf", "-inf", "nan"}
  assert all(named for *_, named in refused)
  assert {name: {value for of, value, _ in refused if of == name} for name in NUMBERS} == {
    "temperature": {"-1.0", *unbounded},
    "top_p": {"0.0", "-0.0", "-1.0", "1e+30", "1e+39", "1e+300", *unbounded},
    "min_p": {"-1.0", "1e+30", "1e+39", "1e+300", *unbounded},
    "repetition_penalty": {"0.0", "-0.0", "-1.0", *unbounded},
    "presence_penalty": unbounded,
    "frequency_penalty": unbounded,
    "top_k": {"-1"},
    "min_tokens": {"-1"},
  }


def test_a_tiny_temperature_takes_the_top_token():
  keys = jax.random.split(jax.random.key(2), 2)
  for temperature in (1e-50, 1e-38, 1e-30, 1e-6):
    tokens, finite = draw(300 * LOGITS, keys, Sampling(temperature=temperature))
    assert (tokens.tolist(), finite.tolist()) == ([1, 3], [True, True])


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
  with pytest.raises(UserError, match=f"seed={seed}\n.*32 bits"):
    Sampling(seed=seed)
  assert Sampling(seed=2**32 - 1).seed == 2**32 - 1


def test_penalties_and_biases_against_written_numbers():
  logits = np.array([[2.0, -1.0, 0.5, 3.0, 0.1]], np.float32)
  prompt, counts = np.array([[True, True, False, False, False]]), np.array([[0, 0, 2, 1, 0]], np.int32)
  how = Sampling(
    repetition_penalty=1.5, presence_penalty=0.25, frequency_penalty=0.5, logit_bias={4: 1.0}, temperature=0.5, top_k=4
  )
  # Bias, repetition, presence and frequency, then the temperature.
  scores = np.array([2.0 / 1.5, -1.0 * 1.5, 0.5 / 1.5 - 0.25 - 1.0, 3.0 / 1.5 - 0.25 - 0.5, 1.1]) / 0.5
  scores[np.argmin(scores)] = -np.inf
  want = scores - np.log(np.sum(np.exp(scores)))
  n = 400
  arrays = (jnp.broadcast_to(jnp.asarray(x), (n, 5)) for x in (logits, prompt, counts))
  keys = jax.random.split(jax.random.key(0), n)
  rows, prompts, counted = arrays
  found = sampling.draw(rows, keys, how.rule(logprobs=True), how.values(5), prompt=prompts, counts=counted)
  token = np.asarray(found["token"])
  assert set(token.tolist()) == {0, 2, 3, 4}
  np.testing.assert_allclose(found["logprob"], want[token], atol=1e-6)
  model = logits[0] - np.log(np.sum(np.exp(logits[0])))
  np.testing.assert_allclose(found["model_logprob"], model[token], atol=1e-6)


def test_barred_tokens_are_not_drawn_and_greedy_draws_have_probability_one():
  barred = jnp.asarray([[False, True, False, False, False]] * 2)
  for temperature in (0.0, 9.0):
    how = Sampling(temperature=temperature)
    keys = jax.random.split(jax.random.key(3), 2)
    found = sampling.draw(LOGITS, keys, how.rule(logprobs=True), how.values(5), barred=barred)
    assert 1 not in found["token"].tolist()
    if temperature == 0:
      assert found["token"].tolist() == [3, 3]
      assert found["logprob"].tolist() == [0.0, 0.0]


def test_importance_weights_of_filtered_draws_have_mean_one():
  """The weight is the model's probability divided by the sampling probability, which the filters renormalize."""
  n, how = 100_000, Sampling(top_p=0.9, temperature=0.7)
  keys = jax.random.split(jax.random.key(5), n)
  draws = jax.jit(lambda logits, keys: sampling.draw(logits, keys, how.rule(logprobs=True), how.values(5)))
  found = draws(jnp.broadcast_to(LOGITS[0], (n, 5)), keys)
  kept = np.asarray(allowed_tokens(LOGITS[:1] / 0.7, how.rule(), how.values(5)))[0]
  ratio = np.exp(np.asarray(found["model_logprob"], np.float64) - np.asarray(found["logprob"]))
  # Restricted to the tokens that can be drawn, the model's probabilities sum to less than 1.
  expected, error = PROBS[kept].sum(), ratio.std() / n**0.5
  assert abs(ratio.mean() - expected) < 3 * error
  assert not kept.all()


def test_impossible_biases_are_refused():
  with pytest.raises(UserError, match="logit_bias has -1"):
    Sampling(logit_bias={-1: 1.0})
  for value in (float("inf"), float("nan")):
    with pytest.raises(UserError, match=f"logit_bias has 2: {value}"):
      Sampling(logit_bias={2: value})
  with pytest.raises(UserError, match="ids 0 to 4"):
    Sampling(logit_bias={5: 1.0}).values(5)
  never = dict.fromkeys(range(4), float("-inf"))
  assert Sampling(logit_bias=never).values(5)["bias"].tolist() == [float("-inf")] * 4 + [0.0]
  for how, stop in ((Sampling(logit_bias=never, vocabulary=4), ()), (Sampling(logit_bias=never, min_tokens=1), (4, 9))):
    with pytest.raises(UserError, match="leave no token"):
      how.values(5, stop)


@pytest.mark.parametrize("size", [1, 2, 37])
def test_indices_are_drawn_in_proportion_to_their_probabilities(size):
  """Of 37 indices in five blocks of eight, a third have probability 0, and so have all indices of one block."""
  generator = np.random.default_rng(size)
  logits = generator.normal(size=size) * 2
  logits[generator.random(size) < 1 / 3] = -np.inf
  logits[8:16] = -np.inf
  logits[0] = logits[1:].max(initial=0)
  logits -= logits.max()
  draws = 20_000
  keys = jax.random.split(jax.random.key(7), draws)
  drawn = np.asarray(categorical(keys, jnp.broadcast_to(logits.astype(np.float32), (draws, size))))
  expected = np.exp(logits) / np.exp(logits).sum()
  found = np.bincount(drawn, minlength=size) / draws
  assert found.shape == (size,)
  np.testing.assert_array_less(np.abs(found - expected), 5 * np.sqrt(expected * (1 - expected) / draws) + 1e-12)
