"""The precision keys with all their properties. Open this file to add a key or to see what one does.

``PrecisionConfig`` is the ``precision:`` section. The metadata of its fields is the registry of keys: the section in
``configs/base.yml``, the tables of docs/reference/configuration.md, the checks for keys without effect, layer-by-layer values,
audit, risk, the suggestions after a NaN and ``bisect`` all read it. The layers implement the keys;
``layers.precision.Precision`` repeats each name and default. This module imports no JAX.
"""

import dataclasses
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from maxtext_like.config.key_class import StoredDtype
from maxtext_like.config.model import ModelConfig
from maxtext_like.config.problems import Checked
from maxtext_like.config.vision import VisionConfig
from maxtext_like.config.yaml_file import to_text

Dtype = Literal["float32", "bfloat16", "float16"]
Values = Mapping[str, Any]
"""Values of the section by key name, for the model or for one layer."""


@dataclass(frozen=True, kw_only=True)
class Part:
  """A part that only some models have.

  Attributes:
    name: name of the part in messages.
    absent: reason in messages why a key of this part has no effect in a layer.
    off: replaces ``name`` in messages if the model family has the part but this configuration switches it off.
    in_family: returns True if the family of the model has the part.
    present: returns True if the model has the part, or if one of its layers (the third argument) has it.
  """

  name: str
  absent: str = ""
  off: str = ""
  in_family: Callable[[ModelConfig], bool]
  present: Callable[[ModelConfig, VisionConfig | None, int | None], bool]


INDEXER = Part(
  name="a sparse indexer",
  absent="the model has no sparse indexer",
  in_family=lambda m: "indexer" in m.parts,
  present=lambda m, _, layer: m.has("indexer", layer),
)
ROUTER = Part(
  name="a router",
  absent="it has no experts",
  in_family=lambda m: m.has("experts"),
  present=lambda m, _, layer: m.has("experts", layer),
)
EXPERTS = dataclasses.replace(ROUTER, name="experts")
VISION_POOLER = Part(
  name="the vision pooler of Gemma 4",
  off="images (use_multimodal)",
  in_family=lambda m: "vision pooler" in m.parts,
  present=lambda m, v, _: m.has("vision pooler") and v is not None and v.use_multimodal,
)


@dataclass(frozen=True)
class Sign:
  """Instructions of a compiled program whose dtypes show the audit that a key is honored.

  Attributes:
    scope: ``jax.named_scope`` of the instructions.
    side: the audit compares the dtypes of their operands or of their results.
    kinds: kinds of instructions, as ``numerics.hlo`` names them.
  """

  scope: str
  side: Literal["operands", "results"]
  kinds: tuple[str, ...] = ("dot",)


@dataclass(frozen=True, kw_only=True)
class PrecisionKey:
  """One key of the ``precision:`` section.

  Attributes:
    name: name of the key, also in ``layers.precision.Precision``.
    meaning: description in ``configs/base.yml``, one line.
    default: default value, also of ``Precision``.
    safer: value to try if numbers are not finite or not exact enough.
    scopes: named scopes whose values get another dtype from this key (with ``repairs="hides"``: other values).
    part: part that a model must have for the key to have an effect; None if every model has it.
    per_layer: True if the value may differ between layers.
    resolved: (value, ``dtype``) -> value, with "auto" and null replaced by what they mean for this ``dtype``.
    always: values of ``dtype`` for which the scopes are float32 whatever the key says.
    only: the one value of ``dtype`` for which the key has an effect; "" for any.
    repairs: kind of fault that ``safer`` repairs. "forward": overflow in the scopes, which reaches the loss and the gradients;
      "gradients" and "parameters": overflow of gradients or parameters anywhere; "error": only rounding; "hides": the value
      becomes finite, but the cause remains.
    order: position in the order of remedies. Cheap and local remedies have 0; remedies that hide a fault come late.
    signs: instructions that the audit compares; () if the audit needs code for this key (``analysis.audit_keys``).
    shown: name of these instructions in the audit's output.
    widens: scopes whose matrix products get float32 operands from this key.
    directions: "backward", "recomputed" or "update" if the key acts on all tensors of that direction of x-ray.
    fused: True if fused attention kernels always honor the key.
    idle_on: platforms on which the key has no effect, each with the dtypes for which that holds.
  """

  name: str = ""
  meaning: str
  default: Any
  safer: Any
  scopes: tuple[str, ...] = ()
  part: Part | None = None
  per_layer: bool = False
  resolved: Callable[[Any, str], Any] = lambda value, dtype: value
  always: tuple[str, ...] = ()
  only: str = ""
  repairs: Literal["forward", "gradients", "parameters", "error", "hides"] = "forward"
  order: int = 0
  signs: tuple[Sign, ...] = ()
  shown: str = ""
  widens: tuple[str, ...] = ()
  directions: tuple[str, ...] = ()
  fused: bool = False
  idle_on: Mapping[str, Collection[str]] = field(default_factory=dict)

  def value(self, values: Values) -> Any:
    """Return the value in a section, with "auto" and null resolved."""
    return self.resolved(values[self.name], values["dtype"])

  def safe(self, values: Values) -> bool:
    """Return True if the safer value would change nothing, because it is set already or ``dtype`` leaves no effect."""
    return values["dtype"] in self.always or (self.only not in ("", values["dtype"])) or self.value(values) == self.safer

  def lacking(self, model: ModelConfig, vision: VisionConfig | None = None) -> str:
    """Return the part that the model lacks for the key to have an effect, or "" if nothing is missing."""
    if self.part is None or self.part.present(model, vision, None):
      return ""
    return (self.part.in_family(model) and self.part.off) or self.part.name

  def acts_with(self, dtypes: Collection[str], platform: str) -> bool:
    """Return True if the key has an effect in layers of one of these dtypes on a platform ("cpu", "gpu" or "tpu")."""
    idle = {*self.always, *self.idle_on.get(platform, ())}
    return any(dtype not in idle and self.only in ("", dtype) for dtype in dtypes)

  def remedy(self, values: Values) -> str:
    """Return ``key=value`` with the safer value for the command line, or with "auto" if that means the safer value."""
    automatic = self.default == "auto" and self.resolved("auto", values["dtype"]) == self.safer
    return f"{self.name}={to_text('auto' if automatic else self.safer)}"


