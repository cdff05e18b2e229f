"""Continuous batching: an answer is the same bit for bit, whatever else is generated and however it is scheduled."""

import functools
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from maxtext_like.config.load import load_config
from maxtext_like.errors import NonFiniteError, UserError
from maxtext_like.generation import shapes, slots
from maxtext_like.generation.engine import Prompts
from maxtext_like.generation.sampling import Sampling
from maxtext_like.generation.scheduler import Request, Scheduler, _Answer, _Result
from maxtext_like.generation.slots import NONE, NOT_FINITE
from maxtext_like.generation.texts import STREAMED_TURN, Options, Texts
from maxtext_like.layers.cache import Step
from maxtext_like.layers.embedding import Lookup
from maxtext_like.models.build import build_decoder, precision_of

PROMPTS = [
  [2, 5, 9, 14, 33, 8, 7],
  [2, 61, 40],
  [7],
  [11, 12, 13, 14, 15, 16, 17, 18, 19, 20, 21, 22, 23, 24, 25, 26, 27, 28, 29],
]
LENGTH = 9
SAMPLED = Sampling(temperature=20.0)


@pytest.fixture(scope="module")
def model():
  """A sliding layer with a window of 5 keys, and a global layer."""
  words = ["dtype=float32", "num_decoder_layers=2", "layer_types=[sliding,global]", "sliding_window_size=5", "emb_dim=24"]
  config = load_config("gemma3-tiny", [*words, "mlp_dim=40", "vocab_size=97"]).config
  decoder = build_decoder(config.model, precision_of(config.precision), vision=config.vision)
  leaves, tree = jax.tree.flatten(decoder.params())
  draws = [np.random.default_rng(i).normal(size=leaf.shape).astype(np.float32) for i, leaf in enumerate(leaves)]
  return decoder, jax.tree.unflatten(tree, draws)


def requests(*numbers: int, answers: int = 1, limit: int = LENGTH) -> list[Request]:
  return [Request(tokens=PROMPTS[i], limit=limit + i, seed=3, stream=10 * i, answers=answers) for i in numbers]


