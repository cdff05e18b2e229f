"""Audits of complete train steps: every key of every model file is honored, and each planted violation is found."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from maxtext_like.analysis import audit_keys, lowered, program_audit
from maxtext_like.config.files import model_names
from maxtext_like.config.load import load_config
from maxtext_like.layers import block, mlp
from maxtext_like.layers.attention import indexer, masks
from maxtext_like.layers.kernels.attention import dot_product, registry
from maxtext_like.layers.moe import moe
from maxtext_like.layers.precision import Precision
from maxtext_like.models.build import precision_of
from maxtext_like.numerics import hlo
from maxtext_like.training.step.train_step import TrainStep
from tests.tiers import slow, tiers

ONE = ["num_decoder_layers=1", "dtype=bfloat16", "max_target_length=128"]
MODELS = {
  "gemma": ["gemma4-tiny", *ONE, "inhomogeneous_layer_cycle_interval=1"],
  "gemma capped": ["gemma4-tiny", *ONE, "inhomogeneous_layer_cycle_interval=1", "attn_logits_soft_cap=50"],
  "moe": ["gemma4-moe-tiny", *ONE, "inhomogeneous_layer_cycle_interval=1"],
  "deepseek": ["deepseek3.2-tiny", *ONE, "first_num_dense_layers=0"],
  "vision": ["gemma4-tiny", *ONE, "inhomogeneous_layer_cycle_interval=1", "use_multimodal=true"],
}


def read(words: list[str], platform: Any = "tpu") -> tuple[Any, hlo.Reading, Precision]:
  config = load_config(words[0], words[1:]).config
  program, module = lowered.lower(config, platform)
  return program, hlo.read_stablehlo(module), precision_of(config.precision)


def keys_of(words: list[str], platform: Any = "tpu") -> dict[str, audit_keys.KeyVerdict]:
  program, reading, precision = read(words, platform)
  return {k.key: k for k in judged(program, reading, precision)}


def judged(program, reading, precision, compiled=False) -> list[audit_keys.KeyVerdict]:
  leaves = jax.tree_util.tree_leaves_with_path(program.spec)
  return audit_keys.judge_keys(
    reading, precision, program.config.model, program.config.vision, compiled=compiled,
    weights={f"state['params']{jax.tree_util.keystr(path)}": leaf.dtype for path, leaf in leaves},
  )  # fmt: skip


def dishonest(keys: dict[str, audit_keys.KeyVerdict]) -> set[str]:
  return {name for name, k in keys.items() if k.verdict == "not honored"}


# -- the unchanged code


def every_model() -> list[Any]:
  """Returns every model on TPUs, and one model of each kind on GPUs, where the attention kernels differ.

  Models of one family differ only in sizes, so one or two of each family run in CI and the others in nightly runs.
  """
  quick = {("gemma4-tiny", "cuda")}
  slow = {("gemma3-4b", "tpu"), ("deepseek3.2-671b", "cuda"), ("deepseek3.2-tiny", "tpu"), ("qwen3-30b-a3b", "tpu")}
  cuda = {"gemma3-4b", "gemma4-tiny", "gemma4-26b", "gemma4-31b", "gemma4-e2b", "deepseek3.2-671b", "qwen3-30b-a3b"}
  assert cuda < {*model_names()}
  cases = [(model, platform) for model in model_names() for platform in (("tpu", "cuda") if model in cuda else ("tpu",))]
  return tiers(cases, quick, slow)


@pytest.mark.parametrize(("model", "platform"), every_model())
def test_every_model_file_honors_every_key_and_nothing_works_unasked(model, platform):
  """Models have their full width and depth, because equal layers are one loop. The tiny models are set to bfloat16 here."""
  words = [model, "dtype=bfloat16"]
  program, reading, precision = read(words, platform)
  keys = {k.key: k for k in judged(program, reading, precision)}
  assert set(keys) == {f.name for f in dataclasses.fields(Precision)}
  assert dishonest(keys) == set()
  assert not program_audit.unasked(reading, precision.dtype, audit_keys.asked_float32(precision))
  lacking = {name for name, k in keys.items() if k.verdict == "not shown"}
  assert all("does not have" in keys[name].evidence for name in lacking - {"reduction_dtype"})
  sites = {(r.site, r.stage) for r in program_audit.rows(reading)}
  assert sites >= {("norms", "forward"), ("norms", "backward"), ("residual stream", "forward"), ("logits", "forward")}
  assert sites >= {("logits", "backward"), ("loss", "forward"), ("optimizer", "update"), ("gate product", "forward")}
  fused = {use.kernel for use in program.model.kernels if use.shape}
  names = {"cudnn_flash": "cuDNN attention", "splash": "splash attention"}
  assert {(names[k], stage) for k in fused for stage in ("forward", "backward")} <= sites
  if not fused:
    assert sites >= {(s, stage) for s in ("qk product", "softmax", "pv product") for stage in ("forward", "backward")}


FLAGS = [
  ("gemma", "float32_qk_product=false", "results of q.k bf16"),
  ("gemma", "float32_logits=false", "softmax bf16"),
  ("gemma capped", "float32_logits=true", "softmax f32"),
  ("gemma capped", "float32_logits=false", "softmax bf16"),
  ("gemma capped", "float32_qk_product=false", "results of q.k bf16"),
  ("gemma", "float32_gate_product=true", "multiplications of gate and up f32"),
  ("gemma", "cast_logits_to_fp32=false", "1 logits bf16"),
  ("gemma", "logits_dot_in_fp32=true", "operands of the last product f32"),
  ("gemma", "matmul_precision=high", "products of bfloat16 operands"),
  ("gemma", "residual_dtype=float32", "residual stream f32"),
  ("gemma", "weight_dtype=bfloat16", "parameters bf16"),
  ("gemma", "grad_dtype=bfloat16", "gradients: bf16"),
  ("gemma", "dtype=float16", "operands of products f16"),
  ("gemma", "dtype=float32", "operands of products f32"),
  ("deepseek", "indexer_float32_logits=false", "relu and sum bf16"),
  ("deepseek", "float32_gate_logits=false", "operands of router products bf16"),
  ("deepseek", "float32_weight_sum=false", "operands of the weighted sum bf16"),
  ("vision", "float32_vision_pool=false", "scalings of pooled features bf16"),
]


@pytest.mark.slow
@pytest.mark.parametrize(("model", "word", "evidence"), FLAGS, ids=[f[1] for f in FLAGS])
def test_each_key_the_other_way_is_honored_too(model, word, evidence):
  keys = keys_of([*MODELS[model], word])
  assert dishonest(keys) == set()
  assert evidence in keys[word.partition("=")[0]].evidence


@pytest.mark.slow
def test_a_precision_of_products_is_shown_by_float32_operands_alone():
  assert keys_of([*MODELS["gemma"], "matmul_precision=highest"])["matmul_precision"].verdict == "not shown"
  found = keys_of([*MODELS["gemma"], "matmul_precision=highest", "dtype=float32"])["matmul_precision"]
  assert found.verdict == "honored"
  assert found.evidence.endswith("products highest")


@pytest.mark.parametrize("model", ["gemma", slow("deepseek"), slow("moe"), slow("vision")])
def test_products_in_float8_are_told_from_those_in_the_dtype(model):
  keys = keys_of([*MODELS[model], "matmul_dtype=float8"], "cuda")
  assert dishonest(keys) == set()
  assert keys["matmul_dtype"].evidence.endswith("products f8E4M3FN")


def test_a_product_in_float8_that_was_not_asked_for_is_found(monkeypatch):
  both = lambda self, spec, x, y, **how: einsum(dataclasses.replace(self, matmul_dtype="float8"), spec, x, y, **how)
  einsum = Precision.einsum
  monkeypatch.setattr(Precision, "einsum", both)
  assert dishonest(keys_of(MODELS["gemma"], "cuda")) >= {"matmul_dtype", "dtype"}


# -- planted violations


def _ignores_float32(self, spec, x, y, *, out=None, unbounded=False, large=False):
  return jnp.einsum(spec, self.cast(x), self.cast(y), precision=self.matmul_precision)


def _all_float32(self, spec, x, y, *, out=None, unbounded=False, large=False):
  made = jnp.einsum(spec, x.astype(jnp.float32), y.astype(jnp.float32), precision=self.matmul_precision)
  return made.astype(out or self.dtype)


def _ignores_precision(self, spec, x, y, *, out=None, unbounded=False, large=False):
  return Precision.einsum(dataclasses.replace(self, matmul_precision="default"), spec, x, y, out=out)


_softmax, _product, _call = dot_product.masked_softmax, mlp.float16_gated_product, TrainStep.__call__

# (planted violation, model, words, the keys that are not honored)
PLANTED = {
  "einsum ignores float32": (
    lambda m: m.setattr(Precision, "einsum", _ignores_float32), "gemma", [], {"float32_qk_product", "cast_logits_to_fp32"},
  ),
  "einsum in float32 always": (
    lambda m: m.setattr(Precision, "einsum", _all_float32), "gemma", [], {"dtype", "logits_dot_in_fp32"},
  ),
  "softmax in bfloat16": (
    lambda m: m.setattr(dot_product, "masked_softmax", lambda s, mask: _softmax(s.astype(jnp.bfloat16), mask)),
    "gemma", [], {"float32_logits"},
  ),
  "scores capped in bfloat16": (
    lambda m: m.setattr(masks, "_capped", lambda s, cap: masks.soft_cap(s.astype(jnp.bfloat16), cap).astype(s.dtype)),
    "gemma capped", [], {"float32_logits"},
  ),
  "scores capped in bfloat16 on their way": (
    lambda m: m.setattr(masks, "_capped", lambda s, cap: masks.soft_cap(s.astype(jnp.bfloat16), cap).astype(s.dtype)),
    "gemma capped", ["float32_logits=false"], {"float32_qk_product"},
  ),
  "gate product never float32": (
    lambda m: m.setattr(Precision, "gate_dtype", property(lambda self: self.dtype)),
    "gemma", ["float32_gate_product=true"], {"float32_gate_product"},
  ),
  "scores rounded on their way": (
    lambda m: m.setattr(
      dot_product, "masked_softmax", lambda s, mask: _softmax(s.astype(jnp.bfloat16).astype(jnp.float32), mask)
    ),
    "gemma", [], {"float32_logits"},
  ),
  "residual in bfloat16": (
    lambda m: m.setattr(block, "_add", jax.named_scope("residual")(lambda x, b: x.astype("bfloat16") + b.astype("bfloat16"))),
    "gemma", ["residual_dtype=float32"], {"residual_dtype"},
  ),
  "router in bfloat16": (
    lambda m: m.setattr(moe.Router, "_logits", lambda self, p, x: self.precision.einsum("...D,DE->...E", x, p["kernel"])),
    "deepseek", [], {"float32_gate_logits"},
  ),
  "indexer rounds its products": (
    lambda m: m.setattr(indexer.jax.nn, "relu", lambda x: jnp.maximum(x.astype(jnp.bfloat16), 0).astype(jnp.float32)),
    "deepseek", [], {"indexer_float32_logits"},
  ),
  "gradients stay float32": (
    lambda m: m.setattr(
      TrainStep, "__call__",
      lambda self, state, batch, check: _call(dataclasses.replace(self, grad_dtype="float32"), state, batch, check),
    ),
    "gemma", ["grad_dtype=bfloat16"], {"grad_dtype"},
  ),
  "no clamp": (
    lambda m: m.setattr(
      mlp, "float16_gated_product", lambda g, u, a, p: _product(g, u, a, dataclasses.replace(p, float16_clamp=False))
    ),
    "gemma", ["dtype=float16"], {"float16_clamp"},
  ),
}  # fmt: skip


SLOW_TO_AUDIT = {"no clamp", "router in bfloat16", "indexer rounds its products"}


@pytest.mark.parametrize("name", tiers(PLANTED, quick=PLANTED.keys() - SLOW_TO_AUDIT, rest="slow"))
def test_a_planted_dishonest_layer_is_found_by_its_key(name, monkeypatch):
  plant, model, words, expected = PLANTED[name]
  plant(monkeypatch)
  assert dishonest(keys_of([*MODELS[model], *words])) == expected


def test_work_that_nobody_asked_for_is_listed(monkeypatch):
  def wide(x, b):
    y = x + b
    return y + jnp.einsum("BTD,DE->BTE", y.astype(jnp.float32), jnp.zeros((y.shape[-1],) * 2)).astype(y.dtype)

  monkeypatch.setattr(block, "_add", jax.named_scope("residual")(wide))
  _, reading, precision = read(MODELS["gemma"])
  found = program_audit.unasked(reading, precision.dtype, audit_keys.asked_float32(precision))
  assert {u.operation for u in found} == {"dot"}
  assert {u.dtypes for u in found} == {"f32 x f32 -> f32"}
  assert all("/residual/" in u.path for u in found)


def instruction(path: str, *operands: str, kind="dot", result="bf16") -> hlo.Instruction:
  return hlo.Instruction(kind=kind, path=f"jit(step)/{path}/{kind}", operands=operands, results=(result,), precision="default")


def test_float64_anywhere_is_listed():
  reading = hlo.Reading(instructions=[instruction("norm", "f64", kind="rsqrt", result="f64")], arguments={})
  (found,) = program_audit.unasked(reading, "float32", ())
  assert (found.operation, found.dtypes, found.places) == ("rsqrt", "f64 -> f64", 1)


def test_an_instruction_belongs_to_the_innermost_name():
  at = {
    "stack_0/layer_1/attention/qk_product": "qk product", "transpose(jvp(attention))/norm": "norms",
    "elsewhere": program_audit.OTHER,
    "moe/experts/down_product": "down product", "moe/shared_experts/mlp": "gate and up", "head/logits": "logits",
  }  # fmt: skip
  for path, site in at.items():
    (row,) = program_audit.rows(hlo.Reading(instructions=[instruction(path, "bf16", "bf16")], arguments={}))
    assert (row.site, row.operands, row.accumulation, row.output) == (site, "bf16 x bf16", "f32", "bf16")


def test_fused_kernels_are_known_by_their_own_names():
  def kernel(path: str, target: str) -> hlo.Instruction:
    return dataclasses.replace(instruction(path, "bf16", "bf16", "bf16", kind="custom_call"), target=target, precision="")

  calls = [
    kernel("jvp()/while/body/closed_call/cudnn_attention", "__cudnn$fmhaSoftmax"),
    kernel("vmap(static_sparsity_splash)/jit(_splash_attention)/splash_mha_fwd_segmented", "tpu_custom_call"),
    kernel("transpose(jvp())/mosaic_flash/while/body/mosaic_flash_scores", "mosaic_gpu_v2"),
    kernel("experts", "tpu_custom_call"),
  ]
  found = [program_audit.fused_kernel(i) for i in calls]
  assert [f and (f[0].name, f[1]) for f in found] == [
    ("cudnn_flash", "__cudnn$fmhaSoftmax"),
    ("splash", "splash_mha_fwd_segmented"),
    ("mosaic_flash", "mosaic_flash_scores"),
    None,
  ]
  rows = program_audit.rows(hlo.Reading(instructions=calls, arguments={}))
  assert {(r.site, r.operation, r.accumulation, r.note) for r in rows} == {
    ("cuDNN attention", "__cudnn$fmhaSoftmax", "f32", registry.kernel("cudnn_flash").guarantee),
    ("splash attention", "splash_mha_fwd_segmented", "f32", registry.kernel("splash").guarantee),
    ("Mosaic attention", "mosaic_flash_scores", "f32", registry.kernel("mosaic_flash").guarantee),
  }


def test_a_place_that_is_missing_is_not_honored():
  """A program without scope names proves nothing."""
  program, reading, precision = read(MODELS["gemma"])
  nameless = [dataclasses.replace(i, path="jit(step)/" + i.path.rpartition("/")[2]) for i in reading.instructions]
  lost = {k.key for k in judged(program, dataclasses.replace(reading, instructions=nameless), precision)
          if k.verdict == "not honored"}  # fmt: skip
  assert lost >= {"dtype", "residual_dtype", "float32_qk_product", "float32_logits", "float32_gate_product"}
  # A compiler may remove the names of a place. Then the program before compilation must show that the key is honored.
  after = judged(program, dataclasses.replace(reading, instructions=nameless), precision, compiled=True)
  whole = audit_keys.together(judged(program, reading, precision), after)
  assert {k.verdict for k in whole if k.key in lost} == {"honored"}
  assert next(k for k in whole if k.key == "dtype").evidence.startswith("before compilation: ")


def test_of_several_arrays_that_are_added_up_together_each_counts():
  program, reading, precision = read(MODELS["gemma"])
  for results, verdict in ((("f32", "f32"), "honored"), (("f32", "bf16", "s32"), "not honored"), (("s32",), "not shown")):
    added = hlo.Instruction(kind="all_reduce", path="", operands=results, results=results, reducer="add")
    # An all-reduce that only gathers, because each device adds its part to zeros, does not count.
    gathered = dataclasses.replace(added, operands=("bf16",), results=("bf16",), placed=(True,))
    keys = judged(program, dataclasses.replace(reading, instructions=[added, gathered]), precision, compiled=True)
    assert next(k for k in keys if k.key == "reduction_dtype").verdict == verdict


def test_an_operand_that_a_compiler_reads_before_it_is_widened_is_no_rounded_one():
  program, reading, precision = read(MODELS["deepseek"])
  for operands, verdict in ((("f32", "bf16"), "honored"), (("bf16", "bf16"), "not honored")):
    router = [
      dataclasses.replace(i, operands=operands) if "router" in i.scopes and i.kind == "dot" else i for i in reading.instructions
    ]
    keys = judged(program, dataclasses.replace(reading, instructions=router), precision, compiled=True)
    assert next(k for k in keys if k.key == "float32_gate_logits").verdict == verdict


def test_a_compiler_may_keep_more_than_was_asked_and_never_less():
  program, reading, _ = read(MODELS["gemma"])
  for flag, verdict in ((False, "honored"), (True, "honored")):
    keys = judged(program, reading, Precision(dtype="bfloat16", float32_qk_product=flag), compiled=True)
    assert next(k for k in keys if k.key == "float32_qk_product").verdict == verdict
  keys = judged(program, reading, Precision(dtype="bfloat16", float32_qk_product=False))
  assert next(k for k in keys if k.key == "float32_qk_product").verdict == "not honored"
  rounded = [dataclasses.replace(i, results=("bf16",)) if "qk_product" in i.scopes else i for i in reading.instructions]
  keys = judged(program, dataclasses.replace(reading, instructions=rounded), Precision(dtype="bfloat16"), compiled=True)
  assert next(k for k in keys if k.key == "float32_qk_product").verdict == "not honored"
