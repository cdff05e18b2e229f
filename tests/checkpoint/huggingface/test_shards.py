"""Checkpoint directories: index and shards that disagree or point outside of it, pickles, float8 scales, and writing."""

import json
import os
import pickle
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from maxtext_like.checkpoint.huggingface.shards import INDEX, Shards
from maxtext_like.checkpoint.huggingface.writer import Source, parse_size, plan, write
from maxtext_like.errors import UserError

E4M3 = ml_dtypes.float8_e4m3fn


def source(name: str, values: np.ndarray, dtype: str | None = None) -> Source:
  known = {"float32": "F32", "bfloat16": "BF16", "float8_e4m3fn": "F8_E4M3", "int8": "I8"}
  return Source(name, dtype or known[values.dtype.name], values.shape, lambda: values)


def save(directory: Path, **arrays: np.ndarray) -> Path:
  directory.mkdir(parents=True, exist_ok=True)
  write(directory, [source(name, values) for name, values in arrays.items()], shard_size=10**9)
  return directory


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
  arrays = [source(name, np.arange(6, dtype=np.float32)) for name in ("a", "b", "c")]
  write(tmp_path, arrays, shard_size=48)
  assert len(list(tmp_path.glob("*.safetensors"))) == 2
  return tmp_path


def change_index(directory: Path, **weight_map: str | None) -> None:
  index = json.loads((directory / INDEX).read_text())
  for name, shard in weight_map.items():
    if shard is None:
      del index["weight_map"][name]
    else:
      index["weight_map"][name] = shard
  (directory / INDEX).write_text(json.dumps(index))


def refused(directory: Path, reason: str) -> str:
  with pytest.raises(UserError, match=reason) as error:
    Shards(directory)
  assert str(directory) in str(error.value)
  return str(error.value)


def test_shards_read_as_one(sharded: Path):
  shards = Shards(sharded)
  assert sorted(shards) == ["a", "b", "c"]
  np.testing.assert_array_equal(shards.weight("c"), np.arange(6))
  assert shards.entry("b").shape == (6,)
  assert "d" not in shards


@pytest.mark.parametrize(
  "name",
  [
    "../../etc/passwd",
    "../outside.safetensors",
    "/etc/passwd",
    "/tmp/x.safetensors",
    "sub/x.safetensors",
    "..\\x.safetensors",
    "C:x.safetensors",
    "..",
    "",
    "x.bin",
    "x\x00.safetensors",
    "x\x1b[2J.safetensors",
  ],
)
def test_index_may_only_name_plain_files(sharded: Path, name: str):
  (sharded.parent / "outside.safetensors").write_bytes(b"")
  change_index(sharded, a=name)
  assert refused(sharded, "not a plain file name").replace("\n  fix: ", "", 1).isprintable()


def test_missing_shard(sharded: Path):
  change_index(sharded, a="model-00003-of-00002.safetensors")
  refused(sharded, r"model-00003-of-00002\.safetensors is missing")


def test_link_out_of_the_directory(sharded: Path, tmp_path_factory: pytest.TempPathFactory):
  shard = sharded / "model-00002-of-00002.safetensors"
  outside = tmp_path_factory.mktemp("outside") / "weights.safetensors"
  outside.write_bytes(shard.read_bytes())
  shard.unlink()
  shard.symlink_to(outside)
  refused(sharded, r"is a link to .*outside the directory")


def test_link_loop(sharded: Path):
  shard = sharded / "model-00002-of-00002.safetensors"
  shard.unlink()
  shard.symlink_to(shard)
  refused(sharded, "model-00002")


def test_links_of_the_download_cache_are_followed(tmp_path: Path):
  blobs, snapshot = tmp_path / "models--x" / "blobs", tmp_path / "models--x" / "snapshots" / "abc"
  save(blobs, a=np.arange(3, dtype=np.float32))
  (blobs / "model.safetensors").rename(blobs / "0123")
  snapshot.mkdir(parents=True)
  (snapshot / "model.safetensors").symlink_to(Path("../../blobs/0123"))
  np.testing.assert_array_equal(Shards(snapshot).weight("a"), np.arange(3))


def test_tensor_listed_twice_in_the_index(sharded: Path):
  (sharded / INDEX).write_text('{"weight_map": {"a": "x.safetensors", "a": "y.safetensors"}}')
  refused(sharded, "'a' is listed twice")


def test_tensor_not_in_its_shard(sharded: Path):
  change_index(sharded, a="model-00002-of-00002.safetensors")
  refused(sharded, r"'a' in model-00002-of-00002\.safetensors, which")


def test_tensor_in_no_shard(sharded: Path):
  change_index(sharded, d="model-00002-of-00002.safetensors")
  refused(sharded, r"'d' in model-00002-of-00002\.safetensors, which does not contain it")


def test_tensor_that_the_index_does_not_list(sharded: Path):
  change_index(sharded, a=None)
  refused(sharded, "'a', which the index does not list")


def test_tensor_in_two_shards(sharded: Path):
  write(sharded, [source(name, np.ones(6, np.float32)) for name in ("b", "c")], shard_size=10**9)
  os.replace(sharded / "model.safetensors", sharded / "model-00002-of-00002.safetensors")
  refused(sharded, "'b' is in both")


@pytest.mark.parametrize(
  "index", ["[]", "{}", '{"weight_map": {}}', '{"weight_map": []}', '{"weight_map": {"a": 1}}', "{", "\xff"]
)
def test_malformed_index(sharded: Path, index: str):
  (sharded / INDEX).write_text(index, encoding="latin-1")
  refused(sharded, "weight_map|file name|JSON|UTF-8")


