"""X-ray of the training step: reports name the layer, source line, direction and key of a planted fault.

Most tests use a scanned toy model. The slowest use real models: with Linen and NNX, scanned, unrolled and rematerialized.
"""

import contextlib
import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from maxtext_like.analysis import step_xray
from maxtext_like.analysis.step_xray import cause_lines, line_of, place_of, remedies, xray_step
from maxtext_like.layers.block import Stack
from maxtext_like.numerics.jaxprs import frames
from maxtext_like.sharding.mesh import use_mesh
from maxtext_like.training.step.program import make_program
from maxtext_like.training.step.train_step import UNKNOWN
from tests.processes import environment
from tests.tiers import tiers
from tests.training.small import batches, small_config
from tests.training.toy import LAYERS, ToyDecoder, toy_batch, toy_config, toy_step

HERE = Path(__file__).resolve()
TINY = ("gemma3-tiny", "gemma4-moe-tiny", "gemma4-e2b-tiny", "deepseek3.2-tiny", "qwen3-moe-tiny")  # every kind of layer


@dataclass(frozen=True)
class Scanned(ToyDecoder):
  """The toy model with its layers in a scan and with the scope names of the real decoder.

  ``masked`` replaces infinities by finite numbers. The layers from ``cut`` on run in a second scan, like layers with another
  precision.
  """

  masked: bool = False
  cut: int = 0

  @property
  def layers(self):
    return tuple(i >= self.cut for i in range(LAYERS))

  @property
  def stacks(self) -> Any:
    return (Stack("stack_0", 0, (True,), LAYERS),)  # type: ignore[arg-type]

  def hidden(self, p, batch, probes=None):
    x = p["embedding"]["table"][batch["tokens"]].astype(self.dtype)

    def block(x, row):
      with jax.named_scope("stack_0/layer_0"), jax.named_scope("mlp"):
        layer = {k: v.astype(self.dtype) for k, v in row.items()}
        hidden = x @ layer["kernel"]
        product = hidden * layer["scale"]
        if self.masked:
          product = product / (product < 1e4)
          product = jnp.nan_to_num(product, posinf=0.0)
        return x + product + layer["bias"], None

    for first, end in ((0, self.cut), (self.cut, LAYERS)) if self.cut else ((0, LAYERS),):
      rows = jax.tree.map(lambda w, first=first, end=end: w[first:end], p["stack_0"]["layer_0"])
      with jax.named_scope(f"row_{first}") if self.cut else contextlib.nullcontext():
        x, _ = jax.lax.scan(jax.checkpoint(block), x, rows)
    return x, {"clamped": jnp.zeros((), jnp.int32)}


def line(text: str) -> str:
  """Returns 'test_step_xray.py:N' for the only line of this file that contains the text."""
  (number,) = (i for i, x in enumerate(HERE.read_text().splitlines(), 1) if text in x and "line(" not in x)
  return f"{HERE.name}:{number}"


