"""The worker process: time and memory limits, and its behavior with threads, forks, signals and at the end of the program."""

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from maxtext_like.data import worker_process
from maxtext_like.data.chat import sandbox
from maxtext_like.data.chat.sandbox import compile_template
from maxtext_like.data.tokenization import tokenizer as tokenizers
from maxtext_like.data.tokenization.tokenizer import HuggingFaceTokenizer
from maxtext_like.data.tokenization.tokenizer_libraries import is_bounded
from maxtext_like.data.worker_process import LimitError
from maxtext_like.errors import RetryableError, UserError

EMPTY = {"truncation": None, "padding": None, "added_tokens": [], "normalizer": None, "pre_tokenizer": None, "decoder": None}
LETTERS = {"type": "BPE", "vocab": {"a": 0, "b": 1}, "merges": []}


@pytest.fixture
def low_limits(monkeypatch) -> None:
  """Limits that are reached within a second."""
  low = replace(tokenizers.LIMITS, spare_seconds=1.0, open_bytes=64 * worker_process.MIB, call_bytes=64 * worker_process.MIB)
  monkeypatch.setattr(tokenizers, "LIMITS", low)


def written(folder: Path, **parts: object) -> Path:
  path = folder / "tokenizer.json"
  path.write_text(json.dumps({"version": "1.0", "post_processor": None, "model": LETTERS} | EMPTY | parts))
  return path


def replaced(pattern: str, content: str, kind: str = "String") -> dict[str, object]:
  return {"type": "Replace", "pattern": {kind: pattern}, "content": content}


def sequence(members: str, *parts: Mapping[str, object]) -> dict[str, object]:
  return {"type": "Sequence", members: list(parts)}


def test_requests_of_threads_get_their_own_answers():
  render, found = compile_template("{{ number }}", "x"), {}

  def ask(first: int) -> None:
    for number in range(first, first + 200):
      found[number] = render(number=number)

  threads = [threading.Thread(target=ask, args=(1000 * i,)) for i in range(4)]
  for thread in threads:
    thread.start()
  for thread in threads:
    thread.join()
  assert found == {1000 * i + j: str(1000 * i + j) for i in range(4) for j in range(200)}


FORKS = """
import os
from maxtext_like.data.chat.sandbox import compile_template
render = compile_template("{{ pid }}", "x")
assert render(pid=1) == "1"
read, write = os.pipe()
if (child := os.fork()) == 0:
  os.write(write, b"".join(render(pid=i).encode() for i in range(5)))
  os._exit(0)
assert [render(pid=i) for i in range(200)] == [str(i) for i in range(200)], "both processes render at the same time"
assert os.waitpid(child, 0)[1] == 0
assert os.read(read, 100) == b"01234"
"""


def test_a_forked_process_starts_its_own_worker():
  """Runs in a program without JAX, because JAX's threads would not survive a fork."""
  subprocess.run([sys.executable, "-c", FORKS], check=True)


def test_a_worker_that_is_killed_is_started_again():
  render = compile_template("{{ x }}", "x.jinja")
  assert render(x=1) == "1"
  worker = worker_process._running
  assert worker is not None
  worker._process.kill()
  with pytest.raises(RetryableError, match=r"x.jinja: the chat template: the process that runs it ended by signal 9"):
    render(x=2)
  assert render(x=3) == "3"


def test_an_interrupted_request_leaves_no_answer_behind():
  render = compile_template(
    "{% if x == 'a' %}{% for a in range(99999) %}{% for b in range(99) %}{% endfor %}{% endfor %}{% endif %}{{ x }}", "x"
  )

  def stop(number: int, frame: object) -> None:
    raise KeyboardInterrupt

  before = signal.signal(signal.SIGALRM, stop)
  try:
    signal.setitimer(signal.ITIMER_REAL, 0.02)
    with pytest.raises(KeyboardInterrupt):
      render(x="a")
  finally:
    signal.signal(signal.SIGALRM, before)
  assert render(x="b") == "b"


def test_slow_renderings_share_what_is_spare(monkeypatch):
  """Each rendering takes less than the spare time, and together they take more."""
  monkeypatch.setattr(sandbox, "LIMITS", replace(sandbox.LIMITS, spare_seconds=0.3))
  render = compile_template("{% for a in range(count) %}{% for b in range(1000) %}{% endfor %}{% endfor %}", "x")

  def render_all() -> None:
    for _ in range(1000):
      render(count=4000)  # about 0.1 s

  render(count=999)
  with pytest.raises(LimitError, match=r"more processor time than 0.05 s for a text of \d characters and 0.3 s in reserve"):
    render_all()


def test_memory_is_measured_where_the_system_does_not_limit_it(monkeypatch):
  render = compile_template("{% for a in range(99999) %}{% for b in range(9999) %}{% endfor %}{% endfor %}", "x.jinja")
  worker = worker_process._running
  assert worker is not None
  sizes = iter((10**8, 10**8, 10**9))
  monkeypatch.setattr(worker, "_measured", True)
  monkeypatch.setattr(worker, "_resident", lambda: next(sizes))
  with pytest.raises(LimitError, match=r"x.jinja: the chat template takes more than 256 MiB of memory"):
    render()


