"""Runs a case with transformers: creates a model with random weights, writes its checkpoint, and computes its results.

``tests.parity.modules`` imports torch and transformers, and says what to install if they are missing.
"""

import contextlib
import json
import shutil
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from tests.parity.draw import Case
from tests.parity.modules import torch, transformers

Arrays = dict[str, np.ndarray]
INDICES = ("input_ids", "labels", "attention_mask", "position_ids", "image_position_ids", "token_type_ids", "mm_token_type_ids")


def load(directory: Path) -> Any:
  """Loads the model in ``directory`` in float32, with the eager implementations of attention and experts.

  Raises:
    RuntimeError: transformers did not find a tensor, or did not expect one or its shape.
  """
  with (directory / "config.json").open() as file:
    nested = "text_config" in json.load(file)
  kind = transformers.AutoModelForImageTextToText if nested else transformers.AutoModelForCausalLM
  model, told = kind.from_pretrained(
    directory,
    dtype=torch.float32,
    attn_implementation="eager",
    experts_implementation="eager",
    output_loading_info=True,
  )
  empty = {name for name, tensor in model.state_dict().items() if not tensor.numel()}  # files may lack empty tensors
  wrong = {key: set(told[key]) - empty for key in ("missing_keys", "mismatched_keys", "unexpected_keys")}
  if any(wrong.values()):
    raise RuntimeError(f"transformers reads other tensors: {wrong}")
  return model.eval()


def make(case: Case, directory: Path) -> Any:
  """Writes the checkpoint of a case and returns the model that transformers loads from it."""
  with (directory / "config.json").open("w") as file:
    json.dump(case.config, file, indent=2)
  config = transformers.AutoConfig.from_pretrained(directory)
  nested = "text_config" in case.config
  kind = transformers.AutoModelForImageTextToText if nested else transformers.AutoModelForCausalLM
  model = kind.from_config(config, dtype=torch.float32, attn_implementation="eager")
  _randomize(model, case)
  saved = directory / "saved"
  model.to(torch.bfloat16 if case.stored == "bfloat16" else torch.float32).save_pretrained(saved)
  if case.form == "saved":
    shutil.copyfile(saved / "config.json", directory / "config.json")
  _write(case, model, saved, directory)
  shutil.rmtree(saved)
  return load(directory)


def _write(case: Case, model: Any, saved: Path, directory: Path) -> None:
  """Writes model.safetensors with the tensor names of the case's form."""
  from safetensors.torch import load_file, save_file

  tensors = load_file(saved / "model.safetensors")
  if case.form == "memory":
    tied = {name for name in model.state_dict() if name.endswith("lm_head.weight")} if _tied(model) else set()
    tensors = {name: tensor.contiguous() for name, tensor in model.state_dict().items() if name not in tied}
  if case.form == "hub" and case.config["model_type"] == "gemma3":
    tower = "vision_tower."  # released files have one more name segment
    tensors = {
      tower + "vision_model." + name.removeprefix(tower) if name.startswith(tower) else name: tensor
      for name, tensor in tensors.items()
    }
  save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})


def _tied(model: Any) -> bool:
  return model.get_output_embeddings().weight is model.get_input_embeddings().weight


def _randomize(model: Any, case: Case) -> None:
  """Draws every weight from a generator seeded by its name. No norm, bias, bound or scale is trivial."""
  gemma3 = case.config["model_type"].startswith("gemma3")
  tensors = dict(model.named_parameters()) | {
    name: tensor for name, tensor in model.named_buffers() if name in model.state_dict()
  }
  for name, tensor in tensors.items():
    generator = torch.Generator().manual_seed(zlib.crc32(f"{case.seed}/{case.salt}/{name}".encode()))
    normal = torch.randn(tensor.shape, generator=generator)
    uniform = torch.rand(tensor.shape, generator=generator)
    values = _values(name, tensor, normal, uniform, gemma3)
    if case.stored == "bfloat16":
      values = values.to(torch.bfloat16).float()
    with torch.no_grad():
      tensor.copy_(values)


