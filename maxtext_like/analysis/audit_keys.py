"""Checks each precision key against the instructions of a program. Open this to see how ``audit`` decides a key's verdict."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Literal

from maxtext_like.analysis.program_audit import fused_kernel, site_of
from maxtext_like.config.model import ModelConfig
from maxtext_like.config.precision_keys import KEYS, PrecisionKey
from maxtext_like.config.vision import VisionConfig
from maxtext_like.config.yaml_file import to_text
from maxtext_like.layers.kernels.attention.registry import fused_kernels
from maxtext_like.layers.precision import Precision
from maxtext_like.layers.quantization import float8
from maxtext_like.numerics.hlo import Instruction, Reading

Verdict = Literal["honored", "not honored", "not shown"]

SHORT = {"float32": "f32", "bfloat16": "bf16", "float16": "f16", "float64": "f64"}
_WIDTH = {"f8": 0, "f16": 1, "bf16": 1, "f32": 2, "f64": 3}
# Forward products whose operands have ``dtype``: no key widens them.
_PLAIN = ("qk_product", "pv_product", "attention", "mla", "mlp", "down_product", "per_layer_input", "vision", "experts")
_LARGE = ("attention", "mla", "mlp", "down_product")  # the products that matmul_dtype applies to


@dataclass(frozen=True, kw_only=True)
class KeyVerdict:
  """The verdict on one precision key of a program.

  Attributes:
    key, value: as configured.
    verdict: "not shown" if this text cannot show it, or the model has no place where the key applies.
    evidence: the findings, with the number of places.
  """

  key: str
  value: str
  verdict: Verdict
  evidence: str


@dataclass(frozen=True)
class _Program:
  """A program's instructions by site. ``compiled``: a compiler may keep more precision than requested, but never less."""

  reading: Reading
  precision: Precision
  compiled: bool

  def forward(self, *sites: str, kinds: Iterable[str] = ("dot",)) -> list[Instruction]:
    """Return the instructions of these sites in the forward pass, recomputed ones included."""
    kinds = frozenset(kinds)
    found = (i for i in self.reading.instructions if i.kind in kinds and i.stage != "backward" and site_of(i) in sites)
    return [i for i in found if _floats(i) and float8.SCOPE not in i.scopes]

  def judge_products(self, found: list[str], wide: bool, what: str) -> tuple[Verdict, str]:
    """With ``wide``, every product must be float32. Otherwise at least one must have ``dtype``; others may be float32 for other
    reasons."""
    low = SHORT[self.precision.dtype]
    narrow = [d for d in found if d != "f32"]
    if wide or not found or low == "f32":
      return self.judge(found, "f32", what)
    if not narrow:
      evidence = f"{len(found)} {what} f32, none {low}"
      return ("honored", f"{evidence}: the compiler keeps the higher precision") if self.compiled else ("not honored", evidence)
    return self.judge(narrow, low, what)

  @property
  def fused(self) -> int:
    """Number of fused attention kernels."""
    return sum(fused_kernel(i) is not None for i in self.reading.instructions)

  def judge(self, found: list[str], asked: str, what: str) -> tuple[Verdict, str]:
    """Check that every dtype of ``found`` is the requested one."""
    wrong = [d for d in found if d != asked and not (self.compiled and _WIDTH.get(d, 0) > _WIDTH[asked])]
    if wrong:
      return "not honored", f"{len(wrong)} of {len(found)} {what} {_several(wrong)}, not {asked}"
    if not found:
      if self.compiled:
        return "not shown", f"the compiler left no {what} with the name of their scope"
      return "not honored", f"the program has no {what}, so nothing shows that this key has an effect"
    wider = [d for d in found if d != asked]
    return "honored", f"{len(found)} {what} {asked}" + (
      f", the compiler keeps {len(wider)} in {_several(wider)}" if wider else ""
    )

  def operands(self, product: Instruction) -> tuple[str, ...]:
    """Return the dtypes of a product's two operands. In a compiled program, a narrow operand of a product with float32 counts
    as float32: the compiler merged the conversion into the product."""
    dtypes = product.operands[:2]
    return ("f32",) * len(dtypes) if self.compiled and "f32" in dtypes else dtypes

  def kept(self, judged: tuple[Verdict, str], flag: bool, *sites: str) -> tuple[Verdict, str]:
    """Return the same verdict, unless a float32 value of these sites is rounded to 16 bits although the flag forbids it."""
    verdict, evidence = judged
    if not flag or self.compiled or self.precision.dtype == "float32":
      return verdict, evidence  # in a compiled program the next instruction's operands show the rounding
    rounded = [i for i in self.forward(*sites, kinds=("convert",)) if i.operands == ("f32",) and _WIDTH.get(i.results[0]) == 1]
    if rounded:
      return "not honored", f"{evidence}, but {len(rounded)} roundings from f32 to {_several([r.results[0] for r in rounded])}"
    return verdict, evidence


