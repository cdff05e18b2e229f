"""Measures how fast weights load and checkpoints are saved and restored, and how much a save slows down training steps.

python benchmarks/loading.py gemma3-4b use_multimodal=false
python benchmarks/loading.py gemma3-4b use_multimodal=false num_decoder_layers=6 vocab_size=32768 --no-steps --folder DIR

It writes a Hugging Face checkpoint of random bfloat16 weights of the model, in files of `--shard` GB, to a new folder in
`--folder` (memory-backed by default, so that the disk does not count), and removes the folder at the end. The tables have, for
each part, the bytes of its files, wall-clock and processor seconds, and the growth of the process's memory (on a CPU that
includes the arrays). "again" is the second load, whose programs are compiled. Quantized rows are loads with `base_weights`.

The stages of a load are also timed separately, with the same chunks and threads. In a load they overlap.

The last table runs training steps with AdamW, alone and while a checkpoint is written in the background.
"""

import argparse
import functools
import os
import statistics
import tempfile
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import ml_dtypes
import numpy as np

from maxtext_like.checkpoint.adapters.adapted_weights import with_base
from maxtext_like.checkpoint.huggingface import device_fill
from maxtext_like.checkpoint.huggingface.config import export_config, read_config
from maxtext_like.checkpoint.huggingface.export import hub_names, write_json
from maxtext_like.checkpoint.huggingface.model_file import load_checkpoint_config
from maxtext_like.checkpoint.huggingface.tensors import flatten, tensor_table
from maxtext_like.checkpoint.huggingface.weights import Weights
from maxtext_like.checkpoint.huggingface.writer import Source, write
from maxtext_like.checkpoint.read_weights import read_weights
from maxtext_like.checkpoint.store.manager import CheckpointManager
from maxtext_like.config.load import load_config
from maxtext_like.layers.precision import Precision
from maxtext_like.models.build import build_decoder
from maxtext_like.models.model import Model, make_model
from maxtext_like.models.registry import FAMILIES
from maxtext_like.training.step.program import make_program


def write_checkpoint(directory: Path, model: str, words: list[str], shard: float) -> None:
  """Writes random weights of a model in transformers' format."""
  config = load_config(model, words).config
  decoder = build_decoder(config.model, Precision(weight_dtype="bfloat16"))
  table = tensor_table(decoder, FAMILIES[config.model.decoder_block].huggingface)
  names = hub_names(table, config.model, multimodal=False)
  rng = np.random.default_rng(0)
  numbers = (rng.standard_normal(1 << 24) * 0.02).astype(ml_dtypes.bfloat16)

  def values(shape: tuple[int, ...]) -> np.ndarray:
    return np.resize(np.roll(numbers, int(rng.integers(len(numbers)))), shape)

  directory.mkdir()
  write(
    directory, [Source(names[t.name], "BF16", t.shape, lambda t=t: values(t.shape)) for t in table], shard_size=int(shard * 1e9)
  )
  write_json(directory / "config.json", export_config(config.model, "bfloat16", None))


def resident() -> int:
  """Returns the bytes of memory of this process."""
  return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


class Peak:
  """Measures the growth of the process's memory, ten times a second."""

  def __enter__(self) -> "Peak":
    self._before = self.bytes = resident()
    self._end = threading.Event()
    self._thread = threading.Thread(target=self._watch)
    self._thread.start()
    return self

  def _watch(self) -> None:
    while not self._end.wait(0.1):
      self.bytes = max(self.bytes, resident())

  def __exit__(self, *error: object) -> None:
    self._end.set()
    self._thread.join()
    self.bytes = max(self.bytes, resident()) - self._before


def timed(name: str, size: int, run: Callable[[], Any]) -> Any:
  """Prints a line of the table. Returns the result of ``run``."""
  with Peak() as peak:
    wall, cpu = time.perf_counter(), time.process_time()
    result = jax.block_until_ready(run())
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
  rate, grown = size / 1e9 / wall, peak.bytes / 1e9
  print(f"| {name} | {size / 1e9:.2f} | {wall:.2f} | {rate:.2f} | {cpu:.2f} | {grown:.2f} |", flush=True)
  return result


def model_of(directory: Path, *words: str) -> Model:
  _, loaded = load_checkpoint_config(directory, ["weight_dtype=bfloat16", *words], length=8)
  model = make_model(loaded.config, runs_attention=False)
  return with_base(model, loaded.config.adapter) if loaded.config.adapter.base_weights else model


def size_of(directory: Path) -> int:
  return sum(path.stat().st_size for path in directory.rglob("*") if path.is_file())


