"""Section ``mesh:``: the sizes of the mesh axes and the sharding rules."""

import math
from collections.abc import Iterator
from dataclasses import dataclass, field

from maxtext_like.config.problems import Checked, Problem, did_you_mean
from maxtext_like.layers.sharding_rules import LOGICAL_AXES, MESH_AXES

_NETWORKS = ("ici", "dcn")
PARALLELISM = {network: {f"{network}_{axis}_parallelism": axis for axis in MESH_AXES} for network in _NETWORKS}
"""Keys of the axis sizes within a slice ("ici") and across slices ("dcn"), each with its mesh axis."""


@dataclass(frozen=True, kw_only=True)
class MeshConfig(Checked):
  """Section ``mesh:``: number of devices along each axis, and the sharding rules. -1: all remaining devices or slices.

  The length of an axis is the product of its two keys: ``dcn`` counts slices, which the data-center network connects, and
  ``ici`` counts the devices within a slice.
  """

  ici_data_parallelism: int
  ici_fsdp_parallelism: int
  ici_expert_parallelism: int
  ici_context_parallelism: int
  ici_tensor_parallelism: int
  dcn_data_parallelism: int
  dcn_fsdp_parallelism: int
  dcn_expert_parallelism: int
  dcn_context_parallelism: int
  dcn_tensor_parallelism: int
  sharding_rules: dict[str, str | tuple[str, ...] | None] = field(hash=False)

  def problems(self) -> Iterator[Problem]:
    """Yield a problem for every invalid value or combination of values."""
    for keys in PARALLELISM.values():
      sizes = {name: getattr(self, name) for name in keys}
      for name, size in sizes.items():
        if size < 1 and size != -1:
          yield Problem(
            f"{name} = {size} is not a number of devices", (name,), "set 1 or more, or -1 for all remaining devices"
          )
      rest = [name for name, size in sizes.items() if size == -1]
      if len(rest) > 1:
        fixes = " or ".join(f"{name}=1" for name in rest)
        how = f"set {fixes}, or another size: only one axis can take all remaining devices"
        yield Problem(f"{' and '.join(rest)} are {'both' if len(rest) == 2 else 'all'} -1", tuple(rest), how)
    for logical, axes in self.sharding_rules.items():
      if logical not in LOGICAL_AXES:
        known = did_you_mean(logical, LOGICAL_AXES) or f"; logical axes are {', '.join(LOGICAL_AXES)}"
        yield Problem(
          f"sharding_rules: unknown logical axis {logical!r}{known}", ("sharding_rules",), fix="use one of the logical axes"
        )
      named = (axes,) if isinstance(axes, str) else axes or ()
      for axis in named:
        if axis not in MESH_AXES:
          known = did_you_mean(axis, MESH_AXES) or f"; mesh axes are {', '.join(MESH_AXES)}"
          yield Problem(
            f"sharding_rules: {logical}: unknown mesh axis {axis!r}{known}",
            ("sharding_rules",),
            fix="use one of the axes of the mesh",
          )
      if len(set(named)) < len(named):
        yield Problem(f"sharding_rules: {logical} names a mesh axis twice", ("sharding_rules",), "name each axis once")

  def over_networks(self, devices: int, slices: int | None = None) -> tuple[dict[str, int], dict[str, int]]:
    """Return the number of slices, and of devices within a slice, along each axis, with -1 replaced.

    Args:
      devices: number of devices in all slices.
      slices: number of slices; None if the machine has no slices, and the ``dcn`` keys determine their number.

    Raises:
      ValueError: the product of the axes differs from the number of slices or devices.
    """
    dcn = self._sizes("dcn", slices or 1)
    count = math.prod(dcn.values())
    if slices is not None and count != slices:
      raise ValueError(
        f"mesh: {self._words('dcn', 'make')} {count} {'slice' if count == 1 else 'slices'}, but this run has {slices}\n"
        f"  fix: set dcn_*_parallelism so that their product is {slices}; one of them may be -1"
      )
    if devices % count:
      raise ValueError(
        f"mesh: the {devices} devices of this run cannot be divided into {count} equal slices ({self._words('dcn')})\n"
        f"  fix: set dcn_*_parallelism so that their product divides {devices}"
      )
    ici = self._sizes("ici", devices // count)
    if math.prod(ici.values()) * count != devices:
      where = "" if count == 1 else f" of each of {count} slices"
      how = "divide" if -1 in self._written("ici").values() else "multiply to"
      raise ValueError(
        f"mesh: {self._words('ici', 'do')} not {how} the number of devices{where}, {devices // count}\n"
        f"  fix: set ici_*_parallelism so that their product is {devices // count}; one of them may be -1"
      )
    return dcn, ici

  def axis_sizes(self, devices: int, slices: int | None = None) -> dict[str, int]:
    """Return the number of devices along each axis across all slices; arguments as ``over_networks``."""
    dcn, ici = self.over_networks(devices, slices)
    return {axis: dcn[axis] * ici[axis] for axis in MESH_AXES}

  def devices(self, rest: int) -> int:
    """Return the number of devices of the mesh if the ``ici`` axis with -1 has size ``rest``."""
    inside = math.prod(rest if size == -1 else size for size in self._written("ici").values())
    return inside * math.prod(self._sizes("dcn", 1).values())

  def _written(self, network: str) -> dict[str, int]:
    return {axis: getattr(self, key) for key, axis in PARALLELISM[network].items()}

  def _sizes(self, network: str, count: int) -> dict[str, int]:
    """Return the sizes with -1 replaced, where the division is exact."""
    written = self._written(network)
    fixed = math.prod(size for size in written.values() if size != -1)
    return {axis: max(count // fixed, 1) if size == -1 else size for axis, size in written.items()}

  def _words(self, network: str, verb: str | None = None) -> str:
    """Return the keys with their values, such as ``ici_data_parallelism=2``, and a verb: "do" becomes "does" after one key."""
    keys = {key: getattr(self, key) for key in PARALLELISM[network]}
    words = [f"{key}={size}" for key, size in keys.items() if size not in (1, -1)] or [f"{network}_*_parallelism=1"]
    form = "" if verb is None else f" {verb}" if len(words) > 1 else f" {verb}es" if verb == "do" else f" {verb}s"
    return " and ".join(filter(None, (", ".join(words[:-1]), words[-1]))) + form
