"""Reads parts of the arrays of a saved step, for tools that inspect weights larger than memory."""

from pathlib import Path
from typing import Any

import numpy as np

from maxtext_like.checkpoint.store import manifest, zarr_arrays
from maxtext_like.errors import UserError

_CACHE = 1 << 30  # bytes of decoded chunks to keep, because consecutive slices of an array share chunks


class StoredArrays:
  """The arrays of one complete step. The unit of reading is a stored chunk: the part of an array that one device wrote."""

  def __init__(self, step_directory: Path):
    """Reads the manifest and checks the hashes of the files.

    Raises:
      UserError: there is no complete checkpoint, or it is damaged.
    """
    try:
      self.manifest = manifest.read(step_directory)
      manifest.check_hashes(step_directory, self.manifest)
    except manifest.DamageError as error:
      raise UserError(f"{step_directory}: not a complete checkpoint: {error}", fix=manifest.ANOTHER) from error
    if self.manifest.schema > manifest.SCHEMA_VERSION:
      raise UserError(
        f"{step_directory}: written with checkpoint schema {self.manifest.schema}; this version reads schemas up to "
        f"{manifest.SCHEMA_VERSION}\n  fix: upgrade maxtext_like"
      )
    self._state = (manifest.home(step_directory, self.manifest) / manifest.STATE_NAME).absolute()
    self._open: tuple[str, Any] = ("", None)

  def parameter(self, path: tuple[str, ...], index: tuple[int | slice, ...]) -> np.ndarray:
    """Returns ``params[path][index]`` in float32.

    Raises:
      UserError: the step has no such parameter.
    """
    name = ".".join(("params", *path))
    if self._open[0] != name:
      if name not in self.manifest.leaves:
        raise UserError(
          f"{self._state.parent}: has no array {name}; the configuration describes another model",
          fix="use the configuration that is stored with the checkpoint",
        )
      self._open = (name, self._array(name))
    return np.asarray(self._open[1][index].read().result(), np.float32)

  def _array(self, name: str) -> Any:
    if zarr_arrays.holds_zarr(self.manifest):
      return zarr_arrays.opened(self._state / name)
    import tensorstore

    store = {"driver": "ocdbt", "base": {"driver": "file", "path": f"{self._state}/"}, "path": f"{name}/"}
    context = tensorstore.Context({"cache_pool": {"total_bytes_limit": _CACHE}})
    # Orbax writes zarr version 3; older versions wrote version 2. The name of the metadata file shows which.
    keys = {bytes(key).decode() for key in tensorstore.KvStore.open(store, context=context).result().list().result()}
    driver = "zarr3" if "zarr.json" in keys else "zarr"
    return tensorstore.open({"driver": driver, "kvstore": store}, open=True, read=True, context=context).result()