def _key(**properties: Any) -> Any:
  return field(metadata={"key": PrecisionKey(**properties)})


@dataclass(frozen=True, kw_only=True)
class PrecisionConfig(Checked):
  """Section ``precision:``. The key ``layer_precision`` sets other values for single layers (``layer_precision.py``)."""

  dtype: Dtype = _key(
    default="bfloat16", safer="float32", per_layer=True, repairs="forward", order=9,
    meaning="activations and the operands of matrix products",
  )  # fmt: skip
  weight_dtype: StoredDtype[Dtype] = _key(
    default="float32", safer="float32", repairs="parameters", order=1, meaning="stored parameters"
  )  # fmt: skip
  grad_dtype: Dtype = _key(
    default="float32",
    safer="float32",
    repairs="gradients",
    directions=("backward", "recomputed", "update"),
    order=1,
    meaning="gradients that the optimizer reads",
  )
  residual_dtype: Dtype | None = _key(
    default=None, safer="float32", directions=("backward",), order=1, scopes=("residual", "embedding"),
    resolved=lambda value, dtype: value or ("float32" if dtype == "float16" else dtype),
    meaning="residual stream; null: dtype, but float32 if dtype is float16",
  )  # fmt: skip
  float32_qk_product: bool = _key(
    default=True, safer=True, per_layer=True, always=("float32",), scopes=("qk_product",), fused=True,
    signs=(Sign("qk_product", "results", ("dot", "tanh")),), shown="results of q.k",
    meaning="attention: q.k is accumulated and kept in float32, never rounded to dtype",
  )  # fmt: skip
  float32_logits: bool = _key(
    default=True, safer=True, per_layer=True, always=("float32",), scopes=("softmax",), fused=True,
    signs=(Sign("softmax", "results", ("exponential", "divide", "tanh")),), shown="exponentials and quotients of the softmax",
    meaning="attention: mask and softmax in float32",
  )  # fmt: skip
  indexer_float32_logits: bool = _key(
    default=True, safer=True, per_layer=True, part=INDEXER, scopes=("indexer_product", "indexer_sum"),
    signs=(
      Sign("indexer_product", "results"), Sign("indexer_sum", "operands"), Sign("indexer_sum", "results", ("maximum",)),
    ),
    shown="scores of the indexer, their relu and sum", widens=("indexer", "indexer_sum"),
    meaning="DeepSeek indexer: q.k, relu and the sum over heads in float32",
  )  # fmt: skip
  float32_gate_product: Literal["auto", True, False] = _key(
    default="auto", safer=True, per_layer=True, always=("float32",), scopes=("mlp", "gate_product", "experts"),
    resolved=lambda value, dtype: dtype == "float16" if value == "auto" else value, widens=("experts",),
    meaning="MLP: act(gate) * up in float32; auto: only if the gate is float16",
  )  # fmt: skip
  float16_clamp: bool = _key(
    default=True, safer=True, per_layer=True, only="float16", repairs="hides", order=3,
    scopes=("mlp", "gate_product", "down_product", "experts"),
    meaning="float16 only: clip the MLP product to +-65280, set non-finite MLP outputs to zero, and count both",
  )  # fmt: skip
  float32_vision_pool: bool = _key(
    default=True, safer=True, part=VISION_POOLER, always=("float32",), scopes=("vision_pool",),
    meaning="Gemma 4 vision pooler: scale and standardize in float32",
  )  # fmt: skip
  float32_gate_logits: bool = _key(
    default=True, safer=True, per_layer=True, part=ROUTER, scopes=("router",), widens=("router",),
    signs=(Sign("router", "operands"),), shown="operands of router products",
    meaning="mixture of experts: router logits in float32",
  )  # fmt: skip
  float32_weight_sum: bool = _key(
    default=True, safer=True, per_layer=True, part=EXPERTS, always=("float16",), scopes=("weight_sum",),
    widens=("weight_sum",), signs=(Sign("weight_sum", "operands"),), shown="operands of the weighted sum",
    meaning="mixture of experts: weighted sum over the chosen experts in float32",
  )  # fmt: skip
  cast_logits_to_fp32: bool = _key(
    default=True, safer=True, always=("float32",), scopes=("logits", "soft_cap", "loss"),
    meaning="return the logits in float32",
  )  # fmt: skip
  logits_dot_in_fp32: bool = _key(
    default=False, safer=True, repairs="error", order=2, widens=("logits",), idle_on={"cpu": ("float32",)},
    signs=(Sign("logits", "operands"),), shown="operands of the last product",
    meaning="operands of the last matrix product, which computes the logits, in float32",
  )  # fmt: skip
  matmul_precision: Literal["default", "high", "highest"] = _key(
    default="default", safer="highest", per_layer=True, repairs="error", order=4, idle_on={"cpu": get_args(Dtype)},
    meaning="precision of float32 matrix products on GPU and TPU",
  )  # fmt: skip
  matmul_dtype: Literal["dtype", "float8"] = _key(
    default="dtype", safer="dtype", per_layer=True, repairs="error", order=0,
    meaning="operands of products with the weights of attention and MLP: dtype or float8 (not on TPU, not for routed experts)",
  )  # fmt: skip
  reduction_dtype: Literal["float32", "dtype"] = _key(
    default="float32", safer="float32", repairs="error", order=3, always=("float32",), directions=("backward",),
    meaning="sums across devices, mainly of gradients: float32 rounds only the total, as on one device; dtype rounds each part",
  )  # fmt: skip
  layer_precision: tuple[str, ...]


