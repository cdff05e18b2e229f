"""The larger slices that ``compile`` tries if a step does not fit."""

import pytest

from maxtext_like.api.compile import _any_size
from maxtext_like.config.load import load_config


@pytest.mark.parametrize(
  ("words", "any_size"),
  [([], True), (["ici_fsdp_parallelism=4"], False), (["ici_fsdp_parallelism=4", "ici_data_parallelism=-1"], True)],
)
def test_a_larger_slice_is_tried_where_an_axis_takes_what_chips_it_has(words, any_size):
  """A larger slice helps only if an axis within a slice takes all remaining chips. The axis between slices, which does so by
  default, does not count."""
  assert _any_size(load_config("gemma4-tiny", words).config) == any_size
