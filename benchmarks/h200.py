"""Compares training steps with Hugging Face transformers on one GPU: tokens per second and peak memory of both.

. gpu/env.sh; python benchmarks/h200.py --out h200.json                      every row; about 20 minutes on an H200
python benchmarks/h200.py --only gemma3-4b --documents 1 --out h200.json     some rows; the file keeps the others
python benchmarks/h200.py --only deepseek3-layer --documents 1 --peer compile     transformers with torch.compile
python benchmarks/h200.py --model gemma3-tiny max_target_length=64 --steps 2 --python TORCH/bin/python      a quick try on a CPU

Both sides train all parameters on the same device, one after the other, each in a separate process: random tokens in rows of
4096, float32 weights and AdamW, bfloat16 products, clipped gradients. Steps run back to back, and the time of a step is the
median of several groups. Our side runs as in training, with finiteness checks in every step. transformers runs under autocast
with SDPA and fused AdamW, without recomputation, and with torch.compile if the row says so. Rows have one document, or three
packed documents. transformers recognizes packed documents by positions that start again. "peak" is the peak memory of each
side's allocator, or of the process on a CPU. The Python that --python names must have torch.

deepseek3-layer is one layer of DeepSeek V3 at its released width, with 256 experts of which each token selects 8, and a
vocabulary of 1024. It has 11.5e9 parameters, whose float32 weights, gradients and moments do not fit any GPU here. Both sides
have weights and gradients in bfloat16 without autocast, and plain SGD without clipping: forward, backward and one pass over all
weights. The experts of transformers use grouped_mm, and a step that did not run it is an error. Both sides draw weights from
one distribution and keep the routers' bias at 0, so that the load of experts is similar ("fullest expert", times the mean).
"""

import argparse
import dataclasses
import json
import os
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

COMMON = ("max_target_length=4096", "dtype=bfloat16", "weight_dtype=float32", "opt_type=adamw")


@dataclass(frozen=True)
class Row:
  """A model that is measured.

  Attributes:
    name: name for --only.
    model, words: model and overrides of the configuration.
    peer: how transformers runs it, "compile" or "eager".
    wanted: the ratio that issue 13 asks for.
    experts: required implementation of transformers' experts; None for its default, without a check.
    note: text after the name in the table.
  """

  name: str
  model: str
  words: tuple[str, ...]
  peer: str
  wanted: float | None = None
  experts: str | None = None
  note: str = ""


_UNROLLED = ("per_device_batch_size=2", "remat_policy=none", "scan_layers=false", "num_vocab_tiling=1")
# transformers has no update of the routers' bias.
_LAYER = ("num_decoder_layers=1", "first_num_dense_layers=0", "vocab_size=1024", "routed_bias_update_rate=0")
_SGD = ("weight_dtype=bfloat16", "opt_type=sgd", "sgd_momentum=0", "gradient_clipping_threshold=0")
ROWS = (
  Row("gemma3-4b", "gemma3-4b", _UNROLLED, "compile", 1.35),
  Row("gemma3-4b-scanned", "gemma3-4b", ("per_device_batch_size=2", "remat_policy=minimal"), "compile", 1.35),
  Row("gemma3-4b-float8", "gemma3-4b", (*_UNROLLED, "matmul_dtype=float8"), "compile", 1.35),
  Row("31b-width", "gemma4-31b", (*_UNROLLED, "num_decoder_layers=6"), "compile", 1.5),
  Row("31b-width-float8", "gemma4-31b", (*_UNROLLED, "num_decoder_layers=6", "matmul_dtype=float8"), "compile", 1.5),
  Row("26b-width", "gemma4-26b", ("num_decoder_layers=6", "per_device_batch_size=1"), "eager", 2.0),
  Row(
    "deepseek3-layer",
    "deepseek3-671b",
    (*_UNROLLED, "per_device_batch_size=1", *_LAYER, *_SGD),
    "eager",
    experts="grouped_mm",
    note="bfloat16 weights, plain SGD",
  ),
)
HEADER = (
  "| model | rows | ours tokens/s | step | peak GiB | transformers tokens/s | step | peak GiB | ratio | wanted |\n"
  "|---|---|---|---|---|---|---|---|---|---|"
)


