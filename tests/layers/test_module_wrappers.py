"""Tests the Linen and the NNX module of every layer: same parameter tree, same program, metadata of the right rank, and errors
for a wrong tree."""

import inspect
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from flax import nnx as fnnx

from maxtext_like.layers import linen, nnx
from maxtext_like.layers.attention.attention import AttentionConfig
from maxtext_like.layers.attention.indexer import IndexerConfig
from maxtext_like.layers.attention.masks import Tokens
from maxtext_like.layers.attention.mla import MLAConfig
from maxtext_like.layers.attention.rope import RopeConfig
from maxtext_like.layers.context import Context
from maxtext_like.layers.embedding import EmbeddingConfig
from maxtext_like.layers.mlp import MLPConfig
from maxtext_like.layers.moe.moe import MoEConfig
from maxtext_like.layers.norms import NormConfig
from maxtext_like.layers.per_layer import PerLayerInputConfig
from maxtext_like.layers.precision import Precision

FLOAT32 = Precision(dtype="float32")
D, T = 6, 5
X = jnp.asarray(np.random.default_rng(0).normal(size=(2, T, D)), jnp.float32)
TOKENS = jnp.asarray(np.random.default_rng(1).integers(0, 11, (2, T)), jnp.int32)
POSITIONS = jnp.broadcast_to(jnp.arange(T), (2, T))
ROPE = RopeConfig(dim=4, theta=100.0)
MOE = MoEConfig(emb_dim=D, mlp_dim=3, num_experts=5, num_experts_per_tok=2, router="sigmoid", shared_experts=1)
MLP = MLPConfig(emb_dim=D, mlp_dim=7)
LATENT = {"emb_dim": D, "q_lora_rank": 3, "rope": ROPE}
INDEXER = IndexerConfig(**LATENT, num_heads=2, head_dim=7, topk=2)
VOCABULARY = EmbeddingConfig(vocab_size=11, emb_dim=D)
WEIGHTS, EXPERTS = jnp.ones((2, T, 2)) / 2, jnp.broadcast_to(jnp.asarray([3, 1]), (2, T, 2))

# name -> (configuration, arguments of the call). The fixture below adds the layers that need a model.
LAYERS = {
  "RMSNorm": (NormConfig(dim=D), (X,)),
  "LayerNorm": (NormConfig(dim=D), (X,)),
  "Embedding": (VOCABULARY, (TOKENS,)),
  "Head": (VOCABULARY, (X,)),
  "PerLayerInput": (PerLayerInputConfig(vocab_size=11, num_layers=3, width=2, emb_dim=D), (TOKENS, X)),
  "Attention": (
    AttentionConfig(emb_dim=D, num_query_heads=4, num_kv_heads=2, head_dim=4, scale=0.5, rope=ROPE),
    (X, POSITIONS),
  ),
  "MLA": (
    MLAConfig(**LATENT, num_heads=2, kv_lora_rank=5, nope_dim=3, rope_dim=4, value_dim=2, indexer=INDEXER, bias=True),
    (X, POSITIONS),
  ),
  "Indexer": (INDEXER, (X, X[..., :3], POSITIONS)),
  "MLP": (MLP, (X,)),
  "Router": (MOE, (X,)),
  "Experts": (MOE, (X, WEIGHTS, EXPERTS)),
  "MoE": (MOE, (X,)),
}


@pytest.fixture(scope="module")
def case(tiny_decoder):
  """Return the function case(name) -> (arguments of the constructor, arguments of the call)."""

  def make(name):
    if name in LAYERS:
      cfg, args = LAYERS[name]
      return (cfg, FLOAT32), args
    decoder = tiny_decoder("gemma4-moe" if name == "Block" else "deepseek3.2")
    if name == "Decoder":
      return (decoder.cfg, decoder.precision, decoder.layers), ({"tokens": TOKENS},)
    layer = decoder.layers[-1]
    carry = {"x": jnp.asarray(np.random.default_rng(2).normal(size=(2, T, 20)), jnp.float32)}
    return (layer.cfg, layer.precision), (carry, Context(POSITIONS, Tokens()))

  return make


