"""Reference equations of layers in plain float64 numpy, without regard to speed. Tests compare layers with them."""

from typing import Any

import numpy as np


def tree64(tree) -> Any:
  """Convert a nested dict of arrays to float64 numpy."""
  return {k: tree64(v) for k, v in tree.items()} if isinstance(tree, dict) else np.asarray(tree, np.float64)


def rms(x, scale=1.0, epsilon=1e-6):
  return x / np.sqrt(np.mean(x**2, axis=-1, keepdims=True) + epsilon) * scale


def layer_norm(x, scale, bias, epsilon=1e-6):
  centered = x - x.mean(-1, keepdims=True)
  return centered / np.sqrt((centered**2).mean(-1, keepdims=True) + epsilon) * scale + bias


def sigmoid(x):
  return 1 / (1 + np.exp(-x))


def silu(x):
  return x * sigmoid(x)


def gelu(x):
  return 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))


def softmax(x, mask):
  """Return the softmax over the entries of the last axis that the mask includes, and zeros if it includes none."""
  out = np.zeros(np.broadcast_shapes(x.shape, mask.shape))
  x, mask = np.broadcast_to(x, out.shape), np.broadcast_to(mask, out.shape)
  for index in np.ndindex(out.shape[:-1]):
    seen = mask[index]
    if seen.any():
      e = np.exp(x[index][seen] - x[index][seen].max())
      out[index][seen] = e / e.sum()
  return out


def rope(x, positions, inv_freq, *, interleave=False, factor=1.0):
  """Rotate the pairs of the last axis of x [B, T, N, H]. The result is always in half-split order."""
  first, second = (x[..., 0::2], x[..., 1::2]) if interleave else np.split(x, 2, axis=-1)
  turned = (first + 1j * second) * factor * np.exp(1j * positions[..., None, None] * inv_freq)
  return np.concatenate([turned.real, turned.imag], -1)


def causal(positions_count, segments=None, window=None):
  """Return the causal mask, bool [B or 1, T, S]."""
  i, j = np.arange(positions_count)[:, None], np.arange(positions_count)[None]
  mask = (j <= i)[None]
  if window is not None:
    mask = mask & (j > i - window)[None]
  if segments is not None:
    mask = mask & (segments[:, :, None] == segments[:, None, :]) & (segments[:, None, :] > 0)
  return mask


def attention(q, k, v, mask, scale, soft_cap=None):
  """Return plain attention.

  Args:
    q: [B, T, N, H].
    k: [B, S, K, H].
    v: [B, S, K, V].
    mask: [B or 1, T, S].
    scale: factor of q.k.
    soft_cap: soft cap of scores; None without one.

  Returns:
    The output [B, T, N, V] and the probabilities [B, N, T, S].
  """
  cap = (lambda x: soft_cap * np.tanh(x / soft_cap)) if soft_cap else lambda x: x
  B, T, N, _ = q.shape
  out = np.zeros((B, T, N, v.shape[-1]))
  probs = np.zeros((B, N, T, k.shape[1]))
  mask = np.broadcast_to(mask, (B, *mask.shape[1:]))
  for b in range(B):
    for n in range(N):
      kv = n // (N // k.shape[2])
      probs[b, n] = softmax(cap(q[b, :, n] @ k[b, :, kv].T * scale), mask[b])
      out[b, :, n] = probs[b, n] @ v[b, :, kv]
  return out, probs
