"""Tests sharding rules: the default rules, and other rules that all parameters and activations of a model then follow."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from equations import named
from jax.sharding import AbstractDevice, AbstractMesh, AxisType, PartitionSpec

from maxtext_like.layers import partition
from maxtext_like.layers.param import shardings
from maxtext_like.layers.partition import ShardedWeight, on_devices, rows_of, vary
from maxtext_like.layers.sharding_rules import RULES

MESH = AbstractMesh((2, 4), ("data", "fsdp"), axis_types=(AxisType.Auto,) * 2)
OTHERS = dataclasses.replace(RULES, batch="data", sequence="fsdp", embed=None, heads="fsdp", expert="data")


def test_each_mesh_axis_splits_one_dimension_and_only_where_it_divides():
  spec = lambda shape, axes: RULES.spec(shape, axes, MESH)
  assert spec((8, 3), ("embed", "mlp")) == PartitionSpec("fsdp")
  assert spec((3, 8), ("mlp", "embed")) == PartitionSpec(None, "fsdp")
  # 6 does not divide by 4, so the next dimension may be split.
  assert spec((6, 8), ("embed", "q_lora")) == PartitionSpec(None, "fsdp")
  assert spec((8, 8), ("embed", "q_lora")) == PartitionSpec("fsdp")
  assert spec((16, 8), ("batch", "embed")) == PartitionSpec(("data", "fsdp"))
  assert spec((5,), (None,)) == PartitionSpec()
  single = AbstractMesh((1, 4), ("data", "fsdp"), axis_types=(AxisType.Auto,) * 2)
  assert RULES.spec((16,), ("batch",), single) == PartitionSpec("fsdp")  # an axis with one device splits nothing


def test_all_but_experts_lies_split_over_the_expert_axis_too():
  """Weights that do not belong to experts are split over the expert axis too, by their embedding dimension."""
  mesh = AbstractMesh((2, 4), ("fsdp", "expert"), axis_types=(AxisType.Auto,) * 2)
  spec = lambda shape, axes: RULES.spec(shape, axes, mesh)
  assert spec((8, 3), ("embed", "heads")) == PartitionSpec(("fsdp", "expert"))
  assert spec((8, 16, 3), ("expert", "embed", "mlp")) == PartitionSpec("expert", "fsdp")
  # 6 does not divide by 8, so only the axis that divides it is used.
  assert spec((6, 3), ("embed", "heads")) == PartitionSpec("fsdp")
  # Rows are split over all axes or not at all.
  assert spec((6, 16), ("batch", "embed")) == PartitionSpec(None, ("fsdp", "expert"))


def test_an_axis_without_a_rule_is_an_error():
  with pytest.raises(ValueError, match=r"no rule for the logical axis 'embd'\n  fix: .*batch, sequence, embed"):
    RULES.spec((8,), ("embd",), MESH)


@pytest.mark.parametrize("rules", [RULES, OTHERS])
def test_parameters_and_activations_obey_the_decoder_s_rules(rules, tiny_decoder):
  """Trace on an abstract mesh. The program contains the sharding of every array."""
  decoder = tiny_decoder("gemma4-moe", changes={"num_experts": 6}, scan_layers=False)
  decoder = dataclasses.replace(decoder, cfg=dataclasses.replace(decoder.cfg, rules=rules))
  spec = decoder.params()
  places = jax.tree.map(lambda s: s.spec, shardings(spec, MESH, decoder.cfg.rules))
  layer = places["stack_0"]["layer_0"]
  default = rules is RULES
  assert layer["attention"]["q"] == (PartitionSpec(None, "fsdp") if default else PartitionSpec(None, None, "fsdp"))
  experts = PartitionSpec(None, None, "fsdp") if default else PartitionSpec(None, "data")
  assert layer["moe"]["experts"]["gate"] == experts
  p = jax.tree.map(lambda q: jax.ShapeDtypeStruct(q.shape, q.dtype), spec)
  batch = {"tokens": jax.ShapeDtypeStruct((8, 12), "int32")}
  stream = PartitionSpec(("data", "fsdp")) if default else PartitionSpec("data", "fsdp")
  with jax.sharding.use_abstract_mesh(MESH):
    constraints = named(decoder, p, batch, name="sharding_constraint")
    # The shard_map of the experts.
    local = max(named(decoder, p, batch, name="shard_map"), key=lambda e: len(e.params["in_specs"]))
  found = [e.params["sharding"].spec for e in constraints]
  # The other constraints, with unconstrained dimensions, are those of copies of a table.
  of_stream = [spec for spec in found if PartitionSpec.UNCONSTRAINED not in spec]
  assert len(of_stream) >= 1 + len(decoder.layers)  # after the embedding and after every layer
  assert set(of_stream) == {stream}
  # With the default rules, weights are gathered inside the shard_map. With the other rules, tokens are sent to the experts.
  weights = PartitionSpec(None, "fsdp") if default else PartitionSpec("data")
  down = PartitionSpec(None, None, "fsdp") if default else PartitionSpec("data")
  assert set(local.params["in_specs"]) == {stream, weights, down}


def test_on_a_tpu_a_layer_of_a_stacked_weight_and_its_gradient_lie_as_the_stack_does():
  """On a TPU, one layer of a stacked weight and its gradient get the memory order of the stack. XLA would otherwise transpose
  the complete stack."""
  rows = PartitionSpec(None, "fsdp")
  held = ShardedWeight(rows, ((), ("fsdp",), ()))

  def orders(platform, columns=72):
    weight = jax.ShapeDtypeStruct((128, 64, columns), "float32")
    kinds = (AxisType.Auto,)
    mesh = AbstractMesh((8,), ("fsdp",), axis_types=kinds, abstract_device=AbstractDevice("any", 1, platform))
    product = on_devices(lambda w: held.gather(w).sum()[None], mesh, rows, PartitionSpec("fsdp"))
    with jax.sharding.use_abstract_mesh(mesh):
      found = named(jax.grad(lambda w: product(w).sum()), weight, name="layout_constraint")
    return [e.params["layout"].major_to_minor for e in found]

  assert orders("tpu") == [(1, 2, 0)] * 2  # a part is [128, 8, 72], and 128 fills tiles
  assert orders("tpu", columns=256) == [(0, 1, 2)] * 2
  assert orders("cpu") == []


@pytest.mark.parametrize(("platform", "together"), [("gpu", 1), ("cpu", 0)])
def test_on_gpus_gradients_of_a_stack_s_layers_are_put_together_before_anything_reads_them(platform, together):
  """A barrier after the concatenation makes the update read one array. An update that reads the gradient of each layer
  separately takes twice as long."""
  mesh = AbstractMesh((1,), ("data",), axis_types=(AxisType.Auto,), abstract_device=AbstractDevice("any", 1, platform))
  loss = lambda x: sum((i + 1) * jnp.sum(jnp.square(row)) for i, row in enumerate(rows_of(x)))
  x = jnp.arange(12.0).reshape(3, 4)
  with jax.sharding.use_abstract_mesh(mesh):
    found = named(jax.grad(loss), x, name="optimization_barrier")
    codes = named(lambda codes: rows_of(codes), jnp.zeros((3, 4), jnp.int8), name="custom_vjp_call")
  assert [e.outvars[0].aval.shape for e in found] == [(3, 4)] * together
  assert not codes  # arrays without a gradient are not changed
  weighted = lambda x: sum((i + 1) * jnp.sum(jnp.square(row)) for i, row in enumerate(partition._rows_of(x)))
  np.testing.assert_array_equal(jax.grad(weighted)(x), 2 * x * jnp.arange(1, 4)[:, None])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_gradients_of_what_is_marked_as_varying_are_added_up_in_float32(dtype):
  """``vary`` marks a weight as varying over devices. Its gradients are added over devices in float32, and the sum is rounded to
  the dtype of the weight."""
  mesh = AbstractMesh((4,), ("data",), axis_types=(AxisType.Auto,))

  def loss(w, x):
    own = lambda w, x: jnp.sum((x * vary(w, ("data",))).astype(jnp.float32))[None]
    return jnp.sum(on_devices(own, mesh, (PartitionSpec(), PartitionSpec("data")), PartitionSpec("data"))(w, x))

  w, x = (jax.ShapeDtypeStruct(shape, dtype) for shape in ((3,), (8, 3)))
  found = jax.make_jaxpr(jax.grad(loss))(w, x)
  assert found.jaxpr.outvars[0].aval.dtype == dtype
  sums = named(jax.grad(loss), w, x, name="psum_invariant")
  assert [e.outvars[0].aval.dtype.name for e in sums] == ["float32"]
