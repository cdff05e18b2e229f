"""The processes that a launcher started with one configuration, as one: joined, and ended together when one of them is lost."""

from typing import NoReturn

from maxtext_like.config.load import Loaded
from maxtext_like.errors import RetryableError
from maxtext_like.sharding import processes, rendezvous
from maxtext_like.sharding.processes import Heartbeat
from maxtext_like.training.loop.watchdog import end_now
from maxtext_like.training.run import provenance


def join(loaded: Loaded) -> Heartbeat:
  """Joins them, before the first device is touched; alone, which is the default, nothing happens.

  Returns:
    To be entered while they work together.

  Raises:
    UserError: they are not of one run.
    RetryableError: some did not come.
  """
  limits = loaded.config.watchdog
  same = provenance.same_everywhere() | rendezvous.as_facts(loaded.to_yaml(mask=True), "key")
  processes.join(same, limits.watchdog_peers_seconds)
  return Heartbeat(limits.watchdog_heartbeat_seconds, _end_with_a_peer)


def _end_with_a_peer(what: str, code: int) -> NoReturn:
  total = processes.count()
  error = RetryableError(f"{what}; the run needs all of its {total} processes, so it ends here; start all of them again")
  error.exit_code = code
  end_now(error)
