"""Resolves ``lora_modules`` and similar keys to weights, and builds the adapter or quantized base of a configuration.

An entry is ``all-linear``, a sequence of complete parts of a name (``q_proj``, ``self_attn.q_proj``, ``attention``,
``experts``, ``layers.3``), or a regular expression. It is searched in our names of the parameters and in those of transformers.
Complete names with the prefix of a transformers or peft class (``model.layers.0.self_attn.q_proj``) match from their beginning.
"""

import dataclasses
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import jax

from maxtext_like.checkpoint.huggingface.tensors import tensor_table
from maxtext_like.checkpoint.huggingface.tied import PREFIXES
from maxtext_like.config.adapter_keys import AdapterConfig
from maxtext_like.config.problems import nearest
from maxtext_like.config.vision import VisionTower
from maxtext_like.errors import UserError
from maxtext_like.layers.decoder import Decoder
from maxtext_like.layers.param import path_keys
from maxtext_like.layers.quantization.low_rank import one_layer
from maxtext_like.models import quantized_kernels
from maxtext_like.models.adapter import Adapter, make_adapter
from maxtext_like.models.model import Model
from maxtext_like.models.naming import row_names
from maxtext_like.models.quantized_base import make_base
from maxtext_like.models.registry import FAMILIES
from maxtext_like.sharding.divisibility import require_unsplit_blocks

ALL_LINEAR = "all-linear"
_REGULAR = frozenset("*+?[](){}|^$\\")
# Weights that are adapted only if an entry names them: those shared by all layers, those that choose for a token, and the
# experts. Most tools do not count experts as linear layers, so "all-linear" leaves them out.
_CHOOSING = frozenset({"router", "indexer"})
_NAMED_ALONE = _CHOOSING | {"experts"}
_LAYER = re.compile(r"layers\.\d+\.")
_OUTER = tuple(peft + prefix for peft in ("", "base_model.model.") for prefix in PREFIXES)
"""Prefixes of transformers' names in its classes and in peft."""
_TOWER, _TOWER_LAYERS = "vision.", "vision.layers."
_OF_NONE = {"frozen": "is frozen", "projector": "is frozen except for its projector", "trained": "is trained fully"}
"""Values of ``vision_tower`` with which no entry matches a weight of the tower, and the reason for messages."""
_WHOLE: dict[Any, tuple[tuple[str, ...], ...]] = {"projector": (("vision", "projector"),), "trained": (("vision",),)}
"""Parts of the tower that are trained fully next to an adapter, by ``vision_tower``."""
_TABLE_PATHS = {"embed_tokens": ("embedding", "table"), "lm_head": ("head", "kernel")}
"""Paths of the tables that ``modules_to_save`` can name."""


@dataclass(frozen=True)
class Candidate:
  """A weight that can be adapted.

  Attributes:
    name: our name, such as ``layers.7.attention.q``.
    theirs: transformers' name, such as ``layers.7.self_attn.q_proj``; several if a file stores the weight in parts.
    in_layer: True if the weight belongs to a layer whose parts are matched by their names alone.
  """

  name: str
  theirs: tuple[str, ...]
  in_layer: bool

  @property
  def ordinary(self) -> bool:
    """True if "all-linear", or the name of a complete part of a layer, matches this weight."""
    return self.in_layer and not _NAMED_ALONE & set(self.name.split("."))

  @property
  def chooses(self) -> bool:
    """True if this weight decides where a token is routed or which keys it attends to."""
    return bool(_CHOOSING & set(self.name.split(".")))

  def means(self, entry: str) -> bool:
    """Returns True if an entry of ``lora_modules`` matches this weight."""
    if entry == ALL_LINEAR:
      return self.ordinary
    if _REGULAR & set(entry):
      whole = (outer + name for name in self.theirs for outer in self._outer) if "model" in entry else ()
      found = any(re.search(entry, name) for name in (*self.all, *whole))
      return found and (self.ordinary or any(word in entry for word in self._own_words))
    last = not self.ordinary and not self._own_words & set(entry.split("."))
    if outer := next((outer for outer in sorted(_OUTER, key=len, reverse=True) if outer and entry.startswith(outer)), ""):
      parts, names = entry.removeprefix(outer).split("."), self.theirs if outer in self._outer else ()
      return any(name.split(".")[: None if last else len(parts)] == parts for name in names)
    return any(_run(entry, name, last=last) for name in self.all)

  @property
  def all(self) -> tuple[str, ...]:
    """All names of this weight."""
    return (self.name, *self.theirs)

  @property
  def _outer(self) -> tuple[str, ...]:
    """Prefixes that may precede its names. A tower is not inside the language model."""
    return tuple(outer for outer in _OUTER if "language_model" not in outer) if self.name.startswith(_TOWER) else _OUTER

  @property
  def _own_words(self) -> frozenset[str]:
    """Words that must occur in an entry to match this weight, unless it is ordinary."""
    parts = self.name.split(".")
    return frozenset(_NAMED_ALONE & set(parts)) if self.in_layer else frozenset({parts[0]})


