"""Bisection on planted faults: weights make one operation of a tiny model fail in 16 bits, and one key repairs it."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import maxtext_like
from maxtext_like.analysis.distance import Steps
from maxtext_like.analysis.key_bisection import Bisection, summary
from maxtext_like.analysis.precision_overrides import Remedy, applied, reference, yaml
from maxtext_like.checkpoint.huggingface.model_file import load_checkpoint_config
from maxtext_like.checkpoint.huggingface.weights import load_hugging_face
from maxtext_like.config.load import load_config
from maxtext_like.config.schema import Config
from maxtext_like.errors import NonFiniteError
from maxtext_like.layers.param import init
from maxtext_like.training.step.program import make_program
from tests.models.test_golden import GOLDEN
from tests.models.test_golden_vision import larger
from tests.training.test_vision_training import golden_batch

STEPS = Steps()  # shared, so that each configuration is compiled only once

SMALL = ["num_decoder_layers=1", "vocab_size=61", "emb_dim=64", "mlp_dim=40", "max_target_length=12", "per_device_batch_size=2"]
SMALL += ["opt_type=sgd", "learning_rate=0.01", "module_api=linen", "enable_checkpointing=false"]
GEMMA4 = ["inhomogeneous_layer_cycle_interval=1", "num_query_heads=2", "num_kv_heads=1", "global_head_dim=64"]
GEMMA4 += ["logits_via_embedding=false", "final_logits_soft_cap=null", "share_kv_projections=false", "global_num_kv_heads=null"]
MODELS = {
  "gemma4": ["gemma4-tiny", *SMALL, *GEMMA4],
  "experts": ["gemma4-moe-tiny", *SMALL, *GEMMA4, "num_experts=4", "moe_mlp_dim=16", "load_balance_loss_weight=0"],
  "indexer": ["deepseek3.2-tiny", *SMALL, "first_num_dense_layers=0", "num_experts=2", "n_routing_groups=1",
              "topk_routing_group=1", "num_experts_per_tok=1", "moe_mlp_dim=16", "indexer_n_heads=2", "indexer_topk=4"],
}  # fmt: skip
Params = dict[str, Any]


def config_of(model: str, *more: str) -> Config:
  name, *settings = MODELS[model]
  return load_config(name, [*settings, *more]).config


def batch_of(config: Config) -> dict[str, np.ndarray]:
  """Returns random tokens. Each row is one document."""
  rows, length = int(config.training.per_device_batch_size), config.training.max_target_length
  tokens = np.random.default_rng(0).integers(3, 61, (rows, length + 1)).astype(np.int32)
  positions = np.broadcast_to(np.arange(length, dtype=np.int32), (rows, length))
  return {"tokens": tokens[:, :-1], "targets": tokens[:, 1:], "positions": positions, "segments": np.ones_like(positions)}


@functools.cache
def weights(config: Config) -> Params:
  """Returns initial float32 parameters. They are cached, so a caller must copy what it changes."""
  spec = STEPS.program(reference(config)).spec
  return jax.jit(lambda: init(spec, jax.random.key(3)))()


def search(config: Config, plant: Callable[[Params], Params], tolerance: float | None) -> Bisection:
  base = dataclasses.replace(config, precision=reference(config).precision)
  params = plant(jax.tree.map(lambda x: x, weights(base)))
  program = STEPS.program(reference(config))
  return Bisection(config, params, program.place(batch_of(config)), tolerance, STEPS)


def layer(p: Params, *path: str) -> Params:
  """Returns a sub-dict of the first stack's first layer, which the caller may write to."""
  node = p["stack_0"]["layer_0"]
  for name in path:
    node = node[name]
  return node


def normal(seed: int, shape: tuple[int, ...]) -> jax.Array:
  return jnp.asarray(np.random.default_rng(seed).normal(size=shape), jnp.float32)


# --- the planted faults: each changes initial weights ---


def large_gate_product(p: Params) -> Params:
  """gate and up are in the hundreds and their product is above 65504. The next norm scales it back."""
  mlp = layer(p, "mlp")
  mlp["gate"], mlp["up"] = mlp["gate"] * 400, mlp["up"] * 400
  return p


def large_scores(p: Params) -> Params:
  """Scores are around 270 and differ by a few. All q and k have nearly one direction, so that their rounding averages out."""
  table, attention = p["embedding"]["table"], layer(p, "attention")
  common = normal(1, table.shape[1:])
  p["embedding"]["table"] = common + normal(2, table.shape)
  # The dimensions that the rotary embedding rotates are 0.
  direction = jnp.sign(normal(3, (64,))).at[jnp.r_[0:8, 32:40]].set(0)
  for name, seed in (("q", 4), ("k", 5)):
    kernel = attention[name]
    attention[name] = 0.02 * normal(seed, kernel.shape) + (common / (common @ common))[:, None, None] * direction
    attention[f"{name}_norm"] = {"scale": jnp.full((1, 64), 2.08)}
  layer(p)["post_attention_norm"] = {"scale": jnp.full((1, 64), 50.0)}
  return p