KEYS: dict[str, PrecisionKey] = {
  f.name: dataclasses.replace(f.metadata["key"], name=f.name)
  for f in dataclasses.fields(PrecisionConfig)
  if "key" in f.metadata
}
"""Every key by its name, in the order of the section."""

REMEDIES = tuple(sorted((key for key in KEYS.values() if key.name != "dtype"), key=lambda key: key.order))
"""Keys in the order in which they are tried after a fault, without ``dtype``, which callers try last."""

LAYER_KEYS = tuple(name for name, key in KEYS.items() if key.per_layer)
"""Keys whose value may differ between layers; equal to ``layers.precision.LAYER_KEYS``."""


def governing(scopes: Collection[str]) -> tuple[PrecisionKey, ...]:
  """Return the keys that keep values of these named scopes in float32."""
  return tuple(key for key in KEYS.values() if key.repairs == "forward" and not set(scopes).isdisjoint(key.scopes))


def foreign_keys(model: ModelConfig) -> dict[str, str]:
  """Return the keys that cannot be set for this model's family, each with the name of the missing part."""
  return {name: key.part.name for name, key in KEYS.items() if key.part is not None and not key.part.in_family(model)}


def idle_reason(name: str, value: Any, layer: int, model: ModelConfig, values: Values) -> str | None:
  """Return the reason why a key has no effect in one layer, or None if it has one.

  Args:
    name: one of ``LAYER_KEYS``.
    value: value of the key in this layer.
    layer: index of the layer, from 0.
    model: configuration of the model.
    values: precision values of the model, with the ``dtype`` of the layer.
  """
  key, dtype = KEYS[name], values["dtype"]
  if key.part is not None and not key.part.present(model, None, layer):
    return key.part.absent
  if key.only not in ("", dtype):
    return f"it has an effect only with dtype {key.only}, and the dtype of the layer is {dtype}"
  if dtype in key.always:
    return (
      "the layer computes everything in float32" if dtype == "float32" else f"dtype {dtype} always computes this in float32"
    )
  same = name != "dtype" and key.resolved(value, dtype) == key.value(values)
  return "the model has that value already" if same else None


def section_text() -> list[str]:
  """Return the lines of these keys in ``configs/base.yml``."""
  return [f"  {key.name}: {to_text(key.default)}  # {key.meaning}" for key in KEYS.values()]
