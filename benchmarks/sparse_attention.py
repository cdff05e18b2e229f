"""Times sparse attention of DeepSeek V3.2 on this machine: of all pairs at once, in tiles of queries, and with gathered keys.

python benchmarks/sparse_attention.py [--model deepseek3.2-671b] [--length 4096 ...] [--forms whole masked gathered]
  [--seconds 2] [dtype=...]

It runs the attention of one layer with its indexer and the indexer's loss, on one row, forward and backward, with all
gradients. GiB are XLA's temporaries. "whole" has the scores of all heads in memory at once. "masked" processes tiles of queries
with all keys that they may see, as on TPUs. "gathered" uses only the chosen keys, where that is less work
(``MLAConfig.gathers``). Ratios compare times with the first form of a length.
"""

import argparse
import dataclasses
import math

import jax
import jax.numpy as jnp
from grouped import seconds

from maxtext_like.config.load import load_config
from maxtext_like.layers.attention import sparse_attention_tiles
from maxtext_like.layers.attention.masks import Tokens
from maxtext_like.layers.attention.mla import MLA, MLAConfig
from maxtext_like.layers.param import init
from maxtext_like.models.build import build_decoder, precision_of

FORMS = {
  "whole": (math.inf, "tpu"),
  "masked": (sparse_attention_tiles.TILE, "tpu"),
  "gathered": (sparse_attention_tiles.TILE, None),
}
"""Queries in a tile, and the platform that the layer is configured for; None for the real one."""


def measured(layer: MLA, length: int, form: str, budget: float) -> tuple[float, float]:
  """Returns (seconds, GiB of temporaries) of forward and backward, after calls for about ``budget`` seconds."""
  tile, platform = FORMS[form]
  sparse_attention_tiles.TILE = tile
  layer = dataclasses.replace(layer, cfg=dataclasses.replace(layer.cfg, platform=platform or jax.local_devices()[0].platform))
  p = init(layer.params(), jax.random.key(0))
  x = jax.random.normal(jax.random.key(1), (1, length, layer.cfg.emb_dim), layer.precision.dtype)

  def loss(p, x):
    out, aux = layer.standalone(p, x, jnp.arange(length)[None], Tokens())
    return jnp.sum(out.astype(jnp.float32) ** 2) + aux.get("indexer_loss", 0.0)

  step = jax.jit(jax.grad(loss, (0, 1))).lower(p, x).compile()
  memory = step.memory_analysis()
  assert memory is not None, "XLA says what it allocates on every platform here"
  return seconds(step, p, x, budget=budget), memory.temp_size_in_bytes / 2**30


def main() -> None:
  """Prints the table."""
  parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
  parser.add_argument("--model", default="deepseek3.2-671b")
  parser.add_argument("--length", nargs="+", type=int, default=[4096, 16384])
  parser.add_argument("--forms", nargs="+", choices=FORMS, default=list(FORMS))
  parser.add_argument("--seconds", type=float, default=2.0, help="of calls of each form")
  parser.add_argument("values", nargs="*", metavar="key=value")
  options = parser.parse_args()
  config = load_config(options.model, options.values).config
  layer = build_decoder(config.model, precision_of(config.precision)).layers[0]
  mixer = layer.cfg.mixer
  assert isinstance(mixer, MLAConfig), f"{options.model} has no indexer"
  assert mixer.indexer is not None, f"{options.model} has no indexer"
  print(
    f"{jax.local_devices()[0].device_kind}, jax {jax.__version__}, {layer.precision.dtype}; one row, forward and backward\n"
  )
  print("| positions | chosen keys | form | ms | ratio | GiB |\n|---|---|---|---|---|---|", flush=True)
  for length in options.length:
    first = None
    for form in options.forms:
      taken, gib = measured(MLA(mixer, layer.precision), length, form, options.seconds)
      first = first or taken
      cells = (length, mixer.indexer.topk, form, f"{1e3 * taken:.1f}", f"{taken / first:.2f}", f"{gib:.2f}")
      print(f"| {' | '.join(map(str, cells))} |", flush=True)


if __name__ == "__main__":
  main()