def toy_program(config, decoder) -> Any:
  """Returns the parts of a ``TrainProgram`` that x-ray needs, for a toy model, and its state."""
  step, state = toy_step(config, decoder=decoder)
  mesh = jax.make_mesh((1,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
  devices = list(mesh.devices.flat)
  return SimpleNamespace(config=config, step=step, model=SimpleNamespace(decoder=decoder, mesh=mesh, devices=devices)), state


@pytest.mark.slow
def test_the_tensors_of_a_finite_step():
  program, state = toy_program(toy_config("dtype=float16", "opt_type=sgd"), Scanned("float16"))
  before = state["params"]["stack_0"]["layer_0"]["kernel"]
  report = xray_step(program, state, toy_batch())
  assert report.finite
  assert report.first_cause is None
  named = {(t.name, t.direction): t for t in report.tensors}
  hidden = named["kernel", "forward"]
  assert hidden.loops == ("layer",)
  assert hidden.stats.max.shape == (LAYERS,)
  # The updates of each layer equal those of the step without x-ray.
  after, _ = jax.jit(program.step)(state, toy_batch(), UNKNOWN)
  moved = np.abs(before - after["params"]["stack_0"]["layer_0"]["kernel"]).max((1, 2))
  np.testing.assert_allclose(named["kernel", "update"].stats.max, moved, rtol=1e-3)
  assert (named["kernel", "gradient"].stats.max > 0).all()
  assert named["embedding.table", "gradient"].stats.max.shape == ()
  assert "layer 0 to 2" in report.html("toy")


@pytest.mark.slow
def test_a_product_that_overflows_in_layer_1():
  config = toy_config("dtype=float16", "opt_type=sgd")
  program, state = toy_program(config, Scanned("float16"))
  layer = state["params"]["stack_0"]["layer_0"]
  layer |= {"scale": layer["scale"].at[1].set(6e4), "kernel": layer["kernel"].at[1].mul(100)}
  report = xray_step(program, state, toy_batch())
  cause = report.first_cause
  assert cause is not None
  assert (cause.layer, cause.op, cause.direction, cause.source.rsplit("/", 1)[-1]) == (
    1, "mul", "forward", line('product = hidden * layer["scale"]'),
  )  # fmt: skip
  assert ", layer 1, forward: " in str(cause)
  assert str(cause).endswith("> 65504")
  assert cause_lines(config, report).splitlines()[1] == "what to try: dtype=bfloat16"


@pytest.mark.slow
def test_layers_of_a_stack_that_is_scanned_in_parts():
  """X-ray reports the same tensors in the same layers as for one scan, forward and backward."""
  config = toy_config("opt_type=sgd")
  found = []
  for cut in (0, 1):
    program, state = toy_program(config, Scanned(cut=cut))
    layer = state["params"]["stack_0"]["layer_0"]
    layer["kernel"] *= jnp.asarray([1, 30, 4])[:, None, None]  # so that all layers have different numbers
    report = xray_step(program, state, toy_batch())
    found.append({(t.name, t.direction): t.stats.max for t in report.tensors if t.loops == ("layer",) and t.level == "full"})
  whole, parts = found
  assert {("kernel", "forward"), ("kernel", "gradient")} < parts.keys()
  assert any(direction == "backward" for _, direction in parts)
  assert parts.keys() == whole.keys()
  for name, largest in whole.items():
    assert len(set(largest)) == LAYERS, name
    np.testing.assert_allclose(parts[name], largest, rtol=1e-5, err_msg=str(name))


@pytest.mark.nightly  # other tests of masked faults: tests/numerics/test_numerics_plan.py and test_cause.py
def test_a_masked_fault_that_spoils_the_gradient_and_a_parameter_that_is_none():
  config = toy_config("opt_type=sgd")
  program, state = toy_program(config, Scanned(masked=True))
  kernel, scale = state["params"]["stack_0"]["layer_0"]["kernel"], state["params"]["stack_0"]["layer_0"]["scale"]
  state["params"]["stack_0"]["layer_0"]["scale"] = scale.at[2].set(1e7)
  report = xray_step(program, state, toy_batch())
  hidden, seen = report.faults[0], report.first_cause
  assert (hidden.op, hidden.layer, hidden.direction, hidden.masked) == ("div", 2, "forward", True), report.summary()
  assert seen is not None
  assert (seen.op, seen.layer, seen.direction, seen.masked) == ("div", 2, "backward", False), report.summary()
  assert {f.source.rsplit("/", 1)[-1] for f in (hidden, seen)} == {line("product = product / (product")}
  assert np.isfinite(report.outputs["loss"])
  state["params"]["stack_0"]["layer_0"] |= {"scale": scale, "kernel": kernel.at[1, 0, 0].set(jnp.nan)}
  report = xray_step(program, state, toy_batch())
  assert str(report.first_cause).startswith("parameter layers.1.kernel (an input) contains 1 NaN of ")
  assert remedies(config, report.first_cause) == []  # type: ignore[arg-type]


def test_places_in_the_model_and_names_of_lines():
  block = SimpleNamespace(name="stack_0", first=0, layers=(None, None, None), repeats=2)
  decoder: Any = SimpleNamespace(stacks=(block, SimpleNamespace(name="stack_1", first=6, layers=(None,), repeats=2)))
  place = place_of(decoder, "jit(f)/while/scan/stack_0/layer_2/checkpoint/mlp/jit(_einsum)")
  assert (place.scopes, place.layers, place.axis) == (("mlp",), (2, 5), 1)
  place = place_of(decoder, "row_1/stack_1/layer_0/attention")
  assert (place.layers, place.axis) == ((7,), None)
  assert place_of(decoder, "head").layers == ()
  assert line_of(("src/layers/precision.py:88", "src/layers/weight.py:72", "src/layers/mlp.py:7")) == "src/layers/mlp.py:7"


def products(jaxpr):
  """Yields every product of a jaxpr and of the jaxprs within it."""
  for eqn in jaxpr.eqns:
    if eqn.primitive.name == "dot_general":
      yield eqn
    for value in eqn.params.values():
      for part in value if isinstance(value, tuple | list) else (value,):
        inner = getattr(part, "jaxpr", part)
        if hasattr(inner, "eqns"):
          yield from products(inner)


@pytest.mark.parametrize("model", tiers(TINY, quick=["gemma3-tiny"], rest="slow"))
def test_every_product_of_a_layer_has_the_layers_line(model):
  program = make_program(small_config(model, "dtype=bfloat16"))
  with use_mesh(program.model.mesh):
    step = jax.make_jaxpr(lambda state, batch: program.step(state, batch, jnp.asarray(UNKNOWN)))
    found = [frames(eqn) for eqn in products(step(program.abstract_state, program.abstract_batch).jaxpr)]
  # A custom derivative is traced outside the layer, so its frames lack the layer's line. Its path names the layer.
  lines = [line_of(names) for names in found if len(names) > 2]
  assert len(lines) > 10
  assert not [line for line in lines if "precision.py" in line or "weight.py" in line], found


def test_keys_against_overflows_outside_the_layers():
  config = toy_config("dtype=float16", "residual_dtype=float16", "cast_logits_to_fp32=false")
  fault: Any = SimpleNamespace(op="mul", direction="forward", dtype="float16", frames=())
  place = "src/layers/embedding.py:43"
  fault.path, fault.source, fault.frames = "embedding", place, (place,)
  assert remedies(config, fault) == ["residual_dtype=float32"]
  fault.path, fault.op, place = "head/logits", "dot_general", "src/layers/embedding.py:77"
  fault.source, fault.frames = place, (place,)
  assert remedies(config, fault) == ["cast_logits_to_fp32=true"]


@pytest.mark.slow
def test_no_room_is_said_in_one_line(monkeypatch):
  monkeypatch.setattr(step_xray.memory_limits, "device_limit", lambda *_: step_xray.memory_limits.Limit(100, "this test"))
  program, state = toy_program(toy_config("opt_type=sgd"), Scanned())
  with pytest.raises(step_xray.DoesNotFitError, match=r"^x-ray: needs .* GB are available \(this test\)$"):
    xray_step(program, state, toy_batch())


# Real models.

TINY = ["max_target_length=16", "per_device_batch_size=2", "emb_dim=16", "mlp_dim=24", "num_decoder_layers=4", "head_dim=8"]
TINY += ["inhomogeneous_layer_cycle_interval=2"]


def planted(*words: str, layer: int = 3):
  """Returns (config, report) of a tiny Gemma 3 with a fault in ``layer``. By default it has 4 layers in scanned rows of 2."""
  config = small_config("gemma3-tiny", *TINY, *words)
  program = make_program(config)
  state = program.lower_init().compile()(np.uint32(0))
  stack, row, name = program.model.decoder.locate(layer)
  mlp = state["params"][stack][name]["mlp"]
  mlp |= {weight: mlp[weight].at[row].mul(3e3) for weight in ("gate", "up")}
  state["params"][stack][name]["mlp"] = mlp
  return config, xray_step(program, state, program.place(batches(program.global_batch)[0]))


PRODUCT = ["dtype=float16", "float32_gate_product=false", "float16_clamp=false"]
FORMS = {  # test_eight_devices has a plain scan
  "remat": (["module_api=linen", "remat_policy=full"], 3),
  "unrolled": (["module_api=nnx", "scan_layers=false", "num_decoder_layers=2"], 1),
}


@pytest.mark.nightly  # the next test has a stack that is scanned in parts and rematerialized
@pytest.mark.parametrize("form", FORMS)
def test_a_float16_product_without_clamp(form):
  words, layer = FORMS[form]
  config, report = planted(*PRODUCT, *words, layer=layer)
  cause = report.first_cause
  assert cause is not None
  assert (cause.layer, cause.direction, cause.op) == (layer, "forward", "mul"), str(cause)
  assert "layers/mlp.py:" in cause.source
  assert f", layer {layer}, forward: " in str(cause)
  assert str(cause).endswith("> 65504")
  assert remedies(config, cause) == ["float32_gate_product=auto", "float16_clamp=true"]


@pytest.mark.nightly
def test_a_float16_product_in_a_stack_that_is_scanned_in_parts():
  """The stack is also rematerialized. The report names the layer of the complete stack, not of its part."""
  three = ["num_decoder_layers=3", "inhomogeneous_layer_cycle_interval=1", "layer_precision=[0 float32_logits=false]"]
  config, report = planted(*PRODUCT, *three, "module_api=linen", "remat_policy=full", layer=2)
  cause = report.first_cause
  assert cause is not None
  assert (cause.layer, cause.direction, cause.op) == (2, "forward", "mul"), str(cause)
  assert "layers/mlp.py:" in cause.source
  assert remedies(config, cause) == ["float32_gate_product=auto", "float16_clamp=true"]
  bad = {t.name: t.stats.nonfinite > 0 for t in report.tensors if t.direction == "forward" and t.loops == ("layer",)}
  assert bad["mlp.gate"].tolist() == [False] * 3
  assert [False] * 2 + [True] in [b.tolist() for name, b in bad.items() if name.startswith("mlp.gate_product mul")]


EIGHT = """
import json, sys
sys.path.insert(0, {root!r})
import jax
from tests.analysis.test_step_xray import PRODUCT, planted
small = ["per_device_batch_size=1", "num_decoder_layers=2", "inhomogeneous_layer_cycle_interval=1"]
config, report = planted(*PRODUCT, *small, layer=1)
print(json.dumps([jax.device_count(), str(report.first_cause), report.first_cause.layer]))
"""


@pytest.mark.slow
def test_eight_devices():
  program = EIGHT.format(root=str(HERE.parents[2]))
  done = subprocess.run(
    [sys.executable, "-c", program], capture_output=True, text=True, env=environment(8), check=False, timeout=1200
  )
  assert done.returncode == 0, done.stderr[-3000:]
  devices, text, layer = json.loads(done.stdout.splitlines()[-1])
  assert (devices, layer) == (8, 1)
  assert "layers/mlp.py:" in text
  assert "> 65504" in text
