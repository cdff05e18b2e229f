"""Every key of ``model:`` with another value, through resume and ``init_from``: the run works, or the printed fix does.

Nothing is trained. Configurations and the shapes of parameters are compared, as before a step is read.
"""

import functools
import re
import shlex
import typing
from typing import Any

import jax
import pytest

from maxtext_like.checkpoint.compatibility import check_state
from maxtext_like.checkpoint.model_changes import compared
from maxtext_like.checkpoint.store import stored_state
from maxtext_like.checkpoint.store.manifest import record
from maxtext_like.config.key_class import KeyClass, marks
from maxtext_like.config.load import load_config
from maxtext_like.config.yaml_file import to_text
from maxtext_like.errors import UserError
from maxtext_like.layers.param import abstract
from maxtext_like.models.build import build_decoder, precision_of
from maxtext_like.models.registry import FAMILIES

MODELS = ("gemma3-tiny", "gemma4-e2b-tiny", "gemma4-moe-tiny", "deepseek3-tiny", "deepseek3.2-tiny", "qwen3-moe-tiny")
STEP = "runs/a/checkpoints/5"

# Other values for keys where twice the number or the opposite bool is not a valid choice. WITH has the keys that must change
# together with a key to keep the model valid.
VALUES: dict[str, str] = {
  "model_name": "mine",
  "decoder_block": "",  # another family: tested below
  "layer_types": "",  # follows from the interval, which is tested
  "query_pre_attn_scalar": "7",
  "attn_logits_soft_cap": "30",
  "final_logits_soft_cap": "20",
  "rope_type": "",  # with other keys: in PAIRS
  "pad_token_id": "5",
  "bos_token_id": "6",
  "eos_token_id": "[1, 7]",
  "max_position_embeddings": "4096",
  "global_rope_proportion": "0.5",
  "global_head_dim": "32",
  "global_num_kv_heads": "1",
  "first_num_dense_layers": "0",
  "inhomogeneous_layer_cycle_interval": "1",
  "topk_routing_group": "1",
  "use_double_wide_mlp": "false",
  "hidden_size_per_layer_input": "16",
  "num_kv_shared_layers": "1",
}
WITH: dict[str, str] = {
  "num_query_heads": "num_kv_heads=8",
  "num_kv_heads": "num_query_heads=8",
  "rope_linear_scaling_factor": "rope_type=linear",
  "share_kv_projections": "global_num_kv_heads=null",
  "global_num_kv_heads": "share_kv_projections=true",
  "n_routing_groups": "topk_routing_group=4 num_experts=16",
  "num_experts_per_tok": "topk_routing_group=4",
  "use_indexer": "indexer_n_heads=4 indexer_head_dim=32 indexer_topk=32",
  "routed_bias": "routed_bias_update_rate=0",
  "num_experts": "num_experts_per_tok=2 moe_mlp_dim=16",
}
ONE_VALUE = {("gemma4-moe-tiny", "vocab_size_per_layer_input")} | {
  (f"deepseek{version}-tiny", "attn_logits_soft_cap") for version in ("3", "3.2")
}
PAIRS: list[tuple[str, tuple[str, ...], tuple[str, ...]]] = [
  ("deepseek3-tiny", (), ("rope_type=default",)),
  ("deepseek3-tiny", ("rope_type=default",), ("rope_type=default", "rope_factor=80", "beta_fast=64")),
  ("gemma3-tiny", (), ("rope_type=linear", "rope_linear_scaling_factor=8")),
  ("gemma4-e2b-tiny", (), ("use_multimodal=true",)),
  ("deepseek3.2-tiny", (), ("indexer_sparse_training=false", "routed_bias_update_rate=0", "load_balance_loss_weight=0.01")),
]


@functools.cache
def loaded(model: str, words: tuple[str, ...] = ()) -> tuple[dict[str, Any], dict[str, Any]]:
  """Return a configuration as a manifest stores it, and a description of the model's parameters."""
  config = load_config(model, ["max_target_length=64", *words]).config
  decoder = build_decoder(config.model, precision_of(config.precision), vision=config.vision)
  return record(config), stored_state.describe(stored_state.flatten({"params": abstract(decoder.params())}))


def test_every_key_of_a_model_declares_its_class():
  for family in FAMILIES.values():
    for section in (family.config, family.vision):
      undeclared = [key for key, own in (marks(section) if section else {}).items() if not own.declared]
      assert not undeclared, f"{section}: as Shape[int], Mathematics[float] or TrainingOnly[float]: {undeclared}"


def other(key: str, kind: Any, value: Any) -> str:
  """Return another value of a key, as text; "" if it has no other value without a change of other keys."""
  if key in VALUES:
    return VALUES[key]
  if isinstance(value, bool):
    return to_text(not value)
  if isinstance(value, int | float) and value:
    return to_text(2 * value)
  return next((to_text(choice) for choice in typing.get_args(kind) if isinstance(choice, str) and choice != value), "3")


