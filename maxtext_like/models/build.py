"""From a configuration to a decoder: picks the family and translates the precision section."""

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
  """The ``precision:`` section as the layers know it: all of it but ``layer_precision``."""
  return Precision(**{field.name: getattr(section, field.name) for field in dataclasses.fields(Precision)})


def runs_in_loops(config: Config) -> bool:
  """Whether layers run in a loop, without which ``remat_offload`` is refused."""
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
  """The decoder of a configuration.

  Args:
    model: the ``model:`` section.
    precision: dtypes and float32 flags.
    layer_precision: other values for some layers, as the configuration's key has them.
    vision: the ``vision:`` section; the decoder gets its tower with ``use_multimodal``. None: text only.
    scan_layers: ``lax.scan`` over equal rows of layers, or the same rows unrolled.
    init_scheme: how initial values are chosen; no other number depends on it.
    remat_policy: what a layer keeps for the backward pass.
    remat_offload: what of it lies in the host's memory.
    attention: the kernel, "auto" for the fastest that honours mask and flags; a tower has that with any fused one, and plain
      XLA where the layers shall have it.
    grouped_product: the kernel of experts, likewise.
    platform: "cpu", "gpu" or "tpu", where the program will run.
    capability: CUDA's compute capability there, by which experts get their kernel; None: not known, or no NVIDIA GPU.
    rules: how parameters and activations are split over a mesh.

  Returns:
    A ``Decoder``: ``params()`` and a pure call.

  Raises:
    ValueError: sizes that no model can have, entries for layers that it has not, ``remat_offload`` without a loop.
  """
  family = FAMILIES[model.decoder_block]
  cfg, layers = initial_values.with_scheme(init_scheme, *family.decoder(model, precision, attention, platform))
  layers = tuple(
    dataclasses.replace(layer, precision=precision.in_layer(**own)) if own else layer
    for layer, own in zip(layers, layer_values(layer_precision, len(layers)), strict=True)
  )
  cfg = dataclasses.replace(cfg, scan_layers=scan_layers, remat_policy=remat_policy, remat_offload=remat_offload, rules=rules)
  experts = [Experts(layer.cfg.ffn.experts, layer.precision) for layer in layers if layer.cfg.ffn.experts is not None]
  if grouped_product != "auto" or experts:  # asking imports every kernel; all layers have one
    wanted = dict.fromkeys((e.precision.dtype, e.sums) for e in experts) or {(precision.dtype, False): None}
    cases = [grouped.Case(platform=platform, dtype=dtype, sums=sums, capability=capability) for dtype, sums in wanted]
    by = grouped.choose(grouped_product, *cases).name
    cfg = dataclasses.replace(cfg, grouped=by)
  if vision is not None and model.pad_token_id is not None:
    cfg = dataclasses.replace(cfg, placeholder_ids=vision.placeholder_ids)  # with or without a tower
  if vision is not None and vision.use_multimodal:
    assert vision.image_token_id is not None  # VisionConfig has seen to it
    # A kernel that is named is the layers'; heads of a tower are others. Plain XLA is plain XLA everywhere.
    of_tower: Choice = "dot_product" if attention in PLAIN else "auto"
    tower = family.tower(model, vision)
    if init_scheme == "depth_scaled":
      tower = tower.depth_scaled()
    tower = dataclasses.replace(tower, kernel=of_tower, platform=platform)
    cfg = dataclasses.replace(cfg, vision=tower, image_token_id=vision.image_token_id)
  decoder = Decoder(cfg, precision, layers)
  if remat_offload != "none" and not decoder.loops:
    why = "no two rows of its layers are equal" if scan_layers else "scan_layers is false"
    raise ValueError(
      f"remat_offload = {remat_offload}: the layers are in no loop ({why}), and out of one compilers keep on the device what "
      "is to wait on the host\n  fix: remat_offload=none"
    )
  return decoder
