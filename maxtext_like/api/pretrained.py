"""A model with its weights: of a run, of a checkpoint of ours, or of a Hugging Face directory."""

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from maxtext_like.api.arguments import Saved, place_of, words
from maxtext_like.config import hub
from maxtext_like.config.load import Loaded
from maxtext_like.errors import UserError

if TYPE_CHECKING:
  import jax
  from flax import nnx

  from maxtext_like.api.generate import Generation
  from maxtext_like.config.schema import Config
  from maxtext_like.data.tokenization.tokenizer import Tokenizer
  from maxtext_like.generation.prompts import Prompt
  from maxtext_like.layers.decoder import Decoder
  from maxtext_like.models.model import Model

_NO_TOKENIZER = (
  "has neither tokenizer.json nor tokenizer.model, so text cannot become tokens\n"
  "  fix: tokenizer=, with the path of one, or tokenizer=bytes"
)


@dataclass(frozen=True, eq=False, repr=False)
class Pretrained:
  """A model with weights. They are read when they are first asked for.

  Attributes:
    model: the configuration, the mesh, and where every parameter lies.
    directory: where the weights are.
    own_tokenizer: of its text; None: the directory has none; an error: what it has is of no use, told to who asks.
    files: where generation_config.json may be; None: nowhere.
    notes: for whoever uses it.
    adapters: that are added to the weights.
  """

  model: "Model"
  directory: Path
  own_tokenizer: "Tokenizer | UserError | None"
  files: Path | None
  notes: tuple[str, ...] = ()
  adapters: tuple[Path, ...] = ()

  def __repr__(self) -> str:
    c = self.model.config
    return f"Pretrained({c.model.model_name}, {c.precision.dtype}, of {self.directory})"

  @property
  def config(self) -> "Config":
    """Of the model."""
    return self.model.config

  @property
  def tokenizer(self) -> "Tokenizer":
    """Of its text. Raises UserError where there is none that can be used."""
    if self.own_tokenizer is None:
      raise UserError(f"{self.directory}: {_NO_TOKENIZER}")
    if isinstance(self.own_tokenizer, UserError):
      raise self.own_tokenizer
    return self.own_tokenizer

  @functools.cached_property
  def params(self) -> Any:
    """The weights, a nested dict of arrays on the model's devices.

    Raises:
      UserError: they are damaged, or another model's.
      NonFiniteError: one is not finite.
    """
    from maxtext_like.checkpoint.read_weights import read_weights

    weights = read_weights(self.directory, self.model)
    if not self.adapters:
      return weights
    from maxtext_like.checkpoint.adapters.merge_adapters import with_adapters

    return with_adapters(weights, self.model, self.adapters, self.directory)

  @functools.cached_property
  def decoder(self) -> "Decoder":
    """The model as a pure function: ``decoder(params, {"tokens": ...})`` gives logits [B, T, V] and aux.

    Its attention kernels are those that passed their self-test on this device.
    """
    from maxtext_like.models.model import make_model

    return make_model(self.config, mesh=self.model.mesh).decoder

  def nnx(self) -> "nnx.Module":
    """The model as a Flax NNX module with the weights: ``module({"tokens": ...})``."""
    from flax import nnx

    from maxtext_like.layers.nnx import NNX

    graph, state = nnx.split(NNX(self.decoder, rngs=None))
    nnx.replace_by_pure_dict(state, self.params)
    return nnx.merge(graph, state)

  def logits(self, tokens: Any) -> "jax.Array":
    """Logits [B, T, V] of token ids [B, T], each row one document.

    Raises:
      UserError: they are no ids of the vocabulary, or not of that shape.
    """
    import numpy as np

    ids, size = np.asarray(tokens), self.config.model.vocab_size
    if ids.ndim != 2 or not ids.size or not np.issubdtype(ids.dtype, np.integer):
      raise UserError(f"tokens: {ids.dtype} {list(ids.shape)}\n  fix: ids of [rows, positions], as [[5, 6, 7]]")
    if (low := ids.min()) < 0 or (high := ids.max()) >= size:
      raise UserError(f"tokens: {low if low < 0 else high}: the vocabulary has ids 0 to {size - 1}")
    return self._logits(self.params, ids.astype(np.int32))

  @functools.cached_property
  def _logits(self) -> Any:
    import jax

    return jax.jit(lambda params, tokens: self.decoder(params, {"tokens": tokens})[0])

  def generate(self, prompts: "str | Prompt | Sequence[str | Prompt]", **options: Any) -> "Generation":
    """Continues prompts; see ``maxtext_like.generate``."""
    from maxtext_like.api.generate import generate

    return generate(self, prompts, **options)


