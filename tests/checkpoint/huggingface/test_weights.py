"""Tensors of every golden checkpoint reach their parameters and come back; tensors that do not fit are listed by name."""

import json
import shutil
import tracemalloc
from pathlib import Path
from typing import Any

import jax
import ml_dtypes
import numpy as np
import pytest

from maxtext_like.checkpoint.huggingface import device_fill
from maxtext_like.checkpoint.huggingface import weights as weights_module
from maxtext_like.checkpoint.huggingface.config import HuggingFaceConfig, read_config
from maxtext_like.checkpoint.huggingface.export import export_hugging_face
from maxtext_like.checkpoint.huggingface.tensor_file import SafetensorsFile
from maxtext_like.checkpoint.huggingface.tensors import flatten, tensor_table
from maxtext_like.checkpoint.huggingface.weights import Weights, load_hugging_face
from maxtext_like.checkpoint.huggingface.writer import Source, write
from maxtext_like.checkpoint.store.finite import all_finite, described
from maxtext_like.config.load import load_config, make_section
from maxtext_like.errors import UserError
from maxtext_like.layers.decoder import Decoder
from maxtext_like.layers.param import abstract, shardings
from maxtext_like.layers.precision import Precision
from maxtext_like.models.build import build_decoder
from maxtext_like.models.registry import FAMILIES

GOLDEN = Path(__file__).parents[2] / "golden"
CASES = sorted(path.parent.name for path in GOLDEN.glob("*/checkpoint"))


def checkpoint(case: str) -> Path:
  return GOLDEN / case / "checkpoint"


def decoder_of(config: HuggingFaceConfig, **precision: Any) -> Decoder:
  return build_decoder(make_section("model", config.model), Precision(**precision))


def load(directory: Path, **precision: Any) -> tuple[Decoder, Weights, dict]:
  config = read_config(directory)
  decoder = decoder_of(config, **precision)
  weights = Weights(directory, decoder, config)
  return decoder, weights, weights.load()


def assert_same(a: dict, b: dict) -> None:
  jax.tree.map(np.testing.assert_array_equal, jax.device_get(a), jax.device_get(b))


@pytest.mark.parametrize("case", CASES)
def test_every_tensor_reaches_a_parameter_and_comes_back_bit_for_bit(case: str):
  decoder, weights, params = load(checkpoint(case), weight_dtype="bfloat16")
  declared = jax.tree.map(lambda p: (p.shape, p.dtype), decoder.params())
  assert jax.tree.map(lambda a: (a.shape, str(a.dtype)), params) == declared
  leaves = dict(flatten(params))
  file = SafetensorsFile(checkpoint(case) / "model.safetensors")
  used = set()
  for tensor in weights.table:
    name = weights._file_name[tensor.name]
    used.add(name)
    stored = file.tensor(name)
    assert tensor.from_params(leaves).astype(stored.dtype).tobytes() == stored.tobytes(), name
  unused = [name for name in file.entries if name not in used]
  assert all("vision" in name or name.startswith("multi_modal_projector") for name in unused)
  assert bool(unused) == ("vision" in case) == bool(weights.notes)


def test_transforms_put_every_axis_where_it_belongs():
  """Elements are compared with indices that were written by hand. All sizes differ, so an exchanged axis is noticed."""
  config = read_config(checkpoint("gemma4_dense"))
  params = load_hugging_face(checkpoint("gemma4_dense"), decoder_of(config, weight_dtype="float32"))
  file = SafetensorsFile(checkpoint("gemma4_dense") / "model.safetensors")
  q = file.tensor("model.layers.5.self_attn.q_proj.weight").astype(np.float32)  # layer 5 is row 1 of layer_2, global
  np.testing.assert_array_equal(params["stack_0"]["layer_2"]["attention"]["q"][1, 7, 3, 11], q[3 * 16 + 11, 7])
  o = file.tensor("model.layers.3.self_attn.o_proj.weight").astype(np.float32)
  np.testing.assert_array_equal(params["stack_0"]["layer_0"]["attention"]["o"][1, 2, 5, 40], o[40, 2 * 8 + 5])
  np.testing.assert_array_equal(
    params["stack_0"]["layer_1"]["layer_scalar"],
    [file.tensor(f"model.layers.{i}.layer_scalar")[0] for i in (1, 4)],
  )


