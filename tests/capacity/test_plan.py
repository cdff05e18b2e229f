"""Plans by arithmetic, compared with libtpu's memory layouts (docs/results/memory.md) and counts of compiled programs."""

import dataclasses
import json

import pytest

from maxtext_like.capacity import plan as plan_module
from maxtext_like.capacity.memory import for_gpus
from maxtext_like.capacity.plan import Plan, plan, search
from maxtext_like.capacity.topologies import GIB, find_cpus, find_gpus, find_topology
from maxtext_like.cli.main import main
from maxtext_like.config.files import configs_folder
from maxtext_like.config.load import load_config
from maxtext_like.errors import UserError
from tests.tiers import nightly

TPU = configs_folder().parent / "tpu"


ADAFACTOR = ["max_target_length=2048", "opt_type=adafactor"]


def planned(model: str, topology: str, *words: str) -> Plan:
  target = find_gpus(topology) or find_cpus(topology) or find_topology(topology)
  return plan(load_config(model, list(words)).config, target)


@pytest.mark.parametrize(
  ("model", "topology", "words", "gib", "tflop"),
  [
    # Reported by `compile ... machine_code=false` on 2026-11-22 (docs/results/memory.md): dense models; a table whose shards do
    # not fill complete tiles; experts that are gathered, and tokens that are sent to experts; a loss without chunks.
    ("gemma4-31b", "v6e-32", ["max_target_length=2048"], 17.58, 518.9),
    nightly("gemma4-31b", "v6e-32", ["weight_dtype=bfloat16"], 14.41, 1058),
    ("gemma3-27b", "v6e-32", [], 17.48, 898.2),
    nightly("gemma3-27b", "v6e-256", [], 9.74, 898.2),
    nightly("gemma4-26b", "v6e-32", [], 17.26, 137.9),
    ("gemma4-26b", "v6e-32", [f"{TPU}/v6e-32-experts.yml"], 15.82, 136.4),
    # 2026-11-25: a table of per-layer inputs, whose gradient is in memory twice, in two orders of its axes.
    ("gemma4-e2b", "v6e-4", [], 20.79, 79.06),
    nightly("gemma4-e4b", "v6e-8", ["ici_tensor_parallelism=2"], 16.70, 157.3),
    nightly("gemma4-e2b", "v6e-8", ["opt_type=adafactor", "weight_dtype=bfloat16"], 4.55, 79.06),
    # Sharded positions: each device holds the complete gradient of the table of the logits.
    (
      "gemma3-4b",
      "v6e-16",
      ["ici_context_parallelism=4", "max_target_length=16384", "per_device_batch_size=0.25", "weight_dtype=bfloat16"],
      13.64,
      140.2,
    ),
    # 2026-11-27: a rule that needs complete arrays. Unless its update is proved finite, all updates are in memory together.
    ("gemma3-4b", "v6e-8", [*ADAFACTOR, "weight_dtype=bfloat16", "gradient_clipping_threshold=0"], 4.96, 63.35),
    (
      "deepseek3-671b",
      "v6e-128",
      [f"{TPU}/v6e-256-deepseek.yml", "ici_fsdp_parallelism=4", "ici_expert_parallelism=32", *ADAFACTOR],
      25.19,
      659,
    ),
    ("deepseek3-671b", "v6e-256", [f"{TPU}/v6e-256-deepseek.yml"], 29.57, 659),
    ("deepseek3.2-671b", "v6e-256", [f"{TPU}/v6e-256-deepseek.yml", "max_target_length=1024"], 28.65, 335.1),
  ],
)
@pytest.mark.slow
def test_what_libtpu_laid_out(model, topology, words, gib, tflop):
  p = planned(model, topology, *words)
  assert p.bytes / GIB == pytest.approx(gib, rel=0.1)
  assert p.flops / 1e12 == pytest.approx(tflop, rel=0.1)
  assert p.fits
  assert p.roofline is not None
  assert p.roofline.step > max(p.roofline.bounds.values())


@pytest.mark.slow
def test_what_libtpu_gathers():
  for words, gathered in ((["max_target_length=2048"], 135.4), (["weight_dtype=bfloat16"], 140.8)):
    p = planned("gemma4-31b", "v6e-32", *words)
    assert sum(t.bytes for t in p.transfers if t.kind == "all-gather") / 1e9 == pytest.approx(gathered, rel=0.15)


def test_a_logit_is_counted_once():
  """A loss without chunks keeps the logits for its backward pass and frees them before the layers' backward pass begins."""
  whole, pieces = (planned("gemma3-tiny", "v6e-8", *words) for words in ([], ["num_vocab_tiling=4"]))
  assert whole.classes["activations"] == pytest.approx(pieces.classes["activations"], rel=1e-3)


