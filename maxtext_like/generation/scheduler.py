"""Continuous batching: prompts wait for slots, and an answer that has ended makes room for the next prompt.

Answers do not depend on the order of prompts or on the other prompts, except with matmul_dtype=float8, where all rows of a
product share a scale. A different number of slots, or capacity of the caches, may change how products are rounded. The capacity
is determined by the longest prompt with its answer.
"""

import collections
import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from maxtext_like.errors import NonFiniteError, UserError
from maxtext_like.generation import shapes, slots, speculative
from maxtext_like.generation.memory import require_room
from maxtext_like.generation.sampling import Sampling
from maxtext_like.generation.slots import NONE, NOT_FINITE, TOKENS_PER_CALL, Draft, Row, not_finite
from maxtext_like.layers.cache import Step
from maxtext_like.layers.decoder import Decoder
from maxtext_like.sharding.mesh import use_mesh


@dataclass(frozen=True, kw_only=True, eq=False)
class Request:
  """A prompt and the number of answers to it.

  Attributes:
    tokens: ids of the prompt.
    token_types: 1 at image tokens; None for no images.
    images: arrays of the images of this prompt; None for no images.
    limit: largest number of tokens of an answer.
    seed: seed of the draws.
    stream: number of the draws of the first answer among those with the same seed. Further answers use the next numbers.
    answers: number of answers.
    name: names the prompt in errors, as the line of its file.
  """

  tokens: Sequence[int]
  token_types: Sequence[int] | None = None
  images: Mapping[str, np.ndarray] | None = None
  limit: int
  seed: int
  stream: int
  answers: int = 1
  name: str = "the prompt"


@dataclass
class Piece:
  """New tokens of an answer.

  Attributes:
    request: index of the request.
    sample: index of the answer among those to the request.
    tokens: new tokens, without the token that ended the answer.
    logprobs, model_logprobs: as in ``sampling.draw``, for ``tokens``; empty if not requested.
    ended: "stop" if a token ended the answer, "length" if it has its largest length, "failed" if no further token can be drawn;
      None if it continues.
    error: why it failed; None if it did not.
  """

  request: int
  sample: int
  tokens: list[int] = field(default_factory=list)
  logprobs: list[float] = field(default_factory=list)
  model_logprobs: list[float] = field(default_factory=list)
  ended: str | None = None
  error: NonFiniteError | UserError | None = None


@dataclass(eq=False)
class _Answer:
  """An answer in a slot.

  Attributes:
    request, sample, slot: which answer it is, and its slot.
    made: number of drawn tokens that the host has read.
    ended: it needs the slot no more.
    failed: no further token can be drawn.
  """

  request: int
  sample: int
  slot: int
  made: int = 0
  ended: bool = False
  failed: bool = False


@dataclass(frozen=True, eq=False)
class _Result:
  """Arrays that a program returned. ``answers`` are those of the last axis of its arrays."""

  found: dict[str, jax.Array]
  answers: dict[int, _Answer]


