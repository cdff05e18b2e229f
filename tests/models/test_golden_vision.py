"""Tests every golden case with images: results equal those of transformers with both forms of pooling, in three dtypes, with
and without scan."""

import functools
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
import pytest

from maxtext_like.api.forward import evaluator, forward, open_weights
from maxtext_like.api.forward_layer import ForwardLayer
from maxtext_like.checkpoint.huggingface.inputs import make_batch
from maxtext_like.checkpoint.huggingface.model_file import load_checkpoint_config
from maxtext_like.errors import UserError
from maxtext_like.layers.attention.rope import RopeConfig, inverse_frequencies
from maxtext_like.layers.param import init
from tests.models.test_golden import GOLDEN, GRADIENT_TOLERANCE, QUICK, TOLERANCE, VARIANTS, Case, rms
from tests.tiers import slow

CASES = {  # case -> the variant to run it with
  "gemma3_vision": "scan, linen",
  "gemma4_vision_large": "loop, nnx",
  "gemma4_vision_small": "scan, linen",
  "stress_fp16_vision": "loop, nnx",
}
TYPES = ("token_type_ids", "mm_token_type_ids")
Outputs = dict[str, np.ndarray]
# The norm of a narrow product amplifies rounding errors in each layer. If embeddings change by one unit in the last place, the
# last hidden state changes by 1.5e-4, and the logits by less than the usual tolerance. The measured difference from
# transformers is 1.2e-4.
HIDDEN = {"gemma4_vision_small": 2e-4}


class VisionCase(Case):
  """A golden case with images."""

  def arrays(self, run: str) -> dict[str, np.ndarray]:
    return {name: array for name, array in self.inputs.items() if not (run == "nommtt" and name in TYPES)}

  def batch(self, run: str = "base") -> dict[str, np.ndarray]:
    _, loaded = load_checkpoint_config(GOLDEN / self.name / "checkpoint", ["use_multimodal=true"])
    return make_batch(self.arrays(run), run, vocab_size=loaded.config.model.vocab_size, vision=loaded.config.vision).batch

  def prepare(self, *overrides: str, gradients: bool = False):
    """Return the compiled model as a function of parameters and a run, and the parameters."""
    directory = GOLDEN / self.name / "checkpoint"
    words = ["use_multimodal=true", *overrides]
    config, loaded = load_checkpoint_config(directory, words, length=self.inputs["input_ids"].shape[1])
    weights = open_weights(directory, config, loaded)
    assert not weights.notes  # every tensor of the file is used
    evaluate = evaluator(weights, loaded.config, gradients=gradients, compiler_options=QUICK)

    def outputs(params: dict, run: str) -> Outputs:
      return evaluate(params, self.batch(run))

    return outputs, weights.load()


@functools.cache
def base(name: str, *overrides: str, gradients: bool = False) -> Outputs:
  outputs, params = VisionCase(name).prepare(*overrides, gradients=gradients)
  return outputs(params, "base")


SLOW = ("gemma4_vision_large", "gemma4_vision_small", "stress_fp16_vision")


@pytest.fixture(
  params=[pytest.param(item, marks=[pytest.mark.slow] * (item[0] in SLOW), id=", ".join(item)) for item in CASES.items()]
)
def computed(request: pytest.FixtureRequest) -> tuple[VisionCase, Outputs]:
  name, variant = request.param
  return VisionCase(name), base(name, "dtype=float32", *VARIANTS[variant], gradients=True)


def test_logits_and_loss(computed: tuple[VisionCase, Outputs]):
  case, got = computed
  np.testing.assert_allclose(got["logits"], case.expected["fp32.base.logits"], rtol=0, atol=TOLERANCE)
  np.testing.assert_allclose(got["loss"], case.expected["fp32.base.loss"], rtol=0, atol=1e-5)


def test_without_token_types_the_masks_are_causal():
  case = VisionCase("gemma4_vision_large")
  assert case.runs == ["base", "nommtt"]
  outputs, params = case.prepare("dtype=float32")
  got = outputs(params, "nommtt")
  for key in ("logits", "loss"):
    np.testing.assert_allclose(got[key], case.expected[f"fp32.nommtt.{key}"], rtol=0, atol=TOLERANCE)
  assert np.abs(got["logits"] - case.expected["fp32.base.logits"]).max() > 0.1


def test_hidden_states_and_the_tower(computed: tuple[VisionCase, Outputs]):
  case, outputs = computed
  names = [key for key in case.expected if key.startswith(("fp32.base.hidden.", "fp32.base.ple.", "fp32.base.vision."))]
  pooled = ["pooled"] if "gemma3" not in case.name else []
  assert {key.rpartition(".")[2] for key in names if "vision" in key} == {"tower_out", "projected", *pooled}
  for key in names:
    got, want = outputs[key.removeprefix("fp32.base.")], case.expected[key]
    assert got.shape == want.shape
    # Pooled features of the stress case reach 1e5.
    atol = max(TOLERANCE, 1e-6 * np.abs(want).max()) if ".vision." in key else HIDDEN.get(case.name, TOLERANCE)
    np.testing.assert_allclose(got, want, rtol=0, atol=atol, err_msg=key)


