"""A checkpoint directory: one safetensors file or shards with an index, and tensors by name with float8 made whole."""

import errno
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np

from maxtext_like.checkpoint.huggingface.tensor_file import FLOAT8, Entry, SafetensorsFile, refuse_pickle
from maxtext_like.errors import UserError
from maxtext_like.strict_json import parse_file, printable

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
_INDEX_LIMIT = 100_000_000  # bytes
_PICKLES = (".bin", ".pt", ".pth", ".pkl", ".pickle", ".ckpt", ".npz", ".npy")
BLOCK_SCALE = "_scale_inv"  # DeepSeek: one number per block
TENSOR_SCALE = "_scale"  # one number per tensor
_UNUSED_SUFFIXES = (".input_scale", ".activation_scale")  # scales of activations: of no use to weights


class Shards:
  """The tensors of a checkpoint directory. Only headers are held; a tensor's bytes are read when it is asked for."""

  def __init__(self, directory: Path):
    """Opens and checks every file's header, and that index and shards agree.

    Raises:
      UserError: no such directory, pickles, a malformed file, or an index that disagrees with its shards.
    """
    self.directory = directory
    self.block: tuple[int, int] = (128, 128)  # rows and columns that share a block scale
    where = printable(directory)
    if not directory.is_dir():
      raise UserError(f"{where}: no such directory; expected a Hugging Face checkpoint: config.json and {SINGLE}")
    single, index = (directory / SINGLE).exists(), (directory / INDEX).exists()
    if single and index:
      raise UserError(f"{where}: has both {SINGLE} and {INDEX}; which one holds the model? Move the other away")
    if index:
      self._files = self._open_index(directory / INDEX)
    elif single:
      self._files = [SafetensorsFile(_inside(directory, SINGLE, f"{where}: {SINGLE}"))]
    else:
      raise self._nothing_found()
    self._home = {name: file for file in self._files for name in file.entries}

  def _nothing_found(self) -> UserError:
    where = printable(self.directory)
    files = sorted(path for path in self.directory.iterdir() if path.is_file())
    if stray := [path for path in files if path.suffix == ".safetensors"]:
      return UserError(f"{where}: has {printable(stray[0].name)} but neither {SINGLE} nor {INDEX}; was the download cut off?")
    if pickles := [path for path in files if path.suffix in _PICKLES]:
      return refuse_pickle(pickles[0])
    return UserError(f"{where}: holds no {SINGLE} and no {INDEX}; not a Hugging Face checkpoint")

  def _open_index(self, path: Path) -> list[SafetensorsFile]:
    where = printable(path)
    index = parse_file(path, limit=_INDEX_LIMIT)
    weight_map = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(weight_map, dict) or not weight_map:
      raise UserError(f"{where}: weight_map must map tensor names to file names, and is missing or empty")
    shards: dict[str, set[str]] = {}
    for name, shard in weight_map.items():
      if not isinstance(shard, str):
        raise UserError(f"{where}: tensor '{printable(name)}': its file name is not text")
      shards.setdefault(shard, set()).add(name)
    paths = {shard: _inside(self.directory, shard, where) for shard in shards}
    files, home = [], {}
    for shard, names in shards.items():
      file = SafetensorsFile(paths[shard])
      if missing := names - set(file.entries):
        raise UserError(f"{where}: says that {printable(shard)} holds {_some(missing)}, which is not in it")
      for name in file.entries:
        if name in home:
          both = f"{printable(home[name])} and {printable(shard)}"
          raise UserError(f"{where}: tensor '{printable(name)}' is in both {both}")
        home[name] = shard
      if extra := set(file.entries) - names:
        raise UserError(f"{where}: {printable(shard)} holds {_some(extra)}, which the index does not list there")
      files.append(file)
    return files

  def __contains__(self, name: str) -> bool:
    return name in self._home

  def __iter__(self) -> Iterator[str]:
    return iter(self._home)

  def __len__(self) -> int:
    return len(self._home)

  def entry(self, name: str) -> Entry:
    """Dtype and shape of a tensor, from the header."""
    return self._home[name].entries[name]

  def path(self, name: str) -> Path:
    """The file that holds a tensor."""
    return self._home[name].path

  def raw(self, name: str) -> np.ndarray:
    """A tensor as it is stored: a read-only view, not read before it is used."""
    return self._home[name].tensor(name)

  def weights(self) -> list[str]:
    """Names of all tensors but the scales that belong to float8 weights."""
    scales = {scale for name in self if self.entry(name).dtype in FLOAT8 for scale in self._scales(name)}
    return [name for name in self if name not in scales and not name.endswith(_UNUSED_SUFFIXES)]

  def _scales(self, name: str) -> list[str]:
    return [name + suffix for suffix in (BLOCK_SCALE, TENSOR_SCALE) if name + suffix in self]

  def check_scales(self, names: Iterable[str]) -> None:
    """Checks that every float8 tensor among ``names`` has exactly one scale of the right shape, reading none."""
    for name in names:
      if self.entry(name).dtype in FLOAT8:
        self._check_scale(name)

  def _check_scale(self, name: str) -> tuple[str, tuple[int, ...]]:
    entry, scales = self.entry(name), self._scales(name)
    where = f"{printable(self._home[name].path)}: tensor '{printable(name)}' is {entry.dtype}"
    if not scales:
      raise UserError(f"{where} but has no '{printable(name)}{BLOCK_SCALE}' and no '{printable(name)}{TENSOR_SCALE}'")
    if len(scales) == 2:
      raise UserError(f"{where} and has both '{printable(scales[0])}' and '{printable(scales[1])}'")
    scale = self.entry(scales[0])
    if scale.dtype not in ("F32", "BF16", "F16"):
      raise UserError(f"{where}; its scale is {scale.dtype}, expected F32, BF16 or F16")
    if scales[0].endswith(BLOCK_SCALE):
      if len(entry.shape) < 2:
        raise UserError(f"{where} of shape {list(entry.shape)}; block scales need a matrix")
      grid = tuple(-(-size // block) for size, block in zip(entry.shape[-2:], self.block, strict=True))
      expected = {(*entry.shape[:-2], *grid)}
    else:
      expected = {(), (1,)}
    if scale.shape not in expected:
      wanted = " or ".join(str(list(shape)) for shape in sorted(expected))
      raise UserError(f"{where}; its scale has shape {list(scale.shape)}, expected {wanted}")
    return scales[0], scale.shape

  def weight(self, name: str) -> np.ndarray:
    """A tensor with its scale applied: float8 comes as float32, everything else as it is stored.

    Raises:
      UserError: a float8 tensor without a scale, or with one that does not fit or is not finite.
    """
    stored = self.raw(name)
    if self.entry(name).dtype not in FLOAT8:
      return stored
    scale_name, scale = self._finite_scale(name)
    if scale_name.endswith(BLOCK_SCALE):
      rows, columns = self.block
      scale = np.repeat(scale, rows, axis=-2)[..., : stored.shape[-2], :]
      result = stored.astype(np.float32)
      for start in range(0, stored.shape[-1], columns):  # No full-size array of scales.
        result[..., start : start + columns] *= scale[..., start // columns, None]
      return result
    return stored.astype(np.float32) * scale.reshape(())

  def _finite_scale(self, name: str) -> tuple[str, np.ndarray]:
    """Name and float32 values of a float8 tensor's scale."""
    scale_name, _ = self._check_scale(name)
    scale = self.raw(scale_name).astype(np.float32)
    if not np.isfinite(scale).all():
      raise UserError(f"{printable(self._home[name].path)}: tensor '{printable(scale_name)}' is not finite")
    return scale_name, scale

  def scale(self, name: str) -> np.ndarray:
    """The scale of every block of a float8 matrix, float32; that of a whole tensor is each block's.

    Raises:
      UserError: as ``weight``.
    """
    scale_name, scale = self._finite_scale(name)
    if scale_name.endswith(BLOCK_SCALE):
      return scale
    grid = [-(-size // block) for size, block in zip(self.entry(name).shape, self.block, strict=True)]
    return np.full(grid, scale.reshape(()), np.float32)

  def release(self) -> None:
    """Gives the pages read so far back to the system."""
    for file in self._files:
      file.release()


def _inside(directory: Path, name: str, where: str) -> Path:
  """The path of a file that must lie in the directory itself: no path, no link out of it.

  One layout with links is known and allowed: the download cache of Hugging Face, where
  models--X/snapshots/REVISION/FILE points to models--X/blobs/HASH.
  """
  shown = printable(name)
  if not name.endswith(".safetensors") or not name.isprintable() or any(c in name for c in "/\\:"):
    raise UserError(f"{where}: '{shown}' is not a plain file name that ends in .safetensors")
  path = directory / name
  try:
    home, target = directory.resolve(strict=True), path.resolve(strict=True)
  except (OSError, RuntimeError) as error:
    if isinstance(error, FileNotFoundError) or getattr(error, "errno", None) == errno.ENOENT:
      raise UserError(f"{where}: the file {shown} is missing in {printable(directory)}") from None
    raise UserError(f"{where}: {shown}: {error}") from None
  cache = home.parent.parent / "blobs" if home.parent.name == "snapshots" else None
  if target.parent not in (home, cache):
    raise UserError(f"{where}: {shown} is a link out of the directory, to {printable(target)}; copy the file instead")
  return path


def _some(names: Iterable[str]) -> str:
  listed = sorted(names)
  shown = ", ".join(f"'{printable(name)}'" for name in listed[:5])
  return shown if len(listed) <= 5 else f"{shown} and {len(listed) - 5} more"
