"""The estimate of the memory of caches, and its advice."""

from types import SimpleNamespace

import jax
import pytest

from maxtext_like.config.load import load_config
from maxtext_like.errors import DoesNotFitError
from maxtext_like.generation.memory import cache_bytes, require_room, work_bytes
from maxtext_like.models.build import build_decoder, precision_of
from maxtext_like.sharding import processes


def decoder():
  words = ["dtype=bfloat16", "num_decoder_layers=7", "sliding_window_size=100"]
  config = load_config("gemma3-4b", words).config
  return build_decoder(config.model, precision_of(config.precision), vision=config.vision)


def test_bytes_of_windows_and_complete_rows():
  # Six sliding layers and a global one; keys and values of 4 heads of 256 numbers of 2 bytes.
  entry = 2 * 4 * 256
  assert cache_bytes(decoder(), 8, 512) == 8 * entry * 2 * (6 * 100 + 512)
  assert cache_bytes(decoder(), 8, 512, int8=True) == 8 * (entry + 2 * 4 * 4) * (6 * 100 + 512)


def test_devices_share_rows_and_heads():
  model = decoder()
  axes = {"data": 1, "fsdp": 2, "expert": 1, "context": 1, "tensor": 2}
  mesh = jax.sharding.AbstractMesh(tuple(axes.values()), tuple(axes))
  assert cache_bytes(model, 8, 512, mesh=mesh) == cache_bytes(model, 8, 512) // 4
  assert cache_bytes(model, 1, 512, mesh=mesh) == cache_bytes(model, 1, 512) // 2, "one row cannot be divided"


def test_what_does_not_fit_names_what_does(monkeypatch):
  model, slots, longest = decoder(), 64, 4096

  def device(free: float) -> SimpleNamespace:
    return SimpleNamespace(memory_stats=lambda: {"bytes_limit": int(free) + 5, "bytes_in_use": 5})

  needed = 1.5 * cache_bytes(model, slots, longest) + work_bytes(model, slots, longest)
  limits = {"longest": longest, "grows": True, "int8": False}
  require_room(model, slots, **limits, device=device(needed))
  require_room(model, slots, **limits, device=None)
  with pytest.raises(
    DoesNotFitError, match=r"64 answers of up to 4,096 tokens.*\n.*slots=32 .*, or int8_cache=True .*max_tokens"
  ):
    require_room(model, slots, **limits, device=device(needed - 2))
  with pytest.raises(DoesNotFitError, match=r"fix: a smaller max_tokens$"):
    require_room(model, slots, **limits, device=device(1e6))
  # Another process of the run has less memory, or reports none.
  monkeypatch.setattr(processes, "everyone", lambda own, *_: [own, str(int(needed) - 2)])
  with pytest.raises(DoesNotFitError, match="slots=32"):
    require_room(model, slots, **limits, device=device(needed))
  monkeypatch.setattr(processes, "everyone", lambda own, *_: [own, ""])
  require_room(model, slots, **limits, device=device(1e6))