def test_gradients(computed: tuple[VisionCase, Outputs]):
  case, outputs = computed
  names = [key for key in case.expected if key.startswith("fp32.base.grad.")]
  assert sum("vision_tower" in name or "projector" in name or "embed_vision" in name for name in names) >= 6
  for key in names:
    got, want = outputs[key.removeprefix("fp32.base.")], case.expected[key]
    np.testing.assert_allclose(got, want, rtol=0, atol=GRADIENT_TOLERANCE * np.abs(want).max(), err_msg=key)
  norm = case.expected["fp32.base.grad_global_norm"]
  np.testing.assert_allclose(outputs["grad_global_norm"], norm, rtol=GRADIENT_TOLERANCE)


LOW = [slow(name, "bf16", "true") for name in CASES]
LOW += [slow(name, "fp16", "true") if name.startswith("gemma") else (name, "fp16", "true") for name in CASES]
LOW += [slow(name, "fp16", "false") for name in ("gemma4_vision_large", "gemma4_vision_small")]
LOW += [("stress_fp16_vision", "fp16", "false")]


def low(name: str, dtype: str, pool: str) -> Outputs:
  long = {"bf16": "bfloat16", "fp16": "float16"}[dtype]
  words = (f"dtype={long}", f"weight_dtype={long}")
  return base(name, *words, *([] if name == "gemma3_vision" else [f"float32_vision_pool={pool}"]))


@pytest.mark.parametrize(("name", "dtype", "pool"), LOW)
def test_low_precision_is_no_worse_than_transformers(name: str, dtype: str, pool: str):
  """Check rms(ours - float32) <= 1.5 * rms(transformers' - float32), with either form of the pooler."""
  case, outputs = VisionCase(name), low(name, dtype, pool)
  exact, theirs = case.expected["fp32.base.logits"], case.expected[f"{dtype}.base.logits"]
  assert all(np.isfinite(value).all() for value in outputs.values())
  assert rms(outputs["logits"] - exact) <= 1.5 * rms(theirs - exact)


def larger(params: dict, factor: float) -> dict:
  """Multiply the features of the tower by ``factor``, and adapt the statistics that normalize them, so that later results do
  not change."""
  vision = params["vision"] | {"std_bias": params["vision"]["std_bias"] * factor}
  vision["std_scale"] = params["vision"]["std_scale"] / factor
  # Scale everything that is added to the residual stream of the tower.
  vision["patch"], vision["positions"] = vision["patch"] * factor, vision["positions"] * factor
  norms = ("post_attention_norm", "post_mlp_norm")
  vision["layers"] = vision["layers"] | {n: jax.tree.map(lambda x: x * factor, vision["layers"][n]) for n in norms}
  return params | {"vision": vision}


@pytest.mark.slow  # the quick test is test_low_precision_is_no_worse_than_transformers with stress_fp16_vision
@pytest.mark.parametrize("pool", ["true", "false"])
def test_high_activations_are_finite_in_float16_forward_and_backward(pool: str):
  """After the multiplication by sqrt(D), pooled features reach 1e5 (the golden values), 4e5 and 3e7. The largest float16 number
  is 65504."""
  case = VisionCase("stress_fp16_vision")
  run, params = case.prepare("dtype=float16", f"float32_vision_pool={pool}", gradients=True)
  for factor in (1.0, 4.0, 256.0):
    outputs = run(larger(params, factor), "base")
    assert np.abs(outputs["vision.pooled"]).max() > 65504 * factor
    for name, value in outputs.items():
      assert np.isfinite(value).all(), name
    # With the largest factor, the folded form clips the pooled features, because float16 cannot represent them.
    if pool == "true" or factor < 10:
      np.testing.assert_allclose(outputs["logits"], case.expected["fp32.base.logits"], rtol=0, atol=0.15)


@pytest.mark.slow
def test_in_float32_both_values_of_the_key_are_one_program():
  """float32 needs no folding, so the programs are equal, including gradients. In float16 they differ."""
  case = VisionCase("stress_fp16_vision")
  batch = {name: jax.numpy.asarray(array) for name, array in case.batch().items()}

  def program(dtype: str, pool: str) -> str:
    directory = GOLDEN / case.name / "checkpoint"
    words = ["use_multimodal=true", f"dtype={dtype}", f"float32_vision_pool={pool}"]
    decoder = open_weights(directory, *load_checkpoint_config(directory, words)).decoder
    params = init(decoder.params(), jax.random.key(0))
    return jax.jit(jax.value_and_grad(ForwardLayer(decoder), has_aux=True)).lower(params, batch).as_text()

  assert program("float32", "true") == program("float32", "false")
  assert program("float16", "true") != program("float16", "false")


