"""The precision keys, each with everything that is known about it: the one place to add or to read one.

``PrecisionConfig`` is the ``precision:`` section and the list of the keys at once: its fields carry what a key means and
does. The section of ``configs/base.yml`` and the tables of docs/reference/configuration.md are written from it; "does nothing
here", what may differ between layers, the audit's targets, the risk estimate's keys, what to try after a NaN and what
``bisect`` tries ask it. That a layer obeys a key is the layer's part,
``layers.precision.Precision`` its name and default there.

Importable without JAX.
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
"""The section's values by name, or those of one layer."""


@dataclass(frozen=True, kw_only=True)
class Part:
  """A part of a model that some have not got, as messages call it.

  Attributes:
    name: after "the model has not got".
    absent: the reason why a key of it would do nothing in one layer.
    off: in place of the name, where the model's configuration knows it and it is off.
    known: whether the configuration of a model has its keys.
    there: whether a model has it: the whole of it, or one layer.
  """

  name: str
  absent: str = ""
  off: str = ""
  known: Callable[[ModelConfig], bool]
  there: Callable[[ModelConfig, VisionConfig | None, int | None], bool]


INDEXER = Part(
  name="a sparse indexer",
  absent="the model has no sparse indexer",
  known=lambda m: "indexer" in m.parts,
  there=lambda m, _, layer: m.has("indexer", layer),
)
ROUTER = Part(
  name="a router",
  absent="it has no experts",
  known=lambda m: m.has("experts"),
  there=lambda m, _, layer: m.has("experts", layer),
)
EXPERTS = dataclasses.replace(ROUTER, name="experts")
VISION_POOLER = Part(
  name="the vision pooler of Gemma 4",
  off="images (use_multimodal)",
  known=lambda m: "vision pooler" in m.parts,
  there=lambda m, v, _: m.has("vision pooler") and v is not None and v.use_multimodal,
)


@dataclass(frozen=True)
class Sign:
  """Instructions of a program by which the audit sees whether a key is obeyed.

  Attributes:
    scope: ``jax.named_scope`` of the layer.
    side: whose dtype tells it.
    kinds: of instructions, as ``numerics.hlo`` names them.
  """

  scope: str
  side: Literal["operands", "results"]
  kinds: tuple[str, ...] = ("dot",)


