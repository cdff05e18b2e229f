"""The finiteness guard: its four lines of output, the contents of its report, and the failures that end a run with exit code
3."""

import dataclasses

import numpy as np
import pytest

from maxtext_like.training.loop.finiteness import FinitenessGuard, StepResult, model_order
from tests.training.toy import toy_config, with_precision

LABELS = ["final_norm.scale", "layers.10.mlp.up", "layers.2.mlp.up", "embedding.table"]
MOMENTS = [f"{kind}.{name}" for kind in ("mu", "nu") for name in LABELS]
STATE = {"optimizer": MOMENTS, "state_parameters": LABELS, "state_optimizer": MOMENTS}


def result(step: int, *, loss=True, scale=None, **bad) -> StepResult:
  """Return a finished step. ``bad`` maps kinds of arrays to the labels of the rows that are not finite."""
  rows = {"gradients": LABELS, "parameters": LABELS} | STATE
  flags = {name: np.array([label not in bad.get(name, ()) for label in labels]) for name, labels in rows.items()}
  skipped = not (loss and all(flags[name].all() for name in ("gradients", "parameters", "optimizer")))
  flags["loss"] = np.asarray(loss)
  scalars = {"loss": 2.5 if loss else np.nan, "grad_norm": np.inf if "gradients" in bad else 1.5, "param_norm": 3.0}
  scalars |= {"skipped": int(skipped)} | ({} if scale is None else {"loss_scale": scale})
  return StepResult(step, scalars, flags)


def guard(*words: str, dtype: str = "float32", last_step: int = 9) -> FinitenessGuard:
  return FinitenessGuard(with_precision(toy_config(*words), dtype=dtype), LABELS, STATE, last_step)


def test_a_healthy_run_has_four_lines_and_then_none():
  g = guard()
  assert g.checking
  lines, error = g.observe(result(1))
  assert error is None
  assert lines == [
    "finiteness  loss0       finite      2.5",
    "finiteness  gradients   finite      4 arrays, norm 1.5",
    "finiteness  parameters  finite      4 arrays, norm 3",
  ]
  lines, error = g.observe(result(2))
  assert (lines, error) == (["finiteness  loss1       finite      2.5"], None)
  assert not g.checking
  assert g.observe(result(3)) == ([], None)
  assert {name: entry["finite"] for name, entry in g.report.items()} == dict.fromkeys(g.report, True)


@pytest.mark.parametrize(
  ("norm", "remark"), [(4e8, ": far above the usual"), (0.0, ": no parameter has a gradient"), (90.0, "")]
)
def test_an_unusual_gradient_norm_of_the_first_step_is_remarked_on(norm, remark):
  first = result(1)
  first.scalars["grad_norm"] = norm
  g = guard()
  lines, _ = g.observe(first)
  _, _, found = lines[1].partition(f"norm {norm:.6g}")
  assert found.startswith(remark)
  assert bool(found) == bool(remark) == ("remark" in g.report["gradients"])


def test_steps_that_may_end_the_run_are_known_before():
  g = guard("finite_check_steps=1", "max_skipped_steps=2")
  assert g.may_end_the_run
  g.observe(result(1))
  assert not g.may_end_the_run
  g.observe(result(2, gradients=LABELS))
  assert g.may_end_the_run
  g.observe(result(3))
  assert not g.may_end_the_run
  assert guard("finite_check_steps=0", "max_skipped_steps=1").may_end_the_run


def test_a_run_of_one_step_says_that_loss1_was_not_run():
  g = guard(last_step=1)
  lines, _ = g.observe(result(1))
  assert lines[-1] == "finiteness  loss1       not run: the run ends at step 1"
  assert g.report["loss1"]["finite"] is None


@pytest.mark.parametrize(
  ("failure", "name"),
  [
    ({"loss": False}, "loss0 (nan)"),
    ({"gradients": LABELS}, "gradients in 4 of 4 arrays, first embedding.table"),
    ({"gradients": LABELS[1:3]}, "gradients in 2 of 4 arrays, first layers.2.mlp.up"),
    ({"parameters": ["final_norm.scale"]}, "parameters in 1 of 4 arrays, first final_norm.scale"),
    ({"optimizer": ["nu.layers.2.mlp.up"]}, "optimizer state in 1 of 8 arrays, first nu.layers.2.mlp.up"),
  ],
)
def test_the_first_step_fails(failure, name):
  g = guard()
  lines, error = g.observe(result(1, **failure))
  assert error is not None
  assert error.exit_code == 3
  assert f"step 1: non-finite {name}" in str(error)
  assert "what to try: " in str(error)
  assert len(lines) == 4
  assert lines[3].startswith("finiteness  loss1       not run: ")


def test_loss1_fails():
  g = guard()
  g.observe(result(1))
  lines, error = g.observe(result(2, loss=False))
  assert lines == ["finiteness  loss1       not finite  nan"]
  assert error is not None
  assert "step 2: non-finite loss1" in str(error)


