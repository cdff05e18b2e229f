"""Measures text generation with random weights and prompts, compared with the memory bandwidth and with transformers.

python benchmarks/generation.py                                       every case, on one GPU
python benchmarks/generation.py --cases gemma3-4b/1 gemma3-4b/64      some of them
python benchmarks/generation.py --decode xla                          without the kernel for single tokens
python benchmarks/generation.py --torch PYTHON                        also transformers, by a Python that has torch
python benchmarks/generation.py --cases tiny                          a quick try on a CPU

Each case runs in a new process. The first pass compiles; the faster of two further passes is reported. All answers have the
same length. "step" is the time of one token of all rows: the difference from a pass with shorter answers, divided by the
number of missing tokens. "bound" is the number of tokens/s if a step took only the time to read the weights and the entries of
the caches once. For a mixture of experts it counts the weights that the rows of a batch choose on average, and for quantized
weights the stored bytes. --out writes all numbers as JSON.

In a case with a draft model, "step" is the time of a pass that checks its proposals, with the proposals. Random weights say
nothing about how many of them a trained model accepts: a pass that makes more tokens than the ratio of this time to that of a
plain step is faster.
"""

import argparse
import json
import math
import subprocess
import sys
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

GIB = 2**30
COMMON = ("dtype=bfloat16", "weight_dtype=bfloat16")


@dataclass(frozen=True, kw_only=True)
class Case:
  """A case to measure.

  Attributes:
    model, words: model and overrides of the configuration.
    rows: number of answers at the same time.
    prompt, new: number of tokens of every prompt and answer.
    form: "nf4" or "int8": storage of the weights; "" for bfloat16.
    transformers: also measure transformers.
    draft: a model that proposes 4 tokens before each pass; "" for none.
  """

  model: str
  words: tuple[str, ...] = ()
  rows: int = 64
  prompt: int = 128
  new: int = 256
  form: str = ""
  transformers: bool = False
  draft: str = ""


LAYERS = ("num_decoder_layers=4", "first_num_dense_layers=1", "num_experts=64", "n_routing_groups=8")
CASES = {
  "tiny/draft": Case(model="gemma3-tiny", rows=4, prompt=20, new=12, draft="gemma3-tiny"),
  "tiny": Case(model="gemma3-tiny", rows=4, prompt=20, new=12, transformers=True),
  "gemma3-4b/1": Case(model="gemma3-4b", rows=1),
  "gemma3-4b/64": Case(model="gemma3-4b", transformers=True),
  "qwen3-8b/1": Case(model="qwen3-8b", rows=1),
  "qwen3-8b/1, draft 0.6b": Case(model="qwen3-8b", rows=1, draft="qwen3-0.6b"),
  "gemma3-4b/256": Case(model="gemma3-4b", rows=256),
  "qwen3-8b/64": Case(model="qwen3-8b", transformers=True),
  "gemma4-26b/64": Case(model="gemma4-26b"),
  "gemma4-26b/nf4/1": Case(model="gemma4-26b", rows=1, form="nf4"),
  "gemma4-31b/nf4": Case(model="gemma4-31b", rows=16, form="nf4"),
  "gemma4-31b/int8": Case(model="gemma4-31b", rows=16, form="int8"),
  "deepseek3/4 layers": Case(model="deepseek3-671b", words=LAYERS),
  "deepseek3.2/4 layers": Case(model="deepseek3.2-671b", words=LAYERS, rows=8, prompt=8192),
}


def bytes_of_a_step(decoder: Any, params: Any, rows: int, length: float) -> tuple[float, float]:
  """Returns the bytes of weights and of caches that a step must read. ``length``: mean number of tokens of a row."""
  import jax

  own = {jax.tree_util.keystr(path): x.nbytes for path, x in jax.tree_util.tree_leaves_with_path(params)}
  weights = 0.0
  experts = next((layer.cfg.ffn.experts for layer in decoder.layers if layer.cfg.ffn.experts is not None), None)
  # The share of the experts that at least one of the rows chooses, if all are equally likely.
  share = 1.0 if experts is None else 1 - (1 - experts.num_experts_per_tok / experts.num_experts) ** rows
  for name, size in own.items():
    if "'vision'" in name or ("'embedding'" in name and not decoder.cfg.tied) or "'ple']['table'" in name:
      continue  # only rows of these tables are read
    weights += size * (share if "'experts'" in name else 1)
  cached = 0.0
  for layer in decoder.layers:
    slots, shapes = layer.mixer.cache_shapes(math.ceil(length))
    cached += rows * slots * sum(math.prod(shape) for shape in shapes.values()) * 2
  return weights, cached