@pytest.mark.slow
def test_remat_takes_what_it_computes_again():
  none, mlp, outputs, attention, full = (
    planned("gemma4-tiny", "v6e-8", f"remat_policy={policy}")
    for policy in ("none", "save_mlp", "save_outputs", "save_attention", "full")
  )
  assert none.flops == none.model_flops == full.model_flops
  assert none.flops < attention.flops < full.flops < 4 / 3 * none.flops
  assert none.flops < mlp.flops < outputs.flops < full.flops
  assert full.classes["activations"] < none.classes["activations"]


@pytest.mark.slow
def test_a_backward_pass_that_measures_first_counts_as_one_more():
  """Without clip=running, the gradient norm needs a second backward pass. The recomputation of remat counts for it too."""
  words = ("remat_policy=full", "optimizer_in_backward=true", "matmul_dtype=float8")
  one, two, ordinary = (
    planned("gemma4-tiny", "h200-8", *words, *more) for more in (["clip=running"], [], ["optimizer_in_backward=false"])
  )
  forward = one.flops - one.model_flops
  assert two.flops - one.flops == pytest.approx(3 * forward)
  assert ordinary.flops == one.flops
  assert one.memory_bytes < two.memory_bytes < 2 * one.memory_bytes
  sent = lambda p, kind: sum(t.bytes for t in p.transfers if t.kind == kind)
  assert sent(two, "all-gather") < 1.5 * sent(one, "all-gather")  # only the loss needs the table
  assert sent(one, "reduce-scatter") < sent(two, "reduce-scatter") < 2 * sent(one, "reduce-scatter")


@pytest.mark.slow
def test_remat_takes_no_table_twice():
  lora = ("remat_policy=full", "lora_rank=2", "lora_modules=[q_proj]")
  without, beside = (planned("gemma4-tiny", "h200-8", *lora, *words) for words in ((), ("modules_to_save=[embed_tokens]",)))
  assert beside.flops - beside.model_flops == pytest.approx(without.flops - without.model_flops)


@pytest.mark.slow
def test_the_gradient_of_a_table_that_is_trained_whole_is_there_twice_behind_the_layers():
  """After the layers, a device that holds the complete table has its gradient both in float32 and in the stored dtype."""
  words = ("vocab_size=50000", "max_target_length=16", "num_vocab_tiling=16", "remat_policy=full")
  words += ("ici_fsdp_parallelism=1", "ici_data_parallelism=8", "lora_rank=2", "lora_modules=[q_proj]")
  without, beside = (planned("gemma3-tiny", "v6e-8", *words, *more) for more in ((), ("modules_to_save=[embed_tokens]",)))
  table = beside.parameters - without.parameters
  assert beside.classes["activations"] + beside.classes["temporaries"] > 8 * table


def test_every_kind_of_machine():
  cards = planned("gemma3-tiny", "h200-8")
  assert cards.roofline is not None
  assert cards.limit == find_gpus("h200-8").bytes  # pyright: ignore[reportOptionalMemberAccess]
  host = planned("gemma3-tiny", "cpu-8")
  assert (host.roofline, host.limit, host.fits) == (None, None, True)
  assert host.classes["parameters"] == cards.classes["parameters"]


@pytest.mark.slow
def test_a_card_that_is_not_in_the_table(monkeypatch, capsys):
  """JAX uses its usual share of the specified memory. The speed of a card without a name is unknown, and the plan says so."""
  monkeypatch.setenv("JAX_PLATFORMS", "cpu")
  monkeypatch.setenv("XLA_PYTHON_CLIENT_MEM_FRACTION", ".5")
  assert main(["plan", "gemma3-tiny", "memory=24GB"]) == 0
  shown = capsys.readouterr().out
  assert "gpu-1, 1 devices" in shown
  assert f" of {12e9 / GIB:.2f} GiB (" in shown
  assert "unknown: there is no table of speeds for this device" in shown
  assert main(["plan", "gemma3-4b", "--topology", "rtx 4090", "--memory", "1GB"]) == 4
  shown = capsys.readouterr().out
  assert "rtx4090-1, 1 devices" in shown
  assert f" of {5e8 / GIB:.2f} GiB (" in shown
  assert "MFU" in shown


@pytest.mark.slow
def test_what_is_kept_makes_way_for_gradients_where_a_gpu_unrolls():
  """The parts of the plan add up to the memory estimate, and none is negative."""
  words = ("remat_policy=none", "scan_layers=false", "ici_fsdp_parallelism=1", "num_vocab_tiling=4")
  cards = planned("gemma4-tiny", "h200", *words)
  need = for_gpus(load_config("gemma4-tiny", list(words)).config, find_gpus("h200"))[1]  # pyright: ignore[reportArgumentType]
  assert min(cards.classes.values()) >= 0
  assert sum(cards.classes.values()) == need.total