def router_of_near_equals(p: Params) -> Params:
  """The columns of the router differ by less than bfloat16 resolves."""
  router = layer(p, "moe", "router")
  kernel = router["kernel"]
  router["kernel"] = 2000 * normal(1, kernel.shape[:2])[..., None] + 16 * normal(2, kernel.shape)
  return p


def canceling_experts(p: Params) -> Params:
  """Experts form pairs with outputs of opposite sign and almost equal weights, so their sum depends on small differences."""
  experts, router = layer(p, "moe", "experts"), layer(p, "moe", "router")
  for name, sign in (("gate", 1), ("up", 1), ("down", -1)):
    one = experts[name][:, :1]
    experts[name] = jnp.concatenate([one, sign * one, one, sign * one], axis=1)
  kernel = normal(1, router["kernel"].shape)
  pair = kernel[:, :, :1] * 30
  router["kernel"] = jnp.concatenate([pair, pair + 0.02 * kernel[:, :, 1:2], -pair, -pair + 0.02 * kernel[:, :, 2:3]], axis=2)
  return p


def canceling_index_heads(p: Params) -> Params:
  """Two equal index heads have weights that cancel up to one part in a thousand, which bfloat16 cannot represent."""
  indexer = layer(p, "attention", "indexer")
  q = indexer["q"][:, :, :1]
  indexer["q"] = jnp.concatenate([q, q], axis=2)
  w = indexer["weights"][:, :, :1] * 1000
  indexer["weights"] = jnp.concatenate([w, -w * (1 - 2.0**-10)], axis=2)
  return p


def large_residual(p: Params) -> Params:
  p["stack_0"]["layer_0"]["post_attention_norm"] = {"scale": layer(p, "post_attention_norm")["scale"] * 5e4}
  return p


def large_logits(p: Params) -> Params:
  """Logits are around 1000 and differ by a few. Hidden states have nearly one direction, spread over all dimensions."""
  table, head = p["embedding"]["table"], p["head"]["kernel"]
  common = normal(2, table.shape[1:])
  p["embedding"]["table"] = 3 * normal(1, table.shape) + 30 * common
  # Round the head to bfloat16 here, because rounding it in the step would be another fault.
  p["head"] = {"kernel": (16 * common[:, None] + 0.3 * normal(4, head.shape)).astype("bfloat16").astype("float32")}
  return p


def head_of_near_equals(p: Params) -> Params:
  """The columns of the head differ by less than bfloat16 resolves."""
  head = p["head"]["kernel"]
  p["head"] = {"kernel": 100 * normal(3, head.shape[:1])[:, None] + 0.1 * normal(4, head.shape)}
  return p


def table_of_near_equals(p: Params) -> Params:
  """Embeddings differ by less than bfloat16 resolves, and the head depends only on their differences."""
  table, head = p["embedding"]["table"], p["head"]["kernel"]
  direction = normal(3, table.shape[1:])
  p["embedding"]["table"] = 100 * direction + 0.1 * normal(4, table.shape)
  other = normal(5, head.shape)
  unit = direction / jnp.linalg.norm(direction)
  p["head"] = {"kernel": 100 * (other - unit[:, None] * (unit @ other))}
  return p


def steep_head(p: Params) -> Params:
  """Logits, and therefore gradients, exceed float16's range."""
  p["head"] = {"kernel": p["head"]["kernel"] * 1e6}
  return p


def fresh(p: Params) -> Params:
  return p