def stages(directory: Path) -> None:
  """Times each stage of a load separately, for all tensors of a checkpoint that are not small."""
  model = model_of(directory)
  weights = Weights(directory, model.decoder, read_config(directory))
  places = dict(flatten(jax.tree.map(lambda x: x.sharding, model.abstract_params)))
  targets = [
    device_fill.Target(p.shape, np.dtype(p.dtype), places[path], weights.sources(path), done=lambda array: None)
    for path, p in flatten(model.decoder.params())
    if len(p.shape) > 2 or p.shape[0] * p.shape[-1] > 1 << 20
  ]
  chunks = [*device_fill.planned(weights.shards, targets)]
  blocks = device_fill.Blocks(device_fill.budget(weights.shards))
  device, size = jax.local_devices()[0], sum(chunk.bytes for chunk in chunks)

  def read(chunk: Any) -> np.ndarray:
    return device_fill.read_rows(weights.shards, chunk.source, chunk.start, chunk.stop, blocks)

  def over(do: Callable[[np.ndarray, Any], Any], prepare: Callable[[Any], np.ndarray]) -> tuple[float, float]:
    """Returns seconds and processor seconds of a stage, without its preparation, a few chunks at a time."""
    wall = cpu = 0.0
    with ThreadPoolExecutor(device_fill.threads()) as pool:
      for i in range(0, len(chunks), device_fill.threads()):
        some = chunks[i : i + device_fill.threads()]
        given = [*pool.map(prepare, some)]
        begin, used = time.perf_counter(), time.process_time()
        results = [*pool.map(do, given, some)]
        jax.block_until_ready([x for x in results if isinstance(x, jax.Array)])
        wall, cpu = wall + time.perf_counter() - begin, cpu + time.process_time() - used
        for array in {id(x): x for x in (*given, *results) if isinstance(x, np.ndarray)}.values():
          blocks.give_back(array)
    return wall, cpu

  nothing = lambda chunk: np.empty(0)
  moved = lambda rows, chunk: device_fill.in_our_order(rows, chunk.source.piece.order, blocks.take)
  ours = lambda chunk: moved(read(chunk), chunk)
  finite = jax.jit(lambda x: jax.numpy.isfinite(x).all())
  print("\n| stage, alone | seconds | GB/s | CPU seconds | share of CPU |\n|---|---|---|---|---|")
  found = {
    "read": over(lambda rows, chunk: read(chunk), nothing),
    "order of axes": over(moved, read),
    "copy to the device": over(lambda rows, chunk: jax.device_put(rows, device), ours),
    "copy, and finite check there": over(lambda rows, chunk: finite(jax.device_put(rows, device)), ours),
  }
  whole = sum(cpu for _, cpu in found.values())
  for name, (wall, cpu) in found.items():
    print(f"| {name} | {wall:.2f} | {size / 1e9 / wall:.2f} | {cpu:.2f} | {cpu / whole:.0%} |", flush=True)


def train_steps(folder: Path, model: str, words: list[str], steps: int) -> None:
  """Compares training steps during a save with steps without one."""
  import step_cost

  program = make_program(load_config(model, words).config)
  run = program.lower_step().compile()
  data = step_cost.batch(program)
  state, known = program.lower_init().compile()(np.uint32(0)), step_cost.DRAWN

  def step() -> float:
    nonlocal state, known
    begin = time.perf_counter()
    state, metrics = run(state, data, known)
    known = metrics["magnitude_bound"]
    jax.block_until_ready((state, metrics))
    return time.perf_counter() - begin

  for _ in range(3):
    step()
  alone, beside, waited = [], [], []
  manager = CheckpointManager(folder / "steps", config=None, interval=1, max_to_keep=1, patience_seconds=600.0)
  with manager:
    for number in range(1, 4):
      alone += [step() for _ in range(steps)]
      begin = time.perf_counter()
      manager.save(number, program.checkpoint_state(state))
      waited.append(time.perf_counter() - begin)
      while manager.busy:
        beside.append(step())
      manager.poll()
    size, told = size_of(folder / "steps"), manager.statistics
  a, b = statistics.median(alone), statistics.median(beside)
  print("\n| checkpoint | GB | written, GB/s | hashed, s | step waits, s | step alone | step next to it | ratio |")
  print("|---|---|---|---|---|---|---|---|")
  print(
    f"| AdamW | {size / 1e9:.2f} | {size / 1e9 * told.saved / told.write_seconds:.2f} | {told.hash_seconds / told.saved:.2f} "
    f"| {statistics.median(waited):.2f} | {a * 1e3:.1f} ms | {b * 1e3:.1f} ms ({len(beside)} steps) | {b / a:.4f} |"
  )


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
  parser.add_argument("model")
  parser.add_argument("words", nargs="*", metavar="key=value")
  parser.add_argument("--folder", default="/dev/shm" if os.path.isdir("/dev/shm") else None)
  parser.add_argument("--shard", type=float, default=4.0, help="GB of one file")
  parser.add_argument("--steps", type=int, default=20, help="training steps before each of three saves")
  parser.add_argument("--no-steps", action="store_true", help="leave out the training steps")
  args = parser.parse_args()
  with tempfile.TemporaryDirectory(dir=args.folder) as name:
    folder = Path(name)
    write_checkpoint(source := folder / "hf", args.model, args.words, args.shard)
    size = size_of(source)
    print(
      f"jax {jax.__version__}, {jax.devices()[0].device_kind}, {os.cpu_count()} cores, {args.model} {' '.join(args.words)}\n"
    )
    print("| part | GB | seconds | GB/s | CPU seconds | memory, GB |\n|---|---|---|---|---|---|")
    plain = model_of(source)
    timed("load", size, lambda: read_weights(source, plain))
    params = timed("load, again", size, lambda: read_weights(source, plain))
    for form in ("nf4", "int8"):
      model = model_of(source, "lora_rank=1", f"base_weights={form}")
      timed(f"load as {form}", size, lambda model=model: read_weights(source, model))
      timed(f"load as {form}, again", size, lambda model=model: read_weights(source, model))
    ours = folder / "ours"
    with CheckpointManager(ours / "checkpoints", config=plain.config, asynchronous=False, max_to_keep=1) as manager:
      timed("save", size, functools.partial(manager.save_and_wait, 0, {"params": params}))
    del params
    timed("restore", size, lambda: read_weights(ours, plain))
    stages(source)
    if not args.no_steps:
      train_steps(folder, args.model, args.words, args.steps)


if __name__ == "__main__":
  main()
