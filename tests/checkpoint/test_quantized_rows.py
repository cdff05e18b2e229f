"""Weights that are quantized while they are read: equal to the quantized complete weights, one layer at a time, and float8
codes as stored in the file."""

import functools
import shutil
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from maxtext_like.checkpoint import quantized_rows
from maxtext_like.checkpoint.adapters.adapted_weights import with_base
from maxtext_like.checkpoint.huggingface import device_fill
from maxtext_like.checkpoint.huggingface.config import read_config
from maxtext_like.checkpoint.huggingface.model_file import load_checkpoint_config
from maxtext_like.checkpoint.huggingface.tensor_file import SafetensorsFile
from maxtext_like.checkpoint.huggingface.weights import Weights
from maxtext_like.checkpoint.huggingface.writer import Source, write
from maxtext_like.checkpoint.read_weights import read_weights
from maxtext_like.checkpoint.store.fingerprint import fingerprint
from maxtext_like.layers.quantization.quantized import CODES, FORMS
from maxtext_like.models.model import Model, make_model

GOLDEN = Path(__file__).parents[1] / "golden"


def model_of(directory: Path, form: str, *words: str) -> Model:
  _, loaded = load_checkpoint_config(
    directory, ["lora_rank=1", f"base_weights={form}", "weight_dtype=bfloat16", *words], length=8
  )
  return with_base(make_model(loaded.config, runs_attention=False), loaded.config.adapter)


def in_float8(tmp_path: Path) -> Path:
  """Write DeepSeek's golden checkpoint with float8 matrices in its layers: with blocks of 128, and one with a single scale."""
  source, rng = GOLDEN / "deepseek3/checkpoint", np.random.default_rng(0)
  file, sources = SafetensorsFile(source / "model.safetensors"), []
  for name in file.entries:
    x = np.array(file.tensor(name))
    if x.ndim == 2 and ".layers." in name and "mlp.gate.weight" not in name:
      codes = rng.choice(np.arange(-448, 449, 32), x.shape).astype(jnp.float8_e4m3fn)
      whole = name.endswith("layers.0.self_attn.o_proj.weight")
      grid = () if whole else tuple(-(-n // 128) for n in x.shape)
      scale = rng.uniform(1e-5, 1e-4, grid).astype(np.float32)
      sources.append(Source(name, "F8_E4M3", x.shape, lambda codes=codes: codes))
      sources.append(Source(name + ("_scale" if whole else "_scale_inv"), "F32", grid, lambda scale=scale: np.asarray(scale)))
    else:
      sources.append(Source(name, {"float32": "F32", "bfloat16": "BF16"}[x.dtype.name], x.shape, lambda x=x: x))
  write(tmp_path, sources, shard_size=10**9)
  shutil.copy(source / "config.json", tmp_path)
  return tmp_path


@pytest.mark.parametrize(("case", "form"), [("gemma4_moe", "int8"), ("deepseek3", "nf4")])
@pytest.mark.slow
def test_it_is_what_quantizing_the_whole_gives(case: str, form: Any):
  directory = GOLDEN / case / "checkpoint"
  model = model_of(directory, form)
  assert model.base is not None
  stored: Any = read_weights(directory, model)
  plain: Any = Weights(directory, make_model(model.config, runs_attention=False).decoder, read_config(directory)).load()
  found = 0
  for path, p in model.base.weights.items():
    own, whole = (functools.reduce(lambda node, key: node[key], path, tree) for tree in (stored, plain))
    make = functools.partial(quantized_rows.quantize, FORMS[form], p)
    expected = jax.jit(make)(whole) if p.rows is None else jax.jit(functools.partial(jax.lax.map, make))(whole)
    jax.tree.map(np.testing.assert_array_equal, own, expected)
    found += 1
  assert found >= 10
  np.testing.assert_array_equal(stored["embedding"]["table"], plain["embedding"]["table"])
  assert {path[-1] for path in model.base.weights} >= {"q" if case != "deepseek3" else "kv_b", "o", "gate", "up", "down"}
  assert not any("router" in path or "norm" in path[-1] for path in model.base.weights)


@pytest.mark.slow
def test_float8_is_taken_over_as_the_file_has_it(tmp_path: Path):
  """No number is rounded again: codes and scales equal the file's, and the dequantized weights equal those of a plain load."""
  directory = in_float8(tmp_path)
  model = model_of(directory, "fp8_block")
  assert model.base is not None
  stored: Any = read_weights(directory, model)
  file = SafetensorsFile(directory / "model.safetensors")
  name = "model.layers.1.mlp.experts.2.down_proj.weight"
  path = next(path for path in model.base.weights if path[-2:] == ("experts", "down"))
  own = functools.reduce(lambda node, key: node[key], path, stored)
  np.testing.assert_array_equal(np.asarray(own[CODES][0, 2]).astype(np.float32), file.tensor(name).astype(np.float32).T)
  np.testing.assert_array_equal(own["scales"][0, 2], file.tensor(name + "_scale_inv").T)
  decoder = make_model(
    load_checkpoint_config(directory, ["weight_dtype=float32"], length=8)[1].config, runs_attention=False
  ).decoder
  plain: Any = Weights(directory, decoder, read_config(directory)).load()
  whole = model.base.whole(stored)
  for path in model.base.weights:
    ours, theirs = (functools.reduce(lambda node, key: node[key], path, tree) for tree in (whole, plain))
    np.testing.assert_array_equal(ours, theirs.astype(jnp.bfloat16))


@pytest.mark.slow
def test_one_layer_at_a_time_is_whole(monkeypatch: pytest.MonkeyPatch):
  """Whenever a layer is complete, the arrays of 16 bits and more on devices are counted. Only one complete layer may exist in
  addition to the chunks."""
  directory = GOLDEN / "gemma4_moe/checkpoint"
  model = model_of(directory, "nf4")
  assert model.base is not None
  weights = model.base.weights
  layer = max(int(np.prod(p.shape[1:])) for p in weights.values())
  monkeypatch.setattr(device_fill, "_CHUNK_BYTES", 1000)
  monkeypatch.setattr(device_fill, "_THREADS", 2)
  layers, held = [], []
  put = quantized_rows.QuantizedRows.put

  def counted(self, row, found):
    layers.append(found.size)
    held.append(sum(x.size for x in jax.live_arrays() if x.dtype.itemsize > 1) - before)
    put(self, row, found)

  monkeypatch.setattr(quantized_rows.QuantizedRows, "put", counted)
  before = sum(x.size for x in jax.live_arrays() if x.dtype.itemsize > 1)
  stored: Any = read_weights(directory, model)
  rest = sum(x.size for x in jax.tree.leaves(stored) if x.dtype.itemsize > 1)  # norms, tables, and scales of scales
  assert len(layers) == sum(p.rows or 1 for p in weights.values()) >= 20
  assert max(layers) == layer
  assert max(held) <= rest + 3 * layer < sum(layers) / 2  # the layer, its chunks, and chunks that are read ahead


@pytest.mark.slow
def test_a_step_of_ours_is_read_layer_by_layer_to_the_same(tmp_path: Path):
  import maxtext_like

  directory = GOLDEN / "gemma3_text/checkpoint"
  maxtext_like.import_checkpoint(directory, tmp_path / "ours", weight_dtype="bfloat16")
  model = model_of(directory, "nf4")
  assert fingerprint(read_weights(tmp_path / "ours", model)) == fingerprint(read_weights(directory, model))