def test_gradients_are_summed_between_slices():
  slices = find_topology("v6e-4")
  config = load_config("gemma3-tiny", ["dcn_data_parallelism=2"]).config
  two = plan(config, dataclasses.replace(slices, slices=2))
  between = [t for t in two.transfers if t.between_slices]
  assert [t.kind for t in between] == ["all-reduce"]
  assert two.roofline is not None
  assert two.roofline.bounds["DCN"] > 0


@pytest.mark.slow
def test_a_search_finds_what_fits_best_first(monkeypatch):
  monkeypatch.setattr(plan_module, "_meshes", lambda config, target: [config.mesh])
  found = search(load_config("gemma3-tiny").config, find_topology("v6e-8"))
  bounds = [p.roofline.step / p.model_flops for p in found if p.roofline]
  assert len(found) == 20  # five remat policies times four batch sizes
  assert bounds == sorted(bounds)


@pytest.mark.parametrize(("given", "count"), [("save_mlp", 5), ("minimal", 6)])
def test_a_search_tries_the_policy_that_is_given(monkeypatch, given, count):
  tried = []

  def refuse(config, target):
    tried.append(config.training.remat_policy)
    raise UserError("no such mesh")

  monkeypatch.setattr(plan_module, "plan", refuse)
  monkeypatch.setattr(plan_module, "_meshes", lambda config, target: [config.mesh])
  assert search(load_config("gemma3-tiny", [f"remat_policy={given}"]).config, find_topology("v6e-8")) == []
  assert given in tried
  assert len({*tried}) == len(tried) == count


@pytest.mark.parametrize(
  ("given", "offload", "under"),
  [
    ("full", "layer_inputs", {"none": "none", "save_mlp": "layer_inputs", "full": "layer_inputs"}),
    ("minimal", "kept", {"none": "none", "save_mlp": "kept", "full": "layer_inputs", "minimal": "kept"}),
    ("save_mlp", "all", {"none": "none", "save_mlp": "all", "full": "layer_inputs"}),
  ],
)
def test_a_search_takes_an_offload_as_far_as_a_policy_has_something_to_offload(monkeypatch, given, offload, under):
  tried = {}

  def refuse(config, target):
    tried[config.training.remat_policy] = config.training.remat_offload
    raise UserError("no such mesh")

  monkeypatch.setattr(plan_module, "plan", refuse)
  monkeypatch.setattr(plan_module, "_meshes", lambda config, target: [config.mesh])
  words = [f"remat_policy={given}", f"remat_offload={offload}"]
  assert search(load_config("gemma3-tiny", words).config, find_topology("v6e-8")) == []
  assert {policy: tried[policy] for policy in under} == under


def test_a_search_splits_experts():
  meshes = lambda model: [
    m.ici_expert_parallelism for m in plan_module._meshes(load_config(model).config, find_topology("v6e-8"))
  ]
  assert sorted({*meshes("gemma4-moe-tiny")}) == [1, 4, 8]
  assert {*meshes("gemma4-tiny"), *meshes("gemma3-tiny")} == {1}


def test_the_verb(capsys, tmp_path, monkeypatch):
  monkeypatch.setenv("JAX_PLATFORMS", "cpu")
  file = tmp_path / "plan.json"
  assert main(["plan", "gemma3-tiny", "topology=v6e-8", "--json", str(file)]) == 0
  assert "verdict      fits" in capsys.readouterr().out
  told = json.loads(file.read_text())
  assert told["bytes"] == sum(told["classes"].values())
  assert main(["plan", "gemma4-31b", "topology=v6e-4"]) == 4
  out = capsys.readouterr().out
  assert "does not fit" in out
  assert "--search" in out
  for words, message in {
    ("topology=v6e-9",): "did you mean v6e-",
    ("memory=24",): "fix: memory=24GB",
    ("topology=gpu-2",): "add memory=24GB",
    (): "no topology",
    ("topology=cpu-8", "num_slices=2"): "num_slices=2 is only for TPUs",
    ("topology=v6e-8", "xla_flags=all"): "xla_flags has no effect",
    ("topology=v6e-8", "dcn_fsdp_parallelism=2"): "makes 2 slices, but this run has 1",
    ("topology=v6e-8", "ici_fsdp_parallelism=3"): "topology=v6e-8 num_slices=1: mesh",
  }.items():
    assert main(["plan", "gemma3-tiny", *words]) == 2
    assert message in capsys.readouterr().err
