"""TPU slices that the train step can be compiled for on any machine, with the memory of a chip. Imports no JAX."""

from dataclasses import dataclass

from maxtext_like.config.problems import nearest
from maxtext_like.errors import UserError

GIB = 1 << 30


@dataclass(frozen=True, kw_only=True)
class Topology:
  """A slice.

  Attributes:
    name: as people order it, ``v6e-8``: generation and number of chips.
    generation: key of the chip.
    grid: chips along x and y.
    hbm_bytes: of one chip, what XLA lets a program use.
  """

  name: str
  generation: str
  grid: tuple[int, int]
  hbm_bytes: int

  @property
  def chips(self) -> int:
    return self.grid[0] * self.grid[1]

  @property
  def libtpu_name(self) -> str:
    """As ``jax.experimental.topologies`` spells it: ``v6e:2x4``."""
    return f"{self.generation}:{self.grid[0]}x{self.grid[1]}"


# Of the 32 GB of a v6e chip XLA keeps some for itself; 31.25 GiB is what its out-of-memory message calls available.
_V6E_HBM = int(31.25 * GIB)
# cloud.google.com/tpu/docs/v6e, "Supported configurations".
_V6E_GRIDS = ((1, 1), (2, 2), (2, 4), (4, 4), (4, 8), (8, 8), (8, 16), (16, 16))

TOPOLOGIES: dict[str, Topology] = {
  f"v6e-{x * y}": Topology(name=f"v6e-{x * y}", generation="v6e", grid=(x, y), hbm_bytes=_V6E_HBM) for x, y in _V6E_GRIDS
}


def find_topology(name: str) -> Topology:
  """The slice of this name.

  Raises:
    UserError: unknown, with the nearest names.
  """
  if name in TOPOLOGIES:
    return TOPOLOGIES[name]
  near = nearest(name, TOPOLOGIES, count=3)
  known = ", ".join(TOPOLOGIES)
  raise UserError(
    f"topology={name}: unknown topology{', did you mean ' + ' or '.join(near) + '?' if near else ''}\n  fix: one of {known}"
  )
