"""Training steps against Hugging Face transformers on one GPU: tokens a second and peak memory of both, row after row.

. gpu/env.sh; python benchmarks/h200.py --out h200.json                      every row; about 20 minutes on an H200
python benchmarks/h200.py --only gemma3-4b --documents 1 --out h200.json     a part of them; the file keeps the others
python benchmarks/h200.py --model gemma3-tiny max_target_length=64 --steps 2 --python TORCH/bin/python      a CPU, for a look

Both sides train all parameters on the same device, one after the other and each in a process of its own: random tokens in rows
of 4096, float32 weights and AdamW, bfloat16 products, gradients clipped, steps back to back, a step being the median of several
groups. Ours as a run has it, finiteness checked in every step. transformers under autocast with SDPA and fused AdamW, without
recomputation, through torch.compile where the row says so. Rows are one document each, or packed with three (for transformers
by positions that begin again, which is how it tells packed rows). "peak" is what each side's allocator held at most, on a CPU
what the process did. Torch has to be in the Python that --python names.
"""

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

COMMON = ("max_target_length=4096", "dtype=bfloat16", "weight_dtype=float32", "opt_type=adamw")
GIB = 2**30


@dataclass(frozen=True)
class Row:
  """A model that is measured.

  Attributes:
    name: for --only.
    model, words: of the configuration.
    peer: how transformers runs it, "compile" or "eager".
    wanted: the ratio that issue 13 asks for.
  """

  name: str
  model: str
  words: tuple[str, ...]
  peer: str
  wanted: float | None = None


ROWS = (
  Row("gemma3-4b", "gemma3-4b", ("per_device_batch_size=2", "remat_policy=minimal"), "compile", 1.35),
  Row("31b-width", "gemma4-31b", ("num_decoder_layers=6", "per_device_batch_size=2", "remat_policy=none"), "compile", 1.5),
  Row("26b-width", "gemma4-26b", ("num_decoder_layers=6", "per_device_batch_size=1"), "eager", 2.0),
)
HEADER = (
  "| model | rows | ours tokens/s | step | peak GiB | transformers tokens/s | step | peak GiB | ratio | wanted |\n"
  "|---|---|---|---|---|---|---|---|---|---|"
)


