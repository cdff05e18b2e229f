"""Random models give the same results as transformers, here and after export. Needs the extra ``parity``.

To run other seeds: python tests/parity/fuzz.py --seeds 100-200 --family gemma4
"""

import dataclasses
from pathlib import Path

import jax
import pytest

from tests.parity.draw import FAMILIES, draw

pytest.importorskip("torch", reason="needs the extra parity")
pytest.importorskip("transformers", reason="needs the extra parity")

from tests.parity.check import check
from tests.parity.fuzz import at_the_same_stage, report
from tests.parity.shrink import shrink

# torch gives this warning for a model without shared experts.
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore:Initializing zero-element tensors:UserWarning")]
SEEDS = range(4)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_random_model(family: str, seed: int, tmp_path: Path):
  outcome = check(draw(family, seed), keep=tmp_path)
  jax.clear_caches()
  assert not outcome.undecided, "every draw of the weights hangs on rounding: take another seed"
  if outcome.failure:
    pytest.fail(report(outcome.case, outcome.failure, outcome.case))


def test_another_window_is_found_in_its_layer_and_shrunk():
  """The fuzzer finds a planted fault, a sliding window one key wider than the checkpoint's, and shrinks the case."""
  config = draw("gemma3", 0).config | {
    "num_hidden_layers": 3,
    "layer_types": ["full_attention", "sliding_attention", "full_attention"],
    "sliding_window": 5,
  }
  case = dataclasses.replace(draw("gemma3", 0), config=config, rows=2, length=530, words=("sliding_window_size=6",))
  failure = check(case).failure
  assert failure is not None
  assert (failure.stage, failure.where) == ("forward", "hidden.layer01")
  smaller = shrink(case, at_the_same_stage(failure), tries=25)
  assert smaller.length <= 32
  assert smaller.text["num_hidden_layers"] < 3
  assert smaller.words
  assert '"sliding_window": 5' in report(case, failure, smaller)
