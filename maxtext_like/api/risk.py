"""``risk``: estimates from weights which numbers overflow in a dtype. ``initial_risk``: attention scores of random weights."""

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from maxtext_like.api.arguments import Saved, place_of, require_number, words
from maxtext_like.api.config import load_config
from maxtext_like.config import hub
from maxtext_like.errors import UserError

if TYPE_CHECKING:
  from maxtext_like.analysis.risk.overflow_risk import Risk
  from maxtext_like.analysis.risk.parameters import Reader
  from maxtext_like.api.config import Configuration
  from maxtext_like.checkpoint.store.manifest import Manifest
  from maxtext_like.config.model import ModelConfig
  from maxtext_like.config.schema import Config
  from maxtext_like.layers.decoder import Decoder
  from maxtext_like.models.initial_values import InitialScores


@dataclass(frozen=True)
class Risks:
  """Estimated size of every quantity of a model and its headroom in each dtype, worst first. As text: a table and a summary.

  Attributes:
    dtype: dtype of the model.
    tokens: number of tokens for the expected maximum.
    risks: one entry for each quantity of each layer.
    notes: remarks on the checkpoint.
  """

  dtype: str
  tokens: int
  risks: "tuple[Risk, ...]"
  notes: tuple[str, ...]

  def __str__(self) -> str:
    return self.table()

  @property
  def overflows(self) -> "list[Risk]":
    """Quantities whose expected size overflows and that no key protects."""
    from maxtext_like.analysis.risk.overflow_risk import unprotected_overflows

    return unprotected_overflows(self.risks)

  def table(self, rows: int = 20) -> str:
    """Return the worst ``rows`` rows of the table (0: all), and a summary."""
    from maxtext_like.analysis.risk.overflow_risk import table

    return f"{table(self.risks, rows)}\n{summary(list(self.risks), self.dtype)}"

  def to_json(self) -> dict[str, Any]:
    """Return every row as JSON data, with unrounded numbers."""
    from maxtext_like.analysis.risk.overflow_risk import records

    return {"dtype": self.dtype, "tokens": self.tokens, "risks": records(self.risks)}


def risk(checkpoint: str | Path | Saved, *overrides: str, tokens: int = 4096, **keys: Any) -> Risks:
  """Read the weights of a checkpoint, one tensor at a time, and estimate how large its numbers become. The model is not run.

  Args:
    checkpoint: a Hugging Face checkpoint or its name in the local cache, a run, one of its checkpoints, or an imported
      checkpoint.
    overrides: words that override its configuration, such as ``"dtype=float16"``.
    tokens: number of tokens for the expected maximum, at least 100.
    keys: the same as Python values.

  Raises:
    UserError: there is no checkpoint or a damaged one, an override is invalid, or the family has no formula.
  """
  from maxtext_like.analysis.risk.model_risk import measure
  from maxtext_like.analysis.risk.overflow_risk import assess

  given = words(overrides, keys, risk)
  require_number(risk, "tokens", tokens, whole=True)
  if tokens < 100:
    raise UserError(
      f"risk: tokens={tokens}: at least 100 tokens are needed to estimate the maximum", fix="pass tokens=100 or more"
    )
  model, decoder, read, notes = open_checkpoint(place_of(checkpoint, "checkpoint"), given)
  found = assess(measure(model, decoder, read, tokens), decoder.precision)
  return Risks(decoder.precision.dtype, tokens, tuple(found), tuple(notes))


def summary(risks: list["Risk"], dtype: str) -> str:
  """Return a summary of one or a few lines."""
  from maxtext_like.analysis.risk.overflow_risk import ALWAYS

  lines = []
  meanings = (
    ("overflow", f"{dtype} is expected to overflow in"),
    ("possible", "some input may overflow in"),
    ("coarse", "rounding is coarse in"),
  )
  for verdict, meaning in meanings:
    found = [risk for risk in risks if risk.verdict == verdict]
    if found:
      keys = sorted({key for risk in found for key in risk.key.split()})
      lines.append(f"{meaning} {len(found)} of {len(risks)} quantities; set {', '.join(keys)}")
  kept = [risk.key for risk in risks if risk.verdict == "safe" and risk.key not in ("", ALWAYS)]
  needed = sorted({key for keys in kept for key in keys.split(", ")})
  if needed:
    lines.append(f"safe because of {', '.join(needed)}")
  if not any(risk.verdict in ("overflow", "possible") for risk in risks):
    lines.insert(0, f"{dtype}: no quantity can overflow")
  return "\n".join(lines)


