"""For all tests, before anything imports JAX: compiled without the optimisation of LLVM, which takes most of a test's time.

XLA's own passes (fusion, layouts, what is rounded where) are those of every run. The first command of the README, the
benchmarks and the device tables run optimised.
"""

import os

_FLAG = "--xla_backend_optimization_level=0"

if "xla_backend_optimization_level" not in os.environ.get("XLA_FLAGS", ""):
  os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {_FLAG}".strip()
