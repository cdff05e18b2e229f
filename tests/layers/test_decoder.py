"""Tests the complete decoder of every family: scan equals loop, remat does not change results, and documents and padding have
no effect on each other. Also tests captures, shared keys and values, and the head.

The tests of a family share compiled programs. They are compiled without optimization, because the tests only compare results
and most of their time is compilation.
"""

import contextlib
import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from maxtext_like.layers.attention.masks import Tokens
from maxtext_like.layers.context import CAPTURES, Context
from maxtext_like.layers.per_layer import PerLayerInput
from tests.tiers import slow, tiers

QUICK = ("gemma4-moe", "gemma4-e2b", "deepseek3.2")  # together they have every kind of layer
FOUR_LAYERS = (("num_decoder_layers", 4),)  # for Gemma 3: two rows of two layers, the fewest that are scanned
TWO_LAYERS = (("num_decoder_layers", 2), ("inhomogeneous_layer_cycle_interval", 2))
UNOPTIMIZED: Any = {"xla_backend_optimization_level": 0}


def cross_entropy(logits, targets):
  picked = jnp.take_along_axis(jax.nn.log_softmax(logits), jnp.maximum(targets, 0)[..., None], -1)[..., 0]
  return -jnp.sum(jnp.where(targets >= 0, picked, 0))


def objective(decoder):
  def loss(p, batch):
    logits, aux = decoder(p, batch, frozenset({"hidden"}))
    total = cross_entropy(logits, batch["targets"]) + aux.get("load_balance_loss", 0) + aux.get("indexer_loss", 0)
    return total, (logits, aux)

  return loss


@pytest.fixture(scope="module")
def compiled(tiny_decoder, random_params, batch):
  """Return the function compiled(family, **build) -> (decoder, p, step), with step(p, batch) -> ((loss, (logits, aux)),
  gradients)."""

  @functools.cache
  def made(family, changes, build):
    decoder = tiny_decoder(family, changes=dict(changes), **dict(build))
    p = random_params(decoder.params())
    step = jax.jit(jax.value_and_grad(objective(decoder), has_aux=True)).lower(p, batch)
    return decoder, p, step.compile(compiler_options=UNOPTIMIZED)

  # functools.cache treats changes=() and a missing argument as different calls. This function gives both the same cache entry.
  return lambda family, changes=(), **build: made(family, changes, tuple(sorted(build.items())))


def close(a, b, tolerance=1e-4):
  """Compare with a tolerance relative to the largest magnitude in each array, or with an absolute one if no magnitude is above
  1.

  Norms over few numbers amplify rounding errors of float32 by one or two orders of magnitude, most of all in the per-layer
  input.
  """

  def leaf(x, y):
    x, y = np.asarray(x, np.float64), np.asarray(y, np.float64)
    np.testing.assert_allclose(x, y, rtol=0, atol=tolerance * max(np.abs(y).max(initial=0), 1))

  jax.tree.map(leaf, a, b)


EVERY = ("gemma4-moe", "gemma4-e2b", "gemma3", "gemma4", "deepseek3", "deepseek3.2")


@pytest.mark.parametrize("family", tiers(EVERY, slow=("deepseek3.2",)))
def test_scan_is_the_loop(family, compiled, batch):
  decoder, p, scanned = compiled(family)
  _, _, looped = compiled(family, scan_layers=False)
  assert any(s.repeats > 1 for s in decoder.stacks)
  a, b = scanned(p, batch), looped(p, batch)
  close(a, b)
  gradients = a[1]
  for path, g in jax.tree_util.tree_leaves_with_path(gradients):
    assert jnp.isfinite(g).all(), path
  # Every trainable array gets a gradient. Arrays that are not trainable get none, except Gemma's layer scalar.
  spec = decoder.params()
  for (path, g), q in zip(jax.tree_util.tree_leaves_with_path(gradients), jax.tree.leaves(spec), strict=True):
    name = jax.tree_util.keystr(path)
    if q.trainable:
      assert (g != 0).any(), name
    elif "router" in name:
      assert (g == 0).all(), name


