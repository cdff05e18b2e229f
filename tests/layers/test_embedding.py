"""Tests which row of a table each token reads. Placeholders read the row of padding in every table. Tokens without a row are
reported on the host."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from maxtext_like.layers.embedding import Lookup

PADDING, IMAGE, SOUND, BEYOND = 3, 9, 30, 1000


def test_rows_and_where_they_stand_for_placeholders():
  lookup = Lookup(vocab_size=37, placeholders=(IMAGE, BEYOND), padding=PADDING)
  rows, held = lookup(jnp.asarray([[1, IMAGE, 3], [BEYOND, 36, 0]]))
  np.testing.assert_array_equal(rows, [[1, PADDING, 3], [PADDING, 36, 0]])
  np.testing.assert_array_equal(held, [[False, True, False], [True, False, False]])
  tokens = jnp.asarray([[1, 2]])
  assert Lookup(vocab_size=37)(tokens) == (tokens, None)


def test_what_has_no_row_and_why():
  lookup = Lookup(vocab_size=37, per_layer_rows=30, placeholders=(BEYOND, 33))
  np.testing.assert_array_equal(lookup.missing(np.array([[0, 29, 30], [36, 37, 33]])), [[0, 0, 1], [1, 1, 0]])
  np.testing.assert_array_equal(lookup.missing(np.array([-1, BEYOND, 2**40])), [1, 0, 1])
  assert lookup.why_missing(30) == "the per-layer embedding has rows for ids 0 to 29 (vocab_size_per_layer_input)"
  assert lookup.why_missing(37) == lookup.why_missing(-1) == "the vocabulary has ids 0 to 36"
  assert Lookup(vocab_size=37, per_layer_rows=41).rows == 37


@pytest.fixture(scope="module")
def model(tiny_decoder, random_params):
  """Return a decoder with per-layer embeddings and placeholders, its parameters, and a function from tokens to a loss and its
  gradients."""
  decoder = tiny_decoder("gemma4-e2b")
  cfg = dataclasses.replace(decoder.cfg, placeholder_ids=(IMAGE, SOUND, BEYOND), pad_token_id=PADDING)
  decoder = dataclasses.replace(decoder, cfg=cfg)
  p = random_params(decoder.params())
  step = jax.jit(jax.value_and_grad(lambda p, tokens: jnp.sum(jnp.sin(decoder.hidden(p, {"tokens": tokens})[0]))))
  return decoder, p, lambda tokens: step(p, jnp.asarray(tokens))


@pytest.mark.slow
def test_a_placeholder_is_padding_in_every_table(model):
  _, _, step = model
  loss, _ = step([[2, IMAGE, 5, SOUND, BEYOND, 7]])
  assert loss == step([[2, PADDING, 5, PADDING, PADDING, 7]])[0]
  assert loss != step([[2, 8, 5, PADDING, PADDING, 7]])[0]


def test_the_row_of_padding_is_not_trained_by_placeholders(model):
  """The row of padding gets no gradient, as with ``padding_idx`` of ``torch.nn.Embedding``. The rows of placeholders get none
  either, because nothing reads them."""
  _, _, step = model
  _, gradient = step([[2, IMAGE, 5, SOUND, BEYOND, 7]])
  for name in ("embedding", "ple"):
    table = np.asarray(gradient[name]["table"])
    touched = np.flatnonzero(np.any(table != 0, axis=tuple(range(1, table.ndim))))
    np.testing.assert_array_equal(touched, [2, 5, 7], err_msg=name)
