"""Arrays in host memory between the forward and the backward pass (``remat_offload``): in programs of libtpu, in ``plan`` and
in the memory estimate."""

import functools

import pytest

from maxtext_like.capacity import memory, memory_limits
from maxtext_like.capacity.compiled_program import HOST_COPIES
from maxtext_like.capacity.plan import Plan, plan
from maxtext_like.capacity.topologies import TOPOLOGIES, find_gpus
from maxtext_like.config.load import load_config
from maxtext_like.errors import DoesNotFitError, UserError
from maxtext_like.sharding.mesh import abstract_mesh
from maxtext_like.training.step.program import make_program

ROWS, LENGTH, D, LAYERS = 3, 256, 128, 5
WORDS = (
  f"num_decoder_layers={LAYERS}", f"emb_dim={D}", f"max_target_length={LENGTH}", f"per_device_batch_size={ROWS}",
  "dtype=bfloat16", "remat_policy=full",
)  # fmt: skip
OFFLOAD = "remat_offload=layer_inputs"
STREAM = LAYERS * ROWS * LENGTH * D * 2  # bytes per device


@functools.cache
def planned(topology: str, *words: str) -> Plan:
  target = TOPOLOGIES.get(topology) or find_gpus(topology)
  assert target is not None
  return plan(load_config("qwen3-tiny", [*WORDS, *words]).config, target)


@pytest.mark.parametrize("topology", ["v6e-8", "h200-8"])
def test_layers_inputs_leave_the_device_and_travel_twice(topology):
  here, there = planned(topology), planned(topology, OFFLOAD)
  assert (here.host, there.host) == (0, STREAM)
  assert here.classes["activations"] - there.classes["activations"] == STREAM
  copies = [t for t in there.transfers if t.kind in HOST_COPIES]
  assert [(t.kind, t.bytes, t.times) for t in copies] == [(kind, STREAM, LAYERS) for kind in HOST_COPIES]
  assert there.memory_bytes == here.memory_bytes
  assert there.flops == here.flops
  assert not [t for t in here.transfers if t.kind in HOST_COPIES]


def test_parts_of_a_batch_follow_one_another():
  twice = planned("v6e-8", OFFLOAD, "gradient_accumulation_steps=2")
  assert twice.host == STREAM
  assert sum(t.bytes for t in twice.transfers if t.kind in HOST_COPIES) == 2 * 2 * STREAM


def test_what_a_policy_keeps_can_lie_there_too():
  words = ("remat_policy=save_outputs",)
  here, kept, both = (planned("v6e-8", *words, *more) for more in ((), ("remat_offload=kept",), ("remat_offload=all",)))
  assert (kept.host, both.host) == (STREAM, 2 * STREAM)  # the output of o; that of down is only added, so it is not kept
  assert here.classes["activations"] - both.classes["activations"] == 2 * STREAM


def test_a_cpu_has_one_memory():
  """On a CPU, device and host memory are the same, so offloading does not change the estimate."""
  need = lambda *words: memory.estimate(make_program(load_config("qwen3-tiny", [*WORDS, *words]).config))
  assert need(OFFLOAD) == need()


def for_gpus(config):
  host = find_gpus("h200")
  assert host is not None
  return memory.for_gpus(config, host)[1]


@pytest.mark.slow
def test_layers_in_no_loop_keep_theirs_and_a_model_of_such_alone_is_refused():
  """Only layers in a loop are offloaded. The 13 layers are two rows of six layers in a loop, and one layer outside of it. A
  model without a loop is refused."""
  words = ["num_decoder_layers=13", "remat_policy=full", OFFLOAD, "inhomogeneous_layer_cycle_interval=6"]
  target = TOPOLOGIES["v6e-1"]
  found = plan(load_config("gemma3-tiny", words).config, target)
  assert [t.times for t in found.transfers] == [12, 12]
  with pytest.raises(UserError, match="no layer or group of layers is repeated"):
    plan(load_config("gemma3-tiny", ["num_decoder_layers=1", *words[1:]]).config, target)
  with pytest.raises(UserError, match=r"remat_offload[^\n]*scan_layers is false[^\n]*\n  fix: remat_offload=none"):
    plan(load_config("gemma3-tiny", [*words, "scan_layers=false"]).config, target)


def test_a_host_without_the_room_is_refused(monkeypatch):
  """The run is refused before it starts. It would otherwise run out of host memory in its first step."""
  config = load_config("qwen3-tiny", [*WORDS, OFFLOAD]).config
  program = make_program(config, mesh=abstract_mesh(config.mesh, 1), platform="gpu")
  monkeypatch.setattr(memory_limits, "device_limit", lambda *_: None)
  monkeypatch.setattr(type(program.model), "devices", [type("Device", (), {"process_index": 0})] * 2)
  monkeypatch.setattr(memory_limits, "host_limit", lambda: memory_limits.Limit(2 * STREAM, "a test"))
  monkeypatch.delenv(memory_limits.PINNED, raising=False)
  need = for_gpus(config)
  monkeypatch.setattr(memory, "estimate", lambda _, **how: need)
  assert memory.require_fit(program)[0].host == STREAM
  monkeypatch.setattr(memory_limits, "host_limit", lambda: memory_limits.Limit(2 * STREAM - 1, "a test"))
  with pytest.raises(DoesNotFitError, match=r"remat_offload = layer_inputs: .* the 2 device\(s\) of this process"):
    memory.require_fit(program)
  monkeypatch.setattr(memory_limits, "host_limit", lambda: None)
  monkeypatch.setenv(memory_limits.PINNED, "0")
  with pytest.raises(DoesNotFitError, match=memory_limits.PINNED):
    memory.require_fit(program)


@pytest.mark.tpu
@pytest.mark.parametrize(
  "words",
  [(), ("optimizer_in_backward=true", "clip=layer"), ("ici_fsdp_parallelism=4", "ici_tensor_parallelism=2")],
)
@pytest.mark.slow
def test_libtpu_moves_them_beside_computation(words):
  """Each chip copies the layer inputs of its rows to the host once and back once. At most one layer's inputs are copied
  synchronously."""
  from maxtext_like.capacity.aot_tpu import compile_step, xla_flags

  def compiled(*more):
    config = load_config("qwen3-tiny", [*WORDS, *words, *more]).config
    return compile_step(config, TOPOLOGIES["v6e-8"], xla_flags(), machine_code=False)

  there = compiled(OFFLOAD)
  rows = 2 * STREAM if "ici_tensor_parallelism=2" in words else STREAM  # two chips process the rows of both
  assert there.layout is not None
  assert there.layout.host == rows
  assert there.work is not None
  moved = {(t.kind, t.asynchronous): t.bytes for t in there.work.transfers if t.kind in HOST_COPIES}
  for kind in HOST_COPIES:
    assert sum(size for (other, _), size in moved.items() if other == kind) == rows
    assert moved[kind, True] >= rows * (LAYERS - 1) / LAYERS
