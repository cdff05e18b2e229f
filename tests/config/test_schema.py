"""Each section refuses contradictions among its own keys."""

import dataclasses

import pytest

from maxtext_like.config.load import load_config
from maxtext_like.config.problems import InvalidSectionError
from maxtext_like.config.schema import LEAVES, SECTIONS, section_type
from maxtext_like.layers.sharding_rules import MESH_AXES
from maxtext_like.models.registry import FAMILIES

CONFIG = load_config("gemma4-tiny").config


def test_leaf_names_are_unique_over_sections():
  sections = [{leaf for leaf, (name, _) in LEAVES.items() if name == section} for section in SECTIONS]
  for family in FAMILIES:
    for section, leaves in zip(SECTIONS, sections, strict=True):
      assert {field.name for field in dataclasses.fields(section_type(section, family))} <= leaves
  assert not set(LEAVES) & set(SECTIONS)


@pytest.mark.parametrize("section", SECTIONS)
def test_sections_are_frozen_and_keyword_only(section):
  value = getattr(CONFIG, section)
  name = dataclasses.fields(value)[0].name
  with pytest.raises(dataclasses.FrozenInstanceError):
    setattr(value, name, None)
  with pytest.raises(TypeError):
    type(value)(*dataclasses.asdict(value).values())
  hash(value)  # a section can be the key of a cache


READS = {"dataset": "text", "dataset_path": "a"}
MIXED = {"dataset_path": {"web": "a", "code": "b"}, "dataset_weights": {"web": 3.0, "code": 1.0}}


@pytest.mark.parametrize(
  ("section", "changes", "reason"),
  [
    ("training", {"steps": 0}, "steps = 0 is below 1"),
    ("training", {"steps": -3}, "steps = -3 is below 1"),
    ("training", {"seed": -1}, "seed = -1"),
    ("training", {"max_target_length": 1}, "max_target_length = 1"),
    ("training", {"learning_rate": 0.0}, "learning_rate = 0.0 is not above 0"),
    ("training", {"adam_b1": 1.0}, "adam_b1 = 1.0"),
    ("training", {"sgd_momentum": -0.1}, "sgd_momentum"),
    ("training", {"warmup_steps_fraction": 1.5}, "warmup_steps_fraction = 1.5"),
    (
      "training",
      {"lr_schedule_type": "wsd", "warmup_steps_fraction": 0.6, "wsd_decay_steps_fraction": 0.5},
      "warmup_steps_fraction = 0.6 and wsd_decay_steps_fraction = 0.5",
    ),
    ("training", {"finite_check_steps": -2}, "finite_check_steps = -2"),
    ("training", {"loss_scale_init": 0.5}, "loss_scale_init"),
    ("training", {"trainable_parameters_mask": ("ok", "(")}, "not a regular expression"),
    ("data", {"eval_fraction": 1.0}, "eval_fraction = 1.0"),
    ("data", {"eval_interval": 5, "eval_fraction": 0.0}, "eval_interval = 5 with eval_fraction = 0"),
    ("data", {"eval_interval": -1}, "eval_interval = -1"),
    ("data", {**READS, "eval_path": "b", "eval_interval": 5}, "eval_path with eval_fraction = 0.05"),
    ("data", {**READS, "eval_path": "b", "eval_fraction": 0.0}, "eval_path is set, but eval_interval = 0"),
    ("data", {"eval_path": "b", "eval_interval": 5, "eval_fraction": 0.0}, "reads no files, but eval_path is set"),
    ("data", {"dataset": "synthetic", "special_tokens_in_text": "parse"}, "which has no text"),
    ("data", {"dataset": "jsonl"}, "dataset: jsonl without dataset_path"),
    ("data", {"dataset": "text", "dataset_path": ()}, "without dataset_path"),
    ("data", {"dataset_path": "x.txt"}, "reads no files"),
    ("data", {**READS, "dataset_path": {"a": "b"}}, "dataset_weights is not set"),
    ("data", {**READS, "dataset_weights": {"a": 1.0}}, "dataset_weights is set, but dataset_path has no named sources"),
    ("data", {**READS, **MIXED, "dataset_weights": {"web": 1.0}}, "dataset_weights has no 'code'"),
    ("data", {**READS, **MIXED, "dataset_path": {"web": "a"}}, "dataset_path has no 'code'"),
    ("data", {**READS, **MIXED, "dataset_weights": {"web": 1.0, "code": 0.0}}, "dataset_weights: code: 0 is not above 0"),
    ("data", {**READS, **MIXED, "dataset_weights": {"web": 1.0, "code": -0.5}}, "dataset_weights: code: -0.5 is not above 0"),
    ("data", {**READS, **MIXED, "dataset_path": {"web": "a", "code": ()}}, "dataset_path: the source code has no files"),
    ("data", {**READS, "dataset_path": {"a/b": "c"}, "dataset_weights": {"a/b": 1.0}}, "'a/b' is not a valid name"),
    ("data", MIXED, "reads no files, but dataset_path is set"),
    ("data", {"tokenizer": ""}, "tokenizer is empty"),
    ("data", {"dataset_documents_max": 0}, "dataset_documents_max = 0"),
    ("checkpoint", {"enable_checkpointing": False}, "resume: true with enable_checkpointing: false"),
    ("checkpoint", {"checkpoint_interval": 0}, "checkpoint_interval = 0"),
    ("checkpoint", {"init_from": ""}, "init_from is empty"),
    ("mesh", {"ici_data_parallelism": 0}, "ici_data_parallelism = 0"),
    ("mesh", {"ici_data_parallelism": -1}, "are both -1"),
    ("mesh", {"dcn_fsdp_parallelism": -1}, "dcn_data_parallelism and dcn_fsdp_parallelism are both -1"),
    ("mesh", {"sharding_rules": {"head": None}}, "unknown logical axis 'head', did you mean 'heads'"),
    ("mesh", {"sharding_rules": {"mlp": ("fsdp", "tensors")}}, "mlp: unknown mesh axis 'tensors', did you mean 'tensor'"),
    ("mesh", {"sharding_rules": {"mlp": "model"}}, "unknown mesh axis 'model'; .*data, fsdp, expert, context, tensor"),
    ("mesh", {"sharding_rules": {"mlp": ("fsdp", "fsdp")}}, "names a mesh axis twice"),
    ("logging", {"run_name": "a/b"}, "not the name of a directory"),
    ("logging", {"run_name": ".."}, "not the name of a directory"),
    ("logging", {"output_dir": ""}, "output_dir is empty"),
    ("logging", {"log_interval": 0}, "log_interval = 0"),
    ("logging", {"compilation_cache_dir": ""}, "compilation_cache_dir is empty"),
  ],
)
def test_contradictions(section, changes, reason):
  with pytest.raises(InvalidSectionError, match=reason) as refused:
    dataclasses.replace(getattr(CONFIG, section), **changes)
  assert len(refused.value.problems) == 1
  assert set(refused.value.problems[0].keys) <= set(LEAVES)


