"""Generation equals passing the complete text through the model for every token, for each row and any padding."""

import dataclasses

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
from tests.tiers import slow

GREEDY = Sampling(temperature=0.0)
PROMPTS = [[2, 5, 9, 14, 33, 8, 7], [2, 61, 40]]
LENGTH = 13  # tokens to make: more than one call of the decoding program, and more than the sliding window below

# Every kind of cache: ring buffers of a window smaller than the text, shared keys, latents with index keys.
MODELS = {
  "gemma4-e2b-tiny": [
    "sliding_window_size=5",
    "num_decoder_layers=4",
    "num_kv_shared_layers=2",
    "inhomogeneous_layer_cycle_interval=2",
  ],
  "deepseek3.2-tiny": ["indexer_topk=6", "num_decoder_layers=2", "num_experts=4", "n_routing_groups=2"],
}


@pytest.fixture(scope="module", params=[slow("gemma4-e2b-tiny"), "deepseek3.2-tiny"])
def model(request):
  config = load_config(request.param, ["dtype=float32", *MODELS[request.param]]).config
  decoder = build_decoder(config.model, precision_of(config.precision), vision=config.vision)
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
  with pytest.raises(NonFiniteError, match="prompt 0, token 0"):
    run((decoder, broken), PROMPTS)


@pytest.mark.parametrize(("prompts", "match"), [([[]], "empty"), ([[2, 9999]], "9999"), ([[-1]], "-1")])
def test_impossible_prompts_are_refused(model, prompts, match):
  with pytest.raises(UserError, match=match):
    run(model, prompts)


@pytest.fixture(scope="module")
def with_per_layer_embeddings():
  words = ["dtype=float32", "num_decoder_layers=2", "num_kv_shared_layers=1", "layer_types=[global,global]", "emb_dim=24"]
  config = load_config("gemma4-e2b-tiny", words).config
  decoder = build_decoder(config.model, precision_of(config.precision), vision=config.vision)
  # A trained model: an initial one repeats its last token.
  leaves, tree = jax.tree.flatten(decoder.params())
  draws = [np.random.default_rng(i).normal(size=leaf.shape).astype(np.float32) for i, leaf in enumerate(leaves)]
  return decoder, jax.tree.unflatten(tree, draws)


def changed(model, **values):
  """Returns the model with other values in its decoder's configuration."""
  decoder, params = model
  return dataclasses.replace(decoder, cfg=dataclasses.replace(decoder.cfg, **values)), params


@pytest.mark.slow
def test_placeholders_are_padding_in_a_prompt_and_in_an_answer(with_per_layer_embeddings):
  decoder, _ = with_per_layer_embeddings
  assert decoder.cfg.placeholder_ids == (260, 263, 264)  # from the model file, without a tower
  padding = decoder.cfg.pad_token_id
  prompts = [[2, 260, 9, 263, 8], [2, padding, 9, padding, 8]]
  one, two = run(with_per_layer_embeddings, prompts)
  assert one == two
  # A token that the model generates becomes a placeholder: the continuation is that of padding in its place.
  free = run(with_per_layer_embeddings, [[2, 5, 9]])[0]
  marked = changed(with_per_layer_embeddings, placeholder_ids=(free[3],))
  answer = run(marked, [[2, 5, 9]])[0]
  assert answer[:4] == free[:4]
  assert answer[4:] == run(with_per_layer_embeddings, [[2, 5, 9, *free[:3], padding]], max_tokens=LENGTH - 4)[0]
  assert answer != free


@pytest.mark.slow
def test_a_token_without_a_row_in_the_per_layer_table_ends_in_an_error(with_per_layer_embeddings):
  """transformers raises IndexError there; a clamped row would continue with wrong numbers."""
  free = run(with_per_layer_embeddings, [[2, 5, 9]])[0]
  decoder, params = with_per_layer_embeddings
  small = dataclasses.replace(decoder.cfg.per_layer_input, vocab_size=max(free[:4], default=0))
  rows = params["ple"] | {"table": params["ple"]["table"][: small.vocab_size]}
  cut = changed((decoder, params | {"ple": rows}), per_layer_input=small)
  assert small.vocab_size > 9
  at = free.index(small.vocab_size)
  with pytest.raises(UserError, match=rf"token {at} of the answer is {small.vocab_size}: the per-layer embedding has rows for"):
    run(cut, [[2, 5, 9]])
  assert run(cut, [[2, 5, 9]], max_tokens=at + 1)[0] == free[: at + 1], "nothing looks the last token up"
  assert run(cut, [[2, 5, 9]], stop=frozenset({small.vocab_size}))[0] == free[:at]
  with pytest.raises(UserError, match=f"prompt 0: token id {small.vocab_size}: the per-layer embedding"):
    run(cut, [[2, small.vocab_size]])


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