NAMES = [*LAYERS, "Block", "Decoder"]


def public(module):
  return {name for name, f in vars(module).items() if inspect.isfunction(f) and name[0].isupper()}


def test_every_public_layer_is_tested_here():
  assert public(linen) == public(nnx) == set(NAMES)
  for name in NAMES:
    for api in (linen, nnx):
      make = getattr(api, name)
      assert make.__name__ == name
      assert "Returns:" in make.__doc__


def of_nnx(name, arguments) -> Any:
  """Return the NNX module without running its initializers."""
  return getattr(nnx, name)(*arguments, rngs=None)


def test_an_nnx_module_of_shapes_is_the_one_that_initializers_would_make():
  drawn = fnnx.eval_shape(lambda: nnx.MoE(MOE, FLOAT32, rngs=fnnx.Rngs(0)))
  (graph, state), (drawn_graph, drawn_state) = fnnx.split(nnx.MoE(MOE, FLOAT32, rngs=None)), fnnx.split(drawn)
  assert graph == drawn_graph
  assert fnnx.to_pure_dict(state) == fnnx.to_pure_dict(drawn_state)


def program(function, *args):
  def run(*args):
    return function(*args)

  return jax.jit(run).lower(*args).as_text()


@pytest.mark.parametrize("name", NAMES)
def test_both_faces_hold_the_same_tree_and_are_the_same_program(name, case, random_params):
  arguments, args = case(name)
  module = getattr(linen, name)(*arguments)
  spec = module.layer.params()
  p = random_params(spec)
  boxed = jax.eval_shape(module.init, jax.random.key(0), *args)
  of_linen = nn.meta.unbox(boxed)["params"]
  wrapped = of_nnx(name, arguments)
  graph, state = fnnx.split(wrapped)
  pure = fnnx.to_pure_dict(state)
  for tree in (of_linen, pure):
    assert jax.tree.structure(tree) == jax.tree.structure(p)
    assert jax.tree.map(lambda a: (a.shape, str(a.dtype)), tree) == jax.tree.map(lambda a: (a.shape, str(a.dtype)), p)

  def by_nnx(p, *args):
    filled = fnnx.state(wrapped)
    fnnx.replace_by_pure_dict(filled, p)
    return fnnx.merge(graph, filled)(*args)

  plain = program(getattr(module.layer, "standalone", module.layer), p, *args)
  assert program(lambda p, *args: module.apply({"params": p}, *args), p, *args) == plain
  assert program(by_nnx, p, *args) == plain

  # The metadata has one logical name for each dimension.
  names = nn.get_partition_spec(boxed)["params"]
  flat = jax.tree.leaves(names, is_leaf=lambda x: isinstance(x, jax.sharding.PartitionSpec))
  for q, axes in zip(jax.tree.leaves(spec), flat, strict=True):
    assert tuple(axes) == q.axes
  for (_, variable), q in zip(fnnx.to_flat_state(state), jax.tree.leaves(spec), strict=True):
    assert variable.get_metadata()["out_sharding"] == q.axes
    assert isinstance(variable, nnx.Frozen) != q.trainable


@pytest.mark.slow
def test_bitwise_the_same_output_from_the_same_parameters(random_params):
  layer = linen.MoE(MOE, FLOAT32)
  p = random_params(layer.layer.params())
  wrapped = nnx.MoE(MOE, FLOAT32, rngs=fnnx.Rngs(0))
  state = fnnx.state(wrapped)
  fnnx.replace_by_pure_dict(state, p)
  fnnx.update(wrapped, state)
  plain, _ = jax.jit(layer.layer.standalone)(p, X)
  np.testing.assert_array_equal(jax.jit(layer.apply)({"params": p}, X)[0], plain)
  np.testing.assert_array_equal(fnnx.jit(lambda m, x: m(x))(wrapped, X)[0], plain)


