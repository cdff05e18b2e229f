"""``Decoder``: the complete language model: an embedding, stacks of layers run by ``lax.scan``, a final norm and a head.

B batch, T position, D model, V vocabulary, L layers, P per-layer width.
"""

import contextlib
import functools
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Protocol

import jax
import jax.numpy as jnp

from maxtext_like.layers.attention.masks import Tokens, numbered_images, soft_cap
from maxtext_like.layers.block import Block, Carry, Stack, captured, find_stacks, taken_caches, totals
from maxtext_like.layers.cache import Step, split_over_mesh
from maxtext_like.layers.context import CAPTURES, Aux, Context
from maxtext_like.layers.embedding import Embedding, EmbeddingConfig, Head, Lookup
from maxtext_like.layers.kernels.grouped_matmul.registry import Name
from maxtext_like.layers.moe.load_balance import LOAD
from maxtext_like.layers.moe.router_losses import RouterLosses
from maxtext_like.layers.norms import NormConfig, RMSNorm, named
from maxtext_like.layers.partition import rows_of
from maxtext_like.layers.per_layer import PerLayerInput, PerLayerInputConfig
from maxtext_like.layers.precision import LAYER_KEYS, Precision
from maxtext_like.layers.remat import RematOffload, RematPolicy, keeps, remat
from maxtext_like.layers.sharding_rules import RULES, Rules
from maxtext_like.layers.weight import cuts_rows, unstacked


class Tower(Protocol):
  """A vision tower: (p, pixels, positions, ctx) -> features [I, S, D], and bool [I, S]: which of them are image tokens."""

  pixel_rank: ClassVar[int]  # rank of "pixel_values" with all images in one list

  def params(self) -> dict: ...
  def __call__(self, p: dict, pixels: Any, positions: Any, ctx: Context, *, wrap: Any) -> tuple[jax.Array, jax.Array]: ...


