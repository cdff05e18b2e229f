"""Tensors of the towers: all spellings are read, values come back bit for bit, and tensors that do not fit are listed."""

from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from maxtext_like.checkpoint.huggingface.config import read_config
from maxtext_like.checkpoint.huggingface.tensor_file import SafetensorsFile
from maxtext_like.checkpoint.huggingface.tensors import flatten, tensor_table
from maxtext_like.checkpoint.huggingface.weights import Weights
from maxtext_like.checkpoint.huggingface.writer import Source, write
from maxtext_like.config.load import make_section
from maxtext_like.errors import UserError
from maxtext_like.layers.decoder import Decoder
from maxtext_like.layers.precision import Precision
from maxtext_like.models.build import build_decoder
from maxtext_like.models.registry import FAMILIES

GOLDEN = Path(__file__).parents[2] / "golden"
CASES = ["gemma3_vision", "gemma4_vision_large", "gemma4_vision_small"]
NAMES = {np.dtype(np.float32): "F32", np.dtype(jax.numpy.bfloat16): "BF16"}


def decoder_of(directory: Path) -> Decoder:
  config = read_config(directory)
  vision = make_section("vision", config.model | config.vision | {"use_multimodal": True})
  return build_decoder(make_section("model", config.model), Precision(weight_dtype="bfloat16"), vision=vision)


def stored(case: str) -> dict[str, np.ndarray]:
  file = SafetensorsFile(GOLDEN / case / "checkpoint" / "model.safetensors")
  return {name: file.tensor(name) for name in file.entries}


def rewritten(folder: Path, case: str, tensors: dict[str, np.ndarray]) -> Path:
  (folder / "config.json").write_bytes((GOLDEN / case / "checkpoint" / "config.json").read_bytes())
  sources = [Source(name, NAMES[a.dtype], a.shape, lambda a=a: a) for name, a in tensors.items()]
  write(folder, sources, shard_size=10**9)
  return folder


def open_weights(directory: Path) -> Weights:
  return Weights(directory, decoder_of(directory), read_config(directory))


@pytest.mark.parametrize("case", CASES)
def test_every_tensor_reaches_a_parameter_and_comes_back_bit_for_bit(case: str):
  weights, file = open_weights(GOLDEN / case / "checkpoint"), stored(case)
  assert not weights.notes
  leaves = dict(flatten(weights.load()))
  spec = dict(flatten(weights.decoder.params()))
  assert leaves.keys() == spec.keys()
  assert {path: (a.shape, str(a.dtype)) for path, a in leaves.items()} == {k: (p.shape, p.dtype) for k, p in spec.items()}
  towers = [tensor for tensor in weights.table if tensor.vision]
  tower: Any = FAMILIES[case.partition("_")[0]].huggingface.tower
  names = [tower.spellings(tensor.name)[0] for tensor in towers]
  assert set(names) == {name for name in file if "language_model" not in name}
  for name, tensor in zip(names, towers, strict=True):
    back = tensor.from_params(leaves)
    assert back.shape == file[name].shape
    # Bounds and statistics are float32 here and bfloat16 in the file, with equal values.
    np.testing.assert_array_equal(back.astype(np.float32), file[name].astype(np.float32))
    assert back.dtype == (np.float32 if tensor.rule.buffer else file[name].dtype)


SPELLINGS = {
  "as released": {},
  "transformers 5": {"vision_tower.vision_model.": "model.vision_tower.", "multi_modal": "model.multi_modal"},
  "between": {"vision_tower.vision_model.": "model.vision_tower.vision_model.", "multi_modal": "model.multi_modal"},
  "no segment, no model": {"vision_tower.vision_model.": "vision_tower."},
}


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_spellings_of_the_gemma_3_tower(spelling: str, tmp_path: Path):
  tensors = stored("gemma3_vision")
  for old, new in SPELLINGS[spelling].items():
    tensors = {new + name.removeprefix(old) if name.startswith(old) else name: a for name, a in tensors.items()}
  weights = open_weights(rewritten(tmp_path, "gemma3_vision", tensors))
  reference = open_weights(GOLDEN / "gemma3_vision" / "checkpoint").load()
  jax.tree.map(np.testing.assert_array_equal, weights.load(), reference)


def test_float32_statistics_and_bounds_keep_every_bit(tmp_path: Path):
  """Bounds and statistics that bfloat16 cannot represent are not rounded, whatever dtype the weights have."""
  for case in ("gemma4_vision_large", "gemma4_vision_small"):
    folder = tmp_path / case
    folder.mkdir()
    exact = {}
    for name, array in stored(case).items():
      buffer = "std_" in name or name.endswith(("_min", "_max"))
      exact[name] = array.astype(np.float32) * np.float32(1.0000001) if buffer else array
    weights = open_weights(rewritten(folder, case, exact))
    leaves = dict(flatten(weights.load()))
    buffers = [tensor for tensor in weights.table if tensor.rule.buffer and tensor.vision]
    assert len(buffers) in (2, 2 * 4 * 7, 3 * 4 * 7, 4 * 7)
    for tensor in buffers:
      np.testing.assert_array_equal(tensor.from_params(leaves), exact["model." + tensor.name])


def test_what_the_features_do_not_need_is_noted_and_the_rest_is_listed(tmp_path: Path):
  extra = np.zeros(3, np.float32)
  prefix = "vision_tower.vision_model."
  tensors = stored("gemma3_vision") | {f"{prefix}head.probe": extra, f"{prefix}embeddings.position_ids": extra}
  (note,) = open_weights(rewritten(tmp_path, "gemma3_vision", tensors)).notes
  assert note.startswith("2 tensors of the vision tower that its features do not need")
  tensors |= {f"{prefix}encoder.layers.9.layer_norm1.weight": extra}
  del tensors[f"{prefix}post_layernorm.bias"]
  tensors[f"{prefix}post_layernorm.weight"] = extra
  with pytest.raises(UserError) as error:
    open_weights(rewritten(tmp_path, "gemma3_vision", tensors))
  text = str(error.value)
  assert "missing (1)" in text
  assert "unexpected (1):\n    vision_tower.vision_model.encoder.layers.9.layer_norm1.weight" in text
  assert "vision_tower.vision_model.post_layernorm.weight: shape [3], expected [24]" in text


def test_sound_is_noted_beside_the_tower(tmp_path: Path):
  tensors = stored("gemma4_vision_small") | {"model.audio_tower.x": np.zeros(3, np.float32)}
  (note,) = open_weights(rewritten(tmp_path, "gemma4_vision_small", tensors)).notes
  assert "sound" in note


def test_the_table_has_no_vision_without_a_tower():
  config = read_config(GOLDEN / "gemma3_vision" / "checkpoint")
  decoder = build_decoder(make_section("model", config.model), Precision())
  assert not [tensor for tensor in tensor_table(decoder, FAMILIES["gemma3"].huggingface) if tensor.vision]
