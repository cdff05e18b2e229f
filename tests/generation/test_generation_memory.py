"""The estimate of the memory of caches, and its advice."""

import contextlib
import dataclasses
import math
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from maxtext_like.checkpoint.adapters.adapted_weights import with_base
from maxtext_like.config.load import load_config
from maxtext_like.errors import DoesNotFitError
from maxtext_like.generation import memory
from maxtext_like.generation.memory import (
  cache_bytes,
  require_room,
  require_room_for_weights,
  saved_bytes,
  weight_bytes,
  work_bytes,
)
from maxtext_like.generation.sampling import Sampling
from maxtext_like.generation.slots import Draft, empty_state
from maxtext_like.generation.speculative import decode
from maxtext_like.layers.param import abstract
from maxtext_like.models.build import build_decoder, precision_of
from maxtext_like.models.model import Model, make_model
from maxtext_like.sharding import processes

SHARDING = jax.sharding.SingleDeviceSharding(jax.devices("cpu")[0])


def decoder():
  words = ["dtype=bfloat16", "num_decoder_layers=7", "sliding_window_size=100"]
  config = load_config("gemma3-4b", words).config
  return build_decoder(config.model, precision_of(config.precision), vision=config.vision)


def device(free: float) -> Any:
  return SimpleNamespace(memory_stats=lambda: {"bytes_limit": int(free) + 5, "bytes_in_use": 5})


def stored(model: Model, form: Any) -> Model:
  return with_base(model, dataclasses.replace(model.config.adapter, base_weights=form))


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
  needed = 1.5 * cache_bytes(model, slots, longest) + work_bytes(model, slots, longest)
  limits = {"longest": longest, "grows": True, "int8": False}
  require_room(model, slots, **limits, device=device(needed))
  require_room(model, slots, **limits, device=None)
  # Penalties count tokens of each slot, in arrays of the size of the vocabulary.
  counts = 5 * slots * model.cfg.embedding.vocab_size
  require_room(model, slots, **limits, device=device(needed + counts), penalties=True)
  with pytest.raises(DoesNotFitError, match="slots=32"):
    require_room(model, slots, **limits, device=device(needed + counts - 2), penalties=True)
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


def test_a_draft_model_needs_memory_for_its_caches_and_for_a_pass():
  """The temporary arrays of a pass are those of the compiled program, up to a third."""
  slots, capacity = 16, 1024
  config = load_config("qwen3-tiny", ["dtype=float32", "num_decoder_layers=2", "vocab_size=4096"]).config
  model = build_decoder(config.model, precision_of(config.precision), vision=config.vision)
  draft, sampling = Draft(model, 4), Sampling(temperature=0.0)
  params = jax.eval_shape(model.apart, abstract(model.params()))
  state = jax.eval_shape(lambda: empty_state(model, slots, capacity, apart=True, penalties=False, draft=draft))
  values, one = jax.tree.map(jnp.asarray, sampling.values(4096)), jnp.int32(1)
  lowered = decode.lower(model, draft, sampling.rule(), params, params, state, values, jnp.zeros(1, jnp.int32), one, one)
  analysis = lowered.compile().memory_analysis()
  assert analysis is not None
  check = lambda free: require_room(model, slots, capacity, grows=False, int8=False, device=device(free), draft=draft)
  caches, enough = cache_bytes(model, slots, capacity), 0
  for enough in range(2 * caches, 20 * caches, caches // 16):
    with contextlib.suppress(DoesNotFitError):
      check(enough)
      break
  # The estimate contains the scores of a prefill call, which are more than those of a pass.
  scores = 2 * 4 * slots * 5 * model.layers[0].mixer.case(16, images=False).query_heads * capacity
  estimated = enough - 2 * caches - work_bytes(model, slots, capacity) + scores
  assert 0.75 < estimated / analysis.temp_size_in_bytes < 1.33
  with pytest.raises(DoesNotFitError, match=r"fix: slots=8 .*, or no draft model, or "):
    check(enough - caches // 8)


def test_it_advises_quantized_weights_if_they_make_room():
  model = decoder()
  declared = model.params()
  params = jax.tree.map(lambda p: jax.ShapeDtypeStruct(p.shape, jnp.bfloat16, sharding=SHARDING), declared)
  stacks = {s.name: declared[s.name] for s in model.stacks}
  maps = 2 * sum(math.prod(p.shape) for p in jax.tree.leaves(stacks) if p.contracts)  # bytes in bfloat16
  assert maps > 1e9
  needed = 1.5 * cache_bytes(model, 64, 4096) + work_bytes(model, 64, 4096)
  check = lambda free, params: require_room(model, 64, 4096, grows=True, int8=False, device=device(free), params=params)
  with pytest.raises(DoesNotFitError, match=r"or base_weights=int8 \(weights in fewer bits\), or a smaller"):
    check(needed - 0.49 * maps, params)
  with pytest.raises(DoesNotFitError, match=r"or base_weights=nf4 \(weights in fewer bits\), or a smaller"):
    check(needed - 0.51 * maps, params)
  # Parameters for decoding have separate arrays for each row. Quantized weights save nothing.
  apart = params | {name: tuple(jax.tree.map(lambda x: x, params[name]) for _ in range(1)) for name in stacks}
  assert saved_bytes(model, apart, "int8") == saved_bytes(model, params, "int8") == maps / 2
  quantized = dict.fromkeys(stacks)
  with pytest.raises(DoesNotFitError) as refused:
    check(needed - 2, params | quantized)
  assert "base_weights" not in str(refused.value)


def test_weights_that_do_not_fit_name_smaller_formats(monkeypatch):
  words = ["dtype=bfloat16", "num_decoder_layers=7"]
  model = make_model(load_config("gemma3-4b", words).config, runs_attention=False)
  need = {
    "": weight_bytes(model),
    "weight_dtype=bfloat16": weight_bytes(model, narrow=True),
    **{form: weight_bytes(stored(model, form), narrow=True) for form in ("int8", "nf4")},
  }
  assert need["weight_dtype=bfloat16"] == need[""] / 2
  assert 0.2 * need[""] < need["nf4"] < need["int8"] < need["weight_dtype=bfloat16"]

  def refused(free: float, model: Model) -> str:
    monkeypatch.setattr(memory, "_free", lambda device: int(free))
    with pytest.raises(DoesNotFitError) as found:
      require_room_for_weights(model)
    return str(found.value).replace("4 weight_dtype=bfloat16", "4").replace("8 weight_dtype=bfloat16", "8")

  text = refused(need[""] - 1, model)
  assert text.startswith(f"the weights do not fit: they need {need[''] / 2**30:.1f} GiB on each device, and ")
  sizes = [f"{need[name] / 2**30:.1f} GiB" for name in ("weight_dtype=bfloat16", "int8", "nf4")]
  assert (
    f"fix: weight_dtype=bfloat16 ({sizes[0]}), or base_weights=int8 ({sizes[1]}), or base_weights=nf4 ({sizes[2]}), or" in text
  )
  assert "fix: base_weights=nf4 (" in refused(need["int8"] - 1, model)
  assert "fix: more devices" in refused(need["nf4"] - 1, model)
  eight = stored(model, "int8")
  assert "base_weights=int8" not in (text := refused(need["int8"] - 1, eight))
  assert "base_weights=nf4" in text
  monkeypatch.setattr(memory, "_free", lambda device: None)
  require_room_for_weights(model)