@pytest.mark.slow
def test_initialized_parameters_are_of_use():
  variables = linen.MLP(MLP, FLOAT32).init(jax.random.key(0), X)
  again = linen.MLP(MLP, FLOAT32).init(jax.random.key(0), X)
  wrapped = nnx.MLP(MLP, FLOAT32, rngs=fnnx.Rngs(0))
  for tree in (nn.meta.unbox(variables)["params"], fnnx.to_pure_dict(fnnx.state(wrapped))):
    assert all(float(jnp.std(leaf)) > 0.1 for leaf in tree.values())
    assert not jnp.allclose(tree["gate"], tree["up"])
  jax.tree.map(np.testing.assert_array_equal, variables, again)
  # apply accepts the boxed tree that init returns.
  out: Any = linen.MLP(MLP, FLOAT32).apply(variables, X)
  assert out.shape == X.shape


# --- Linen ---


class Repeated(nn.Module):
  @nn.compact
  def __call__(self, x, _):
    return x + linen.MLP(MLP, FLOAT32, name="mlp")(x), None


def test_linen_scan_stacks_arrays_and_their_names(random_params):
  scanned = nn.scan(
    Repeated,
    variable_axes={"params": 0},
    split_rngs={"params": True},
    length=3,
    metadata_params={nn.PARTITION_NAME: linen.PARTITION_NAME},
  )()
  variables = jax.eval_shape(scanned.init, jax.random.key(0), X, None)
  gate: Any = variables["params"]["mlp"]["gate"]
  assert gate.names == ("layers", "embed", "mlp")
  assert gate.value.shape == (3, D, 7)
  assert nn.get_partition_spec(variables)["params"]["mlp"]["down"] == jax.sharding.PartitionSpec("layers", "mlp", "embed")
  one = linen.MLP(MLP, FLOAT32).layer
  p = jax.tree.map(lambda *rows: jnp.stack(rows), *(random_params(one.params(), seed) for seed in range(3)))
  expected = X
  for i in range(3):
    expected = expected + one.standalone(jax.tree.map(lambda a, i=i: a[i], p), expected)
  got, _ = jax.jit(scanned.apply)({"params": {"mlp": p}}, X, None)
  np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-6)


class Twice(nn.Module):
  """A module that calls a submodule twice, with one set of parameters."""

  @nn.compact
  def __call__(self, x):
    mlp = linen.MLP(MLP, FLOAT32, name="shared")
    return mlp(mlp(x))


def test_linen_module_inside_another_and_used_twice():
  variables = jax.eval_shape(Twice().init, jax.random.key(0), X)
  assert set(variables["params"]) == {"shared"}
  named = linen.MLP(MLP, FLOAT32, name="outer")
  assert named.name == "outer"


# --- NNX ---


def test_nnx_vmap_and_scan_stack_arrays_and_their_names(random_params):
  @fnnx.split_rngs(splits=3)
  @fnnx.vmap(in_axes=(0,), out_axes=0, transform_metadata={fnnx.PARTITION_NAME: "layers"})
  def make(rngs) -> Any:
    return nnx.MLP(MLP, FLOAT32, rngs=rngs)

  @fnnx.scan(in_axes=(fnnx.Carry, 0), out_axes=fnnx.Carry, transform_metadata={fnnx.PARTITION_NAME: "layers"})
  def forward(x, layer):
    assert layer.gate.get_metadata()["out_sharding"] == ("embed", "mlp")
    return x + layer(x)

  stacked = make(fnnx.Rngs(0))
  assert stacked.gate[...].shape == (3, D, 7)
  assert not jnp.allclose(stacked.gate[0], stacked.gate[1])
  assert stacked.gate.get_metadata()["out_sharding"] == ("layers", "embed", "mlp")
  got = forward(X, stacked)
  assert stacked.gate.get_metadata()["out_sharding"] == ("layers", "embed", "mlp")
  p = fnnx.to_pure_dict(fnnx.state(stacked))
  expected = X
  for i in range(3):
    expected = expected + stacked.layer.standalone(jax.tree.map(lambda a, i=i: a[i], p), expected)
  np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-6)


