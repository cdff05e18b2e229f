"""The tensors of a checkpoint directory, which has one safetensors file or several with an index. Applies float8 scales."""

import errno
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np

from maxtext_like.checkpoint.huggingface.tensor_file import AGAIN, FLOAT8, Entry, SafetensorsFile, refuse_pickle
from maxtext_like.errors import UserError
from maxtext_like.strict_json import parse_file, printable

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
_INDEX_LIMIT = 100_000_000  # maximum bytes
_PICKLES = (".bin", ".pt", ".pth", ".pkl", ".pickle", ".ckpt", ".npz", ".npy")
BLOCK_SCALE = "_scale_inv"  # DeepSeek: one scale per block
TENSOR_SCALE = "_scale"  # one scale per tensor
_UNUSED_SUFFIXES = (".input_scale", ".activation_scale")  # scales of activations, which do not affect weights


class Shards:
  """The tensors of a checkpoint directory. Only headers are kept in memory; a tensor is read when it is used."""

  def __init__(self, directory: Path):
    """Reads and checks every header, and checks that the index agrees with the files.

    Raises:
      UserError: the directory is missing, contains pickles or a malformed file, or the index disagrees with the files.
    """
    self.directory = directory
    self.block: tuple[int, int] = (128, 128)  # rows and columns that share a block scale
    where = printable(directory)
    if not directory.is_dir():
      raise UserError(
        f"{where}: no such directory; expected a Hugging Face checkpoint: config.json and {SINGLE}",
        fix="name the directory of a checkpoint, or download one: hf download MODEL",
      )
    single, index = (directory / SINGLE).exists(), (directory / INDEX).exists()
    if single and index:
      raise UserError(f"{where}: contains both {SINGLE} and {INDEX}\n  fix: move the one away that is not the model")
    if index:
      self.files = self._open_index(directory / INDEX)
    elif single:
      self.files = [SafetensorsFile(_inside(directory, SINGLE, f"{where}: {SINGLE}"))]
    else:
      raise self._nothing_found()
    self._home = {name: file for file in self.files for name in file.entries}

  def _nothing_found(self) -> UserError:
    where = printable(self.directory)
    files = sorted(path for path in self.directory.iterdir() if path.is_file())
    if stray := [path for path in files if path.suffix == ".safetensors"]:
      return UserError(
        f"{where}: contains {printable(stray[0].name)} but neither {SINGLE} nor {INDEX}; the download may be incomplete",
        fix="download the model again: hf download MODEL",
      )
    if pickles := [path for path in files if path.suffix in _PICKLES]:
      return refuse_pickle(pickles[0])
    return UserError(
      f"{where}: contains neither {SINGLE} nor {INDEX}; not a Hugging Face checkpoint",
      fix=f"name a directory with config.json and {SINGLE}",
    )

  def _open_index(self, path: Path) -> list[SafetensorsFile]:
    where = printable(path)
    index = parse_file(path, limit=_INDEX_LIMIT)
    weight_map = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(weight_map, dict) or not weight_map:
      raise UserError(f"{where}: weight_map is missing or empty; it must map tensor names to file names", fix=AGAIN)
    shards: dict[str, set[str]] = {}
    for name, shard in weight_map.items():
      if not isinstance(shard, str):
        raise UserError(f"{where}: tensor '{printable(name)}': its file name is not a string", fix=AGAIN)
      shards.setdefault(shard, set()).add(name)
    paths = {shard: _inside(self.directory, shard, where) for shard in shards}
    files, home = [], {}
    for shard, names in shards.items():
      file = SafetensorsFile(paths[shard])
      if missing := names - set(file.entries):
        raise UserError(f"{where}: lists {_some(missing)} in {printable(shard)}, which does not contain it", fix=AGAIN)
      for name in file.entries:
        if name in home:
          both = f"{printable(home[name])} and {printable(shard)}"
          raise UserError(f"{where}: tensor '{printable(name)}' is in both {both}", fix=AGAIN)
        home[name] = shard
      if extra := set(file.entries) - names:
        raise UserError(f"{where}: {printable(shard)} contains {_some(extra)}, which the index does not list there", fix=AGAIN)
      files.append(file)
    return files

  def __contains__(self, name: str) -> bool:
    return name in self._home

  def __iter__(self) -> Iterator[str]:
    return iter(self._home)

  def __len__(self) -> int:
    return len(self._home)

  def entry(self, name: str) -> Entry:
    """Returns dtype and shape of a tensor from the header."""
    return self._home[name].entries[name]

  def file(self, name: str) -> SafetensorsFile:
    """Returns the file that contains a tensor."""
    return self._home[name]

  def path(self, name: str) -> Path:
    """Returns the path of the file that contains a tensor."""
    return self._home[name].path

  def raw(self, name: str) -> np.ndarray:
    """Returns a tensor as it is stored, as a read-only view whose pages are read on use."""
    return self._home[name].tensor(name)

  def weights(self) -> list[str]:
    """Returns the names of all tensors except the scales of float8 weights."""
    scales = {scale for name in self if self.entry(name).dtype in FLOAT8 for scale in self._scales(name)}
    return [name for name in self if name not in scales and not name.endswith(_UNUSED_SUFFIXES)]

  def _scales(self, name: str) -> list[str]:
    return [name + suffix for suffix in (BLOCK_SCALE, TENSOR_SCALE) if name + suffix in self]

  def check_scales(self, names: Iterable[str]) -> None:
    """Checks that every float8 tensor in ``names`` has exactly one scale of the right shape. Reads no tensor."""
    for name in names:
      if self.entry(name).dtype in FLOAT8:
        self._check_scale(name)

  def _check_scale(self, name: str) -> tuple[str, tuple[int, ...]]:
    entry, scales = self.entry(name), self._scales(name)
    where = f"{printable(self._home[name].path)}: tensor '{printable(name)}' is {entry.dtype}"
    if not scales:
      raise UserError(
        f"{where} but has no '{printable(name)}{BLOCK_SCALE}' and no '{printable(name)}{TENSOR_SCALE}'", fix=AGAIN
      )
    if len(scales) == 2:
      raise UserError(
        f"{where} and has both '{printable(scales[0])}' and '{printable(scales[1])}'",
        fix="remove the scale that is not used from the file",
      )
    scale = self.entry(scales[0])
    if scale.dtype not in ("F32", "BF16", "F16"):
      raise UserError(
        f"{where}; its scale is {scale.dtype}, expected F32, BF16 or F16", fix="convert the model again, with scales in float32"
      )
    if scales[0].endswith(BLOCK_SCALE):
      if len(entry.shape) < 2:
        raise UserError(
          f"{where} of shape {list(entry.shape)}; block scales need a matrix",
          fix="convert the model again: store this tensor in bfloat16",
        )
      grid = tuple(-(-size // block) for size, block in zip(entry.shape[-2:], self.block, strict=True))
      expected = {(*entry.shape[:-2], *grid)}
    else:
      expected = {(), (1,)}
    if scale.shape not in expected:
      wanted = " or ".join(str(list(shape)) for shape in sorted(expected))
      raise UserError(
        f"{where}; its scale has shape {list(scale.shape)}, expected {wanted}",
        fix="convert the model again, with scales of this shape",
      )
    return scales[0], scale.shape

  def weight(self, name: str) -> np.ndarray:
    """Returns a tensor with its scale applied: float32 for float8, otherwise as it is stored.

    Raises:
      UserError: a float8 tensor has no scale, or its scale has a wrong shape or is not finite.
    """
    stored = self.raw(name)
    if self.entry(name).dtype not in FLOAT8:
      return stored
    columns, scale = self.row_scales(name)
    if scale.ndim:
      result = stored.astype(np.float32)
      for start in range(0, stored.shape[-1], columns):  # No full-size array of scales.
        result[..., start : start + columns] *= scale[..., start // columns, None]
      return result
    return stored.astype(np.float32) * scale

  def row_scales(self, name: str) -> tuple[int, np.ndarray]:
    """Returns the scales of a float8 tensor for each of its rows.

    Returns:
      The number of columns that share a scale, and float32 [..., rows, blocks of columns]. The scale of a complete tensor has
      no axes.

    Raises:
      UserError: as ``weight``.
    """
    scale_name, scale = self._finite_scale(name)
    if not scale_name.endswith(BLOCK_SCALE):
      return self.entry(name).shape[-1], scale.reshape(())
    rows, columns = self.block
    return columns, np.repeat(scale, rows, axis=-2)[..., : self.entry(name).shape[-2], :]

  def _finite_scale(self, name: str) -> tuple[str, np.ndarray]:
    """Returns the name and the float32 values of a float8 tensor's scale."""
    scale_name, _ = self._check_scale(name)
    scale = self.raw(scale_name).astype(np.float32)
    if not np.isfinite(scale).all():
      raise UserError(f"{printable(self._home[name].path)}: tensor '{printable(scale_name)}' is not finite", fix=AGAIN)
    return scale_name, scale

  def scale(self, name: str) -> np.ndarray:
    """Returns the scale of every block of a float8 matrix, float32. A scale of the complete tensor is repeated.

    Raises:
      UserError: as ``weight``.
    """
    scale_name, scale = self._finite_scale(name)
    if scale_name.endswith(BLOCK_SCALE):
      return scale
    grid = [-(-size // block) for size, block in zip(self.entry(name).shape, self.block, strict=True)]
    return np.full(grid, scale.reshape(()), np.float32)

  def release(self) -> None:
    """Returns the pages read so far to the operating system."""
    for file in self.files:
      file.release()


def _inside(directory: Path, name: str, where: str) -> Path:
  """Returns the path of a file that must be directly in the directory, not behind a path or a link.

  One layout with links is allowed, the download cache of Hugging Face, where models--X/snapshots/REVISION/FILE points to
  models--X/blobs/HASH.
  """
  shown = printable(name)
  if not name.endswith(".safetensors") or not name.isprintable() or any(c in name for c in "/\\:"):
    raise UserError(
      f"{where}: '{shown}' is not a plain file name that ends in .safetensors",
      fix="write the name of a file of this directory, such as model-00001-of-00002.safetensors",
    )
  path = directory / name
  try:
    home, target = directory.resolve(strict=True), path.resolve(strict=True)
  except (OSError, RuntimeError) as error:
    if isinstance(error, FileNotFoundError) or getattr(error, "errno", None) == errno.ENOENT:
      raise UserError(f"{where}: the file {shown} is missing in {printable(directory)}", fix=AGAIN) from None
    raise UserError(f"{where}: {shown}: {error}", fix=AGAIN) from None
  cache = home.parent.parent / "blobs" if home.parent.name == "snapshots" else None
  if target.parent not in (home, cache):
    raise UserError(f"{where}: {shown} is a link to {printable(target)}, outside the directory\n  fix: copy the file instead")
  return path


def _some(names: Iterable[str]) -> str:
  listed = sorted(names)
  shown = ", ".join(f"'{printable(name)}'" for name in listed[:5])
  return shown if len(listed) <= 5 else f"{shown} and {len(listed) - 5} more"
