"""The verbs of the command line and the names of the Python API. To add one, add its line here.

A verb is ``cli/<verb>.py`` with ``run(argv) -> int``. The functions that it offers to Python are in ``api/<verb>.py``. Python's
keywords get an underscore: ``cli/import_.py``. ``python -m maxtext_like.config.document`` writes ``maxtext_like/__init__.pyi``,
which type checkers read, from this table.
"""

import keyword
from typing import NamedTuple


class Verb(NamedTuple):
  """A verb of the command line.

  Attributes:
    summary: one line for ``maxtext-like --help``.
    api: public names that ``api/<verb>.py`` defines, separated by spaces.
    uses_jax: the verb needs JAX, so that the environment is checked before it starts.
    several_processes: the verb accepts ``--processes``.
  """

  summary: str
  api: str
  uses_jax: bool = True
  several_processes: bool = False


VERBS = {
  "train": Verb("train a model: pretraining, fine-tuning, LoRA", "train", several_processes=True),
  "sft": Verb("fine-tune a model on conversations", "sft", several_processes=True),
  "data": Verb("show tokenized records, the learned tokens, and counts of one pass over the data", "look_at_data",
               uses_jax=False),
  "forward": Verb("run a checkpoint on the arrays of an .npz file", "forward"),
  "import": Verb("convert a Hugging Face checkpoint, to train from", "import_checkpoint"),
  "export": Verb("write the weights of a run for transformers and vLLM", "export_checkpoint export_adapter"),
  "generate": Verb("generate text with a run or a Hugging Face checkpoint", "generate"),
  "eval": Verb("evaluate a run or a Hugging Face checkpoint on tasks of lm-evaluation-harness", "evaluate"),
  "perplexity": Verb("compute the perplexity of a text file by windows that overlap", "perplexity"),
  "bisect": Verb("find the precision keys that repair a step that is not finite or inaccurate", "bisect"),
  "compile": Verb("compile the train step for TPUs or GPUs, on any machine, and report whether it fits", "compile_step"),
  "plan": Verb("estimate memory and time of the train step on other machines, without compiling", "plan"),
  "risk": Verb("estimate from the weights which numbers overflow in a dtype", "risk initial_risk"),
  "audit": Verb("read the dtypes of every part of the compiled train step, and check the precision keys", "audit"),
  "xray": Verb("measure every tensor of one training step, and find the first cause of a NaN", "xray xray_step",
               several_processes=True),
  "replay": Verb("repeat the step that ended a run, in the same or another precision", "replay", several_processes=True),
  "config": Verb("print the resolved configuration and the origin of each value", "load_config", uses_jax=False),
  "models": Verb("list the model configurations with their parameter counts", "list_models"),
}  # fmt: skip

OTHER_NAMES = {
  "FiniteGuard": "numerics.finite_guard",
  "Prompt": "generation.prompts",
  "generate_file": "api.generate_file",
  "kernel_self_test": "api.kernel_selfcheck",
  "list_keys": "api.keys",
  "load": "api.pretrained",
}
"""Public names that belong to no verb, with their modules."""


def module_of(verb: str) -> str:
  """Return the name of a verb's module in ``cli`` and ``api``."""
  return f"{verb}_" if keyword.iskeyword(verb) else verb


def public_names() -> dict[str, str]:
  """Return every public name of the package with its module, sorted by name."""
  names = {name: f"api.{module_of(verb)}" for verb, entry in VERBS.items() for name in entry.api.split()}
  return dict(sorted({**names, **OTHER_NAMES}.items()))


def stub() -> str:
  """Return the text of ``maxtext_like/__init__.pyi``."""
  names = public_names()
  return "\n".join(
    [
      "# Generated from maxtext_like/verbs.py by python -m maxtext_like.config.document; do not edit.",
      "from maxtext_like import errors as errors",
      *sorted(f"from maxtext_like.{module} import {name} as {name}" for name, module in names.items()),
      "",
      "__all__: list[str]",
      "__version__: str",
      "",
    ]
  )
