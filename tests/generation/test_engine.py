"""Generation: equal to taking the whole text through the model for every token, row by row and whatever the padding."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from maxtext_like.config.load import load_config
from maxtext_like.errors import NonFiniteError, UserError
from maxtext_like.generation.engine import Prompts, generate
from maxtext_like.generation.sampling import Sampling
from maxtext_like.layers.param import init
from maxtext_like.models.build import build_decoder, precision_of

GREEDY = Sampling(temperature=0.0)
PROMPTS = [[2, 5, 9, 14, 33, 8, 7], [2, 61, 40]]
LENGTH = 13  # tokens to make: more than one call of the decoding program, and more than the sliding window below

# Every kind of cache: ring buffers of a window smaller than the text, shared keys, latents with index keys.
MODELS = {
  "gemma4-e2b-tiny": ["sliding_window_size=5", "num_decoder_layers=6", "num_kv_shared_layers=3"],
  "deepseek3.2-tiny": ["indexer_topk=6", "num_decoder_layers=2", "num_experts=4", "n_routing_groups=2"],
}


@pytest.fixture(scope="module", params=["gemma4-e2b-tiny", pytest.param("deepseek3.2-tiny", marks=pytest.mark.slow)])
def model(request):
  config = load_config(request.param, ["dtype=float32", *MODELS[request.param]]).config
  decoder = build_decoder(config.model, precision_of(config.precision))
  return decoder, jax.jit(lambda: init(decoder.params(), jax.random.key(3)))()


def run(model, prompts, sampling=GREEDY, stop=frozenset(), max_tokens=LENGTH):
  answers = [[] for _ in prompts]
  decoder, params = model
  for rows in generate(decoder, params, Prompts(prompts), max_tokens=max_tokens, stop=stop, sampling=sampling):
    for answer, new in zip(answers, rows, strict=True):
      answer.extend(new)
  return answers


def test_equals_the_whole_forward_pass_for_every_token(model):
  decoder, params = model
  answers = run(model, PROMPTS)
  forward = jax.jit(lambda tokens, segments: decoder(params, {"tokens": tokens, "segments": segments})[0])
  width = max(map(len, PROMPTS)) + LENGTH
  for prompt, answer in zip(PROMPTS, answers, strict=True):
    text = prompt + answer
    tokens = jnp.asarray([text + [0] * (width - len(text))])
    logits = forward(tokens, (jnp.arange(width) < len(text))[None].astype(jnp.int32))
    expected = np.argmax(logits[0, len(prompt) - 1 : len(text) - 1], axis=-1)
    assert answer == expected.tolist()


@pytest.mark.slow
def test_rows_stop_one_by_one(model):
  free = run(model, PROMPTS)
  stop = free[0][4]
  stopped = run(model, PROMPTS, stop=frozenset({stop}))
  for whole, cut in zip(free, stopped, strict=True):
    end = whole.index(stop) if stop in whole else LENGTH
    assert cut == whole[:end]


@pytest.mark.slow
def test_the_same_seed_draws_the_same_and_another_seed_does_not(model):
  one, two, three = (run(model, PROMPTS, Sampling(seed=s, temperature=2.0)) for s in (1, 1, 2))
  assert one == two
  assert one != three


def test_nan_is_an_error_and_not_a_token(model):
  decoder, params = model
  broken = params | {"final_norm": {"scale": params["final_norm"]["scale"].at[0].set(jnp.nan)}}
  with pytest.raises(NonFiniteError, match="row 0, token 0"):
    run((decoder, broken), PROMPTS)


@pytest.mark.parametrize(("prompts", "match"), [([[]], "empty"), ([[2, 9999]], "9999"), ([[-1]], "-1")])
def test_impossible_prompts_are_refused(model, prompts, match):
  with pytest.raises(UserError, match=match):
    run(model, prompts)


def test_padding_on_either_side_is_left_out():
  ids = np.array([[0, 0, 5, 6, 7], [8, 9, 0, 0, 0], [0, 4, 0, 0, 0], [0, 0, 0, 0, 0]])
  got = Prompts.from_padded(ids, np.array([[0, 0, 1, 1, 1], [1, 1, 0, 0, 0], [0, 1, 1, 0, 0], [0] * 5]))
  assert got == Prompts([[5, 6, 7], [8, 9], [4, 0], []]), "the mask decides, not the id"
  types = Prompts.from_padded(ids[:2], ids[:2] > 0, token_types=ids[:2] % 2, images={}).token_types
  assert types == [[1, 0, 1], [0, 1]]
  with pytest.raises(UserError, match="between the tokens"):
    Prompts.from_padded(ids[:1], np.array([[1, 0, 1, 1, 1]]))
  with pytest.raises(UserError, match="expected one"):
    Prompts.from_padded(ids, np.ones((4, 4)))
