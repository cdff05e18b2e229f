"""A toy decoder with the interface of the real one, so that a complete train step compiles quickly."""

import dataclasses
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from maxtext_like.config.load import load_config
from maxtext_like.config.schema import Config
from maxtext_like.layers.moe.router_losses import RouterLosses
from maxtext_like.layers.param import Param, constant, init, stack
from maxtext_like.layers.sharding_rules import RULES
from maxtext_like.models.row_norms import row_peaks, state_peaks
from maxtext_like.training.objectives.language_modeling import LanguageModeling
from maxtext_like.training.optimizers.optimizer import make_optimizer
from maxtext_like.training.optimizers.schedule import make_schedule
from maxtext_like.training.step import loss_scale
from maxtext_like.training.step.rounding import StochasticRounding
from maxtext_like.training.step.train_step import TrainStep
from maxtext_like.training.step.trainable import select

V, D, LAYERS, B, T = 11, 5, 3, 4, 7


@dataclass(frozen=True)
class ToyDecoder:
  """x = table[tokens]; three times x = x + tanh(x @ kernel + bias) * scale; logits = x @ head. Biases never train."""

  dtype: str = "float32"

  cfg: ClassVar = SimpleNamespace(rules=RULES)
  router_losses: ClassVar = RouterLosses(), 0

  @property
  def stacks(self):
    return (SimpleNamespace(name="stack_0", first=0, layers=(None,), repeats=LAYERS),)

  def params(self) -> Any:
    layer = {
      "kernel": Param((D, D), ("embed", "mlp")),
      "scale": Param((D,), ("embed",), init=constant(1.0)),
      "bias": Param((D,), ("embed",), init=constant(0.0), trainable=False),
    }
    return {
      "embedding": {"table": Param((V, D), ("vocab", "embed"))},
      "stack_0": {"layer_0": stack(layer, LAYERS)},
      "head": {"kernel": Param((D, V), ("embed", "vocab"))},
    }

  def hidden(self, p, batch, probes=None):
    x = p["embedding"]["table"][batch["tokens"]].astype(self.dtype)
    for i in range(LAYERS):
      layer = {k: v[i].astype(self.dtype) for k, v in p["stack_0"]["layer_0"].items()}
      x = x + jnp.tanh(x @ layer["kernel"] + layer["bias"]) * layer["scale"]
    return x, {"clamped": jnp.zeros((), jnp.int32)}

  def head(self, p, x):
    return jnp.asarray(x @ p["head"]["kernel"].astype(self.dtype), jnp.float32)


def toy_decoder(dtype: str = "float32") -> Any:
  """Return the toy decoder, typed so that it can replace the real one."""
  return ToyDecoder(dtype)


def toy_config(*overrides: str) -> Config:
  """Return gemma4-tiny's configuration with a constant learning rate, no clipping and no weight decay, then ``overrides``."""
  plain = ["lr_schedule_type=constant", "warmup_steps_fraction=0", "gradient_clipping_threshold=0", "adam_weight_decay=0"]
  return load_config("gemma4-tiny", [*plain, f"max_target_length={T}", f"per_device_batch_size={B}", *overrides]).config


def toy_step(config: Config, chunks: int = 1, decoder: Any = None) -> tuple[Any, Any]:
  """Return (train step, initial state) of a toy decoder. The step is jitted unless ``decoder`` is passed."""
  jit = jax.jit if decoder is None else lambda step: step
  decoder = decoder or toy_decoder(config.precision.dtype)
  spec = decoder.params()
  t = config.training
  selection = select(decoder, spec, config.model, t.trainable_parameters_mask)
  optimizer = make_optimizer(t, selection.split(spec)[0], config.precision.weight_dtype)
  objective = LanguageModeling(decoder, t.z_loss_multiplier, chunks)
  step = TrainStep(
    apply=objective,
    objective=objective,
    selection=selection,
    optimizer=optimizer,
    schedule=make_schedule(t),
    clip=t.gradient_clipping_threshold,
    parts=t.gradient_accumulation_steps,
    grad_dtype=config.precision.grad_dtype,
    rounding=StochasticRounding(t.seed) if t.stochastic_rounding else None,
  )
  params = init(spec, jax.random.key(3))
  state = {"step": jnp.zeros((), jnp.int32), "params": params, "opt_state": optimizer.init(selection.split(params)[0])}
  if config.precision.dtype == "float16":
    state["loss_scale"] = loss_scale.initial(t.loss_scale_init)
  return jit(step), state


@jax.jit
def toy_look(params: Any, opt_state: Any) -> dict[str, jax.Array]:
  """Check a state of the toy, as ``TrainProgram.lower_check`` does. All parameters except the biases are trained."""
  layer = {**params["stack_0"]["layer_0"], "bias": None}
  parameters, optimizer = row_peaks(params), state_peaks(opt_state, params | {"stack_0": {"layer_0": layer}})
  known = jnp.stack([jnp.max(parameters), jnp.max(optimizer, initial=0.0)])
  norm = jnp.sqrt(sum(jnp.sum(jnp.square(x)) for x in jax.tree.leaves(params)))
  finite = {"state_parameters": jnp.isfinite(parameters), "state_optimizer": jnp.isfinite(optimizer)}
  return {"magnitude_bound": known, "param_norm": norm} | finite


def toy_batch(seed: int = 0, ignored: int = 5) -> dict[str, Any]:
  """Return random tokens. The first ``ignored`` targets do not count, so rows have unequal numbers of real targets."""
  rng = np.random.default_rng(seed)
  tokens = rng.integers(0, V, (B, T + 1)).astype(np.int32)
  targets = tokens[:, 1:].copy()
  targets.reshape(-1)[:ignored] = -100
  positions = np.broadcast_to(np.arange(T, dtype=np.int32), (B, T))
  return {"tokens": tokens[:, :-1], "targets": targets, "positions": positions, "segments": np.ones((B, T), np.int32)}


def with_precision(config: Config, **values: Any) -> Config:
  """Return the configuration with other precision values, without the checks between sections."""
  return dataclasses.replace(config, precision=dataclasses.replace(config.precision, **values))
