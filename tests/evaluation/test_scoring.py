"""Log-probabilities of continuations equal those of single rows, and do not depend on the other rows of a batch."""

import jax
import numpy as np
import pytest

from maxtext_like import load
from maxtext_like.api.pretrained import Pretrained
from maxtext_like.errors import NonFiniteError, UserError
from maxtext_like.evaluation.scoring import LAST_TOKENS, Score, Scorer, padded_length
from tests.generation.letters import copy_golden


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Pretrained:
  """A model with experts. If experts had a limited capacity, rows would influence each other."""
  folder = copy_golden("qwen3_moe", tmp_path_factory.mktemp("golden") / "model")
  return load(folder, "dtype=float32", "matmul_precision=highest", "compilation_cache_dir=null")


def written_out(model: Pretrained, context: list[int], continuation: list[int], max_length: int) -> Score:
  """Returns the score of a request, computed from the logits of its row only."""
  inputs = (context + continuation)[-(max_length + 1) :][:-1]
  padded = np.zeros((1, 40), np.int32)
  padded[0, : len(inputs)] = inputs
  logits = np.asarray(model.logits(padded))[0, : len(inputs)]
  logits = logits[len(inputs) - len(continuation) :].astype(np.float64)
  top = logits.max(axis=-1, keepdims=True)
  log_probs = logits - top - np.log(np.exp(logits - top).sum(axis=-1, keepdims=True))
  picked = log_probs[np.arange(len(continuation)), continuation]
  return Score(picked.sum(), logits.argmax(axis=-1).tolist() == continuation)


def test_shapes_of_rows_are_few_and_padding_is_less_than_half_of_the_row():
  lengths = [padded_length(n) for n in range(1, 8193)]
  assert sorted(set(lengths)) == [32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048, 3072, 4096, 6144, 8192]
  assert all(n <= size <= max(32, 1.5 * n) for n, size in enumerate(lengths, 1))
  assert padded_length(33, 7) == 49


@pytest.mark.slow
def test_scores_are_those_of_single_rows(model: Pretrained):
  """Requests include shared contexts, more last tokens than one row can score, too long inputs, and a greedy continuation."""
  random = np.random.default_rng(5)
  size, limit = model.config.model.vocab_size, 37
  draw = lambda n: random.integers(10, size, n).tolist()
  shared = draw(11)
  requests = [(shared, [token]) for token in draw(LAST_TOKENS + 3)]
  requests += [(shared[:-2], [*shared[-2:], 17]), (draw(5), draw(7)), (draw(60), draw(4)), (draw(1), draw(37)), ([2], [11])]
  best = int(np.argmax(np.asarray(model.logits([shared]))[0, -1]))
  requests.append((shared, [best]))
  counts = []
  scorer = Scorer(
    model.model, model.decoder, max_length=limit, batch_size=3, on_batch=lambda done, of: counts.append((done, of))
  )
  found = scorer(model.params, requests)
  for (context, continuation), score in zip(requests, found, strict=True):
    expected = written_out(model, context, continuation, limit)
    assert score.log_probability == pytest.approx(expected.log_probability, abs=1e-5)
    assert score.greedy == expected.greedy
  assert found[-1].greedy
  assert counts == [(0, 6), (2, 6), (5, 6)], "two rows of 48 positions, four of 32 in batches of 3"
  # Single requests and another order of requests give bitwise equal scores.
  assert [scorer(model.params, [request])[0] for request in requests[-4:]] == found[-4:]
  assert scorer(model.params, requests[::-1]) == found[::-1]


def test_what_it_refuses(model: Pretrained):
  scorer = Scorer(model.model, model.decoder, max_length=8, batch_size=3)
  with pytest.raises(UserError, match="request 1: the continuation has 9 tokens, more than max_length = 8"):
    scorer(model.params, [([5], [6]), ([5], [6] * 9)])
  with pytest.raises(UserError, match="request 0: token id 100000"):
    scorer(model.params, [([100000], [6])])
  broken = jax.tree.map(lambda x: x * np.nan, model.params)
  with pytest.raises(NonFiniteError, match=r"request 0: the logits are not finite\n  fix: use an earlier checkpoint"):
    Scorer(model.model, model.decoder, max_length=37, batch_size=3)(broken, [([5], [6])])
