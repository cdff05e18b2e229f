"""Measures step times and the bytes that devices exchange, on meshes of one machine.

python benchmarks/scale.py                              1, 2, 4, 8 CPU devices, other meshes of 8, and two processes of 4
python benchmarks/scale.py qwen3-tiny emb_dim=256       the same for another model
python benchmarks/scale.py --gpus                       two GPUs of one host: the width of gemma4-31b, 6 layers; up to 8 minutes
python benchmarks/scale.py --gpus --only one fsdp       some of its rows

Steps run back to back without waiting for their results, as in training. The time of a step is the median of several groups of
steps. "of N times one" is the number of tokens per second divided by that of N single devices, each with as many tokens, in the
same run. Bytes are those that a device sends in a step, by kind of collective, from the text of the compiled program. An
all-gather or a reduce-scatter over N devices sends (N - 1) / N of the complete array, and an all-reduce twice that.

CPU devices are threads on the same cores, so their step times say nothing about a pod (docs/guides/parallelism.md).
"""

import argparse
import os
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass

import jax
import numpy as np
from step_cost import DRAWN, batch, require_updates

from maxtext_like.capacity.compiled_program import read_program
from maxtext_like.config.load import load_config
from maxtext_like.errors import ExitError
from maxtext_like.sharding import processes
from maxtext_like.sharding.mesh import in_words, make_mesh
from maxtext_like.training.step.program import make_program

CPU_MODEL = ["qwen3-tiny", "num_decoder_layers=4", "max_target_length=128"]
GPU_MODEL = ["gemma4-31b", "num_decoder_layers=6"]
LONG = "max_target_length=32768"


@dataclass(frozen=True)
class Row:
  """A mesh to measure.

  Attributes:
    name: name for --only.
    devices: number of devices; the first ones of this run are used.
    words: words of the command line, in addition to those of the model.
    against: name of the row of one device that its speed is compared with.
  """

  name: str
  devices: int
  words: tuple[str, ...] = ()
  against: str = "one"


def mesh(devices: int, each: float = 1, **axes: int) -> tuple[str, ...]:
  """Returns the words of a mesh, with ``each`` rows for each device."""
  sizes = {"ici_fsdp": 1} | axes
  return (f"per_device_batch_size={each}", *(f"{axis}_parallelism={size}" for axis, size in sizes.items()))


CPU_ROWS = [
  Row("one", 1, mesh(1)),
  *(Row(f"fsdp{n}", n, mesh(n, ici_fsdp=n)) for n in (2, 4, 8)),
  Row("data8", 8, mesh(8, ici_data=8)),
  Row("tensor2", 8, mesh(8, ici_fsdp=4, ici_tensor=2)),
  Row("context2", 8, mesh(8, ici_fsdp=4, ici_context=2)),
]
PROCESSES_ROWS = [
  Row("fsdp8", 8, mesh(8, ici_fsdp=8)),
  Row("slices", 8, mesh(8, ici_fsdp=4, dcn_data=2)),
]
GPU_ROWS = [
  Row("one", 1, mesh(1, 2)),
  Row("fsdp", 2, mesh(2, 2, ici_fsdp=2)),
  Row("tensor", 2, mesh(2, 2, ici_tensor=2)),
  Row("context", 2, (*mesh(2, 0.5, ici_context=2), LONG), "long"),
  Row("long", 1, (*mesh(1, 1), LONG), "long"),
]
HEADER = (
  "| devices | mesh | rows x tokens | step (middle half) | tokens/s | of N times one | MB sent, by kind |\n"
  "|---|---|---|---|---|---|---|"
)


def measure(words: Sequence[str], row: Row, groups: int, steps: int) -> tuple[list[float], int, str, str, str]:
  """Returns seconds of a step for each group, tokens of a step, "rows x length", the mesh in words, and the bytes sent."""
  config = load_config(words[0], [*words[1:], *row.words]).config
  program = make_program(config, mesh=make_mesh(config.mesh, jax.devices()[: row.devices]))
  compiled = program.lower_step().compile()
  state = program.lower_init().compile()(np.uint32(0))
  data, known = batch(program), DRAWN
  seconds: list[float] = []
  for group in range(groups + 1):
    begin = time.perf_counter()
    for _ in range(steps if group else 2):
      state, metrics = compiled(state, data, known)
      known = metrics["magnitude_bound"]
    loss = float(jax.block_until_ready(metrics)["loss"])  # waits for the last step, and so for all of them
    if group:
      seconds.append((time.perf_counter() - begin) / steps)
  if not np.isfinite(loss):
    raise ExitError(f"the loss is {loss}")
  require_updates([metrics])
  jax.tree.map(lambda x: x.delete(), (state, data))
  length = config.training.max_target_length
  names = in_words(dict(program.model.mesh.shape))
  return seconds, program.global_batch * length, f"{program.global_batch} x {length}", names, sent(compiled)