def test_after_the_check_updates_are_left_out_and_counted_in_a_row():
  g = guard("max_skipped_steps=3")
  for step in (1, 2):
    g.observe(result(step))
  for step in (3, 4):
    lines, error = g.observe(result(step, gradients=LABELS[:1]))
    assert error is None
    assert lines == [
      f"step {step}: non-finite gradients in 1 of 4 arrays, first final_norm.scale; the update is skipped ({step - 2} of 3)"
    ]
  g.observe(result(5))  # a finite step restarts the count
  for step in (6, 7):
    assert g.observe(result(step, loss=False))[1] is None
  _, error = g.observe(result(8, loss=False))
  assert error is not None
  assert "3 updates in a row" in str(error)


@pytest.mark.parametrize(
  ("clip", "threshold", "failure", "left"),
  [
    ("running", 1, {"loss": False}, "the update is skipped"),
    ("running", 1, {"gradients": LABELS[:1]}, "{moved}. Use clip=exact to apply updates completely or not at all"),
    ("running", 0, {"gradients": LABELS[:1]}, "{moved}"),
    ("exact", 1, {"gradients": LABELS[:1]}, "the update is skipped"),
    ("exact", 1, {"parameters": LABELS[:1]}, "{moved}"),
    ("exact", 1, {"optimizer": MOMENTS[:1]}, "{moved}"),
  ],
)
def test_what_may_have_moved_is_told(clip, threshold, failure, left):
  """If the step updates layers in the backward pass, some layers may be updated before the failure is found. The message says
  if the update was skipped or applied only partly; this depends on ``clip``, which decides between one pass and two."""
  words = (f"clip={clip}", f"gradient_clipping_threshold={threshold}", "optimizer_in_backward=true", "max_skipped_steps=2")
  untouched = lambda failed: failed == "loss" or (clip == "exact" and failed == "gradients")
  g = FinitenessGuard(toy_config(*words, "finite_check_steps=0"), LABELS, STATE, 9, untouched)
  left = left.format(moved="the update was applied only partly: layers after this one in the model may already be updated")
  (line,), error = g.observe(result(1, **failure))
  assert error is None
  assert line.endswith(f"; {left} (1 of 2)")
  _, error = g.observe(result(2, **failure))
  assert error is not None
  ends = ("the update was not applied" if left.endswith("skipped") else left) + "; no checkpoint was written"
  assert error.what.endswith(f"; {ends}")


def test_every_step_is_checked_with_minus_1():
  g = guard("finite_check_steps=-1")
  for step in range(1, 7):
    assert g.checking
    assert g.observe(result(step))[1] is None
  assert g.observe(result(7, parameters=LABELS[:1]))[1] is not None


def test_off():
  g = guard("finite_check_steps=0", "max_skipped_steps=2")
  assert not g.checking
  assert g.report == {}
  assert g.observe(result(1)) == ([], None)
  lines, error = g.observe(result(2, loss=False))
  assert (len(lines), error) == (1, None)
  assert g.observe(result(3, loss=False))[1] is not None


def test_float16_overflow_is_a_skipped_step_until_the_scale_fits():
  g = guard("max_skipped_steps=5", dtype="float16")
  lines, error = g.observe(result(1, gradients=LABELS, scale=32768.0))
  assert error is None
  assert "at loss scale 32768, now halved (1 of 5)" in lines[-1]
  assert g.report["gradients"]["finite"] is False
  assert g.checking
  g.observe(result(2, scale=16384.0))
  assert g.report["gradients"] == {
    "result": "finite", "finite": True, "step": 2, "arrays": 4, "norm": 1.5, "loss_scale": 16384.0,
  }  # fmt: skip
  g.observe(result(3, scale=16384.0))
  assert g.report["loss1"]["step"] == 3


def test_float16_forward_overflow_is_no_matter_of_the_scale():
  _, error = guard(dtype="float16").observe(result(1, loss=False, scale=32768.0))
  assert error is not None
  assert "dtype=bfloat16" in str(error)


@pytest.mark.parametrize("words", [["finite_check_steps=0"], []])
def test_a_state_that_is_not_finite_ends_the_run_and_is_named(words):
  bad = ["mu.layers.10.mlp.up", "mu.layers.2.mlp.up"]
  lines, error = guard(*words).observe(result(1, optimizer=bad, state_optimizer=bad))
  assert error is not None
  assert str(error).startswith(
    "step 1: non-finite optimizer state in 2 of 8 arrays, first mu.layers.2.mlp.up already before the step"
  )
  assert "learning_rate" not in str(error)
  assert "earlier checkpoint" in str(error)
  assert lines[3:] == ([] if words else ["finiteness  loss1       not run: the previous step failed"])


def test_a_state_that_spoils_itself_is_not_saved():
  g = guard("finite_check_steps=0")
  spoilt = dataclasses.replace(result(1), finite=result(1, state_parameters=LABELS[:1]).finite)
  assert not spoilt.state_finite
  error = g.observe(spoilt)[1]
  assert error is not None
  assert "parameters in 1 of 4 arrays, first final_norm.scale after an update that was proved finite" in str(error)


def test_model_order():
  names = ["head.kernel", "final_norm.scale", "layers.10.a", "layers.2.b", "layers.2.a", "embedding.table"]
  assert sorted(names, key=model_order) == [
    "embedding.table", "layers.2.a", "layers.2.b", "layers.10.a", "final_norm.scale", "head.kernel",
  ]  # fmt: skip
