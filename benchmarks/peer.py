"""Runs training steps of transformers for comparison, on random weights and tokens, with peft and bitsandbytes for an adapter.

Do not run this file directly: benchmarks/h200.py (all parameters) and benchmarks/lora.py (an adapter) run it through ``ask``,
with a Python that has torch. The process contains only this side, so its memory can be measured. From this project it needs
only a config.json.

A step of an adapter is that of ``Trainer`` with ``get_peft_model``, bf16 and gradient_checkpointing: autocast to bfloat16 with
base weights in bfloat16, nf4 or int8 and adapter weights in float32, SDPA, recomputation of every layer in the backward pass,
clipped gradients, and AdamW for the adapter. Every ``nn.Linear`` except the head becomes a layer of bitsandbytes with the
settings of ``BitsAndBytesConfig``: nf4 in blocks of 64 with double quantization and products in bfloat16, or int8 with outliers
above 6 separate. The casts of norms and embeddings to float32 in ``prepare_model_for_kbit_training`` are left out, because they
would cost memory. Modules are drawn and quantized one after the other, so the complete model is never in memory in 16 bits.
"""

import json
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

GIB = 2**30


def starts(length: int, documents: int) -> list[int]:
  """Returns the starts of a row's documents, of which later ones are longer, as in ``step_cost.batch``."""
  return [length * i * (i + 1) // (documents * (documents + 1)) for i in range(documents)]


def timed(step: Callable[[], Any], wait: Callable[[Any], float], steps: int, groups: int) -> dict[str, Any]:
  """Returns the seconds of a step, those of the first step with its compilation, and the last loss."""
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
  """Returns the peak memory of this process in GiB, for devices whose allocator does not report it."""
  return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / GIB


def apart(command: list[str]) -> dict[str, Any]:
  """Runs a program in a separate process. Returns the JSON of its last line, or its error output if it failed."""
  done = subprocess.run(command, capture_output=True, text=True, check=False)
  if done.returncode:
    said = [line for line in done.stderr.splitlines() if line.strip()] or [f"exit code {done.returncode}"]
    return {"failed": said[-1][:500], "said": "\n".join(said[-40:])}
  return json.loads(done.stdout.splitlines()[-1])


def ask(python: str, kind: str, given: dict[str, Any]) -> dict[str, Any]:
  """Runs "all_weights" or "adapter" with its arguments in a Python that has torch."""
  # -P keeps this folder off the path, because torch.compile imports Python's module ``profile``.
  return apart([python, "-P", __file__, kind, json.dumps(given)])


def write_config(model: Any, dtype: str, directory: str) -> None:
  """Writes the config.json of a ``ModelConfig`` for transformers, without a vision tower."""
  from maxtext_like.checkpoint.huggingface.config import export_config

  Path(directory, "config.json").write_text(json.dumps(export_config(model, dtype)))


def all_weights(
  directory: str,
  shape: list[int],
  documents: int,
  steps: int,
  groups: int,
  compiled: bool,
  experts: str | None = None,
  weight_dtype: str = "float32",
  optimizer: str = "adamw",
  momentum: float = 0.0,
  clip: float = 1.0,
) -> dict[str, Any]:
  """Measures training of all parameters in this process. float32 weights run under autocast, others without it.

  Args:
    directory: folder of config.json.
    shape: rows and their length.
    documents: number of documents in a row.
    steps, groups: as for ``timed``.
    compiled: use torch.compile.
    experts: required implementation of experts, with which a step must run grouped_mm; None for transformers' default,
      without a check.
    weight_dtype: dtype of the parameters.
    optimizer, momentum: "adamw", or "sgd" with this momentum.
    clip: largest norm of the gradients; 0 for no clipping.

  Raises:
    RuntimeError: an implementation of experts is required, and a step did not run grouped_mm.
  """
  import torch  # pyright: ignore[reportMissingImports]
  import transformers  # pyright: ignore[reportMissingImports]

  device = "cuda" if torch.cuda.is_available() else "cpu"
  torch.manual_seed(0)
  config = transformers.AutoConfig.from_pretrained(directory)
  asked = {"attn_implementation": "sdpa", **({"experts_implementation": experts} if experts else {})}
  with torch.device(device):
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=getattr(torch, weight_dtype), **asked).train()
  if experts:
    _draw_by_width(model)
  if optimizer == "sgd":  # one array at a time: experts have more than 2^31 numbers, and the fused SGD has 32-bit indices
    rule = torch.optim.SGD(model.parameters(), lr=1e-5, momentum=momentum, foreach=False)
  elif optimizer == "adamw":
    rule = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=device == "cuda")
  else:
    raise ValueError(f"no optimizer here is {optimizer}")
  call = torch.compile(model) if compiled else model
  tokens = torch.randint(3, config.vocab_size, shape, device=device)
  inputs = {"input_ids": tokens, "labels": tokens, "use_cache": False}
  if documents > 1:  # for one document, torch.compile would compute a mask from them
    begins = starts(shape[1], documents)
    ends = [*begins[1:], shape[1]]
    positions = torch.cat([torch.arange(end - begin) for begin, end in zip(begins, ends, strict=True)])
    inputs["position_ids"] = positions.to(device).expand(shape)

  step = _step(call, inputs, list(model.parameters()), rule, device, autocast=weight_dtype == "float32", clip=clip)
  found = timed(step, lambda loss: loss.item(), steps, groups)
  found |= _about(model, shape, found["seconds"], device)
  kernels = [*_kernels(model), "compile" if compiled else "eager"]
  if experts:
    kernels += _grouped_products(step, config.num_local_experts, device)
    found["fullest"] = _fullest(model, inputs)
  return found | {"kernels": kernels}