def sent(compiled: jax.stages.Compiled) -> str:
  """Returns the bytes that a device sends in a compiled step, by kind of collective."""
  text = compiled.as_text()
  if text is None:
    return "no text"
  try:
    found = read_program(text).transfers(1 << 30)
  except Exception as error:  # a text of an unknown compiler; the times are still valid
    return f"not read ({type(error).__name__}: {error})"
  kinds: dict[str, list[int]] = {}
  for t in found:
    of_kind = kinds.setdefault(t.kind, [0, 0])
    of_kind[0], of_kind[1] = of_kind[0] + t.bytes, of_kind[1] + t.times
  return ", ".join(f"{kind} {size / 1e6:,.2f} ({times} times)" for kind, (size, times) in kinds.items()) or "-"


def table(words: Sequence[str], rows: Sequence[Row], groups: int, steps: int) -> None:
  """Measures rows, and prints each one as soon as it is measured."""
  one: dict[str, float] = {}  # tokens per second of single devices by name
  later = {row.name for row in rows if row.devices == 1}
  waiting: dict[str, list[tuple[Row, float]]] = {}
  for row in rows:
    begin = time.perf_counter()
    try:
      seconds, tokens, shape, names, moved = measure(words, row, groups, steps)
    except (ExitError, jax.errors.JaxRuntimeError) as error:  # the other rows may fit
      say(f"| {row.devices} | {row.name} | failed: {str(error).splitlines()[0]} | | | | |")
      continue
    low, middle, high = statistics.quantiles(seconds, n=4)
    rate = tokens / middle
    if row.devices == 1:
      one[row.name] = rate
    share = "-"
    if row.against in one:
      share = f"{rate / row.devices / one[row.against]:.3f}"
    elif row.against in later:
      share = "below"
      waiting.setdefault(row.against, []).append((row, rate))
    say(f"| {row.devices} | {names} | {shape} | {middle:.4f} s ({low:.4f} to {high:.4f}) | {rate:,.0f} | {share} | {moved} |")
    for earlier, its in waiting.pop(row.name, []):
      say(f"| {earlier.devices} | {earlier.name}, above | | | | {its / earlier.devices / rate:.3f} | |")
    if not processes.index():
      print(f"{row.name}: {time.perf_counter() - begin:.0f} s in all", file=sys.stderr, flush=True)


def say(line: str) -> None:
  """Prints a line, once for all processes."""
  if processes.primary():
    print(line, flush=True)


def two_processes(words: list[str], args: argparse.Namespace) -> None:
  """Measures rows in two processes of this machine, and prints them."""
  with socket.create_server(("127.0.0.1", 0)) as free:
    address = f"127.0.0.1:{free.getsockname()[1]}"
  both = []
  for rank in range(2):
    place = {"JAX_COORDINATOR_ADDRESS": address, "JAX_NUM_PROCESSES": "2", "JAX_PROCESS_ID": str(rank)}
    command = [sys.executable, __file__, *words, f"--groups={args.groups}", f"--steps={args.steps}", "--joined"]
    command += ["--only", *args.only] if args.only else []
    both.append(subprocess.Popen(command, env=os.environ | place, stdout=subprocess.PIPE, text=True))
  for line in both[0].stdout or ():
    if line.startswith("|"):  # gloo prints as well
      print(line, end="", flush=True)
  both[1].communicate()
  if any(codes := [process.wait() for process in both]):
    raise SystemExit(f"the two processes ended with {codes}")


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
  parser.add_argument("words", nargs="*", metavar="MODEL key=value")
  parser.add_argument("--gpus", action="store_true", help="two GPUs in place of CPU devices")
  parser.add_argument("--only", nargs="+", metavar="NAME", help="rows of the table")
  parser.add_argument("--groups", type=int, default=4, help="of steps, for each row")
  parser.add_argument("--steps", type=int, default=4, help="of a group")
  parser.add_argument("--joined", action="store_true", help=argparse.SUPPRESS)  # set by two_processes
  args = parser.parse_args()
  words = args.words or (GPU_MODEL if args.gpus else CPU_MODEL)
  wanted = lambda rows: [row for row in rows if not args.only or row.name in args.only]
  rows = wanted(GPU_ROWS if args.gpus else PROCESSES_ROWS if args.joined else CPU_ROWS)
  if args.gpus:
    os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", ".92")
  else:
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 4 if args.joined else 8)
  if args.joined:
    processes.join({}, 60)
  else:
    print(f"jax {jax.__version__}, {jax.devices()[0].device_kind}, {' '.join(words)}\n\n{HEADER}", flush=True)
  with processes.Heartbeat(120, lambda what, code: os._exit(code)):
    table(words, rows, args.groups, args.steps)
  if not (args.joined or args.gpus) and wanted(PROCESSES_ROWS):
    print("\nTwo processes of 4 devices each:\n\n" + HEADER, flush=True)
    two_processes(words, args)


if __name__ == "__main__":
  main()
