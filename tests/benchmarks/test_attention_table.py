"""benchmarks/attention.py: its float64 reference is correct, and it prints its table on this machine."""

import importlib.util
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from maxtext_like.layers.attention.masks import Tokens, attention_mask
from maxtext_like.layers.kernels.attention.registry import attend
from maxtext_like.layers.precision import Precision


@pytest.fixture(scope="module")
def attention():
  spec = importlib.util.spec_from_file_location("attention_table", Path(__file__).parents[2] / "benchmarks" / "attention.py")
  assert spec is not None
  assert spec.loader is not None
  module = importlib.util.module_from_spec(spec)
  spec.loader.exec_module(module)
  return module


@pytest.mark.parametrize(("window", "cap"), [(None, None), (9, None), (9, 0.7)])
@pytest.mark.slow
def test_written_out_is_the_reference_and_its_gradients(attention, window, cap):
  q, k, v, g = (
    jax.random.normal(key, (1, 24, *of))
    for key, of in zip(jax.random.split(jax.random.key(1), 4), ((3, 8), (1, 8), (1, 6), (3, 6)), strict=True)
  )
  tokens, precision = Tokens(attention.packed(1, 24)), Precision(dtype="float32")
  call = lambda q, k, v: attend(
    "dot_product", q, k, v, tokens, window=window, bidirectional_images=False, scale=0.3, precision=precision, soft_cap=cap
  )
  out, backward = jax.vjp(call, q, k, v)
  seen = np.asarray(attention_mask(tokens, 1, 24, window=window, bidirectional_images=False))[0]
  exact = attention.written_out(q[0], k[0, :, 0], v[0, :, 0], g[0], seen, 0.3, cap)
  assert not exact[0][19:].any()  # padding
  for x, e in zip((out, *backward(g)), exact, strict=True):
    assert attention.relative(jnp.reshape(x, e.shape), e) < 1e-6


@pytest.mark.parametrize("cap", [None, 1.5])
@pytest.mark.slow
def test_its_rows(attention, cap, monkeypatch, capsys):
  monkeypatch.setattr(attention, "seconds", lambda function, *args: 0.5)
  attention.table("tiny", attention.Shape(2, 4, 2, 16, 8, None), "bfloat16", 40, cap)
  full, pack = (line.split() for line in capsys.readouterr().out.splitlines())
  assert (full[:4], pack[:4]) == (["tiny", "bfloat16", "full", "dot_product"], ["tiny", "bfloat16", "packed", "dot_product"])
  for row in (full, pack):
    assert row[4:6] == ["500.00", "500.00"]
    assert float(row[7]) == 1
    assert all(1e-4 < float(error) < 1e-2 for error in row[9:])
