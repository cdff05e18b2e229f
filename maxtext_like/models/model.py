"""A model on its devices: what follows from a configuration for whoever runs it, trained or not. Holds no array.

It lies with the models and not with the trainer, because generation, forward, import and export need all of it and no
optimizer; the trainer's program is built around one.
"""

import dataclasses
import functools
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding

from maxtext_like.config.schema import Config
from maxtext_like.errors import UserError
from maxtext_like.layers.decoder import Decoder
from maxtext_like.layers.moe.expert_parallel import SLACK
from maxtext_like.layers.param import abstract, init, shardings
from maxtext_like.layers.partition import Mesh
from maxtext_like.layers.sharding_rules import Rules
from maxtext_like.models import grouped_kernels, norm_kernels
from maxtext_like.models.attention_kernels import KernelUse, plain_tower, settle
from maxtext_like.models.build import build_decoder, precision_of
from maxtext_like.models.float8_products import require_units
from maxtext_like.models.quantised_base import QuantisedBase
from maxtext_like.sharding.divisibility import copied, require_even
from maxtext_like.sharding.mesh import batch_sharding, make_mesh, use_mesh

Shapes = dict[str, jax.ShapeDtypeStruct]


@dataclass(frozen=True, eq=False)
class Model:
  """A configuration's decoder, where its arrays lie and what it runs on.

  Attributes:
    config: of it.
    mesh: devices in a grid; an abstract mesh has sizes only, so that its programs can be lowered and not run.
    decoder: parameters and equations.
    platform: "cpu", "gpu" or "tpu", where it runs.
    kernels: what the attention layers run on, and why; empty where no attention over whole rows is called.
    base: how its weights are stored below an adapter; None: as they are declared.
    grouped_verdict: what came of the self-test of the experts' kernel, in words.
    norms: what makes the gradients of norms, in words; "" where that is XLA.
  """

  config: Config
  mesh: Mesh
  decoder: Decoder
  platform: str
  kernels: tuple[KernelUse, ...] = ()
  base: QuantisedBase | None = None
  grouped_verdict: str = ""
  norms: str = ""

  @property
  def grouped_product(self) -> str | None:
    """What multiplies tokens with their experts, in how many layers, and whether they travel; None: there are no experts."""
    layers = self.decoder.layers
    count = sum(layer.cfg.ffn.experts is not None for layer in layers)
    if not count:
      return None
    ways = self.ways("expert")
    travel = f"; tokens travel to experts on {ways} devices, padded to {SLACK} of an even share a round" if ways > 1 else ""
    verdict = f", {self.grouped_verdict}" if self.grouped_verdict else ""
    return f"{self.decoder.cfg.grouped} for experts in {count} of {len(layers)} layers{verdict}{travel}"

  @property
  def copied_heads(self) -> str | None:
    """Key-value heads that several devices compute, in words; None: there are none."""
    return copied(self.spec, self.decoder.cfg.rules, self.mesh)

  @functools.cached_property
  def spec(self) -> Any:
    """The decoder's declared parameters, as they are stored."""
    declared = self.decoder.params()
    return declared if self.base is None else self.base.spec(declared)

  def draw(self, key: jax.Array) -> Any:
    """Fresh parameters, as they are stored."""
    declared = self.decoder.params()
    return init(declared, key) if self.base is None else self.base.init(declared, key)

  @property
  def devices(self) -> list[Any]:
    """The devices of the mesh, which is not an abstract one."""
    assert isinstance(self.mesh, jax.sharding.Mesh)
    return list(self.mesh.devices.flat)

  @functools.cached_property
  def abstract_params(self) -> Any:
    """``jax.ShapeDtypeStruct`` with a sharding for every parameter."""
    return placed(self.spec, self.mesh, self.decoder.cfg.rules)

  def lower_init(self) -> Any:
    """The program that makes fresh parameters from a seed (uint32 scalar); every device makes its own part."""
    places = jax.tree.map(lambda x: x.sharding, self.abstract_params)
    with use_mesh(self.mesh):
      make = jax.jit(lambda seed: self.draw(jax.random.key(seed)), out_shardings=places)
      return make.lower(jax.ShapeDtypeStruct((), jnp.uint32))

  @functools.cached_property
  def rows(self) -> int:
    """Rows that all devices work on at a time: ``per_device_batch_size`` for each device of the mesh.

    Raises:
      UserError: they cannot be shared out over the devices that the batch is split over.
    """
    each, devices, ways = self.config.training.per_device_batch_size, self.mesh.size, self.ways("batch")
    rows = round(each * devices)
    if abs(each * devices - rows) > 1e-6 or rows % ways or not rows:
      split = " x ".join(f"{axis} {self.mesh.shape[axis]}" for axis in self.decoder.cfg.rules.mesh_axes("batch", self.mesh))
      raise UserError(
        f"per_device_batch_size = {each} on {devices} devices is {each * devices:g} rows, which cannot be shared out over "
        f"{ways} parts of the mesh ({split or 'one device'})\n"
        f"  fix: per_device_batch_size={ways / devices:g}, or a multiple of it"
      )
    return rows

  def ways(self, axis: str) -> int:
    """Into how many parts the mesh splits a logical axis of the activations."""
    return self.decoder.cfg.rules.ways(axis, self.mesh)

  def inputs(self, rows: int) -> Shapes:
    """What the decoder reads of so many rows: int32 [rows, T] each; with images [rows, max_images_per_row, ...] too."""
    length, v = self.config.training.max_target_length, self.config.vision
    shapes: dict[str, tuple[Any, ...]] = dict.fromkeys(("tokens", "positions", "segments"), (rows, length, jnp.int32))
    if v.use_multimodal:
      images = (rows, v.max_images_per_row)
      shapes["token_types"] = (rows, length, jnp.int32)
      for name, shape in v.image_shapes().items():
        shapes[name] = (*images, *shape, jnp.float32 if name == "pixel_values" else jnp.int32)
    return {name: jax.ShapeDtypeStruct(tuple(shape), dtype) for name, (*shape, dtype) in shapes.items()}

  @property
  def batch_sharding(self) -> NamedSharding:
    """How a batch [B, T] lies on the mesh: its sequences over every axis that the decoder's rules give to "batch"."""
    return batch_sharding(self.mesh, self.decoder.cfg.rules)

  def own_rows(self, rows: int) -> frozenset[int] | None:
    """Which of a batch's rows this process's devices have; None: all of them."""
    places = self.batch_sharding.addressable_devices_indices_map((rows,)).values()
    own = frozenset(row for place in places if place is not None for row in range(rows)[place[0]])
    return None if len(own) == rows else own

  def place(self, batch: dict[str, np.ndarray]) -> dict[str, jax.Array]:
    """A whole batch as global arrays on the mesh; each process puts the rows of its own devices there."""
    sharding = self.batch_sharding
    return {name: jax.make_array_from_callback(x.shape, sharding, x.__getitem__) for name, x in batch.items()}


