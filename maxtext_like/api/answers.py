"""Answers of ``generate``: their types, and how prompts and options of the API become ``generation.texts``."""

import numbers
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol, TypedDict

from maxtext_like.api.arguments import after_loading, require_number, words
from maxtext_like.config.overrides import is_key
from maxtext_like.config.problems import did_you_misspell
from maxtext_like.errors import UserError

if TYPE_CHECKING:
  from pathlib import Path

  from jax.sharding import Mesh

  from maxtext_like.config.schema import Config
  from maxtext_like.data.tokenization.tokenizer import Tokenizer
  from maxtext_like.generation.prompts import Prompt
  from maxtext_like.generation.texts import Growing, Texts
  from maxtext_like.layers.decoder import Decoder


class LoadedModel(Protocol):
  """The parts of ``Pretrained`` that answers need."""

  @property
  def config(self) -> "Config": ...
  @property
  def decoder_without_kernels(self) -> "Decoder": ...
  @property
  def tokenizer(self) -> "Tokenizer": ...
  @property
  def files(self) -> "Path | None": ...
  @property
  def mesh(self) -> "Mesh": ...
  @property
  def directory(self) -> "Path": ...
  @property
  def decoding_params(self) -> Any: ...


class GenerateOptions(TypedDict, total=False):
  """Keyword arguments of ``maxtext_like.generate`` that describe the answers. See there."""

  max_tokens: int
  temperature: float
  top_k: int
  top_p: float
  min_p: float
  min_tokens: int
  repetition_penalty: float
  presence_penalty: float
  frequency_penalty: float
  logit_bias: Mapping[int, float]
  seed: int
  seeds: Sequence[int] | None
  n: int
  stop: str | Sequence[str]
  stop_ids: Iterable[int]
  stop_strings: str | Sequence[str]
  eos_token_id: int | Iterable[int] | None
  logprobs: bool
  slots: int
  int8_cache: bool
  draft: LoadedModel | None
  draft_tokens: int


DRAFT_TOKENS = 4
"""Default of the number of tokens that a draft model proposes before each pass of the model."""
_PREPARES_IMAGES = (
  "patch_size_for_vit",
  "image_size_for_vit",
  "pooling_size_for_vit",
  "vision_output_length",
  "image_token_id",
)
"""Keys of the ``vision:`` section that decide the arrays of an image and its tokens."""
_WHOLE = ("max_tokens", "top_k", "min_tokens", "seed", "n", "slots", "draft_tokens")
_REAL = ("temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty")


@dataclass(frozen=True)
class Answer:
  """Generated continuation of a prompt.

  Attributes:
    prompt: text of the prompt.
    text: generated text.
    tokens: ids of the generated tokens, up to the one that completes a stop string.
    sample: index of the answer among those to the prompt.
    ended: "stop" if a token or a string ended it, "length" if it has max_tokens tokens.
    logprobs: natural logarithm of each token's probability under the distribution that it was drawn from (after temperature,
      penalties and filters); None without ``logprobs``.
    model_logprobs: the same under the model's own distribution.
  """

  prompt: str
  text: str
  tokens: tuple[int, ...]
  sample: int = 0
  ended: str | None = None
  logprobs: tuple[float, ...] | None = None
  model_logprobs: tuple[float, ...] | None = None


@dataclass(frozen=True)
class Generation:
  """Answers in the order of the prompts, with statistics.

  Attributes:
    answers: one answer per prompt, or ``n`` per prompt, those to one prompt together.
    clamped: number of values that overflowed in float16 and were clipped or set to zero; None without float16.
    first_tokens: number of tokens from the first call, over all prompts.
    first_seconds: time until the first tokens, including compilation.
    seconds: time after the first tokens.
    tokens_per_pass: with a draft model, the mean number of tokens that a pass made, from 1 to draft_tokens + 1; None
      otherwise.
  """

  answers: tuple[Answer, ...]
  clamped: int | None
  first_tokens: int
  first_seconds: float
  seconds: float
  tokens_per_pass: float | None = None

  @property
  def note(self) -> str:
    """Part of a line of statistics about the passes with a draft model; "" without one."""
    return passes_note(self.tokens_per_pass)

  @property
  def text(self) -> str:
    """Text of the only answer. Raises ValueError if there are several."""
    if len(self.answers) != 1:
      raise ValueError(
        f"text needs exactly one answer, but there are {len(self.answers)}\n"
        "  fix: use [answer.text for answer in generation.answers]"
      )
    return self.answers[0].text


