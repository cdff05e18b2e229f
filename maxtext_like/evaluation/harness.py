"""A model for lm-evaluation-harness: its ``LM`` over a decoder of this project. Imports lm_eval, of the extra ``eval``.

Texts are encoded, and long inputs are shortened, as the harness' Hugging Face backend does it, so its numbers are comparable.
"""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from lm_eval.api.model import TemplateLM  # pyright: ignore[reportMissingImports]
from lm_eval.models.utils import normalize_gen_kwargs, postprocess_generated_text  # pyright: ignore[reportMissingImports]
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window  # pyright: ignore[reportMissingImports]

from maxtext_like.config.problems import did_you_mean
from maxtext_like.data.chat.conversation import Conversation, Message
from maxtext_like.data.chat.rendering import RenderError
from maxtext_like.data.tokenization.tokenizer import Tokenizer
from maxtext_like.errors import UserError
from maxtext_like.evaluation.scoring import BATCH_TOKENS, Scorer, padded_length
from maxtext_like.generation.engine import Prompts
from maxtext_like.generation.prompts import chat_renderer, continuation
from maxtext_like.generation.sampling import Sampling
from maxtext_like.generation.stop import stop_tokens
from maxtext_like.generation.texts import Options, Texts
from maxtext_like.layers.decoder import Decoder
from maxtext_like.models.model import Model

# Keys of generation_kwargs that change nothing with this value. With any other value they are an error.
_NEUTRAL = {
  "num_beams": 1, "num_return_sequences": 1, "repetition_penalty": 1.0, "length_penalty": 1.0, "use_cache": True,
  "typical_p": 1.0, "no_repeat_ngram_size": 0, "early_stopping": False,
}  # fmt: skip
_SAMPLED = ("temperature", "top_k", "top_p", "min_p")
_LENGTHS = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")


