"""One layer, three ways to call it: as the pure function it is, as a Linen module, as an NNX module.

All three are functions of (parameter tree, *arguments) over the same tree and give bitwise the same numbers, so the train
step does not know which one it holds.
"""

import functools
from collections.abc import Callable
from typing import Any, Literal

import jax

ModuleApi = Literal["nnx", "linen", "plain"]


def make_apply(layer: Any, module_api: ModuleApi) -> Callable[..., Any]:
  """``apply(params, *args)`` of a layer through a face.

  Args:
    layer: ``params()`` and a pure call.
    module_api: "linen" and "nnx" go through ``flax.linen`` and ``flax.nnx``; "plain" calls the layer itself.
  """
  if module_api == "plain":
    return layer
  if module_api == "linen":
    from maxtext_like.layers.linen import Linen

    module = Linen(layer)
    return lambda params, *args: module.apply({"params": params}, *args)

  @functools.cache
  def face() -> tuple[Any, Any, Any]:
    """Import Flax and build the module when the function is first traced."""
    with jax.ensure_compile_time_eval():  # what an import makes is no part of the trace
      from flax import nnx

      from maxtext_like.layers.nnx import NNX

      return nnx, *nnx.split(NNX(layer, rngs=None))

  def apply(params, *args):
    nnx, graph, shapes = face()
    state = jax.tree.map(lambda x: x, shapes)  # a copy: the values are written into it
    nnx.replace_by_pure_dict(state, params)
    return nnx.merge(graph, state)(*args)

  return apply