@pytest.mark.parametrize("name", ["gemma4_vision_large", "gemma4_vision_small", "stress_fp16_vision"])
@pytest.mark.slow
def test_both_forms_agree_in_16_bits(name: str):
  """The forms are not equal to the bit, because the folded form rounds features and statistics to 16 bits before it uses
  them."""
  on, off = (low(name, "fp16", pool)["vision.projected"] for pool in ("true", "false"))
  assert (on != off).any()
  assert rms(on - off) < 0.01 * rms(on)


@pytest.mark.slow  # tests/layers and test_golden.py compare the module wrappers too
def test_both_faces_give_bitwise_the_same():
  linen, nnx = (base("gemma4_vision_small", f"module_api={api}") for api in ("linen", "nnx"))
  for key in linen:
    np.testing.assert_array_equal(linen[key], nnx[key], err_msg=key)


@pytest.mark.parametrize("name", list(CASES)[1:])
def test_rotary_table_of_the_tower(name: str):
  _, loaded = load_checkpoint_config(GOLDEN / name / "checkpoint")
  vision: Any = loaded.config.vision
  got = inverse_frequencies(RopeConfig(dim=vision.head_dim // 2, theta=vision.rope_theta_for_vit))
  np.testing.assert_array_max_ulp(got, VisionCase(name).expected["fp32.base.rope.vision_inv_freq"], maxulp=1)


@pytest.mark.slow
def test_forward_reads_the_tower_where_there_are_images_for_it(tmp_path):
  case = VisionCase("stress_fp16_vision")
  path = tmp_path / "in.npz"
  np.savez(path, allow_pickle=False, **case.arrays("base"))
  found = forward(GOLDEN / case.name / "checkpoint", path, "dtype=float32")
  assert not found.notes
  np.testing.assert_allclose(found.arrays["logits"], case.expected["fp32.base.logits"], rtol=0, atol=TOLERANCE)
  text = {"input_ids": np.arange(3, 20)[None]}
  np.savez(path, allow_pickle=False, **text)
  found = forward(GOLDEN / case.name / "checkpoint", path, "dtype=float32")
  assert [note for note in found.notes if "vision" in note]
  assert not any(name.startswith("vision.") for name in found.arrays)


def without(arrays: Mapping[str, np.ndarray], *names: str) -> dict[str, np.ndarray]:
  return {name: array for name, array in arrays.items() if name not in names}


FAULTS = {
  "no vision tower .use_multimodal is false": ("gemma3_vision", {}, ["use_multimodal=false"]),
  "image_position_ids without pixel_values": ("gemma4_vision_large", {"pixel_values": None}, []),
  "marks image tokens, but pixel_values is missing": ("gemma3_vision", {"pixel_values": None}, []),
  "image_position_ids: .*Gemma 3": ("gemma3_vision", {"image_position_ids": np.zeros((3, 4, 2), int)}, []),
  "pixel_values without image_position_ids": ("gemma4_vision_large", {"image_position_ids": None}, []),
  r"shape \[3, 3, 42, 41\], expected \[images, 3, 42, 42\]": ("gemma3_vision", {"pixel_values": np.zeros((3, 3, 42, 41))}, []),
  r"expected \[images, patches, 48\]": ("gemma4_vision_large", {"pixel_values": np.zeros((3, 24, 47))}, []),
  "dtype uint8, expected floating point": ("gemma3_vision", {"pixel_values": np.zeros((3, 3, 42, 42), np.uint8)}, []),
  "pixel_values: not finite": ("gemma3_vision", {"pixel_values": np.full((3, 3, 42, 42), np.nan)}, []),
  "has 27 image tokens .id 122., but pixel_values gives 18": ("gemma3_vision", {"pixel_values": np.zeros((2, 3, 42, 42))}, []),
  "image_position_ids: out of range": ("gemma4_vision_large", {"image_position_ids": np.full((3, 24, 2), 24)}, []),
  r"image_position_ids: .*expected integers \[3, 24, 2\]": (
    "gemma4_vision_large",
    {"image_position_ids": np.zeros((3, 24), int)},
    [],
  ),
  "token_type_ids: out of range": ("gemma3_vision", {"token_type_ids": np.full((2, 34), 4)}, []),
  "both token_type_ids and mm_token_type_ids": ("gemma3_vision", {"mm_token_type_ids": np.zeros((2, 34), int)}, []),
}


@pytest.mark.parametrize("reason", FAULTS)
def test_images_that_do_not_fit_are_named(reason: str, tmp_path):
  name, changes, words = FAULTS[reason]
  arrays = VisionCase(name).inputs | changes
  np.savez(tmp_path / "in.npz", allow_pickle=False, **{key: array for key, array in arrays.items() if array is not None})
  with pytest.raises(UserError, match=f"in.npz: .*{reason}"):
    forward(GOLDEN / name / "checkpoint", tmp_path / "in.npz", *words)


def test_images_for_a_text_model(tmp_path):
  case = VisionCase("gemma3_vision")
  np.savez(tmp_path / "in.npz", allow_pickle=False, **without(case.inputs, "token_type_ids"))
  with pytest.raises(UserError, match=r"its config\.json has no vision_config"):
    forward(GOLDEN / "gemma3_text" / "checkpoint", tmp_path / "in.npz")
