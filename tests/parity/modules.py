"""Imports torch and transformers and silences their messages. If one is missing, ImportError says what to install."""

import importlib
import os
import warnings
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TQDM_DISABLE", "1")

try:
  torch: Any = importlib.import_module("torch")
  transformers: Any = importlib.import_module("transformers")
except ImportError as error:
  raise ImportError(f"{error}; needs the extra parity: pip install -e '.[parity]'", name=error.name) from None

transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()
torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
warnings.filterwarnings("ignore", module=r"transformers\..*")
