"""``load``: a model with weights from a run, a checkpoint or a Hugging Face directory; and text generation with it."""

import functools
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from maxtext_like.api.answers import Generation, draft_params_of, results, texts_of
from maxtext_like.api.arguments import Saved, place_of, require_function, words
from maxtext_like.config import hub
from maxtext_like.config.load import Loaded, is_chosen
from maxtext_like.errors import UserError

if TYPE_CHECKING:
  import jax
  from flax import nnx

  from maxtext_like.config.schema import Config
  from maxtext_like.data.tokenization.tokenizer import Tokenizer
  from maxtext_like.generation.prompts import Prompt
  from maxtext_like.generation.texts import TextPiece
  from maxtext_like.generation.weights import DecodingWeights
  from maxtext_like.layers.decoder import Decoder
  from maxtext_like.models.model import Model


@dataclass(frozen=True, eq=False, repr=False)
class Pretrained:
  """A model with weights, which are read at first use.

  Attributes:
    model: configuration, mesh and sharding of the parameters.
    directory: directory of the weights.
    own_tokenizer: tokenizer of the checkpoint; None if it has none; an error, raised at first use, if it cannot be loaded.
    files: directory that may contain generation_config.json, or None.
    notes: remarks for the user.
    adapters: directories of adapters that are added to the weights.
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
    """Configuration of the model."""
    return self.model.config

  @property
  def tokenizer(self) -> "Tokenizer":
    """Tokenizer of the model. Raises UserError if there is none, or if it cannot be loaded."""
    if self.own_tokenizer is None:
      from maxtext_like.training.run.resolve_tokenizer import NO_TOKENIZER, NO_TOKENIZER_FIX

      raise UserError(f"{self.directory} {NO_TOKENIZER}", fix=NO_TOKENIZER_FIX)
    if isinstance(self.own_tokenizer, UserError):
      raise self.own_tokenizer
    return self.own_tokenizer

  @property
  def params(self) -> Any:
    """The weights, a nested dict of arrays on the model's devices. Quantized weights, and weights with an adapter that is not
    merged, are a ``maxtext_like.layers.weight.Weight`` each.

    Raises:
      UserError: the weights are damaged or belong to another model.
      NonFiniteError: a weight is not finite.
      DoesNotFitError: the weights do not fit the memory of the device.
    """
    return self._weights.stacked

  @functools.cached_property
  def _weights(self) -> "DecodingWeights":
    from maxtext_like.checkpoint.adapters.inference_weights import read_stored
    from maxtext_like.checkpoint.read_weights import read_weights
    from maxtext_like.generation.memory import require_room_for_weights
    from maxtext_like.generation.weights import DecodingWeights

    def read() -> Any:
      if self._identity_now() != self.weight_identity:  # a run that still trains, or a checkpoint that was written again
        raise UserError(f"{self.directory}: the weights have changed since they were loaded", fix="load the model again")
      require_room_for_weights(self.model)
      if self.model.base is not None:
        return read_stored(self.directory, self.model, self.adapters)
      weights = read_weights(self.directory, self.model)
      if not self.adapters:
        return weights
      from maxtext_like.checkpoint.adapters.merge_adapters import with_adapters

      return with_adapters(weights, self.model, self.adapters, self.directory)

    return DecodingWeights(self.model.decoder, read, self.model.platform)

  @functools.cached_property
  def weight_identity(self) -> tuple[str, ...]:
    """Hashes that change if the weights or the adapters change."""
    return self._identity_now()

  def _identity_now(self) -> tuple[str, ...]:
    from maxtext_like.checkpoint.weight_identity import weight_identity

    return (weight_identity(self.directory), *map(weight_identity, self.adapters))

  @property
  def decoding_params(self) -> Any:
    """The weights in the form that generation reads (``generation.weights``)."""
    return self._weights.for_decoding

  @functools.cached_property
  def decoder(self) -> "Decoder":
    """The model as a pure function: ``decoder(params, {"tokens": ...})`` returns logits [B, T, V] and aux.

    Its attention kernels have passed their self-test on this device.
    """
    from maxtext_like.models.model import make_model

    return make_model(self.config, mesh=self.model.mesh).decoder

  @property
  def decoder_without_kernels(self) -> "Decoder":
    """The model for generation, which needs no attention kernels."""
    return self.model.decoder

  @property
  def suggested_sampling(self) -> dict[str, float]:
    """Options of ``generate`` that the checkpoint's generation_config.json suggests. They are used only if they are passed."""
    from maxtext_like.generation.stop import suggested_sampling

    return suggested_sampling(self.files)

  def nnx(self) -> "nnx.Module":
    """Return the model as a Flax NNX module with the weights: ``module({"tokens": ...})``.

    Raises:
      UserError: the weights are quantized, which Flax modules cannot hold.
    """
    from flax import nnx

    from maxtext_like.layers.nnx import NNX

    if self.model.base is not None:
      raise UserError(
        f"nnx: the weights are stored as {self.model.base.form.name}, and a Flax module has one array for each weight",
        fix="pass base_weights=None to load",
      )
    graph, state = nnx.split(NNX(self.decoder, rngs=None))
    nnx.replace_by_pure_dict(state, self.params)
    return nnx.merge(graph, state)

  @property
  def mesh(self) -> "jax.sharding.Mesh":
    """The devices of the weights. The mesh of a loaded model is never an abstract one."""
    return self.model.mesh  # pyright: ignore[reportReturnType]

  def logits(self, tokens: Any) -> "jax.Array":
    """Return logits [B, T, V] of token ids [B, T]; each row is one document.

    Raises:
      UserError: the ids are outside the vocabulary or have another shape.
    """
    import numpy as np

    ids, size = np.asarray(tokens), self.config.model.vocab_size
    if ids.ndim != 2 or not ids.size or not np.issubdtype(ids.dtype, np.integer):
      raise UserError(
        f"tokens: {ids.dtype} {list(ids.shape)} is not a batch of ids",
        fix="pass an array [rows, positions], such as [[5, 6, 7]]",
      )
    if (low := ids.min()) < 0 or (high := ids.max()) >= size:
      raise UserError(
        f"tokens: {low if low < 0 else high}: the vocabulary has ids 0 to {size - 1}",
        fix="pass ids of this model's tokenizer: model.tokenizer.encode(TEXT)",
      )
    return self._logits(self.params, ids.astype(np.int32))

  @functools.cached_property
  def _logits(self) -> Any:
    import jax

    return jax.jit(lambda params, tokens: self.decoder(params, {"tokens": tokens})[0])

  def generate(
    self,
    prompts: "str | Prompt | Sequence[str | Prompt]",
    *,
    on_text: Callable[[int, str], None] | None = None,
    **options: Any,
  ) -> Generation:
    """Continue prompts; arguments and errors as for ``maxtext_like.generate``. Other keywords are an error."""
    from maxtext_like.generation.slots import TOKENS_PER_CALL
    from maxtext_like.generation.texts import STREAMED_TURN

    if on_text is not None:
      require_function(Pretrained.generate, "on_text", on_text)
    clamped: list[int] = []
    turn = TOKENS_PER_CALL if on_text is None else STREAMED_TURN
    listed, texts = texts_of(self, Pretrained.generate, prompts, options, turn=turn, on_clamped=clamped.append)
    params, draft_params = self.decoding_params, draft_params_of(options)  # read before the clock starts
    begin = first = time.monotonic()
    first_tokens = None
    for pieces in texts.run(params, draft_params=draft_params, texts=on_text is not None):
      if first_tokens is None:
        first = time.monotonic()
        first_tokens = sum(len(answer.tokens) for samples in texts.answers for answer in samples)
      for piece in pieces:
        if on_text is not None and piece.text:
          on_text(piece.prompt * texts.options.answers + piece.sample, piece.text)
    end = time.monotonic()
    counted = sum(clamped) if self.model.decoder.uses_float16 else None
    seconds = first - begin, end - first
    return Generation(results(listed, texts), counted, first_tokens or 0, *seconds, texts.tokens_per_pass)

  def stream(self, prompts: "str | Prompt | Sequence[str | Prompt]", **options: Any) -> "Iterator[TextPiece]":
    """Continue prompts, and yield new text as it is generated: pieces with ``prompt``, ``sample``, ``text`` and ``ended``.

    Arguments and errors are as for ``maxtext_like.generate``. Arguments are checked before this method returns.
    """
    from maxtext_like.generation.texts import STREAMED_TURN

    _, texts = texts_of(self, Pretrained.stream, prompts, options, turn=STREAMED_TURN)
    found = texts.run(self.decoding_params, draft_params=draft_params_of(options))
    return (piece for pieces in found for piece in pieces if piece.text or piece.ended)


