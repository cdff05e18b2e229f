"""``audit``: reads dtypes from the program of a train step, and checks that it honors the precision keys."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from maxtext_like.analysis.lowered import PLATFORMS
from maxtext_like.api.arguments import words
from maxtext_like.api.config import load_config
from maxtext_like.errors import UserError

if TYPE_CHECKING:
  from maxtext_like.analysis.audit_keys import KeyVerdict
  from maxtext_like.analysis.program_audit import Row, Unasked
  from maxtext_like.api.config import Configuration
  from maxtext_like.training.step.program import TrainProgram


@dataclass(frozen=True)
class Audit:
  """Result of an audit. As text: the tables.

  Attributes:
    program: the lowered program.
    platform: platform that it was lowered for.
    topology: TPU slice that it was compiled for; None if it was not compiled.
    rows: dtypes of operands, accumulators and results by named part, forward and backward.
    keys: a verdict for every precision key.
    unasked: operations in a dtype that no key asks for.
  """

  program: "TrainProgram"
  platform: str
  topology: str | None
  rows: "list[Row]"
  keys: "list[KeyVerdict]"
  unasked: "list[Unasked]"

  @property
  def honored(self) -> bool:
    """True if the program honors every key."""
    return not any(key.verdict == "not honored" for key in self.keys)

  def to_json(self) -> dict[str, Any]:
    """Return the tables as JSON data."""
    from maxtext_like.analysis import program_audit

    model = self.program.model
    about = {"model": model.config.model.model_name, "platform": self.platform, "topology": self.topology}
    kernels = {"kernels": [use.to_json() for use in model.kernels]}
    return about | kernels | program_audit.to_json(self.rows, self.keys, self.unasked)

  def __str__(self) -> str:
    from maxtext_like.sharding.mesh import in_words

    model, topology = self.program.model, self.topology
    c = model.config
    mesh = in_words(model.mesh.shape)
    what = f"compiled for {topology}" if topology else f"lowered for {self.platform}, before compilation"
    lines = [f"{c.model.model_name}, {c.precision.dtype}: train step {what}, mesh {mesh}"]
    lines += [f"attention: {use}" for use in model.kernels]
    table = [("site", "pass", "operation", "operands", "sum in", "result", "places")]
    table += [(r.site, r.stage, r.operation, r.operands, r.accumulation, r.output, str(r.places)) for r in self.rows]
    lines += ["", *_columns(table)]
    lines += [f"  {site}: {note}" for site, note in dict.fromkeys((r.site, r.note) for r in self.rows if r.note)]
    lines += ["", *_columns([("key", "value", "", "evidence")] + [(k.key, k.value, k.verdict, k.evidence) for k in self.keys])]
    lines += ["", "work in a dtype that no key asked for: " + ("" if self.unasked else "none")]
    lines += [f"  {u.places} x {u.operation} {u.dtypes} at {u.path}" for u in self.unasked]
    return "\n".join(lines)


def audit(
  config: "Configuration", *overrides: str, platform: str | None = None, topology: str | None = None, **keys: Any
) -> Audit:
  """Lower the train step for a platform, which this machine need not have, and read its program.

  Args:
    config: a configuration, as for ``load_config``.
    overrides: words that override the configuration.
    platform: "tpu", "cuda" or "cpu".
    topology: a TPU slice, such as "v6e-8": also compile for it with libtpu, and read the compiled program.
    keys: the same as Python values.

  Raises:
    UserError: the platform or slice does not exist, or layers of the configuration differ in precision.
  """
  from maxtext_like.capacity.topologies import find_topology

  given = words(overrides, keys, audit)
  if topology and platform not in (None, "tpu"):
    raise UserError(f"audit: topology {topology} is a TPU slice, but platform is {platform}\n  fix: leave one of them out")
  platform = platform or ("tpu" if topology else None)
  if platform not in PLATFORMS:
    said = f"platform {platform} is not one of" if platform else "no platform\n  fix: name one of"
    raise UserError(f"audit: {said} {', '.join(PLATFORMS)}")
  slice_ = find_topology(topology) if topology else None
  c = load_config(config, *given).config
  if c.precision.layer_precision:
    raise UserError(
      "audit: layer_precision sets different dtypes for layers, but a verdict covers all layers\n"
      "  fix: audit once without it, and once with its keys set for the model"
    )
  import jax

  from maxtext_like.analysis import audit_keys, lowered, program_audit
  from maxtext_like.models.build import precision_of
  from maxtext_like.numerics import hlo

  text = None
  if slice_ is None:
    program, module = lowered.lower(c, platform)
  else:
    program, module, text = lowered.compile_for(c, slice_)
  precision = precision_of(c.precision)
  leaves = jax.tree_util.tree_leaves_with_path(program.spec)
  weights = {f"state['params']{jax.tree_util.keystr(path)}": leaf.dtype for path, leaf in leaves}

  def judged(reading: hlo.Reading, compiled: bool) -> list[audit_keys.KeyVerdict]:
    return audit_keys.judge_keys(reading, precision, c.model, c.vision, weights=weights, compiled=compiled)

  reading = hlo.read_stablehlo(module)
  unasked = program_audit.unasked(reading, precision.dtype, audit_keys.asked_float32(precision))
  verdicts = judged(reading, compiled=False)
  if text is not None:
    reading = hlo.read_hlo(text)
    verdicts = audit_keys.together(verdicts, judged(reading, compiled=True))
  return Audit(program, platform, topology, program_audit.rows(reading), verdicts, unasked)


def _columns(table: list[tuple[str, ...]]) -> list[str]:
  widths = [max(len(row[i]) for row in table) for i in range(len(table[0]))]
  return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in table]
