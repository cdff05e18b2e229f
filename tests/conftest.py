"""For all tests, before anything imports JAX: compiled without the optimisation of LLVM, which takes most of a test's time.

XLA's own passes (fusion, layouts, what is rounded where) are those of every run; on JAX 0.10 fusions become code through its
older emitter. The first command of the README, the benchmarks and the device tables run as a user's do.
"""

import os
import signal
from importlib.metadata import version

from hypothesis import settings

FLAGS = ["--xla_backend_optimization_level=0", "--xla_cpu_parallel_codegen_split_count=1"]
if version("jaxlib").startswith("0.10."):  # a half of the compile time; newer ones have not got it
  FLAGS.append("--xla_cpu_use_fusion_emitters=false")

if "xla_backend_optimization_level" not in os.environ.get("XLA_FLAGS", ""):
  os.environ["XLA_FLAGS"] = " ".join([os.environ.get("XLA_FLAGS", ""), *FLAGS]).strip()

# How long an example takes is the machine's affair, and says nothing of the code.
settings.register_profile("maxtext_like", deadline=None)
settings.load_profile("maxtext_like")

# Under nohup or setsid a hangup is ignored, and the programs that tests start would take that over.
signal.signal(signal.SIGHUP, signal.SIG_DFL)
