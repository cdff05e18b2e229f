"""Tests the advice of a run whose data do not fill one global batch."""

from types import SimpleNamespace
from typing import Any

import pytest

from maxtext_like.training.run.batches import smaller_batch


@pytest.mark.parametrize(
  ("each", "parts", "devices", "rows", "fix"),
  [
    (1.0, 8, 1, 2, "gradient_accumulation_steps=2"),
    (4.0, 1, 1, 2, "per_device_batch_size=2"),
    (2.0, 3, 4, 5, "per_device_batch_size=1 gradient_accumulation_steps=1"),
    (1.0, 1, 8, 5, ""),
  ],
)
def test_the_settings_of_a_smaller_batch(each, parts, devices, rows, fix):
  training = SimpleNamespace(per_device_batch_size=each, gradient_accumulation_steps=parts)
  program: Any = SimpleNamespace(
    config=SimpleNamespace(training=training),
    model=SimpleNamespace(mesh=SimpleNamespace(size=devices)),
    microbatch=round(each * devices),
  )
  why, settings = smaller_batch(program, rows)
  assert settings == fix
  shown = f" (per_device_batch_size={each:g} x gradient_accumulation_steps={parts} x {devices} device"
  assert why == shown + ("s)" if devices > 1 else ")")
