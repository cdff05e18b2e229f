"""The error for an incompatible checkpoint names the keys that decide the arrays."""

import pytest

from maxtext_like.checkpoint.compatibility import check_state
from maxtext_like.errors import UserError


def leaves(**dtypes: str) -> dict[str, dict]:
  return {name: {"shape": [3], "dtype": dtype} for name, dtype in dtypes.items()}


def refusal(saved: dict, current: dict, saved_leaves: dict, wanted_leaves: dict, *, allow: bool = False) -> str:
  with pytest.raises(UserError) as error:
    check_state("runs/a", {"training": saved}, {"training": current}, saved_leaves, wanted_leaves, allow_dtype_change=allow)
  return str(error.value)


@pytest.mark.parametrize(
  ("key", "was", "now"),
  [
    ("sgd_momentum", 0.9, 0.0),
    ("adafactor_momentum_rank", 32, 0),
    ("mu_dtype", "dynamic8", None),
    ("opt_type", "adamw", "lion"),
  ],
)
def test_what_decides_which_arrays_there_are_is_named(key, was, now):
  rate = {"learning_rate": 1e-3}, {"learning_rate": 2e-3}
  said = refusal({key: was} | rate[0], {key: now} | rate[1], leaves(w="float32", trace="float32"), leaves(w="float32"))
  assert f"training.{key}: checkpoint " in said
  assert "only in the checkpoint:\n    trace" in said
  assert "learning_rate" not in said


@pytest.mark.parametrize(
  ("saved", "current", "own"),
  [
    ({"nu_dtype": "bfloat16", "mu_dtype": None}, {"nu_dtype": None, "mu_dtype": None},
     "nu_dtype=bfloat16 (the checkpoint's values)"),
    ({"nu_dtype": None, "mu_dtype": None}, {"nu_dtype": "bfloat16", "mu_dtype": "bfloat16"},
     "nu_dtype=null mu_dtype=null (the checkpoint's values)"),
    ({}, {}, "the dtypes of the checkpoint"),
  ],
)  # fmt: skip
def test_other_dtypes_name_the_keys_that_differ(saved, current, own):
  said = refusal(saved, current, leaves(nu="bfloat16"), leaves(nu="float32"))
  assert "    bfloat16 in the checkpoint, float32 in this run: nu\n" in said
  assert f"  fix: {own}\n       or allow_dtype_change=true (casts" in said


def test_arrays_with_the_same_dtypes_are_one_line():
  said = refusal({}, {}, leaves(a="bfloat16", b="bfloat16", c="float16"), leaves(a="float32", b="float32", c="float32"))
  assert said.splitlines()[1:3] == [
    "    bfloat16 in the checkpoint, float32 in this run: 2 arrays, such as a",
    "    float16 in the checkpoint, float32 in this run: c",
  ]


def test_floats_are_cast_where_that_is_allowed_and_integers_never():
  check_state("runs/a", {}, {}, leaves(nu="bfloat16"), leaves(nu="float32"), allow_dtype_change=True)
  said = refusal({}, {}, leaves(nu="uint8"), leaves(nu="float32"), allow=True)
  assert "why: integers are never cast to floats" in said
  assert "allow_dtype_change" not in said
