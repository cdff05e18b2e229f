"""The whole decoder: an embedding, stacks of equal blocks run by ``lax.scan``, a final norm and a head.

B batch, T position, D model, V vocabulary, L layers, P per-layer width.
"""

import contextlib
import functools
import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import jax
import jax.numpy as jnp

from maxtext_like.layers.blocks import CAPTURES, PROBED, Aux, Carry, Context, DeepSeekLayer, GemmaLayer
from maxtext_like.layers.cache import Step
from maxtext_like.layers.embedding import Embedding, EmbeddingConfig, Head, Lookup, PerLayerInput, PerLayerInputConfig, soft_cap
from maxtext_like.layers.masks import Tokens, image_blocks
from maxtext_like.layers.norms import NormConfig, RMSNorm
from maxtext_like.layers.param import stack
from maxtext_like.layers.partition import constrain_batch
from maxtext_like.layers.precision import LAYER_KEYS, Precision
from maxtext_like.layers.vision_gemma3 import Siglip, SiglipConfig
from maxtext_like.layers.vision_gemma4 import Gemma4Vision, Gemma4VisionConfig

Layer = GemmaLayer | DeepSeekLayer
RematPolicy = Literal["none", "minimal", "full", "save_attention"]


@dataclass(frozen=True)
class Stack:
  """``repeats`` copies of a block of layers, the first of which is the model's layer ``first``."""

  name: str
  first: int
  block: tuple[Layer, ...]
  repeats: int

  def params(self) -> dict:
    return stack({f"layer_{j}": layer.params() for j, layer in enumerate(self.block)}, self.repeats)

  def split(self, layers: Sequence[Layer]) -> list[tuple[int, tuple[Layer, ...]]]:
    """The stack cut where the precision of its layers changes: (rows, block) for each run of equal rows.

    Args:
      layers: all layers of the model, with their own precisions.
    """
    period = len(self.block)
    rows = [tuple(layers[self.first + r * period : self.first + (r + 1) * period]) for r in range(self.repeats)]
    return [(len(list(same)), block) for block, same in itertools.groupby(rows)]


