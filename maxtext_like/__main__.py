"""``python -m maxtext_like``, the same as ``maxtext-like``."""

import sys

from maxtext_like.cli.main import main

if __name__ == "__main__":
  sys.exit(main())