REMATTED = (
  ("gemma3", "full"),
  ("gemma4-e2b", "full"),
  ("gemma4-moe", "minimal"),
  ("gemma4-moe", "save_mlp"),
  ("deepseek3.2", "save_attention"),
)
"""Each policy is tested with a family that has most of the names it saves: shared keys and values, experts, MLA with an
indexer."""


@pytest.mark.parametrize(("family", "policy"), tiers(REMATTED, quick=REMATTED[:1], slow=REMATTED[3:]))
def test_remat_changes_no_number(family, policy, compiled, batch):
  layers = FOUR_LAYERS if family == "gemma3" else ()
  _, p, plain = compiled(family, changes=layers)
  _, _, rematted = compiled(family, changes=layers, remat_policy=policy)
  close(rematted(p, batch), plain(p, batch), 1e-5)


WAITS = (
  "gemma3 full layer_inputs",
  "gemma4-e2b full layer_inputs",
  "gemma4-moe minimal all",
  "gemma4-moe save_mlp layer_inputs",
  "deepseek3.2 save_outputs kept",
)


@pytest.mark.parametrize("case", tiers(WAITS, slow=(WAITS[0], WAITS[2])))
def test_where_things_wait_for_the_backward_pass_changes_no_bit(case, compiled, batch):
  """A CPU has the same memory for device and host, so programs with offloading run on it too. Some layers of E2B also read keys
  and values of other layers."""
  family, policy, offload = case.split()
  layers = FOUR_LAYERS if family == "gemma3" else ()
  _, p, here = compiled(family, changes=layers, remat_policy=policy)
  _, _, there = compiled(family, changes=layers, remat_policy=policy, remat_offload=offload)
  jax.tree.map(np.testing.assert_array_equal, there(p, batch), here(p, batch))


@pytest.mark.slow
def test_remat_policies_keep_different_amounts(tiny_decoder, random_params, batch):
  """Compare the bytes that the forward pass keeps for the backward pass. The policy none keeps the most and full the least."""

  def kept(policy):
    decoder = tiny_decoder("gemma4-moe", changes=dict(TWO_LAYERS), remat_policy=policy)
    p = jax.tree.map(lambda q: jax.ShapeDtypeStruct(q.shape, q.dtype), decoder.params())
    _, pull = jax.eval_shape(lambda p: jax.vjp(lambda p: objective(decoder)(p, batch)[0], p), p)
    return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(pull))

  sizes = {policy: kept(policy) for policy in ("none", "minimal", "save_mlp", "save_outputs", "full", "save_attention")}
  assert sizes["full"] < sizes["save_attention"] < sizes["none"]
  assert sizes["full"] < sizes["save_outputs"] < sizes["save_mlp"] < sizes["minimal"] < sizes["none"]


@pytest.mark.slow
def test_minimal_keeps_the_same_products_where_devices_share_their_sums(tiny_decoder, batch):
  """On several devices, products have custom derivatives, so that XLA adds partial sums in float32. The policy minimal must
  keep the same arrays as on one device."""

  def kept(mesh):
    decoder = tiny_decoder("gemma4-moe", precision={"dtype": "bfloat16"}, remat_policy="minimal")
    p = jax.tree.map(lambda q: jax.ShapeDtypeStruct(q.shape, q.dtype), decoder.params())
    with jax.sharding.use_abstract_mesh(mesh) if mesh else contextlib.nullcontext():
      _, pull = jax.eval_shape(lambda p: jax.vjp(lambda p: objective(decoder)(p, batch)[0], p), p)
    return sorted((x.size, x.dtype.name) for x in jax.tree.leaves(pull))

  mesh = jax.sharding.AbstractMesh((2,), ("fsdp",), axis_types=(jax.sharding.AxisType.Auto,))
  assert kept(mesh) == kept(None)


# --- documents and padding ---


@pytest.mark.parametrize("family", tiers(("gemma4-moe", "gemma4-e2b", "deepseek3.2"), rest="slow"))
def test_documents_of_a_row_do_not_see_each_other(family, compiled, batch):
  _, p, step = compiled(family)
  (_, (logits, _)), _ = step(p, batch)
  changed = batch | {"tokens": batch["tokens"].at[0, :4].add(1) % 37}
  (_, (after, _)), _ = step(p, changed)
  np.testing.assert_array_equal(after[0, 4:], logits[0, 4:])
  np.testing.assert_array_equal(after[1], logits[1])
  assert (jnp.abs(after[0, :4] - logits[0, :4]).max(-1) > 1e-3).all()