def require_options(of: Callable[..., Any], options: Mapping[str, Any]) -> None:
  """Raise UserError if an option is not a number, or not a whole one where that is needed."""
  for names, whole in ((_WHOLE, True), (_REAL, False)):
    for name in names:
      if name in options:
        require_number(of, name, options[name], whole=whole)
  bias, seeds = options.get("logit_bias"), options.get("seeds")
  is_id = lambda token: isinstance(token, numbers.Integral) and not isinstance(token, bool)
  if bias is not None and not (
    isinstance(bias, Mapping) and all(is_id(t) and isinstance(number, numbers.Real) for t, number in bias.items())
  ):
    raise UserError(
      f"{of.__name__}: logit_bias={bias!r:.60}: not a dict of token ids and numbers", fix="pass logit_bias={106: -2.5}"
    )
  if seeds is not None and not (isinstance(seeds, Collection) and all(is_id(s) and 0 <= int(s) < 2**32 for s in seeds)):
    raise UserError(
      f"{of.__name__}: seeds={seeds!r:.60}: not whole numbers from 0 to {2**32 - 1}",
      fix="pass a list, such as seeds=[1, 2]",
    )
  for name in ("stop", "stop_strings"):
    texts = options.get(name, ())
    if not isinstance(texts, Collection) or not all(isinstance(text, str) for text in texts):
      raise UserError(f"{of.__name__}: {name}={texts!r:.60}: not a text or a list of texts", fix=f"pass {name}=['a', 'b']")
  for name in ("logprobs", "int8_cache"):
    if not isinstance(value := options.get(name, False), bool | int) or value not in (False, True):
      raise UserError(f"{of.__name__}: {name}={value!r:.60}: not a bool", fix=f"pass {name}=True or {name}=False")


def translated_options(of: Callable[..., Any], options: Mapping[str, Any], keys: dict[str, Any]) -> tuple[dict, dict[str, Any]]:
  """Return the options together with options of transformers among the other keywords, and the remaining keywords.

  None selects the default of an option, except for ``eos_token_id``.

  Raises:
    UserError: an option of transformers is not supported, or the same option is set twice.
  """
  from maxtext_like.generation.transformers_options import translated

  found, others = translated(keys)
  options, found = ({n: v for n, v in of.items() if v is not None or n == "eos_token_id"} for of in (options, found))
  if "temperature" in options and not keys.get("do_sample", True):
    raise UserError(
      f"{of.__name__}: temperature={options['temperature']!r:.60} has no effect with do_sample={keys['do_sample']}\n"
      "  why: answers are greedy\n  fix: remove one of the two"
    )
  if twice := [name for name in found if name in options]:
    raise UserError(
      f"{of.__name__}: {twice[0]}: set twice, the second time by its name in transformers\n  fix: remove one of the two"
    )
  return {**options, **found}, others


