"""Computes the loss and the gradient norm of a model's first step from random weights, in little memory.

  python benchmarks/first_gradient.py qwen3-8b init_scheme=maxtext max_target_length=256
  python benchmarks/first_gradient.py deepseek3-671b num_experts=8 n_routing_groups=1 topk_routing_group=1 vocab_size=16384

The words are those of ``train``, and the layers and the loss are those of the train step. A layer's weights are drawn when
they are needed, once in the forward pass and once in the backward pass, and only the norm of its gradient is kept. Memory
therefore does not grow with the depth, except for the input of each layer. The embedding and the head stay in memory. The
weights have the same distribution as in ``train``, but are not the same numbers.
"""

import argparse
import dataclasses
import functools
import math
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from maxtext_like.config.load import load_config
from maxtext_like.layers import param
from maxtext_like.layers.block import Block, Stack
from maxtext_like.training.run.batches import first_batch
from maxtext_like.training.step.in_backward.forward import PrecomputedDecoder, split_floats
from maxtext_like.training.step.program import TrainProgram, make_program
from maxtext_like.training.step.train_step import Batch
from maxtext_like.training.step.trainable import merge

Tree = Any
Draw = Callable[[int | None], Tree]  # the parameters of a layer, or with None those outside the stacks


class FirstGradient(NamedTuple):
  """The loss of a batch, and the norm of the gradient of each layer and of the parameters outside the stacks (None)."""

  loss: float
  norms: dict[int | None, float]

  @property
  def norm(self) -> float:
    """The norm of all gradients together."""
    return float(np.linalg.norm([*self.norms.values()]))


def first_gradient(program: TrainProgram, batch: Batch, draw: Draw) -> FirstGradient:
  """Computes the gradient of one batch, layer by layer.

  Args:
    program: the model and its step.
    batch: one batch on the device.
    draw: called twice for each layer, so it must return the same numbers both times.
  """
  step, whole = program.step, program.objective.decoder
  decoder = dataclasses.replace(whole, cfg=dataclasses.replace(whole.cfg, remat_policy="none"))
  ctx, trained = decoder.context(batch), program.selection.leaves
  places = [(s, j) for s in decoder.stacks for _ in range(s.repeats) for j in range(len(s.layers))]

  def split(params: Tree, leaves: Tree) -> tuple[Tree, Tree]:
    pick = lambda wanted: jax.tree.map(lambda keep, x: x if keep == wanted else None, leaves, params)
    return pick(True), pick(False)

  def layer(number: int) -> tuple[Tree, Tree]:
    s, j = places[number]
    return split(draw(number), trained[s.name][f"layer_{j}"])

  @functools.cache
  def calls(s: Stack, j: int, block: Block) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """The forward and the backward pass of a kind of layer."""

    def call(p: Tree, frozen: Tree, carry: Tree, own: jax.Array | None) -> Any:
      row = {"params": {f"layer_{j}": merge(p, frozen)}, "cache": None, "probes": None}
      carry, aux = decoder.run_layer(s, j, block, carry, row | {"per_layer": None if own is None else {j: own}}, ctx)
      floats, others = split_floats(aux)
      return (carry, floats), others

    def back(p: Tree, frozen: Tree, carry: Tree, own: jax.Array | None, cotangents: Tree) -> Any:
      _, pullback, _ = jax.vjp(lambda p, carry, own: call(p, frozen, carry, own), p, carry, own, has_aux=True)
      d_p, d_carry, d_own = pullback(cotangents)
      return squares(d_p), d_carry, d_own

    return jax.jit(call), jax.jit(back)

  def enter(p: Tree) -> Any:
    carry, per_layer, first = decoder.enter(merge(p, kept), batch, ctx)
    return (carry, per_layer), first

  # Forward pass: keep the input of each layer and what it reports.
  outside, kept = split(draw(None), {name: x for name, x in trained.items() if not name.startswith("stack_")})
  (carry, per_layer), pullback, first = jax.vjp(jax.jit(enter), outside, has_aux=True)
  owns = [None if per_layer is None else per_layer[i] for i in range(len(places))]
  inputs, floats, others = [], [], []
  for i, (s, j) in enumerate(places):
    inputs.append(carry)
    (carry, own_floats), own_others = calls(s, j, decoder.layers[i])[0](*layer(i), carry, owns[i])
    floats.append(own_floats)
    others.append(own_others)

  # The loss, and its gradients with respect to all that it reads.
  def leave(p: Tree, carry: Tree, floats: list[Tree]) -> Any:
    found = [merge(f, o) for f, o in zip(floats, others, strict=True)]
    rows = lambda s, j: found[s.first + j : s.first + s.repeats * len(s.layers) : len(s.layers)]
    stacked = lambda s, j: jax.tree.map(lambda *x: jnp.stack(x), *rows(s, j))
    collected = [(s, {f"layer_{j}": stacked(s, j) for j in range(len(s.layers))}) for s in decoder.stacks]
    given = {f.name: getattr(decoder, f.name) for f in dataclasses.fields(decoder)}
    precomputed = PrecomputedDecoder(**given, result=lambda p: decoder.leave(p, carry, collected, first, ctx))
    return step.total(step.objective.with_decoder(precomputed), merge(p, kept), batch, step.sizes(batch), None)

  of_loss = jax.jit(jax.value_and_grad(lambda p, carry, floats: leave(p, carry, floats)[0], argnums=(0, 1, 2)))
  loss, (d_outside, d_carry, d_floats) = of_loss(outside, carry, floats)

  # Backward pass, from the last layer to the first.
  norms: dict[int | None, float] = {}
  d_owns: list[Any] = [None] * len(places)
  for i, (s, j) in reversed([*enumerate(places)]):
    back = calls(s, j, decoder.layers[i])[1]
    found, d_carry, d_owns[i] = back(*layer(i), inputs.pop(), owns[i], (d_carry, d_floats[i]))
    norms[i] = norm_of(found)
  (d_entered,) = pullback((d_carry, None if per_layer is None else jnp.stack(d_owns)))
  norms[None] = norm_of(jax.jit(squares)(jax.tree.map(jnp.add, d_outside, d_entered)))
  return FirstGradient(float(loss), norms)