def starts(length: int, documents: int) -> list[int]:
  """Where the documents of a row begin, the later the longer: as ``step_cost.batch`` has them."""
  return [length * i * (i + 1) // (documents * (documents + 1)) for i in range(documents)]


def timed(step: Callable[[], Any], wait: Callable[[Any], float], steps: int, groups: int) -> dict[str, Any]:
  """Seconds of a step, the first and its compilation apart, and the last loss."""
  begin = time.perf_counter()
  wait(step())
  first = time.perf_counter() - begin
  wait(step())
  seconds: list[float] = []
  loss = float("nan")
  for _ in range(groups):
    begin = time.perf_counter()
    for _ in range(steps):
      found = step()
    loss = wait(found)
    seconds.append((time.perf_counter() - begin) / steps)
  return {"first_step_seconds": first, "seconds": statistics.median(seconds), "all_seconds": seconds, "loss": loss}


def resident() -> float:
  """GiB that this process held at most: where a device's allocator does not say."""
  return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / GIB


def ours(row: Row, documents: int, steps: int, groups: int) -> dict[str, Any]:
  """Our side, in this process."""
  import jax
  import numpy as np
  from step_cost import batch

  from maxtext_like.config.load import load_config
  from maxtext_like.sharding.mesh import make_mesh
  from maxtext_like.training.program import make_program

  packing = f"packing={'true' if documents > 1 else 'false'}"
  config = load_config(row.model, [*COMMON, *row.words, packing]).config
  device = jax.local_devices()[0]
  program = make_program(config, mesh=make_mesh(config.mesh, [device]))
  compiled = program.lower_step().compile()
  state: Any = program.lower_init().compile()(np.uint32(0))
  data, known = batch(program, documents), np.full(2, 1e4, np.float32)

  def step() -> Any:
    nonlocal state
    state, metrics = compiled(state, data, known)
    return metrics

  found = timed(step, lambda metrics: float(jax.block_until_ready(metrics)["loss"]), steps, groups)
  peak = (device.memory_stats() or {}).get("peak_bytes_in_use")
  tokens = program.global_batch * config.training.max_target_length
  kernels = [str(use) for use in program.model.kernels]
  if program.model.grouped_product:
    kernels.append(program.model.grouped_product)
  return found | {
    "tokens": tokens, "tokens_per_second": tokens / found["seconds"], "kernels": kernels, "device": device.device_kind,
    "peak_gib": resident() if peak is None else peak / GIB,
    "versions": {"jax": jax.__version__, "platform": device.client.platform_version, "flags": os.environ.get("XLA_FLAGS", "")},
  }  # fmt: skip


def theirs(row: Row, documents: int, steps: int, groups: int, directory: str, shape: list[int]) -> dict[str, Any]:
  """The side of transformers, in this process.

  Args:
    row, documents, steps, groups: as of ours.
    directory: of config.json.
    shape: rows and their length.
  """
  import torch  # pyright: ignore[reportMissingImports]
  import transformers  # pyright: ignore[reportMissingImports]

  device = "cuda" if torch.cuda.is_available() else "cpu"
  torch.manual_seed(0)
  config = transformers.AutoConfig.from_pretrained(directory)
  with torch.device(device):
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="sdpa").train()
  optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=device == "cuda")
  call = torch.compile(model) if row.peer == "compile" else model
  tokens = torch.randint(3, config.vocab_size, shape, device=device)
  inputs = {"input_ids": tokens, "labels": tokens, "use_cache": False}
  if documents > 1:  # positions of one document, given all the same, would cost torch.compile a mask
    begins = starts(shape[1], documents)
    ends = [*begins[1:], shape[1]]
    positions = torch.cat([torch.arange(end - begin) for begin, end in zip(begins, ends, strict=True)])
    inputs["position_ids"] = positions.to(device).expand(shape)

  def step() -> Any:
    with torch.autocast(device, torch.bfloat16):
      loss = call(**inputs).loss
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return loss.detach()

  found = timed(step, lambda loss: loss.item(), steps, groups)  # which waits for the device
  experts = getattr(config, "_experts_implementation", None)
  return found | {
    "tokens": shape[0] * shape[1], "tokens_per_second": shape[0] * shape[1] / found["seconds"],
    "kernels": [f"attention {model.config._attn_implementation}", *([f"experts {experts}"] if experts else []), row.peer],
    "device": torch.cuda.get_device_name() if device == "cuda" else "cpu",
    "peak_gib": torch.cuda.max_memory_allocated() / GIB if device == "cuda" else resident(),
    "versions": {
      "torch": torch.__version__, "transformers": transformers.__version__, "cuda": torch.version.cuda,
      "cudnn": torch.backends.cudnn.version() if device == "cuda" else None,
    },
  }  # fmt: skip


def apart(side: str, python: str, given: dict[str, Any]) -> dict[str, Any]:
  """A side in a process of its own, whose memory is its own; what it said where it failed."""
  # Beside torch.compile this folder must not be on the path: it imports the library's own module profile.
  command = [python, *(["-P"] if side == "theirs" else []), __file__, "--alone", side, json.dumps(given)]
  done = subprocess.run(command, capture_output=True, text=True, check=False)
  if done.returncode:
    said = [line for line in done.stderr.splitlines() if line.strip()] or ["?"]
    return {"failed": said[-1][:500], "said": "\n".join(said[-40:])}
  return json.loads(done.stdout.splitlines()[-1])