class HarnessModel(TemplateLM):
  """A decoder with its tokenizer, for the tasks of the harness. Every process of a run computes all requests.

  Attributes:
    params: weights, which may be replaced between two evaluations.
    max_length: longest input in tokens. Longer ones lose their first tokens.
    max_gen_toks: length of an answer if the task does not set it.
    clamped: number of values that float16 clamped.
  """

  def __init__(
    self,
    model: Model,
    decoder: Decoder,
    tokenizer: Tokenizer,
    files: Path | None,
    *,
    params: Any = None,
    max_length: int | None = None,
    batch_size: int | None = None,
    batch_tokens: int = BATCH_TOKENS,
    max_gen_toks: int = 256,
    apply_chat_template: bool = False,
    seed: int = 0,
    on_batch: Callable[[str, int, int], None] | None = None,
  ):
    """Prepares the model; nothing is compiled yet.

    Args:
      model: configuration, mesh, and the decoder that generates.
      decoder: the decoder that scores, with kernels for complete rows.
      tokenizer: tokenizer of the model.
      files: directory that may contain generation_config.json, or None.
      params: see the attribute.
      max_length: see the attribute; None: the longest sequence of the model.
      batch_size: rows of a batch; None: as many as have ``batch_tokens`` positions together, at least one.
      batch_tokens: see ``batch_size``.
      max_gen_toks: see the attribute.
      apply_chat_template: tasks use the chat template.
      seed: seed of tasks that sample.
      on_batch: called before every batch, and when an answer has ended, with the kind of request, and the numbers of finished
        and of all requests.

    Raises:
      UserError: the tokenizer has neither a token for the beginning nor one for the end of a text, or ``max_length`` is too
        large, or there is no chat template.
    """
    super().__init__()
    self.params, self.max_gen_toks = params, max_gen_toks
    self._model, self._text, self._batch_size, self._seed = model, tokenizer, batch_size, seed
    self._tell = on_batch or (lambda *_: None)
    self._generated_clamped, self._batch_tokens = 0, batch_tokens
    longest = model.config.model.max_position_embeddings
    if max_length is not None and max_length > longest:
      raise UserError(
        f"max_length is {max_length}, but the model takes {longest} tokens\n  fix: max_length of at most {longest}"
      )
    self._scorer = Scorer(
      model,
      decoder,
      max_length=max_length or longest,
      batch_size=batch_size,
      batch_tokens=batch_tokens,
      on_batch=lambda finished, of: self._tell("loglikelihood", finished, of),
    )
    self._stop, self._renderer = stop_tokens(tokenizer, files, model=model.config.model), None
    if apply_chat_template:
      self._renderer, ends = chat_renderer(model.config, tokenizer)
      self._stop |= ends
    if tokenizer.bos_id is None and tokenizer.eos_id is None:
      raise UserError(
        "the tokenizer has neither a bos nor an eos token\n  why: a text without context is scored after one of them\n"
        "  fix: set tokenizer=PATH to the model's own tokenizer"
      )
    begin = [spelling for spelling, token in tokenizer.special.items() if token == self.prefix_token_id]
    self._begin = begin[0] if begin else None

  @property
  def max_length(self) -> int:
    return self._scorer.max_length

  @property
  def clamped(self) -> int:
    return self._scorer.clamped + self._generated_clamped

  @property
  def eot_token_id(self) -> int | None:
    return self._text.eos_id

  @property
  def prefix_token_id(self) -> int:
    """The token before a text without context: beginning of text, or else end of text."""
    found = self._text.eos_id if self._text.bos_id is None else self._text.bos_id
    assert found is not None
    return found

  @property
  def tokenizer_name(self) -> str:
    return self._text.fingerprint

  def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
    """Encode a text, in which spellings of special tokens are those tokens.

    Args:
      string: the text.
      add_special_tokens: begin with the bos token; None: if the tokenizer has one and the text does not begin with it.
    """
    ids = self._text.encode_special(string)
    if add_special_tokens is None:
      add_special_tokens = self._begin is None or not string.startswith(self._begin)
    return [self._text.bos_id, *ids] if add_special_tokens and self._text.bos_id is not None else ids

  def chat_template(self, chat_template: bool | str = False) -> str | None:
    """Return the name of the chat template, which the harness records."""
    del chat_template
    return None if self._renderer is None else self._renderer.name

  def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
    """Render a conversation up to the assistant's answer.

    Args:
      chat_history: messages. Without ``add_generation_prompt`` the last one is the assistant's, and the text ends in it.
      add_generation_prompt: the assistant's answer has not begun.

    Raises:
      UserError: the template does not support the conversation.
    """
    assert self._renderer is not None, "the caller asked for a chat template"
    messages, begun = chat_history, ""
    if not add_generation_prompt:
      *messages, last = chat_history
      begun = last["content"]
    conversation = Conversation(tuple(Message(message["role"], message["content"]) for message in messages))  # type: ignore[arg-type]
    try:
      return self._renderer.render(conversation, "prompt").text + begun
    except RenderError as error:
      raise UserError(
        f"chat template {self._renderer.name}: a prompt of the task cannot be rendered: {error}\n"
        "  fix: leave out the system instruction, choose another chat_template, or evaluate without a template"
      ) from None

  def _loglikelihood_tokens(self, requests: Sequence[Any], **_: Any) -> list[tuple[float, bool]]:
    found = self._scorer(self.params, [(context, answer) for _, context, answer in requests])
    return [(score.log_probability, score.greedy) for score in found]

  def loglikelihood(self, requests: Sequence[Any], disable_tqdm: bool = True) -> list[tuple[float, bool]]:
    return super().loglikelihood(requests, disable_tqdm=disable_tqdm)

  def loglikelihood_rolling(self, requests: Sequence[Any], disable_tqdm: bool = True) -> list[float]:
    """Return the log-probability of each text, in windows that share no scored token."""
    del disable_tqdm
    parts, owners = [], []
    for index, request in enumerate(requests):
      tokens = self.tok_encode(request.args[0])
      for window in get_rolling_token_windows(tokens, self.prefix_token_id, self.max_length, context_len=1):
        parts.append(make_disjoint_window(window))
        owners.append(index)
    sums = [0.0] * len(requests)
    for owner, score in zip(owners, self._scorer(self.params, parts), strict=True):
      sums[owner] += score.log_probability
    return sums

  def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = True) -> list[str]:
    """Return the answers, each cut before the first stop string that it contains.

    Raises:
      UserError: a key of ``generation_kwargs`` is not supported, or leaves no room for the prompt.
    """
    del disable_tqdm
    answers = [""] * len(requests)
    # One group for each set of generation_kwargs.
    groups: dict[str, list[int]] = {}
    for index, request in enumerate(requests):
      groups.setdefault(json.dumps(request.args[1], sort_keys=True, default=str), []).append(index)
    finished = 0
    for indices in groups.values():
      kwargs = requests[indices[0]].args[1]
      sampling, until, length = self._generation(kwargs)
      room = self.max_length - length
      if room < 1:
        raise UserError(
          f"max_gen_toks is {length}, and max_length is {self.max_length}\n  why: no token is left for the prompt\n"
          "  fix: decrease max_gen_toks, or increase max_length"
        )
      prompts = {index: self.tok_encode(requests[index].args[0])[-room:] for index in indices}
      for index, text in self._answers(prompts, length, sampling, until, finished, len(requests)):
        answers[index] = text
      finished += len(indices)
    return answers

  def _answers(
    self, prompts: dict[int, list[int]], length: int, sampling: dict[str, Any], until: list[str], finished: int, of: int
  ) -> Iterator[tuple[int, str]]:
    """Yield the answers to prompts with their numbers.

    An answer ends at a stop token or a stop string, and the next prompt then uses its slot.

    Args:
      prompts: tokens by the number of the request.
      length: largest number of tokens of an answer.
      sampling: arguments of ``Sampling``.
      until: stop strings.
      finished, of: numbers of earlier requests and of all requests.
    """
    # Long prompts first, because the first ones decide the memory of a slot.
    order = sorted(prompts, key=lambda index: -len(prompts[index]))
    size = self._batch_size or max(1, self._batch_tokens // padded_length(len(prompts[order[0]]) + length))
    options = Options(
      sampling=Sampling(**sampling, vocabulary=self._text.vocab_size, seed=self._seed % 2**32),
      max_tokens=length,
      stop=self._stop,
      stop_strings=tuple(text for text in until if text),
      numbers=tuple(order),  # the draws do not depend on the order
      slots=1 << (size.bit_length() - 1),
    )

    def count(clamped: int) -> None:
      self._generated_clamped += clamped

    texts = Texts(
      self._model.decoder,
      Prompts([prompts[index] for index in order], names=[f"request {index}" for index in order]),
      options,
      lambda prompt, ids: continuation(self._text, prompt, ids),
      mesh=self._model.mesh,  # pyright: ignore[reportArgumentType]  (it is not an abstract one)
      on_clamped=count,
    )
    self._tell("generate_until", finished, of)
    for pieces in texts.run(self.params, texts=False):
      if ended := sum(piece.ended is not None for piece in pieces):
        finished += ended
        self._tell("generate_until", finished, of)
    for index, (answer,) in zip(order, texts.answers, strict=True):
      yield index, postprocess_generated_text(answer.text, until, None)

  def _generation(self, kwargs: Mapping[str, Any]) -> tuple[dict[str, Any], list[str], int]:
    """Return the arguments of ``Sampling``, the stop strings and the length of an answer."""
    known = {*_NEUTRAL, *_SAMPLED, *_LENGTHS, "until", "do_sample"}
    for key, value in kwargs.items():
      if key not in known:
        raise UserError(f"generation_kwargs: {key} is not supported{did_you_mean(key, known)}\n  fix: leave it out")
      if key in _NEUTRAL and value != _NEUTRAL[key]:
        raise UserError(f"generation_kwargs: {key}={value} is not supported\n  fix: {key}={_NEUTRAL[key]}, or leave it out")
    settled = normalize_gen_kwargs(dict(kwargs), self.max_gen_toks)
    sampling: dict[str, Any] = {"temperature": 0.0}
    if settled["do_sample"]:
      sampling |= {key: settled[key] for key in _SAMPLED if settled.get(key) is not None}
    return sampling, [str(text) for text in settled["until"]], settled["max_gen_toks"]
