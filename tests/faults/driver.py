"""A minimal training program that uses the checkpoint manager. Tests in tests/faults kill it and damage its files.

``python driver.py OUTPUT_DIR RUN_NAME key=value ...``; see ``DEFAULTS`` for the keys. It uses checkpoints, locks and signals
as the training loop does and contains nothing else. Importing it takes 300 ms more than importing jax. Its keys set the size
of the state and how the program ends.
"""

import json
import sys
import time

from maxtext_like.errors import ExitError
from maxtext_like.training.loop.signals import StopRequest
from maxtext_like.training.run.run_directory import RunDirectory

DEFAULTS = {
  "steps": 30,
  "interval": 5,
  "width": 64,  # the state has 3 * width**2 float32 numbers
  "heads": 4,  # a configuration key that changes no array shape
  "dtype": "float32",
  "keep": 3,
  "pause": 0.0,  # seconds of sleep in each step
  "linger": 0.0,  # seconds of sleep between the start of a save and the next step
  "end": "close",  # close: close the manager; return, exception, sys.exit: end so after the last save, closing nothing
  "nan_at": -1,
  "backoff": 0.05,
}


def main() -> None:
  """Trains to the end, or raises an ExitError."""
  output_dir, run_name, *pairs = sys.argv[1:]
  keys = dict(DEFAULTS)
  for pair in pairs:
    name, _, value = pair.partition("=")
    keys[name] = type(DEFAULTS[name])(value)
  with StopRequest() as stop, RunDirectory(output_dir, run_name) as run:
    train(keys, stop, run)


def train(keys, stop: StopRequest, run: RunDirectory) -> None:
  """Trains one run. Prints a line after every step for the test that watches the output."""
  import jax
  import jax.numpy as jnp
  import optax

  from maxtext_like.checkpoint.store.manager import CheckpointManager

  mesh = jax.make_mesh((jax.device_count(),), ("fsdp",), axis_types=(jax.sharding.AxisType.Auto,))
  optimizer = optax.adam(1e-2)
  width = keys["width"]

  def sharding(leaf):
    spec = jax.P("fsdp") if leaf.ndim and leaf.shape[0] % jax.device_count() == 0 else jax.P()
    return jax.sharding.NamedSharding(mesh, spec)

  def start():
    params = {"w": jax.random.normal(jax.random.key(0), (width, width)).astype(keys["dtype"]) / width**0.5, "none": None}
    return {"step": jnp.int32(0), "params": params, "opt_state": optimizer.init(params)}

  shapes = jax.eval_shape(start)
  shardings = jax.tree.map(sharding, shapes)
  like = jax.tree.map(lambda leaf, where: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=where), shapes, shardings)

  @jax.jit
  def train_step(state, key):
    def loss(params):
      x = jax.random.normal(key, (8, width), params["w"].dtype)
      return jnp.mean((x @ params["w"] - jnp.roll(x, 1, -1)) ** 2)

    value, gradients = jax.value_and_grad(loss)(state["params"])
    value = jnp.where(state["step"] + 1 == keys["nan_at"], jnp.nan, value)
    gradients = jax.tree.map(lambda leaf: leaf * (value / value), gradients)
    updates, opt_state = optimizer.update(gradients, state["opt_state"])
    new = {"step": state["step"] + 1, "params": optax.apply_updates(state["params"], updates), "opt_state": opt_state}
    return new, value, jnp.isfinite(optax.tree.sum(new["params"]))

  config = {"model": {"model_name": "driver", "width": width, "heads": keys["heads"]}, "training": {"opt_type": "adam"}}
  manager = CheckpointManager(
    run.checkpoints,
    config=config,
    interval=keys["interval"],
    max_to_keep=keys["keep"],
    backoff_seconds=keys["backoff"],
    fence=run.exclusive,
  )
  if keys["end"] == "close":
    with manager:
      loop(keys, stop, run, manager, like, shardings, start, train_step)
    return
  loop(keys, stop, run, manager, like, shardings, start, train_step)
  if keys["end"] == "exception":
    raise RuntimeError("as asked")
  if keys["end"] == "sys.exit":
    sys.exit(0)


def loop(keys, stop, run, manager, like, shardings, start, train_step) -> None:
  """Restores or initializes the state, then trains and saves."""
  import jax

  manager.preflight(like)
  restored = manager.restore(like)
  key = jax.random.key(7)
  if restored is None:
    state, step = jax.jit(start, out_shardings=shardings)(), 0
  else:
    state, step = restored.state, restored.step
    if restored.extra["next"] != step:
      raise RuntimeError("the data is elsewhere than the step")
  print(f"start {step}", flush=True)
  show_hash("restored", state)
  if step >= keys["steps"]:
    print(f"already at step {step} of {keys['steps']}")
    return
  saved, finite = step, True
  with open(run.path / "metrics.jsonl", "a", encoding="utf-8") as metrics:
    while step < keys["steps"]:
      state, loss, finite = train_step(state, jax.random.fold_in(key, step))
      step += 1
      stop.training = True
      metrics.write(json.dumps({"step": step, "loss": float(loss)}) + "\n")
      metrics.flush()
      print(f"step {step}", flush=True)
      time.sleep(keys["pause"])
      manager.poll()
      if manager.due(step) and manager.save(step, state, {"next": step}, finite=finite):
        saved = step
        time.sleep(keys["linger"])
      if stop.should_stop(step):
        manager.save_and_wait(step, state, {"next": step}, finite=finite)
        raise stop.error(step, str(run.checkpoints / str(step)))
  if keys["end"] != "close":
    assert saved == step, "the last step is to be under way when the program ends"
    return
  if not manager.save_and_wait(step, state, {"next": step}, finite=finite):
    print("final state refused")
  show_hash("saved", state)
  print(f"statistics {json.dumps(manager.statistics.__dict__)}")


def show_hash(what, state) -> None:
  """Prints a hash over all bytes of a state. It does not depend on the sharding."""
  import jax
  import xxhash

  digest = xxhash.xxh3_128()
  for leaf in jax.device_get(jax.tree.leaves(state)):
    digest.update(leaf.tobytes())
  print(f"hash {what} {digest.hexdigest()}")


def guarded_main() -> int:
  """Returns the exit code. Exceptions other than ExitError are not caught."""
  try:
    main()
  except ExitError as error:
    print(f"error: {error}", file=sys.stderr)
    return error.exit_code
  return 0


if __name__ == "__main__":
  sys.exit(guarded_main())