def _values(name: str, tensor: Any, normal: Any, uniform: Any, gemma3: bool) -> Any:
  last = name.rpartition(".")[2]
  if last in ("input_min", "output_min"):
    return -0.5 - uniform
  if last in ("input_max", "output_max"):
    return 0.5 + uniform
  if last == "e_score_correction_bias":
    return 0.1 * normal
  if last == "layer_scalar":
    return 0.5 + uniform
  if last.endswith("bias"):
    return 0.2 * normal
  if tensor.ndim < 2:  # norms and scales; Gemma 3's norms in the text model add 1
    plus_one = gemma3 and "norm" in name and "layernorm1" not in name and "vision_tower" not in name
    return 0.2 * normal + (0.0 if plus_one else 1.0)
  if "position_embedding" in name:
    return 0.3 * normal
  if "embed_tokens" in name:  # Gemma multiplies by the square root of the width
    return normal * tensor.shape[-1] ** -0.5
  if last == "mm_input_projection_weight":
    return normal * tensor.shape[0] ** -0.5
  inputs = tensor.shape[1:] if tensor.ndim == 4 else tensor.shape[-1:]
  return normal * max(int(np.prod(inputs)), 1) ** -0.5  # without shared experts, their tensors are empty


def run(model: Any, arrays: Mapping[str, np.ndarray], *, gradients: bool = True) -> Arrays:
  """Returns logits, hidden states, loss and the gradient of every parameter, under the names of ``maxtext-like forward``."""
  text = model.model.language_model if hasattr(model.model, "language_model") else model.model
  dtype = next(model.parameters()).dtype
  inputs = {name: torch.tensor(array, dtype=torch.long if name in INDICES else dtype) for name, array in arrays.items()}
  with _recorded(text) as states:
    model.zero_grad()
    with torch.set_grad_enabled(gradients):
      out = model(**inputs, use_cache=False)
      if gradients:
        out.loss.backward()
  found = {name: _numpy(state) for name, state in states.items()} | {"logits": _numpy(out.logits), "loss": _numpy(out.loss)}
  if gradients:
    for name, parameter in model.named_parameters():
      found[f"grad.{name}"] = _numpy(torch.zeros_like(parameter) if parameter.grad is None else parameter.grad)
  return found


def _numpy(tensor: Any) -> np.ndarray:
  return tensor.detach().double().numpy()


@contextlib.contextmanager
def _recorded(text: Any) -> Iterator[dict[str, Any]]:
  """Records the input of the first layer, and the outputs of every layer and of the final norm."""
  states: dict[str, Any] = {}

  def keep(name: str):
    def hook(module: Any, inputs: Any, output: Any) -> None:
      states[name] = (output[0] if isinstance(output, tuple) else output).detach().clone()

    return hook

  def before(module: Any, inputs: Any, keywords: Any) -> None:
    states["hidden.embed"] = (inputs[0] if inputs else keywords["hidden_states"]).detach().clone()

  handles = [text.layers[0].register_forward_pre_hook(before, with_kwargs=True)]
  handles += [layer.register_forward_hook(keep(f"hidden.layer{i:02}")) for i, layer in enumerate(text.layers)]
  handles.append(text.norm.register_forward_hook(keep("hidden.final_norm")))
  try:
    yield states
  finally:
    for handle in handles:
      handle.remove()


def in_float64(model: Any, arrays: Mapping[str, np.ndarray], *, gradients: bool = True) -> Arrays:
  """Like ``run``, but in float64, including the operations that transformers does in float32."""

  class Wider(torch.overrides.TorchFunctionMode):
    """Replaces float32 by float64 where the code requests it."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
      kwargs = {key: torch.float64 if value is torch.float32 else value for key, value in (kwargs or {}).items()}
      if function is torch.Tensor.float:
        return args[0].double()
      if function in (torch.Tensor.to, torch.Tensor.type):
        args = tuple(torch.float64 if arg is torch.float32 else arg for arg in args)
      return function(*args, **kwargs)

  wide = model.double()
  try:
    with Wider():
      return run(wide, arrays, gradients=gradients)
  finally:
    model.float()


def nudged(model: Any, arrays: Mapping[str, np.ndarray], *, size: float, seed: int, gradients: bool = True) -> Arrays:
  """Like ``run``, but with every weight changed by a relative error of about ``size``, to measure the effect of rounding."""
  generator = torch.Generator().manual_seed(seed)
  kept = {name: tensor.clone() for name, tensor in model.state_dict().items()}
  try:
    with torch.no_grad():
      for parameter in model.parameters():
        parameter.mul_(1 + size * torch.randn(parameter.shape, generator=generator))
    return run(model, arrays, gradients=gradients)
  finally:
    model.load_state_dict(kept)