def test_deepseek_experts_one_by_one_and_stacked_give_the_same(tmp_path: Path):
  decoder, weights, params = load(checkpoint("deepseek3"), weight_dtype="bfloat16")
  leaves = dict(flatten(params))
  stacked = tensor_table(decoder, FAMILIES["deepseek"].huggingface, stacked=True)
  shutil.copy(checkpoint("deepseek3") / "config.json", tmp_path)
  values = {t.name if t.name.startswith("lm_head") else f"model.{t.name}": t.from_params(leaves) for t in stacked}
  dtypes = {np.dtype(np.float32): "F32", np.dtype(ml_dtypes.bfloat16): "BF16"}
  write(tmp_path, [Source(n, dtypes[v.dtype], v.shape, lambda v=v: v) for n, v in values.items()], shard_size=40_000)
  assert values["model.layers.2.mlp.experts.gate_up_proj"].shape == (12, 32, 40)
  assert len(list(tmp_path.glob("*.safetensors"))) > 3
  again = load_hugging_face(tmp_path, decoder)
  assert_same(params, again)
  gate = SafetensorsFile(checkpoint("deepseek3") / "model.safetensors").tensor("model.layers.2.mlp.experts.7.up_proj.weight")
  np.testing.assert_array_equal(values["model.layers.2.mlp.experts.gate_up_proj"][7, 16:], gate)
  assert {t.name for t in weights.table if t.rule.buffer} == {f"layers.{i}.mlp.gate.e_score_correction_bias" for i in (1, 2, 3)}


