"""Tests expert parallelism. Tokens are sent to their experts and experts are not sent. Outputs, gradients, loads and counts
equal those of one device."""

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh, AxisType

from maxtext_like.layers.context import Context
from maxtext_like.layers.moe.expert_parallel import Layout, capacity
from maxtext_like.layers.moe.load_balance import RouterLosses
from maxtext_like.layers.moe.moe import MoE, MoEConfig
from maxtext_like.layers.norms import NormConfig
from maxtext_like.layers.partition import axes_of
from maxtext_like.layers.precision import Dtype, Precision
from maxtext_like.layers.sharding_rules import MESH_AXES, RULES
from tests.layers import eight_devices
from tests.layers.conftest import _random_params

B, T, D, F, E, K = 8, 6, 16, 10, 8, 3
SOFTMAX = MoEConfig(
  emb_dim=D, mlp_dim=F, num_experts=E, num_experts_per_tok=K, router_norm=NormConfig(dim=D, with_scale=False),
  per_expert_scale=True, losses=RouterLosses("maxtext", 0.1, 0.01),
)  # fmt: skip
SIGMOID = MoEConfig(
  emb_dim=D, mlp_dim=F, num_experts=E, num_experts_per_tok=K, activation="silu", router="sigmoid", n_groups=2, topk_groups=2,
  routed_scaling_factor=2.5, shared_experts=2, losses=RouterLosses("huggingface", 0.1, 0.01),
)  # fmt: skip
TOLERANCE: dict[Dtype, float] = {"float32": 1e-5, "bfloat16": 2e-2, "float16": 2e-3}


def compare(cfg, mesh, by="tiles", dtype: Dtype = "float32", favors=(0.0,), rows=B, size=1.0, rules=RULES):
  """Compare values and gradients on a mesh with those on one device.

  Args:
    favors: differences between the router's biases of neighboring experts, with one comparison for each.
    size: factor of the experts' weights.
  """
  layer, rng = MoE(cfg, Precision(dtype=dtype)), np.random.default_rng(0)
  x, cotangent = (jnp.asarray(rng.normal(size=(rows, T, D)), jnp.float32) for _ in range(2))
  p = _random_params(layer.params())
  p["experts"] = {name: w * size for name, w in p["experts"].items()}

  def loss(p, x):
    ctx = Context.of(x, grouped=by, rules=rules).collecting()
    out = layer(p, x, ctx)
    total = jnp.sum(out * cotangent) + sum(layer.losses(ctx.aux).values())
    return total, (out, ctx.aux["moe_load"], ctx.aux["clamped"])

  step = jax.jit(jax.grad(loss, (0, 1), has_aux=True))
  router, alone, compiled = p["router"], None, None
  for favor in favors:
    p["router"] = router | ({"bias": router["bias"] + favor * jnp.arange(E)[::-1]} if favor else {})
    alone = step(p, x)
    with jax.set_mesh(mesh):
      arguments = (
        eight_devices.placed(layer.params(), p, mesh, rules),
        eight_devices.spread(x, mesh, rules, "batch", "sequence"),
      )
      compiled = compiled or step.lower(*arguments).compile()
      together = compiled(*arguments)
    found = eight_devices.worst(together, alone)
    assert found < TOLERANCE[dtype], (mesh.shape, by, dtype, favor, rows, found)
    assert together[1][2] == alone[1][2]
  assert alone is not None
  assert compiled is not None
  return alone, compiled.as_text() or ""


def quick():
  mesh = eight_devices.mesh_of
  # With the second value of favors, all tokens select the first experts, so several rounds are needed.
  _, text = compare(SIGMOID, mesh(fsdp=2, expert=4), favors=(0.0, 9.0))
  moved = [line.split(" = ")[1] for line in text.splitlines() if re.search(r" all-(gather|to-all)(-start)?\(", line)]
  rows = f"f32[1,{capacity(B * T // 8 * K, 4)},{D}]"  # the rows that one round sends to another device
  assert any(" all-to-all" in line and rows in line for line in moved), moved
  gathered = [line for line in moved if " all-gather" in line and "/experts/" in line]
  # Each device gathers its own experts over fsdp, and no others.
  assert len(gathered) >= 3
  assert all(line.startswith(f"f32[{E // 4},") for line in gathered), gathered
  assert not any(line.startswith(f"f32[{B},{T}") for line in moved), moved  # no device reads tokens of another device
  assert re.search(r" reduce-scatter(-start)?\(", text)
  alone, _ = compare(SOFTMAX, mesh(data=2, expert=2, context=2), dtype="float16", size=1e19)
  assert alone[1][2] > 0  # values were clamped
  # 5 rows cannot be split, so every device computes its share of the experts for all rows.
  compare(SOFTMAX, mesh(data=2, expert=4), rows=5)

  # Test another kernel with tensor parallelism, and rules that map two dimensions of a weight to the same mesh axis.
  compare(SIGMOID, mesh(expert=4, tensor=2), "ragged_dot", "bfloat16", favors=(9.0,))
  rules = dataclasses.replace(RULES, expert="tensor", embed=("fsdp", "tensor"))
  compare(SIGMOID, mesh(fsdp=4, tensor=2), rules=rules)