@dataclass(frozen=True, kw_only=True)
class DecoderConfig:
  """Settings of the decoder other than those of its layers.

  Attributes:
    embedding: sizes of the embedding table.
    tied: the head uses the embedding table.
    final_soft_cap: soft cap of the logits; None: no cap.
    norm: the final norm.
    per_layer_input: the per-layer embedding of E2B and E4B; None if the model has none.
    vision: configuration of the vision tower; its ``layer(precision)`` is a ``Tower``. None for a text model.
    image_token_id: the token whose embedding is replaced by the features of an image.
    placeholder_ids: tokens that represent images, video and sound and have no row in the tables (Gemma 4).
    pad_token_id: the token that is looked up instead of them, also in the per-layer table.
    scan_layers: run a stack by ``lax.scan``; False unrolls the same rows over the same stacked parameters.
    remat_policy: the values that a layer saves for the backward pass.
    remat_offload: the saved values that are kept in host memory until the backward pass. It applies to layers that run in a
      loop (``loops``), but not to a vision tower. Outside a loop, compilers move an array to the host only when it is needed
      again, so it occupies device memory all the time.
    rules: sharding of parameters and activations over a mesh.
    grouped: name of the kernel that multiplies tokens by their experts.
    one_document: every row of a batch is one document followed by padding (``masks.Tokens``).
  """

  embedding: EmbeddingConfig
  norm: NormConfig
  tied: bool = True
  final_soft_cap: float | None = None
  per_layer_input: PerLayerInputConfig | None = None
  vision: Any = None
  image_token_id: int = -1
  placeholder_ids: tuple[int, ...] = ()
  pad_token_id: int = 0
  scan_layers: bool = True
  remat_policy: RematPolicy = "none"
  remat_offload: RematOffload = "none"
  rules: Rules = RULES
  grouped: Name = "ragged_dot"
  one_document: bool = False

  @property
  def lookup(self) -> Lookup:
    """The table row of each token. All code that produces, checks or reads tokens uses this object."""
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

  A layer may have its own precision (``Precision.in_layer``). Stacks, and therefore the parameter tree, do not depend on these
  precisions. A stack whose rows differ in precision runs as several scans, one for each run of equal rows.
  """

  cfg: DecoderConfig
  precision: Precision
  layers: tuple[Block, ...]

  def __post_init__(self):
    for i, layer in enumerate(self.layers):
      own = layer.precision
      if own != self.precision and own != self.precision.in_layer(**{key: getattr(own, key) for key in LAYER_KEYS}):
        raise ValueError(f"layer {i}: its precision may differ from the decoder's only in {', '.join(LAYER_KEYS)}")

  @functools.cached_property
  def stacks(self) -> tuple[Stack, ...]:
    return find_stacks([replace(layer, precision=self.precision) for layer in self.layers])

  @property
  def loops(self) -> tuple[Stack, ...]:
    """Stacks with several rows that run in one loop."""
    rows = lambda s: max(count for count, _ in s.split(self.layers))
    return tuple(s for s in self.stacks if rows(s) > 1) if self.cfg.scan_layers else ()

  def locate(self, layer: int) -> tuple[str, int, str]:
    """Find the parameters of a layer: params[stack][layer_name][...][row]. Return (stack, row, layer_name)."""
    for s in self.stacks:
      row, j = divmod(layer - s.first, len(s.layers))
      if 0 <= row < s.repeats:
        return s.name, row, f"layer_{j}"
    raise ValueError(f"layer {layer} does not exist: the model has layers 0 to {len(self.layers) - 1}")

  @property
  def uses_float16(self) -> bool:
    """True if values may have to be clamped: the model, or a layer with its own precision, runs in float16."""
    return any(precision.dtype == "float16" for precision in (self.precision, *(layer.precision for layer in self.layers)))

  @property
  def router_losses(self) -> tuple[RouterLosses, int]:
    """The auxiliary losses of the routers, which are equal in all layers, and the number of experts per token."""
    experts = [layer.cfg.ffn.experts for layer in self.layers if layer.cfg.ffn.experts is not None]
    return (experts[0].losses, experts[0].num_experts_per_tok) if experts else (RouterLosses(), 0)

  @property
  def _embedding(self) -> Embedding:
    return Embedding(self.cfg.embedding, self.precision)

  @property
  def _head(self) -> Head:
    return Head(self.cfg.embedding, self.precision)

  @property
  def _per_layer(self) -> PerLayerInput | None:
    return PerLayerInput(self.cfg.per_layer_input, self.precision) if self.cfg.per_layer_input else None

  @property
  def _tower(self) -> Tower | None:
    return self.cfg.vision.layer(self.precision) if self.cfg.vision else None

  @property
  def _final_norm(self) -> RMSNorm:
    return RMSNorm(self.cfg.norm, self.precision)

  @functools.cached_property
  def shared_kv(self) -> dict[str, tuple[int, ...]]:
    """Shapes of the keys and values that layers share, by name, without batch and positions."""
    return {name: shape for layer in self.layers for name, shape in layer.mixer.shared_kv().items()}

  def params(self) -> dict:
    spec: dict[str, Any] = {"embedding": self._embedding.params()}
    if self._per_layer:
      spec["ple"] = self._per_layer.params()
    if self._tower:
      spec["vision"] = self._tower.params()
    spec |= {s.name: s.params() for s in self.stacks}
    spec["final_norm"] = self._final_norm.params()
    # Tied embeddings are the head too.
    if not self.cfg.tied:
      spec["head"] = self._head.params()
    return spec

  def __call__(self, p: dict, batch: dict, capture: frozenset[str] = frozenset()) -> tuple[jax.Array, dict]:
    """Compute the logits of a batch.

    Args:
      p: parameters.
      batch: int32 [B, T] arrays: "tokens"; "positions" (default: 0, 1, 2, ...); "segments" (0 is padding; default: every
        row is one document); "token_types" (1 image, 2 video, 0 text; tokens of one image see each other in both directions;
        default: no images). With images: "pixel_values" and, for Gemma 4, "image_position_ids" (see the towers). They are
        either [I, ...], the images of all rows in the order of the image tokens, or [B, M, ...], the images of each row.
        Images after the last image token are unused.
      capture: names of ``context.CAPTURES`` to return.

    Returns:
      Logits [B, T, V] and aux (see ``hidden``).
    """
    x_BTD, aux = self.hidden(p, batch, capture)
    return self.head(p, x_BTD), aux

  @jax.named_scope("head")
  def head(self, p: dict, x_BTD: jax.Array) -> jax.Array:
    """Compute logits [B, T, V] from normed hidden states, in float32 with ``cast_logits_to_fp32``."""
    logits = self._embedding.attend(p["embedding"], x_BTD) if self.cfg.tied else self._head(p["head"], x_BTD)
    logits = self.cfg.rules.share(logits, "batch", "sequence", "vocab")
    with jax.named_scope("soft_cap"):
      return soft_cap(logits, self.cfg.final_soft_cap)

  def empty_cache(self, rows: int, capacity: int, *, apart: bool = False, int8: bool = False, spare: int = 0) -> dict:
    """Create the caches of all layers for generation: zeros in ``dtype``, or an 8-bit cache with ``int8``.

    Args:
      rows: R, see ``layers.cache``.
      capacity: tokens of the longest row, including the prompt and the answer.
      apart: every layer has its own arrays, for parameters of ``apart``.
      spare: additional slots of sliding layers, for tokens that are taken back (``layers.cache``).

    Returns:
      {stack: {layer: {name: [repeats, R, ..., C, X]}}}, or {stack: ({layer: {name: [R, ..., C, X]}}, ...)} with ``apart``.
    """
    caches = {s.name: s.empty_cache(self.layers, rows, capacity, apart=apart, int8=int8, spare=spare) for s in self.stacks}
    return jax.tree.map(lambda x: split_over_mesh(x, self.cfg.rules, stacked=not apart), caches)

  def apart(self, p: dict) -> dict:
    """Return parameters in which every layer of a stack has its own arrays: a tuple of rows for each stack.
    A product reads such arrays in place, but a slice of a stacked array is copied before it. ``hidden`` accepts both forms."""
    each = {s.name: tuple(unstacked(s.params(), p[s.name], None)) for s in self.stacks if isinstance(p[s.name], dict)}
    return p | each

  def extend(self, p: dict, batch: dict, cache: dict, step: Step) -> tuple[jax.Array, dict, jax.Array]:
    """Process T tokens that follow the cached ones.

    Args:
      p: parameters.
      batch: "tokens" and "positions" int32 [B, T]; images and "token_types" only for fresh rows.
      cache: ``empty_cache``, or the caches that the previous call returned.
      step: position of the tokens in their rows.

    Returns:
      Normed hidden states [B, T, D], the updated caches, and the number of values that were clamped with float16, int32.
    """
    real = step.real(batch["tokens"].shape[1])
    x, aux = self.hidden(p, batch | {"segments": real.astype(jnp.int32)}, cache=cache, step=step)
    return x, aux["cache"], aux["clamped"]

  def hidden(
    self,
    p: dict,
    batch: dict,
    capture: frozenset[str] = frozenset(),
    cache: dict | None = None,
    step: Step | None = None,
    probes: dict[str, jax.Array] | None = None,
  ) -> tuple[jax.Array, dict]:
    """Compute normed hidden states [B, T, D] in ``dtype``, and aux.

    Args:
      p, batch, capture: as in ``__call__``.
      cache, step: as in ``extend``.
      probes: float32 [L, 2] for each of ``context.PROBED``; every layer is then probed, see ``layers.probe``.

    aux always has "clamped" int32, which includes the vision tower. With experts it has "moe_load" [MoE layers, E] and the
    entries of ``load_balance.totals``; with an indexer "indexer_loss", the mean over layers; with probes "probes" {name: [L,
    2]}. By capture: "hidden.embed", "hidden.layerNN", "hidden.final_norm", "router.layerNN.scores|topk_weights|topk_idx",
    "indexer.layerNN.topk_idx", "ple.layerNN", "vision.*". With caches and a step (see ``extend``): "cache".
    """
    # Embed, run every stack, apply the final norm.
    ctx = self.context(batch, capture, step)
    carry, per_layer, first = self.enter(p, batch, ctx, cache)
    collected, caches = [], {}
    for s in self.stacks:
      carry, aux, caches[s.name] = self._run(s, carry, self.rows(s, p, per_layer, cache, probes), ctx)
      collected.append((s, aux))
    x, aux = self.leave(p, carry, collected, first, ctx)
    return x, aux if cache is None else aux | {"cache": caches}

  # The following methods are the parts of a pass. ``hidden`` calls them in order. The step that updates each layer as soon as
  # its gradient is available (training/step/in_backward/step.py) calls them in another order.

  def context(self, batch: dict, capture: frozenset[str] = frozenset(), step: Step | None = None) -> Context:
    """Create the context that all layers share. It does not depend on parameters."""
    if unknown := set(capture) - set(CAPTURES):
      raise ValueError(f"cannot capture {sorted(unknown)}\n  fix: choose from {', '.join(CAPTURES)}")
    # Number the images of each row, and collect documents and images in Tokens.
    types = batch.get("token_types")
    images = None if types is None else numbered_images(types)
    tokens = Tokens(batch.get("segments"), images, self.cfg.one_document and step is None)
    return Context.of(
      batch["tokens"],
      batch.get("positions"),
      tokens,
      step=step,
      capture=frozenset(capture),
      rules=self.cfg.rules,
      grouped=self.cfg.grouped,
      balance_load=batch.get(LOAD),
    )

  def enter(self, p: dict, batch: dict, ctx: Context, cache: dict | None = None) -> tuple[Carry, jax.Array | None, Aux]:
    """Embed a batch: compute the inputs of the first row of layers.

    Args:
      p: parameters. Only the embedding, the per-layer inputs and the vision tower are used.
      batch: as in ``__call__``.
      ctx: ``context`` of the batch.
      cache: the caches, in generation.

    Returns:
      The carry; the per-layer inputs [L, B, T, P] or None; and aux: captures, and "clamped" if the model has a tower.
    """
    ctx = ctx.collecting()
    x, tokens, placeholder = self._embed(p, batch, ctx)
    x = ctx.rules.constrain(x, "batch", "sequence")
    if "hidden" in ctx.capture:
      ctx.tap("hidden.embed", x)
    # Per-layer inputs: bring the axis of layers to the front, so that a stack can slice it.
    per_layer = None
    if self._per_layer:
      own = ctx.rules.constrain(self._per_layer(p["ple"], tokens, x, placeholder), "batch", "sequence")
      per_layer = own.transpose(2, 0, 1, 3)
    # Keys and values that layers share are part of the carry, so they need an array from the start.
    carry: Carry = {"x": x}
    if self.shared_kv:
      B, T = batch["tokens"].shape
      # With a cache, they are its entries [B, K, S, H].
      step, shapes = ctx.step, {name: (B, T, *shape) for name, shape in self.shared_kv.items()}
      if cache is not None and step is not None:
        slots = {name: count for s in self.stacks for name, count in s.shared_slots(cache[s.name]).items()}
        shapes = {name: (B, *s[2:-1], step.held(T, slots[name]), s[-1]) for name, s in shapes.items()}
      empty = {name: jnp.zeros(shape, self.precision.dtype) for name, shape in shapes.items()}
      axes = ("batch", "sequence") if ctx.step is None else ("batch",)
      empty = {name: ctx.rules.constrain(zeros, *axes) for name, zeros in empty.items()}
      carry["kv"] = {name: (zeros, zeros) for name, zeros in empty.items()}
    return carry, per_layer, ctx.aux

  def rows(
    self, s: Stack, p: dict, per_layer: jax.Array | None = None, cache: dict | None = None, probes: dict | None = None
  ) -> dict[str, Any]:
    """Collect the inputs of each row of a stack other than the carry. Every leaf has a leading axis of ``repeats``.

    Args:
      s: the stack.
      p: the decoder's parameters.
      per_layer: per-layer inputs of ``enter``.
      cache, probes: as in ``hidden``.
    """
    # Cut per-layer arrays of the model into the rows of this stack.
    period = len(s.layers)

    def cut(x):  # [L, ...] of all layers to [repeats, period, ...] of this stack's
      return x[s.first : s.first + s.repeats * period].reshape(s.repeats, period, *x.shape[1:])

    per_layer, probes = jax.tree.map(cut, (per_layer, probes))
    return {"params": p[s.name], "cache": cache and cache[s.name], "per_layer": per_layer, "probes": probes}

  def run_row(
    self, s: Stack, layers: tuple[Block, ...], carry: Carry, row: dict[str, Any], ctx: Context, *, in_loop: bool = False
  ) -> tuple[Carry, dict[str, Aux]]:
    """Run the layers of one row of a stack.

    Args:
      s: the stack.
      layers: the layers of the row, with their own precisions (``Stack.split``).
      carry: carry of ``enter`` or of the previous row.
      row: one entry of ``rows``.
      ctx: ``context`` of the batch.
      in_loop: the row is the body of a loop.

    Returns:
      The carry, and the aux values of each layer, {"layer_j": aux}.
    """
    aux = {}
    for j, layer in enumerate(layers):
      isolated = in_loop and len(s.layers) == 1
      carry, aux[f"layer_{j}"] = self.run_layer(s, j, layer, carry, row, ctx, in_loop=in_loop, isolated=isolated)
    return carry, aux

  def run_layer(
    self,
    s: Stack,
    j: int,
    layer: Block,
    carry: Carry,
    row: dict[str, Any],
    ctx: Context,
    *,
    in_loop: bool = False,
    isolated: bool = False,
  ) -> tuple[Carry, Aux]:
    """Run layer j of a row with its own precision. The other arguments are as in ``run_row``. Return the carry and aux.

    ``isolated``: XLA has no neighboring computation to merge with the recomputation of this layer (``remat``)."""
    # The part of the inputs that belongs to this layer.
    own = replace(
      ctx,
      cache=None if row["cache"] is None else row["cache"][f"layer_{j}"],
      per_layer_input=None if row["per_layer"] is None else row["per_layer"][j],
      probes=None if row["probes"] is None else {name: probe[j] for name, probe in row["probes"].items()},
      kept_apart=isolated and keeps(self.cfg.remat_policy, "mlp"),
    )
    # Rematerialization wraps the complete layer.
    offload = self.cfg.remat_offload if in_loop else "none"
    call = remat(layer, self.cfg.remat_policy, isolated=isolated, offload=offload)
    with jax.named_scope(f"{s.name}/layer_{j}"):
      carry, aux = call(row["params"][f"layer_{j}"], carry, own)
    carry = carry | {"x": ctx.rules.constrain(carry["x"], "batch", "sequence")}
    if "kv" in carry:
      # Shared keys and values have the model's dtype, whatever the dtypes of the layer and its cache are.
      axes = ("batch", "sequence") if ctx.step is None else ("batch",)
      carry["kv"] = jax.tree.map(lambda kv: ctx.rules.constrain(self.precision.cast(kv), *axes), carry["kv"])
    return carry, aux

  def leave(
    self, p: dict, carry: Carry, collected: list[tuple[Stack, dict[str, Aux]]], first: Aux, ctx: Context
  ) -> tuple[jax.Array, dict]:
    """Apply the final norm. Return normed hidden states [B, T, D] in ``dtype``, and aux as in ``hidden``.

    Args:
      p: the decoder's parameters. Only the final norm is used.
      carry: carry of the last row.
      collected: for each stack, the aux values of its layers. Every leaf has a leading axis of ``repeats``.
      first: aux of ``enter``.
      ctx: ``context`` of the batch.
    """
    x = named(self._final_norm, p, "final_norm", carry["x"])
    # Combine the statistics of all layers with those of the vision tower.
    aux = totals(collected, self.router_losses, ctx.balance_load) | captured(collected)
    aux["clamped"] = aux.get("clamped", jnp.zeros((), jnp.int32)) + first.get("clamped", 0)
    aux |= {name: value for name, value in first.items() if name != "clamped"}
    return x, aux | ({"hidden.final_norm": x} if "hidden" in ctx.capture else {})

  def _embed(self, p: dict, batch: dict, ctx: Context) -> tuple[jax.Array, jax.Array, jax.Array | None]:
    """Return embedded inputs [B, T, D], the looked-up rows, and which tokens are placeholders (None: no token can be one)."""
    tower = self._tower
    tokens, placeholder = self.cfg.lookup(batch["tokens"])
    if tower is None or "pixel_values" not in batch:
      return self._embedding(p["embedding"], tokens, placeholder), tokens, placeholder
    # Images by row [B, M, ...] are sharded like the rows. Images in one list [I, ...] belong to all rows together.
    images = {name: batch[name] for name in ("pixel_values", "image_position_ids") if name in batch}
    by_row = images["pixel_values"].ndim > tower.pixel_rank
    if by_row:
      images = {name: ctx.rules.constrain(x.reshape(-1, *x.shape[2:]), "batch") for name, x in images.items()}
    # Run the tower.
    wrap = functools.partial(remat, policy=self.cfg.remat_policy, isolated=True)
    features, valid = tower(p["vision"], images["pixel_values"], images.get("image_position_ids"), ctx, wrap=wrap)
    ctx.tap("vision.valid", valid)
    # Embed the text. Gemma 3's image token has a row that is not used, or an id beyond the table, so padding is looked up
    # instead.
    is_image = batch["tokens"] == self.cfg.image_token_id
    tokens = jnp.where(is_image, self.cfg.pad_token_id, tokens)
    x = self._embedding(p["embedding"], tokens, placeholder)
    # Replace image tokens: the n-th image token of a row (or of the batch, in reading order) gets its n-th valid feature.
    groups = tokens.shape[0] if by_row else 1
    flat = features.reshape(groups, -1, features.shape[-1]).astype(x.dtype)
    order = jnp.argsort(~valid.reshape(groups, -1), axis=1, stable=True)
    nth = jnp.cumsum(is_image.reshape(groups, -1), axis=1) - 1
    place = jnp.take_along_axis(order, jnp.clip(nth, 0, flat.shape[1] - 1), axis=1)
    chosen = jnp.take_along_axis(flat, place[..., None], axis=1).reshape(x.shape)
    return jnp.where(is_image[..., None], chosen, x), tokens, placeholder

  def _run(self, s: Stack, carry: Carry, rows: dict[str, Any], ctx: Context) -> tuple[Carry, dict[str, Aux], Any]:
    """Run one stack, scanned or unrolled. Return the carry, aux, and the caches. Every leaf of aux has a leading axis of
    ``repeats``, and so have the caches, unless the rows are apart."""
    parts, outs = s.split(self.layers), []
    apart = isinstance(rows["params"], tuple)
    # Scanned: one scan for each part with equal precision.
    if self.cfg.scan_layers and s.repeats > 1 and not apart:
      sizes = [count for count, _ in parts]
      # Weights that slice their rows themselves (``cuts_rows``) stay outside the scanned inputs; the row number replaces them.
      mixed, tree = jax.tree.flatten(rows, is_leaf=cuts_rows)
      leaves = [x for x in mixed if not cuts_rows(x)]
      if len(leaves) < len(mixed):
        leaves.append(jnp.arange(s.repeats))
      # The gradient of split (and of unstack) is one concatenation. The gradient of slices would be a sum of padded copies.
      xs = [leaves] if len(parts) == 1 else zip(*(jax.lax.split(x, sizes) for x in leaves), strict=True)
      for i, ((_, layers), part) in enumerate(zip(parts, xs, strict=True)):
        # XLA compiles a scan over one row without a loop.
        loop = len(part[0]) > 1

        def body(carry, own, layers=layers, loop=loop):
          each = iter(own)
          row = jax.tree.unflatten(tree, [x.in_row(own[-1]) if cuts_rows(x) else next(each) for x in mixed])
          return self.run_row(s, layers, carry, row, ctx, in_loop=loop)

        with jax.named_scope(f"row_{sum(sizes[:i])}") if len(parts) > 1 else contextlib.nullcontext():
          carry, aux = jax.lax.scan(body, carry, list(part))
        outs.append(aux)
      aux = outs[0] if len(outs) == 1 else jax.tree.map(lambda *a: jnp.concatenate(a), *outs)
      return carry, aux, taken_caches(aux)
    # Unrolled: cut the parameters and the other inputs into rows, and run them one by one.
    caches = rows["cache"] if apart and rows["cache"] else None
    params = rows["params"]
    if not apart:
      alike = all(layer.precision.dtype == self.precision.dtype for _, layers in parts for layer in layers)
      params = unstacked(s.params(), params, self.precision if alike and self.cfg.remat_policy == "none" else None)
    leaves, tree = jax.tree.flatten(rows | {"params": None} | ({"cache": None} if caches else {}))
    others = zip(*map(rows_of, leaves), strict=True) if leaves else [()] * s.repeats
    every = [layers for count, layers in parts for _ in range(count)]
    for i, (layers, own, other) in enumerate(zip(every, params, others, strict=True)):
      row = tree.unflatten(other) | {"params": own} | ({"cache": caches[i]} if caches else {})
      with jax.named_scope(f"row_{i}"):
        carry, aux = self.run_row(s, layers, carry, row, ctx)
      outs.append(aux)
    # Caches of rows apart stay apart, because stacking would copy them.
    own = tuple(map(taken_caches, outs)) if apart else None
    aux = jax.tree.map(lambda *a: jnp.stack(a), *outs)
    return carry, aux, own or taken_caches(aux)
