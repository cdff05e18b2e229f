"""Processes that meet before JAX starts: threads over loopback here, hosts over a network in a real run."""

import socket
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from maxtext_like.errors import ExitError, RetryableError, UserError
from maxtext_like.sharding.rendezvous import as_facts, meet


@pytest.fixture
def port():
  with socket.create_server(("", 0)) as free:
    return free.getsockname()[1]


def outcome(port, index, count, facts, seconds=30.0):
  try:
    return meet(f"127.0.0.1:{port}", index, count, facts, seconds)
  except ExitError as error:
    return error


def all_of(port, *cards, seconds=30.0):
  with ThreadPoolExecutor(len(cards)) as pool:
    return list(pool.map(lambda card: outcome(port, card[0], card[1], card[2], seconds), cards))


def test_all_come(port):
  name = socket.gethostname()
  assert all_of(port, *((i, 3, {"jax": "1"}) for i in (2, 0, 1))) == [[name] * 3] * 3


def test_one_does_not_come(port):
  first, other = all_of(port, (0, 3, {}), (1, 3, {}), seconds=2.0)
  for error in (first, other):
    assert isinstance(error, RetryableError)
    assert f"process 2 of 3 did not connect to port {port}" in str(error)
    assert "process 1 (host " in str(error)


def test_nobody_is_there(port):
  error = outcome(port, 1, 2, {}, seconds=0.3)
  assert isinstance(error, RetryableError)
  assert f"process 0 at 127.0.0.1:{port} within 0 s (watchdog_peers_seconds): Connection refused" in str(error)


@pytest.mark.parametrize(
  ("cards", "said"),
  [
    ([(0, 2, {"jax version": "0.10"}), (1, 2, {"jax version": "0.12"})], "jax version differs: 0.12 in process 1 (host "),
    ([(0, 2, {"key steps": "5"}), (1, 2, {})], "key steps differs: (none) in process 1 (host "),
    ([(0, 2, {}), (1, 3, {})], "expects 3 processes"),
    ([(0, 3, {}), (1, 3, {}), (1, 3, {})], "the index 1: process 1 (host "),
  ],
)
def test_they_are_not_of_one_run(port, cards, said):
  answers = all_of(port, *cards, seconds=60)
  assert all(isinstance(error, UserError) and said in str(error) for error in answers), answers


def test_a_port_that_is_taken():
  with socket.create_server(("", 0)) as other:
    port = other.getsockname()[1]
    error = outcome(port, 0, 2, {})
  assert isinstance(error, UserError)
  assert f"port {port} of " in str(error)
  assert "in use by another program" in str(error)


def test_strangers_are_left_alone(port):
  with ThreadPoolExecutor(2) as pool:
    first = pool.submit(outcome, port, 0, 2, {})
    for said in (
      b"",
      b"GET / HTTP/1.0\r\n\r\n\n",
      b'{"index": 1}\n',
      b'{"index": "1", "count": 2, "facts": {}}\n',
      b'{"index": 1, "count": 2, "facts": {"a": 1}}\n',
    ):
      deadline = time.monotonic() + 60
      while time.monotonic() < deadline:
        try:
          with socket.create_connection(("127.0.0.1", port), timeout=5) as stranger:
            stranger.sendall(said)
          break
        except ConnectionRefusedError:
          time.sleep(0.01)
    assert outcome(port, 1, 2, {}) == first.result()


def test_facts_of_a_configuration():
  assert as_facts("# x: 1\nmodel:\n  emb_dim: 8  # base.yml\n  name: a:b\n", "key") == {"key emb_dim": "8", "key name": "a:b"}
