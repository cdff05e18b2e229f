"""Measures the effect of each precision key: the error against float64 with the key on and off, in bfloat16 and float16.

python benchmarks/precision_flags.py [--length 512]

float64 computes from the same rounded operands, so an error is what the operation itself adds. Each row runs the layer's
own code. Works on any device; a GPU or TPU rounds sums in another order than a CPU.
"""

import argparse
import dataclasses
from collections.abc import Callable, Iterator

import jax
import jax.numpy as jnp
import numpy as np

from maxtext_like.layers.attention.indexer import Indexer, IndexerConfig
from maxtext_like.layers.attention.masks import Tokens, attention_mask, soft_cap
from maxtext_like.layers.attention.rope import RopeConfig
from maxtext_like.layers.embedding import Embedding, EmbeddingConfig
from maxtext_like.layers.kernels.attention.dot_product import dot_product_attention
from maxtext_like.layers.mlp import MLP, MLPConfig
from maxtext_like.layers.moe.moe import Experts, MoEConfig, Router
from maxtext_like.layers.precision import Precision
from maxtext_like.layers.vision.gemma4 import Gemma4Vision, Gemma4VisionConfig

LOW = ("bfloat16", "float16")
Row = tuple[str, str, str, float, float]  # place, dtype, key, on, off


def f64(x) -> np.ndarray:
  return np.asarray(x, np.float64)


def relative(got, exact: np.ndarray) -> float:
  """Returns the norm of the error divided by the norm of ``exact``, or infinity if a number is not finite."""
  got = f64(got)
  return float(np.linalg.norm(got - exact) / np.linalg.norm(exact)) if np.isfinite(got).all() else float("inf")


def missed(picked, exact: np.ndarray) -> float:
  """Returns 1 - recall: the share of the exact choices [..., k] that are not among the picked ones."""
  picked = np.asarray(picked).reshape(-1, exact.shape[-1])
  hits = [len(set(a) & set(b)) for a, b in zip(picked.tolist(), exact.reshape(picked.shape).tolist(), strict=True)]
  return 1 - sum(hits) / exact.size


def normal(seed: int, *shape: int, dtype: str, scale: float = 1.0) -> jax.Array:
  """Returns normal numbers, rounded to ``dtype``."""
  return (scale * jax.random.normal(jax.random.key(seed), shape)).astype(dtype)


def switched(dtype: str, key: str, on, off, error: Callable[[Precision], float], *others: str) -> tuple[float, float]:
  """Returns the error with the key on and off. ``others`` are switched with it."""
  base = Precision(dtype=dtype)  # type: ignore[arg-type]
  return tuple(error(dataclasses.replace(base, **dict.fromkeys((key, *others), value))) for value in (on, off))  # type: ignore


def attention(length: int) -> Iterator[Row]:
  """Causal attention with scale 1 and normed queries and keys, as in Gemma 4."""
  B, K, G = 1, 2, 2
  mask = attention_mask(Tokens(), B, length, window=None, bidirectional_images=False)
  for H in (256, 512):
    for dtype in LOW:
      unit = lambda x: x / jnp.sqrt(jnp.mean(jnp.square(x), -1, keepdims=True))
      q, k = (unit(jax.random.normal(jax.random.key(i), (B, length, n, H))).astype(dtype) for i, n in ((0, K * G), (1, K)))
      v = normal(2, B, length, K, H, dtype=dtype)
      scores = np.einsum("BTKGH,BSKH->BKGTS", f64(q).reshape(B, length, K, G, H), f64(k))
      scores = np.where(np.asarray(mask)[:, None, None], scores, -np.inf)
      probs = np.exp(scores - scores.max(-1, keepdims=True))
      probs /= probs.sum(-1, keepdims=True)
      exact = np.einsum("BKGTS,BSKH->BTKGH", probs, f64(v)).reshape(B, length, K * G, H)

      def error(precision, q=q, k=k, v=v, exact=exact):
        return relative(dot_product_attention(q, k, v, mask, scale=1.0, precision=precision)[0], exact)

      for keys in (("float32_qk_product", "float32_logits"), ("float32_qk_product",), ("float32_logits",)):
        yield f"attention, heads of {H}", dtype, " and ".join(keys), *switched(dtype, keys[0], True, False, error, *keys[1:])