def ours(row: Row, documents: int, steps: int, groups: int) -> dict[str, Any]:
  """Measures our side in this process."""
  import jax
  import numpy as np
  from peer import GIB, resident, timed
  from step_cost import DRAWN, batch, require_updates

  from maxtext_like.config.load import load_config
  from maxtext_like.sharding.mesh import make_mesh
  from maxtext_like.training.step.program import make_program

  packing = f"packing={'true' if documents > 1 else 'false'}"
  config = load_config(row.model, [*COMMON, *row.words, packing]).config
  device = jax.local_devices()[0]
  program = make_program(config, mesh=make_mesh(config.mesh, [device]))
  compiled = program.lower_step().compile()
  state: Any = program.lower_init().compile()(np.uint32(0))
  data, known = batch(program, documents), DRAWN

  def step() -> Any:
    nonlocal state, known
    state, metrics = compiled(state, data, known)
    known = metrics["magnitude_bound"]
    looked_at = ("decided", "skipped", "moe_load_max")
    taken.append({name: metrics[name] for name in looked_at if name in metrics})  # stays on the device, so nothing waits
    return metrics

  taken: list[dict[str, Any]] = []
  found = timed(step, lambda metrics: float(jax.block_until_ready(metrics)["loss"]), steps, groups)
  require_updates(taken[-steps * groups :])
  peak = (device.memory_stats() or {}).get("peak_bytes_in_use")
  tokens = program.global_batch * config.training.max_target_length
  kernels = [str(use) for use in program.model.kernels]
  if program.model.grouped_product:
    kernels.append(program.model.grouped_product)
  return found | {
    "tokens": tokens, "tokens_per_second": tokens / found["seconds"], "kernels": kernels, "device": device.device_kind,
    "peak_gib": resident() if peak is None else peak / GIB,
    "fullest": float(taken[-1]["moe_load_max"]) if "moe_load_max" in taken[-1] else None,
    "versions": {"jax": jax.__version__, "platform": device.client.platform_version, "flags": os.environ.get("XLA_FLAGS", "")},
  }  # fmt: skip


def theirs(row: Row, documents: int, steps: int, groups: int, python: str) -> dict[str, Any]:
  """Measures transformers in a separate process."""
  from peer import ask, write_config

  from maxtext_like.config.load import load_config

  config = load_config(row.model, [*COMMON, *row.words]).config
  shape = [round(config.training.per_device_batch_size), config.training.max_target_length]
  with tempfile.TemporaryDirectory() as directory:
    write_config(config.model, config.precision.weight_dtype, directory)
    given = {"directory": directory, "shape": shape, "documents": documents, "steps": steps, "groups": groups}
    given |= {"compiled": row.peer == "compile", "experts": row.experts, "weight_dtype": config.precision.weight_dtype}
    given |= {"optimizer": config.training.opt_type, "momentum": config.training.sgd_momentum}
    return ask(python, "all_weights", given | {"clip": config.training.gradient_clipping_threshold})


def line(found: dict[str, Any]) -> str:
  """Returns a row of the table."""
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
  name = f"{row['name']}{row['note'] and ', '}{row['note']} ({row['peer']})"
  return f"| {name} | {rows} | {' | '.join(cells)} | {ratio} | {row['wanted'] or '-'} |"


def main() -> None:
  """Prints the table."""
  if sys.argv[1:2] == ["--alone"]:
    given = json.loads(sys.argv[2])
    given["row"] = Row(**given["row"] | {"words": tuple(given["row"]["words"])})
    print(json.dumps(ours(**given)))
    return
  from peer import apart

  parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
  parser.add_argument("--only", nargs="+", metavar="NAME", choices=[row.name for row in ROWS])
  parser.add_argument("--model", nargs="+", metavar="MODEL key=value", help="another row in place of all")
  parser.add_argument("--words", nargs="+", default=[], metavar="key=value", help="behind those of every row")
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
    more = {"name": " ".join([row.name, *args.words]), "words": (*row.words, *args.words), "peer": args.peer or row.peer}
    row = dataclasses.replace(row, **more)
    for documents in args.documents:
      given = {"row": asdict(row), "documents": documents, "steps": args.steps, "groups": args.groups}
      found = given | {
        "ours": apart([sys.executable, __file__, "--alone", json.dumps(given)]),
        "theirs": theirs(row, documents, args.steps, args.groups, args.python),
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
      kernels, fullest = entry[side].get("kernels", ["-"]), entry[side].get("fullest")
      said = [*kernels, *([f"fullest expert {fullest:.2f}"] if fullest else [])]
      print(f"{entry['row']['name']}, {entry['documents']}, {side}: {'; '.join(said)}")


if __name__ == "__main__":
  main()