def cases() -> list[tuple[str, str, tuple[str, ...], tuple[str, ...]]]:
  found = []
  for model in MODELS:
    section = load_config(model).config.model
    for key, kind in typing.get_type_hints(type(section)).items():
      if (model, key) not in ONE_VALUE and key in marks(type(section)) and (value := other(key, kind, getattr(section, key))):
        words = [word for word in WITH.get(key, "").split() if word.partition("=")[0] in marks(type(section))]
        found.append((model, key, (), (f"{key}={value}", *words)))
  return found + [(model, "", old, new) for model, old, new in PAIRS]


def refused(saved: Any, current: Any, *, resumes: bool) -> str:
  """Return the error that a run gets when it reads a step; empty if the step is accepted."""
  wanted = {name: leaf for name, leaf in current[1].items() if resumes or name in saved[1] or not _adds(saved, current)}
  try:
    check_state(
      STEP, saved[0], current[0], saved[1], wanted, allow_dtype_change=False, subset=not resumes, resumes=resumes,
      adds=not resumes,
    )  # fmt: skip
  except UserError as error:
    return str(error)
  return ""


def _adds(saved: Any, current: Any) -> bool:
  return compared(saved[0], current[0]).adds is not None


@pytest.mark.parametrize(("model", "key", "old", "new"), cases(), ids=lambda x: x if isinstance(x, str) else "")
@pytest.mark.slow
def test_a_changed_key_works_or_its_fix_does(model, key, old, new):
  pair = loaded(model, old), loaded(model, new)
  for saved, current, words in ((*pair, new), (*reversed(pair), old)):
    for resumes in (True, False):
      kinds = {change.kind for change in compared(saved[0], current[0], subset=not resumes).changes}
      if resumes and KeyClass.SHAPE not in kinds:
        assert saved[1] == current[1], "a key that is no Shape made other arrays"
      said = refused(saved, current, resumes=resumes)
      assert bool(said) == bool(kinds - {KeyClass.TRAINING}) or _adds(saved, current), said
      fixes = [line.strip().removeprefix("or ") for line in said.partition("\n  fix: ")[2].splitlines()]
      assert bool(fixes) == bool(said)
      for fix in fixes:
        follow(fix, model, saved, current, words, resumes=resumes)


def follow(fix: str, model: str, saved: Any, current: Any, words: tuple[str, ...], *, resumes: bool) -> None:
  """Apply the settings of a fix and check that no error is left."""
  typed = [word for word in shlex.split(re.sub(r" \([^)]*\)$", "", fix)) if "=" in word]
  own = {word.partition("=")[0]: word.partition("=")[2] for word in typed}
  if not own:
    assert "another checkpoint" in fix or "the model of the checkpoint" in fix, fix
    return
  if own.pop("run_name", None):
    if "init_from" not in own:
      return  # a new run, which reads no checkpoint
    assert own.pop("init_from") == STEP
    resumes = False
  again = loaded(model, (*words, *(f"{key}={value}" for key, value in own.items())))
  assert not refused(saved, again, resumes=resumes), fix


def test_the_family_of_another_model_is_all_that_is_listed():
  said = refused(loaded("gemma3-tiny"), loaded("qwen3-tiny"), resumes=True)
  assert re.findall(r"model\.\w+", said) == ["model.decoder_block"]
  assert "the model of the checkpoint, gemma3-tiny, instead of qwen3-tiny\n       or run_name=NAME" in said


def test_training_keys_change_freely_and_shapes_never():
  saved = loaded("deepseek3-tiny")
  assert not refused(
    saved, loaded("deepseek3-tiny", ("routed_bias_update_rate=0", "max_position_embeddings=512")), resumes=True
  )
  wide = loaded("deepseek3-tiny", ("emb_dim=64", "allow_model_change=true"))
  for resumes in (True, False):
    assert "model.emb_dim: checkpoint 128, this run 64\n" in refused(saved, wide, resumes=resumes)


def test_a_v3_checkpoint_takes_an_indexer_that_is_trained_alone_first():
  v3, warm_up = loaded("deepseek3-tiny"), loaded("deepseek3.2-tiny", ("indexer_sparse_training=false",))
  assert not refused(v3, warm_up, resumes=False)
  assert "run_name=NAME init_from=runs/a/checkpoints/5 indexer_sparse_training=false" in refused(v3, warm_up, resumes=True)
  said = refused(v3, loaded("deepseek3.2-tiny"), resumes=False)
  assert (
    "why: the indexer is new, and the model would use it before it has been trained\n  fix: indexer_sparse_training=false"
    in said
  )
  assert "model.use_indexer: checkpoint true, this run false" in refused(warm_up, v3, resumes=False)
  for stage in (True, False):
    pair = (warm_up, loaded("deepseek3.2-tiny"))[:: 1 if stage else -1]
    assert not refused(*pair, resumes=True)
    assert list(compared(*(sections for sections, _ in pair)).lines()) == [
      f"changed indexer_sparse_training: was {to_text(not stage)}, is {to_text(stage)} (changes which parameters are trained)"
    ]


def test_what_does_nothing_is_no_difference():
  default = loaded("deepseek3-tiny", ("rope_type=default",))
  assert not compared(default[0], loaded("deepseek3-tiny", ("rope_type=default", "rope_factor=80"))[0]).changes
  assert jax.tree.leaves(default[1])
