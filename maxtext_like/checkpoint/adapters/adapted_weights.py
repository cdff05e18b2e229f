"""Which weights ``lora_modules`` and ``base_weights_modules`` mean: our names of parameters and those that peft and
transformers have for them.

An entry is ``all-linear``, a run of whole parts of a name (``q_proj``, ``self_attn.q_proj``, ``attention``, ``experts``,
``layers.3``), or a regular expression, searched in both names. Transformers' whole names, with what its classes and peft have
before the layers (``model.layers.0.self_attn.q_proj``), are taken from their beginnings.
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
from maxtext_like.layers.quantization.low_rank import one_layer
from maxtext_like.models.adapter import Adapter, make_adapter
from maxtext_like.models.model import Model
from maxtext_like.models.naming import path_keys, row_names
from maxtext_like.models.quantised_base import make_base
from maxtext_like.models.registry import FAMILIES
from maxtext_like.sharding.divisibility import require_whole_blocks

ALL_LINEAR = "all-linear"
_REGULAR = frozenset("*+?[](){}|^$\\")
# Adapted only by whoever names them: what all layers share, what chooses for a token, and the experts, which are no linear
# layers in most tools and so not among all of them.
_CHOOSING = frozenset({"router", "indexer"})
_NAMED_ALONE = _CHOOSING | {"experts"}
_LAYER = re.compile(r"layers\.\d+\.")
_OUTER = tuple(peft + prefix for peft in ("", "base_model.model.") for prefix in PREFIXES)
"""What stands before the names of transformers in its classes, and in peft's."""
_TOWER, _TOWER_LAYERS = "vision.", "vision.layers."
_OF_NONE = {"frozen": "is frozen", "projector": "stays but for its projector", "trained": "is trained itself"}
"""Values of ``vision_tower`` with which no entry means a weight of the tower."""
_WHOLE: dict[Any, tuple[tuple[str, ...], ...]] = {"projector": (("vision", "projector"),), "trained": (("vision",),)}
"""What of the tower is trained whole beside an adapter, by ``vision_tower``."""
_TABLE_PATHS = {"embed_tokens": ("embedding", "table"), "lm_head": ("head", "kernel")}
"""Where the tables of ``modules_to_save`` are."""


@dataclass(frozen=True)
class Candidate:
  """A weight that can have an addition.

  Attributes:
    name: ours, ``layers.7.attention.q``.
    theirs: transformers', ``layers.7.self_attn.q_proj``; several where a file has it in parts.
    in_layer: it is of a layer whose parts are meant by their names alone.
  """

  name: str
  theirs: tuple[str, ...]
  in_layer: bool

  @property
  def ordinary(self) -> bool:
    """Whether "all-linear", or the name of a whole part of a layer, means it too."""
    return self.in_layer and not _NAMED_ALONE & set(self.name.split("."))

  @property
  def chooses(self) -> bool:
    """Whether it decides where a token goes, or which keys it sees."""
    return bool(_CHOOSING & set(self.name.split(".")))

  def means(self, entry: str) -> bool:
    """Whether an entry of ``lora_modules`` means it."""
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
    """Its names, of every spelling."""
    return (self.name, *self.theirs)

  @property
  def _outer(self) -> tuple[str, ...]:
    """What may stand before its names; a tower's are beside the language model."""
    return tuple(outer for outer in _OUTER if "language_model" not in outer) if self.name.startswith(_TOWER) else _OUTER

  @property
  def _own_words(self) -> frozenset[str]:
    """What names it alone, where it is no ordinary one."""
    parts = self.name.split(".")
    return frozenset(_NAMED_ALONE & set(parts)) if self.in_layer else frozenset({parts[0]})


def _run(entry: str, name: str, *, last: bool) -> bool:
  """Whether the parts of an entry follow each other in a name; with ``last``, up to its end."""
  want, have = entry.split("."), name.split(".")
  begins = range(len(have) - len(want) + 1)
  return any(have[i : i + len(want)] == want and (not last or i + len(want) == len(have)) for i in begins)


def candidates(decoder: Decoder, decoder_block: str, *, tower: bool = False) -> list[Candidate]:
  """Every weight of a model that something is multiplied with, in its order.

  Args:
    decoder, decoder_block: the model.
    tower: the layers of its vision tower are meant as those of the decoder are.
  """
  theirs: dict[str, dict[str, None]] = {}
  for tensor in tensor_table(decoder, FAMILIES[decoder_block].huggingface):
    for piece in tensor.pieces:
      names = row_names(decoder, piece.path)
      name = names[piece.index[0]] if len(names) > 1 else names[0]
      spelled = re.sub(r"\.experts\.\d+\.", ".experts.", tensor.name.removesuffix(".weight"))
      if tensor.vision:  # whose layers are one array, and adapted alike
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
  """Our names of the weights that some entries of ``lora_modules``, or another key, mean.

  Args:
    decoder, decoder_block: the model.
    entries: of the key.
    key: its name, for messages.
    vision_tower: the key of that name: whether every entry means the tower's layers as well, or none of it.

  Raises:
    UserError: an entry that means none, with the nearest names; none means a tower that is to be adapted.
  """
  known = _open_to_entries(decoder, decoder_block, vision_tower)
  chosen = {name for entry in entries for name in _meant(known, entry, key, vision_tower)}
  if vision_tower == "adapted" and not any(name.startswith(_TOWER) for name in chosen):
    raise UserError(
      f"vision_tower = adapted, but {key} means no weight of its layers\n"
      f"  fix: name some, as in {key}=[{ALL_LINEAR}] or {key}=[q_proj, v_proj], or leave vision_tower out"
    )
  return frozenset(chosen)