def open_checkpoint(directory: Path, overrides: list[str]) -> tuple["ModelConfig", "Decoder", "Reader", list[str]]:
  """Return configuration and decoder of a checkpoint, a function that reads parts of its parameters, and notes.

  Raises:
    UserError: there is no checkpoint or a damaged one, or an override is invalid.
  """
  if not directory.is_dir():
    raise UserError(
      f"{directory}: no such directory{hub.advice(str(directory))}",
      fix=hub.fix(str(directory)),
    )
  if (directory / "config.json").is_file():
    from maxtext_like.api.forward import open_weights
    from maxtext_like.checkpoint.huggingface.config import read_config
    from maxtext_like.checkpoint.huggingface.model_file import load_checkpoint_config

    given = [*(["use_multimodal=true"] if read_config(directory).has_tower else []), *overrides]
    config, loaded = load_checkpoint_config(directory, given, length=2)  # no batch is run
    weights = open_weights(directory, config, loaded)
    read_part, notes = weights.part, [*loaded.notes, *weights.notes]
    if loaded.config.adapter.base_weights:
      from maxtext_like.checkpoint.adapters.adapted_weights import stored_as
      from maxtext_like.checkpoint.effective_weights import EffectiveWeights
      from maxtext_like.models.model import make_model

      model = stored_as(make_model(loaded.config, runs_attention=False), loaded.config.adapter)
      read_part = EffectiveWeights(read_part, model.base)
    return loaded.config.model, weights.decoder, read_part, notes
  from maxtext_like.checkpoint.adapters.adapter_step import holds_adapter_alone
  from maxtext_like.checkpoint.store.manifest import ANOTHER, DamageError, read
  from maxtext_like.checkpoint.store.partial_read import StoredArrays
  from maxtext_like.checkpoint.store.stored_config import load_stored
  from maxtext_like.checkpoint.weight_sources import find_step
  from maxtext_like.config.load import load_config as load_file
  from maxtext_like.models.build import build_decoder, precision_of

  step = find_step(directory)
  if step is None:
    raise UserError(
      f"{directory}: neither a run with a complete checkpoint nor a Hugging Face checkpoint (config.json)\n"
      "  fix: name a run directory, one of its checkpoints/N, or a directory with config.json and safetensors"
    )
  home = step.absolute().parent.parent
  try:
    # An imported checkpoint has no configuration of a run; the step has that of the model.
    ran = home / "config.yml"
    stored = read(step)
    config = (load_file(ran, overrides) if ran.is_file() else load_stored(stored.config, str(step), overrides)).config
  except DamageError as error:
    raise UserError(f"{step}: not a complete checkpoint: {error}", fix=ANOTHER) from None
  decoder = build_decoder(config.model, precision_of(config.precision), vision=config.vision)
  reader = _adapted(step, stored, config) if holds_adapter_alone(stored) else StoredArrays(step).parameter
  return config.model, decoder, reader, [f"step {step.name} of {home}"]


def _adapted(step: Path, stored: "Manifest", config: "Config") -> "Reader":
  """Return a function that reads the weights below an adapter as they are stored, with the adapter added."""
  import numpy as np

  from maxtext_like.checkpoint.adapters.adapted_weights import stored_as
  from maxtext_like.checkpoint.adapters.adapter_step import EXTRA, Base, read_adapter
  from maxtext_like.checkpoint.effective_weights import EffectiveWeights
  from maxtext_like.checkpoint.huggingface.tensors import flatten
  from maxtext_like.checkpoint.weight_sources import local_directory
  from maxtext_like.models.model import make_model

  model = make_model(config, runs_attention=False)
  below = Base.from_json(stored.extra[EXTRA])
  if below.source is None:
    drawn = dict(flatten(model.lower_init().compile()(np.uint32(below.seed % 2**32))))
    read = lambda path, index: np.asarray(drawn[path][index], np.float32)
  else:
    *_, read, _ = open_checkpoint(local_directory(below.source), [])
  adapter, factors = read_adapter(step, stored, model)
  return EffectiveWeights(read, stored_as(model, config.adapter).base, adapter, factors)


@dataclass(frozen=True)
class InitialRisk:
  """Attention scores before training. As text: a table, and a note with the fix if attention starts saturated.

  Attributes:
    init_scheme: scheme of the initial values.
    scores: scores of every group of equal layers.
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
    """Return every row as JSON data, with unrounded numbers."""
    rows = [asdict(s) | {"saturated": s.saturated} for s in self.scores]
    return {"init_scheme": self.init_scheme, "scores": rows, "note": self.note}


def initial_risk(model: "Configuration", *overrides: str, **keys: Any) -> InitialRisk:
  """Compute the standard deviation of attention scores before training. No array is made.

  Args:
    model: a configuration, as for ``load_config``.
    overrides: words that override the configuration, such as ``"init_scheme=maxtext"``.
    keys: the same as Python values.

  Raises:
    UserError: the configuration is invalid.
  """
  from maxtext_like.models.build import build_decoder, precision_of
  from maxtext_like.models.initial_values import initial_scores, saturation

  config = load_config(model, *overrides, **keys).config
  training = config.training
  layers = build_decoder(config.model, precision_of(config.precision), init_scheme=training.init_scheme).layers
  length = training.max_target_length
  return InitialRisk(training.init_scheme, tuple(initial_scores(layers, length)), saturation(layers, length))