def _floats(i: Instruction) -> bool:
  return any(d in _WIDTH for d in (*i.operands, *i.results))


def _several(dtypes: list[str]) -> str:
  return " or ".join(dict.fromkeys(dtypes))


def judge_keys(
  reading: Reading, precision: Precision, model: ModelConfig, vision: VisionConfig, *, weights: dict[str, str], compiled: bool
) -> list[KeyVerdict]:
  """Return a verdict for every precision key.

  Args:
    reading: the program.
    precision: values of the keys.
    model, vision: used to find the keys that do not apply to the model.
    weights: the declared dtype of every parameter by the name of its argument.
    compiled: True if a compiler produced the text.
  """
  p = _Program(reading, precision, compiled)
  verdicts = []
  for name, key in KEYS.items():
    if lacking := key.lacking(model, vision):
      verdict, evidence = "not shown", f"the model does not have {lacking}"
    elif name == "weight_dtype":
      verdict, evidence = _weights(p, weights)
    else:
      verdict, evidence = _JUDGES[name](p) if name in _JUDGES else _by_signs(p, key)
    verdicts.append(KeyVerdict(key=name, value=to_text(getattr(precision, name)), verdict=verdict, evidence=evidence))
  return verdicts


def together(lowered: list[KeyVerdict], compiled: list[KeyVerdict]) -> list[KeyVerdict]:
  """Combine the verdicts of one program before and after compilation: both must hold, and either one can show that a key is
  honored."""
  verdicts = []
  for before, after in zip(lowered, compiled, strict=True):
    if before.verdict == "not honored" or (after.verdict == "not shown" and before.verdict == "honored"):
      after = replace(before, evidence=f"before compilation: {before.evidence}")
    verdicts.append(after)
  return verdicts


def asked_float32(precision: Precision) -> set[str]:
  """Return the scopes whose products are float32 in a 16-bit model because a key, or the layer itself, requires it."""
  sites = {"vision_pool", "moe", *(kernel.scope for kernel in fused_kernels())}  # pooling, load statistics, kernels' row sums
  for key in KEYS.values():
    if key.safe(vars(precision)):
      sites |= set(key.widens)
  if precision.dtype == "float16":
    # A float16 cotangent would overflow, and so would a product that is not normalized: see layers.precision.
    sites |= {"backward", "per_layer_input", "experts"}
  return sites


def _by_signs(p: _Program, key: PrecisionKey) -> tuple[Verdict, str]:
  """Judge an ordinary float32 key: the results or operands that its entry lists as signs are float32 if it is set, and
  ``dtype`` otherwise."""
  flag = key.safe(vars(p.precision))
  found: list[str] = []
  for sign in key.signs:
    for i in p.forward(sign.scope, kinds=sign.kinds):
      found += p.operands(i) if sign.side == "operands" else i.results[:1]
  judged = _with_fused(p, flag, found, key.shown) if key.fused else p.judge(found, _wide(p, flag), key.shown)
  return p.kept(judged, flag, *key.scopes)


def _wide_gate(precision: Precision) -> bool:
  return KEYS["float32_gate_product"].safe(vars(precision))


def _wide(p: _Program, flag: bool) -> str:
  return "f32" if flag else SHORT[p.precision.dtype]


