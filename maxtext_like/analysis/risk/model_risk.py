"""Finds the sizes of every risky quantity of a decoder from its weights: walks through the model and bounds each product.

The equations are those of ``maxtext_like.layers``. The layers of a family are in ``analysis/risk/<family>.py``, the verdicts in
``overflow_risk``.

P per-layer part.
"""

import importlib
import importlib.util

import numpy as np

from maxtext_like.analysis.risk import bounds
from maxtext_like.analysis.risk.bounds import Signal
from maxtext_like.analysis.risk.parameters import Parameters, Reader
from maxtext_like.analysis.risk.walk import Formula, Site, Sizes
from maxtext_like.config.model import ModelConfig
from maxtext_like.errors import UserError
from maxtext_like.layers.decoder import Decoder


def formula_of(family: str) -> Formula | None:
  """Return the ``RISK`` of ``analysis/risk/<family>.py``; None if there is no such file."""
  name = f"{__package__}.{family}"
  return importlib.import_module(name).RISK if importlib.util.find_spec(name) is not None else None


def measure(model: ModelConfig, decoder: Decoder, read: Reader, tokens: int) -> list[Site]:
  """Return every site of a decoder, in model order.

  Args:
    model: the model's configuration, which names the family.
    decoder: the model in its precision; the dtype of activations decides how much rounding adds to a bound.
    read: reads its parameters.
    tokens: number of tokens that an expected maximum is taken over.

  Raises:
    NonFiniteError: a parameter is not finite.
    UserError: there is no formula for the family.
  """
  formula = formula_of(model.decoder_block)
  if formula is None:
    raise UserError(
      f"risk: there is no formula for decoder_block {model.decoder_block}\n"
      "  fix: examine a step with this checkpoint: maxtext-like xray (maxtext_like.xray_step in Python)"
    )
  u, u_residual = (bounds.UNIT_ROUNDOFF[dtype] for dtype in (decoder.precision.dtype, decoder.precision.residual))
  sizes = Sizes(u, u_residual, tokens)
  p, c = Parameters(decoder, read), decoder.cfg
  # The input of the first layer: rows of the embedding table, or features of an image.
  peak, rms = p.row_peaks("embedding", "table")
  root = c.embedding.emb_dim**0.5 if c.embedding.scale_by_sqrt_dim else 1.0
  x = Signal(peak * root, rms * root).grown((1 + sizes.u) ** 3)
  sizes.put("model", "embedding", x)
  if c.vision is not None:
    assert formula.tower is not None, "the family that builds towers has a formula for them"
    image = formula.tower(sizes, p.part("vision"), c.vision, decoder.precision)
    x = Signal(np.maximum(x.bounds(), image.bounds()), np.maximum(x.std, image.std))
  per_layer = _per_layer_inputs(sizes, p.part("ple"), decoder) if c.per_layer_input else None
  # The layers, each with the family's formula.
  for number, layer in enumerate(decoder.layers):
    own = None if per_layer is None else per_layer.channels(_columns_of(decoder, number))
    x = formula.layer(sizes, f"layers.{number}", p.layer(number), layer, x, own)
  # The final norm and the logits.
  last = bounds.normed_by(c.norm, p.scale("final_norm", plus_one=c.norm.scale_plus_one), sizes.u)
  sizes.put("model", "norm", last)
  table = (w.T for w in p.rows("embedding", "table")) if c.tied else p.columns("head", "kernel")
  logits = sizes.put("model", "logits", bounds.through(last, table, sizes.u))
  if c.final_soft_cap is not None:
    sizes.add(
      "model", "capped logits", *sizes.capped(float(np.max(logits.bounds())), sizes.sites[-1].expected, c.final_soft_cap)
    )
  return sizes.sites


def _columns_of(decoder: Decoder, number: int) -> slice:
  assert decoder.cfg.per_layer_input is not None
  width = decoder.cfg.per_layer_input.width
  return slice(number * width, (number + 1) * width)


def _per_layer_inputs(sizes: Sizes, p: Parameters, decoder: Decoder) -> Signal:
  """Return the inputs of all layers, [L * P] channels: a normalized projection of the embedding plus a row of a table."""
  c = decoder.cfg.per_layer_input
  assert c is not None
  peak, rms = p.row_peaks("table")
  identity = Signal(peak * c.width**0.5, rms * c.width**0.5).grown((1 + sizes.u) ** 3)
  context = bounds.heads(bounds.normed(p.scale("norm"), bounds.UNIT_ROUNDOFF["float32"]), c.num_layers)
  both = identity.added(context, bounds.UNIT_ROUNDOFF["float32"]).times(2.0**-0.5)
  # The table row alone is also held in the dtype of activations.
  sizes.put("model", "per-layer row", identity)
  return sizes.put("model", "per-layer input", both.grown(1 + sizes.u))
