"""Lists remedies: the keys to change after a non-finite step (from its failed part or its exact cause), or after a rise."""

from collections.abc import Collection
from dataclasses import dataclass

from maxtext_like.config.precision_keys import REMEDIES, PrecisionKey
from maxtext_like.config.schema import Config
from maxtext_like.config.training_keys import TrainingConfig
from maxtext_like.training.optimizers.registry import make_rule


@dataclass(frozen=True)
class Spot:
  """The place where the x-ray found the first non-finite number.

  Attributes:
    scopes: the named scopes around the operation.
    direction: "forward", "backward", "recomputed" or "update".
    dtype: dtype of the number.
  """

  scopes: Collection[str]
  direction: str
  dtype: str

  @property
  def failed(self) -> str:
    """The part of the step that becomes non-finite."""
    update = "parameters" if "parameters" in self.scopes else "optimizer"
    return {"forward": "loss", "update": update}.get(self.direction, "gradients")

  @property
  def narrow(self) -> bool:
    """True if a wider dtype might have represented the number."""
    return self.dtype not in ("float32", "float64")

  def concerns(self, key: PrecisionKey) -> bool:
    """Return True if a precision key acts at this place."""
    if not self.narrow:
      return False
    if self.failed == "parameters":
      return key.repairs == "parameters"
    return not set(self.scopes).isdisjoint(key.scopes) or self.direction in key.directions


def step_remedies(config: Config, failed: str, cause: Spot | None = None) -> list[str]:
  """List keys with values that keep the failed part of a step finite, and other remedies; the most local ones first.

  Args:
    config: configuration of the run; keys that already have the safe value are left out.
    failed: "loss0", "loss1", "loss", "gradients", "parameters", "optimizer" (the updated optimizer state) or "state" (the
      state before the update).
    cause: place of the first non-finite number. If precision keys act there, only these are listed.
  """
  # A state that is already non-finite cannot be fixed by a key.
  p, t = config.precision, config.training
  if failed == "state":
    return [
      "resume from an earlier checkpoint: move the newest one out of the checkpoints folder",
      "init_from= with another checkpoint and a new run_name, which starts with a fresh optimizer state",
    ]
  # Precision keys. They do not help a trained adapter, which is always float32; rounding helps 16-bit weights only.
  found = [key.remedy(vars(p)) for key in REMEDIES if _helps(key, config, failed, cause)]
  if failed == "parameters" and config.adapter.trained:
    found = []
  elif failed == "parameters" and t.stochastic_rounding:
    found = [f"{key} stochastic_rounding=false" for key in found]
  # Keys for the failed part of the step.
  slower = lower_rate(t)
  # Moments overflow because gradients are extremely large.
  if failed == "optimizer":
    if t.gradient_clipping_threshold == 0:
      found.append("gradient_clipping_threshold=1")
    if p.weight_dtype == "float16" and t.mu_dtype is None and make_rule(t).first and not config.adapter.trained:
      found.append("mu_dtype=float32")
    return [*found, "check the data and the loss: the gradients are extremely large"]
  if failed == "parameters":
    return [*found, slower]
  # The loss scale multiplies gradients before they are computed in float16.
  if failed == "gradients" and (p.dtype if cause is None else cause.dtype) == "float16":
    found.append(f"a lower loss_scale_init (now {t.loss_scale_init:g})")
  # Wider dtypes.
  # For a known cause the local keys are enough.
  if cause is not None and found:
    return found
  # A wider dtype helps at any place for which no single key is known.
  wider = ["dtype=bfloat16", "dtype=float32"] if p.dtype == "float16" else ["dtype=float32"] if p.dtype != "float32" else []
  if cause is not None and cause.narrow and wider:
    return wider[:1]
  found += wider
  if failed != "loss0":
    found.append(slower)
  elif not wider:
    found.append("check the weights: every product is already in float32, so they are extremely large or not finite")
  return found


def _helps(key: PrecisionKey, config: Config, failed: str, cause: Spot | None) -> bool:
  # Keys of parts that the model lacks, and keys that already have the safe value.
  values = vars(config.precision)
  if key.lacking(config.model, config.vision) or key.safe(values):
    return False
  if cause is not None:
    return cause.concerns(key)
  if key.repairs in ("forward", "hides"):  # with dtype=float32 these keys only reduce rounding errors
    return failed.startswith(("loss", "gradients")) and (values["dtype"] != "float32" or key.safer == "float32")
  return key.repairs == failed


def after_a_rise(config: Config) -> list[str]:
  """Remedies after a loss or parameter norm that rose by an order of magnitude in one step, the most likely cause first."""
  t = config.training
  # A high learning rate is the most likely cause, missing warm-up or clipping the next ones.
  found = [lower_rate(t)]
  if t.warmup_steps_fraction == 0:
    found.append("warmup_steps_fraction=0.1")
  if t.gradient_clipping_threshold == 0:
    found.append("gradient_clipping_threshold=1")
  return [*found, "check the data of this step"]


def lower_rate(training: TrainingConfig) -> str:
  """The remedy for numbers that grow from step to step."""
  return f"a lower learning_rate (now {training.learning_rate:g})"
