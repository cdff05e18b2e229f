"""Judges which quantities of a checkpoint can overflow or lose precision in a dtype, before any run.

``assess`` judges the sizes that ``model_risk.measure`` found, for the ``precision:`` section of a configuration. ``table`` and
``records`` present the result.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from maxtext_like.analysis.risk.walk import Site
from maxtext_like.config.precision_keys import PrecisionKey, governing
from maxtext_like.config.yaml_file import to_text
from maxtext_like.layers.precision import Precision

LIMITS = {"float16": 65504.0, "bfloat16": 3.3895313892515355e38, "float32": 3.4028234663852886e38, "e4m3": 448.0}
"""Largest finite number of each format; e4m3 is float8_e4m3fn, where a cast beyond 464 gives NaN."""

SIGNIFICAND_BITS = {"float16": 11, "bfloat16": 8, "float32": 24}

COARSE = 0.05
"""If half the spacing of a score exceeds this, rounding alone changes a probability by 5 %."""

ALWAYS = "always float32"
"""Shown instead of a key if the layer always holds the quantity in float32."""

Verdict = Literal["overflow", "possible", "coarse", "safe"]
_ORDER: tuple[Verdict, ...] = ("overflow", "possible", "coarse", "safe")


@dataclass(frozen=True)
class Quantity:
  """The precision in which a quantity is held.

  Attributes:
    scopes: named scopes of the layers that compute it. The keys that govern any of them together hold it in float32. Empty if
      no key does.
    always: dtypes of activations with which it is float32 regardless of the keys.
    use: "exponent" if it is exponentiated, so that absolute spacing matters; "rank" if it is compared, so that ties matter; ""
      otherwise.
  """

  scopes: tuple[str, ...] = ()
  always: tuple[str, ...] = ()
  use: Literal["", "exponent", "rank"] = ""

  @property
  def keys(self) -> tuple[PrecisionKey, ...]:
    """The keys of the ``precision:`` section that govern it."""
    return governing(self.scopes)

  def held(self, precision: Precision) -> str:
    """Return the dtype in which it is held."""
    if precision.dtype in self.always or (self.keys and all(key.safe(vars(precision)) for key in self.keys)):
      return "float32"
    return precision.residual if "residual" in self.scopes else precision.dtype


_FLOAT16, _EVERY = ("float16",), ("float32", "bfloat16", "float16")
_GATE, _RESIDUAL, _POOL = Quantity(("gate_product",)), Quantity(("residual",)), Quantity(("vision_pool",))
_LOGITS = Quantity(("logits",), use="exponent")
QUANTITIES: dict[str, Quantity] = {
  "gate": _GATE,
  "up": _GATE,
  "product": _GATE,
  "down": Quantity(always=_FLOAT16),
  "hidden": Quantity(),
  "norm": Quantity(),
  "q": Quantity(),
  "k": Quantity(),
  "v": Quantity(),
  "q latent": Quantity(),
  "kv latent": Quantity(),
  "attention output": Quantity(always=_FLOAT16),
  "q.k": Quantity(("qk_product",)),
  "scores": Quantity(("qk_product", "softmax"), use="exponent"),
  "router logits": Quantity(("router",), use="rank"),
  "experts output": Quantity(("weight_sum",)),
  "index q": Quantity(),
  "index q.k": Quantity(("indexer_product",)),
  "index scores": Quantity(("indexer_sum",), use="rank"),
  "embedding": Quantity(),
  "branches": _RESIDUAL,
  "residual": _RESIDUAL,
  "per-layer row": Quantity(),
  "per-layer input": Quantity(),
  "per-layer gate": Quantity(always=_EVERY),
  "per-layer product": Quantity(always=_FLOAT16),
  "per-layer output": Quantity(always=_EVERY),
  "pooled": _POOL,
  "pooled * sqrt(D)": _POOL,
  "standardized": _POOL,
  "projector": Quantity(),
  "logits": _LOGITS,
  "capped logits": _LOGITS,
}
"""Every quantity that ``model_risk`` and the families' formulas record. "hidden" is that of the ungated MLP in Gemma 3's
vision tower."""


@dataclass(frozen=True)
class Risk:
  """A site and its verdict.

  Attributes:
    site: place, quantity and sizes.
    held: dtype in which the configuration holds it.
    verdict: in that dtype: "overflow" if the expected size exceeds the largest number; "possible" if only the bound does;
      "coarse" if it is finite but its spacing changes probabilities or creates ties; "safe".
    unprotected: the same in the dtype of activations, without any key that holds it in float32.
    key: the keys to set, if the verdict is not "safe"; the keys that protect it, if only ``unprotected`` is not "safe";
      otherwise "".
  """

  site: Site
  held: str
  verdict: Verdict
  unprotected: Verdict
  key: str


def spacing(size: float, dtype: str) -> float:
  """Return the distance to the next number of a format at this size; 0 at 0, infinite beyond the largest number."""
  if size == 0:
    return 0.0
  if size > LIMITS[dtype]:
    return math.inf
  return 2.0 ** (math.floor(math.log2(size)) + 1 - SIGNIFICAND_BITS[dtype])


def judge(site: Site, dtype: str) -> Verdict:
  """Return the verdict on a quantity in a dtype."""
  if site.expected > LIMITS[dtype]:
    return "overflow"
  if site.bound > LIMITS[dtype]:
    return "possible"
  use = QUANTITIES[site.quantity].use
  if dtype == "bfloat16" and use == "rank":
    return "coarse"
  if use and spacing(site.expected, dtype) / 2 > COARSE:
    return "coarse"
  return "safe"


def assess(sites: Sequence[Site], precision: Precision) -> list[Risk]:
  """Judge every site and sort the worst first.

  Sites are sorted by their verdict in the dtype of activations, then by their verdict in the configuration, then by expected
  size. Sites within a factor of two keep the order of the model, because the first overflow affects everything after it.
  """
  risks = []
  for site in sites:
    quantity = QUANTITIES[site.quantity]
    held = quantity.held(precision)
    verdict, unprotected = judge(site, held), judge(site, precision.dtype)
    risks.append(Risk(site, held, verdict, unprotected, _key(quantity, precision, held, verdict, unprotected)))
  order = {verdict: number for number, verdict in enumerate(_ORDER)}

  def rank(risk: Risk) -> tuple[int, int, int]:
    worst = min(order[risk.verdict], order[risk.unprotected])
    return worst, order[risk.verdict], -round(math.log2(max(risk.site.expected, 1e-300)))

  return sorted(risks, key=rank)


def _key(quantity: Quantity, precision: Precision, held: str, verdict: Verdict, unprotected: Verdict) -> str:
  if verdict == "safe":
    if unprotected == "safe":
      return ""
    return ", ".join(key.name for key in quantity.keys) or ALWAYS
  if held != "float32" and (missing := [key for key in quantity.keys if not key.safe(vars(precision))]):
    return " ".join(f"{key.name}={to_text(key.safer)}" for key in missing)
  return "dtype=bfloat16" if precision.dtype == "float16" else "dtype=float32"


def unprotected_overflows(risks: Sequence[Risk]) -> list[Risk]:
  """Return the risks whose expected size exceeds the range of the dtype in use. A run with this configuration will overflow
  there."""
  return [risk for risk in risks if risk.verdict == "overflow"]


def records(risks: Sequence[Risk]) -> list[dict[str, Any]]:
  """Return plain dicts for JSON, in the same order. Headroom is in bits, negative beyond the limit."""
  out = []
  for risk in risks:
    s = risk.site
    room = {
      name: {"expected": _headroom(s.expected, limit), "bound": _headroom(s.bound, limit)}
      for name, limit in LIMITS.items()
      if name != "float32"
    }
    out.append(
      {
        "place": s.place,
        "quantity": s.quantity,
        "expected": s.expected,
        "bound": s.bound,
        "held": risk.held,
        "verdict": risk.verdict,
        "unprotected": risk.unprotected,
        "key": risk.key,
        "headroom_bits": room,
        "bfloat16_spacing": spacing(s.expected, "bfloat16"),
      }
    )
  return out


def _headroom(size: float, limit: float) -> float | None:
  return None if size == 0 else round(math.log2(limit / size), 2)


_COLUMNS = ("place", "quantity", "expected", "at most", "float16", "e4m3", "bf16 +-", "held in", "verdict")


def table(risks: Sequence[Risk], rows: int) -> str:
  """Return the first ``rows`` risks (0: all) as aligned text."""
  shown = risks[:rows] if rows else risks
  lines: list[tuple[str, ...]] = [_COLUMNS]
  for risk in shown:
    s = risk.site
    sizes = (f"{s.expected:.3g}", f"{s.bound:.3g}", _against(s, "float16"), _against(s, "e4m3"))
    half = f"{spacing(s.expected, 'bfloat16') / 2:.2g}"
    lines.append((s.place, s.quantity, *sizes, half, risk.held, _words(risk)))
  widths = [max(len(line[i]) for line in lines) for i in range(len(_COLUMNS))]
  text = ["  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines]
  if len(shown) < len(risks):
    text.append(f"... and {len(risks) - len(shown)} more (rows=0 shows all)")
  return "\n".join(text)


def _against(site: Site, name: str) -> str:
  """Return the headroom in bits of the expected size and, after a slash, of the bound."""
  parts = []
  for size in (site.expected, site.bound):
    bits = _headroom(size, LIMITS[name])
    parts.append("-" if bits is None else f"{bits:+.1f}")
  return "/".join(parts)


def _words(risk: Risk) -> str:
  if risk.verdict == "safe":
    return f"safe: {risk.key}" if risk.key else "safe"
  return f"{risk.verdict}: {risk.key}"