def test_the_program_ends_without_waiting_for_its_worker():
  code = (
    "from maxtext_like.data.chat.sandbox import compile_template as c; from maxtext_like.data import worker_process as w;"
    "import pathlib, sys; sys.path.append(pathlib.Path('/'));"
    "c('{{ 1 }}', 'x')(); print(w._running._process.pid)"
  )
  ran = subprocess.run(
    [sys.executable, "-W", "error", "-X", "dev", "-c", code], capture_output=True, text=True, timeout=60, check=True
  )
  assert not ran.stderr
  with pytest.raises(ProcessLookupError):
    os.kill(int(ran.stdout), 0)


@pytest.mark.parametrize(
  "parts",
  [
    {"normalizer": sequence("normalizers", *[replaced("a", "a" * 10)] * 9)},
    {"normalizer": sequence("normalizers", sequence("normalizers", *[replaced("a", "aa")] * 30))},
    {"normalizer": sequence("normalizers", *[replaced(".", "aaaaaaaa", "Regex")] * 10)},
    {"normalizer": sequence("normalizers", *[{"type": "Prepend", "prepend": "a" * 10**6}, replaced("a", "a" * 10**4)])},
  ],
  ids=["string", "nested", "expression", "prepend"],
)
@pytest.mark.slow
def test_normalizers_that_expand_a_text_without_bound_are_refused(parts, tmp_path, low_limits):
  path = written(tmp_path, **parts)
  assert not is_bounded(path.read_bytes())
  with pytest.raises(LimitError, match=r"tokenizer.json: the tokenizer takes more than \d+ MiB of memory") as raised:
    HuggingFaceTokenizer(path).encode("a" * 1000)
  assert "fix: tokenizer=PATH" in str(raised.value)


def test_an_expanding_normalizer_of_added_tokens_is_refused_as_it_is_opened(tmp_path, low_limits):
  token = {
    "id": 2,
    "content": "aaaa",
    "single_word": False,
    "lstrip": False,
    "rstrip": False,
    "normalized": True,
    "special": False,
  }
  path = written(tmp_path, added_tokens=[token], normalizer=sequence("normalizers", *[replaced("a", "a" * 10)] * 10))
  with pytest.raises(LimitError, match="the tokenizer takes more than"):
    HuggingFaceTokenizer(path)


def test_an_expression_that_backtracks_is_an_error_and_no_panic(tmp_path):
  split = {"type": "Split", "pattern": {"Regex": "(a+)+$"}, "behavior": "Isolated", "invert": False}
  tokenizer = HuggingFaceTokenizer(written(tmp_path, pre_tokenizer=split))
  assert tokenizer.encode("aab") == [0, 0, 1]
  with pytest.raises(UserError, match=r"cannot encode the text 'a{40}b': PanicException: .*retry-limit"):
    tokenizer.encode("a" * 40 + "b")


def test_a_tokenizer_of_the_worker_gives_what_the_library_gives(tmp_path):
  """The same tokenizer in this process and, with an unknown part that has no effect, in the worker."""
  here = HuggingFaceTokenizer(written(tmp_path))
  assert is_bounded(here.files[0].read_bytes())
  (tmp_path / "other").mkdir()
  there = HuggingFaceTokenizer(written(tmp_path / "other", normalizer=replaced("(z+)+", "", "Regex")))
  assert not is_bounded(there.files[0].read_bytes())
  assert there.encode("abba") == here.encode("abba") == [0, 1, 1, 0]
  assert there.decode([0, 1]) == here.decode([0, 1])
  assert (there.find("b"), there.find("c"), there.vocab_size) == (1, None, 2)
  there.files[0].write_bytes(here.files[0].read_bytes())
  worker_process._discard()
  with pytest.raises(UserError, match="the tokenizer changed while it was in use"):
    there.encode("a")


@pytest.mark.parametrize(
  ("parts", "bounded"),
  [
    # As in Gemma, Qwen, DeepSeek and Llama.
    ({"normalizer": replaced(" ", "▁"), "decoder": sequence("decoders", replaced("▁", " "), {"type": "ByteFallback"})}, True),
    ({"normalizer": {"type": "NFC"}, "decoder": {"type": "ByteLevel"}}, True),
    ({"pre_tokenizer": {"type": "Split", "pattern": {"Regex": r"\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s+(?!\S)|\s+"}}}, True),
    ({"pre_tokenizer": {"type": "Split", "pattern": {"Regex": "[一-龥぀-ゟ゠-ヿ]+|(?i:'s|'t)?\\p{L}+"}}}, True),
    ({"normalizer": sequence("normalizers", {"type": "Prepend", "prepend": "▁"}, replaced(" ", "▁"))}, True),
    ({"normalizer": sequence("normalizers", *[{"type": "NFKC"}] * 5, replaced(" ", "▁▁▁"))}, True),
    ({"normalizer": sequence("normalizers", {"type": "NFKC"}, replaced("a", "aaaa"))}, False),
    ({"normalizer": {"type": "Precompiled", "precompiled_charsmap": ""}}, False),
    ({"normalizer": replaced("", "a")}, False),
    ({"decoder": sequence("decoders", *[replaced("a", "aa")] * 9)}, False),
    ({"pre_tokenizer": {"type": "Split", "pattern": {"Regex": "a*a*a*a*a*b"}}}, False),
    ({"pre_tokenizer": {"type": "Split", "pattern": {"Regex": "(a|[)]a)*b"}}}, False),
    ({"model": {"type": "WordPiece", "max_input_chars_per_word": 10**9}}, False),
    ({"normalizer": {"type": "Unknown"}}, False),
    ({"normalizer": []}, False),
  ],
)
def test_which_parts_are_bounded(parts, bounded):
  assert is_bounded(json.dumps(EMPTY | {"model": LETTERS} | parts).encode()) is bounded