def test_all_contradictions_of_a_section_come_together():
  with pytest.raises(InvalidSectionError) as refused:
    dataclasses.replace(CONFIG.training, steps=-1, learning_rate=-1.0, adam_b2=2.0)
  assert [p.keys for p in refused.value.problems] == [("steps",), ("learning_rate",), ("adam_b2",)]


@pytest.mark.parametrize(
  ("written", "devices", "slices", "sizes"),
  [
    ({}, 8, None, {"fsdp": 8}),
    ({"ici_data": 2}, 8, None, {"data": 2, "fsdp": 4}),
    ({"ici_data": -1, "ici_fsdp": 4}, 8, None, {"data": 2, "fsdp": 4}),
    ({"ici_data": 2, "ici_fsdp": 4}, 8, None, {"data": 2, "fsdp": 4}),
    ({"ici_fsdp": 1}, 1, None, {}),
    ({"ici_tensor": 2, "ici_context": 2}, 8, None, {"fsdp": 2, "context": 2, "tensor": 2}),
    ({"ici_fsdp": 2, "ici_expert": -1}, 8, None, {"fsdp": 2, "expert": 4}),
    ({}, 8, 2, {"data": 2, "fsdp": 4}),  # two real slices
    ({"dcn_data": 1, "dcn_fsdp": -1}, 8, 2, {"fsdp": 8}),
    ({"dcn_fsdp": 2}, 16, 4, {"data": 2, "fsdp": 8}),
    ({"dcn_data": 2, "ici_tensor": 2}, 8, None, {"data": 2, "fsdp": 2, "tensor": 2}),  # dcn_data divides one slice
  ],
)
def test_mesh_works_out_the_rest(written, devices, slices, sizes):
  assert mesh_of(written).axis_sizes(devices, slices) == dict.fromkeys(MESH_AXES, 1) | sizes


@pytest.mark.parametrize(
  ("written", "slices", "reason"),
  [
    *(
      ({"ici_data": d, "ici_fsdp": f}, None, f"ici_data_parallelism={d}.* number of devices, 8")
      for d, f in [(3, -1), (2, 2), (16, -1)]
    ),
    ({"ici_tensor": 3}, None, "ici_tensor_parallelism=3 does not divide the number of devices, 8"),
    ({"dcn_data": 3}, None, "the 8 devices of this run cannot be divided into 3 equal slices"),
    (
      {"dcn_data": 2, "ici_fsdp": 8},
      None,
      "ici_fsdp_parallelism=8 does not multiply to the number of devices of each of 2 slices, 4",
    ),
    ({"dcn_data": 4}, 2, "dcn_data_parallelism=4 makes 4 slices, but this run has 2"),
    ({"dcn_data": 1}, 2, "makes 1 slice, but this run has 2"),
  ],
)
def test_mesh_that_does_not_multiply_to_the_devices(written, slices, reason):
  with pytest.raises(ValueError, match=reason):
    mesh_of(written).axis_sizes(8, slices)


def mesh_of(written):
  return dataclasses.replace(CONFIG.mesh, **{f"{name}_parallelism": size for name, size in written.items()})