# Train only arrays after the fault. If the numbers of a fault cancel, the gradients of arrays before it are rounding errors.
HEAD = " trainable_parameters_mask=[head,final_norm]"
# The size of these two faults depends on the initial values of the other arrays.
DRAWN = HEAD + " init_scheme=maxtext"
BOTH = "float32_qk_product=true, float32_logits=true"
PLANTS = [
  # planted fault, model, configuration, tolerance, keys that bisection finds, results that they repair
  (large_scores, "gemma4", "dtype=bfloat16 float32_qk_product=false" + HEAD, 0.05, "float32_qk_product=true", "gradients"),
  (large_scores, "gemma4", "dtype=bfloat16 float32_logits=false float32_qk_product=false" + HEAD, 0.05, BOTH, "gradients"),
  (router_of_near_equals, "experts", "dtype=bfloat16 float32_gate_logits=false" + HEAD, 0.05,
   "float32_gate_logits=true", "gradients"),
  (canceling_experts, "experts", "dtype=bfloat16 float32_weight_sum=false" + DRAWN, 0.05,
   "float32_weight_sum=true", "gradients"),
  (canceling_index_heads, "indexer", "dtype=bfloat16 indexer_float32_logits=false" + HEAD, 0.1,
   "indexer_float32_logits=true", "gradients"),
  (large_logits, "gemma4", "dtype=bfloat16 cast_logits_to_fp32=false" + DRAWN, 0.1, "cast_logits_to_fp32=true", "gradients"),
  (head_of_near_equals, "gemma4", "dtype=bfloat16", 0.3, "logits_dot_in_fp32=true", "gradients"),
  (table_of_near_equals, "gemma4", "dtype=bfloat16", 0.3, "dtype=float32", "gradients"),
  (large_gate_product, "gemma4", "dtype=float16 float32_gate_product=false", 0.1, "float32_gate_product=true", "gradients"),
  (large_residual, "gemma4", "dtype=float16 residual_dtype=float16", 0.1, "residual_dtype=float32", "loss gradients"),
  (fresh, "gemma4", "dtype=float16 loss_scale_init=16777216", 0.1, "loss_scale_init=lower", "gradients"),
  (fresh, "gemma4", "dtype=bfloat16 weight_dtype=bfloat16", 0.3, "weight_dtype=float32", "update"),
  (steep_head, "gemma4", "dtype=bfloat16 grad_dtype=float16", 0.3, "grad_dtype=float32", "gradients"),
]  # fmt: skip


IN_CI = (large_scores, head_of_near_equals, router_of_near_equals)
"""Nightly runs test the other keys. tests/layers/test_precision_keys.py tests the effect of every key."""


@pytest.mark.parametrize(
  ("plant", "model", "settings", "tolerance", "expected", "mends"),
  [
    pytest.param(*p, marks=[] if p[0] in IN_CI and p[4] != BOTH else pytest.mark.nightly, id=f"{p[0].__name__}: {p[4]}")
    for p in PLANTS
  ],
)
@pytest.mark.slow
def test_a_planted_fault_is_mended_by_exactly_its_keys(plant, model, settings, tolerance, expected, mends):
  bisection = search(config_of(model, *settings.split()), plant, tolerance)
  result = bisection.run()
  assert (result.outcome, summary(result.remedies)) == ("mended", expected)
  assert result.before.worst > tolerance >= result.after.worst
  assert [f.key for f in result.findings] == [r.key for r in result.remedies]
  for finding in result.findings:
    assert finding.before.worst > tolerance >= finding.after.worst  # every key is necessary
    assert set(mends.split()) <= set(finding.mends)
    assert finding.arrays
    assert set(finding.arrays) <= set(bisection._ruler.labels)


@pytest.mark.slow
def test_the_loss_scale_that_is_found_is_the_largest_that_works():
  config = config_of("gemma4", "dtype=float16", "loss_scale_init=16777216")
  bisection = search(config, fresh, 0.1)
  found = (Remedy("loss_scale_init", None),)
  scale = bisection.distance(found).loss_scale
  assert scale is not None
  assert scale < 2**24
  assert scale == 2.0 ** round(np.log2(scale))
  assert applied(config, found, scale).training.loss_scale_init == scale
  for factor, finite in ((1, True), (2, False)):
    scaled = dataclasses.replace(config, training=dataclasses.replace(config.training, loss_scale_init=scale * factor))
    assert bisection._ruler.measure(scaled).finite == finite


@pytest.mark.slow
def test_a_fault_of_one_layer_is_mended_there_alone():
  """In a stack of three layers, only the gated product of the second layer is too large."""
  words = ["dtype=float16", "float32_gate_product=false", "num_decoder_layers=3"]

  def plant(p):
    mlp = layer(p, "mlp")
    mlp |= {name: mlp[name].at[1].multiply(400) for name in ("gate", "up")}
    p["stack_0"]["layer_0"]["mlp"] = mlp
    return p

  result = search(config_of("gemma4", *words), plant, 0.1).run()
  assert summary(result.remedies) == "float32_gate_product=true in layer 1"
  assert yaml(config_of("gemma4", *words), result.config) == ('precision:\n  layer_precision: ["1 float32_gate_product=true"]')
  (finding,) = result.findings
  assert finding.layers == (1,)
  assert finding.before.worst > 0.1 >= finding.after.worst


