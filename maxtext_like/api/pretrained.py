"""``load``: a model with weights from a run, a checkpoint or a Hugging Face directory; and text generation with it."""

import functools
import numbers
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from maxtext_like.api.arguments import Saved, place_of, require_function, require_numbers, words
from maxtext_like.config import hub
from maxtext_like.config.load import Loaded
from maxtext_like.errors import UserError

if TYPE_CHECKING:
  import jax
  from flax import nnx

  from maxtext_like.config.schema import Config
  from maxtext_like.data.tokenization.tokenizer import Tokenizer
  from maxtext_like.generation.prompts import Prompt
  from maxtext_like.layers.decoder import Decoder
  from maxtext_like.models.model import Model

_NO_TOKENIZER = (
  "has neither tokenizer.json nor tokenizer.model, so text cannot be tokenized\n"
  "  fix: pass tokenizer= with the path of a tokenizer, or tokenizer=bytes"
)


@dataclass(frozen=True)
class Answer:
  """Generated continuation of a prompt.

  Attributes:
    prompt: text of the prompt.
    text: generated text.
    tokens: ids of the generated tokens.
  """

  prompt: str
  text: str
  tokens: tuple[int, ...]


@dataclass(frozen=True)
class Generation:
  """Answers in the order of the prompts, with statistics.

  Attributes:
    answers: one answer per prompt.
    clamped: number of values that overflowed in float16 and were clipped or set to zero; None without float16.
    first_tokens: number of tokens from the first call, over all prompts.
    first_seconds: time until the first tokens, including compilation.
    seconds: time after the first tokens.
  """

  answers: tuple[Answer, ...]
  clamped: int | None
  first_tokens: int
  first_seconds: float
  seconds: float

  @property
  def text(self) -> str:
    """Text of the only answer. Raises ValueError if there are several."""
    if len(self.answers) != 1:
      raise ValueError(
        f"text needs exactly one answer, but there are {len(self.answers)}\n"
        "  fix: use [answer.text for answer in generation.answers]"
      )
    return self.answers[0].text


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
      raise UserError(f"{self.directory}: {_NO_TOKENIZER}")
    if isinstance(self.own_tokenizer, UserError):
      raise self.own_tokenizer
    return self.own_tokenizer

  @functools.cached_property
  def params(self) -> Any:
    """The weights, a nested dict of arrays on the model's devices.

    Raises:
      UserError: the weights are damaged or belong to another model.
      NonFiniteError: a weight is not finite.
    """
    from maxtext_like.checkpoint.read_weights import read_weights

    weights = read_weights(self.directory, self.model)
    if not self.adapters:
      return weights
    from maxtext_like.checkpoint.adapters.merge_adapters import with_adapters

    return with_adapters(weights, self.model, self.adapters, self.directory)

  @functools.cached_property
  def decoder(self) -> "Decoder":
    """The model as a pure function: ``decoder(params, {"tokens": ...})`` returns logits [B, T, V] and aux.

    Its attention kernels have passed their self-test on this device.
    """
    from maxtext_like.models.model import make_model

    return make_model(self.config, mesh=self.model.mesh).decoder

  def nnx(self) -> "nnx.Module":
    """Return the model as a Flax NNX module with the weights: ``module({"tokens": ...})``."""
    from flax import nnx

    from maxtext_like.layers.nnx import NNX

    graph, state = nnx.split(NNX(self.decoder, rngs=None))
    nnx.replace_by_pure_dict(state, self.params)
    return nnx.merge(graph, state)

  def logits(self, tokens: Any) -> "jax.Array":
    """Return logits [B, T, V] of token ids [B, T]; each row is one document.

    Raises:
      UserError: the ids are outside the vocabulary or have another shape.
    """
    import numpy as np

    ids, size = np.asarray(tokens), self.config.model.vocab_size
    if ids.ndim != 2 or not ids.size or not np.issubdtype(ids.dtype, np.integer):
      raise UserError(
        f"tokens: {ids.dtype} {list(ids.shape)} is not a batch of ids\n  fix: pass [rows, positions], as [[5, 6, 7]]"
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
    max_tokens: int = 128,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
    seed: int = 0,
    stop: str | Sequence[str] = (),
    stop_ids: Iterable[int] = (),
    on_text: Callable[[int, str], None] | None = None,
    **keys: Any,
  ) -> "Generation":
    """Continue prompts; arguments and errors as for ``maxtext_like.generate``. Other keywords are an error."""
    of = Pretrained.generate
    from maxtext_like.generation import engine
    from maxtext_like.generation.prompts import chat_renderer, continuation, encode
    from maxtext_like.generation.sampling import Sampling
    from maxtext_like.generation.stop import stop_tokens

    require_numbers(of, max_tokens=max_tokens, top_k=top_k, seed=seed, temperature=temperature, top_p=top_p, min_p=min_p)
    if on_text is not None:
      require_function(of, "on_text", on_text)
    given = as_prompts(prompts)
    if "adapters" in keys:
      raise UserError("generate: adapters: the model is already loaded\n  fix: pass it to load")
    if extra := words((), keys, of):
      raise UserError(f"generate: {extra[0]}: the model is already loaded\n  fix: pass it to load")
    tokenizer, decoder = self.tokenizer, self.model.decoder
    sampling = Sampling(
      temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, vocabulary=tokenizer.vocab_size, seed=seed
    )
    ends = stop_tokens(tokenizer, self.files, [stop] if isinstance(stop, str) else stop, self.config.model)
    ends |= _require_ids(stop_ids, self.config.model.vocab_size)
    renderer = None
    if any(prompt.conversation is not None for prompt in given):
      renderer, of_answers = chat_renderer(self.config, tokenizer)
      ends |= of_answers
    spelled = self.config.data.special_tokens_in_text
    encoded = encode(given, tokenizer, self.config.vision, renderer, special_tokens=spelled)
    engine.check(encoded, decoder, max_tokens)
    params = self.params
    grown = [_Growing(lambda ids, row=row: continuation(tokenizer, row, ids)) for row in encoded.tokens]
    clamped: list[int] = []
    begin = first = time.monotonic()
    first_tokens = None
    for rows in engine.generate(
      decoder, params, encoded, max_tokens=max_tokens, stop=frozenset(ends), sampling=sampling, on_clamped=clamped.append
    ):
      for number, (answer, new) in enumerate(zip(grown, rows, strict=True)):
        answer.ids.extend(new)
        if on_text is not None and (text := answer.new_text()):
          on_text(number, text)
      if first_tokens is None:
        first, first_tokens = time.monotonic(), sum(len(answer.ids) for answer in grown)
    end = time.monotonic()
    for number, answer in enumerate(grown):
      if on_text is not None and (text := answer.new_text(last=True)):
        on_text(number, text)
    answers = tuple(
      Answer(prompt.text, answer.decode(answer.ids), tuple(answer.ids)) for prompt, answer in zip(given, grown, strict=True)
    )
    counted = sum(clamped) if decoder.uses_float16 else None
    return Generation(answers, counted, first_tokens or 0, first - begin, end - first)


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
      Hugging Face cache, as ``"google/gemma-3-4b-it"``.
    overrides: words that override its configuration, as ``"dtype=bfloat16"``; ``tokenizer=`` replaces its tokenizer.
    images: load the vision tower; without it, the tower of a Hugging Face checkpoint is left out.
    adapters: one or several adapters to add to the weights: directories of peft, or runs with ``lora_rank``.
    keys: the same as Python values.

  Raises:
    UserError: the directory has no checkpoint or a damaged one, an override is invalid, or there is no vision tower.
  """
  from maxtext_like.checkpoint.store import manifest, sidecar_files
  from maxtext_like.checkpoint.weight_sources import find_step
  from maxtext_like.data.tokenization.tokenizer import AUTO, load_tokenizer
  from maxtext_like.models.model import make_model
  from maxtext_like.sharding.compilation_cache import use_compilation_cache
  from maxtext_like.training.run.resolve_tokenizer import fingerprint_of, of_step

  given, place = words(overrides, keys, load), place_of(directory, "checkpoint")
  if not place.is_dir():
    raise UserError(
      f"{place}: no such directory{hub.advice(str(place))}",
      fix=hub.fix(str(place)),
    )
  trained, unusable = None, None
  if (place / "config.json").is_file():
    loaded, files = _hugging_face(place, given, images), place
    there = any((place / f"tokenizer.{kind}").is_file() for kind in ("json", "model"))
    own = str(place) if there else None
  else:
    step = find_step(place)
    if step is None:
      raise UserError(
        f"{place}: neither a run with a checkpoint nor a Hugging Face checkpoint (config.json)",
        fix="pass a run, one of its checkpoints/N, or a directory with config.json and safetensors",
      )
    loaded, files = _ours(step, given), manifest.home(step, manifest.read(step)) / sidecar_files.FOLDER
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
  notes = loaded.notes
  if tokenizer is not None and trained is not None and trained != tokenizer.fingerprint:
    notes = (*notes, f"the model was trained with another tokenizer: {trained}, not {tokenizer.fingerprint}")
  use_compilation_cache(loaded.config.logging.compilation_cache_dir)
  model = make_model(loaded.config, runs_attention=False)  # decoding with a cache does not use attention kernels
  several = [adapters] if isinstance(adapters, str | Path | Saved) else adapters
  return Pretrained(model, place, tokenizer or unusable, files, notes, tuple(place_of(one, "adapter") for one in several))


def _hugging_face(directory: Path, overrides: list[str], images: bool) -> Loaded:
  from maxtext_like.checkpoint.huggingface.config import read_config
  from maxtext_like.checkpoint.huggingface.model_file import load_checkpoint_config

  if images and not read_config(directory).has_tower:
    raise UserError(
      f"{directory}: images: the model has no vision tower (its config.json has no vision_config)",
      fix="load it without images, or use a checkpoint with a vision tower",
    )
  _, loaded = load_checkpoint_config(directory, [*(["use_multimodal=true"] if images else []), *overrides], length=2048)
  return loaded


def _ours(step: Path, overrides: list[str]) -> Loaded:
  from maxtext_like.checkpoint.store import manifest
  from maxtext_like.checkpoint.store.stored_config import load_stored

  try:
    return load_stored(manifest.read(step).config, str(step), overrides)
  except manifest.DamageError as error:
    raise UserError(f"{step}: not a complete checkpoint: {error}", fix=manifest.ANOTHER) from None


def as_prompts(prompts: "str | Prompt | Sequence[str | Prompt]") -> "list[Prompt]":
  """Return one or several texts or prompts as a list of ``Prompt``.

  Raises:
    UserError: an entry is neither a text nor a ``Prompt``, or there is none.
  """
  from maxtext_like.generation.prompts import Prompt

  listed = list(prompts) if isinstance(prompts, Iterable) and not isinstance(prompts, str) else [prompts]
  found = [Prompt(prompt) if isinstance(prompt, str) else prompt for prompt in listed]
  if not found or not all(isinstance(prompt, Prompt) for prompt in found):
    raise UserError(f"prompts: {prompts!r:.60}: neither texts nor Prompts\n  fix: pass a text, a Prompt, or a list of them")
  return found


def _require_ids(ids: Iterable[int], vocabulary: int) -> set[int]:
  given = list(ids) if isinstance(ids, Iterable) else [ids]
  for token in given:
    if not isinstance(token, numbers.Integral) or not 0 <= token < vocabulary:
      raise UserError(
        f"generate: stop_ids: {token!r:.60}: the vocabulary has ids 0 to {vocabulary - 1}",
        fix=f"pass ids from 0 to {vocabulary - 1}",
      )
  return {int(token) for token in given}


class _Growing:
  """An answer during generation. All its tokens are decoded each time, because a character may span several tokens."""

  def __init__(self, decode: Callable[[list[int]], str]):
    self.ids: list[int] = []
    self.decode = decode
    self._shown = ""

  def new_text(self, *, last: bool = False) -> str:
    """Return the text that is new since the last call. An incomplete character is returned only with ``last``."""
    text = self.decode(self.ids)
    stable = text if last else text.removesuffix("\N{REPLACEMENT CHARACTER}")
    if not stable.startswith(self._shown):
      stable = text if last else self._shown
    new, self._shown = stable[len(self._shown) :], stable
    return new
