"""Tests layers with different precisions: parameters do not change, and scan, loop and single calls of the layers give the same
results. Also tests caches, module wrappers and remat."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from maxtext_like.config.precision_keys import LAYER_KEYS, idle_reason
from maxtext_like.layers.attention.masks import Tokens
from maxtext_like.layers.cache import Step
from maxtext_like.layers.context import Context
from maxtext_like.layers.decoder import Decoder
from maxtext_like.layers.precision import Precision
from maxtext_like.training.step.program import make_apply
from tests.layers.conftest import FAMILIES
from tests.layers.test_decoder import QUICK, UNOPTIMIZED, objective
from tests.tiers import tiers

# XLA on a CPU may skip rounding to bfloat16 and back. This option makes it round as the program says.
EXACT: Any = UNOPTIMIZED | {"xla_allow_excess_precision": False}

# Entries inside blocks, at the borders of stacks, and in layers that share or reuse keys and values (in e2b layers 0 to 3 have
# their own, 4 to 7 reuse them).
MIXED = {
  "gemma3": (("2 dtype=float32",), {"num_decoder_layers": 3, "inhomogeneous_layer_cycle_interval": 1}),
  "gemma4-moe": (("1 dtype=float32", "2 float32_weight_sum=false float32_logits=false"), {"num_decoder_layers": 6}),
  "gemma4-e2b": (
    ("2-3 dtype=float32", "4 float32_gate_product=true"),
    {"num_decoder_layers": 6, "num_kv_shared_layers": 2},
  ),
  "deepseek3.2": (
    ("0 dtype=float32", "2 dtype=float32 indexer_float32_logits=false", "3 float32_qk_product=false"),
    {"num_decoder_layers": 4},
  ),
}


@pytest.fixture(scope="module")
def mixed(tiny_decoder):
  """Return the function mixed(family, **build) -> bfloat16 decoder with the entries of ``MIXED``."""

  def make(family, entries=None, **build) -> Decoder:
    own, changes = MIXED[family]
    own = own if entries is None else entries
    return tiny_decoder(family, precision={"dtype": "bfloat16"}, changes=changes, layer_precision=own, **build)

  return make


@pytest.mark.parametrize("family", MIXED)
def test_parameters_and_stacks_are_those_of_one_precision(family, mixed):
  plain, own = mixed(family, ()), mixed(family)
  assert own.params() == plain.params()
  assert own.stacks == plain.stacks
  assert any(len(s.split(own.layers)) > 1 for s in own.stacks if s.repeats > 1)
  assert all(len(s.split(plain.layers)) == 1 for s in plain.stacks)


def relative(a, b) -> float:
  """Return the largest difference relative to the largest number of its array."""
  pairs = [(np.asarray(x, np.float64), np.asarray(y, np.float64)) for x, y in zip(*map(jax.tree.leaves, (a, b)), strict=True)]
  return max(np.abs(x - y).max(initial=0) / max(np.abs(y).max(initial=0), 1e-3) for x, y in pairs)


# gemma3 has a stack in two parts, gemma4-e2b shared keys and values, deepseek3.2 two stacks and an indexer. The next test calls
# the layers of each family one by one.
@pytest.mark.parametrize("family", tiers(("gemma3", "gemma4-e2b", "deepseek3.2"), slow=("gemma3",)))
def test_scan_is_the_loop(family, mixed, random_params, batch):
  """The results are equal to the bit. In bfloat16 any difference in rounding would be visible."""
  scanned, looped = mixed(family), mixed(family, scan_layers=False)
  p = random_params(scanned.params())

  def run(decoder):
    step = jax.value_and_grad(objective(decoder), has_aux=True)
    return jax.jit(step, compiler_options=EXACT)(p, batch)

  (_, (logits, aux)), gradients = run(scanned)
  (_, (looped_logits, looped_aux)), looped_gradients = run(looped)
  jax.tree.map(np.testing.assert_array_equal, (logits, aux), (looped_logits, looped_aux))
  # The terms of a sum over several uses of an array (shared keys and values, the table) are added in another order.
  assert relative(gradients, looped_gradients) < 0.02
  assert all(jnp.isfinite(g).all() for g in jax.tree.leaves(gradients))


@pytest.mark.parametrize("family", tiers(MIXED, quick=("gemma3",), slow=("gemma4-e2b", "deepseek3.2")))
def test_each_layer_runs_in_its_own_precision(family, mixed, random_params, batch):
  """Call the layers one by one with the inputs that the decoder passed to them. The results equal those of the decoder."""
  decoder = mixed(family)
  p = random_params(decoder.params())
  ctx = Context(batch["positions"], Tokens(batch["segments"]))

  def hidden(p):
    return decoder.hidden(p, batch, frozenset({"hidden", "ple"}))[1]

  aux = jax.jit(hidden, compiler_options=EXACT)(p)
  carry: dict[str, Any] = {"x": aux["hidden.embed"]}
  if decoder.shared_kv:
    carry["kv"] = dict.fromkeys(decoder.shared_kv)
  differs = 0
  for i, layer in enumerate(decoder.layers):
    stack, row, name = decoder.locate(i)
    own = jax.tree.map(lambda a, r=row: a[r], p[stack][name])
    number = f"layer{i:02d}"
    its = dataclasses.replace(ctx, per_layer_input=aux.get(f"ple.{number}"))
    call = jax.jit(lambda layer, *args: layer(*args), static_argnums=0, compiler_options=EXACT)
    out, _ = call(layer, own, carry, its)
    np.testing.assert_array_equal(out["x"], aux[f"hidden.{number}"])
    if layer.precision != decoder.precision:
      other, _ = call(type(layer)(layer.cfg, decoder.precision), own, carry, its)
      differs += bool((other["x"] != out["x"]).any())
    if "kv" in out:
      carry["kv"] = jax.tree.map(decoder.precision.cast, out["kv"])
    carry["x"] = aux[f"hidden.{number}"]
  assert differs == sum(layer.precision != decoder.precision for layer in decoder.layers)


@pytest.mark.parametrize(
  "family", tiers(("gemma4-e2b", "deepseek3.2"), slow=("deepseek3.2",))
)  # caches of keys and values, shared ones, and of latents
def test_generation_with_caches_is_the_whole_forward_pass(family, mixed, random_params):
  """Two calls with caches, of 4 and 3 tokens, give the results of one row of 7. float32 layers have float32 caches."""
  decoder = mixed(family)
  p = random_params(decoder.params())
  tokens = jnp.asarray(np.random.default_rng(3).integers(0, 37, (2, 7)), jnp.int32)
  positions = jnp.broadcast_to(jnp.arange(7), (2, 7))

  @functools.partial(jax.jit, compiler_options=EXACT)
  def both(p):
    whole, _ = decoder.hidden(p, {"tokens": tokens, "positions": positions, "segments": jnp.ones((2, 7), jnp.int32)})
    cache, parts = decoder.empty_cache(2, 7), []
    for start, end in ((0, 4), (4, 7)):
      step = Step(jnp.full(2, start), jnp.full(2, end - start), fresh=start == 0)
      part = {"tokens": tokens[:, start:end], "positions": positions[:, start:end]}
      x, cache, _ = decoder.extend(p, part, cache, step)
      parts.append(x)
    return whole, jnp.concatenate(parts, axis=1), cache

  whole, parts, cache = both(p)
  assert jnp.dtype("float32") in {x.dtype for x in jax.tree.leaves(cache)}
  # If one value is rounded to bfloat16 in the other direction, the output of a layer changes by 1/256.
  np.testing.assert_allclose(parts, whole, atol=0.05 * float(jnp.abs(whole).max()))
  assert float(jnp.mean((parts == whole).astype(jnp.float32))) > 0.7


def test_module_wrappers_run_the_same_layers(mixed, batch):
  """Both module wrappers trace the same program."""
  decoder = mixed("gemma3")
  p = jax.tree.map(lambda q: jax.ShapeDtypeStruct(q.shape, q.dtype), decoder.params())

  def program(api):
    return str(jax.make_jaxpr(lambda p, b: make_apply(decoder, api)(p, b)[0])(p, batch))

  assert program("linen") == program("nnx") == program("plain")


@pytest.mark.slow
def test_remat_changes_no_number(mixed, random_params, batch):
  p = random_params(mixed("gemma3").params())

  def gradients(**build):
    step = jax.grad(lambda p: objective(mixed("gemma3", **build))(p, batch)[0])
    return jax.jit(step, compiler_options=EXACT)(p)

  assert relative(gradients(remat_policy="save_attention"), gradients()) < 1e-5


@pytest.mark.parametrize("family", tiers(FAMILIES, quick=QUICK[1:2], rest="slow"))
def test_every_key_changes_the_layer_exactly_where_the_configuration_lets_it(family, tiny_decoder, tiny_model, batch):
  """For all keys, dtypes and kinds of layer: the key is refused (``idle_reason``) exactly if it does not change the layer's
  program."""
  values: dict[str, Any] = dict.fromkeys(LAYER_KEYS, False) | {
    "matmul_precision": "high", "matmul_dtype": "float8", "float32_gate_product": True,
  }  # fmt: skip
  ctx = Context(batch["positions"], Tokens(batch["segments"]))
  model, kinds = tiny_model(family), {}
  for i, layer in enumerate(tiny_decoder(family).layers):
    kinds.setdefault(tuple(sorted(layer.params())), i)
  for dtype in ("float32", "bfloat16", "float16"):
    decoder = tiny_decoder(family, precision={"dtype": dtype})

    def program(layer, decoder=decoder, dtype=dtype):
      p = jax.tree.map(lambda q: jax.ShapeDtypeStruct(q.shape, q.dtype), layer.params())
      x = jax.ShapeDtypeStruct((2, 9, 20), layer.precision.residual)
      carry: dict[str, Any] = {"x": x}
      if decoder.shared_kv:
        kv = {n: jax.ShapeDtypeStruct((2, 9, *shape), dtype) for n, shape in decoder.shared_kv.items()}
        carry["kv"] = {name: (a, a) for name, a in kv.items()}
      inputs = jax.ShapeDtypeStruct((2, 9, 7), dtype) if decoder.cfg.per_layer_input else None
      return str(jax.make_jaxpr(lambda p, c, t: layer(p, c, dataclasses.replace(ctx, per_layer_input=t)))(p, carry, inputs))

    # In bfloat16 test every kind of layer, in the other dtypes only the last kind.
    for i in list(kinds.values())[0 if dtype == "bfloat16" else -1 :]:
      layer = decoder.layers[i]
      before = program(layer)
      for key in LAYER_KEYS[1:]:
        changed = program(type(layer)(layer.cfg, layer.precision.in_layer(**{key: values[key]}))) != before
        idle = idle_reason(key, values[key], i, model, vars(decoder.precision))
        assert changed == (idle is None), (dtype, i, key, idle)


def test_a_decoder_refuses_layers_of_another_stream(tiny_decoder):
  decoder = tiny_decoder("gemma3")
  other = type(decoder.layers[0])(decoder.layers[0].cfg, Precision(dtype="float32", weight_dtype="bfloat16"))
  with pytest.raises(ValueError, match=r"layer 0: its precision .*only in dtype"):
    Decoder(decoder.cfg, decoder.precision, (other, *decoder.layers[1:]))
  with pytest.raises(ValueError, match="weight_dtype cannot differ between layers"):
    decoder.precision.in_layer(weight_dtype="bfloat16")