def test_layers_that_no_longer_run_in_a_loop_keep_nothing_on_the_host():
  """Offloading without a loop over layers is an error, so bisection must switch it off when it splits the layers."""
  words = ["dtype=float16", "float32_gate_product=false", "remat_policy=full", "remat_offload=layer_inputs"]
  own = Remedy("float32_gate_product", True, layer=1)
  for layers, offload in ((3, "none"), (4, "layer_inputs")):  # of 4, the last two are equal and run in a loop
    config = config_of("gemma4", f"num_decoder_layers={layers}", *words)
    changed = applied(config, [own])
    assert changed.training.remat_offload == offload
    assert ("remat_offload: none" in yaml(config, changed)) == (offload == "none")
    make_program(changed)
  assert applied(config, []).training.remat_offload == "layer_inputs"


@pytest.mark.slow
def test_the_vision_pooler():
  """The golden case has features of 1e5; here the pooled features are 3e7."""
  directory = GOLDEN / "stress_fp16_vision" / "checkpoint"
  words = ["use_multimodal=true", "dtype=float16", "float32_vision_pool=false", "per_device_batch_size=1"]
  words += ["trainable_parameters_mask=[final_norm]"]
  _, loaded = load_checkpoint_config(directory, words, length=20)
  program = STEPS.program(reference(loaded.config))
  params = larger(load_hugging_face(directory, program.model.decoder), 256.0)
  arrays = golden_batch("stress_fp16_vision", loaded.config)
  shapes = {name: x.shape for name, x in arrays.items()}
  assert shapes == {name: x.shape for name, x in program.abstract_batch.items()}
  result = Bisection(loaded.config, params, program.place(arrays), 0.1, STEPS).run()
  assert summary(result.remedies) == "float32_vision_pool=true"


@pytest.mark.slow
def test_a_step_that_is_fine_is_left_alone():
  result = search(config_of("gemma4", "dtype=bfloat16"), fresh, 0.5).run()
  assert result.outcome == "fine"
  assert not result.remedies
  assert result.steps == 1


@pytest.mark.slow
def test_of_a_model_with_an_adapter():
  """Bisection works for a model with an adapter, whose step has gradients and updates of the adapter only."""
  words = [*SMALL, "vocab_size=300", "inhomogeneous_layer_cycle_interval=1", "lora_rank=2"]
  found = maxtext_like.bisect("gemma3-tiny", "dtype=float32", *words)
  assert "nothing to repair" in str(found)


@pytest.mark.slow
def test_the_tolerance_is_chosen_from_what_the_dtype_makes_at_best():
  bisection = search(config_of("gemma4", "dtype=bfloat16"), fresh, None)
  usual = bisection.distance(())
  assert bisection.limits == dict.fromkeys(("loss", "gradients", "update"), 0.5)
  bisection._choose(dataclasses.replace(usual, gradient=0.4, arrays=np.asarray([0.1, 0.7]), update=np.inf))
  assert bisection.limits["gradients"] == 0.5  # a non-finite step does not change the limits
  bisection._choose(dataclasses.replace(usual, gradient=0.4, arrays=np.asarray([0.1, 0.7])))
  assert bisection.limits == {"loss": 0.5, "gradients": 1.4, "update": 0.5}
  assert bisection.fine(dataclasses.replace(usual, arrays=np.asarray([1.3])))
  assert not bisection.fine(dataclasses.replace(usual, update=0.6))
  bisection._choose(dataclasses.replace(usual, gradient=40.0))
  assert bisection.limits["gradients"] == 3


@pytest.mark.parametrize(("stochastic", "swallowed"), [("false", True), ("true", False)])
@pytest.mark.slow
def test_stochastic_rounding_keeps_the_update_on_average(stochastic, swallowed):
  words = ["dtype=bfloat16", "weight_dtype=bfloat16", "learning_rate=1e-4", f"stochastic_rounding={stochastic}"]
  update = search(config_of("gemma4", *words), fresh, None).distance(()).update
  assert (update > 0.5) == swallowed
  assert swallowed or update < 0.1


@pytest.mark.slow
def test_nothing_mends_it():
  """Float32's own rounding of the update exceeds the tolerance. Every key is tried, and the best result is reported."""
  result = search(config_of("gemma4", "dtype=bfloat16"), fresh, 1e-9).run()
  assert result.outcome == "hopeless"
  assert any(r.key == "dtype" for r in result.remedies)
  assert result.after.worst < 1e-3 < result.before.worst


def test_weights_that_float32_cannot_hold_are_not_the_precision_s_fault():
  def plant(p):
    return p | {"head": {"kernel": p["head"]["kernel"] * jnp.inf}}

  with pytest.raises(NonFiniteError, match="not finite in float32 either"):
    search(config_of("gemma4", "dtype=bfloat16"), plant, 0.1)