def measure(case: Case, decode: str) -> dict[str, Any]:
  """Generates, and returns the measured numbers. ``decode``: "auto", or "xla" to leave out the kernel for single tokens."""
  import jax
  import numpy as np

  from maxtext_like.capacity.chips import find_chip
  from maxtext_like.config.load import load_config
  from maxtext_like.generation import shapes
  from maxtext_like.generation.sampling import Sampling
  from maxtext_like.generation.scheduler import Request, Scheduler
  from maxtext_like.generation.slots import TOKENS_PER_CALL, Draft
  from maxtext_like.generation.weights import DecodingWeights
  from maxtext_like.models.model import make_model

  config = load_config(case.model, [*COMMON, *case.words]).config
  model = make_model(config, runs_attention=False)
  decoder, note = model.decoder, model.decode
  if decode == "xla":
    decoder, note = without_kernel(decoder), ""
  make = lambda: model.lower_init().compile()(np.uint32(0))
  if case.form:
    base = quantized_base(model, case.form, decode)
    note = "; ".join(filter(None, (note, base.note)))
    make = lambda: base.attach(jax.jit(lambda: base.init(decoder.params(), jax.random.key(0)))())
  weights = DecodingWeights(decoder, make, model.platform)
  draw = np.random.default_rng(0).integers
  asked = [
    Request(tokens=draw(3, config.model.vocab_size, case.prompt).tolist(), limit=case.new, seed=0, stream=i)
    for i in range(case.rows)
  ]
  how: dict[str, Any] = {}
  if case.draft:
    proposing = make_model(load_config(case.draft, [*COMMON]).config, runs_attention=False)
    own = DecodingWeights(proposing.decoder, lambda: proposing.lower_init().compile()(np.uint32(1)), proposing.platform)
    how = {"draft": Draft(proposing.decoder, 4), "draft_params": own.for_decoding}
  passes: list[float] = []
  needed = bytes_of_a_step(decoder, weights.for_decoding, case.rows, case.prompt + case.new / 2)
  slots = max(shapes.MIN_ROWS, 1 << (case.rows - 1).bit_length())

  def run(requests: list[Request]) -> float:
    begin = time.perf_counter()
    turn = TOKENS_PER_CALL
    scheduler = Scheduler(decoder, weights.for_decoding, requests, Sampling(), frozenset(), largest=slots, turn=turn, **how)
    made = sum(len(piece.tokens) for pieces in scheduler.run() for piece in pieces)
    assert made == sum(r.limit for r in requests)
    passes.append(scheduler.made / max(1, scheduler.passes) if how else 1.0)
    return time.perf_counter() - begin

  # Shorter answers that need the same capacity of the caches, a multiple of 128, use the same compiled programs.
  fewer = max(1, case.new - (case.prompt + case.new - 1) % 128)
  first = run(asked)
  whole = min(run(asked) for _ in range(2))
  short = min(run([replace(r, limit=fewer) for r in asked]) for _ in range(2))
  step = (whole - short) / (case.new - fewer)
  prompts = whole - step * (case.new - 1)
  device = jax.local_devices()[0]
  chip = find_chip(device.device_kind)
  bandwidth = chip.memory if chip else None
  bound = None if bandwidth is None else case.rows / (sum(needed) / bandwidth)
  return {
    "device": device.device_kind, "jax": jax.__version__, "decode": note or "xla", "compile_seconds": first - whole,
    "tokens_per_second": case.rows * case.new / whole, "step_ms": step * max(passes) * 1e3, "prompt_seconds": prompts,
    "decode_tokens_per_second": case.rows / step, "weight_gb": needed[0] / 1e9, "cache_gb": needed[1] / 1e9,
    "tokens_per_pass": max(passes), "bound_tokens_per_second": bound, "share_of_bound": bound and case.rows / step / bound,
    "peak_gib": (device.memory_stats() or {}).get("peak_bytes_in_use", 0) / GIB,
  }  # fmt: skip


def without_kernel(decoder: Any) -> Any:
  """Returns the decoder with attention of single tokens in XLA."""

  def plain(layer: Any) -> Any:
    mixer = layer.cfg.mixer
    if not hasattr(mixer, "decode"):
      return layer
    return replace(layer, cfg=replace(layer.cfg, mixer=replace(mixer, decode="xla")))

  return replace(decoder, layers=tuple(map(plain, decoder.layers)))


def quantized_base(model: Any, form: str, decode: str) -> Any:
  """Returns the base in which the weight of every large product is quantized. ``decode``: as for ``measure``."""
  import jax

  from maxtext_like.layers.param import path_keys
  from maxtext_like.models import quantized_kernels
  from maxtext_like.models.naming import row_names
  from maxtext_like.models.quantized_base import make_base

  names = {
    name
    for path, p in jax.tree_util.tree_leaves_with_path(model.decoder.params())
    if len(p.shape) > 2 and p.contracts and "embedding" not in path_keys(path)
    for name in row_names(model.decoder, path_keys(path))
  }
  base = make_base(model.decoder, frozenset(names), form)  # pyright: ignore[reportArgumentType]
  if decode == "xla":
    return base
  return quantized_kernels.settle(base, dtype="bfloat16", mesh=model.mesh, platform=model.platform, cache=None)