def indexer(length: int) -> Iterator[Row]:
  """An indexer with 64 heads of 128, as in DeepSeek V3.2: the share of the best eighth of the keys that it misses."""
  X, H, D, topk = 64, 128, 96, length // 8
  cfg = IndexerConfig(emb_dim=D, q_lora_rank=8, num_heads=X, head_dim=H, topk=topk, rope=RopeConfig(dim=64, theta=1e4))
  for dtype in LOW:
    q, k = normal(0, 1, length, X, H, dtype=dtype), normal(1, 1, length, H, dtype=dtype)
    x, w = normal(2, 1, length, D, dtype=dtype), normal(3, D, X, dtype=dtype, scale=D**-0.5)
    products = np.maximum(np.einsum("BTXH,BSH->BXTS", f64(q), f64(k)) * H**-0.5, 0)
    exact = np.einsum("BXTS,BTX->BTS", products, f64(x) @ f64(w) * X**-0.5)
    best = np.argsort(-exact, axis=-1, kind="stable")[..., :topk]

    def error(precision, q=q, k=k, x=x, w=w, best=best):
      layer = Indexer(cfg, precision)
      everything = jnp.ones((1, length, length), bool)
      scores = layer.score(q, layer.head_weights({"weights": w}, x), k)
      return missed(layer.best(scores, everything), best)

    yield (
      f"indexer, {topk} of {length}: missed",
      dtype,
      "indexer_float32_logits",
      *switched(dtype, "indexer_float32_logits", True, False, error),
    )


def mlp() -> Iterator[Row]:
  """One MLP. In float16 it is also measured with a product of 1e6, which only float32 can represent."""
  D, F = 128, 512
  for dtype, scale in (("bfloat16", 1.0), ("float16", 1.0), ("float16", 300.0)):
    cfg = MLPConfig(emb_dim=D, mlp_dim=F, activation="silu")
    x = normal(0, 2, 32, D, dtype=dtype)
    p = {
      n: normal(i, *s, dtype=dtype, scale=s[0] ** -0.5) for i, (n, s) in enumerate({"gate": (D, F), "up": (D, F)}.items(), 1)
    }
    p = {n: w * jnp.asarray(scale, w.dtype) for n, w in p.items()} | {
      "down": normal(3, F, D, dtype=dtype, scale=F**-0.5 / scale)
    }
    gate, up = f64(x) @ f64(p["gate"]), f64(x) @ f64(p["up"])
    exact = (gate / (1 + np.exp(-np.clip(gate, -700, 700))) * up) @ f64(p["down"])
    run = lambda precision, cfg=cfg, p=p, x=x, exact=exact: relative(MLP(cfg, precision).standalone(p, x), exact)
    what = f"MLP, largest product {np.abs(gate * up).max():.0e}"
    yield what, dtype, "float32_gate_product", *switched(dtype, "float32_gate_product", True, False, run)
    if scale > 1:
      clipped = lambda precision, run=run: run(dataclasses.replace(precision, float32_gate_product=False))
      yield f"{what}, 16-bit product", dtype, "float16_clamp", *switched(dtype, "float16_clamp", True, False, clipped)


def experts() -> Iterator[Row]:
  """256 experts, 8 for each token, as in DeepSeek V3: wrong choices of the router, and the weighted sum of the experts."""
  D, E, k = 256, 256, 8
  cfg = MoEConfig(
    emb_dim=D, mlp_dim=8, num_experts=E, num_experts_per_tok=k, router="sigmoid", selection_bias=False, activation="silu"
  )
  for dtype in LOW:
    x, w = normal(0, 1, 256, D, dtype=dtype), normal(1, D, E, dtype=dtype, scale=D**-0.5)
    best = np.argsort(-(f64(x) @ f64(w)), axis=-1, kind="stable")[..., :k]
    choose = lambda precision, x=x, w=w, best=best: missed(Router(cfg, precision)({"kernel": w}, x)[1], best)
    yield "router, 8 of 256: missed", dtype, "float32_gate_logits", *switched(dtype, "float32_gate_logits", True, False, choose)
    if dtype == "bfloat16":  # float16 operands are always summed in float32
      out, weights = normal(2, 1, 64, k, D, dtype=dtype), jax.nn.softmax(jax.random.normal(jax.random.key(3), (1, 64, k)))
      exact = np.einsum("BTkD,BTk->BTD", f64(out), f64(weights))
      total = lambda precision, o=out, w=weights, e=exact: relative(Experts(cfg, precision)._combine(o, w), e)
      yield "sum over experts", dtype, "float32_weight_sum", *switched(dtype, "float32_weight_sum", True, False, total)


