"""Moments in host memory: training gives the same numbers, and the estimates count them on the host. On a CPU, device and host
memory are the same."""

import json

import jax
import numpy as np
import pytest

from maxtext_like.analysis.step_xray import step_xray
from maxtext_like.capacity import aot_gpu, memory, memory_limits
from maxtext_like.capacity.array_bytes import by_place, bytes_of
from maxtext_like.capacity.compiled_program import HOST_COPIES
from maxtext_like.capacity.plan import plan
from maxtext_like.capacity.topologies import TOPOLOGIES, find_gpus
from maxtext_like.cli.main import main
from maxtext_like.config.load import load_config
from maxtext_like.errors import DoesNotFitError, UserError
from maxtext_like.sharding.host_memory import KIND
from maxtext_like.sharding.mesh import abstract_mesh, use_mesh
from maxtext_like.training.step.program import TrainProgram, make_program
from tests.tiers import tiers
from tests.training.step.in_backward.test_step import EIGHT_BITS, LAYERED, THREE, assert_bits, begun, compiled, descend
from tests.training.test_parallelism import MODELS

AWAY = "optimizer_memory_host_offload=true"
WORDS = ("num_decoder_layers=5", LAYERED, *EIGHT_BITS)


def abstract(*words: str) -> TrainProgram:
  config = load_config("qwen3-tiny", [*WORDS, *words]).config
  return make_program(config, mesh=abstract_mesh(config.mesh, 1), platform="gpu")


@pytest.mark.slow
def test_steps_are_those_of_moments_on_the_device():
  words = (*THREE, LAYERED, *EIGHT_BITS, "clip=running")
  (here, ordinary), (there, metrics) = descend(*words), descend(*words, AWAY)
  assert_bits(there, here)
  assert_bits(metrics, ordinary)
  program = compiled(*words, AWAY)[0]
  for path, x in jax.tree_util.tree_leaves_with_path(program.abstract_state):
    name = jax.tree_util.keystr(path)
    assert (x.sharding.memory_kind == KIND) == ("opt_state" in name and "stack_" in name and x.ndim > 0), name


OTHER_RULES = {
  "two passes": (*THREE, "clip=exact", "mu_dtype=bfloat16", "nu_dtype=dynamic8"),
  "rows of several layers": ("gemma4-tiny", *MODELS["gemma4-tiny"], "clip=exact"),
  "two stacks": ("deepseek3-tiny", "opt_type=lion", "mu_dtype=float32"),
  "adafactor": ("qwen3-tiny", "num_decoder_layers=3", "opt_type=adafactor", "emb_dim=128", "mlp_dim=136"),
  "float16": (*THREE, "dtype=float16"),
}  # fmt: skip


@pytest.mark.parametrize("case", tiers(OTHER_RULES, slow=("two passes",)))
def test_so_are_those_of_other_rules(case):
  words = OTHER_RULES[case]
  (here, ordinary), (there, metrics) = descend(*words, LAYERED), descend(*words, LAYERED, AWAY)
  assert_bits(there, here)
  assert_bits(metrics, ordinary)


# tests/training/step/in_backward/test_configurations.py tests moments in host memory on meshes that shard them.


def test_what_they_cannot_be_had_with_is_refused():
  with pytest.raises(UserError, match=r"without optimizer_in_backward[^\n]*\n(.*\n)*  fix: set optimizer_in_backward=true"):
    load_config("qwen3-tiny", [AWAY])
  with pytest.raises(UserError, match="with scan_layers: false"):
    load_config("qwen3-tiny", [AWAY, LAYERED, "scan_layers=false"])
  with pytest.raises(UserError, match=r"no layer has moments[^\n]*\n  fix: optimizer_memory_host_offload=false"):
    _ = abstract(AWAY, "opt_type=sgd", "sgd_momentum=0", "mu_dtype=null", "nu_dtype=float32").abstract_state


def test_they_count_on_the_host():
  here, there = (memory.estimate(abstract(*words)) for words in ((), (AWAY,)))
  state = abstract(AWAY).abstract_state["opt_state"]
  stay, away = by_place(state)
  assert there.host == bytes_of(away)
  assert there.optimizer == here.optimizer - there.host
  assert bytes_of(stay) + bytes_of(away) == bytes_of(state)
  config = load_config("qwen3-tiny", [*WORDS, AWAY]).config
  assert memory.estimate(make_program(config)).host == 0  # a CPU has no separate host memory


@pytest.mark.parametrize("topology", ["v6e-8", "h200"])
def test_plan_counts_both_ways(topology):
  target = TOPOLOGIES.get(topology) or find_gpus(topology)
  assert target is not None
  found = plan(load_config("qwen3-tiny", [*WORDS, AWAY]).config, target)
  assert found.host > 0
  copies = [(t.kind, t.bytes, t.times, t.asynchronous) for t in found.transfers if t.kind in HOST_COPIES]
  assert copies == [(kind, found.host, 5, topology == "v6e-8") for kind in HOST_COPIES]


