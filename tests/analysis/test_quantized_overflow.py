"""risk, xray-step, bisect and audit work for a model with an adapter on quantized weights that overflows in float16."""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import maxtext_like
from maxtext_like.analysis.step_xray import step_xray
from maxtext_like.api.risk import open_checkpoint
from maxtext_like.config.load import load_config
from maxtext_like.sharding.mesh import use_mesh
from maxtext_like.training.step.program import make_program

CHECKPOINT = Path(__file__).parents[1] / "golden/stress_fp16_mlp/checkpoint"
OPEN = ["float32_gate_product=false", "float16_clamp=false"]
ADAPTED = ["lora_rank=2", "base_weights=int8"]
ALONE = ["dtype=float16", *OPEN, *ADAPTED, "compilation_cache_dir=null"]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
  out = tmp_path_factory.mktemp("stress") / "imported"
  maxtext_like.import_checkpoint(CHECKPOINT, out)
  return str(out / "model.yml")


def test_risk_reads_the_weights_as_they_are_multiplied():
  said = maxtext_like.risk(CHECKPOINT, "dtype=float16", *ADAPTED, *OPEN)
  plain = maxtext_like.risk(CHECKPOINT, "dtype=float16", *OPEN)
  sizes = lambda risks: np.array([r.site.expected for r in risks.risks])
  assert said.overflows
  places = lambda risks: {(r.site.place, r.site.quantity) for r in risks.overflows}
  assert places(said) == places(plain)
  assert not np.array_equal(sizes(said), sizes(plain))
  read = [open_checkpoint(CHECKPOINT, words)[2] for words in (ADAPTED, [])]
  path = ("stack_0", "layer_0", "mlp", "down")
  whole = (0, slice(None), slice(None))
  quantized, exact = (r(path, whole) for r in read)
  assert 1e-3 < np.abs(quantized - exact).max() / np.abs(exact).max() < 1 / 127
  np.testing.assert_array_equal(read[0](path, (0, slice(2, 5), slice(1, 3))), quantized[2:5, 1:3])


STEP = [*ALONE, "max_target_length=12", "per_device_batch_size=2", "dataset=synthetic"]


@pytest.mark.slow
def test_a_step_on_quantized_weights_can_be_instrumented(model):
  """The instrumented step is only traced and lowered here. The next test runs it, nightly."""
  program = make_program(load_config(model, STEP).config)
  zeros = lambda tree: jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), tree)
  with use_mesh(program.model.mesh):
    text = step_xray(program).lower(zeros(program.abstract_state), zeros(program.abstract_batch)).as_text()
  assert "i8>" in text


@pytest.mark.nightly
def test_xray_names_the_place_and_the_key(model):
  words = [*STEP, f"init_from={CHECKPOINT}"]
  found = maxtext_like.xray_step(model, *words)
  assert not found.finite
  assert found.cause is not None
  assert "mlp" in found.cause
  assert "float32_gate_product" in found.cause


@pytest.mark.nightly
def test_bisect_finds_the_key():
  found = maxtext_like.bisect(None, *ALONE, "max_target_length=12", checkpoint=CHECKPOINT)
  assert {r.key for r in found.result.remedies} == {"float32_gate_product"}


@pytest.mark.slow
def test_audit_reads_the_program(model):
  found = maxtext_like.audit(model, *ADAPTED, "dtype=bfloat16", "max_target_length=12", platform="cpu")
  (weights,) = [key for key in found.keys if key.key == "weight_dtype"]
  assert weights.verdict == "honored"
  assert "quantized" in weights.evidence
  assert found.honored
