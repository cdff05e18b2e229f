"""Tests programs as lists of instructions. Names must survive loops, remat, calls and shard_map. Dtypes are read from both
texts, StableHLO and compiled HLO."""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractMesh, AxisType, PartitionSpec

from maxtext_like.numerics.hlo import Instruction, hlo_lines, read_hlo, read_stablehlo

MESH = AbstractMesh((2,), ("data",), axis_types=(AxisType.Auto,))
X, W = jax.ShapeDtypeStruct((4, 6), jnp.bfloat16), jax.ShapeDtypeStruct((3, 6, 6), jnp.float32)


def layer(x, w):
  with jax.named_scope("mlp"):
    with jax.named_scope("down_product"):
      y = jnp.einsum("BD,DF->BF", x, w.astype(x.dtype), preferred_element_type=jnp.float32)
    return jnp.exp(jax.nn.relu(y)).astype(x.dtype)


def model(ws, x, wrap=lambda f: f):
  x, _ = jax.lax.scan(lambda x, w: (wrap(layer)(x, w), None), x, ws)
  with jax.named_scope("loss"):
    return jnp.sum(x.astype(jnp.float32))


def read(function, *shapes, platform="tpu"):
  before = jax.config.jax_traceback_in_locations_limit  # pyright: ignore[reportAttributeAccessIssue]
  jax.config.update("jax_traceback_in_locations_limit", 0)
  try:
    lowered = jax.jit(function).trace(*shapes).lower(lowering_platforms=(platform,))
    return read_stablehlo(lowered.compiler_ir("stablehlo"))
  finally:
    jax.config.update("jax_traceback_in_locations_limit", before)


def products(reading) -> list[tuple]:
  dots = [i for i in reading.instructions if i.kind == "dot"]
  return sorted((i.stage, i.scopes[-2:-1] + i.scopes[-1:], i.operands, i.results) for i in dots)


@pytest.mark.parametrize("rematerialized", [False, True])
def test_names_and_passes_survive_scan_and_remat(rematerialized):
  wrap = (lambda f: jax.checkpoint(f, prevent_cse=False)) if rematerialized else (lambda f: f)
  found = read(jax.value_and_grad(lambda ws, x: model(ws, x, wrap)), W, X).instructions
  dots = [i for i in found if i.kind == "dot"]
  assert all("mlp" in i.scopes and "down_product" in i.scopes for i in dots)
  forward = [i for i in dots if i.stage == "forward"]
  assert [(i.operands, i.results, i.precision) for i in forward] == [(("bf16", "bf16"), ("f32",), "default")]
  assert len([i for i in dots if i.stage == "recomputed"]) <= int(rematerialized)
  assert len([i for i in dots if i.stage == "backward"]) == 2
  exponentials = [i.stage for i in found if i.kind == "exponential"]
  assert exponentials == (["forward", "recomputed"] if rematerialized else ["forward"])
  assert {i.stage for i in found if "loss" in i.scopes} == {"forward", "backward"}


def test_a_function_counts_once_for_each_place_it_is_called_from():
  @jax.jit
  def inner(x):
    return jnp.sin(x)

  def outer(x):
    with jax.named_scope("router"):
      a = inner(x)
    with jax.named_scope("norm"):
      return inner(a) + inner(x)

  sines = [i for i in read(outer, X).instructions if i.kind == "sine"]
  assert sorted("router" if "router" in i.scopes else "norm" for i in sines) == ["norm", "norm", "router"]


def test_names_survive_shard_map():
  def body(x):
    with jax.named_scope("gate_product"):
      return x * jnp.exp(x)

  def sharded(x):
    with jax.named_scope("experts"):
      return jax.shard_map(body, mesh=MESH, in_specs=PartitionSpec("data"), out_specs=PartitionSpec("data"))(x)

  with jax.sharding.use_abstract_mesh(MESH):
    (found,) = [i for i in read(sharded, X).instructions if i.kind == "exponential"]
  assert [s for s in found.scopes if s in ("experts", "gate_product")] == ["experts", "gate_product"]


def test_reductions_precision_calls_and_arguments():
  def function(state):
    x = state["params"]["w"]
    return jnp.sum(x, -1), jnp.max(x, -1), jnp.einsum("BD,CD->BC", x, x, precision="highest")

  reading = read(function, {"params": {"w": X}})
  assert reading.arguments == {"state['params']['w']": "bf16"}
  assert sorted(i.reducer for i in reading.instructions if i.kind == "reduce") == ["add", "maximum"]
  assert [i.precision for i in reading.instructions if i.kind == "dot"] == ["highest"]