def _run(entry: str, name: str, *, last: bool) -> bool:
  """Returns True if the parts of an entry are consecutive parts of a name; with ``last``, they must be its last parts."""
  want, have = entry.split("."), name.split(".")
  begins = range(len(have) - len(want) + 1)
  return any(have[i : i + len(want)] == want and (not last or i + len(want) == len(have)) for i in begins)


def candidates(decoder: Decoder, decoder_block: str, *, tower: bool = False) -> list[Candidate]:
  """Returns every weight of a model that takes part in a matrix product, in model order.

  Args:
    decoder, decoder_block: the model.
    tower: True if entries match the layers of the vision tower like those of the decoder.
  """
  theirs: dict[str, dict[str, None]] = {}
  for tensor in tensor_table(decoder, FAMILIES[decoder_block].huggingface):
    for piece in tensor.pieces:
      names = row_names(decoder, piece.path)
      name = names[piece.index[0]] if len(names) > 1 else names[0]
      spelled = re.sub(r"\.experts\.\d+\.", ".experts.", tensor.name.removesuffix(".weight"))
      if tensor.vision:  # the layers of the tower are one array and are adapted together
        spelled = re.sub(r"\.layers\.\d+\.", ".layers.", spelled)
      theirs.setdefault(name, {})[spelled] = None
  found = []
  for path, p in jax.tree_util.tree_leaves_with_path(decoder.params()):
    if one_layer(p).contracts:
      for name in row_names(decoder, path_keys(path)):
        in_layer = bool(_LAYER.match(name)) or (tower and name.startswith(_TOWER_LAYERS))
        found.append(Candidate(name, tuple(theirs.get(name, ())), in_layer))
  return found


def adapted_names(
  decoder: Decoder,
  decoder_block: str,
  entries: Iterable[str],
  key: str = "lora_modules",
  *,
  vision_tower: VisionTower | None = None,
) -> frozenset[str]:
  """Returns our names of the weights that the entries of ``lora_modules``, or of another key, match.

  Args:
    decoder, decoder_block: the model.
    entries: values of the key.
    key: name of the key, for messages.
    vision_tower: the key of that name. It decides whether entries match the layers of the tower.

  Raises:
    UserError: an entry matches nothing (lists the nearest names), or no entry matches a tower that is to be adapted.
  """
  known = _open_to_entries(decoder, decoder_block, vision_tower)
  chosen = {name for entry in entries for name in _meant(known, entry, key, vision_tower)}
  if vision_tower == "adapted" and not any(name.startswith(_TOWER) for name in chosen):
    raise UserError(
      f"vision_tower = adapted, but {key} matches no weight of its layers\n"
      f"  fix: name some, such as {key}=[{ALL_LINEAR}] or {key}=[q_proj, v_proj], or leave vision_tower out"
    )
  return frozenset(chosen)


def _open_to_entries(decoder: Decoder, decoder_block: str, vision_tower: VisionTower | None) -> list[Candidate]:
  """Returns the weights that entries may match; ``vision_tower`` as for ``adapted_names``."""
  known = candidates(decoder, decoder_block, tower=vision_tower == "adapted")
  return [c for c in known if not (vision_tower in _OF_NONE and c.name.startswith(_TOWER))]


def _meant(known: list[Candidate], entry: str, key: str, vision_tower: VisionTower | None) -> set[str]:
  """Returns the names of the weights that one entry matches. Raises UserError if there is none."""
  try:
    found = [c for c in known if c.means(entry)]
  except re.error as error:
    raise UserError(
      f"{key}: {entry!r} is not a regular expression: {error}", fix="correct the expression, or write a name such as q_proj"
    ) from None
  # "gate" is DeepSeek's router and the gate of every MLP. A router is adapted only if the entry says so.
  hits = {c.name for c in found if not c.chooses} or {c.name for c in found}
  hits |= {c.name for c in found if c.chooses and _CHOOSING & set(re.split(r"\W+", entry))}
  if not hits:
    ends = {name.rpartition(".")[2] for c in known for name in c.theirs} | {_LAYER.sub("", c.name) for c in known}
    near = nearest(entry, sorted(ends), 3) or sorted(ends)[:6]
    where = f" outside its vision tower, which {_OF_NONE[vision_tower]}" if vision_tower in _OF_NONE else ""
    raise UserError(
      f"{key}: {entry!r} matches no weight of this model{where}\n  fix: use {ALL_LINEAR}, or names such as {', '.join(near)}"
    )
  return hits


