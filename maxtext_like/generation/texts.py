"""Answers as text: streams of new text, strings that end an answer, and several answers to one prompt."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from jax.sharding import Mesh

from maxtext_like.errors import NonFiniteError, UserError
from maxtext_like.generation.engine import SLOTS, Prompts, check, requests_of
from maxtext_like.generation.sampling import Sampling
from maxtext_like.generation.scheduler import Scheduler
from maxtext_like.generation.slots import TOKENS_PER_CALL, Draft
from maxtext_like.layers.decoder import Decoder

STREAMED_TURN = 8
"""Tokens of each answer between two pieces of text that a user sees."""
_INCOMPLETE = "\N{REPLACEMENT CHARACTER}"


@dataclass(frozen=True, kw_only=True)
class Options:
  """Options of a generation call.

  Attributes:
    sampling: how tokens are drawn.
    max_tokens: largest number of tokens of an answer.
    stop: ids that end an answer.
    stop_strings: texts that end an answer. The answer ends before the text.
    answers: number of answers to each prompt.
    seeds: a seed for each prompt instead of that of the sampling; None: one seed.
    numbers: numbers of the prompts, which their draws depend on; None: 0, 1, 2, ...
    logprobs: report log-probabilities of the tokens.
    slots: largest number of answers that are generated at the same time, a power of two.
    least_slots: smallest number of slots, even if there are fewer answers; with another number, products may be rounded in
      another way.
    least_tokens: the caches have room for a prompt with its answer of at least this many tokens. With another capacity, sums
      over the cache may be rounded in another way.
    int8_cache: store keys and values in 8 bits.
    continues: an answer that fails ends, and the others continue. Otherwise its error is raised.
    turn: tokens of each answer between two pieces; at most ``STREAMED_TURN`` with stop strings.
    draft_tokens: number of tokens that a draft model proposes before each pass of the model; 0: there is no draft model.
  """

  sampling: Sampling
  max_tokens: int = 128
  stop: frozenset[int] = frozenset()
  stop_strings: tuple[str, ...] = ()
  answers: int = 1
  seeds: tuple[int, ...] | None = None
  numbers: tuple[int, ...] | None = None
  logprobs: bool = False
  slots: int = SLOTS
  least_slots: int = 1
  least_tokens: int = 1
  int8_cache: bool = False
  continues: bool = False
  turn: int = TOKENS_PER_CALL
  draft_tokens: int = 0

  def __post_init__(self):
    if self.answers < 1:
      raise UserError(f"the number of answers to a prompt is {self.answers}", fix="pass at least 1 as n (--n 1)")
    if self.slots < 1 or self.slots & (self.slots - 1):
      raise UserError(f"slots={self.slots}: not a power of two\n  fix: choose 1, 2, 4, 8, ..., as many as fit in memory")
    if "" in self.stop_strings:
      raise UserError("stop_strings: an empty text would end every answer\n  fix: remove it")


@dataclass(frozen=True, kw_only=True)
class TextPiece:
  """A part of an answer.

  Attributes:
    prompt: index of the prompt.
    sample: index of the answer among those to the prompt.
    text: new text, with complete characters only.
    ended: why the answer ended: "stop" (a token or a string), "length" or "failed"; None if it continues.
  """

  prompt: int
  sample: int
  text: str
  ended: str | None = None


@dataclass(eq=False)
class Growing:
  """An answer during generation.

  All its tokens are decoded each time, because a character may span several tokens.

  Attributes:
    decode: turns the tokens of the answer into text.
    stop_strings: texts that end the answer.
    tokens, logprobs, model_logprobs: those of the answer so far.
    ended: as in ``TextPiece``.
    error: why the answer failed; None if it did not.
  """

  decode: Callable[[list[int]], str]
  stop_strings: tuple[str, ...] = ()
  tokens: list[int] = field(default_factory=list)
  logprobs: list[float] = field(default_factory=list)
  model_logprobs: list[float] = field(default_factory=list)
  ended: str | None = None
  error: NonFiniteError | UserError | None = None
  _shown: str = ""

  @property
  def text(self) -> str:
    """The complete text, up to a string that ended it."""
    return self._cut(self.decode(self.tokens))[0]

  def new_text(self) -> str:
    """Return the text that is new since the last call. It may set ``ended``.

    Until the answer has ended, an incomplete character and the beginning of a string that would end it are held back."""
    text, found = self._cut(self.decode(self.tokens))
    if found:
      # Tokens after the string depend on when the host read them, so they are not part of the answer.
      while (shorter := self._cut(self.decode(self.tokens[:-1])))[1]:
        text = shorter[0]
        self.tokens.pop()
      del self.logprobs[len(self.tokens) :], self.model_logprobs[len(self.tokens) :]
      self.ended, self.error = "stop", None
    stable = text
    if self.ended is None:
      # Tokenizers write one mark for each byte of an incomplete character.
      stable = text.rstrip(_INCOMPLETE)
      held = max((n for s in self.stop_strings for n in range(1, len(s)) if stable.endswith(s[:n])), default=0)
      stable = stable[: len(stable) - held]
    if not stable.startswith(self._shown):
      stable = text if self.ended else self._shown
    new, self._shown = stable[len(self._shown) :], stable
    return new

  def _cut(self, text: str) -> tuple[str, bool]:
    """Return the text before the first string that ends it, and whether there is one."""
    places = [at for s in self.stop_strings if (at := text.find(s)) >= 0]
    return (text[: min(places)], True) if places else (text, False)


class Texts:
  """The answers to some prompts, which ``run`` generates.

  ``options`` are the options, ``requests`` the requests, and ``answers`` the answers to each prompt.

  Args:
    decoder: the model.
    prompts: the encoded prompts.
    options: sampling, lengths and ends of the answers.
    decode: (ids of a prompt, ids of an answer) -> text of the answer.
    mesh: the mesh of the parameters; None: one device, or the current mesh.
    on_clamped: called with numbers of values that float16 clamped.
    draft: a model that proposes tokens, with ``options.draft_tokens``; None for plain decoding.

  Raises:
    UserError: a prompt or an option cannot be used.
  """

  def __init__(
    self,
    decoder: Decoder,
    prompts: Prompts,
    options: Options,
    decode: Callable[[Sequence[int], list[int]], str],
    *,
    mesh: Mesh | None = None,
    on_clamped: Callable[[int], None] | None = None,
    draft: Decoder | None = None,
  ):
    check(prompts, decoder, options.max_tokens)
    if options.seeds is not None and len(options.seeds) != len(prompts.tokens):
      raise UserError(
        f"seeds: {len(options.seeds)} seeds for {len(prompts.tokens)} prompts", fix="pass one seed for each prompt"
      )
    self.options = options
    self._decoder, self._mesh, self._on_clamped = decoder, mesh, on_clamped
    self._draft = None if draft is None else Draft(draft, options.draft_tokens)
    self._scheduler: Scheduler | None = None
    self.requests = requests_of(
      prompts,
      max_tokens=options.max_tokens,
      seed=options.sampling.seed,
      seeds=options.seeds,
      numbers=options.numbers,
      answers=options.answers,
    )
    self.answers = [
      [Growing(lambda ids, own=tokens: decode(own, ids), options.stop_strings) for _ in range(options.answers)]
      for tokens in prompts.tokens
    ]

  @property
  def tokens_per_pass(self) -> float | None:
    """Mean number of tokens that a pass of the model has made, if there is a draft model; None if there is none."""
    if self._draft is None or self._scheduler is None or not self._scheduler.passes:
      return None
    return self._scheduler.made / self._scheduler.passes

  def run(self, params: Any, *, draft_params: Any = None, texts: bool = True) -> Iterator[list[TextPiece]]:
    """Generate. Yield new parts of answers until all have ended.

    Args:
      params: parameters of the model, stacked or rows apart (``Decoder.apart``).
      draft_params: those of the draft model, in the same form.
      texts: decode new tokens at once. False leaves the texts of the parts empty, unless there are stop strings.
    """
    options = self.options
    texts = texts or bool(options.stop_strings)
    # The host finds stop strings, and an answer with one must not use its slot much longer.
    turn = min(options.turn, STREAMED_TURN) if options.stop_strings else options.turn
    scheduler = self._scheduler = Scheduler(
      self._decoder,
      params,
      self.requests,
      options.sampling,
      options.stop,
      largest=options.slots,
      least=options.least_slots,
      least_tokens=options.least_tokens,
      turn=turn,
      logprobs=options.logprobs,
      int8_cache=options.int8_cache,
      continues=options.continues,
      mesh=self._mesh,
      on_clamped=self._on_clamped,
      draft=self._draft,
      draft_params=draft_params,
    )
    for pieces in scheduler.run():
      found = []
      for piece in pieces:
        answer = self.answers[piece.request][piece.sample]
        if answer.ended:
          continue
        answer.tokens += piece.tokens
        answer.logprobs += piece.logprobs
        answer.model_logprobs += piece.model_logprobs
        answer.ended, answer.error = piece.ended, piece.error
        text = answer.new_text() if texts else ""
        if answer.ended and not piece.ended:
          scheduler.cancel(piece.request, piece.sample)
        found.append(TextPiece(prompt=piece.request, sample=piece.sample, text=text, ended=answer.ended))
      yield found
