"""Whether this process is the command and nothing else, so that what it runs is what the files say.

In a notebook or a test, code around a run may have replaced any function of it. Imports nothing heavy: it is asked before all.
"""

import sys
import time

_began: float | None = None


def begin() -> None:
  """Called by the command itself, first of all. A process that has imported JAX by then is somebody else's."""
  global _began
  if "jax" not in sys.modules:
    _began = time.time()


def began() -> float | None:
  """When the command began, in seconds of ``time.time``; None: this process is not the command alone."""
  return _began