def _tables(model: Model, settings: AdapterConfig, names: frozenset[str]) -> list[tuple[str, ...]]:
  """Returns the paths of the fully trained tables. Raises UserError if a table does not exist or is adapted too."""
  found = []
  for table in settings.modules_to_save:
    path = _TABLE_PATHS[table]
    if table == "lm_head" and model.config.model.logits_via_embedding:
      raise UserError(
        "modules_to_save: the head of this model is its embedding (logits_via_embedding), so there is no lm_head\n"
        "  fix: name embed_tokens, which is both"
      )
    if ".".join(path) in names:
      raise UserError(
        f"modules_to_save: {table} would be trained fully, and lora_modules adapts it too\n  fix: remove it from one of them"
      )
    found.append(path)
  return found


def configured_adapter(model: Model, settings: AdapterConfig, vision_tower: VisionTower | None) -> Adapter:
  """Builds the adapter that a configuration describes; ``vision_tower`` as for ``adapted_names``.

  Raises:
    UserError: as ``adapted_names``; a table does not exist or is adapted too.
  """
  block = model.config.model.decoder_block
  # Weights to adapt, and the ranks and alphas of patterns.
  names = adapted_names(model.decoder, block, settings.lora_modules, vision_tower=vision_tower)
  of_their_own: dict[str, dict[str, Any]] = {}
  for key in ("lora_rank_pattern", "lora_alpha_pattern"):
    values: dict[str, Any] = of_their_own.setdefault(key, {})
    known = _open_to_entries(model.decoder, block, vision_tower) if getattr(settings, key) else []
    for entry, value in (getattr(settings, key) or {}).items():
      found = _meant(known, entry, key, vision_tower) & names
      if not found:
        raise UserError(f"{key}: {entry!r} matches no weight that lora_modules matches\n  fix: name it there too, or remove it")
      values |= dict.fromkeys(found - set(values), value)  # the first match counts, as in peft
  ranks, alphas = of_their_own.values()
  # Parts that are trained fully. They cannot be quantized.
  whole = (*_WHOLE.get(vision_tower, ()), *_tables(model, settings, names))
  adapter = make_adapter(model.decoder, names, settings, whole, ranks=ranks, alphas=alphas)
  if model.base is not None and (both := sorted(path for path in adapter.whole if path in model.base.weights)):
    tower = both[0][0] == "vision"
    table = next((name for name, path in _TABLE_PATHS.items() if path == both[0]), "")
    who = f"vision_tower = {vision_tower}" if tower else "modules_to_save"
    fix = "the tower from base_weights_modules, or set vision_tower=frozen" if tower else f"{table} from one of them"
    raise UserError(
      f"base_weights_modules: {'.'.join(both[0])} is stored as {model.base.form.name}, but {who} trains it fully\n"
      f"  fix: remove {fix}"
    )
  return adapter


def require_dropout(adapter: Adapter, model: Model) -> None:
  """Refuses dropout for adapted weights whose inputs are not the tokens of the batch in their order.

  These are the experts (their tokens are sorted), routers (each device routes its own tokens) and the head (which processes a
  piece of every sequence at a time).

  Raises:
    UserError: names them.
  """
  apart = {"experts", "router", "head", "embedding"} | ({"kv_b"} if model.ways("sequence") > 1 else set())
  found = sorted({_LAYER.sub("", name) for name in adapter.names if apart & set(name.split("."))})
  if adapter.dropout and found:
    raise UserError(
      f"lora_dropout = {adapter.dropout:g}: dropout is not supported for {', '.join(found)}"
      f"{' with ici_context_parallelism' if found == ['attention.kv_b'] else ''}\n"
      "  fix: set lora_dropout=0, or remove them from lora_modules"
    )


def with_base(model: Model, settings: AdapterConfig) -> Model:
  """Returns the model with its weights stored in the format of ``base_weights``, and the kernel that multiplies by them.

  Raises:
    UserError: as ``stored_as``.
  """
  model = stored_as(model, settings)
  if model.base is None:
    return model
  how = {"dtype": model.config.precision.dtype, "cache": model.config.logging.compilation_cache_dir}
  base = quantized_kernels.settle(model.base, mesh=model.mesh, platform=model.platform, **how)
  return dataclasses.replace(model, base=base)


def stored_as(model: Model, settings: AdapterConfig) -> Model:
  """Returns the model with its weights stored in the format of ``base_weights``. No kernel is tested.

  Raises:
    UserError: ``base_weights_modules`` matches nothing or a weight that cannot be quantized, or the mesh would split a block.
  """
  decoder = model.decoder
  if settings.base_weights is None:
    return model
  block = model.config.model.decoder_block
  if settings.base_weights_modules:
    names = adapted_names(decoder, block, settings.base_weights_modules, "base_weights_modules")
  else:
    names = frozenset(c.name for c in candidates(decoder, block) if _LAYER.match(c.name) and not c.chooses)
  try:
    base = make_base(decoder, names, settings.base_weights)
  except ValueError as error:
    raise UserError(f"base_weights_modules: {error}\n  fix: leave it out, or name linear weights of all layers") from None
  require_unsplit_blocks(base.weights, base.form, decoder.cfg.rules, model.mesh)
  return dataclasses.replace(model, base=base)