def load(
  directory: str | Path | Saved,
  *overrides: str,
  images: bool = False,
  adapters: str | Path | Saved | Sequence[str | Path | Saved] = (),
  **keys: Any,
) -> Pretrained:
  """Load a model. Its weights are read at first use.

  Args:
    directory: a run, one of its checkpoints, an imported checkpoint, a Hugging Face checkpoint, or its name in the local
      Hugging Face cache, such as ``"google/gemma-3-4b-it"``.
    overrides: words that override its configuration, such as ``"dtype=bfloat16"``; ``tokenizer=`` replaces its tokenizer,
      and ``base_weights=int8`` or ``nf4`` quantizes the weights while they are read. An adapter that was trained on quantized
      weights is added to them, as in training; ``base_weights=null`` merges it.
    images: load the vision tower; without it, the tower of a Hugging Face checkpoint is left out.
    adapters: one or several adapters to add to the weights: directories of peft, or runs with ``lora_rank``.
    keys: the same as Python values.

  Raises:
    UserError: the directory has no checkpoint or a damaged one, an override is invalid, or there is no vision tower.
  """
  from maxtext_like.checkpoint.adapters.inference_weights import with_storage
  from maxtext_like.checkpoint.store import manifest, sidecar_files
  from maxtext_like.checkpoint.weight_sources import find_step, unsaved_run
  from maxtext_like.data.tokenization.tokenizer import AUTO, load_tokenizer
  from maxtext_like.models.model import make_model
  from maxtext_like.sharding.compilation_cache import use_compilation_cache
  from maxtext_like.training.loop.divergence import failed_notes
  from maxtext_like.training.run.resolve_tokenizer import fingerprint_of, of_step

  given, place = words(overrides, keys, load), place_of(directory, "checkpoint")
  if not place.is_dir():
    raise UserError(
      f"{place}: no such directory{hub.advice(str(place))}",
      fix=hub.fix(str(place)),
    )
  trained, unusable, failed = None, None, ()
  if (place / "config.json").is_file():
    loaded, files = _hugging_face(place, given, images), place
    there = any((place / f"tokenizer.{kind}").is_file() for kind in ("json", "model"))
    own = str(place) if there else None
  else:
    step = find_step(place)
    if step is None:
      raise unsaved_run(place) or UserError(
        f"{place}: neither a run with a checkpoint nor a Hugging Face checkpoint (config.json)",
        fix="pass a run, one of its checkpoints/N, or a directory with config.json and safetensors",
      )
    loaded, stored = _ours(step, given), manifest.read(step)
    files, failed = manifest.home(step, stored) / sidecar_files.FOLDER, failed_notes(stored)
    if images and not loaded.config.vision.use_multimodal:
      raise UserError(
        f"{place}: images: the model has no vision tower (it was trained with use_multimodal=false)",
        fix="load it without images, or train with use_multimodal=true",
      )
    own, trained = of_step(step), fingerprint_of(step)
  named = own if loaded.config.data.tokenizer == AUTO else loaded.config.data.tokenizer
  tokenizer = None
  try:
    tokenizer = None if named is None else load_tokenizer(named, loaded.config.model.vocab_size)
  except UserError as error:
    if loaded.config.data.tokenizer != AUTO:
      raise
    unusable = error  # a run on token ids needs no tokenizer, and its weights can be used without one
  notes = (*loaded.notes, *failed)
  if tokenizer is not None and trained is not None and trained != tokenizer.fingerprint:
    notes = (*notes, f"the model was trained with another tokenizer: {trained}, not {tokenizer.fingerprint}")
  use_compilation_cache(loaded.config.logging.compilation_cache_dir)
  several = [adapters] if isinstance(adapters, str | Path | Saved) else adapters
  added = tuple(place_of(one, "adapter") for one in several)
  model = make_model(loaded.config, runs_attention=False)  # decoding with a cache does not use attention kernels
  model, line = with_storage(model, place, added, chosen=is_chosen(loaded, "adapter.base_weights"))
  kernels = "; ".join(note for note in (model.decode, "" if model.base is None else model.base.note) if note)
  notes = (*notes, *([line] if line else []), *([f"kernels: {kernels}"] if kernels else []))
  return Pretrained(model, place, tokenizer or unusable, files, notes, added)


def _hugging_face(directory: Path, overrides: list[str], images: bool) -> Loaded:
  from maxtext_like.checkpoint.huggingface.config import read_config
  from maxtext_like.checkpoint.huggingface.model_file import load_checkpoint_config

  if images and not read_config(directory).has_tower:
    raise UserError(
      f"{directory}: images: the model has no vision tower (its config.json has no vision_config)",
      fix="load it without images, or use a checkpoint with a vision tower",
    )
  tower = ["use_multimodal=true"] if images else []
  return load_checkpoint_config(directory, [*tower, *overrides], length=2048, inference=True)[1]


def _ours(step: Path, overrides: list[str]) -> Loaded:
  from maxtext_like.checkpoint.store import manifest
  from maxtext_like.checkpoint.store.stored_config import load_stored

  try:
    return load_stored(manifest.read(step).config, str(step), overrides, inference=True)
  except manifest.DamageError as error:
    raise UserError(f"{step}: not a complete checkpoint: {error}", fix=manifest.ANOTHER) from None
