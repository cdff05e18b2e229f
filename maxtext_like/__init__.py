"""Train Gemma 3/4, DeepSeek V3/V3.2 and Qwen3 in JAX in any precision, finite from step 1, and told exactly why when not."""

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
  from maxtext_like.api.answers import generate
  from maxtext_like.api.audited import audit
  from maxtext_like.api.bisected import bisect
  from maxtext_like.api.catalog import list_keys, list_models
  from maxtext_like.api.configuration import load_config
  from maxtext_like.api.conversion import export_adapter, export_checkpoint, import_checkpoint
  from maxtext_like.api.fits import compile_step
  from maxtext_like.api.initial_risk import initial_risk
  from maxtext_like.api.kernel_tests import kernel_self_test
  from maxtext_like.api.looks import replay, xray, xray_step
  from maxtext_like.api.outputs import forward
  from maxtext_like.api.planned import plan
  from maxtext_like.api.pretrained import load
  from maxtext_like.api.records import look_at_data
  from maxtext_like.api.runs import sft, train
  from maxtext_like.api.weights_at_risk import risk
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
  "audit": "api.audited",
  "bisect": "api.bisected",
  "compile_step": "api.fits",
  "export_adapter": "api.conversion",
  "export_checkpoint": "api.conversion",
  "forward": "api.outputs",
  "generate": "api.answers",
  "import_checkpoint": "api.conversion",
  "initial_risk": "api.initial_risk",
  "kernel_self_test": "api.kernel_tests",
  "load": "api.pretrained",
  "load_config": "api.configuration",
  "list_keys": "api.catalog",
  "list_models": "api.catalog",
  "look_at_data": "api.records",
  "plan": "api.planned",
  "replay": "api.looks",
  "risk": "api.weights_at_risk",
  "sft": "api.runs",
  "train": "api.runs",
  "xray": "api.looks",
  "xray_step": "api.looks",
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