def test_nnx_gradients_pass_frozen_arrays_by():
  wrapped: Any = nnx.Router(MOE, FLOAT32, rngs=fnnx.Rngs(0))
  assert isinstance(wrapped.bias, nnx.Frozen)
  assert set(fnnx.to_pure_dict(fnnx.state(wrapped))) == {"kernel", "bias"}
  assert set(fnnx.to_pure_dict(fnnx.state(wrapped, fnnx.Param))) == {"kernel"}

  @fnnx.jit
  def step(wrapped, x):
    gradient = fnnx.grad(lambda m: jnp.sum(m(x)[0] ** 2))(wrapped)
    fnnx.update(wrapped, jax.tree.map(lambda w, g: w - 0.1 * g, fnnx.state(wrapped, fnnx.Param), gradient))
    return gradient

  before = wrapped.kernel[...]
  gradient = step(wrapped, X)
  assert set(fnnx.to_pure_dict(gradient)) == {"kernel"}
  np.testing.assert_allclose(wrapped.kernel[...], before - 0.1 * fnnx.to_pure_dict(gradient)["kernel"], rtol=1e-6)


def test_nnx_parameters_are_attributes(case):
  decoder = of_nnx("Decoder", case("Decoder")[0])
  assert decoder.stack_1.layer_0.moe.experts.down.shape == (2, 6, 11, 20)
  assert decoder.stack_0.layer_0.attention.indexer.k_norm.bias.shape == (1, 7)
  assert decoder.embedding.table.shape == (37, 20)


# --- a tree that does not fit ---

# A layer could run with this tree, but it would be another model.
WIDER = {"gate": jnp.ones((D, 8)), "up": jnp.ones((D, 8)), "down": jnp.ones((8, D))}
WRONG = {
  "shape": (lambda p: WIDER, r"\['gate'\] has shape \(6, 8\), expected \(6, 7\)"),
  "transposed": (lambda p: p | {"down": p["down"].T}, r"\['down'\] has shape \(6, 7\), expected \(7, 6\)"),
  "misspelled": (
    lambda p: {"gatee": p["gate"], "up": p["up"], "down": p["down"]},
    r"\['gate'\] is missing; \['gatee'\] is not a parameter",
  ),
  "superfluous": (lambda p: p | {"bias": jnp.ones(7)}, r"\['bias'\] is not a parameter"),
}


@pytest.mark.parametrize("fault", WRONG)
def test_linen_refuses_a_tree_that_does_not_fit(fault, random_params):
  change, message = WRONG[fault]
  module = linen.MLP(MLP, FLOAT32)
  with pytest.raises(ValueError, match=f"parameters .*layer: .*{message}"):
    module.apply({"params": change(random_params(module.layer.params()))}, X)


@pytest.mark.parametrize("fault", WRONG)
def test_nnx_refuses_a_tree_that_does_not_fit(fault, random_params):
  change, message = WRONG[fault]
  wrapped = of_nnx("MLP", (MLP, FLOAT32))
  for name, value in change(random_params(wrapped.layer.params())).items():
    setattr(wrapped, name, fnnx.Param(value))
  if fault == "misspelled":
    del wrapped.gate
  with pytest.raises(ValueError, match=f"parameters .*layer: .*{message}"):
    wrapped(X)


@pytest.mark.slow
def test_a_face_without_parameters():
  cfg = NormConfig(dim=D, with_scale=False)
  module = linen.RMSNorm(cfg, FLOAT32)
  assert module.init(jax.random.key(0), X) == {}
  expected = module.layer({}, X)
  np.testing.assert_array_equal(module.apply({}, X), expected)
  np.testing.assert_array_equal(nnx.RMSNorm(cfg, FLOAT32, rngs=fnnx.Rngs(0))(X), expected)
