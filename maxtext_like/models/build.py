"""``build_decoder``: creates the decoder of a configuration. It selects the family and converts the precision section."""

import dataclasses
from collections.abc import Sequence

from maxtext_like.config.layer_precision import layer_values
from maxtext_like.config.model import ModelConfig
from maxtext_like.config.precision_keys import PrecisionConfig
from maxtext_like.config.schema import Config
from maxtext_like.config.vision import VisionConfig
from maxtext_like.layers.decoder import Decoder
from maxtext_like.layers.kernels.attention.registry import PLAIN, Choice
from maxtext_like.layers.kernels.grouped_matmul import registry as grouped
from maxtext_like.layers.moe.moe import Experts
from maxtext_like.layers.precision import Precision
from maxtext_like.layers.remat import RematOffload, RematPolicy
from maxtext_like.layers.sharding_rules import RULES, Rules
from maxtext_like.models import initial_values
from maxtext_like.models.registry import FAMILIES


def precision_of(section: PrecisionConfig) -> Precision:
  """Convert the ``precision:`` section, except ``layer_precision``, to the ``Precision`` of the layers."""
  return Precision(**{field.name: getattr(section, field.name) for field in dataclasses.fields(Precision)})


def runs_in_loops(config: Config) -> bool:
  """True if layers run in a loop, which ``remat_offload`` requires."""
  p, scanned = config.precision, config.training.scan_layers
  decoder = build_decoder(config.model, precision_of(p), layer_precision=p.layer_precision, scan_layers=scanned)
  return bool(decoder.loops)


def build_decoder(
  model: ModelConfig,
  precision: Precision,
  *,
  layer_precision: Sequence[str] = (),
  vision: VisionConfig | None = None,
  scan_layers: bool = True,
  init_scheme: initial_values.Scheme = "depth_scaled",
  remat_policy: RematPolicy = "none",
  remat_offload: RematOffload = "none",
  attention: Choice = "auto",
  grouped_product: grouped.Choice = "auto",
  platform: str = "cpu",
  capability: str | None = None,
  rules: Rules = RULES,
) -> Decoder:
  """Create the decoder of a configuration.

  Args:
    model: the ``model:`` section.
    precision: dtypes and float32 flags.
    layer_precision: other precision values for some layers, in the form of the configuration's key.
    vision: the ``vision:`` section; the decoder has a vision tower if ``use_multimodal`` is set. None: text only.
    scan_layers: run equal rows of layers with ``lax.scan``, or unroll them.
    init_scheme: scheme of initial values; nothing else depends on it.
    remat_policy: values that a layer saves for the backward pass.
    remat_offload: saved values that are kept in host memory.
    attention: the attention kernel; "auto" chooses the fastest that supports the mask and the flags. If it names a fused
      kernel, a vision tower uses "auto". If it names plain XLA, the tower uses plain XLA too.
    grouped_product: the grouped kernel of experts, in the same way.
    platform: "cpu", "gpu" or "tpu": where the program will run.
    capability: CUDA compute capability of that device, for the choice of the grouped kernel; None if it is not an NVIDIA GPU or
      not known.
    rules: sharding of parameters and activations over a mesh.

  Returns:
    A ``Decoder``: ``params()`` and a pure call.

  Raises:
    ValueError: impossible sizes, ``layer_precision`` of layers that do not exist, or ``remat_offload`` without a loop.
  """
  # Layers, with the initial values of the scheme and the precision of each layer.
  family = FAMILIES[model.decoder_block]
  cfg, layers = initial_values.with_scheme(init_scheme, *family.decoder(model, precision, attention, platform))
  layers = tuple(
    dataclasses.replace(layer, precision=precision.in_layer(**own)) if own else layer
    for layer, own in zip(layers, layer_values(layer_precision, len(layers)), strict=True)
  )
  cfg = dataclasses.replace(cfg, scan_layers=scan_layers, remat_policy=remat_policy, remat_offload=remat_offload, rules=rules)
  experts = [Experts(layer.cfg.ffn.experts, layer.precision) for layer in layers if layer.cfg.ffn.experts is not None]
  # One grouped kernel for all layers with experts. Models without experts skip the choice, which imports kernels.
  if grouped_product != "auto" or experts:
    wanted = dict.fromkeys((e.precision.dtype, e.sums) for e in experts) or {(precision.dtype, False): None}
    cases = [grouped.Case(platform=platform, dtype=dtype, sums=sums, capability=capability) for dtype, sums in wanted]
    by = grouped.choose(grouped_product, *cases).name
    cfg = dataclasses.replace(cfg, grouped=by)
  # The vision tower. Placeholders are looked up as padding with and without one.
  if vision is not None and model.pad_token_id is not None:
    cfg = dataclasses.replace(cfg, placeholder_ids=vision.placeholder_ids)
  if vision is not None and vision.use_multimodal:
    assert vision.image_token_id is not None  # VisionConfig has checked it
    # The named kernel is for the layers, because the tower has other heads. Plain XLA applies to both.
    of_tower: Choice = "dot_product" if attention in PLAIN else "auto"
    tower = family.tower(model, vision)
    if init_scheme == "depth_scaled":
      tower = tower.depth_scaled()
    tower = dataclasses.replace(tower, kernel=of_tower, platform=platform)
    cfg = dataclasses.replace(cfg, vision=tower, image_token_id=vision.image_token_id)
  decoder = Decoder(cfg, precision, layers)
  if remat_offload != "none" and not decoder.loops:
    why = "no layer or group of layers is repeated" if scan_layers else "scan_layers is false"
    raise ValueError(
      f"remat_offload = {remat_offload}: the layers do not run in a loop ({why}). Outside a loop, compilers keep offloaded "
      "arrays on the device\n  fix: remat_offload=none"
    )
  return decoder