@dataclass(frozen=True, kw_only=True)
class PrecisionKey:
  """One key.

  Attributes:
    name: in the ``precision:`` section, and in ``layers.precision.Precision``.
    meaning: one line, as in ``configs/base.yml``.
    default: also of ``Precision``.
    safer: the value to try against numbers that are not finite, or not exact enough.
    scopes: named scopes whose numbers it holds in another dtype (or, for ``mends="hides"``, changes).
    part: what a model must have for it to act; None: nothing.
    per_layer: it may differ between layers.
    resolved: what a value comes to with a ``dtype``, where one leaves that open.
    always: dtypes with which its places are float32 whatever it says.
    only: the one dtype with which it acts; "": any.
    mends: what the safer value is against: "forward": overflow in its scopes, which spoils loss and gradients;
      "gradients", "parameters": of those alone, wherever they arise; "error": rounding only; "hides": it makes finite what
      is wrong.
    turn: which remedies are tried first: what costs least and acts most locally has 0, what hides a fault comes late.
    signs, shown: what the audit looks at, and how it calls that; () where it takes more than a list (``analysis.audit_keys``).
    widens: scopes whose products have float32 operands with it.
    directions: of x-ray, in which its places are all over the model: "backward", "recomputed", "update".
    fused: fused attention kernels obey it by construction.
    idle_on: platforms where it changes nothing, and with which dtypes.
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
  mends: Literal["forward", "gradients", "parameters", "error", "hides"] = "forward"
  turn: int = 0
  signs: tuple[Sign, ...] = ()
  shown: str = ""
  widens: tuple[str, ...] = ()
  directions: tuple[str, ...] = ()
  fused: bool = False
  idle_on: Mapping[str, Collection[str]] = field(default_factory=dict)

  def value(self, values: Values) -> Any:
    """What the section says of it, with what it leaves open resolved."""
    return self.resolved(values[self.name], values["dtype"])

  def safe(self, values: Values) -> bool:
    """Whether its places are as with the safer value already, or the key does nothing with this ``dtype``."""
    return values["dtype"] in self.always or (self.only not in ("", values["dtype"])) or self.value(values) == self.safer

  def lacking(self, model: ModelConfig, vision: VisionConfig | None = None) -> str:
    """What the model would need for it to act; empty where it acts."""
    if self.part is None or self.part.there(model, vision, None):
      return ""
    return (self.part.known(model) and self.part.off) or self.part.name

  def acts_with(self, dtypes: Collection[str], platform: str) -> bool:
    """Whether it changes something in layers of one of these dtypes, on "cpu", "gpu" or "tpu"."""
    idle = {*self.always, *self.idle_on.get(platform, ())}
    return any(dtype not in idle and self.only in ("", dtype) for dtype in dtypes)

  def remedy(self, values: Values) -> str:
    """``key=value`` for the command line; "auto" where it comes to the safer value."""
    automatic = self.default == "auto" and self.resolved("auto", values["dtype"]) == self.safer
    return f"{self.name}={to_text('auto' if automatic else self.safer)}"


def _key(**known: Any) -> Any:
  return field(metadata={"key": PrecisionKey(**known)})


@dataclass(frozen=True, kw_only=True)
class PrecisionConfig(Checked):
  """``precision:``. ``layer_precision`` gives some layers values of their own (``layer_precision.py``)."""

  dtype: Dtype = _key(
    default="bfloat16", safer="float32", per_layer=True, mends="forward", turn=9,
    meaning="activations and the operands of matrix products",
  )  # fmt: skip
  weight_dtype: StoredDtype[Dtype] = _key(
    default="float32", safer="float32", mends="parameters", turn=1, meaning="stored parameters"
  )  # fmt: skip
  grad_dtype: Dtype = _key(
    default="float32",
    safer="float32",
    mends="gradients",
    directions=("backward", "recomputed", "update"),
    turn=1,
    meaning="gradients as the optimizer sees them",
  )
  residual_dtype: Dtype | None = _key(
    default=None, safer="float32", directions=("backward",), turn=1, scopes=("residual", "embedding"),
    resolved=lambda value, dtype: value or ("float32" if dtype == "float16" else dtype),
    meaning="residual stream; null is dtype, but float32 when dtype is float16",
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
    meaning="MLP: act(gate) * up in float32; auto does so when the gate is float16",
  )  # fmt: skip
  float16_rescue: bool = _key(
    default=True, safer=True, per_layer=True, only="float16", mends="hides", turn=3,
    scopes=("mlp", "gate_product", "down_product", "experts"),
    meaning="float16 only: saturate the MLP product at +-65280, zero a non-finite MLP output, count both",
  )  # fmt: skip
  float32_vision_pool: bool = _key(
    default=True, safer=True, part=VISION_POOLER, always=("float32",), scopes=("vision_pool",),
    meaning="Gemma 4 vision pooler: scale and standardise in float32",
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
    meaning="logits are handed on in float32",
  )  # fmt: skip
  logits_dot_in_fp32: bool = _key(
    default=False, safer=True, mends="error", turn=2, widens=("logits",), idle_on={"cpu": ("float32",)},
    signs=(Sign("logits", "operands"),), shown="operands of the last product",
    meaning="the operands of the last matrix product in float32",
  )  # fmt: skip
  matmul_precision: Literal["default", "high", "highest"] = _key(
    default="default", safer="highest", per_layer=True, mends="error", turn=4, idle_on={"cpu": get_args(Dtype)},
    meaning="precision of float32 matrix products on GPU and TPU",
  )  # fmt: skip
  matmul_dtype: Literal["dtype", "float8"] = _key(
    default="dtype", safer="dtype", per_layer=True, mends="error", turn=0,
    meaning="operands of products by weights of attention and MLP: dtype, or float8 (not on TPU; not of routed experts)",
  )  # fmt: skip
  reduction_dtype: Literal["float32", "dtype"] = _key(
    default="float32", safer="float32", mends="error", turn=3, always=("float32",), directions=("backward",),
    meaning="sums that devices share, gradients above all: float32, rounded once as on one device; dtype rounds each part",
  )  # fmt: skip
  layer_precision: tuple[str, ...]


KEYS: dict[str, PrecisionKey] = {
  f.name: dataclasses.replace(f.metadata["key"], name=f.name)
  for f in dataclasses.fields(PrecisionConfig)
  if "key" in f.metadata
}
"""Every key by its name, in the order of the section."""

REMEDIES = tuple(sorted((key for key in KEYS.values() if key.name != "dtype"), key=lambda key: key.turn))
"""In the order in which they are tried; ``dtype`` is the last resort of whoever asks."""

LAYER_KEYS = tuple(name for name, key in KEYS.items() if key.per_layer)
"""What may differ between layers; ``layers.precision.LAYER_KEYS`` is the same."""


def governing(scopes: Collection[str]) -> tuple[PrecisionKey, ...]:
  """The keys that hold numbers of these named scopes in float32."""
  return tuple(key for key in KEYS.values() if key.mends == "forward" and not set(scopes).isdisjoint(key.scopes))


def foreign_keys(model: ModelConfig) -> dict[str, str]:
  """Keys that are none of this model's configuration, since they can act nowhere in it, each with what the model lacks."""
  return {name: key.part.name for name, key in KEYS.items() if key.part is not None and not key.part.known(model)}


def idle_reason(name: str, value: Any, layer: int, model: ModelConfig, values: Values) -> str | None:
  """Why a key would do nothing in one layer; None when it acts.

  Args:
    name: one of ``LAYER_KEYS``.
    value: what it would be in this layer.
    layer: its number.
    model: of the whole model.
    values: the model's own, with the layer's ``dtype``.
  """
  key, dtype = KEYS[name], values["dtype"]
  if key.part is not None and not key.part.there(model, None, layer):
    return key.part.absent
  if key.only not in ("", dtype):
    return f"it acts with dtype {key.only}, and there it is {dtype}"
  if dtype in key.always:
    return "everything of it is in float32" if dtype == "float32" else f"with dtype {dtype} it is always in float32"
  same = name != "dtype" and key.resolved(value, dtype) == key.value(values)
  return "it has that value already" if same else None


def section_text() -> list[str]:
  """The lines of the keys in ``configs/base.yml``."""
  return [f"  {key.name}: {to_text(key.default)}  # {key.meaning}" for key in KEYS.values()]
