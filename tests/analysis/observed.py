"""Measures the largest magnitude of every risky quantity of a forward pass, by patching the layers while they are traced.

Keys are those of ``walk.Site``: (place, quantity). All experts of a layer share one key.
"""

import contextlib
from collections import defaultdict
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np

from maxtext_like.layers import block, decoder, embedding, norms, per_layer, precision
from maxtext_like.layers.attention import indexer
from maxtext_like.layers.moe import moe
from maxtext_like.layers.vision import gemma3, gemma4

Key = tuple[str, str]

_OF_WEIGHT = {
  "attention.q": "q",
  "attention.q_b": "q",
  "attention.k": "k",
  "attention.v": "v",
  "attention.o": "attention output",
  "attention.q_a": "q latent",
  "attention.kv_a": "kv latent",
  "attention.indexer.q": "index q",
}
_OF_PART = {"mlp": ".mlp", "moe.shared": ".moe.shared"}
_OF_PLE = {"ple.gate": "per-layer gate", "ple.projection": "per-layer output"}
_OF_TOP = {"final_norm.scale": "norm", "vision.final_norm.scale": "norm"}


class Recorder:
  """Collects tracers by key while layers run inside one trace."""

  def __init__(self, model: Any):
    self.model, self.found = model, defaultdict(list)
    self.place, self.names = "model", {}
    self.layer: Any = None
    self.text = self.vision = 0

  def note(self, place: str, quantity: str, x: Any) -> None:
    self.found[place, quantity].append(jnp.max(jnp.abs(x.astype(jnp.float32))))

  def enter(self, place: str, layer: Any, p: Any) -> None:
    self.place, self.layer = place, layer
    self.names = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(p):
      self.names[id(leaf)] = ".".join(str(entry.key) for entry in path)

  def product(self, spec: str, x: Any, w: Any, out: Any, clipped: bool | None = None) -> None:
    """Notes a product of ``Precision.einsum``, or its clipped result in Gemma 4's vision tower."""
    place, name = self.place, self.names.get(id(w), "")
    part, _, last = name.rpartition(".")
    if spec == "BTKGH,BSKH->BKGTS":
      self.note(place, "q.k", out)
      self.note(place, "scores", out.astype(jnp.float32) * self._scale())
    elif spec == "BTXH,BSH->BXTS":
      self.note(place, "index q.k", out)
    elif clipped is None and isinstance(self.layer, gemma4.Gemma4VisionLayer):
      return  # noted after its clip, see ``recording``
    elif name == "attention.kv_b":
      nope = self.layer.cfg.mixer.nope_dim
      self.note(place, "k", out[..., :nope])
      self.note(place, "v", out[..., nope:])
    elif name in _OF_WEIGHT:
      self.note(place, _OF_WEIGHT[name], out)
    elif part in _OF_PART and isinstance(self.layer, gemma3.SiglipLayer):
      self.note(place + ".mlp", {"up": "hidden", "down": "down"}[last], out)
    elif part in _OF_PART:
      self.note(place + _OF_PART[part], last, out)
      if last == "down":
        self.note(place + _OF_PART[part], "product", x)
    elif name in _OF_PLE and place != "model":
      self.note(place + ".ple", _OF_PLE[name], out)
      if last == "projection":
        self.note(place + ".ple", "per-layer product", x)

  def _scale(self) -> float:
    cfg = self.layer.cfg
    if isinstance(self.layer, gemma3.SiglipLayer):
      return (cfg.emb_dim // cfg.num_heads) ** -0.5
    return 1.0 if isinstance(self.layer, gemma4.Gemma4VisionLayer) else cfg.mixer.scale

  def norm(self, p: Any, x: Any, out: Any) -> None:
    name = self.names.get(id(p.get("scale")), "")
    if name.startswith("pre_"):
      self.note(f"{self.place}.{name.removesuffix('.scale')}", "norm", out)
    elif name in _OF_TOP:
      self.note("vision" if name.startswith("vision") else "model", "norm", out)
    elif name == "post_mlp_norm.scale" and isinstance(self.layer, block.Block) and self.layer.cfg.ffn.experts:
      self.note(self.place, "branches", x)


def _around(recorder: Recorder, cls: type, method: str, after: Any):
  """Patches ``cls.method`` so that it calls ``after(self, args, result)`` at its end."""
  inner = getattr(cls, method)

  def wrapped(self, *args, **kwargs):
    out = inner(self, *args, **kwargs)
    after(self, args, out)
    return out

  return mock.patch.object(cls, method, wrapped)


def _layer(recorder: Recorder, cls: type, vision: bool):
  """Patches a layer's call: the recorder enters the layer and notes the result as the residual stream."""
  inner = cls.__call__

  def wrapped(self, p, x, *args, **kwargs):
    number = recorder.vision if vision else recorder.text
    if vision and number == 0:
      recorder.note("vision", "embedding", x)
    before = (recorder.place, recorder.layer, recorder.names)
    place = f"vision.layers.{number}" if vision else f"layers.{number}"
    recorder.enter(place, self, p)
    out = inner(self, p, x, *args, **kwargs)
    residual = out[0] if isinstance(out, tuple) else out  # Gemma 4's towers also return how many numbers they clamped
    recorder.note(place, "residual", residual if vision else residual["x"])
    recorder.place, recorder.layer, recorder.names = before
    if vision:
      recorder.vision += 1
    else:
      recorder.text += 1
    return out

  return mock.patch.object(cls, "__call__", wrapped)


def _experts(recorder: Recorder):
  inner = moe.Experts._gated

  def wrapped(self, p, rows, product):
    place = recorder.place + ".moe.experts"
    names = {id(w): name for name, w in p.items()}

    def noted(x, w):
      out = product(x, w)
      recorder.note(place, names[id(w)], out)
      if names[id(w)] == "down":
        recorder.note(place, "product", x)
      return out

    return inner(self, p, rows, noted)

  return mock.patch.object(moe.Experts, "_gated", wrapped)


def _unrolled(body, carry, rows):
  """Replaces ``lax.scan`` by a Python loop, so that recorded tracers are valid outside the body."""
  outputs = []
  for number in range(jax.tree.leaves(rows)[0].shape[0]):
    carry, out = body(carry, jax.tree.map(lambda x, n=number: x[n], rows))
    outputs.append(out)
  return carry, jax.tree.map(lambda *leaves: jnp.stack(leaves), *outputs)


@contextlib.contextmanager
def recording(recorder: Recorder):
  """Applies all patches for one trace."""
  place = lambda: recorder.place
  note = recorder.note
  with contextlib.ExitStack() as stack:
    inner = precision.Precision.einsum

    def einsum(self, spec, x, w, **kwargs):
      out = inner(self, spec, x, w, **kwargs)
      recorder.product(spec, x, w, out)
      return out

    stack.enter_context(mock.patch.object(precision.Precision, "einsum", einsum))
    stack.enter_context(mock.patch.object(jax.lax, "scan", _unrolled))
    stack.enter_context(_experts(recorder))
    for cls, vision in (
      (block.Block, False),
      (gemma3.SiglipLayer, True),
      (gemma4.Gemma4VisionLayer, True),
    ):
      stack.enter_context(_layer(recorder, cls, vision))
    pool = lambda self, args, out: note("vision", "pooled * sqrt(D)", out[0] * self.cfg.emb_dim**0.5)

    def linear(self, args, out):
      p, name, spec, x = args
      recorder.product(spec, x, p[name], out, clipped=True)

    def standardized(self, args, out):
      if self.cfg.standardize:
        note("vision", "standardized", out[0])

    for cls, method, after in (
      (norms.RMSNorm, "__call__", lambda self, args, out: recorder.norm(args[0], args[1], out)),
      (norms.LayerNorm, "__call__", lambda self, args, out: recorder.norm(args[0], args[1], out)),
      (moe.Router, "_logits", lambda self, args, out: note(place() + ".moe", "router logits", out)),
      (moe.MoE, "__call__", lambda self, args, out: note(place() + ".moe", "experts output", out)),
      (indexer.Indexer, "score", lambda self, args, out: note(place(), "index scores", out)),
      (embedding.Embedding, "__call__", lambda self, args, out: note("model", "embedding", out)),
      (per_layer.PerLayerInput, "__call__", lambda self, args, out: note("model", "per-layer input", out)),
      (gemma4.Gemma4VisionLayer, "_linear", linear),
      (gemma4.Gemma4Vision, "_pool", pool),
      (gemma4.Gemma4Vision, "_standardize", standardized),
      (gemma4.Gemma4Vision, "__call__", lambda self, args, out: note("vision", "projector", out[0])),
      (gemma3.Siglip, "__call__", lambda self, args, out: note("vision", "projector", out[0])),
    ):
      stack.enter_context(_around(recorder, cls, method, after))
    cap = decoder.soft_cap

    def soft_cap(logits, limit):
      out = cap(logits, limit)
      note("model", "logits", logits)
      if limit is not None:
        note("model", "capped logits", out)
      return out

    stack.enter_context(mock.patch.object(decoder, "soft_cap", soft_cap))
    yield


def observe(model: Any, params: Any, batches: list[dict[str, Any]], compiler_options: dict | None = None) -> dict[Key, float]:
  """Returns the largest magnitudes over batches of equal shapes. The decoder must have scan_layers=false."""

  def forward(params, batch):
    recorder = Recorder(model)
    recorder.enter("model", None, params)
    with recording(recorder):
      model(params, batch)
    return {f"{place}|{quantity}": jnp.max(jnp.stack(values)) for (place, quantity), values in recorder.found.items()}

  program = jax.jit(forward, compiler_options=compiler_options)
  found: dict[Key, float] = {}
  for batch in batches:
    for name, value in jax.device_get(program(params, batch)).items():
      place, _, quantity = name.partition("|")
      found[place, quantity] = float(np.maximum(found.get((place, quantity), 0.0), value))
  return found
