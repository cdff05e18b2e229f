"""Fixtures with finished runs that several adapter tests use."""

import pytest

import maxtext_like
from tests.training.adapters.runs import LORA, train


@pytest.fixture(scope="session")
def workplace(tmp_path_factory):
  place = tmp_path_factory.mktemp("runs")
  (place / "text.txt").write_text("The fox runs. The hen sits. " * 60)
  assert train(place, "base", "steps=1") == 0
  assert train(place, "adapter", f"init_from={place}/base", *LORA, "steps=4") == 0
  return place


@pytest.fixture(scope="session")
def other(workplace):
  """A run whose weights differ from the base weights of the adapter."""
  assert train(workplace, "other", "steps=1", "seed=3") == 0
  return workplace / "other"


@pytest.fixture(scope="session")
def for_peft(workplace):
  maxtext_like.export_adapter(workplace / "adapter", workplace / "for-peft")
  return workplace / "for-peft"
