"""``python -m maxtext_like``, the same as ``maxtext-like``."""

import sys

from maxtext_like.cli.main import program

if __name__ == "__main__":
  sys.exit(program())