def theirs(case: Case, python: str) -> dict[str, Any]:
  """Measures the same case with transformers."""
  import tempfile

  from peer import write_config

  from maxtext_like.config.load import load_config

  config = load_config(case.model, [*COMMON, *case.words]).config
  with tempfile.TemporaryDirectory() as folder:
    write_config(config.model, "bfloat16", folder)
    given = {"folder": folder, "rows": case.rows, "prompt": case.prompt, "new": case.new}
    return apart([python, "-P", __file__, "--peer", json.dumps(given)])


def peer(folder: str, rows: int, prompt: int, new: int) -> dict[str, Any]:
  """Generates with transformers, in a Python that has torch."""
  import torch  # pyright: ignore[reportMissingImports]
  import transformers  # pyright: ignore[reportMissingImports]

  device = "cuda" if torch.cuda.is_available() else "cpu"
  config = transformers.AutoConfig.from_pretrained(folder)
  torch.set_default_dtype(torch.bfloat16)
  with torch.device(device):
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
  ids = torch.randint(3, config.get_text_config().vocab_size, (rows, prompt), device=device)
  how = {"max_new_tokens": new, "min_new_tokens": new, "do_sample": True, "top_k": 0, "temperature": 1.0, "pad_token_id": 0}
  with torch.no_grad():
    seconds = []
    for _ in range(2):
      begin = time.perf_counter()
      model.generate(ids, attention_mask=torch.ones_like(ids), **how)
      if device == "cuda":
        torch.cuda.synchronize()
      seconds.append(time.perf_counter() - begin)
  peak = torch.cuda.max_memory_allocated() / GIB if device == "cuda" else 0.0
  return {"tokens_per_second": rows * new / seconds[-1], "peak_gib": peak, "transformers": transformers.__version__}


def apart(command: list[str]) -> dict[str, Any]:
  """Runs a program. Returns the JSON of its last line, or {"error": its last lines of stderr} if it failed."""
  done = subprocess.run(command, capture_output=True, text=True, check=False)
  if done.returncode:
    return {"error": " | ".join(line for line in done.stderr.splitlines()[-3:] if line.strip())}
  return json.loads(done.stdout.splitlines()[-1])


def line(name: str, case: Case, found: dict[str, Any]) -> str:
  """Returns a row of the table."""
  size = f"{case.rows} x ({case.prompt} + {case.new})"
  ours, other = found["ours"], found.get("transformers", {})
  if "error" in ours:
    return f"| {name} | {size} | failed: {ours['error'][:200]} |"
  bound = ours["bound_tokens_per_second"]
  shares = (f"{bound:,.0f}", f"{ours['share_of_bound']:.0%}") if bound else ("", "")
  theirs_text = f"{other['tokens_per_second']:,.0f}" if "tokens_per_second" in other else other.get("error", "")[:80]
  numbers = (f"{ours['tokens_per_second']:,.0f}", f"{ours['step_ms']:.2f}", f"{ours['decode_tokens_per_second']:,.0f}", *shares)
  rest = (f"{ours['prompt_seconds']:.2f}", f"{ours['peak_gib']:.1f}", f"{ours['compile_seconds']:.0f}", theirs_text)
  return f"| {name} | {size} | {' | '.join((*numbers, *rest))} |"


def main() -> None:
  """Prints the table."""
  parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
  parser.add_argument("--cases", nargs="+", choices=CASES, default=[name for name in CASES if "tiny" not in name])
  parser.add_argument("--torch", metavar="PYTHON", help="Python with torch and transformers")
  parser.add_argument("--decode", choices=["auto", "xla"], default="auto", help="xla: without the kernel for single tokens")
  parser.add_argument("--out", type=Path, help="file for all numbers")
  parser.add_argument("--one", help=argparse.SUPPRESS)
  parser.add_argument("--peer", help=argparse.SUPPRESS)
  args = parser.parse_args()
  if args.peer:
    print(json.dumps(peer(**json.loads(args.peer))))
    return
  if args.one:
    print(json.dumps(measure(CASES[args.one], args.decode)))
    return
  heads = (
    "case|rows x (prompt + new)|tokens/s|step ms|decode tokens/s|bound|share|prompts s|peak GiB|compile s|transformers tokens/s"
  )
  print(f"|{heads}|\n{'|---' * (heads.count('|') + 1)}|")
  every = {}
  for name in args.cases:
    case = CASES[name]
    found = {"ours": apart([sys.executable, __file__, "--one", name, "--decode", args.decode])}
    if args.torch and case.transformers:
      found["transformers"] = theirs(case, args.torch)
    every[name] = {"case": asdict(case), **found}
    print(line(name, case, found), flush=True)
    if args.out:
      args.out.write_text(json.dumps(every, indent=1) + "\n")


if __name__ == "__main__":
  main()
