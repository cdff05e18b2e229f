"""What a checkpoint's numbers can become in a dtype, told from its weights alone."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from maxtext_like.api.arguments import Saved, place_of, require_number, words
from maxtext_like.config import hub
from maxtext_like.errors import UserError

if TYPE_CHECKING:
  from maxtext_like.analysis.risk.overflow_risk import Risk
  from maxtext_like.analysis.risk.parameters import Reader
  from maxtext_like.checkpoint.store.manifest import Manifest
  from maxtext_like.config.model import ModelConfig
  from maxtext_like.config.schema import Config
  from maxtext_like.layers.decoder import Decoder


@dataclass(frozen=True)
class Risks:
  """Every quantity of a model against the limits of the dtypes, worst first. As text: the table, and what it comes to.

  Attributes:
    dtype: of the model.
    tokens: that expected sizes are over.
    risks: one for each quantity of each layer.
    notes: on what was read.
  """

  dtype: str
  tokens: int
  risks: "tuple[Risk, ...]"
  notes: tuple[str, ...]

  def __str__(self) -> str:
    return self.table()

  @property
  def overflows(self) -> "list[Risk]":
    """Those whose expected size is beyond what holds it, and that no key protects."""
    from maxtext_like.analysis.risk.overflow_risk import unprotected_overflows

    return unprotected_overflows(self.risks)

  def table(self, rows: int = 20) -> str:
    """The worst ``rows`` of the table (0: all), and a summary."""
    from maxtext_like.analysis.risk.overflow_risk import table

    return f"{table(self.risks, rows)}\n{summary(list(self.risks), self.dtype)}"

  def to_json(self) -> dict[str, Any]:
    """Every row, with numbers in full."""
    from maxtext_like.analysis.risk.overflow_risk import records

    return {"dtype": self.dtype, "tokens": self.tokens, "risks": records(self.risks)}


def risk(checkpoint: str | Path | Saved, *overrides: str, tokens: int = 4096, **keys: Any) -> Risks:
  """Reads the weights of a checkpoint, one tensor at a time, and tells how large its numbers can become. Nothing is run.

  Args:
    checkpoint: a Hugging Face checkpoint or its name in this machine's cache, a run, one of its checkpoints, or what
      ``import_checkpoint`` made.
    overrides: words laid over its configuration, as ``"dtype=float16"``.
    tokens: that an expected maximum is over, at least 100.
    keys: the same as Python values.

  Raises:
    UserError: no checkpoint, a damaged one, or overrides that do not fit it; a family without a formula.
  """
  from maxtext_like.analysis.risk.model_risk import measure
  from maxtext_like.analysis.risk.overflow_risk import assess

  given = words(overrides, keys, risk)
  require_number(risk, "tokens", tokens, whole=True)
  if tokens < 100:
    raise UserError(f"risk: tokens={tokens}: too few for an expected maximum\n  fix: 100 or more")
  model, decoder, read, notes = open_checkpoint(place_of(checkpoint, "checkpoint"), given)
  found = assess(measure(model, decoder, read, tokens), decoder.precision)
  return Risks(decoder.precision.dtype, tokens, tuple(found), tuple(notes))


def summary(risks: list["Risk"], dtype: str) -> str:
  """What it comes to, in one line or a few."""
  from maxtext_like.analysis.risk.overflow_risk import ALWAYS

  lines = []
  meanings = (
    ("overflow", f"{dtype} is expected to overflow in"),
    ("possible", "no input can be ruled out to overflow in"),
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
  """The configuration and decoder of a checkpoint, a function that reads parts of its parameters, and notes for the user.

  Raises:
    UserError: no checkpoint, a damaged one, or overrides that do not fit it.
  """
  if not directory.is_dir():
    raise UserError(f"{directory}: no such directory{hub.advice(str(directory))}")
  if (directory / "config.json").is_file():
    from maxtext_like.api.forward import open_weights
    from maxtext_like.checkpoint.huggingface.config import read_config
    from maxtext_like.checkpoint.huggingface.model_file import load_checkpoint_config

    given = [*(["use_multimodal=true"] if read_config(directory).has_tower else []), *overrides]
    config, loaded = load_checkpoint_config(directory, given, length=2)  # no rows are run
    weights = open_weights(directory, config, loaded)
    read_part, notes = weights.part, [*loaded.notes, *weights.notes]
    if loaded.config.adapter.base_weights:
      from maxtext_like.checkpoint.adapters.adapted_weights import with_base
      from maxtext_like.checkpoint.effective_weights import WeightsAtWork
      from maxtext_like.models.model import make_model

      model = with_base(make_model(loaded.config, runs_attention=False), loaded.config.adapter)
      read_part = WeightsAtWork(read_part, model.base)
    return loaded.config.model, weights.decoder, read_part, notes
  from maxtext_like.checkpoint.adapters.adapter_step import holds_adapter_alone
  from maxtext_like.checkpoint.store.manifest import DamageError, read
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
    # What import made has no configuration of a run; the step holds the model's own.
    ran = home / "config.yml"
    stored = read(step)
    config = (load_file(ran, overrides) if ran.is_file() else load_stored(stored.config, str(step), overrides)).config
  except DamageError as error:
    raise UserError(f"{step}: not a complete checkpoint: {error}") from None
  decoder = build_decoder(config.model, precision_of(config.precision), vision=config.vision)
  reader = _adapted(step, stored, config) if holds_adapter_alone(stored) else StoredArrays(step).parameter
  return config.model, decoder, reader, [f"step {step.name} of {home}"]


def _adapted(step: Path, stored: "Manifest", config: "Config") -> "Reader":
  """What reads the weights below a step's adapter, as they are stored there, with the adapter added."""
  import numpy as np

  from maxtext_like.checkpoint.adapters.adapted_weights import with_base
  from maxtext_like.checkpoint.adapters.adapter_step import EXTRA, Base, read_adapter
  from maxtext_like.checkpoint.effective_weights import WeightsAtWork
  from maxtext_like.checkpoint.huggingface.tensors import flatten
  from maxtext_like.checkpoint.weight_sources import on_this_machine
  from maxtext_like.models.model import make_model

  model = make_model(config, runs_attention=False)
  below = Base.from_json(stored.extra[EXTRA])
  if below.source is None:
    drawn = dict(flatten(model.lower_init().compile()(np.uint32(below.seed % 2**32))))
    read = lambda path, index: np.asarray(drawn[path][index], np.float32)
  else:
    *_, read, _ = open_checkpoint(on_this_machine(below.source), [])
  adapter, factors = read_adapter(step, stored, model)
  return WeightsAtWork(read, with_base(model, config.adapter).base, adapter, factors)