def squares(gradients: Tree) -> list[jax.Array]:
  """Sums the squares of each array over its last axis, in float32."""
  return [jnp.sum(jnp.square(g.astype(jnp.float32)), axis=-1) for g in jax.tree.leaves(gradients)]


def norm_of(sums: list[jax.Array]) -> float:
  """The norm of the arrays of ``squares``, in float64."""
  return float(np.sqrt(sum(np.asarray(x, np.float64).sum() for x in sums)))


def drawing(program: TrainProgram, seed: int) -> Draw:
  """Returns a function that draws the initial values of a part of the model. The bits are NumPy's, because those of JAX take 8
  times as long on a CPU."""
  decoder = program.objective.decoder
  outside = {name: p for name, p in decoder.params().items() if not name.startswith("stack_")}

  def draw(number: int | None) -> Tree:
    spec = outside if number is None else decoder.layers[number].params()
    generator = np.random.SFC64([seed, len(decoder.layers) if number is None else number])

    def leaf(p: param.Param) -> jax.Array:
      bits = generator.random_raw(-(-math.prod(p.shape) // 2)).view(np.uint32)[: math.prod(p.shape)]
      return jax.block_until_ready(initial(bits.reshape(p.shape), p.init, p.dtype))

    return jax.tree.map(leaf, spec)

  return draw


@functools.partial(jax.jit, static_argnums=(1, 2))
def initial(bits: jax.Array, init: param.Initializer, dtype: str) -> jax.Array:
  """Converts uint32 bits to initial values."""
  return init(bits).astype(dtype)


def main() -> None:
  """Prints the loss and the norms."""
  parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
  parser.add_argument("model")
  parser.add_argument("words", nargs="*", metavar="key=value")
  options = parser.parse_args()
  config = load_config(options.model, ["per_device_batch_size=1", *options.words]).config
  program = make_program(config)
  with tempfile.TemporaryDirectory() as folder:
    program, batch = first_batch(program, config.checkpoint, Path(folder))
  found = first_gradient(program, batch, drawing(program, config.training.seed))
  for number, norm in sorted(found.norms.items(), key=lambda item: -1 if item[0] is None else item[0]):
    print(f"{'embedding, final norm, head' if number is None else f'layer {number}'}: {norm:.4g}")
  print(f"loss {found.loss:.3f}, gradient norm {found.norm:.4g}")


if __name__ == "__main__":
  main()