def _open_to_entries(decoder: Decoder, decoder_block: str, vision_tower: VisionTower | None) -> list[Candidate]:
  """The weights that entries may mean; vision_tower: as of ``adapted_names``."""
  known = candidates(decoder, decoder_block, tower=vision_tower == "adapted")
  return [c for c in known if not (vision_tower in _OF_NONE and c.name.startswith(_TOWER))]


def _meant(known: list[Candidate], entry: str, key: str, vision_tower: VisionTower | None) -> set[str]:
  """The names of those that one entry means. Raises UserError: none."""
  try:
    found = [c for c in known if c.means(entry)]
  except re.error as error:
    raise UserError(f"{key}: {entry!r} is not a regular expression: {error}") from None
  # "gate" is DeepSeek's router and every MLP's gate: what chooses for a token is adapted by whoever says so.
  hits = {c.name for c in found if not c.chooses} or {c.name for c in found}
  hits |= {c.name for c in found if c.chooses and _CHOOSING & set(re.split(r"\W+", entry))}
  if not hits:
    ends = {name.rpartition(".")[2] for c in known for name in c.theirs} | {_LAYER.sub("", c.name) for c in known}
    near = nearest(entry, sorted(ends), 3) or sorted(ends)[:6]
    where = f" but of its vision tower, which {_OF_NONE[vision_tower]}" if vision_tower in _OF_NONE else ""
    raise UserError(f"{key}: {entry!r} is no weight of this model{where}\n  fix: {ALL_LINEAR}, or names as {', '.join(near)}")
  return hits


def _tables(model: Model, settings: AdapterConfig, names: frozenset[str]) -> list[tuple[str, ...]]:
  """Paths of the tables that are trained whole. Raises UserError: there is none of its own, or it has an addition too."""
  found = []
  for table in settings.modules_to_save:
    path = _TABLE_PATHS[table]
    if table == "lm_head" and model.config.model.logits_via_embedding:
      raise UserError(
        "modules_to_save: the head of this model is its embedding (logits_via_embedding)\n"
        "  fix: name embed_tokens, which is both"
      )
    if ".".join(path) in names:
      raise UserError(
        f"modules_to_save: {table} is trained whole, and lora_modules gives it an addition\n  fix: leave it out of one of them"
      )
    found.append(path)
  return found


def configured_adapter(model: Model, settings: AdapterConfig, vision_tower: VisionTower | None) -> Adapter:
  """The adapter of a model that a configuration describes; vision_tower: as of ``adapted_names``.

  Raises:
    UserError: as ``adapted_names``; a table that is not there, or has an addition.
  """
  block = model.config.model.decoder_block
  names = adapted_names(model.decoder, block, settings.lora_modules, vision_tower=vision_tower)
  of_their_own: dict[str, dict[str, Any]] = {}
  for key in ("lora_rank_pattern", "lora_alpha_pattern"):
    values: dict[str, Any] = of_their_own.setdefault(key, {})
    known = _open_to_entries(model.decoder, block, vision_tower) if getattr(settings, key) else []
    for entry, value in (getattr(settings, key) or {}).items():
      found = _meant(known, entry, key, vision_tower) & names
      if not found:
        raise UserError(f"{key}: {entry!r} means no weight that lora_modules means\n  fix: name it there too, or leave it out")
      values |= dict.fromkeys(found - set(values), value)  # the first that fits, as in peft
  ranks, alphas = of_their_own.values()
  whole = (*_WHOLE.get(vision_tower, ()), *_tables(model, settings, names))
  adapter = make_adapter(model.decoder, names, settings, whole, ranks=ranks, alphas=alphas)
  if model.base is not None and (both := sorted(path for path in adapter.whole if path in model.base.weights)):
    tower = both[0][0] == "vision"
    table = next((name for name, path in _TABLE_PATHS.items() if path == both[0]), "")
    who = f"vision_tower = {vision_tower}" if tower else "modules_to_save"
    fix = "the tower out of base_weights_modules, or vision_tower=frozen" if tower else f"{table} out of one of them"
    raise UserError(
      f"base_weights_modules: {'.'.join(both[0])} is stored as {model.base.form.name}, and {who} trains it whole\n"
      f"  fix: leave {fix}"
    )
  return adapter


def require_dropout(adapter: Adapter, model: Model) -> None:
  """Refuses dropout before additions whose inputs are no rows of the batch in their order: those of experts, which are sorted,
  of routers, which each device runs on its own tokens, and of the head, which has a piece of every row at a time.

  Raises:
    UserError: names them.
  """
  apart = {"experts", "router", "head", "embedding"} | ({"kv_b"} if model.ways("sequence") > 1 else set())
  found = sorted({_LAYER.sub("", name) for name in adapter.names if apart & set(name.split("."))})
  if adapter.dropout and found:
    raise UserError(
      f"lora_dropout = {adapter.dropout:g}: there is no dropout before {', '.join(found)}"
      f"{' with ici_context_parallelism' if found == ['attention.kv_b'] else ''}\n"
      "  fix: lora_dropout=0, or lora_modules without them"
    )


def with_base(model: Model, settings: AdapterConfig) -> Model:
  """The model with its weights stored as ``base_weights`` says.

  Raises:
    UserError: ``base_weights_modules`` means none or what cannot be quantised, or the mesh would split a block.
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
    raise UserError(f"base_weights_modules: {error}\n  fix: leave it out, or name linear maps of all layers") from None
  require_whole_blocks(base.weights, base.form, decoder.cfg.rules, model.mesh)
  return dataclasses.replace(model, base=base)