class Scheduler:
  """Generates the answers to some requests. ``state`` is the state on the device while ``run`` generates.

  Args:
    decoder: the model.
    params: its parameters, stacked or rows apart (``Decoder.apart``).
    requests: the requests.
    sampling: how tokens are drawn. Requests have their own seeds.
    stop: tokens that end an answer.
    largest: largest number of slots, a power of two.
    least: smallest number of slots, even if there are fewer answers.
    least_tokens: the caches have room for a prompt with its answer of at least this many tokens, even if all are shorter.
    turn: tokens of each answer between two reads of the host, at most ``TOKENS_PER_CALL``.
    logprobs: report log-probabilities.
    int8_cache: store keys and values in 8 bits.
    continues: an answer that fails ends, and the others continue. Otherwise its error is raised.
    mesh: the mesh of the parameters; None: one device, or the current mesh.
    on_clamped: called with numbers of values that float16 clamped.
    draft, draft_params: a model that proposes tokens, and its parameters in the same form; None for plain decoding.

  Attributes:
    passes, made: with a draft model, the number of passes over single answers so far, and of tokens that they made.
  """

  def __init__(
    self,
    decoder: Decoder,
    params: Any,
    requests: Sequence[Request],
    sampling: Sampling,
    stop: frozenset[int],
    *,
    largest: int,
    least: int = 1,
    least_tokens: int = 1,
    turn: int = TOKENS_PER_CALL,
    logprobs: bool = False,
    int8_cache: bool = False,
    continues: bool = False,
    mesh: jax.sharding.Mesh | None = None,
    on_clamped: Callable[[int], None] | None = None,
    draft: Draft | None = None,
    draft_params: Any = None,
  ):
    self._draft, self._draft_params = draft, draft_params
    self.passes = self.made = 0
    self._decoder, self._params, self._requests = decoder, params, requests
    self._stop, self._turn = np.array(sorted(stop), np.int32), min(turn, TOKENS_PER_CALL)
    self._on_clamped = on_clamped
    self._rule = sampling.rule(logprobs=logprobs)
    # Inputs of every call are put on the device once.
    self._values = jax.tree.map(jnp.asarray, sampling.values(decoder.cfg.embedding.vocab_size, stop))
    self._stops = jnp.asarray(self._stop)
    self._int8, self._continues, self._mesh = int8_cache, continues, mesh
    # The context of a mesh surrounds single calls, and not the caller's code between two results.
    self._on_mesh = lambda: contextlib.nullcontext() if mesh is None or mesh.size == 1 else use_mesh(mesh)
    self._apart = any(isinstance(params[s.name], tuple) for s in decoder.stacks)
    first = jax.tree.leaves(params)[0]
    # Other processes' devices do not report their memory.
    here = first.sharding.addressable_devices if isinstance(first, jax.Array) else ()
    self._device = min(here, key=lambda device: device.id, default=None)
    self._slots = max(least, shapes.slots_for(sum(r.answers for r in requests), largest))
    self._longest = max(least_tokens, *(len(r.tokens) + r.limit for r in requests))
    # Proposed tokens follow the last token of an answer, and so do slots that are cleared of earlier proposals.
    self._longest += 2 * draft.tokens if draft else 0
    self._waiting = collections.deque((i, sample) for i, r in enumerate(requests) for sample in range(r.answers))
    self._free = list(range(self._slots))[::-1]
    self._answers: dict[int, _Answer] = {}
    self._unread: collections.deque[_Result] = collections.deque()
    self._canceled: set[_Answer] = set()

  def cancel(self, request: int, sample: int) -> None:
    """End an answer, after its last piece was read."""
    for answer in self._answers.values():
      if (answer.request, answer.sample) == (request, sample) and not answer.ended:
        self._canceled.add(answer)

  def run(self) -> Iterator[list[Piece]]:
    """Yield new tokens of answers until all have ended.

    Raises:
      NonFiniteError: the logits of an answer are not finite, unless ``continues``.
      UserError: a drawn token has no row in the model's tables.
      DoesNotFitError: the caches do not fit the memory of the device.
    """
    first = [len(self._requests[i].tokens) for i, _ in list(self._waiting)[: self._slots]]
    self._capacity = shapes.first_capacity(first, self._longest)
    current, penalties = jax.sharding.get_abstract_mesh(), self._rule.penalties
    require_room(
      self._decoder,
      self._slots,
      self._longest,
      grows=self._capacity < self._longest,
      int8=self._int8,
      device=self._device,
      mesh=self._mesh or (None if current.empty else current),
      params=self._params,
      penalties=penalties,
      draft=self._draft,
    )
    with self._on_mesh():
      self.state = slots.empty_state(
        self._decoder,
        self._slots,
        self._capacity,
        apart=self._apart,
        int8=self._int8,
        penalties=penalties,
        draft=self._draft,
      )
    while self._answers or self._waiting:
      with self._on_mesh():
        self._end_canceled()
        self._fill()
        if any(not answer.ended for answer in self._answers.values()):
          self._decode()
      # While nothing waits for a slot, the device always has one more call to run.
      keep = 0 if self._waiting else 1
      pieces: list[Piece] = []
      while len(self._unread) > keep or (self._unread and self._all_over()):
        pieces += self._read(self._unread.popleft())
      if pieces:
        yield pieces

  def _all_over(self) -> bool:
    return all(answer.ended for answer in self._answers.values())

  # Programs that run on the device.

  def _fill(self) -> None:
    """Prefill waiting prompts, as many as there are free slots."""
    new: list[_Answer] = []
    while self._waiting and self._free:
      request, sample = self._waiting.popleft()
      new.append(_Answer(request, sample, self._free.pop()))
    if not new:
      return
    self._enlarge(max(len(self._requests[answer.request].tokens) for answer in new) + 1)
    # Of several answers to one request, the first prefills the prompt.
    groups: dict[int, list[_Answer]] = collections.defaultdict(list)
    for answer in new:
      self._answers[answer.slot] = answer
      groups[answer.request].append(answer)
    # Prompts with equal chunks are processed together.
    alike: dict[tuple, list[int]] = collections.defaultdict(list)
    for request in groups:
      r = self._requests[request]
      chunks = shapes.chunks_of(len(r.tokens), together=r.images is not None)
      alike[(*chunks, request if r.images is not None else -1)].append(request)
    for (*chunks, _), members in alike.items():
      rows = shapes.prefill_rows(max(chunks), self._slots)
      for at in range(0, len(members), rows):
        part = members[at : at + rows]
        hidden = self._prefill(part, [groups[request][0].slot for request in part], chunks, rows)
        self._start([answer for request in part for answer in groups[request]], part, hidden, rows)

  def _prefill(self, members: list[int], into: list[int], chunks: list[int], rows: int) -> jax.Array:
    """Prefill prompts that have the same chunks. Return the hidden states of their last tokens, [rows, D]."""
    own = [self._requests[request] for request in members]
    # Rows without a prompt belong to slots beyond the last.
    slot = jnp.asarray([*into, *range(self._slots, self._slots + rows - len(into))], jnp.int32)
    begin, hidden = 0, None
    for size in chunks:
      parts = [r.tokens[begin : begin + size] for r in own]
      count = jnp.asarray([*map(len, parts), *[0] * (rows - len(own))], jnp.int32)
      batch: dict[str, Any] = {"tokens": _right(parts, rows, size)}
      batch["positions"] = np.broadcast_to(begin + np.arange(size, dtype=np.int32), (rows, size))
      if (images := own[0].images) is not None:
        batch |= {"token_types": _right([r.token_types or () for r in own], rows, size), **images}
      step = Step(jnp.full(rows, begin, jnp.int32), count, slot, fresh=begin == 0)
      self.state, hidden, clamped = slots.prefill(self._decoder, self._params, self.state, batch, step)
      if self._draft is not None:
        self.state = slots.prefill_draft(self._draft.decoder, self._draft_params, self.state, batch, step)
      self._unread.append(_Result({"clamped": clamped}, {}))
      begin += size
    assert hidden is not None
    return hidden

  def _start(self, answers: list[_Answer], members: list[int], hidden: jax.Array, rows: int) -> None:
    """Draw the first tokens of answers to the prompts of a prefill call."""
    first = {request: next(a.slot for a in answers if a.request == request) for request in members}
    copies = len(answers) > len(members)
    # The number of rows of the product with the head can change its rounding. It depends on the job only: if prompts have
    # several answers, a single new answer has as many rows as one that begins together with others.
    several = any(r.answers > 1 for r in self._requests)
    width = self._slots if several else max(rows, min(shapes.MIN_ROWS, self._slots))
    for at in range(0, len(answers), width):
      part = answers[at : at + width]
      empty = width - len(part)
      requests = [self._requests[answer.request] for answer in part]
      array = lambda numbers, dtype=jnp.int32, empty=empty: jnp.asarray([*numbers, *[0] * empty], dtype)
      place = array([members.index(answer.request) for answer in part])
      row = Row(
        array([r.limit for r in requests]),
        array([r.seed for r in requests], jnp.uint32),
        array([r.stream + answer.sample for r, answer in zip(requests, part, strict=True)], jnp.uint32),
      )
      slot = jnp.asarray([*(answer.slot for answer in part), *range(self._slots, self._slots + empty)], jnp.int32)
      self.state, found = slots.start(
        self._decoder,
        self._rule,
        self._params,
        self.state,
        hidden,
        place,
        array([first[answer.request] for answer in part]),
        slot,
        array([len(r.tokens) for r in requests]),
        row,
        self._values,
        self._stops,
        copies=copies,
      )
      self._unread.append(_Result({name: x[None] for name, x in found.items()}, dict(enumerate(part))))

  def _decode(self) -> None:
    """Continue all answers by one call."""
    passes, made = 0, self._turn
    if self._draft is not None:
      passes = speculative.passes_of(self._turn, self._draft)
      made = passes * (self._draft.tokens + 1)
    # Tokens that the device has made or may make, including calls that the host has not read.
    ahead = made * (1 + sum(bool(result.answers) and "clamped" in result.found for result in self._unread))
    ahead += 1 + (2 * self._draft.tokens if self._draft else 0)  # the first token of a new answer; see ``_longest``
    self._enlarge(max(len(self._requests[a.request].tokens) + a.made + ahead for a in self._answers.values()))
    # With prompts waiting, an answer that ends makes room for the next prompt at once.
    ended = max(1, self._slots // 16) if self._waiting else self._slots + 1
    how = (self.state, self._values, self._stops)
    if self._draft is None:
      self.state, found = slots.decode(self._decoder, self._rule, self._params, *how, np.int32(self._turn), np.int32(ended))
    else:
      self.state, found = speculative.decode(
        self._decoder, self._draft, self._rule, self._params, self._draft_params, *how, np.int32(passes), np.int32(ended)
      )
    self._unread.append(_Result(found, dict(self._answers)))

  def _enlarge(self, needed: int) -> None:
    """Enlarge the caches to rows of this many tokens."""
    capacity = shapes.grown_capacity(min(needed, self._longest), self._longest)
    if capacity > self._capacity:
      self.state = slots.enlarge(self._decoder, self.state, capacity, apart=self._apart, int8=self._int8, draft=self._draft)
      self._capacity = capacity

  def _end_canceled(self) -> None:
    if self._canceled:
      kept = np.ones(self._slots, bool)
      for answer in self._canceled:
        kept[answer.slot] = False
        self._release(answer)
      self.state = slots.end(self.state, kept)
      if any(answer.failed for answer in self._canceled):
        self.state = slots.clear(self.state, kept)
      self._canceled.clear()

  # Results that the host reads.

  def _read(self, result: _Result) -> list[Piece]:
    """Read arrays that a program returned, and give the tokens to their answers."""
    found = {name: np.asarray(x) for name, x in result.found.items()}
    if "clamped" in found and self._on_clamped is not None:
      self._on_clamped(int(found["clamped"]))
    if "token" not in found:
      return []
    tokens, lookup = found["token"], self._decoder.cfg.lookup
    missing = lookup.missing(np.maximum(tokens, 0))
    pieces = []
    for column, answer in result.answers.items():
      if answer.ended or answer in self._canceled:
        continue
      drawn = tokens[:, column] != NONE  # a pass with a draft model may leave some places empty
      if self._draft is not None and "clamped" in found:
        self.passes += int(drawn.reshape(-1, self._draft.tokens + 1).any(axis=1).sum())
        self.made += int(drawn.sum())
      piece = self._piece(answer, tokens[drawn, column], missing[drawn, column])
      if self._rule.logprobs:
        for name in ("logprob", "model_logprob"):
          getattr(piece, f"{name}s").extend(found[name][drawn, column][: len(piece.tokens)].tolist())
      if piece.tokens or piece.ended:
        pieces.append(piece)
    return pieces

  def _piece(self, answer: _Answer, tokens: np.ndarray, missing: np.ndarray) -> Piece:
    """Give drawn tokens to an answer.

    Args:
      answer: the answer.
      tokens: [N], drawn tokens, which may be ``NOT_FINITE``.
      missing: [N], which of them have no row in a table.
    """
    left = self._requests[answer.request].limit - answer.made
    tokens = tokens[:left]
    stops, piece = np.flatnonzero(np.isin(tokens, self._stop)), Piece(answer.request, answer.sample)
    kept = int(stops[0]) if stops.size else len(tokens)
    # No token can follow logits that are not finite, or a token without a row. Nothing reads the last token of an answer.
    failed = (tokens[:kept] == NOT_FINITE) | (missing[:kept] & (np.arange(kept) < left - 1))
    if failed.any():
      at = int(np.flatnonzero(failed)[0])
      error = self._failure(answer, answer.made + at, int(tokens[at]))
      if not self._continues:
        raise error
      piece.tokens, piece.ended, piece.error = tokens[:at].tolist(), "failed", error
      answer.failed = True
      self._canceled.add(answer)
    else:
      piece.tokens = tokens[:kept].tolist()
      answer.made += len(tokens)
      piece.ended = "stop" if stops.size else "length" if kept == left else None
      if piece.ended:
        self._release(answer)
    return piece

  def _failure(self, answer: _Answer, at: int, token: int) -> NonFiniteError | UserError:
    """Return the error of an answer whose token ``at`` cannot be used."""
    request = self._requests[answer.request]
    sample = f", sample {answer.sample}" if request.answers > 1 else ""
    name = f"{request.name}{sample}, token {at} of the answer"
    if token == NOT_FINITE:
      return not_finite(name, self._decoder)
    return UserError(
      f"{name} is {token}: {self._decoder.cfg.lookup.why_missing(token)}, so no token can follow it\n"
      "  fix: make it end an answer (stop_ids, --stop-id), or use a checkpoint with complete tables"
    )

  def _release(self, answer: _Answer) -> None:
    if not answer.ended:
      answer.ended = True
      self._free.append(answer.slot)
      del self._answers[answer.slot]


def _right(rows: Sequence[Sequence[int]], count: int, length: int) -> np.ndarray:
  """Pad rows with zeros on the right, and add empty rows, int32 [count, length]."""
  out = np.zeros((count, length), np.int32)
  for b, row in enumerate(rows):
    out[b, : len(row)] = row
  return out
