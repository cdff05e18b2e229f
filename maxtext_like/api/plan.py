"""``plan``: estimates memory and time of a train step from shapes, without compiling."""

from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

from maxtext_like.api.arguments import words
from maxtext_like.api.compile import UNITS, columns, host_rows, run_rows, size_words, work_rows
from maxtext_like.api.config import load_config
from maxtext_like.capacity.chips import CARDS
from maxtext_like.capacity.topologies import GpuHost, Topology, find_machine
from maxtext_like.errors import UserError

if TYPE_CHECKING:
  from maxtext_like.api.config import Configuration
  from maxtext_like.capacity.plan import Plan, Target

SHOWN = 5  # maximum number of printed search results
_PCIE = 64e9  # bytes/s; a card with faster links has NVLink


@dataclass(frozen=True)
class Planned:
  """Estimate of a train step. As text: a table, and the best results of a search.

  Attributes:
    plan: estimate for the configuration.
    found: plans of a search that fit, fastest bound first; None without a search.
  """

  plan: "Plan"
  found: "tuple[Plan, ...] | None" = None

  @property
  def fits(self) -> bool:
    """True if the configuration fits, by this estimate."""
    return self.plan.fits

  def __str__(self) -> str:
    from maxtext_like.capacity.aot_tpu import Work
    from maxtext_like.sharding.mesh import in_words

    p = self.plan
    device = {Topology: "chip", GpuHost: "GPU"}.get(type(p.target), "device")
    parts = ", ".join(f"{name} {size_words(size)}" for name, size in p.classes.items() if size >= 1 << 20)
    limit = "" if p.limit is None else f" of {size_words(p.limit)} ({p.bytes / p.limit:.0%})"
    rows = [
      *run_rows(p.config, p.parameters, device),
      ("topology", f"{p.target.name}, {p.target.devices} devices, mesh {in_words(p.mesh)}"),
      ("memory", f"{size_words(p.bytes)}{limit} per {device}: {parts}"),
      *host_rows(p.host, device),
      *work_rows(
        Work(
          flops=p.flops, model_flops=p.model_flops, memory_bytes=int(p.memory_bytes), transfers=p.transfers, roofline=p.roofline
        ),
        device,
        _units(p.target),
      ),
      *([] if p.roofline else [("at least", "unknown: there is no table of speeds for this device")]),
      (
        "method",
        "estimated, not compiled; assumes that all-gathers of layers overlap with computation"
        + (", as with xla_flags=all" if isinstance(p.target, Topology) else ""),
      ),
      (
        "verdict",
        "unknown: the memory of this device is not known" if p.limit is None else "fits" if p.fits else "does not fit",
      ),
    ]
    if self.found is None and p.limit is not None and not p.fits:
      rows += [("fix", "--search (search=True) lists batch sizes, remat policies and meshes that fit")]
    if self.found is not None:
      rows += [("search", "nothing fits")] if not self.found else []
      rows += [("search" if i == 0 else "", _in_a_line(found, p)) for i, found in enumerate(self.found[:SHOWN])]
    return columns(rows)

  def to_json(self) -> dict[str, Any]:
    """Return the estimate and the results of a search as JSON data."""
    found = None if self.found is None else [_plan_json(p) for p in self.found]
    return _plan_json(self.plan) | {"found": found}


def _plan_json(p: "Plan") -> dict[str, Any]:
  t = p.config.training
  return {
    "model": p.config.model.model_name,
    "topology": {"name": p.target.name, "devices": p.target.devices},
    "mesh": p.mesh,
    "per_device_batch_size": t.per_device_batch_size,
    "remat_policy": t.remat_policy,
    "remat_offload": t.remat_offload,
    "classes": p.classes,
    "host_bytes": p.host,
    "bytes": p.bytes,
    "limit": p.limit,
    "flops": p.flops,
    "model_flops": p.model_flops,
    "memory_bytes": p.memory_bytes,
    "transfers": [asdict(x) for x in p.transfers],
    "roofline": None if p.roofline is None else asdict(p.roofline),
    "fits": p.fits,
  }


def _units(target: "Target") -> dict[str, str]:
  """Return the printed names of the units that bound a step on this machine."""
  if not isinstance(target, GpuHost):
    return UNITS["TPU"]
  card = CARDS.get(target.key)
  return UNITS["PCIe" if card is None or card.links is None or card.links <= _PCIE else "NVLink"]


def _in_a_line(p: "Plan", configured: "Plan") -> str:
  t, mesh = p.config.training, vars(p.config.mesh)
  axes = [f"{name}={size}" for name, size in mesh.items() if name.endswith("_parallelism") and size != 1]
  offload = [f"remat_offload={t.remat_offload}"] if t.remat_offload != configured.config.training.remat_offload else []
  values = [f"per_device_batch_size={t.per_device_batch_size}", f"remat_policy={t.remat_policy}", *offload, *axes]
  bound = ""
  if p.roofline is not None:
    limit = _units(p.target).get(p.roofline.binds, p.roofline.binds)
    bound = f", at most {p.roofline.mfu:.1%} MFU, limited by {limit}"
  return f"{' '.join(values)}: {size_words(p.bytes)}{bound}"


def plan(
  config: "Configuration",
  *overrides: str,
  topology: str | None = None,
  memory: str | None = None,
  num_slices: int = 1,
  search: bool = False,
  **keys: Any,
) -> Planned:
  """Estimate the table of ``compile_step`` from shapes, in seconds: memory by use, matrix products, transfers, bounds.

  Args:
    config: a configuration, as for ``load_config``.
    overrides: words that override the configuration.
    topology: a slice, such as "v6e-32", GPUs of a host, such as "h200-8", "rtx4090" or, for any other, "gpu-2", or CPU
      devices, such as "cpu-8", whose speed is not known.
    memory: memory of a GPU or CPU device, such as "24GB", instead of the table's value; without a topology, one GPU of any
      kind.
    num_slices: TPU: number of slices.
    search: also try meshes, batch sizes and remat policies, and return those that fit, fastest bound first.
    keys: the same as Python values.

  Raises:
    UserError: the topology is unknown, or the mesh does not fit it.
  """
  given = words(overrides, keys, plan)
  target = find_machine(topology, memory, cpus=True)
  if isinstance(target, Topology):
    if num_slices < 1:
      raise UserError(f"plan: num_slices={num_slices} is less than 1\n  fix: set num_slices=1 or more")
    target = replace(target, slices=num_slices)
  elif num_slices != 1:
    raise UserError(f"plan: num_slices={num_slices} is only for TPUs, and {target.name} is not a TPU\n  fix: leave it out")
  c = load_config(config, *given).config
  from maxtext_like.capacity import plan as by_arithmetic

  return Planned(by_arithmetic.plan(c, target), tuple(by_arithmetic.search(c, target)) if search else None)
