"""Decoding with a draft model: the answers of the model, whatever the draft model proposes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from maxtext_like.config.load import load_config
from maxtext_like.errors import NonFiniteError
from maxtext_like.generation.sampling import Sampling, log_probabilities
from maxtext_like.generation.scheduler import Request, Scheduler
from maxtext_like.generation.slots import Draft
from maxtext_like.generation.speculative import accept_or_draw
from maxtext_like.models.build import build_decoder, precision_of
from tests.tiers import tiers

# One program prefills all of them, with 16 tokens.
PROMPTS = [[2, 5, 9, 14, 33, 8, 7], [2, 61, 40], [7], list(range(11, 27))]
LENGTH = 13
SLOTS = 4
NEVER = 999  # is no token: every run has one token that ends answers, so that all runs share their programs
GREEDY = Sampling(temperature=0.0)
SAMPLED = Sampling(temperature=20.0)


GEMMA = ["num_decoder_layers=2", "layer_types=[sliding,global]", "sliding_window_size=5", "mlp_dim=40"]


def built(seed: int, scale: float = 1.0, *words: str, name: str = "gemma3-tiny"):
  """Returns a decoder and random parameters. Gemma 3 has two layers, and its sliding layer has a window of 5 keys."""
  sizes = ["dtype=float32", "vocab_size=97", "logits_via_embedding=false", "emb_dim=24"]
  config = load_config(name, [*sizes, *(GEMMA if name == "gemma3-tiny" else []), *words]).config
  decoder = build_decoder(config.model, precision_of(config.precision), vision=config.vision)
  leaves, tree = jax.tree.flatten(decoder.params())
  draw = np.random.default_rng(seed).normal
  return decoder, jax.tree.unflatten(tree, [draw(size=leaf.shape, scale=scale).astype(np.float32) for leaf in leaves])


@pytest.fixture(scope="module")
def model():
  return built(0)


@pytest.fixture(scope="module")
def other():
  """A draft model of one layer that agrees with the model only by chance. Its tables have more rows."""
  return built(1, 1.0, "num_decoder_layers=1", "layer_types=[global]", "vocab_size=101")


def near(model, distance=0.02):
  """Returns the model with other parameters: if they are only slightly different, it agrees with the model often."""
  decoder, params = model
  random = np.random.default_rng(2)
  return decoder, jax.tree.map(lambda x: (x + distance * random.normal(size=x.shape)).astype(np.float32), params)


def requests(*numbers: int, answers: int = 1, limit: int = LENGTH) -> list[Request]:
  return [Request(tokens=PROMPTS[i], limit=limit + i, seed=3, stream=10 * i, answers=answers) for i in numbers]


def run(model, asked, draft=None, tokens=3, *, slots=SLOTS, sampling=SAMPLED, stop=(NEVER,), **options):
  """Returns {(number of the prompt, sample): (tokens, log-probabilities of both kinds, why it ended)} and the scheduler."""
  decoder, params = model
  if draft is not None:
    options |= {"draft": Draft(draft[0], tokens), "draft_params": draft[1]}
  scheduler = Scheduler(decoder, params, asked, sampling, frozenset(stop), largest=slots, least=slots, logprobs=True, **options)
  found: dict[tuple[int, int], tuple] = {}
  for piece in (piece for pieces in scheduler.run() for piece in pieces):
    key = asked[piece.request].stream // 10, piece.sample
    tokens, own, of_model, _ = found.get(key, ([], [], [], None))
    found[key] = (tokens + piece.tokens, own + piece.logprobs, of_model + piece.model_logprobs, piece.ended)
  return found, scheduler


def same_answers(one, two):
  """The same tokens and ends, and log-probabilities that differ by rounding only."""
  assert {key: (values[0], values[3]) for key, values in one.items()} == {k: (v[0], v[3]) for k, v in two.items()}
  for key, values in one.items():
    for i in (1, 2):
      np.testing.assert_allclose(values[i], two[key][i], atol=1e-4)


@pytest.mark.parametrize("kind", ["far", "near", "model"])
def test_greedy_answers_are_those_without_a_draft_model(model, kind):
  """Eight answers share four slots. Rings of the sliding layers are full, and answers end by a token or their length."""
  draft = {"far": near(model, 9.0), "near": near(model), "model": model}[kind]
  asked, how = requests(0, 1, 2, 3, answers=2), {"sampling": GREEDY, "turn": 8}
  plain, _ = run(model, asked, **how)
  stop = [plain[1, 0][0][6]]
  plain, _ = run(model, asked, stop=stop, **how)
  assert {values[3] for values in plain.values()} == {"stop", "length"}
  found, scheduler = run(model, asked, draft, stop=stop, **how)
  same_answers(found, plain)
  per_pass = scheduler.made / scheduler.passes
  assert {"far": per_pass < 1.5, "near": 1.5 < per_pass < 3.9, "model": 3 < per_pass <= 4}[kind], per_pass


def test_answers_do_not_depend_on_other_answers_slots_or_turns(model, other):
  together, scheduler = run(model, requests(0, 1, 2, 3), other)
  assert 1.1 < scheduler.made / scheduler.passes < 3.9, "some proposals are accepted, others not"
  assert all(len(values[0]) == len(values[1]) == len(values[2]) and values[3] == "length" for values in together.values())
  several, _ = run(model, [*requests(3, 2), *requests(1, 0, answers=2)], other, turn=4)
  assert {key: several[key] for key in together} == together
  assert several[1, 1] != several[1, 0], "a further answer has its own draws"
  alone, _ = run(model, requests(0), other)
  assert alone[0, 0] == together[0, 0], "the number of slots is the same"


def test_entries_of_a_draft_model_that_are_not_finite_do_not_remain_in_a_slot(model, other):
  """The first four answers leave such entries, and the next ones use the same slots."""
  decoder, params = other
  broken = jax.tree.map(np.copy, params)
  next(iter(broken["embedding"].values()))[60:65] = np.nan
  alone, scheduler = run(model, requests(0, 1, 2, 3), (decoder, broken))
  assert scheduler.made / scheduler.passes > 1.1, "most tokens can be proposed"
  first = [Request(tokens=[50 + i], limit=30, seed=9, stream=10 * (4 + i)) for i in range(SLOTS)]
  found, _ = run(model, [*first, *requests(0, 1, 2, 3)], (decoder, broken))
  assert all(set(found[4 + i, 0][0][20:]) & set(range(60, 65)) for i in range(SLOTS))
  assert {key: found[key] for key in alone} == alone


@pytest.mark.slow
def test_growing_8_bit_caches_with_arrays_of_each_layer(model, monkeypatch):
  """Six tokens are proposed at a time, more than the window has."""
  (decoder, params), (of_draft, draft_params) = model, near(model)
  model, draft = (decoder, decoder.apart(params)), (of_draft, of_draft.apart(draft_params))
  how = {"sampling": GREEDY, "int8_cache": True}
  plain, _ = run(model, requests(0, 3, limit=30), **how)
  monkeypatch.setattr("maxtext_like.generation.shapes._GROWS_FROM", 48)
  monkeypatch.setattr("maxtext_like.generation.shapes._MULTIPLE", 4)
  found, scheduler = run(model, requests(0, 3, limit=30), draft, 6, turn=8, **how)
  assert scheduler._capacity == 64, "16 + 33 tokens, and 12 for proposals"
  assert {key: values[0] for key, values in found.items()} == {key: values[0] for key, values in plain.items()}


@pytest.mark.parametrize("part", ["all", "one token"])
def test_a_draft_model_with_numbers_that_are_not_finite_changes_nothing(model, part):
  decoder, params = near(model)
  plain, _ = run(model, requests(0, 1), sampling=GREEDY)
  broken = jax.tree.map(np.copy, params)
  table = broken["embedding"]["table"] if "table" in broken["embedding"] else next(iter(broken["embedding"].values()))
  table[slice(None) if part == "all" else plain[0, 0][0][2]] = np.nan
  found, scheduler = run(model, requests(0, 1), (decoder, broken), sampling=GREEDY)
  same_answers(found, plain)
  if part == "all":
    assert scheduler.made == scheduler.passes, "no proposal is accepted"


def test_logits_of_the_model_that_are_not_finite_are_an_error(model):
  decoder, params = model
  plain, _ = run(model, requests(0), sampling=GREEDY)
  broken = jax.tree.map(np.copy, params)
  table = next(iter(broken["embedding"].values()))
  table[plain[0, 0][0][4]] = 3e38
  with pytest.raises(NonFiniteError, match="the logits are not finite"):
    run((decoder, broken), requests(0), near(model), sampling=GREEDY)


def test_sampled_answers_have_the_distribution_of_the_model():
  """Answers of three tokens from a vocabulary of 7, compared with the exact probabilities of all 343 answers.

  Penalties and the smallest length apply to every place of a pass. The draft model has tables with more rows.
  """
  words, V, count, prompt, stop = ["num_decoder_layers=1", "layer_types=[global]"], 7, 5000, [1, 2], 6
  model, draft = built(4, 0.5, "vocab_size=7", *words), built(5, 0.3, "vocab_size=9", *words)
  penalties = {"repetition_penalty": 1.6, "presence_penalty": 0.3, "frequency_penalty": 0.7, "min_tokens": 3}
  sampling = Sampling(temperature=5.0, top_p=0.9, **penalties)
  ask = [Request(tokens=prompt, limit=3, seed=8, stream=0, answers=count)]
  found, scheduler = run(model, ask, draft, 2, slots=256, sampling=sampling, stop=[stop])
  assert 1.3 < scheduler.made / scheduler.passes < 1.9, "some proposals are accepted, others not"
  seen = np.zeros((V, V, V))
  np.add.at(seen, tuple(np.array([values[0] for values in found.values()]).T), 1)
  # The probabilities after every beginning of an answer.
  grid = np.stack(np.meshgrid(*[np.arange(V)] * 2, indexing="ij"), -1).reshape(-1, 2)
  rule, values = sampling.rule(), sampling.values(V, [stop])
  own = {"barred": jnp.arange(V)[None] == stop, "prompt": jnp.isin(jnp.arange(V), jnp.asarray(prompt))[None]}

  @jax.jit
  def probabilities(params, grid):
    tokens = jnp.concatenate([jnp.tile(jnp.asarray(prompt), (len(grid), 1)), grid], 1)
    logits, _ = model[0](params, {"tokens": tokens})
    earlier = jnp.cumsum(jax.nn.one_hot(grid, V, dtype=jnp.int32), 1)
    counts = [jnp.zeros_like(earlier[:, 0]), earlier[:, 0], earlier[:, 1]]
    return [jnp.exp(log_probabilities(logits[:, 1 + i], rule, values, counts=x, **own)) for i, x in enumerate(counts)]

  first, second, third = (np.asarray(p).reshape(V, V, V) for p in probabilities(model[1], grid))
  exact = first[0, 0][:, None, None] * second[:, 0][:, :, None] * third
  assert abs(exact.sum() - 1) < 1e-5
  assert not seen[exact == 0].any(), "a token that the filters remove"
  likely = exact * count > 5
  chi = float(((seen - exact * count)[likely] ** 2 / (exact * count)[likely]).sum())
  # The mean of chi-square is the number of cells, and its variance twice as large.
  assert likely.sum() > 50
  assert chi < likely.sum() + 3 * (2 * likely.sum()) ** 0.5, (chi, likely.sum())


def test_an_accepted_or_drawn_token_has_the_distribution_of_the_model():
  random, V, count = np.random.default_rng(0), 5, 20_000
  p, q = (random.dirichlet(np.full(V, 0.7)) for _ in range(2))
  p[2], q[4] = 0, 0
  p, q = p / p.sum(), q / q.sum()
  wide = lambda x: jnp.broadcast_to(jnp.log(jnp.asarray(x, jnp.float32)), (count, V))
  keys = jax.random.split(jax.random.key(0), count)
  proposed = jnp.asarray(random.choice(V, count, p=q), jnp.int32)
  rate = lambda token: np.bincount(np.asarray(token), minlength=V) / count
  token, accepted = accept_or_draw(keys, wide(p), wide(q), proposed)
  np.testing.assert_allclose(rate(token), p, atol=0.01)
  assert abs(float(accepted.mean()) - np.minimum(p, q).sum()) < 0.01
  assert rate(token)[2] == 0
  # Equal distributions accept everything, and nothing is accepted from a draft model without a distribution.
  assert bool(accept_or_draw(keys, wide(q), wide(q), proposed)[1].all())
  token, accepted = accept_or_draw(keys, wide(p), jnp.full((count, V), -jnp.inf), proposed)
  assert not bool(accepted.any())
  np.testing.assert_allclose(rate(token), p, atol=0.01)


FAMILIES = {
  "gemma4-e2b-tiny": ["num_decoder_layers=4", "num_kv_shared_layers=2", "inhomogeneous_layer_cycle_interval=2"],
  "gemma4-moe-tiny": ["num_decoder_layers=2", "inhomogeneous_layer_cycle_interval=2", "num_experts=4"],
  "qwen3-moe-tiny": ["num_decoder_layers=1", "num_experts=4"],
  "deepseek3.2-tiny": ["num_decoder_layers=2", "num_experts=4", "n_routing_groups=2", "indexer_topk=12"],
}


@pytest.mark.parametrize("name", tiers(FAMILIES, slow=FAMILIES))
def test_greedy_answers_of_other_kinds_of_layers(name):
  """Shared keys and values, experts, and latents with an indexer, whose draft model has no indexer."""
  words = [*FAMILIES[name], *(["sliding_window_size=5"] if name.startswith("gemma4") else [])]
  model = built(6, 1.0, *words, name=name)
  if name == "deepseek3.2-tiny":
    decoder, _ = built(6, 1.0, *words[:-1], name="deepseek3-tiny")
    kept = {path for path, _ in jax.tree_util.tree_leaves_with_path(decoder.params())}
    params = [x for path, x in jax.tree_util.tree_leaves_with_path(model[1]) if path in kept]
    draft = near((decoder, jax.tree.unflatten(jax.tree.structure(decoder.params()), params)))
  else:
    draft = near(model)
  plain, _ = run(model, requests(0, 1, 2, 3), sampling=GREEDY)
  assert len({token for values in plain.values() for token in values[0]}) > 12
  found, scheduler = run(model, requests(0, 1, 2, 3), draft, sampling=GREEDY)
  assert 1.2 < scheduler.made / scheduler.passes < 3.9, "some proposals are accepted, others not"
  same_answers(found, plain)