@pytest.mark.parametrize("family", ["gemma4-e2b", slow("gemma4-moe"), slow("deepseek3.2")])
def test_a_packed_document_is_the_same_as_alone(family, compiled, batch):
  _, p, step = compiled(family)
  (_, (logits, _)), _ = step(p, batch)
  empty = jnp.zeros_like(batch["tokens"])
  alone = {
    "tokens": empty.at[0, :2].set(batch["tokens"][0, 4:6]),
    "segments": empty.at[0, :2].set(1),
    "positions": empty.at[0, :2].set(jnp.arange(2)),
    "targets": empty - 100,
  }
  (loss, (single, aux)), gradients = step(p, alone)
  close(single[0, :2], logits[0, 4:6])
  # Rows that contain only padding give finite logits, losses and gradients.
  assert jnp.isfinite(single).all()
  assert jnp.isfinite(loss)
  assert all(jnp.isfinite(g).all() for g in jax.tree.leaves(gradients))
  if "moe_load" in aux:
    np.testing.assert_allclose(jnp.sum(aux["moe_load"], -1), 1, rtol=1e-6)


@pytest.mark.parametrize("family", ["gemma4-moe", slow("gemma4-e2b"), slow("deepseek3.2")])
def test_padding_influences_no_token_no_statistic_and_no_gradient(family, compiled, batch):
  _, p, step = compiled(family)
  padding = batch["segments"] == 0
  other = batch | {
    "tokens": jnp.where(padding, (batch["tokens"] + 5) % 37, batch["tokens"]),
    "positions": jnp.where(padding, 3, batch["positions"]),
  }
  (loss, (logits, aux)), gradients = step(p, batch)
  (other_loss, (other_logits, other_aux)), other_gradients = step(p, other)
  keep = ~np.asarray(padding)
  np.testing.assert_array_equal(np.asarray(other_logits)[keep], np.asarray(logits)[keep])
  assert other_loss == loss
  for name in ("moe_load", "load_balance_loss", "indexer_loss"):
    if name in aux:
      np.testing.assert_array_equal(other_aux[name], aux[name])
  close(other_gradients, gradients, 1e-6)


@pytest.mark.parametrize("family", ["gemma3", "deepseek3.2"])
def test_positions_and_segments_have_defaults(family, tiny_decoder, random_params):
  decoder = tiny_decoder(family, changes={"num_decoder_layers": 1})
  p = random_params(decoder.params())
  tokens = jnp.asarray(np.random.default_rng(0).integers(0, 37, (2, 6)), jnp.int32)
  said = {"positions": jnp.broadcast_to(jnp.arange(6), (2, 6)), "segments": jnp.ones((2, 6), jnp.int32)}

  @jax.jit
  def both(p, tokens, said):
    return decoder(p, {"tokens": tokens})[0], decoder(p, {"tokens": tokens} | said)[0]

  defaults, spelled_out = both(p, tokens, said)
  close(defaults, spelled_out, 1e-6)


# --- parameters and captures ---