@pytest.mark.parametrize("case", ["gemma3_text", "deepseek32"])
def test_sharded_load_equals_the_plain_one(case: str):
  config = read_config(checkpoint(case))
  decoder = decoder_of(config, weight_dtype="float32")
  mesh = jax.make_mesh((1, 1), ("data", "fsdp"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
  wanted = shardings(decoder.params(), mesh)
  sharded, plain = load_hugging_face(checkpoint(case), decoder, shardings=wanted), load_hugging_face(checkpoint(case), decoder)
  assert jax.tree.map(lambda a: a.sharding, sharded) == wanted
  assert_same(sharded, plain)


def test_a_part_of_a_parameter_reads_only_its_tensors(monkeypatch: pytest.MonkeyPatch):
  config = read_config(checkpoint("deepseek3"))
  weights = Weights(checkpoint("deepseek3"), decoder_of(config), config)
  read: list[str] = []
  original = weights.shards.weight
  monkeypatch.setattr(weights.shards, "weight", lambda name: read.append(name) or original(name))
  path = ("stack_1", "layer_0", "moe", "experts", "down")
  part = weights.values(path, (slice(1, 2), slice(4, 6), slice(3, 9), slice(None)), np.dtype(np.float32))
  assert read == [f"model.layers.2.mlp.experts.{e}.down_proj.weight" for e in (4, 5)]
  assert part.shape == (1, 2, 6, 40)
  np.testing.assert_array_equal(part[0, 1], original(read[1]).astype(np.float32).T[3:9])


@pytest.mark.parametrize("case", ["deepseek3", "gemma4_moe", "gemma4_e2b"])
def test_a_part_of_a_parameter_is_that_of_the_whole(case: str):
  """Rows of stacks, and experts with separate tensors, are indexed by number. All other axes take any slice."""
  _, weights, params = load(checkpoint(case), weight_dtype="float32")
  for path, whole in flatten(params):
    by_number = 0 if not path[0].startswith("stack") else 2 if case == "deepseek3" and "experts" in path else 1
    index = (*(size - 1 for size in whole.shape[:by_number]), *(slice(size // 3, size) for size in whole.shape[by_number:]))
    part = weights.part(path, index)
    assert part.dtype == np.float32
    np.testing.assert_array_equal(part, np.asarray(whole)[index], err_msg=".".join(path))


def rewritten(tmp_path: Path, case: str, change: Any) -> Path:
  """Write a copy of a golden checkpoint whose tensors, {name: array}, ``change`` may edit."""
  file = SafetensorsFile(checkpoint(case) / "model.safetensors")
  arrays = {name: np.array(file.tensor(name)) for name in file.entries}
  arrays = change(arrays) or arrays
  dtypes = {"float32": "F32", "bfloat16": "BF16", "float16": "F16", "int32": "I32", "float8_e4m3fn": "F8_E4M3"}
  sources = [Source(name, dtypes[a.dtype.name], a.shape, lambda a=a: a) for name, a in arrays.items()]
  write(tmp_path, sources, shard_size=10**9)
  shutil.copy(checkpoint(case) / "config.json", tmp_path)
  return tmp_path


def renamed(old: str, new: str) -> Any:
  return lambda arrays: {new + name.removeprefix(old) if name.startswith(old) else name: a for name, a in arrays.items()}


@pytest.mark.parametrize(
  ("case", "old", "new"),
  [
    ("gemma3_vision", "language_model.model.", "model.language_model."),
    ("gemma3_vision", "language_model.model.", "model."),
    ("gemma4_moe", "model.language_model.", "model."),
    ("gemma4_dense", "model.", "model.language_model."),
    ("gemma3_text", "model.", ""),
  ],
)
def test_every_spelling_of_the_prefix(tmp_path: Path, case: str, old: str, new: str):
  _, _, params = load(rewritten(tmp_path, case, renamed(old, new)))
  _, _, expected = load(checkpoint(case))
  assert_same(params, expected)


def failure(directory: Path) -> str:
  with pytest.raises(UserError) as error:
    load(directory)
  assert str(directory) in str(error.value)
  return str(error.value)


def test_all_that_does_not_fit_is_listed_at_once(tmp_path: Path):
  def change(arrays: dict[str, np.ndarray]) -> None:
    del arrays["model.layers.3.mlp.up_proj.weight"]
    arrays["model.layers.2.mlp.up_proj.weight"] = arrays["model.layers.2.mlp.up_proj.weight"].T.copy()
    arrays["model.layers.1.extra\x1b[2J.weight"] = arrays["model.norm.weight"]
    arrays["model.norm.weight"] = np.zeros(48, np.int32)

  message = failure(rewritten(tmp_path, "gemma3_text", change))
  assert "missing (1):\n    model.layers.3.mlp.up_proj.weight" in message
  assert "unexpected (1):\n    model.layers.1.extra\\x1b[2J.weight" in message
  assert "model.layers.2.mlp.up_proj.weight: shape [48, 56], expected [56, 48]" in message
  assert "model.norm.weight: dtype I32 is not supported" in message


def test_no_embedding_and_two_embeddings(tmp_path: Path):
  def change(arrays: dict[str, np.ndarray]) -> None:
    arrays["embed_tokens.weight"] = arrays["model.embed_tokens.weight"]

  assert "'model.embed_tokens.weight' and 'embed_tokens.weight' can be" in failure(rewritten(tmp_path, "gemma3_text", change))
  directory = rewritten(tmp_path, "gemma3_text", lambda arrays: arrays.pop("model.embed_tokens.weight") is None)
  assert "no tensor can be the token embedding" in failure(directory)


def test_tensors_of_a_tower_are_unexpected_in_a_text_only_model(tmp_path: Path):
  def change(arrays: dict[str, np.ndarray]) -> None:
    arrays["model.vision_tower.x"] = np.zeros(3, np.float32)

  assert "model.vision_tower.x" in failure(rewritten(tmp_path, "gemma3_text", change))


def test_what_is_known_and_not_used_is_noted(tmp_path: Path):
  def deepseek(arrays: dict[str, np.ndarray]) -> None:
    arrays["model.layers.61.eh_proj.weight"] = arrays["model.layers.61.enorm.weight"] = np.zeros((2, 3), np.float32)

  def gemma(arrays: dict[str, np.ndarray]) -> None:
    arrays["lm_head.weight"] = arrays["model.language_model.embed_tokens.weight"]
    arrays["model.language_model.layers.6.self_attn.k_proj.weight"] = np.zeros((8, 40), np.float32)

  (tmp_path / "a").mkdir()
  (tmp_path / "b").mkdir()
  _, weights, _ = load(rewritten(tmp_path / "a", "deepseek3", deepseek))
  assert weights.notes == ["2 tensors of layer 61, the multi-token prediction module, are not used"]
  _, weights, _ = load(rewritten(tmp_path / "b", "gemma4_e2b", gemma))
  assert len(weights.notes) == 2
  assert any("tie_word_embeddings" in note for note in weights.notes)
  assert any("key and value tensors" in note for note in weights.notes)


def test_other_layers_beyond_the_model_are_unexpected(tmp_path: Path):
  def change(arrays: dict[str, np.ndarray]) -> None:
    arrays["model.layers.5.self_attn.o_proj.weight"] = np.zeros((2, 3), np.float32)

  assert "model.layers.5.self_attn.o_proj.weight" in failure(rewritten(tmp_path, "deepseek3", change))


def test_float8_checkpoint_loads_and_a_missing_scale_does_not(tmp_path: Path):
  """All matrices of attention and experts are float8 with block scales, as in DeepSeek's releases."""
  whole: dict[str, np.ndarray] = {}

  def change(arrays: dict[str, np.ndarray]) -> None:
    for name in [n for n in arrays if n.endswith("proj.weight") and ("self_attn" in n or "experts" in n)]:
      scale = np.full((1, 1), 0.03125, np.float32)
      arrays[name] = (arrays[name].astype(np.float32) / scale).astype(ml_dtypes.float8_e4m3fn)
      arrays[name + "_scale_inv"] = scale
      whole[name] = arrays[name].astype(np.float32) * scale

  directory = rewritten(tmp_path, "deepseek3", change)
  _, weights, params = load(directory, weight_dtype="float32")
  o = whole["model.layers.0.self_attn.o_proj.weight"]
  np.testing.assert_array_equal(params["stack_0"]["layer_0"]["attention"]["o"][0], o.T.reshape(3, 12, 40))
  down = whole["model.layers.3.mlp.experts.11.down_proj.weight"]
  np.testing.assert_array_equal(params["stack_1"]["layer_0"]["moe"]["experts"]["down"][2, 11], down.T)

  path = ("stack_1", "layer_0", "moe", "experts", "down")
  for columns in (slice(0, 7), slice(7, None)):
    part = weights.part(path, (2, 11, slice(None), columns))
    np.testing.assert_array_equal(part, np.asarray(params["stack_1"]["layer_0"]["moe"]["experts"]["down"])[2, 11, :, columns])

  def without(arrays: dict[str, np.ndarray]) -> None:
    change(arrays)
    del arrays["model.layers.0.self_attn.o_proj.weight_scale_inv"]

  assert "model.layers.0.self_attn.o_proj.weight' is F8_E4M3 but has no" in failure(rewritten(tmp_path, "deepseek3", without))


def test_numbers_beyond_float16_are_refused_not_turned_into_inf(tmp_path: Path):
  def change(arrays: dict[str, np.ndarray]) -> None:
    arrays["model.norm.weight"] = np.full(48, 7e4, np.float32)

  directory = rewritten(tmp_path, "gemma3_text", change)
  load(directory, weight_dtype="bfloat16")
  with pytest.raises(UserError, match=r"model\.norm\.weight: contains numbers beyond 65504"):
    load(directory, weight_dtype="float16")


def test_config_of_another_size_is_refused(tmp_path: Path):
  directory = rewritten(tmp_path, "gemma3_text", lambda arrays: None)
  config = json.loads((directory / "config.json").read_text())
  (directory / "config.json").write_text(json.dumps(config | {"hidden_size": 54}))
  message = failure(directory)
  assert "model.embed_tokens.weight: shape [160, 48], expected [160, 54]" in message
  assert "and " in message
  assert " more" in message


@pytest.mark.parametrize("weight_dtype", ["bfloat16", "float32"])
def test_memory_beyond_the_arrays_is_bounded_by_the_largest_one(
  weight_dtype: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
  """numpy allocates at most 1.5 times the size of the largest array, with and without a cast. tracemalloc does not see the
  memory of JAX's arrays."""
  monkeypatch.setattr(weights_module, "_CHUNK_BYTES", 1 << 20)
  monkeypatch.setattr(device_fill, "_CHUNK_BYTES", 1 << 20)
  model = load_config("gemma4-moe-tiny", ["vocab_size=30000"]).config.model
  decoder = build_decoder(model, Precision(weight_dtype=weight_dtype))
  params = jax.tree.map(lambda x: np.full(x.shape, 0.5, x.dtype), abstract(decoder.params()))
  largest = max(x.nbytes for x in jax.tree.leaves(params))
  assert largest > 7e6
  export_hugging_face(tmp_path / "hf", params, decoder, model, shard_size=10**6)
  del params
  tracemalloc.start()
  try:
    loaded = jax.block_until_ready(load_hugging_face(tmp_path / "hf", decoder))
    _, peak = tracemalloc.get_traced_memory()
  finally:
    tracemalloc.stop()
  assert loaded["embedding"]["table"].nbytes == largest
  assert peak <= 1.5 * largest


@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16", "float16", "float8_e4m3fn", "float8_e5m2"])
def test_finite_is_read_off_the_bits(dtype: str):
  """All numbers of the formats with 8 and 16 bits; zeros, the limits, infinity and NaN of the wider formats."""
  kind = np.dtype(dtype)
  if kind.itemsize < 4:
    numbers = np.arange(2 ** (8 * kind.itemsize)).astype(f"u{kind.itemsize}").view(kind)
  else:
    info = np.finfo(kind)
    numbers = np.array([0, -0.0, info.max, -info.max, info.tiny, np.inf, -np.inf, np.nan, -np.nan], kind)
  with np.errstate(invalid="ignore"):
    good = np.isfinite(numbers.astype(np.float64))
  assert all_finite(numbers[good])
  assert all_finite(np.zeros((0, 3), kind))
  assert not any(all_finite(numbers[~good][i : i + 1]) for i in range(0, int((~good).sum()), 7))
  numbers = np.concatenate([numbers[good][:5], numbers[~good][-1:]]).reshape(2, 3)
  assert not all_finite(numbers)
  assert described(numbers).endswith("1 NaN of 6 numbers, the first at [1, 2]")
