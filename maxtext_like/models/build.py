"""From a configuration to a decoder: picks the family and translates the precision section."""

import dataclasses

from maxtext_like.config.model import ModelConfig
from maxtext_like.config.vision import VisionConfig
from maxtext_like.layers.attention_kernels import Kernel
from maxtext_like.layers.decoder import Decoder, RematPolicy
from maxtext_like.layers.precision import Precision
from maxtext_like.models import deepseek, gemma
from maxtext_like.models.vision import tower


def build_decoder(
  model: ModelConfig,
  precision: Precision,
  *,
  vision: VisionConfig | None = None,
  scan_layers: bool = True,
  remat_policy: RematPolicy = "none",
  attention: Kernel = "auto",
  platform: str = "cpu",
) -> Decoder:
  """The decoder of a configuration.

  Args:
    model: the ``model:`` section.
    precision: dtypes and float32 flags.
    vision: the ``vision:`` section; the decoder gets its tower with ``use_multimodal``. None: text only.
    scan_layers: ``lax.scan`` over equal blocks, or the same blocks unrolled.
    remat_policy: what a layer keeps for the backward pass.
    attention: the kernel, "auto" for the fastest that honours mask and flags.
    platform: "cpu", "gpu" or "tpu", where the program will run.

  Returns:
    A ``Decoder``: ``params()`` and a pure call.

  Raises:
    ValueError: sizes that no model can have.
  """
  if model.decoder_block == "deepseek":
    cfg, layers = deepseek.decoder(model, precision, attention)
  else:
    cfg, layers = gemma.decoder(model, precision, attention, platform)
  cfg = dataclasses.replace(cfg, scan_layers=scan_layers, remat_policy=remat_policy)
  if vision is not None and vision.use_multimodal:
    assert vision.image_token_id is not None  # VisionConfig has seen to it
    cfg = dataclasses.replace(cfg, vision=tower(model, vision), image_token_id=vision.image_token_id)
  return Decoder(cfg, precision, layers)
