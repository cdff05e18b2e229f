"""Attention scores of random weights, from a configuration alone: ``maxtext-like risk CONFIG``."""

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from maxtext_like.api.configuration import load_config

if TYPE_CHECKING:
  from maxtext_like.api.configuration import Configuration
  from maxtext_like.models.initial_values import InitialScores


@dataclass(frozen=True)
class InitialRisk:
  """Attention scores before training. As text: a table, and a note with the fix if attention starts saturated.

  Attributes:
    init_scheme: how initial values are chosen.
    scores: of every run of equal layers.
    note: the problem and its fix; None if no layer starts saturated.
  """

  init_scheme: str
  scores: "tuple[InitialScores, ...]"
  note: str | None

  def __str__(self) -> str:
    lines = [f"attention scores of random weights, init_scheme={self.init_scheme}", "layers    stddev  keys    softmax"]
    for s in self.scores:
      layers = f"{s.first}-{s.last}" if s.last > s.first else str(s.first)
      lines.append(f"{layers:<9} {s.stddev:<7.3g} {s.keys:<7} {'nearly one-hot' if s.saturated else 'spread'}")
    return "\n".join([*lines, self.note or "no layer starts saturated"])

  def to_json(self) -> dict[str, Any]:
    """Every row, with numbers in full."""
    rows = [asdict(s) | {"saturated": s.saturated} for s in self.scores]
    return {"init_scheme": self.init_scheme, "scores": rows, "note": self.note}


def initial_risk(model: "Configuration", *overrides: str, **keys: Any) -> InitialRisk:
  """Compute the standard deviation of attention scores before training. No array is made.

  Args:
    model: a configuration, as for ``load_config``.
    overrides: words laid over it, as ``"init_scheme=maxtext"``.
    keys: the same as Python values.

  Raises:
    UserError: anything wrong with the configuration.
  """
  from maxtext_like.models.build import build_decoder, precision_of
  from maxtext_like.models.initial_values import initial_scores, saturation

  config = load_config(model, *overrides, **keys).config
  training = config.training
  layers = build_decoder(config.model, precision_of(config.precision), init_scheme=training.init_scheme).layers
  length = training.max_target_length
  return InitialRisk(training.init_scheme, tuple(initial_scores(layers, length)), saturation(layers, length))