def vision() -> Iterator[Row]:
  """Gemma 4's pooler at released sizes: pooled features of 1.6e3, shifted by 5e4, with a spread of 50."""
  D = 1152
  cfg = Gemma4VisionConfig(
    emb_dim=D,
    mlp_dim=16,
    num_layers=1,
    num_heads=16,
    head_dim=72,
    patch_size=16,
    position_table_size=8,
    output_dim=8,
    standardize=True,
  )
  rng = np.random.default_rng(0)
  bias, spread = rng.uniform(-5e4, 5e4, D), 50.0
  for dtype in LOW:
    pooled = jnp.asarray((bias + spread * rng.standard_normal((1, 9, D))) / D**0.5, jnp.float32)
    p = {"std_bias": jnp.asarray(bias, jnp.float32), "std_scale": jnp.full(D, 1 / spread, jnp.float32)}
    exact = (f64(pooled) * D**0.5 - f64(p["std_bias"])) * f64(p["std_scale"])
    pool = lambda precision, pooled=pooled, p=p, e=exact: relative(Gemma4Vision(cfg, precision)._standardize(p, pooled)[0], e)
    yield "vision pooler", dtype, "float32_vision_pool", *switched(dtype, "float32_vision_pool", True, False, pool)


def logits() -> Iterator[Row]:
  """The head with a soft cap of 30 and logits that reach it."""
  V, D = 512, 256
  x, table = normal(0, 1, 64, D, dtype="float32", scale=1.5), normal(1, V, D, dtype="float32", scale=D**-0.5 * 10)
  layer = EmbeddingConfig(vocab_size=V, emb_dim=D)
  for dtype in LOW:
    low_x, low_table = f64(x.astype(dtype)), f64(table.astype(dtype))
    for key, on, (a, b) in (
      ("cast_logits_to_fp32", True, (low_x, low_table)),
      ("logits_dot_in_fp32", True, (f64(x), f64(table))),
    ):
      exact = 30 * np.tanh(a @ b.T / 30)
      head = lambda precision, e=exact: relative(soft_cap(Embedding(layer, precision).attend({"table": table}, x), 30.0), e)
      yield "logits with a soft cap", dtype, key, *switched(dtype, key, on, False, head)


def residual() -> Iterator[Row]:
  """60 branches of size 1 added to a stream of size 30."""
  for dtype in LOW:
    start, branches = normal(0, 4, 256, dtype=dtype, scale=30.0), normal(1, 60, 4, 256, dtype=dtype)
    exact = f64(start) + f64(branches).sum(0)

    def error(precision, start=start, branches=branches, exact=exact):
      x = start.astype(precision.residual)
      for branch in branches:
        x = x + branch.astype(precision.residual)
      return relative(x, exact)

    yield (
      "residual stream, 60 layers",
      dtype,
      "residual_dtype=float32",
      *switched(dtype, "residual_dtype", "float32", dtype, error),
    )


def product() -> Iterator[Row]:
  """A float32 matrix product of 1024 terms."""
  x, y = normal(0, 256, 1024, dtype="float32"), normal(1, 1024, 256, dtype="float32")
  exact = f64(x) @ f64(y)
  error = lambda precision: relative(precision.einsum("TD,DF->TF", x, y), exact)
  yield (
    "matrix product",
    "float32",
    "matmul_precision=highest",
    *switched("float32", "matmul_precision", "highest", "default", error),
  )


def rows(length: int) -> Iterator[Row]:
  """Yields every row of the table."""
  yield from attention(length)
  yield from indexer(length)
  for part in (mlp, experts, vision, logits, residual, product):
    yield from part()


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
  parser.add_argument("--length", type=int, default=512, help="tokens of a row, for attention and indexer")
  args = parser.parse_args()
  device = jax.devices()[0]
  print(f"jax {jax.__version__}, {device.device_kind}; relative errors, or shares of wrong picks, against float64\n")
  print("| place | dtype | key | on | off |\n|---|---|---|---|---|")
  for place, dtype, key, on, off in rows(args.length):
    print(f"| {place} | {dtype} | {key} | {on:.2%} | {off:.2%} |", flush=True)


if __name__ == "__main__":
  main()