def run(model, asked, *, slots=4, sampling=SAMPLED, stop=(), cancel=None, **options):
  """Returns {(number of the prompt, sample): (tokens, log-probabilities of both kinds, why it ended)}."""
  decoder, params = model
  scheduler = Scheduler(decoder, params, asked, sampling, frozenset(stop), largest=slots, logprobs=True, **options)
  found: dict[tuple[int, int], tuple] = {
    (i, sample): ([], [], [], None) for i, r in enumerate(asked) for sample in range(r.answers)
  }
  for pieces in scheduler.run():
    for piece in pieces:
      key = piece.request, piece.sample
      tokens, own, of_model, _ = found[key]
      found[key] = (tokens + piece.tokens, own + piece.logprobs, of_model + piece.model_logprobs, piece.ended)
      if key == cancel:
        scheduler.cancel(*key)
  return {(asked[i].stream // 10, sample): values for (i, sample), values in found.items()}


def test_answers_do_not_depend_on_other_answers_or_slots(model):
  together = run(model, requests(0, 1, 2, 3))
  assert [len(values[0]) for values in together.values()] == [LENGTH, LENGTH + 1, LENGTH + 2, LENGTH + 3]
  assert all(len(values[0]) == len(values[1]) == len(values[2]) and values[3] == "length" for values in together.values())
  # Six answers share four slots, in another order. Two of them are second answers to a prompt.
  several = run(model, [*requests(3, 2), *requests(1, 0, answers=2)], turn=2)
  assert {key: several[key] for key in together} == together
  assert several[1, 1] != several[1, 0], "a further answer has its own draws"
  assert run(model, requests(1), least=4) == {(1, 0): together[1, 0]}, "as many slots for a single answer"


def test_a_first_token_is_drawn_among_as_many_rows_in_every_mix(model, monkeypatch):
  """The rounding of the head may depend on the number of rows, so one answer has as many rows as three."""
  decoder, params = model

  def rows(answers: int, *begun: _Answer) -> list[int]:
    found = []
    monkeypatch.setattr(slots, "start", lambda *arguments, copies: found.append(len(arguments[7])) or (None, {}))
    scheduler = Scheduler(decoder, params, [replace(requests(1)[0], answers=answers)], SAMPLED, frozenset(), largest=4, least=4)
    scheduler.state = None  # pyright: ignore[reportAttributeAccessIssue]
    scheduler._start(list(begun), [0], jnp.zeros(()), 2)
    return found

  assert rows(4, _Answer(0, 0, 0), _Answer(0, 1, 1), _Answer(0, 2, 2)) == rows(4, _Answer(0, 3, 0)) == [4]
  assert rows(1, _Answer(0, 0, 0)) == [2]


def test_an_answer_that_is_canceled_ends(model):
  whole = run(model, requests(0, 1, 2, 3), turn=2)
  found = run(model, requests(0, 1, 2, 3), turn=2, cancel=(1, 0))
  assert len(found[1, 0][0]) < len(whole[1, 0][0])
  assert {key: values for key, values in found.items() if key[0] != 1} == {
    key: values for key, values in whole.items() if key[0] != 1
  }


def test_an_answer_with_a_stop_string_frees_its_slot(model, monkeypatch):
  """Every token is a letter, and half of the letters end an answer."""
  decoder, params = model
  drawn, decode = 0, slots.decode

  def counted(*arguments):
    nonlocal drawn
    state, found = decode(*arguments)
    drawn += int(np.sum(np.asarray(found["token"]) != NONE))
    return state, found

  monkeypatch.setattr(slots, "decode", counted)
  letters = tuple(chr(0x100 + i) for i in range(1, 97, 2))
  options = Options(sampling=Sampling(temperature=1e6), max_tokens=50, stop=frozenset([0]), stop_strings=letters, slots=2)
  prompts = Prompts([PROMPTS[1], PROMPTS[2], PROMPTS[1], PROMPTS[2], PROMPTS[1]])
  texts = Texts(decoder, prompts, options, lambda prompt, ids: "".join(chr(0x100 + i) for i in ids))
  ends = [piece.ended for pieces in texts.run(params, texts=False) for piece in pieces if piece.ended]
  assert ends == ["stop"] * 5
  # A call makes 8 tokens, and another call may have begun before the host reads the first one.
  needed = max(len(answer.tokens) for (answer,) in texts.answers)
  assert needed <= 16
  assert drawn <= 5 * (needed + 2 * STREAMED_TURN)


@pytest.mark.parametrize(
  ("tokens", "missing", "kept", "ended"),
  [
    ([5, 6, NONE, NONE], (), [5, 6], None),
    ([5, 9, NONE, NONE], (), [5], "stop"),
    ([9, NONE], (), [], "stop"),
    ([5, 6, 7, 8, 3], (), [5, 6, 7, 8], "length"),
    ([5, 6, 7, 8, NONE], (3,), [5, 6, 7, 8], "length"),  # nothing reads the last token
    ([5, 6, 7, NONE], (1,), [5], "failed"),
    ([5, 6, NOT_FINITE], (), [5, 6], "failed"),
    ([NOT_FINITE], (), [], "failed"),
  ],
)
def test_how_answers_end(model, monkeypatch, tokens, missing, kept, ended):
  decoder, params = model
  monkeypatch.setattr(Lookup, "missing", lambda self, found: np.isin(np.arange(len(found)), missing)[:, None])
  result = lambda answer: _Result({"token": jnp.array(tokens)[:, None]}, {0: answer})
  asked = requests(0, limit=4)
  scheduler = Scheduler(decoder, params, asked, SAMPLED, frozenset([9]), largest=1, continues=True)
  answer = _Answer(0, 0, 0)
  scheduler._answers[0] = answer
  (piece,) = scheduler._read(result(answer))
  assert (piece.tokens, piece.ended) == (kept, ended)
  assert (answer.ended, answer in scheduler._canceled) == (ended in ("stop", "length"), ended == "failed")
  if ended == "failed":
    wrong = f"token {len(kept)} of the answer"
    assert wrong in str(piece.error)
    raising = Scheduler(decoder, params, asked, SAMPLED, frozenset([9]), largest=1)
    with pytest.raises(NonFiniteError if NOT_FINITE in tokens else UserError, match=wrong):
      raising._read(result(_Answer(0, 0, 0)))


def test_a_failed_answer_leaves_nothing_in_its_slot(model, monkeypatch):
  """Numbers that are not finite do not reach the next answer, which does not overwrite all of them."""
  prefill = slots.prefill
  # The fifth answer gets the slot of the first.
  asked = [*requests(3, 0, 1, 2), replace(requests(2)[0], stream=40)]
  whole = run(model, asked)

  def broken(decoder, params, state, batch, step):
    state, hidden, clamped = prefill(decoder, params, state, batch, step)
    if batch["tokens"][0, 0] == PROMPTS[3][0]:
      cache = jax.tree.map(lambda x: x.at[:, step.rows].set(jnp.nan, mode="drop"), state.cache)
      state, hidden = replace(state, cache=cache), hidden * jnp.nan
    return state, hidden, clamped

  monkeypatch.setattr(slots, "prefill", broken)
  found = run(model, asked, continues=True)
  assert found.pop((3, 0)) == ([], [], [], "failed")
  assert found == {key: values for key, values in whole.items() if key != (3, 0)}


@pytest.mark.slow
def test_one_slot_gives_the_same_tokens(model):
  """Products with one row may be rounded in another way, so the log-probabilities are not compared bit for bit."""
  several, one = run(model, requests(0, 1, 3)), run(model, requests(0, 1, 3), slots=1)
  assert {key: values[0] for key, values in one.items()} == {key: values[0] for key, values in several.items()}
  decoder, params = model
  forward = jax.jit(lambda params, tokens: decoder(params, {"tokens": tokens})[0])
  for key, values in one.items():
    np.testing.assert_allclose(values[1], several[key][1], atol=1e-5)
    # Both log-probabilities are those of one pass over the complete text.
    text = PROMPTS[key[0]] + values[0]
    logits = np.asarray(forward(params, np.pad(np.array([text]), ((0, 0), (0, 40 - len(text))))), np.float64)
    for found, scores in ((values[1], logits / SAMPLED.temperature), (values[2], logits)):
      scores = scores - scores.max(axis=-1, keepdims=True)
      logprobs = scores - np.log(np.sum(np.exp(scores), axis=-1, keepdims=True))
      chosen = logprobs[0, np.arange(len(PROMPTS[key[0]]) - 1, len(text) - 1), values[0]]
      np.testing.assert_allclose(found, chosen, atol=1e-4)


@pytest.mark.slow
def test_chunks_and_larger_caches_change_nothing(model, monkeypatch):
  whole = run(model, requests(0, 3), slots=2)
  monkeypatch.setattr(shapes, "CHUNKS", (4, 8))
  monkeypatch.setattr(shapes, "_MULTIPLE", 8)
  monkeypatch.setattr(shapes, "_GROWS_FROM", 8)
  parts = run(model, requests(0, 3), slots=2, turn=3)
  assert {key: values[0] for key, values in parts.items()} == {key: values[0] for key, values in whole.items()}
  for key, values in parts.items():
    np.testing.assert_allclose(values[1], whole[key][1], atol=1e-5)


@pytest.mark.slow
def test_penalties_stops_and_rows_apart(model):
  decoder, params = model
  sampling = Sampling(temperature=0.0, frequency_penalty=1e6, repetition_penalty=1.3, min_tokens=3)
  free = run(model, requests(0, 1), slots=2, sampling=sampling)
  for tokens, *_ in free.values():
    assert len(set(tokens)) == len(tokens), "no token occurs twice"
  # A token that would end the answer is not drawn before three others.
  stop = free[1, 0][0][0]
  stopped = run(model, requests(1), slots=2, sampling=sampling, stop=[stop])
  assert stopped[1, 0][0][0] != stop
  assert len(stopped[1, 0][0]) >= 3
  apart = run((decoder, decoder.apart(params)), requests(0, 1), slots=2, sampling=sampling)
  assert {key: values[0] for key, values in apart.items()} == {key: values[0] for key, values in free.items()}


@pytest.mark.slow
def test_an_8_bit_cache_changes_little(model):
  decoder, params = model
  tokens = np.random.default_rng(0).integers(2, 97, (2, 13)).astype(np.int32)

  @functools.partial(jax.jit, static_argnames="int8")
  def last(params, int8):
    cache, place = decoder.empty_cache(2, 16, int8=int8), jnp.broadcast_to(jnp.arange(13), (2, 13))
    for begin, end in ((0, 12), (12, 13)):
      step = Step(jnp.full(2, begin), jnp.full(2, end - begin), fresh=begin == 0)
      x, cache, _ = decoder.extend(params, {"tokens": tokens[:, begin:end], "positions": place[:, begin:end]}, cache, step)
    return x, cache

  (exact, wide), (rounded, narrow) = (last(params, int8) for int8 in (False, True))
  difference = np.sqrt(np.mean((rounded - exact) ** 2) / np.mean(exact**2))
  assert 0 < difference < 0.03
  sizes = [sum(x.nbytes for x in jax.tree.leaves(cache)) for cache in (narrow, wide)]
  assert sizes[0] < 0.3 * sizes[1], "a quarter of float32, and the scales"
  found = run(model, requests(0, 1), slots=2, sampling=Sampling(temperature=0.0), int8_cache=True)
  assert all(len(values[0]) == LENGTH + number for (number, _), values in found.items())
