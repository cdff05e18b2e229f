"""Compares two losses in chunks: ours differentiates each chunk as soon as it is computed; remat computes its logits twice.

python benchmarks/loss_chunks.py gemma4-31b num_decoder_layers=6 max_target_length=4096
python benchmarks/loss_chunks.py gemma3-tiny vocab_size=16384 max_target_length=256 num_vocab_tiling=4 --cpu-time

Computes only the loss and the gradients of the head and of the hidden states. The programs take turns. The table has the median
seconds of each, its ratio to the first, and the temporary memory that XLA plans for it.
"""

import argparse
import statistics
import time
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from maxtext_like.config.load import load_config
from maxtext_like.layers.param import init
from maxtext_like.training.objectives import language_modeling
from maxtext_like.training.objectives.language_modeling import LanguageModeling, head_of, token_losses
from maxtext_like.training.step.program import make_program


@dataclass(frozen=True)
class Head:
  """The head of a decoder. Its hidden states are an input."""

  decoder: Any

  @property
  def cfg(self):
    return self.decoder.cfg

  def hidden(self, p, batch, probes=None):
    return p["x"], {}

  def head(self, p, x):
    return self.decoder.head(p, x)


def rematerialized(decoder: Any, chunks: int):
  """Returns the loss with remat, which computes the logits of a chunk again for its gradient."""

  def loss(p, batch):
    def chunk(total, xs):
      x, targets = xs
      return total + jnp.sum(token_losses(decoder.head(p, x), targets, 0.0)[0]), None

    cut = lambda x: jnp.moveaxis(x.reshape(x.shape[0], chunks, -1, *x.shape[2:]), 1, 0)
    chunks_of = (cut(p["x"]), cut(batch["targets"]))
    return jax.lax.scan(jax.checkpoint(chunk, prevent_cse=False), jnp.zeros(()), chunks_of)[0]

  return loss


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
  parser.add_argument("model")
  parser.add_argument("words", nargs="*", metavar="key=value")
  parser.add_argument("--steps", type=int, default=10)
  parser.add_argument("--cpu-time", action="store_true")
  args = parser.parse_args()
  program = make_program(load_config(args.model, args.words).config)
  decoder, chunks, t = program.model.decoder, language_modeling.build(program.model).chunks, program.config.training
  rows, length = int(t.per_device_batch_size), t.max_target_length
  if length % chunks:
    parser.error(f"max_target_length={length} is not divided by {chunks} chunks; choose num_vocab_tiling")
  head = init(head_of(decoder.params()), jax.random.key(0))
  dtype = program.config.precision.dtype
  x = jax.random.normal(jax.random.key(1), (rows, length, program.config.model.emb_dim), dtype)
  targets = np.random.default_rng(0).integers(0, program.config.model.vocab_size, (rows, length)).astype(np.int32)
  p, batch = {**head, "x": x}, {"targets": targets}

  head_only: Any = Head(decoder)
  forms = {
    f"{chunks} chunks, logits twice (remat)": rematerialized(decoder, chunks),
    f"{chunks} chunks, logits once (ours)": lambda p, batch: LanguageModeling(head_only, 0.0, chunks)(p, batch)[0],
    "whole": lambda p, batch: LanguageModeling(head_only, 0.0, 1)(p, batch)[0],
  }
  compiled = {name: jax.jit(jax.value_and_grad(f)).lower(p, batch).compile() for name, f in forms.items()}
  clock = time.process_time if args.cpu_time else time.perf_counter
  seconds: dict[str, list[float]] = {name: [] for name in forms}
  for i in range(args.steps + 2):
    for name in list(forms)[:: 1 if i % 2 else -1]:
      start = clock()
      jax.block_until_ready(compiled[name](p, batch))
      if i >= 2:
        seconds[name].append(clock() - start)

  shape = f"{rows} x {length} tokens, width {x.shape[-1]}, vocabulary {program.config.model.vocab_size}, {dtype}"
  print(f"jax {jax.__version__}, {jax.devices()[0].device_kind}, {shape}\n")
  print("| loss | step | ratio | temporary memory |\n|---|---|---|---|")
  first = seconds[next(iter(forms))]
  for name, found in seconds.items():
    ratio = statistics.median(a / b for a, b in zip(found, first, strict=True))
    analysis = compiled[name].memory_analysis()
    gib = analysis.temp_size_in_bytes / 2**30 if analysis else float("nan")
    print(f"| {name} | {statistics.median(found) * 1e3:.1f} ms | {ratio:.3f} | {gib:.2f} GiB |")


if __name__ == "__main__":
  main()