def adapter(
  directory: str, shape: list[int], form: str, rank: int, alpha: float, modules: list[str], parameters: list[str], steps: int
) -> dict[str, Any]:
  """Measures training of a LoRA adapter over base weights of a form, in this process.

  Args:
    directory, shape: as for ``all_weights``.
    form: form of the base weights, "bfloat16", "nf4" or "int8".
    rank, alpha, modules, parameters: options of peft's ``LoraConfig``; parameters are arrays of experts.
    steps: number of measured steps. Each is waited for.
  """
  import peft  # pyright: ignore[reportMissingImports]
  import torch  # pyright: ignore[reportMissingImports]
  import transformers  # pyright: ignore[reportMissingImports]

  device = "cuda" if torch.cuda.is_available() else "cpu"
  torch.manual_seed(0)
  config = transformers.AutoConfig.from_pretrained(directory)
  with torch.device("meta"):
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, attn_implementation="sdpa")
  begin = time.perf_counter()
  with torch.no_grad():
    _draw(model, model, form, device)
  model.tie_weights()
  model.requires_grad_(False)
  model.is_loaded_in_4bit, model.is_loaded_in_8bit = form == "nf4", form == "int8"  # peft reads these
  wide = sorted({name.rpartition(".")[2] for name, p in model.named_parameters() if p.ndim > 2})
  model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
  lora = peft.LoraConfig(
    r=rank, lora_alpha=alpha, target_modules=modules, target_parameters=parameters or None, task_type="CAUSAL_LM"
  )
  model = peft.get_peft_model(model, lora).train()
  drawn, seconds = _peak(device), time.perf_counter() - begin
  trained = [p for p in model.parameters() if p.requires_grad]
  optimizer = torch.optim.AdamW(trained, lr=1e-4, fused=device == "cuda")
  tokens = torch.randint(3, config.vocab_size, shape, device=device)
  inputs = {"input_ids": tokens, "labels": tokens, "use_cache": False}
  found = timed(_step(model, inputs, trained, optimizer, device), lambda loss: loss.item(), 1, steps)
  maps = sum(name.endswith(".lora_A") for name, _ in model.named_modules())
  about = _about(model, shape, found["seconds"], device)
  about["versions"] |= {"peft": peft.__version__}
  if form != "bfloat16":
    about["versions"] |= {"bitsandbytes": _bitsandbytes().__version__}
  return found | about | {
    "drawn_gib": drawn, "init_seconds": seconds, "maps": maps, "kernels": [*_kernels(model), "eager"],
    "trained": sum(p.numel() for p in trained), "dtypes": sorted({str(p.dtype).removeprefix("torch.") for p in trained}),
    "unquantized": wide if form != "bfloat16" else [],
  }  # fmt: skip


def _draw(module: Any, owner: Any, form: str, device: str) -> None:
  """Draws the arrays of a module on the device "meta" with the initialization of ``owner``, the model that contains it."""
  import transformers  # pyright: ignore[reportMissingImports]
  from torch import nn  # pyright: ignore[reportMissingImports]

  for name, child in list(module.named_children()):
    _draw(child, child if isinstance(child, transformers.PreTrainedModel) else owner, form, device)
    if form != "bfloat16" and type(child) is nn.Linear and child is not owner.get_output_embeddings():
      setattr(module, name, _quantized(child, form, device))
  module.to_empty(device=device, recurse=False)
  owner._init_weights(module)


def _quantized(linear: Any, form: str, device: str) -> Any:
  """Returns the layer of bitsandbytes that replaces a layer of torch."""
  import torch  # pyright: ignore[reportMissingImports]

  nn = _bitsandbytes().nn
  sizes = linear.in_features, linear.out_features, linear.bias is not None
  with torch.device("meta"):
    if form == "nf4":
      new = nn.Linear4bit(*sizes, torch.bfloat16, compress_statistics=True, quant_type="nf4")
    else:
      new = nn.Linear8bitLt(*sizes, has_fp16_weights=False, threshold=6.0)
  if form == "nf4":
    new.weight = nn.Params4bit(
      linear.weight.data, requires_grad=False, compress_statistics=True, quant_type="nf4", module=new
    ).to(device)  # fmt: skip
  else:  # quantized only by the copy from the host to the device
    new.weight = nn.Int8Params(linear.weight.data.cpu(), requires_grad=False, has_fp16_weights=False).to(device)
  if linear.bias is not None:
    new.bias = linear.bias
  return new