def placed(spec: Any, mesh: Mesh, rules: Rules) -> Any:
  """``jax.ShapeDtypeStruct`` with a sharding for every array of a tree of Params."""
  shapes, places = abstract(spec), shardings(spec, mesh, rules)
  return jax.tree.map(lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), shapes, places)


def make_model(
  config: Config,
  *,
  mesh: Mesh | None = None,
  platform: str | None = None,
  capability: str | None = None,
  runs_attention: bool = True,
  one_document: bool = False,
) -> Model:
  """The model of a configuration, without any array.

  On a device that is here, a fused kernel is tried before it is used (see ``attention_kernels``, ``grouped_kernels``).

  Args:
    config: of it.
    mesh: default: the ``mesh:`` section over all devices.
    platform: "cpu", "gpu" or "tpu", where it will run; needed for an abstract mesh, else that of its devices.
    capability: CUDA's compute capability, of devices that do not say it: those of an abstract mesh or a topology; None: not
      known, or no NVIDIA GPUs.
    runs_attention: False where the decoder's attention over whole rows is never called, as in generation: its kernels
      are not looked at then, and a tower runs in plain XLA.
    one_document: every row that it is given is one document, padding behind it: it needs no mask of documents.

  Raises:
    UserError: sizes that no model can have, or that the mesh cannot split; axes that do not fit the devices; a kernel that the
      configuration names and that cannot do this or failed its self-test.
  """
  t = config.training
  mesh = make_mesh(config.mesh) if mesh is None else mesh
  device = None  # to try kernels on; a topology's device is known to a compiler only
  if not isinstance(mesh, jax.sharding.AbstractMesh):
    first = mesh.devices.flat[0]
    own = "gpu" if first.platform in ("cuda", "rocm") else first.platform
    capability = getattr(first, "compute_capability", capability)
    platform = platform or own
    device = mesh.local_devices[0] if platform == own and first in jax.devices() else None
  assert platform is not None, "an abstract mesh does not say where the program will run"
  try:
    decoder = build_decoder(
      config.model,
      precision_of(config.precision),
      layer_precision=config.precision.layer_precision,
      vision=config.vision,
      scan_layers=t.scan_layers,
      init_scheme=t.init_scheme,
      remat_policy=t.remat_policy,
      remat_offload=t.remat_offload,
      attention=t.attention,
      grouped_product=t.grouped_product,
      platform=platform,
      capability=capability,
      rules=Rules(**config.mesh.sharding_rules),
    )
  except ValueError as error:
    raise UserError(str(error)) from error
  decoder = dataclasses.replace(decoder, cfg=dataclasses.replace(decoder.cfg, one_document=one_document))
  require_units(decoder, platform, capability)
  require_even(decoder.params(), t.max_target_length, decoder.cfg.rules, mesh)
  kernels = ()
  if not runs_attention:
    decoder = plain_tower(decoder)
  else:
    decoder, kernels = settle(
      decoder,
      length=t.max_target_length,
      images=config.vision.use_multimodal,
      patches=config.vision.patches if config.vision.use_multimodal else None,
      context=decoder.cfg.rules.ways("sequence", mesh),
      segments=not one_document,
      capability=capability,
      device=device,
      cache=config.logging.compilation_cache_dir,
    )
  rules = decoder.cfg.rules
  decoder, verdict = grouped_kernels.settle(
    decoder,
    asked=t.grouped_product,
    platform=platform,
    tokens=max(1, round(t.per_device_batch_size * t.max_target_length * mesh.size / rules.ways("batch", mesh))),
    ways=rules.ways("expert", mesh),
    device=device,
    cache=config.logging.compilation_cache_dir,
  )
  norms = ""
  if runs_attention:  # generation has no gradients
    decoder, norms = norm_kernels.settle(
      decoder,
      asked=t.norm_kernel,
      platform=platform,
      devices=mesh.size,
      capability=capability,
      device=device,
      cache=config.logging.compilation_cache_dir,
    )
  return Model(config, mesh, decoder, platform, kernels, grouped_verdict=verdict, norms=norms)
