"""Pretrain and fine-tune Gemma 3/4, DeepSeek V3/V3.2 and Qwen3 models in JAX, with precise diagnosis of NaN and Inf.

The public names are in the table of ``verbs.py``. Each is imported at first use, so that importing the package is fast.
"""

import importlib
from typing import Any

__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
  from maxtext_like.verbs import public_names

  if name == "errors":
    return importlib.import_module(f"{__name__}.errors")
  names = public_names()
  if name == "__all__":
    return list(names)
  if name not in names:
    from maxtext_like.config.problems import did_you_mean

    raise AttributeError(f"module {__name__!r} has no attribute {name!r}{did_you_mean(name, names)}")
  value = getattr(importlib.import_module(f"{__name__}.{names[name]}"), name)
  globals()[name] = value
  return value


def __dir__() -> list[str]:
  from maxtext_like.verbs import public_names

  return ["__version__", "errors", *public_names()]
