"""Section ``adapter:``: low-rank adapters (LoRA), and the storage format of the weights below them."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal

from maxtext_like.config.key_class import Shape
from maxtext_like.config.problems import Checked, Problem, above_zero, at_least

TABLES = ("embed_tokens", "lm_head")
"""Allowed entries of ``modules_to_save``."""


@dataclass(frozen=True, kw_only=True)
class AdapterConfig(Checked):
  """Section ``adapter:``: low-rank adapters (LoRA) that are trained instead of the weights."""

  lora_rank: Shape[int]
  lora_alpha: Shape[float | None]
  lora_rslora: Shape[bool]
  lora_dora: Shape[bool]
  lora_dropout: float
  lora_modules: Shape[tuple[str, ...]]
  modules_to_save: Shape[tuple[str, ...]]
  lora_rank_pattern: Shape[dict[str, int] | None] = field(hash=False)
  lora_alpha_pattern: Shape[dict[str, float] | None] = field(hash=False)
  lora_from: str | None
  base_weights: Shape[Literal["bfloat16", "nf4", "int8", "fp8_block"] | None]
  base_weights_modules: Shape[tuple[str, ...]]

  def problems(self) -> Iterator[Problem]:
    """Yield a problem for every invalid value or combination of values."""
    yield from at_least(self, 0, "lora_rank")
    yield from above_zero(self, "lora_alpha")
    for key in ("lora_rank_pattern", "lora_alpha_pattern"):
      for entry, value in (getattr(self, key) or {}).items():
        if value <= 0:
          yield Problem(
            f"{key}: {entry}: {value:g} is not above 0", (key,), "set it above 0, or remove these weights from lora_modules"
          )
    if self.lora_from == "":
      yield Problem("lora_from is empty", ("lora_from",), "name a directory, or write null for a new adapter")
    if not 0 <= self.lora_dropout < 1:
      yield Problem(
        f"lora_dropout = {self.lora_dropout} is outside [0, 1)",
        ("lora_dropout",),
        fix="set lora_dropout to 0 or more and below 1",
      )
    if self.lora_rank and not self.lora_modules:
      yield Problem(
        f"lora_rank = {self.lora_rank} with an empty lora_modules would train nothing", ("lora_rank", "lora_modules"),
        "name weights, as in lora_modules=[all-linear] or lora_modules=[q_proj, v_proj]",
      )  # fmt: skip
    for name in sorted(set(self.modules_to_save) - set(TABLES)):
      yield Problem(
        f"modules_to_save: '{name}' is not one of {', '.join(TABLES)}", ("modules_to_save",),
        "name linear maps in lora_modules; to train a vision tower set vision_tower=trained or vision_tower=projector",
      )  # fmt: skip
    if self.base_weights_modules and not self.base_weights:
      yield Problem(
        "base_weights_modules has no effect without base_weights",
        ("base_weights_modules", "base_weights"), "set the storage format, as in base_weights=nf4, or leave it out",
      )  # fmt: skip
    if not self.lora_rank:
      of_it = () if self.lora_from else ("lora_dropout",)  # allowed with lora_from too, as base_weights (``rules``)
      patterns = ("lora_rank_pattern", "lora_alpha_pattern")
      for name in ("lora_alpha", "lora_rslora", "lora_dora", "modules_to_save", *patterns, *of_it):
        if value := getattr(self, name):
          shown = f"[{', '.join(value)}]" if isinstance(value, tuple) else str(value).lower()
          said = f"{name} = {shown} has no effect with"
          if self.lora_from:
            yield Problem(f"{said} lora_from, whose adapter has its own value", (name, "lora_from"), "leave it out")
            continue
          yield Problem(
            f"{said} lora_rank: 0", (name, "lora_rank"),
            "set lora_rank to the rank of the adapter, as in lora_rank=16, or leave it out",
          )  # fmt: skip

  @property
  def trained(self) -> bool:
    """True if an adapter is trained, either a new one or the one of ``lora_from``."""
    return bool(self.lora_rank or self.lora_from)

  @property
  def alpha(self) -> float:
    """``lora_alpha``, or ``lora_rank`` if it is null."""
    return self.lora_rank if self.lora_alpha is None else self.lora_alpha

  def scale(self, rank: int, alpha: float) -> float:
    """Return the factor of an addition: alpha / rank, or alpha / sqrt(rank) with ``lora_rslora``."""
    return alpha / (rank**0.5 if self.lora_rslora else rank)