@pytest.mark.parametrize(
  ("words", "smaller"),
  [
    (("mu_dtype=float32", "nu_dtype=float32"), "what to try: mu_dtype=dynamic8 nu_dtype=dynamic8, or "),
    (("mu_dtype=float32", "nu_dtype=float32", "opt_type=lion"), "what to try: mu_dtype=dynamic8, or "),
    ((), "what to try: "),
  ],
)
def test_a_host_without_the_room_is_told_which_key(monkeypatch, words, smaller):
  program = abstract(AWAY, *words)
  need = memory.estimate(program)
  monkeypatch.setattr(memory_limits, "device_limit", lambda *_: None)
  monkeypatch.setattr(type(program.model), "devices", [type("Device", (), {"process_index": 0})])
  monkeypatch.setattr(memory_limits, "host_limit", lambda: memory_limits.Limit(1 << 40, "a test"))
  monkeypatch.setenv(memory_limits.PINNED, "0")
  monkeypatch.setattr(memory, "estimate", lambda _, **how: need)
  with pytest.raises(DoesNotFitError) as error:
    memory.require_fit(program)
  assert str(error.value).startswith("optimizer_memory_host_offload = true: ")
  assert f"{memory_limits.PINNED} above 0" in str(error.value)
  assert f"{smaller}optimizer_memory_host_offload=false" in str(error.value)
  assert "remat_offload" not in str(error.value)


def test_gpus_that_are_not_there_have_no_host(monkeypatch):
  monkeypatch.setattr(aot_gpu, "installed", lambda: "jax-cuda13-plugin 0.11.2")
  config = load_config("qwen3-tiny", [*WORDS, AWAY]).config
  host = find_gpus("h200")
  assert host is not None
  why = aot_gpu.why_not(config, host)
  assert why is not None
  assert "no host memory" in why
  with pytest.raises(
    UserError, match=r"topology=h200-1: optimizer_memory_host_offload = true: [^\n]*\n  fix: machine_code=false"
  ):
    aot_gpu.compile_step(config, host)


@pytest.mark.slow
def test_a_look_takes_their_largest_row_by_row():
  """A check of the state (``lower_check``) reads host moments row by row, because all of them together may not fit on the
  device. It finds a non-finite moment as with moments on the device."""
  words = (*THREE, LAYERED, "mu_dtype=bfloat16", "nu_dtype=dynamic8")
  program, state, _ = begun(*words, AWAY)
  state = {**state, "opt_state": jax.tree.map(np.copy, state["opt_state"])}
  state["opt_state"][0].mu["stack_0"]["layer_0"]["mlp"]["down"][1, 0, 0] = np.inf
  found = {}
  for more in ((), (AWAY,)):
    program = begun(*words, *more)[0]
    with use_mesh(program.model.mesh):
      placed = jax.device_put(state, jax.tree.map(lambda x: x.sharding, program.abstract_state))
      look = program.lower_check()
      found[more] = jax.device_get(look.compile()(placed["params"], placed["opt_state"]))
  assert_bits(found[AWAY,], found[()])
  names = [name for name, fine in zip(program.state_labels["optimizer"], found[()]["state_optimizer"], strict=True) if not fine]
  assert names == ["mu.layers.1.mlp.down"]


@pytest.mark.slow
def test_an_xray_has_them_too():
  """The x-ray needs all gradients together and copies all moments to the device. A traced array's type contains its memory, so
  the program must start with arrays in pinned_host."""
  program, state, batch = begun(*THREE, LAYERED, *EIGHT_BITS, AWAY)
  with use_mesh(program.model.mesh):
    state = jax.device_put(state, jax.tree.map(lambda x: x.sharding, program.abstract_state))
    assert "pinned_host" in step_xray(program).lower(state, program.place(batch)).as_text()


@pytest.mark.slow
def test_a_run_goes_on_with_the_key_and_without(tmp_path):
  """A run that is resumed with and without the key has the losses of a run that never used it."""
  words = [f"output_dir={tmp_path}", "max_target_length=32", "per_device_batch_size=1", LAYERED, "checkpoint_interval=2"]
  words += ["lr_schedule_type=constant", "warmup_steps_fraction=0", *EIGHT_BITS]
  losses = {}
  for name, turns in {"changing": ((2, AWAY), (4, ""), (6, AWAY)), "plain": ((6, ""),)}.items():
    for steps, more in turns:
      assert main(["train", "qwen3-tiny", f"run_name={name}", f"steps={steps}", *words, *([more] if more else [])]) == 0
    rows = [json.loads(line) for line in (tmp_path / name / "metrics.jsonl").read_text().splitlines()]
    losses[name] = {row["step"]: row["loss"] for row in rows if "loss" in row}
  assert losses["changing"] == losses["plain"]