def test_index_and_single_file_together(sharded: Path):
  save(sharded, a=np.ones(6, np.float32))
  refused(sharded, "both model.safetensors and")


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "weights.pkl", "model.ckpt", "params.npz", "w.npy"])
def test_pickles_are_refused(tmp_path: Path, name: str):
  (tmp_path / name).write_bytes(pickle.dumps({"a": 1}))
  refused(tmp_path, "(?s)pickle can run code.*safe_serialization")


def test_nothing_there(tmp_path: Path):
  refused(tmp_path / "absent", "no such directory")
  refused(tmp_path, "not a Hugging Face checkpoint")
  (tmp_path / "model-00001-of-00002.safetensors").write_bytes(b"")
  refused(tmp_path, r"model-00001-of-00002\.safetensors but neither")


def block_scaled(shape: tuple[int, int]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
  """Return random float8 values, their scales, and the product, computed block by block."""
  rng = np.random.default_rng(0)
  values = rng.normal(size=shape).astype(E4M3)
  scales = rng.uniform(0.5, 2, (-(-shape[0] // 128), -(-shape[1] // 128))).astype(np.float32)
  whole = values.astype(np.float32)
  for i, j in np.ndindex(*scales.shape):
    whole[i * 128 : (i + 1) * 128, j * 128 : (j + 1) * 128] *= scales[i, j]
  return values, scales, whole


@pytest.mark.parametrize("shape", [(256, 128), (130, 257), (1, 5), (128, 129)])
def test_float8_with_block_scales(tmp_path: Path, shape: tuple[int, int]):
  values, scales, whole = block_scaled(shape)
  shards = Shards(save(tmp_path, **{"x.weight": values, "x.weight_scale_inv": scales}))
  np.testing.assert_array_equal(shards.weight("x.weight"), whole)
  assert shards.weights() == ["x.weight"]


def test_float8_with_one_scale(tmp_path: Path):
  values, scale = np.ones((3, 4), E4M3), np.array([0.375], np.float32)
  shards = Shards(save(tmp_path, **{"x.weight": values, "x.weight_scale": scale, "x.input_scale": scale}))
  np.testing.assert_array_equal(shards.weight("x.weight"), np.full((3, 4), 0.375, np.float32))
  assert shards.weights() == ["x.weight"]


@pytest.mark.parametrize(
  ("scales", "reason"),
  [
    ({}, "has no 'x.weight_scale_inv' and no 'x.weight_scale'"),
    ({"_scale_inv": np.ones((2, 3), np.float32)}, r"shape \[2, 3\], expected \[2, 2\]"),
    ({"_scale": np.ones(2, np.float32)}, r"expected \[\] or \[1\]"),
    ({"_scale": np.ones(1, np.int8)}, "its scale is I8"),
    ({"_scale": np.ones(1, np.float32), "_scale_inv": np.ones((2, 2), np.float32)}, "has both"),
    ({"_scale": np.full(1, np.nan, np.float32)}, "not finite"),
  ],
)
def test_float8_scale_that_is_missing_or_wrong(tmp_path: Path, scales: dict[str, np.ndarray], reason: str):
  arrays = {"x.weight": np.ones((130, 200), E4M3), **{"x.weight" + end: scale for end, scale in scales.items()}}
  with pytest.raises(UserError, match=reason):
    Shards(save(tmp_path, **arrays)).weight("x.weight")


def test_scale_without_a_float8_tensor_counts_as_a_weight(tmp_path: Path):
  arrays = {"x.weight": np.ones((2, 2), np.float32), "x.weight_scale_inv": np.ones((1, 1), np.float32)}
  assert set(Shards(save(tmp_path, **arrays)).weights()) == set(arrays)


def test_written_files_are_read_by_the_library(tmp_path: Path):
  from safetensors import safe_open

  values = np.linspace(-3, 3, 10, dtype=np.float32).reshape(2, 5)
  write(tmp_path, [source("w", values, "BF16"), source("e", np.zeros((0, 3), np.float32))], shard_size=10**9)
  with safe_open(tmp_path / "model.safetensors", "np") as file:
    assert file.metadata() == {"format": "pt"}
    assert file.get_tensor("w").tobytes() == values.astype(ml_dtypes.bfloat16).tobytes()


def test_plan_fills_shards_in_order_and_gives_a_large_tensor_its_own():
  sizes = [40, 40, 100, 8, 8]
  sources = [source(str(i), np.zeros(size // 4, np.float32)) for i, size in enumerate(sizes)]
  assert [[s.name for s in shard] for shard in plan(sources, 80)] == [["0", "1"], ["2"], ["3", "4"]]


def test_writer_refuses_wrong_shapes_and_repeated_names(tmp_path: Path):
  wrong = Source("a", "F32", (3,), lambda: np.zeros(4, np.float32))
  with pytest.raises(ValueError, match="declared"):
    write(tmp_path, [wrong], shard_size=100)
  with pytest.raises(ValueError, match="twice"):
    write(tmp_path, [wrong, wrong], shard_size=100)
  with pytest.raises(UserError, match="cannot be written"):
    write(tmp_path / "absent", [wrong], shard_size=100)


def test_shard_sizes():
  assert parse_size("5GB") == 5 * 10**9
  assert parse_size(" 1.5mb") == 1_500_000
  assert parse_size("77") == 77
  for wrong in ("", "GB", "-1GB", "0", "5GiB", "nan", "inf"):
    with pytest.raises(UserError, match="shard size"):
      parse_size(wrong)