@pytest.mark.parametrize("family", ["gemma4-e2b", slow("gemma4-moe"), slow("deepseek3.2")])
def test_a_layer_s_parameters_act_at_that_layer(family, compiled, batch):
  decoder, p, step = compiled(family)
  (_, (_, aux)), _ = step(p, batch)
  real = np.asarray(batch["segments"]) > 0
  for i in (0, len(decoder.layers) // 2, len(decoder.layers) - 1):
    stack, row, name = decoder.locate(i)
    layer = p[stack][name]
    changed = layer | {"attention": layer["attention"] | {"o": layer["attention"]["o"].at[row].multiply(-2.0)}}
    (_, (_, after)), _ = step(p | {stack: p[stack] | {name: changed}}, batch)
    for j in range(len(decoder.layers)):
      same = np.array_equal(np.asarray(aux[f"hidden.layer{j:02d}"])[real], np.asarray(after[f"hidden.layer{j:02d}"])[real])
      assert same == (j < i), (i, j)


def test_captures_are_named_by_layer(family, tiny_decoder, batch):
  decoder = tiny_decoder(family)
  p = jax.tree.map(lambda q: jax.ShapeDtypeStruct(q.shape, q.dtype), decoder.params())
  x, aux = jax.eval_shape(lambda p, b: decoder.hidden(p, b, frozenset(CAPTURES)), p, batch)
  L = len(decoder.layers)
  numbers = [f"layer{i:02d}" for i in range(L)]
  always = {"clamped"}
  expected = {"hidden.embed", "hidden.final_norm", *(f"hidden.{n}" for n in numbers)}
  if family.startswith("deepseek") or family.endswith("moe"):
    moe_layers = numbers[1:] if family.startswith("deepseek") else numbers
    always |= {"moe_load", "balance_load", "load_balance_loss"}
    expected |= {f"router.{n}.{what}" for n in moe_layers for what in ("scores", "topk_weights", "topk_idx")}
    experts = 6 if family.startswith("deepseek") else 5
    assert aux["moe_load"].shape == (len(moe_layers), experts)
    assert aux[f"router.{numbers[-1]}.scores"].shape == (2, 9, experts)
    assert aux[f"router.{numbers[-1]}.topk_idx"].shape == (2, 9, 2)
  if family == "deepseek3.2":
    always |= {"indexer_loss"}
    expected |= {f"indexer.{n}.topk_idx" for n in numbers}
    assert aux["indexer.layer00.topk_idx"].shape == (2, 9, 4)
  if family == "gemma4-e2b":
    expected |= {f"ple.{n}" for n in numbers}
    assert aux["ple.layer07"].shape == (2, 9, 7)
  assert set(aux) == always | expected
  assert aux["hidden.layer00"].shape == x.shape == (2, 9, 20)
  _, plain = jax.eval_shape(decoder.hidden, p, batch)
  assert set(plain) == always


def test_an_unknown_capture_is_refused(tiny_decoder):
  with pytest.raises(ValueError, match=r"\['hiden'\]\n  fix: .*hidden"):
    tiny_decoder("gemma3").hidden({}, {}, frozenset({"hiden"}))


@pytest.mark.slow
def test_loads_stand_in_the_order_of_the_layers(tiny_decoder, random_params):
  """Loads are in the order of the layers, 0, 1, 2, 3, and not in the order 0, 2, 1, 3 of a stack of blocks with two layers."""
  decoder = tiny_decoder("gemma4-moe", changes={"num_decoder_layers": 4, "inhomogeneous_layer_cycle_interval": 2})
  assert [(len(s.layers), s.repeats) for s in decoder.stacks] == [(2, 2)]
  p = random_params(decoder.params())
  for i in range(4):
    stack, row, name = decoder.locate(i)
    scale = p[stack][name]["moe"]["router"]["kernel"]
    # One column of each router's kernel exceeds the others. It differs between layers, so that their loads differ.
    column = jnp.zeros(scale.shape[1:]).at[:, i].set(0.0)
    p[stack][name]["moe"]["router"]["kernel"] = scale.at[row].set(column)
    p[stack][name]["moe"]["router"]["scale"] = p[stack][name]["moe"]["router"]["scale"].at[row].set(1.0)
    p[stack][name]["moe"]["router"]["kernel"] = p[stack][name]["moe"]["router"]["kernel"].at[row, 0, i].set(1e4)
  batch = {"tokens": jnp.asarray(np.random.default_rng(0).integers(0, 37, (2, 6)), jnp.int32)}
  _, aux = jax.jit(lambda p, b: decoder.hidden(p, b, frozenset({"router"})))(p, batch)
  for i in range(4):
    chosen = np.bincount(np.asarray(aux[f"router.layer{i:02d}.topk_idx"]).ravel(), minlength=5) / (2 * 6 * 2)
    np.testing.assert_allclose(aux["moe_load"][i], chosen, atol=1e-6)
  assert len({tuple(np.asarray(row)) for row in aux["moe_load"]}) == 4


# --- keys and values shared across layers ---


@pytest.mark.slow
def test_gradients_of_a_donor_sum_over_all_its_consumers(tiny_decoder, random_params, batch):
  """Layers 1 and 2 are one scanned stack and read the keys and values of layer 0.

  The gradient is computed with neither consumer, with only the first, and with only the second. Each path from the loss reaches
  the shared keys and values through one layer only. The complete gradient is therefore the sum of the last two minus the first.
  """
  changes = {"num_decoder_layers": 3, "num_kv_shared_layers": 2, "layer_types": ("global",) * 3}
  decoder = tiny_decoder("gemma4-e2b", changes=changes)
  assert [(len(s.layers), s.repeats) for s in decoder.stacks] == [(1, 1), (1, 2)]
  p = random_params(decoder.params())
  rows = [jax.tree.map(lambda a, r=row: a[r], p[stack][name]) for stack, row, name in map(decoder.locate, range(3))]
  ctx = Context(batch["positions"], Tokens(batch["segments"]))
  weights = (batch["segments"] > 0)[..., None]

  def by_hand(donor, real):
    """Run the layers of the decoder one by one. The gradient from consumer i to its keys and values is multiplied by
    real[i]."""
    x = decoder._embedding(p["embedding"], batch["tokens"])
    inputs = PerLayerInput(decoder.cfg.per_layer_input, decoder.precision)(p["ple"], batch["tokens"], x)
    own = lambda i: dataclasses.replace(ctx, per_layer_input=inputs[:, :, i])
    first = rows[0] | {"attention": rows[0]["attention"] | donor}
    carry, _ = decoder.layers[0](first, {"x": x, "kv": {"global": None}}, own(0))
    kv = carry["kv"]["global"]
    for i in (1, 2):
      cut = jax.tree.map(lambda a, w=real[i - 1]: w * a + (1 - w) * jax.lax.stop_gradient(a), kv)
      carry, _ = decoder.layers[i](rows[i], carry | {"kv": {"global": cut}}, own(i))
    return jnp.sum(jnp.sin(carry["x"]) * weights)

  def whole(p):
    _, aux = decoder.hidden(p, batch, frozenset({"hidden"}))
    return jnp.sum(jnp.sin(aux["hidden.layer02"]) * weights)

  donor = {name: rows[0]["attention"][name] for name in ("k", "v")}
  paths = jnp.asarray([[0, 0], [1, 0], [0, 1]], jnp.float32)

  def run(donor, p):
    return jax.vmap(jax.grad(by_hand), (None, 0))(donor, paths), jax.grad(whole)(p)

  parts, total = jax.jit(run).lower(donor, p).compile(compiler_options=UNOPTIMIZED)(donor, p)
  stack, row, name = decoder.locate(0)
  for array in ("k", "v"):
    own, first, second = parts[array]
    close(total[stack][name]["attention"][array][row], first + second - own)
    assert jnp.abs(first - own).max() > 1e-2  # every consumer contributes to the gradient
    assert jnp.abs(second - own).max() > 1e-2


PASSES = ("gemma4-e2b", "gemma4-moe", "deepseek3.2")


@pytest.mark.parametrize("family", tiers(PASSES, slow=(PASSES[0], *PASSES[2:])))
def test_a_pass_in_its_parts_is_the_whole_one(family, tiny_decoder, random_params, batch):
  """Call enter, every row and leave separately, then run the backward pass one row at a time, as an update inside the backward
  pass does."""
  layers = {"num_decoder_layers": 4, "num_kv_shared_layers": 2} if family == "gemma4-e2b" else {}
  decoder = tiny_decoder(family, changes=layers)
  p, ctx = random_params(decoder.params()), decoder.context(batch)
  weights = (batch["segments"] > 0)[..., None]
  loss = lambda x: jnp.sum(jnp.sin(x) * weights)
  places = [(s, i, layers) for s in decoder.stacks for i, layers in enumerate(n * [b] for n, b in s.split(decoder.layers))]
  places = [(s, layers) for s, _, several in places for layers in several]

  def by_hand(p):
    outside = {name: value for name, value in p.items() if not name.startswith("stack_")}
    (carry, per_layer, _), leave_entry = jax.vjp(lambda o: decoder.enter(o, batch, ctx), outside)
    pulls, at = [], dict.fromkeys((s.name for s, _ in places), 0)
    for s, layers in places:
      rows = decoder.rows(s, p, per_layer)
      row = jax.tree.map(lambda a, i=at[s.name]: a[i], rows)
      at[s.name] += 1
      carry, pull, _ = jax.vjp(lambda c, r, s=s, b=layers: decoder.run_row(s, b, c, r, ctx), carry, row, has_aux=True)
      pulls.append((s, pull))
    value, pull_out = jax.vjp(lambda o, c: loss(decoder.leave(o, c, [], {}, ctx)[0]), outside, carry)
    d_outside, d_carry = pull_out(jnp.ones(()))
    d_rows: dict[str, list] = {s.name: [] for s, _ in places}
    for s, pull in reversed(pulls):
      d_carry, d_row = pull(d_carry)
      d_rows[s.name].insert(0, d_row)
    stacked = {name: jax.tree.map(lambda *a: jnp.stack(a), *rows) for name, rows in d_rows.items()}
    d_per_layer = None
    if per_layer is not None:
      d_per_layer = jnp.concatenate([stacked[s.name]["per_layer"].reshape(-1, *per_layer.shape[1:]) for s in decoder.stacks])
    zeros = jax.tree.map(jnp.zeros_like, jax.eval_shape(lambda o: decoder.enter(o, batch, ctx)[2], outside))
    (d_entry,) = leave_entry((d_carry, d_per_layer, zeros))
    return value, jax.tree.map(jnp.add, d_outside, d_entry) | {name: row["params"] for name, row in stacked.items()}

  whole = jax.value_and_grad(lambda p: loss(decoder.hidden(p, batch)[0]))
  both = jax.jit(lambda p: (by_hand(p), whole(p))).lower(p).compile(compiler_options=UNOPTIMIZED)
  got, expected = both(p)
  close(got, expected)


# --- head ---


def test_soft_cap_and_tied_head(tiny_decoder, random_params):
  capped = tiny_decoder("gemma4")
  plain = tiny_decoder("gemma4", changes={"final_logits_soft_cap": None})
  p = random_params(capped.params())
  x = jnp.asarray(np.random.default_rng(0).normal(size=(2, 3, 20)) * 9, jnp.float32)
  raw = np.asarray(x, np.float64) @ np.asarray(p["embedding"]["table"], np.float64).T
  assert np.abs(raw).max() > 10
  np.testing.assert_allclose(plain.head(p, x), raw, atol=1e-4)
  np.testing.assert_allclose(capped.head(p, x), 5 * np.tanh(raw / 5), atol=2e-5)


def test_untied_head(tiny_decoder, random_params):
  decoder = tiny_decoder("deepseek3")
  p = random_params(decoder.params())
  x = jnp.asarray(np.random.default_rng(0).normal(size=(2, 3, 20)), jnp.float32)
  np.testing.assert_allclose(decoder.head(p, x), np.asarray(x) @ np.asarray(p["head"]["kernel"]), atol=1e-5)
  assert "head" not in tiny_decoder("gemma3").params()


@pytest.mark.parametrize("cast", [True, False])
@pytest.mark.parametrize("dot", [True, False])
def test_dtype_of_the_logits(cast, dot, tiny_decoder, random_params):
  decoder = tiny_decoder("gemma4", precision={"dtype": "bfloat16", "cast_logits_to_fp32": cast, "logits_dot_in_fp32": dot})
  p = random_params(decoder.params())
  x = jnp.asarray(np.random.default_rng(0).normal(size=(2, 3, 20)), jnp.bfloat16)
  logits = decoder.head(p, x)
  assert logits.dtype == ("float32" if cast else "bfloat16")
  raw = np.asarray(x, np.float64) @ np.asarray(p["embedding"]["table"], np.float64).T
  error = np.abs(np.asarray(logits, np.float64) - 5 * np.tanh(raw / 5)).max()
  assert error < (1e-5 if cast and dot else 0.02 if cast else 0.06)