def every():
  mesh = eight_devices.mesh_of
  compare(SOFTMAX, mesh(expert=8), "ragged_dot")
  compare(SIGMOID, mesh(expert=2, context=2, tensor=2), "tiles", "float16")
  compare(SOFTMAX, mesh(data=2, fsdp=2, expert=2), "ragged_dot", "bfloat16")
  compare(SOFTMAX, mesh(fsdp=2, tensor=4), "tiles", "bfloat16")
  compare(SIGMOID, mesh(fsdp=2, expert=4), favors=(0.1, 1.0))
  # These rules map several dimensions of a weight to the same mesh axis.
  for rules in ({"expert": "tensor"}, {"embed": "tensor"}):
    compare(SIGMOID, mesh(fsdp=4, tensor=2), rules=dataclasses.replace(RULES, **rules))


@pytest.mark.slow
def test_tokens_travel_and_nothing_changes():
  eight_devices.run("moe.test_expert_parallel", "quick")


@pytest.mark.nightly
def test_every_kernel_dtype_and_mesh():
  eight_devices.run("moe.test_expert_parallel", "every")


def test_a_round_takes_a_little_more_than_an_even_share():
  assert capacity(1024, 8) == 160
  assert capacity(4, 8) == 1  # even with so few tokens, each device gets at least one
  assert capacity(6, 1) == 6


@pytest.mark.parametrize(
  ("rules", "partial", "gate", "down"),
  [
    ({}, ("tensor",), [(), (), ("tensor",)], [(), ("tensor",)]),
    ({"expert": "tensor"}, ("tensor",), [("tensor",)], [("tensor",)]),
    ({"embed": "tensor"}, (), [], []),  # only down would be split along the hidden size
  ],
)
def test_an_axis_splits_the_hidden_size_of_every_weight_or_of_none(rules, partial, gate, down):
  """``partial`` contains each axis once. XLA aborts the process if a sum names an axis twice."""
  mesh = AbstractMesh((1, 1, 1, 1, 2), MESH_AXES, axis_types=(AxisType.Auto,) * 5)
  spec = MoE(SIGMOID, Precision(dtype="float32")).params()["experts"]
  layout = Layout.of(spec, dict.fromkeys(spec), (B, T), dataclasses.replace(RULES, **rules), mesh)
  assert layout.partial == partial
  assert [axes_of(entry) for entry in layout.weights["gate"].spec] == gate
  assert [axes_of(entry) for entry in layout.weights["down"].spec] == down


@pytest.mark.parametrize(
  ("rules", "shape", "message"),
  [
    (RULES, (1, 1, 3, 1, 1), r"num_experts=8 .*3 devices of the mesh axis 'expert'.*\n  fix: .*ici_expert_parallelism"),
    (dataclasses.replace(RULES, batch="data", expert=("data", "expert")), (2, 1, 2, 1, 1), "only some of them split tokens"),
  ],
)
def test_experts_that_cannot_be_split_are_an_error(rules, shape, message):
  layer = MoE(SOFTMAX, Precision(dtype="float32"))
  p = jax.tree.map(lambda q: jax.ShapeDtypeStruct(q.shape, q.dtype), layer.params())
  x = jax.ShapeDtypeStruct((6, T, D), "float32")
  mesh = AbstractMesh(shape, MESH_AXES, axis_types=(AxisType.Auto,) * 5)
  run = lambda p, x: layer(p, x, Context.of(x, rules=rules))
  with jax.sharding.use_abstract_mesh(mesh), pytest.raises(ValueError, match=message):
    jax.eval_shape(run, p, x)
