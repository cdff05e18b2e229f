"""Connects the processes of one run, and ends all of them if one is lost."""

from typing import NoReturn

from maxtext_like.config.load import Loaded
from maxtext_like.errors import RetryableError
from maxtext_like.sharding import processes, rendezvous
from maxtext_like.sharding.processes import Heartbeat
from maxtext_like.training.loop.watchdog import end_now
from maxtext_like.training.run import provenance


def join(loaded: Loaded) -> Heartbeat:
  """Connect the processes before the first device is used. Nothing happens for a single process, the default.

  Returns:
    The heartbeat, to be entered while the processes work together.

  Raises:
    UserError: the processes do not belong to one run.
    RetryableError: some processes did not connect.
  """
  limits = loaded.config.watchdog
  same = provenance.same_everywhere() | rendezvous.as_facts(loaded.to_yaml(mask=True), "key")
  processes.join(same, limits.watchdog_peers_seconds)
  return Heartbeat(limits.watchdog_heartbeat_seconds, _end_with_a_peer)


def _end_with_a_peer(what: str, code: int) -> NoReturn:
  total = processes.count()
  error = RetryableError(f"{what}; the run needs all of its {total} processes and ends\n  fix: start all of them again")
  error.exit_code = code
  end_now(error)