def texts_of(
  model: LoadedModel,
  of: Callable[..., Any],
  prompts: "str | Prompt | Sequence[str | Prompt]",
  options: Mapping[str, Any],
  *,
  turn: int,
  numbers: Sequence[int] | None = None,
  least_slots: int = 1,
  least_tokens: int = 1,
  continues: bool = False,
  on_clamped: Callable[[int], None] | None = None,
) -> "tuple[list[Prompt], Texts]":
  """Return the prompts as a list, and their answers, which are not generated yet.

  Args:
    model: the model.
    of: the called function, for errors.
    prompts: as for ``generate``.
    options: ``GenerateOptions``, options of transformers, or other keywords, which are an error.
    turn: tokens of each answer between two pieces of text.
    numbers: numbers of the prompts, which their draws depend on; None: 0, 1, 2, ...
    least_slots, least_tokens: smallest number of slots and capacity of the caches, as in ``generation.texts.Options``.
    continues: an answer that fails ends, and the others continue. Otherwise its error is raised.
    on_clamped: called with numbers of values that float16 clamped.

  Raises:
    UserError: a prompt or an option is invalid.
  """
  from maxtext_like.generation.prompts import chat_renderer, continuation, encode
  from maxtext_like.generation.sampling import Sampling
  from maxtext_like.generation.stop import named_tokens, stop_tokens
  from maxtext_like.generation.texts import Options, Texts
  from maxtext_like.generation.transformers_options import ending_tokens

  # Options, and keywords that are none.
  own = {name: value for name, value in options.items() if name in GenerateOptions.__annotations__}
  given, keys = translated_options(of, own, {name: value for name, value in options.items() if name not in own})
  if "adapters" in keys:
    raise after_loading(of, "adapters")
  for name in keys:
    if not is_key(name) and (near := did_you_misspell(name, list(GenerateOptions.__annotations__))):
      known = ", ".join(GenerateOptions.__annotations__)
      raise UserError(f"{of.__name__}: unknown argument {name!r}{near}", fix=f"write one of {known}")
  if extra := words((), keys):
    raise after_loading(of, extra[0])
  require_options(of, given)
  listed = as_prompts(prompts)
  draft, draft_tokens = given.get("draft"), given.get("draft_tokens", DRAFT_TOKENS)
  if draft is not None:
    _require_draft(of, model, draft, images=any(prompt.images for prompt in listed))
  elif "draft_tokens" in given:
    raise UserError(
      f"{of.__name__}: draft_tokens={draft_tokens} has no effect without a draft model",
      fix="pass a draft model (draft=load(DIR); --draft DIR on the command line), or leave draft_tokens out",
    )
  tokenizer, vocabulary = model.tokenizer, model.config.model.vocab_size
  numbers_of = {name: given[name] for name in (*_REAL, "top_k", "min_tokens", "seed") if name in given}
  bias = {int(token): float(number) for token, number in (given.get("logit_bias") or {}).items()}
  sampling = Sampling(**numbers_of, logit_bias=bias, vocabulary=tokenizer.vocab_size)
  # Tokens that end an answer: those of the model's files and of the chat template, or eos_token_id; and others of the call.
  stop, strings = ((named,) if isinstance(named := given.get(name, ()), str) else named for name in ("stop", "stop_strings"))
  renderer, ends = None, frozenset[int]()
  if any(prompt.conversation is not None for prompt in listed):
    renderer, ends = chat_renderer(model.config, tokenizer)
  if "eos_token_id" in given:
    ends = _require_ids("eos_token_id", ending_tokens(given["eos_token_id"]), vocabulary)
  else:
    ends = ends | stop_tokens(tokenizer, model.files, model.config.model)
  ends |= named_tokens(tokenizer, stop) | _require_ids("stop_ids", given.get("stop_ids", ()), vocabulary)
  encoded = encode(listed, tokenizer, model.config.vision, renderer, special_tokens=model.config.data.special_tokens_in_text)
  seeds = given.get("seeds")
  made = Options(
    sampling=sampling,
    max_tokens=given.get("max_tokens", 128),
    stop=frozenset(ends),
    stop_strings=tuple(strings),
    answers=given.get("n", 1),
    seeds=None if seeds is None else tuple(map(int, seeds)),
    numbers=None if numbers is None else tuple(numbers),
    logprobs=bool(given.get("logprobs", False)),
    least_slots=least_slots,
    least_tokens=least_tokens,
    int8_cache=bool(given.get("int8_cache", False)),
    continues=continues,
    turn=turn,
    draft_tokens=0 if draft is None else draft_tokens,
    **({"slots": given["slots"]} if "slots" in given else {}),
  )
  sampling.values(vocabulary, ends)  # checks the biases before weights are read
  decode = lambda prompt, ids: continuation(tokenizer, prompt, ids)
  how: dict[str, Any] = {"mesh": model.mesh, "on_clamped": on_clamped}
  of_draft = None if draft is None else draft.decoder_without_kernels
  return listed, Texts(model.decoder_without_kernels, encoded, made, decode, draft=of_draft, **how)