def load(
  directory: str | Path | Saved,
  *overrides: str,
  images: bool = False,
  adapters: str | Path | Saved | Sequence[str | Path | Saved] = (),
  **keys: Any,
) -> Pretrained:
  """The model in ``directory``; its weights are read when they are first asked for.

  Args:
    directory: a run, one of its checkpoints, what ``import_checkpoint`` made, a Hugging Face checkpoint, or the name of one in
      this machine's Hugging Face cache, as ``"google/gemma-3-4b-it"``.
    overrides: words laid over its configuration, as ``"dtype=bfloat16"``; ``tokenizer=`` takes the place of its own.
    images: the vision tower is needed; a Hugging Face checkpoint's is left out without.
    adapters: one or several that are added to the weights: what peft wrote, or runs that trained with ``lora_rank``.
    keys: the same as Python values.

  Raises:
    UserError: it is none of these, or damaged, or the overrides do not fit it, or it has no tower.
  """
  from maxtext_like.checkpoint.store import manifest, sidecar_files
  from maxtext_like.checkpoint.weight_sources import find_step
  from maxtext_like.data.tokenization.tokenizer import AUTO, load_tokenizer
  from maxtext_like.models.model import make_model
  from maxtext_like.sharding.compilation_cache import use_compilation_cache
  from maxtext_like.training.run.resolve_tokenizer import fingerprint_of, of_step

  given, place = words(overrides, keys, load), place_of(directory, "checkpoint")
  if not place.is_dir():
    raise UserError(f"{place}: no such directory{hub.advice(str(place))}")
  trained, unusable = None, None
  if (place / "config.json").is_file():
    loaded, files = _hugging_face(place, given, images), place
    there = any((place / f"tokenizer.{kind}").is_file() for kind in ("json", "model"))
    own = str(place) if there else None
  else:
    step = find_step(place)
    if step is None:
      raise UserError(f"{place}: neither a run with a checkpoint nor a Hugging Face checkpoint (config.json)")
    loaded, files = _ours(step, given), manifest.home(step, manifest.read(step)) / sidecar_files.FOLDER
    if images and not loaded.config.vision.use_multimodal:
      raise UserError(f"{place}: images: the model has no vision tower (it was trained with use_multimodal=false)")
    own, trained = of_step(step), fingerprint_of(step)
  named = own if loaded.config.data.tokenizer == AUTO else loaded.config.data.tokenizer
  tokenizer = None
  try:
    tokenizer = None if named is None else load_tokenizer(named, loaded.config.model.vocab_size)
  except UserError as error:
    if loaded.config.data.tokenizer != AUTO:
      raise
    unusable = error  # a run on token ids has no text: its weights are of use without
  notes = loaded.notes
  if tokenizer is not None and trained is not None and trained != tokenizer.fingerprint:
    notes = (*notes, f"the model was trained with another tokenizer: {trained}, not {tokenizer.fingerprint}")
  use_compilation_cache(loaded.config.logging.compilation_cache_dir)
  model = make_model(loaded.config, runs_attention=False)  # with a cache, attention is written out
  several = [adapters] if isinstance(adapters, str | Path | Saved) else adapters
  return Pretrained(model, place, tokenizer or unusable, files, notes, tuple(place_of(one, "adapter") for one in several))


def _hugging_face(directory: Path, overrides: list[str], images: bool) -> Loaded:
  from maxtext_like.checkpoint.huggingface.config import read_config
  from maxtext_like.checkpoint.huggingface.model_file import load_checkpoint_config

  if images and not read_config(directory).has_tower:
    raise UserError(f"{directory}: images: the model has no vision tower (its config.json has no vision_config)")
  _, loaded = load_checkpoint_config(directory, [*(["use_multimodal=true"] if images else []), *overrides], length=2048)
  return loaded


def _ours(step: Path, overrides: list[str]) -> Loaded:
  from maxtext_like.checkpoint.store import manifest
  from maxtext_like.checkpoint.store.stored_config import load_stored

  try:
    return load_stored(manifest.read(step).config, str(step), overrides)
  except manifest.DamageError as error:
    raise UserError(f"{step}: not a complete checkpoint: {error}") from None