def _dtype(p: _Program) -> tuple[Verdict, str]:
  asked, found = SHORT[p.precision.dtype], []
  for i in p.forward(*_PLAIN):
    if "experts" in i.scopes and (_wide_gate(p.precision) or p.precision.dtype == "float16"):
      continue  # a grouped product that returns its float32 sums may have float32 operands
    if site_of(i) == "per_layer_input" and p.precision.dtype == "float16":
      continue
    if _in_float8(p, i):
      continue
    found += p.operands(i)
  return _NO_OTHER if _all_low(p, found) else p.judge(found, asked, "operands of products")


def _in_float8(p: _Program, i: Instruction) -> bool:
  """Return True if ``matmul_dtype`` requests float8 for a product. It does not apply to adapters and experts."""
  asked = p.precision.matmul_dtype == "float8" and site_of(i) in _LARGE
  return asked and {"lora", "dora", "experts", "vision", "dequantize"}.isdisjoint(i.scopes)


_NO_OTHER: tuple[Verdict, str] = ("not shown", "every product is in float8 or inside a fused kernel")


def _all_low(p: _Program, found: list[str]) -> bool:
  return not found and p.precision.matmul_dtype == "float8"


def _matmul_dtype(p: _Program) -> tuple[Verdict, str]:
  products = p.forward(*_LARGE)
  low = [d for i in products for d in i.operands[:2] if d.startswith("f8")]
  if p.precision.matmul_dtype == "dtype":
    return ("not honored" if low else "honored"), f"{len(low)} operands of {len(products)} products float8"
  asked = [i for i in products if _in_float8(p, i)]
  wide = [i for i in asked if not all(d.startswith("f8") for d in i.operands[:2])]
  if p.compiled and wide:
    return "not shown", "a compiler without float8 products multiplies the rounded values in a wider dtype"
  if wide or not asked:
    return "not honored", f"{len(wide)} of {len(asked)} products do not have float8 operands"
  return "honored", f"{len(asked)} products {_several(low)}"


def _residual(p: _Program) -> tuple[Verdict, str]:
  found = [i.results[0] for i in p.forward("residual", kinds=("add", "multiply"))]
  asked = p.precision.residual
  return p.kept(p.judge(found, SHORT[asked], "sums of the residual stream"), asked == "float32", "residual")


def _with_fused(p: _Program, flag: bool, found: list[str], what: str) -> tuple[Verdict, str]:
  kernels = f"{p.fused} fused kernels, which compute in float32 internally"
  if not found and p.fused:
    return "honored", kernels
  verdict, evidence = p.judge(found, _wide(p, flag), what)
  return verdict, f"{evidence}; {kernels}" if p.fused else evidence


def _gate_product(p: _Program) -> tuple[Verdict, str]:
  # The activation is always computed in float32. The key decides whether a product remains in ``dtype``.
  found = [i.results[0] for i in p.forward("gate_product", kinds=("multiply",))]
  return p.judge_products(found, _wide_gate(p.precision), "multiplications of gate and up")


def _clamp(p: _Program) -> tuple[Verdict, str]:
  counts = [len(p.forward(site, kinds=("is_finite",))) for site in ("gate_product", "down_product")]
  evidence = f"{counts[0]} finiteness tests in products of gate and up, {counts[1]} in outputs"
  if p.precision.dtype != "float16":
    return ("not honored" if any(counts) else "honored"), f"only applies to float16: {evidence}"
  if p.compiled and p.precision.float16_clamp:
    return "not shown", "a compiler can express the finiteness test in other ways"
  wanted = all(counts) if p.precision.float16_clamp else not any(counts)
  return ("honored" if wanted else "not honored"), evidence


def _vision_pool(p: _Program) -> tuple[Verdict, str]:
  flag = p.precision.float32_vision_pool
  found = [i.results[0] for i in p.forward("vision_pool", kinds=("multiply", "subtract"))]
  if not flag and not found:
    return "not shown", "the model has no stored statistics to scale with"
  # Without the key, the stored statistics are still scaled in float32 before rounding.
  return p.kept(p.judge_products(found, flag, "scalings of pooled features"), flag, "vision_pool")