def find_stacks(layers: Sequence[Layer]) -> tuple[Stack, ...]:
  """Cuts a list of layers into stacks of a repeating block.

  From the left, each cut takes the block whose repetition covers most layers, and of those the shortest: Gemma's 5 local
  and 1 global layer are one block of 6, DeepSeek's dense layers and its MoE layers are two stacks of single layers.
  """
  stacks, at = [], 0
  while at < len(layers):
    best, repeats = 1, 1
    for period in range(1, (len(layers) - at) // 2 + 1):
      block, n = layers[at : at + period], 1
      while layers[at + n * period : at + (n + 1) * period] == block:
        n += 1
      if n > 1 and n * period > best * repeats:
        best, repeats = period, n
    stacks.append(Stack(f"stack_{len(stacks)}", at, tuple(layers[at : at + best]), repeats))
    at += best * repeats
  return tuple(stacks)


def remat(function, policy: RematPolicy, *, alone_in_scan: bool):
  """``jax.checkpoint`` under one of the named policies: what the forward pass keeps for the backward pass.

  Where a layer is the whole body of a scan, nothing can merge its recomputation with the forward pass. Elsewhere XLA must
  be kept from it, and from computing several layers again at once.
  """
  if policy == "none":
    return function
  saved = {
    "minimal": jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
    "full": jax.checkpoint_policies.nothing_saveable,
    "save_attention": jax.checkpoint_policies.save_only_these_names("attention"),
  }[policy]
  return jax.checkpoint(function, policy=saved, prevent_cse=not alone_in_scan)


@dataclass(frozen=True, kw_only=True)
class DecoderConfig:
  """What the decoder needs to know beyond its layers.

  Attributes:
    embedding: sizes of the table.
    tied: the head is the embedding's table.
    final_soft_cap: of the logits; None: none.
    norm: the final norm.
    per_layer_input: the extra embedding of E2B and E4B; None: none.
    kv_slots: (name, key-value heads, head dimension) of keys and values that travel between layers.
    vision: the tower that turns images into tokens; None: text only.
    image_token_id: the token whose embedding an image's features take the place of.
    placeholder_ids: tokens that stand for images, video and sound, and have no row of their own (Gemma 4).
    pad_token_id: the token that is looked up in their place, in the per-layer table too.
    scan_layers: run a stack by ``lax.scan``; False unrolls the same blocks over the same stacked parameters.
    remat_policy: what a layer keeps for the backward pass.
  """

  embedding: EmbeddingConfig
  norm: NormConfig
  tied: bool = True
  final_soft_cap: float | None = None
  per_layer_input: PerLayerInputConfig | None = None
  kv_slots: tuple[tuple[str, int, int], ...] = ()
  vision: SiglipConfig | Gemma4VisionConfig | None = None
  image_token_id: int = -1
  placeholder_ids: tuple[int, ...] = ()
  pad_token_id: int = 0
  scan_layers: bool = True
  remat_policy: RematPolicy = "none"

  @property
  def lookup(self) -> Lookup:
    """Which row a token is looked up in: whatever makes, checks or takes tokens asks here."""
    per_layer = self.per_layer_input.vocab_size if self.per_layer_input else None
    return Lookup(
      vocab_size=self.embedding.vocab_size,
      per_layer_rows=per_layer,
      placeholders=self.placeholder_ids,
      padding=self.pad_token_id,
    )


@dataclass(frozen=True)
class Decoder:
  """A decoder-only language model (Vaswani et al. 2017) as one layer: parameters and a pure call.

  A layer may have a precision of its own (``Precision.in_layer``). Stacks, and so parameters, are those of a model of one
  precision; a stack then runs in as many scans as it has runs of equal rows.
  """

  cfg: DecoderConfig
  precision: Precision
  layers: tuple[Layer, ...]

  def __post_init__(self):
    for i, layer in enumerate(self.layers):
      own = layer.precision
      if own != self.precision and own != self.precision.in_layer(**{key: getattr(own, key) for key in LAYER_KEYS}):
        raise ValueError(f"layer {i}: its precision differs from the decoder's in more than {', '.join(LAYER_KEYS)}")

  @functools.cached_property
  def stacks(self) -> tuple[Stack, ...]:
    return find_stacks([replace(layer, precision=self.precision) for layer in self.layers])

  def locate(self, layer: int) -> tuple[str, int, str]:
    """Where layer i's parameters are: params[stack][layer_name][...][row]. Returns (stack, row, layer_name)."""
    for s in self.stacks:
      row, j = divmod(layer - s.first, len(s.block))
      if 0 <= row < s.repeats:
        return s.name, row, f"layer_{j}"
    raise ValueError(f"layer {layer} of a model with layers 0 to {len(self.layers) - 1}")

  @property
  def uses_float16(self) -> bool:
    """Whether values may have to be rescued: the model, or a layer of its own precision, runs in float16."""
    return any(precision.dtype == "float16" for precision in (self.precision, *(layer.precision for layer in self.layers)))

  @property
  def _embedding(self) -> Embedding:
    return Embedding(self.cfg.embedding, self.precision)

  @property
  def _head(self) -> Head:
    return Head(self.cfg.embedding, self.precision)

  @property
  def _vision(self) -> Any:
    tower = self.cfg.vision
    if tower is None:
      return None
    return Siglip(tower, self.precision) if isinstance(tower, SiglipConfig) else Gemma4Vision(tower, self.precision)

  def params(self) -> dict:
    c = self.cfg
    spec: dict[str, Any] = {"embedding": self._embedding.params()}
    if c.per_layer_input:
      spec["ple"] = PerLayerInput(c.per_layer_input, self.precision).params()
    if self._vision:
      spec["vision"] = self._vision.params()
    spec |= {s.name: s.params() for s in self.stacks}
    spec["final_norm"] = RMSNorm(c.norm, self.precision).params()
    if not c.tied:
      spec["head"] = self._head.params()
    return spec

  def __call__(self, p: dict, batch: dict, capture: frozenset[str] = frozenset()) -> tuple[jax.Array, dict]:
    """Logits of a batch.

    Args:
      p: parameters.
      batch: int32 [B, T] arrays: "tokens"; "positions" (default: 0, 1, 2, ...); "segments" (0 is padding; default: every
        row is one document); "token_types" (1 image, 2 video, 0 text: which tokens see each other both ways; default:
        none do). With images: "pixel_values" and, for Gemma 4, "image_position_ids" (see the towers), either [I, ...],
        those of all rows in the order in which the rows name them, or [B, M, ...], those of each row; what follows the
        last named image is left unused. "probe_slots": float32 [L, 2] for each of ``blocks.PROBED``: the layers are
        probed, see ``layers.probe``.
      capture: names of ``blocks.CAPTURES`` to hand out.

    Returns:
      Logits [B, T, V] and aux (see ``hidden``).
    """
    x_BTD, aux = self.hidden(p, batch, capture)
    return self.head(p, x_BTD), aux

  @jax.named_scope("head")
  def head(self, p: dict, x_BTD: jax.Array) -> jax.Array:
    """Logits [B, T, V] of normed hidden states, float32 with ``cast_logits_to_fp32``."""
    logits = self._embedding.attend(p["embedding"], x_BTD) if self.cfg.tied else self._head(p["head"], x_BTD)
    return soft_cap(logits, self.cfg.final_soft_cap)

  def empty_cache(self, batch: int, length: int) -> dict:
    """Caches of every layer for generation: zeros in ``dtype``, {stack: {layer: {name: [repeats, B, slots, ...]}}}.

    The layers of one array share a dtype that holds what each of them stores.

    Args:
      batch: B, rows.
      length: tokens of the longest row, prompt and answer.
    """
    caches = {}
    for s in self.stacks:
      caches[s.name] = {}
      for j, layer in enumerate(s.block):
        slots, shapes = layer.cache_slots(length)
        dtype = functools.reduce(jnp.promote_types, {block[j].precision.dtype for _, block in s.split(self.layers)})
        arrays = {name: jnp.zeros((s.repeats, batch, slots, *shape), dtype) for name, shape in shapes.items()}
        caches[s.name][f"layer_{j}"] = arrays
    return caches

  def extend(self, p: dict, batch: dict, cache: dict, step: Step) -> tuple[jax.Array, dict, jax.Array]:
    """Normed hidden states [B, T, D] of T tokens that follow the cached ones, the caches after them, and the number of
    values that float16 had to rescue, int32.

    Args:
      p: parameters.
      batch: "tokens" and "positions" int32 [B, T]; images and "token_types" in the first call only.
      cache: ``empty_cache``, or what the last call returned.
      step: where the tokens stand; see ``layers.cache``.
    """
    live = (step.start + jnp.arange(batch["tokens"].shape[1]))[None, :] >= step.first[:, None]
    x, aux = self.hidden(p, batch | {"segments": live.astype(jnp.int32)}, cache=cache, step=step)
    return x, aux["cache"], aux["rescued"]

  def hidden(
    self, p: dict, batch: dict, capture: frozenset[str] = frozenset(), cache: dict | None = None, step: Step | None = None
  ) -> tuple[jax.Array, dict]:
    """Normed hidden states [B, T, D] in ``dtype``, and aux.

    aux always: "rescued" int32, the tower's too; with experts "moe_load" [MoE layers, E] and "load_balance_loss"; with an
    indexer "indexer_loss", the mean over layers; with slots "probes" {name: [L, 2]}. By capture: "hidden.embed",
    "hidden.layerNN", "hidden.final_norm", "router.layerNN.scores|topk_weights|topk_idx", "indexer.layerNN.topk_idx",
    "ple.layerNN", "vision.*".
    With caches and a step (see ``extend``): "cache".
    """
    if unknown := set(capture) - set(CAPTURES):
      raise ValueError(f"cannot capture {sorted(unknown)}; there are {CAPTURES}")
    tokens = batch["tokens"]
    B, T = tokens.shape
    positions = batch.get("positions")
    if positions is None:
      positions = jnp.broadcast_to(jnp.arange(T, dtype=jnp.int32), (B, T))
    types = batch.get("token_types")
    blocks = None if types is None else image_blocks(types)
    ctx = Context(positions, Tokens(batch.get("segments"), blocks), step, frozenset(capture))
    x, tokens, held, vision_aux = self._embed(p, batch)
    x = constrain_batch(x)
    embedded = x
    per_layer = None
    if self.cfg.per_layer_input:
      inputs = PerLayerInput(self.cfg.per_layer_input, self.precision)(p["ple"], tokens, x, held)
      per_layer = inputs.transpose(2, 0, 1, 3)  # [L, B, T, P]
    carry: Carry = {"x": x}
    if self.cfg.kv_slots:
      keys = {name: T + self._slots_of(name, cache) for name, _, _ in self.cfg.kv_slots}
      empty = {name: jnp.zeros((B, keys[name], K, H), self.precision.dtype) for name, K, H in self.cfg.kv_slots}
      carry["kv"] = {name: (zeros, zeros) for name, zeros in empty.items()}
    collected = []
    for s in self.stacks:
      carry, aux = self._run(s, p[s.name], carry, ctx, per_layer, cache and cache[s.name], batch.get("probe_slots"))
      collected.append((s, aux))
    x = RMSNorm(self.cfg.norm, self.precision)(p["final_norm"], carry["x"])
    aux = _totals(collected) | _captured(collected)
    aux["rescued"] = aux["rescued"] + vision_aux.pop("rescued", 0)
    if "hidden" in capture:
      aux |= {"hidden.embed": embedded, "hidden.final_norm": x}
    if "vision" in capture:
      aux |= vision_aux
    if cache is not None:
      aux["cache"] = {s.name: {j: a.get("cache", {}) for j, a in layers.items()} for s, layers in collected}
    return x, aux

  def _slots_of(self, kv_slot: str, cache: dict | None) -> int:
    """Slots in the cache of the layers that write this entry of the carry."""
    if cache is None:
      return 0
    for s in self.stacks:
      for j, layer in enumerate(s.block):
        if isinstance(layer, GemmaLayer) and layer.cfg.kv_slot == kv_slot and not layer.cfg.attention.shared_kv:
          return cache[s.name][f"layer_{j}"]["k"].shape[2]
    raise ValueError(f"no layer writes keys and values to {kv_slot!r}")

  def _embed(self, p: dict, batch: dict) -> tuple[jax.Array, jax.Array, jax.Array | None, dict]:
    """Embedded input [B, T, D], the rows that were looked up and where they stand for placeholders, the tower's aux."""
    vision = self._vision
    tokens, held = self.cfg.lookup(batch["tokens"])
    if vision is None or "pixel_values" not in batch:
      return self._embedding(p["embedding"], tokens, held), tokens, held, {}
    # Images by row [B, M, ...] lie on the devices as the rows do; images alone [I, ...] are those of all rows together.
    images = {name: batch[name] for name in ("pixel_values", "image_position_ids") if name in batch}
    by_row = images["pixel_values"].ndim > vision.pixel_rank
    if by_row:
      images = {name: x.reshape(-1, *x.shape[2:]) for name, x in images.items()}
    wrap = functools.partial(remat, policy=self.cfg.remat_policy, alone_in_scan=True)
    features, valid, aux = vision(p["vision"], images["pixel_values"], images.get("image_position_ids"), wrap=wrap)
    is_image = batch["tokens"] == self.cfg.image_token_id
    tokens = jnp.where(is_image, self.cfg.pad_token_id, tokens)  # Gemma 3's has a row, or lies beyond the table
    x = self._embedding(p["embedding"], tokens, held)
    # The n-th image token of a row (of the batch, in reading order) takes its n-th valid feature.
    groups = tokens.shape[0] if by_row else 1
    flat = features.reshape(groups, -1, features.shape[-1]).astype(x.dtype)
    order = jnp.argsort(~valid.reshape(groups, -1), axis=1, stable=True)
    nth = jnp.cumsum(is_image.reshape(groups, -1), axis=1) - 1
    place = jnp.take_along_axis(order, jnp.clip(nth, 0, flat.shape[1] - 1), axis=1)
    chosen = jnp.take_along_axis(flat, place[..., None], axis=1).reshape(x.shape)
    return jnp.where(is_image[..., None], chosen, x), tokens, held, aux | {"vision.valid": valid}

  def _run(
    self,
    s: Stack,
    p: dict,
    carry: Carry,
    ctx: Context,
    per_layer: jax.Array | None,
    cache: dict | None,
    slots: dict[str, jax.Array] | None,
  ) -> tuple[Carry, dict[str, Aux]]:
    """Runs one stack. Every leaf of aux has a leading axis of ``repeats``."""
    period, in_scan = len(s.block), self.cfg.scan_layers and s.repeats > 1

    def cut(x):  # [L, ...] of all layers to [repeats, period, ...] of this stack's
      return x[s.first : s.first + s.repeats * period].reshape(s.repeats, period, *x.shape[1:])

    per_layer, slots = jax.tree.map(cut, (per_layer, slots))

    def block(layers, alone, carry, row):
      p_row, inputs, cache_row, slots_row = row
      aux = {}
      for j, layer in enumerate(layers):
        call = remat(layer, self.cfg.remat_policy, alone_in_scan=alone)
        x_in = None if inputs is None else inputs[j]
        held = None if cache_row is None else cache_row[f"layer_{j}"]
        own_slots = None if slots_row is None else {name: slot[j] for name, slot in slots_row.items()}
        with jax.named_scope(f"{s.name}/layer_{j}"):
          carry, aux[f"layer_{j}"] = call(p_row[f"layer_{j}"], carry, ctx, x_in, held, own_slots)
        carry = carry | {"x": constrain_batch(carry["x"])}
        if "kv" in carry:
          # Whatever the layer's own dtype (or its cache's), what later layers share travels in the model's.
          carry["kv"] = jax.tree.map(self.precision.cast, carry["kv"])
      return carry, aux

    parts, outs = s.split(self.layers), []
    leaves, tree = jax.tree.flatten((p, per_layer, cache, slots))
    if in_scan:
      sizes = [rows for rows, _ in parts]
      # split's transpose, and unstack's, is one concatenation; slices would transpose to a sum of padded copies.
      xs = [leaves] if len(parts) == 1 else zip(*(jax.lax.split(x, sizes) for x in leaves), strict=True)
      for i, ((_, layers), part) in enumerate(zip(parts, xs, strict=True)):
        # A scan of one row is no loop once it is compiled.
        body = functools.partial(block, layers, period == 1 and len(part[0]) > 1)
        with jax.named_scope(f"row_{sum(sizes[:i])}") if len(parts) > 1 else contextlib.nullcontext():
          carry, aux = jax.lax.scan(body, carry, jax.tree.unflatten(tree, part))
        outs.append(aux)
      return carry, outs[0] if len(outs) == 1 else jax.tree.map(lambda *a: jnp.concatenate(a), *outs)
    blocks = [layers for rows, layers in parts for _ in range(rows)]
    for i, (layers, row) in enumerate(zip(blocks, zip(*map(jnp.unstack, leaves), strict=True), strict=True)):
      with jax.named_scope(f"row_{i}"):
        carry, aux = block(layers, False, carry, jax.tree.unflatten(tree, row))
      outs.append(aux)
    return carry, jax.tree.map(lambda *a: jnp.stack(a), *outs)


def _totals(collected: list[tuple[Stack, dict[str, Aux]]]) -> dict:
  """Statistics over the whole model: sums, means, and the loads in the order of the layers."""
  found: dict[str, list[jax.Array]] = {}
  probes = [f"probe.{name}" for name in PROBED]
  for _, aux in collected:
    layers = list(aux.values())
    for key in ("rescued", "load_balance_loss", "indexer_loss", "moe_load", *probes):
      values = [a[key] for a in layers if key in a]
      if values:
        together = jnp.stack(values, axis=1)  # [repeats, layers of the block that have it, ...]
        found.setdefault(key, []).append(together.reshape(-1, *together.shape[2:]))
  joined = {key: jnp.concatenate(values) for key, values in found.items()}
  reduce = {"rescued": jnp.sum, "load_balance_loss": jnp.sum, "indexer_loss": jnp.mean}
  seen = {key.removeprefix("probe."): joined.pop(key) for key in probes if key in joined}
  totals = {key: reduce[key](value) if key in reduce else value for key, value in joined.items()}
  return totals | ({"probes": seen} if seen else {})


def _captured(collected: list[tuple[Stack, dict[str, Aux]]]) -> dict:
  """Captured arrays of single layers: ``hidden.layerNN``, ``router.layerNN.scores``, ..."""
  out = {}
  for s, aux in collected:
    for row in range(s.repeats):
      for j in range(len(s.block)):
        number = f"layer{s.first + row * len(s.block) + j:02d}"
        for key, value in aux[f"layer_{j}"].items():
          kind, _, rest = key.partition(".")
          if kind in CAPTURES:
            out[f"{kind}.{number}" + (f".{rest}" if rest else "")] = value[row]
  return out