def write_config(row: Row, directory: str) -> list[int]:
  """config.json of a row's model for transformers; returns rows and their length."""
  from maxtext_like.checkpoint.huggingface.config import export_config
  from maxtext_like.config.load import load_config

  config = load_config(row.model, [*COMMON, *row.words]).config
  Path(directory, "config.json").write_text(json.dumps(export_config(config.model, "float32")))
  return [round(config.training.per_device_batch_size), config.training.max_target_length]


def line(found: dict[str, Any]) -> str:
  """A row of the table."""
  cells, rates = [], []
  for side in ("ours", "theirs"):
    one = found[side]
    if "failed" in one:
      cells += [f"failed: {one['failed'][:120]}", "-", "-"]
    else:
      rates.append(one["tokens_per_second"])
      cells += [f"{rates[-1]:,.0f}", f"{one['seconds']:.4f} s", f"{one['peak_gib']:.2f}"]
  ratio = f"{rates[0] / rates[1]:.2f}" if len(rates) == 2 else "-"
  rows = "one document" if found["documents"] == 1 else f"{found['documents']} documents"
  row = found["row"]
  name = f"{row['name']} ({row['peer']})"
  return f"| {name} | {rows} | {' | '.join(cells)} | {ratio} | {row['wanted'] or '-'} |"


def main() -> None:
  """Prints the table."""
  if sys.argv[1:2] == ["--alone"]:
    side, given = sys.argv[2], json.loads(sys.argv[3])
    given["row"] = Row(**given["row"] | {"words": tuple(given["row"]["words"])})
    print(json.dumps((ours if side == "ours" else theirs)(**given)))
    return
  parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
  parser.add_argument("--only", nargs="+", metavar="NAME", choices=[row.name for row in ROWS])
  parser.add_argument("--model", nargs="+", metavar="MODEL key=value", help="another row in place of all")
  parser.add_argument("--peer", choices=["compile", "eager"], help="how transformers runs, whatever the row says")
  parser.add_argument("--documents", nargs="+", type=int, default=[1, 3], help="of a row")
  parser.add_argument("--steps", type=int, default=8, help="of a group")
  parser.add_argument("--groups", type=int, default=3)
  parser.add_argument("--python", default=sys.executable, help="that has torch and transformers")
  parser.add_argument("--out", type=Path, help="a JSON file of everything; what is in it and not measured now is kept")
  args = parser.parse_args()
  os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", ".92")
  rows = [row for row in ROWS if not args.only or row.name in args.only]
  if args.model:
    rows = [Row(" ".join(args.model), args.model[0], tuple(args.model[1:]), "eager")]
  kept: list[dict[str, Any]] = json.loads(args.out.read_text()) if args.out and args.out.exists() else []
  print(HEADER, flush=True)
  for row in rows:
    row = Row(**asdict(row) | {"words": row.words, "peer": args.peer or row.peer})
    for documents in args.documents:
      given = {"row": asdict(row), "documents": documents, "steps": args.steps, "groups": args.groups}
      with tempfile.TemporaryDirectory() as directory:
        shape = write_config(row, directory)
        found = given | {
          "ours": apart("ours", sys.executable, given),
          "theirs": apart("theirs", args.python, given | {"directory": directory, "shape": shape}),
        }
      print(line(found), flush=True)
      same = lambda one: (one["row"]["name"], one["row"]["peer"], one["documents"])
      kept = [one for one in kept if same(one) != same(found)] + [found]
      if args.out:
        args.out.write_text(json.dumps(kept, indent=1) + "\n")
  sides = [one for entry in kept for one in (entry["ours"], entry["theirs"])]
  for one in sides:
    if "failed" in one:
      print(f"\nfailed: {one['said']}")
  for said in dict.fromkeys(json.dumps([one["device"], one["versions"]]) for one in sides if "device" in one):
    print(f"\n{said}", end="")
  print()
  for entry in kept:
    for side in ("ours", "theirs"):
      print(f"{entry['row']['name']}, {entry['documents']}, {side}: {'; '.join(entry[side].get('kernels', ['-']))}")


if __name__ == "__main__":
  main()
