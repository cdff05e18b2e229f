"""Section ``training:``: the training step, the optimizer and the learning-rate schedule."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Literal

from maxtext_like.config.key_class import SelectsTrained, Shape, StoredDtype, TrainingOnly
from maxtext_like.config.problems import Checked, Problem, above_zero, at_least
from maxtext_like.config.vision import VisionTower
from maxtext_like.layers.kernels import names as kernels


@dataclass(frozen=True, kw_only=True)
class TrainingConfig(Checked):
  """Section ``training:``. Lengths are in tokens, batches in rows."""

  steps: int | None
  epochs: int | None
  seed: int
  init_scheme: Literal["depth_scaled", "maxtext"]
  module_api: Literal["nnx", "linen"]
  scan_layers: bool
  remat_policy: Literal["none", "minimal", "save_mlp", "save_outputs", "save_attention", "full"]
  remat_offload: Literal["none", "layer_inputs", "kept", "all"]
  grouped_product: kernels.GroupedChoice
  norm_kernel: kernels.NormChoice
  attention: kernels.AttentionChoice
  per_device_batch_size: int | float
  max_target_length: int
  gradient_accumulation_steps: int
  objective: str  # one of choices.OBJECTIVES
  opt_type: Shape[str]  # one of choices.OPTIMIZERS
  learning_rate: float
  lr_schedule_type: Literal["cosine", "linear", "constant", "wsd"]
  lr_schedule_steps: int | None
  warmup_steps_fraction: float
  learning_rate_final_fraction: float
  wsd_decay_steps_fraction: float
  adam_b1: float
  adam_b2: float
  adam_eps: float
  adam_weight_decay: float
  mu_dtype: StoredDtype[Literal["float32", "bfloat16", "dynamic8"] | None]
  nu_dtype: StoredDtype[Literal["float32", "bfloat16", "dynamic8"]]
  stochastic_rounding: bool
  sgd_momentum: Shape[float]
  adafactor_momentum_rank: Shape[int]
  gradient_clipping_threshold: float
  clip: Literal["exact", "running", "layer"]
  optimizer_in_backward: Shape[bool]
  optimizer_memory_host_offload: bool
  z_loss_multiplier: float
  num_vocab_tiling: int
  trainable_parameters_mask: TrainingOnly[Annotated[tuple[str, ...], SelectsTrained()]]
  vision_tower: TrainingOnly[Annotated[VisionTower | None, SelectsTrained()]]
  finite_check_steps: int
  max_skipped_steps: int
  replay_failed_step: bool
  spike_factor: float
  spike_window: int
  max_spike_rollbacks: int
  early_stopping_patience: int
  early_stopping_threshold: float
  loss_scale_init: float

  def problems(self) -> Iterator[Problem]:
    """Yield a problem for every invalid value or combination of values."""
    if self.steps is None and self.epochs is None:
      yield Problem("neither steps nor epochs is set", ("steps", "epochs"), "set one of them, as in steps=100 or epochs=3")
    yield from at_least(self, 1, "steps", "epochs", "gradient_accumulation_steps", "loss_scale_init")
    yield from at_least(self, 1, "lr_schedule_steps")
    yield from at_least(self, 2, "max_target_length")
    yield from at_least(self, 0, "seed", "num_vocab_tiling", "max_skipped_steps", "z_loss_multiplier")
    yield from at_least(self, 0, "adafactor_momentum_rank")
    yield from at_least(self, 0, "adam_weight_decay", "gradient_clipping_threshold")
    yield from at_least(self, -1, "finite_check_steps")
    yield from above_zero(self, "per_device_batch_size", "learning_rate", "adam_eps")
    yield from at_least(self, 1, "spike_window", "max_spike_rollbacks")
    yield from self._offload_problems()
    if self.spike_factor and not self.spike_factor > 1:
      yield Problem(
        f"spike_factor = {self.spike_factor} would treat ordinary losses as spikes",
        ("spike_factor",),
        "set it above 1, or 0 for off",
      )
    for name in ("warmup_steps_fraction", "learning_rate_final_fraction", "wsd_decay_steps_fraction"):
      if not 0 <= getattr(self, name) <= 1:
        yield Problem(f"{name} = {getattr(self, name)} is outside 0 to 1", (name,), fix=f"set {name} from 0 to 1")
    for name in ("adam_b1", "adam_b2", "sgd_momentum"):
      if not 0 <= getattr(self, name) < 1:
        yield Problem(f"{name} = {getattr(self, name)} is outside [0, 1)", (name,), fix=f"set {name} to 0 or more and below 1")
    if self.nu_dtype == "bfloat16" and self.adam_b2 > 1 - 2**-8 and self.opt_type == "adamw":
      yield Problem(
        f"nu_dtype = bfloat16 cannot represent the decay of adam_b2 = {self.adam_b2}: a step changes a value by less than half "
        "a unit in the last place, so it never decreases",
        ("nu_dtype", "adam_b2"),
        "set nu_dtype=dynamic8 (one scale per block decays), nu_dtype=float32, or adam_b2 to at most 0.996",
      )  # fmt: skip
    yield from at_least(self, 0, "early_stopping_patience", "early_stopping_threshold")
    if self.early_stopping_threshold > 0 and not self.early_stopping_patience:
      yield Problem(
        f"early_stopping_threshold = {self.early_stopping_threshold} has no effect with early_stopping_patience = 0",
        ("early_stopping_threshold", "early_stopping_patience"),
        "set the number of evaluations to wait for a lower loss, as in early_stopping_patience=3",
      )  # fmt: skip
    if self.lr_schedule_type == "wsd" and self.warmup_steps_fraction + self.wsd_decay_steps_fraction > 1:
      yield Problem(
        f"warmup_steps_fraction = {self.warmup_steps_fraction} and wsd_decay_steps_fraction = "
        f"{self.wsd_decay_steps_fraction} are together more than 1, the complete schedule",
        ("warmup_steps_fraction", "wsd_decay_steps_fraction"),
        fix="lower one of them",
      )
    for pattern in self.trainable_parameters_mask:
      try:
        re.compile(pattern)
      except re.error as error:
        yield Problem(
          f"trainable_parameters_mask: {pattern!r} is not a regular expression: {error}",
          ("trainable_parameters_mask",),
          fix="correct the expression, or write a part of a parameter's name",
        )

  def _offload_problems(self) -> Iterator[Problem]:
    keys, said = (
      ("remat_offload", "remat_policy"),
      f"remat_offload = {self.remat_offload} with remat_policy: {self.remat_policy}",
    )
    kept = "full" if self.remat_offload == "layer_inputs" else "save_outputs"
    if self.remat_offload != "none" and self.remat_policy == "none":
      yield Problem(
        f"{said}, which keeps all activations on the device", keys,
        f"set another remat_policy, as in remat_policy={kept}, or leave remat_offload out",
      )  # fmt: skip
    if self.remat_offload in ("kept", "all") and self.remat_policy == "full":
      yield Problem(
        f"{said}, which keeps only the inputs of layers", keys,
        "set remat_offload=layer_inputs, or a remat_policy that keeps more, as in remat_policy=save_outputs",
      )  # fmt: skip

  @property
  def last_step(self) -> int:
    """Index of the last step. A run with ``epochs`` must replace it by ``steps`` first (``training.batches.counted``)."""
    assert self.steps is not None, "epochs are set, and steps have not been computed yet"
    return self.steps
