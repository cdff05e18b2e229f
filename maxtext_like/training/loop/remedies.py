"""What to try after a step that was not finite: one list, from one rule, whether its cause is known or only what failed."""

from collections.abc import Collection
from dataclasses import dataclass

from maxtext_like.config.precision_keys import REMEDIES, PrecisionKey
from maxtext_like.config.schema import Config
from maxtext_like.training.loop.divergence import lower_rate
from maxtext_like.training.optimizers.registry import make_rule


@dataclass(frozen=True)
class Spot:
  """Where x-ray saw the first non-finite number arise.

  Attributes:
    scopes: the named scopes around it.
    direction: "forward", "backward", "recomputed" or "update".
    dtype: of the number.
  """

  scopes: Collection[str]
  direction: str
  dtype: str

  @property
  def failed(self) -> str:
    """The part of the step that it spoils."""
    update = "parameters" if "parameters" in self.scopes else "optimizer"
    return {"forward": "loss", "update": update}.get(self.direction, "gradients")

  @property
  def narrow(self) -> bool:
    """Whether a wider dtype would have held it, perhaps."""
    return self.dtype not in ("float32", "float64")

  def concerns(self, key: PrecisionKey) -> bool:
    """Whether a key acts here."""
    if not self.narrow:
      return False
    if self.failed == "parameters":
      return key.repairs == "parameters"
    return not set(self.scopes).isdisjoint(key.scopes) or self.direction in key.directions


def what_to_try(config: Config, failed: str, cause: Spot | None = None) -> list[str]:
  """Keys, each with its value, that keep the failed part of a step finite, and what else can be done; most local first.

  Args:
    config: of the run; what is safe already is left out.
    failed: "loss0", "loss1", "loss", "gradients", "parameters", "optimizer" (state that the update makes), "state" (before
      the update).
    cause: where it began; of the precision keys only those of its named scopes are listed then, and nothing else where
      there are some.
  """
  p, t = config.precision, config.training
  if failed == "state":
    return [
      "go on from an earlier checkpoint: move the newest away",
      "init_from= another checkpoint and a new run_name, which begins with a fresh optimizer",
    ]
  found = [key.remedy(vars(p)) for key in REMEDIES if _helps(key, config, failed, cause)]
  if failed == "parameters" and config.adapter.trained:  # which is float32 whatever weights are
    found = []
  elif failed == "parameters" and t.stochastic_rounding:  # of 16 bits alone
    found = [f"{key} stochastic_rounding=false" for key in found]
  slower = lower_rate(t)
  if failed == "optimizer":
    if t.gradient_clipping_threshold == 0:
      found.append("gradient_clipping_threshold=1")
    if p.weight_dtype == "float16" and t.mu_dtype is None and make_rule(t).first and not config.adapter.trained:
      found.append("mu_dtype=float32")
    return [*found, "a look at the data and the loss: its gradients are enormous"]
  if failed == "parameters":
    return [*found, slower]
  if failed == "gradients" and (p.dtype if cause is None else cause.dtype) == "float16":
    found.append(f"a lower loss_scale_init (now {t.loss_scale_init:g})")
  if cause is not None and found:
    return found
  wider = ["dtype=bfloat16", "dtype=float32"] if p.dtype == "float16" else ["dtype=float32"] if p.dtype != "float32" else []
  if cause is not None and cause.narrow and wider:
    return wider[:1]
  found += wider
  if failed != "loss0":
    found.append(slower)
  elif not wider:
    found.append("a look at the weights: every product is in float32 already, so they are far too large or not finite")
  return found


def _helps(key: PrecisionKey, config: Config, failed: str, cause: Spot | None) -> bool:
  values = vars(config.precision)
  if key.lacking(config.model, config.vision) or key.safe(values):
    return False
  if cause is not None:
    return cause.concerns(key)
  if key.repairs in ("forward", "hides"):  # in float32 these keep rounding small, and there is nothing to keep finite
    return failed.startswith(("loss", "gradients")) and (values["dtype"] != "float32" or key.safer == "float32")
  return key.repairs == failed
