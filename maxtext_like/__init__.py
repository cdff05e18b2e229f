"""Train Gemma 3/4, DeepSeek V3/V3.2 and Qwen3 in JAX in any precision, finite from step 1, and told exactly why when not."""

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
  from maxtext_like.api.audit import audit
  from maxtext_like.api.bisect import bisect
  from maxtext_like.api.catalog import list_keys, list_models
  from maxtext_like.api.compile import compile_step
  from maxtext_like.api.configuration import load_config
  from maxtext_like.api.conversion import export_adapter, export_checkpoint, import_checkpoint
  from maxtext_like.api.data import look_at_data
  from maxtext_like.api.forward import forward
  from maxtext_like.api.generate import generate
  from maxtext_like.api.initial_risk import initial_risk
  from maxtext_like.api.kernel_selfcheck import kernel_self_test
  from maxtext_like.api.plan import plan
  from maxtext_like.api.pretrained import load
  from maxtext_like.api.risk import risk
  from maxtext_like.api.train import sft, train
  from maxtext_like.api.xray import replay, xray, xray_step
  from maxtext_like.generation.prompts import Prompt
  from maxtext_like.numerics.finite_guard import FiniteGuard

__all__ = [
  "FiniteGuard",
  "Prompt",
  "audit",
  "bisect",
  "compile_step",
  "export_adapter",
  "export_checkpoint",
  "forward",
  "generate",
  "import_checkpoint",
  "initial_risk",
  "kernel_self_test",
  "list_keys",
  "list_models",
  "load",
  "load_config",
  "look_at_data",
  "plan",
  "replay",
  "risk",
  "sft",
  "train",
  "xray",
  "xray_step",
]

# Where each name is. It is loaded when it is first asked for, so that importing the package imports nothing else.
_HOMES = {
  "FiniteGuard": "numerics.finite_guard",
  "Prompt": "generation.prompts",
  "audit": "api.audit",
  "bisect": "api.bisect",
  "compile_step": "api.compile",
  "export_adapter": "api.conversion",
  "export_checkpoint": "api.conversion",
  "forward": "api.forward",
  "generate": "api.generate",
  "import_checkpoint": "api.conversion",
  "initial_risk": "api.initial_risk",
  "kernel_self_test": "api.kernel_selfcheck",
  "load": "api.pretrained",
  "load_config": "api.configuration",
  "list_keys": "api.catalog",
  "list_models": "api.catalog",
  "look_at_data": "api.data",
  "plan": "api.plan",
  "replay": "api.xray",
  "risk": "api.risk",
  "sft": "api.train",
  "train": "api.train",
  "xray": "api.xray",
  "xray_step": "api.xray",
}


def __getattr__(name: str) -> Any:
  if name == "errors":
    return importlib.import_module(f"{__name__}.errors")
  if name not in _HOMES:
    from maxtext_like.config.problems import did_you_mean

    raise AttributeError(f"module {__name__!r} has no attribute {name!r}{did_you_mean(name, __all__)}")
  value = getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
  globals()[name] = value
  return value


def __dir__() -> list[str]:
  return ["__version__", "errors", *__all__]