def _cast_logits(p: _Program) -> tuple[Verdict, str]:
  flag, wide_dot = p.precision.cast_logits_to_fp32, p.precision.logits_dot_in_fp32
  if wide_dot and not flag and p.precision.dtype != "float32":
    found = [i.results[0] for i in p.forward("logits", kinds=("convert",)) if i.operands[0] == "f32"]
  else:
    found = [i.results[0] for i in p.forward("logits")]
  return p.kept(p.judge(found, _wide(p, flag), "logits"), flag, "soft_cap", "loss")


def _matmul_precision(p: _Program) -> tuple[Verdict, str]:
  asked = p.precision.matmul_precision
  # Products of float8 values are exact in the matrix units, so the precision only affects their sums.
  products = [i for i in p.forward("qk_product", "pv_product", *_LARGE) if not _in_float8(p, i)]
  found = [i.precision for i in products]
  if asked != "default" and products and all(_WIDTH.get(d, 0) < 2 for i in products for d in i.operands[:2]):
    return "not shown", f"{len(products)} products of {p.precision.dtype} operands, which are exact at every precision"
  wrong = [w for w in found if w != asked]
  if _all_low(p, found):
    return _NO_OTHER
  if p.compiled and (wrong or not found):
    return "not shown", "a compiler implements higher precision by several products"
  if wrong or not found:
    return "not honored", f"{len(wrong)} of {len(found)} products {_several(wrong)}, not {asked}"
  return "honored", f"{len(found)} products {asked}"


def _gradients(p: _Program) -> tuple[Verdict, str]:
  if not p.reading.gradients:
    return "not shown", "this text does not distinguish gradients from other arrays"
  return p.judge(sorted(p.reading.gradients), SHORT[p.precision.grad_dtype], "dtype of scaled gradients:")


def _weights(p: _Program, weights: dict[str, str]) -> tuple[Verdict, str]:
  codes = sum(dtype not in SHORT for dtype in weights.values())  # of quantized weights, whose format base_weights says
  found = {name: dtype for name, dtype in p.reading.arguments.items() if weights.get(name) in SHORT}
  if not found:
    return "not shown", "this text has no argument names"
  wrong = [name for name, dtype in found.items() if dtype != SHORT[weights[name]]]
  if wrong:
    return "not honored", f"{len(wrong)} of {len(found)} parameters: {wrong[0]} is {found[wrong[0]]}"
  asked = SHORT[p.precision.weight_dtype]
  other = [name for name, dtype in found.items() if dtype != asked]
  kept = f"; {len(other)} are always float32, such as {other[0]}" if other else ""
  return "honored", f"{len(found) - len(other)} parameters {asked}{kept}" + (f"; {codes} are quantized" if codes else "")


def _reductions(p: _Program) -> tuple[Verdict, str]:
  kinds = ("all_reduce", "reduce_scatter")
  # The lookup in a sharded table sums the row and zeros, which is exact in every dtype.
  looked_up = lambda i: i.stage == "forward" and i.path.endswith("/gather")
  sums = [i for i in p.reading.instructions if i.kind in kinds and i.reducer == "add" and not looked_up(i)]
  # One instruction may reduce several arrays, and only gather some of them.
  arrays = [(dtype, n < len(i.placed) and i.placed[n]) for i in sums for n, dtype in enumerate(i.results)]
  found = [dtype for dtype, gathered in arrays if dtype in _WIDTH and not gathered]
  if not p.compiled:
    return "not shown", "the compiler inserts the sums between devices; topology=NAME shows them"
  if not found:
    return "not shown", "the program has no sums between devices"
  return p.judge_products(found, p.precision.reduction_dtype == "float32", "sums between devices")


_JUDGES: dict[str, Callable[[_Program], tuple[Verdict, str]]] = {
  "dtype": _dtype,
  "grad_dtype": _gradients,
  "residual_dtype": _residual,
  "float32_gate_product": _gate_product,
  "float16_clamp": _clamp,
  "float32_vision_pool": _vision_pool,
  "cast_logits_to_fp32": _cast_logits,
  "matmul_precision": _matmul_precision,
  "matmul_dtype": _matmul_dtype,
  "reduction_dtype": _reductions,
}
"""Keys with a check of their own. All other keys are checked by their signs (``_by_signs``)."""