@pytest.mark.parametrize(("stored", "gradient"), [("float32", "float32"), ("float32", "bfloat16"), ("bfloat16", "float32"),
                                                  ("bfloat16", "bfloat16")])  # fmt: skip
def test_the_dtype_of_gradients_is_that_before_the_clipping_factor_widens_them(stored, gradient):
  """Clipping multiplies gradients by a float32 factor, in float32. The reported dtype is that of the gradients before this."""

  def step(state, scale):
    grads = jax.tree.map(lambda w: jnp.sin(w).astype(gradient), state["params"])
    norm = sum(jnp.sum(jnp.square(g.astype(jnp.float32))) for g in jax.tree.leaves(grads))
    factor = jnp.where(norm > 1, scale / norm, 1.0)
    # A frozen array of the same shape is multiplied by another number.
    return jax.tree.map(lambda g: g.astype(jnp.float32) * factor, grads), state["params"]["a"].astype(jnp.float32) * 0.5

  w = jax.ShapeDtypeStruct((5, 7), stored)
  reading = read(step, {"params": {"a": w, "b": w}}, jax.ShapeDtypeStruct((), jnp.float32))
  assert reading.gradients == {{"float32": "f32", "bfloat16": "bf16"}[gradient]}


def test_scopes_are_names_without_transforms_and_without_the_operation():
  i = Instruction(kind="dot", path="jit(f)/transpose(jvp(head))/logits/BTD,VD->BTV/dot_general", operands=(), results=())
  assert i.scopes == ("jit(f)", "head", "logits", "BTD,VD->BTV")
  assert i.stage == "backward"
  remat = "jit(f)/transpose(jvp())/while/body/closed_call/checkpoint/rematted_computation/mla/dot_general"
  assert Instruction(kind="dot", path=remat, operands=(), results=()).stage == "recomputed"


COMPILED = """HloModule jit_step

%region_1.2 (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %m = f32[] maximum(%a, %b)
}

%fused (p0: bf16[4,6], p1: bf16[6,6]) -> f32[4,6] {
  %p0 = bf16[4,6]{1,0} parameter(0)
  %p1 = bf16[6,6]{1,0} parameter(1)
  ROOT %c.1 = f32[4,6]{1,0:T(8,128)} convolution(%p0, %p1), dim_labels=bf_io->bf, operand_precision={highest,highest}, \
metadata={op_name="jit(step)/jvp(mlp)/down_product/dot_general" stack_frame_id=3}
}

ENTRY %main (w: bf16[6,6]) -> f32[4] {
  %w = bf16[6,6]{1,0} parameter(0), metadata={op_name="state[\\'params\\'][\\'w\\']"}
  %x = bf16[4,6]{1,0} constant({...})
  %fusion.1 = f32[4,6]{1,0} fusion(%x, %w), kind=kOutput, calls=%fused
  %pair = (f32[4,6]{1,0}, u8[0]{0}) custom-call(%fusion.1), custom_call_target="__cudnn$fmhaSoftmax", \
frontend_attributes={kernel_metadata={
"xprof_metadata":"{\\"block_q\\": 256}"
}}, metadata={op_name="jit(step)/transpose(jvp(attention))/cudnn_attention/call"}
  %zero = f32[] constant(0)
  ROOT %r = f32[4]{0} reduce(%fusion.1, %zero), dimensions={1}, to_apply=%region_1.2, \
metadata={op_name="jit(step)/jvp(loss)/reduce_max"}
}
"""


def test_the_text_of_a_compiled_program():
  reading = read_hlo(COMPILED)
  assert reading.arguments == {"state['params']['w']": "bf16"}
  by_kind = {i.kind: i for i in reading.instructions}
  dot, reduce = by_kind["dot"], by_kind["reduce"]
  assert (dot.operands, dot.results, dot.precision) == (("bf16", "bf16"), ("f32",), "highest")
  assert dot.scopes[-2:] == ("mlp", "down_product")
  assert (reduce.operands, reduce.reducer, reduce.scopes[-1]) == (("f32", "f32"), "maximum", "loss")
  call = by_kind["custom_call"]
  assert (call.target, call.results, call.stage) == ("__cudnn$fmhaSoftmax", ("f32", "u8"), "backward")
  assert call.scopes[-1] == "cudnn_attention"