def _bitsandbytes() -> Any:
  import bitsandbytes  # pyright: ignore[reportMissingImports]

  return bitsandbytes


def _draw_by_width(model: Any) -> None:
  """Draws matrices again as this project does, also embeddings: with variance 1 / (number of terms of a sum over them).

  The load of experts depends on it, because at the start of a row attention adds more to the residual stream than tokens do.
  """
  from torch import nn  # pyright: ignore[reportMissingImports]

  for p in model.parameters():
    if p.ndim > 1:
      nn.init.normal_(p, std=p.shape[-1] ** -0.5)


def _grouped_products(step: Callable[[], Any], experts: int, device: str) -> list[str]:
  """Returns the operations that computed the experts and the attention of a step, as counted by torch's profiler.

  If transformers cannot call grouped_mm, it loops over the experts without a warning. grouped_mm also falls back without a
  warning, to a plain product for each expert, if it has no kernel for a GPU or a dtype. Both raise RuntimeError.
  """
  from torch import profiler  # pyright: ignore[reportMissingImports]

  with profiler.profile(activities=[profiler.ProfilerActivity.CPU]) as profile:
    step().item()
  counts = {event.key: event.count for event in profile.key_averages()}
  grouped = {name: n for name, n in counts.items() if "grouped_mm" in name}
  calls, products = counts.get("aten::_grouped_mm", 0), sum(counts.get(f"aten::{name}", 0) for name in ("mm", "bmm", "addmm"))
  loop = device == "cuda" and products >= calls * experts / 2  # a CPU always has this loop
  if not calls or any("fallback" in name for name in grouped) or loop:
    raise RuntimeError(f"a step was to have grouped_mm for its {experts} experts and had {grouped}, {products} other products")
  attended = [name for name in counts if name.startswith("aten::_scaled_dot_product") and "backward" not in name]
  return [f"a step has {calls} aten::_grouped_mm and {products} other products", *attended]


def _fullest(model: Any, inputs: dict[str, Any]) -> float:
  """Returns the tokens of the fullest expert of all layers, divided by the mean."""
  import torch  # pyright: ignore[reportMissingImports]

  loads: list[Any] = []

  def look(module: Any, given: tuple[Any, ...]) -> None:
    loads.append(torch.bincount(given[1].flatten(), minlength=module.num_experts))  # hidden states, chosen, weights

  hooks = [m.register_forward_pre_hook(look) for m in model.modules() if hasattr(m, "gate_up_proj")]
  with torch.no_grad():
    model(**inputs)
  for hook in hooks:
    hook.remove()
  return max((load.max() * len(load) / load.sum()).item() for load in loads)


def _step(
  call: Any, inputs: dict[str, Any], trained: list[Any], optimizer: Any, device: str, autocast: bool = True, clip: float = 1.0
) -> Callable[[], Any]:
  """Returns a function that runs a step (forward, backward, clipping, update) and returns the loss, on the device."""
  import torch  # pyright: ignore[reportMissingImports]

  def step() -> Any:
    with torch.autocast(device, torch.bfloat16, enabled=autocast):
      loss = call(**inputs).loss
    loss.backward()
    if clip:
      torch.nn.utils.clip_grad_norm_(trained, clip)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return loss.detach()

  return step


def _peak(device: str) -> float:
  import torch  # pyright: ignore[reportMissingImports]

  return torch.cuda.max_memory_allocated() / GIB if device == "cuda" else resident()


def _kernels(model: Any) -> list[str]:
  experts = getattr(model.config, "_experts_implementation", None)
  return [f"attention {model.config._attn_implementation}", *([f"experts {experts}"] if experts else [])]


def _about(model: Any, shape: list[int], seconds: float, device: str) -> dict[str, Any]:
  """Returns the entries that every row of this side has."""
  import torch  # pyright: ignore[reportMissingImports]
  import transformers  # pyright: ignore[reportMissingImports]

  return {
    "tokens": shape[0] * shape[1], "tokens_per_second": shape[0] * shape[1] / seconds, "peak_gib": _peak(device),
    "device": torch.cuda.get_device_name() if device == "cuda" else "cpu",
    "versions": {
      "torch": torch.__version__, "transformers": transformers.__version__, "cuda": torch.version.cuda,
      "cudnn": torch.backends.cudnn.version() if device == "cuda" else None,
    },
  }  # fmt: skip


if __name__ == "__main__":
  print(json.dumps({"all_weights": all_weights, "adapter": adapter}[sys.argv[1]](**json.loads(sys.argv[2]))))
