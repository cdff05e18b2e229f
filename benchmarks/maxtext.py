"""Compares a training step on the CPU with MaxText's: the same model, batch and dtype, in separate processes in turns.

python benchmarks/maxtext.py --python MAXTEXT/bin/python [--rounds 3] [--steps 30] [remat_policy=full ...]

The model is gemma4-tiny with MaxText's layers of Gemma 4, 5 sliding ones and a global one. Both sides use 8 rows of 128 random
tokens, float32, AdamW and attention without a fused kernel; other keys have each side's defaults. Words at the end override our
configuration. The numbers are processor seconds of a step, user and system, which other programs on the machine hardly affect:
the mean of a process without its first steps, and the median of the rounds. The Python that --python names must have MaxText
installed (`pip install maxtext`, and the packages that maxtext.trainers.pre_train.train imports).
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

WARM = 3
"""Number of first steps that do not count."""

OURS = ("inhomogeneous_layer_cycle_interval=6", "packing=false")
THEIRS = (
  "model_name=gemma4-31b", "override_model_config=true", "hardware=cpu", "skip_jax_distributed_system=true",
  "base_num_decoder_layers=6", "base_emb_dim=128", "base_mlp_dim=384", "base_num_query_heads=4", "base_num_kv_heads=2",
  "head_dim=32", "global_head_dim=64", "global_num_kv_heads=1", "vocab_size=512", "sliding_window_size=32",
  "max_target_length=128", "per_device_batch_size=8", "dtype=float32", "weight_dtype=float32", "attention=dot_product",
  "dataset_type=synthetic", "enable_checkpointing=false", "use_multimodal=false", "run_name=step",
)  # fmt: skip


class Timed:
  """A compiled or jitted step that records the processor time of each call, until its results are ready."""

  def __init__(self, step: Any) -> None:
    self.step, self.seconds = step, []

  def lower(self, *args: Any, **kwargs: Any) -> Any:
    """Lowers the step."""
    return self.step.lower(*args, **kwargs)

  def __call__(self, *args: Any, **kwargs: Any) -> Any:
    import jax

    begin = os.times()
    found = jax.block_until_ready(self.step(*args, **kwargs))
    end = os.times()
    self.seconds.append((end.user - begin.user, end.system - begin.system))
    return found

  def means(self) -> list[float]:
    """Returns the mean user and system seconds of a step."""
    return [statistics.mean(x) for x in zip(*self.seconds[WARM:], strict=True)]


def ours(steps: int, words: list[str]) -> dict[str, Any]:
  """Measures our side in this process."""
  import jax
  import numpy as np
  from step_cost import DRAWN, batch, require_updates

  from maxtext_like.config.load import load_config
  from maxtext_like.training.step.program import make_program

  program = make_program(load_config("gemma4-tiny", [*OURS, *words]).config)
  step = Timed(program.lower_step().compile())
  state: Any = program.lower_init().compile()(np.uint32(0))
  data, known = batch(program, 1), DRAWN
  for _ in range(steps + WARM):
    state, metrics = step(state, data, known)
    known = metrics["magnitude_bound"]
  require_updates([metrics])  # if a step updated nothing, no later step does
  parameters = sum(x.size for x in jax.tree.leaves(state["params"]))
  return {"seconds": step.means(), "parameters": parameters, "jax": jax.__version__}


def theirs(steps: int) -> dict[str, Any]:
  """Measures MaxText in this process: its own training loop with a timed step."""
  import jax
  from maxtext.trainers.pre_train import train  # pyright: ignore[reportMissingImports]
  from maxtext.utils import train_utils  # pyright: ignore[reportMissingImports]

  made: list[Timed] = []
  jit = train_utils.jit_train_and_eval_step

  def timed(config: Any, model: Any, mesh: Any, state: Any, *args: Any, **kwargs: Any) -> Any:
    step, evaluate = jit(config, model, mesh, state, *args, **kwargs)
    made.append(Timed(step))
    found.update(parameters=sum(x.size for x in jax.tree.leaves(state["model"]) if x.dtype == "float32"))
    return made[0], evaluate

  found: dict[str, Any] = {"jax": jax.__version__}
  train_utils.jit_train_and_eval_step = timed
  base = Path(str(train.__file__)).parents[2] / "configs" / "base.yml"
  with tempfile.TemporaryDirectory() as folder:
    train.main(["train", str(base), *THEIRS, f"base_output_directory={folder}", f"steps={steps + WARM}"])
  return found | {"seconds": made[0].means()}


def apart(python: str, *words: str) -> dict[str, Any]:
  """Runs a side in a separate process."""
  done = subprocess.run([python, "-P", __file__, "--alone", *words], capture_output=True, text=True, env=environment())
  if done.returncode:
    raise SystemExit(f"{python} {' '.join(words)} failed:\n{done.stderr[-3000:]}")
  return json.loads(done.stdout.splitlines()[-1])


def environment() -> dict[str, str]:
  """Returns variables of a process in which this folder's ``profile.py`` does not hide Python's. BESIDE names the folder."""
  here = Path(__file__).resolve().parent
  return os.environ | {
    "JAX_PLATFORMS": "cpu",
    "PYTHONPATH": f"{os.environ.get('PYTHONPATH', '')}:{here.parent}",
    "BESIDE": str(here),
  }


def main() -> None:
  """Prints the table."""
  if sys.argv[1:2] == ["--alone"]:
    side, steps, *words = sys.argv[2:]
    if side == "ours":
      sys.path.append(os.environ["BESIDE"])
    print(json.dumps(ours(int(steps), words) if side == "ours" else theirs(int(steps))))
    return
  parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
  parser.add_argument("words", nargs="*", metavar="key=value")
  parser.add_argument("--python", required=True, help="that has MaxText")
  parser.add_argument("--rounds", type=int, default=3)
  parser.add_argument("--steps", type=int, default=30)
  args = parser.parse_args()
  found: dict[str, list[dict[str, Any]]] = {"ours": [], "maxtext": []}
  for _ in range(args.rounds):
    found["ours"].append(apart(sys.executable, "ours", str(args.steps), *args.words))
    found["maxtext"].append(apart(args.python, "theirs", str(args.steps)))
  print("| side | parameters | jax | user s | system s | together |\n|---|---|---|---|---|---|")
  for side, runs in found.items():
    user, system = (statistics.median(run["seconds"][i] for run in runs) for i in (0, 1))
    print(f"| {side} | {runs[0]['parameters']:,} | {runs[0]['jax']} | {user:.3f} | {system:.3f} | {user + system:.3f} |")
  pairs = zip(found["ours"], found["maxtext"], strict=True)
  print("ratio of pairs:", ", ".join(f"{sum(a['seconds']) / sum(b['seconds']):.2f}" for a, b in pairs))


if __name__ == "__main__":
  main()