NESTED = """ENTRY %main (w: bf16[6,6]) -> f32[4] {
  %s.1 = (f32[4,6]{1,0:T(8,128)}, (s32[], /*index=2*/u8[0]{0}), /*index=2*/bf16[6,6]{1,0}) custom-call(), custom_call_target="x"
  ROOT %d = f32[4,6]{1,0} dot(%s.1#0, /*index=1*/%s.1#2), lhs_contracting_dims={1}
}
"""


GATHERED = """HloModule jit_step

%add (a: bf16[], b: bf16[]) -> bf16[] {
  %a = bf16[] parameter(0)
  %b = bf16[] parameter(1)
  ROOT %sum = bf16[] add(%a, %b)
}

%own_place (which: u32[]) -> s32[] {
  %which = u32[] parameter(0)
  %width = s32[] constant(2)
  %whole_number = s32[] convert(%which)
  ROOT %place = s32[] multiply(%whole_number, %width)
}

%put (begun: bf16[7,4], own: bf16[2,4], at: s32[]) -> bf16[7,4] {
  %begun = bf16[7,4]{1,0} parameter(0)
  %own = bf16[2,4]{1,0} parameter(1)
  %at = s32[] parameter(2)
  ROOT %put.1 = bf16[7,4]{1,0} dynamic-update-slice(%begun, %own, %at, %at)
}

ENTRY %main (part: bf16[2,4], whole: bf16[7,4], start: s32[]) -> (bf16[7,4], bf16[7,4]) {
  %part = bf16[2,4]{1,0} parameter(0)
  %whole = bf16[7,4]{1,0} parameter(1)
  %start = s32[] parameter(2)
  %device = u32[] partition-id()
  %at.1 = s32[] fusion(%device), kind=kLoop, calls=%own_place
  %zero = bf16[] constant(0)
  %one = bf16[] constant(1)
  %three = s32[] constant(3)
  %zeros = bf16[7,4]{1,0} broadcast(%zero), dimensions={}
  %ones = bf16[7,4]{1,0} broadcast(%one), dimensions={}
  %placed = bf16[7,4]{1,0} dynamic-update-slice(%zeros, %part, %at.1, %three)
  %moved = bf16[7,4]{1,0} copy(%placed)
  %fused = bf16[7,4]{1,0} fusion(%zeros, %part, %at.1), kind=kLoop, calls=%put
  %other = bf16[7,4]{1,0} dynamic-update-slice(%ones, %part, %at.1, %three)
  %third = bf16[7,4]{1,0} dynamic-update-slice(%whole, %part, %at.1, %three)
  %sliced = bf16[7,4]{1,0} dynamic-update-slice(%zeros, %part, %start, %three)
  ROOT %all = (bf16[7,4]{1,0}, bf16[7,4]{1,0}) all-reduce(%moved, %fused, %other, %third, %whole, %sliced), to_apply=%add
}
"""


def test_a_sum_of_parts_that_each_device_puts_elsewhere_into_zeros_is_known_for_a_gather():
  (found,) = [i for i in read_hlo(GATHERED).instructions if i.kind == "all_reduce"]
  assert found.reducer == "add"
  # The last four operands do not count: a part in an array of ones, a part in an existing array, a complete array, and a part
  # at the same offset on all devices.
  assert found.placed == (True, True, False, False, False, False)


def test_elements_of_tuples_that_are_read_by_their_number():
  """Compiled text may read an element of a tuple as ``%name#0``. ``hlo_lines`` adds a get-tuple-element instruction for each of
  these elements."""
  lines = [line.strip() for line in hlo_lines(NESTED)]
  assert lines[2:4] == [
    "%s.1#0 = f32[4,6]{1,0:T(8,128)} get-tuple-element(%s.1), index=0",
    "%s.1#2 = bf16[6,6]{1,0} get-tuple-element(%s.1), index=2",
  ]
  assert hlo_lines(COMPILED)[3:5] == COMPILED.splitlines()[3:5]
  (dot,) = [i for i in read_hlo(NESTED).instructions if i.kind == "dot"]
  assert dot.operands == ("f32", "bf16")


def test_the_text_that_this_machine_compiles():
  compiled = jax.jit(jax.grad(model)).trace(W, X).lower().compile().as_text()
  found = read_hlo(compiled or "").instructions
  assert {i.stage for i in found if "down_product" in i.scopes} >= {"forward", "backward"}
  assert all(set(i.results) <= {"f32", "bf16"} for i in found if i.kind == "dot")
  assert any(i.kind == "exponential" and "mlp" in i.scopes for i in found)