def passes_note(tokens_per_pass: float | None) -> str:
  """Return a part of a line about the passes with a draft model; "" if there is none."""
  return "" if tokens_per_pass is None else f", {tokens_per_pass:.2f} tokens in each pass of the model"


def draft_params_of(options: Mapping[str, Any]) -> Any:
  """Return the weights of the draft model of ``GenerateOptions``; None if there is none."""
  draft = options.get("draft")
  return None if draft is None else draft.decoding_params


def _require_draft(of: Callable[..., Any], model: LoadedModel, draft: Any, *, images: bool) -> None:
  """Raise UserError if a draft model cannot propose tokens to a model."""
  if not isinstance(draft, type(model)):
    raise UserError(f"{of.__name__}: draft={draft!r:.60}: not a loaded model", fix="pass draft=maxtext_like.load(DIR)")
  name = f"the draft model {draft.directory}"
  if draft.tokenizer.fingerprint != model.tokenizer.fingerprint:
    raise UserError(
      f"{of.__name__}: {name} has another tokenizer: {draft.tokenizer.fingerprint}, not {model.tokenizer.fingerprint}\n"
      "  why: it proposes ids of tokens\n  fix: choose a smaller model of the same release"
    )
  if (rows := draft.config.model.vocab_size) < model.tokenizer.vocab_size:
    raise UserError(
      f"{of.__name__}: {name} has {rows} rows in its table, and the tokenizer has {model.tokenizer.vocab_size} tokens",
      fix="choose another draft model",
    )
  if draft.mesh != model.mesh:
    raise UserError(
      f"{of.__name__}: {name} is loaded on another mesh: {dict(draft.mesh.shape)}, not {dict(model.mesh.shape)}",
      fix="load both with the same mesh keys",
    )
  if images and not draft.config.vision.use_multimodal:
    raise UserError(
      f"{of.__name__}: {name} is loaded without a vision tower, and a prompt has images",
      fix="load it with images=True, or leave out the draft model",
    )
  if images:
    prepared = lambda of: {key: getattr(of.config.vision, key, None) for key in _PREPARES_IMAGES}
    own, other = prepared(model), prepared(draft)
    if differing := [f"{key}={other[key]}, not {own[key]}" for key in own if own[key] != other[key]]:
      raise UserError(
        f"{of.__name__}: {name} cannot take the images that are prepared for the model: it has {differing[0]}",
        fix="choose a draft model of the same release, or leave it out",
      )


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
  # Of several prompts without a place, the errors name the number.
  unnamed = lambda prompt: len(found) > 1 and prompt.place == Prompt.place
  return [replace(prompt, place=f"prompt {i}") if unnamed(prompt) else prompt for i, prompt in enumerate(found)]


def _require_ids(name: str, ids: Iterable[int], vocabulary: int) -> set[int]:
  given = list(ids) if isinstance(ids, Iterable) else [ids]
  for token in given:
    if not isinstance(token, numbers.Integral) or isinstance(token, bool) or not 0 <= token < vocabulary:
      raise UserError(
        f"generate: {name}: {token!r:.60}: the vocabulary has ids 0 to {vocabulary - 1}",
        fix=f"pass ids from 0 to {vocabulary - 1}",
      )
  return {int(token) for token in given}


def results(listed: "Sequence[Prompt]", texts: "Texts") -> tuple[Answer, ...]:
  """Return the answers that ``texts`` has generated."""

  return tuple(
    result(prompt, sample, growing, logprobs=texts.options.logprobs)
    for prompt, samples in zip(listed, texts.answers, strict=True)
    for sample, growing in enumerate(samples)
  )


def result(prompt: "Prompt", sample: int, growing: "Growing", *, logprobs: bool) -> Answer:
  """Return a generated answer. ``logprobs``: with log-probabilities."""
  both = [tuple(x) if logprobs else None for x in (growing.logprobs, growing.model_logprobs)]
  return Answer(prompt.text, growing.text, tuple(growing.tokens), sample, growing.ended, *both)
