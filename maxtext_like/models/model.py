"""``Model``: a decoder with its mesh, shardings and kernels, for training and for inference. Holds no arrays.

It is part of models and not of training, because generation, forward passes, import and export need it without an optimizer.
The training program contains a ``Model``.
"""

import dataclasses
import functools
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from maxtext_like.config.schema import Config
from maxtext_like.errors import UserError
from maxtext_like.layers.decoder import Decoder
from maxtext_like.layers.moe.expert_parallel import SLACK
from maxtext_like.layers.param import abstract, init, shardings
from maxtext_like.layers.partition import Mesh
from maxtext_like.layers.sharding_rules import Rules
from maxtext_like.models import attention_kernels, decode_kernels, grouped_kernels, norm_kernels
from maxtext_like.models.attention_kernels import KernelUse, Rows, plain_tower
from maxtext_like.models.build import build_decoder, precision_of
from maxtext_like.models.float8_products import require_units
from maxtext_like.models.kernel_verdicts import Target, Tests
from maxtext_like.models.quantized_base import QuantizedBase
from maxtext_like.numerics import attention_selfcheck, decode_selfcheck, grouped_selfcheck, norm_selfcheck
from maxtext_like.sharding.divisibility import copied_kv_heads, require_divisible
from maxtext_like.sharding.mesh import make_mesh, use_mesh

Shapes = dict[str, jax.ShapeDtypeStruct]


@dataclass(frozen=True, eq=False)
class Model:
  """The decoder of a configuration, the placement of its arrays, and its kernels.

  Attributes:
    config: the configuration.
    mesh: grid of devices. An abstract mesh has only sizes: programs can be lowered for it but not run.
    decoder: parameters and equations.
    platform: "cpu", "gpu" or "tpu": where it runs.
    kernels: kernels of the attention layers; empty if attention over complete rows is never called.
    base: storage of the weights under an adapter; None: as declared.
    grouped_verdict: note about the self-test of the experts' kernel.
    norms: note about the kernel for gradients of norms; "" if it is XLA.
    decode: note about the kernel for a single new token in generation; "" if it is XLA.
  """

  config: Config
  mesh: Mesh
  decoder: Decoder
  platform: str
  kernels: tuple[KernelUse, ...] = ()
  base: QuantizedBase | None = None
  grouped_verdict: str = ""
  norms: str = ""
  decode: str = ""

  @property
  def grouped_product(self) -> str | None:
    """Describe the grouped kernel, its layers, and whether tokens are sent to experts; None if the model has no experts."""
    layers = self.decoder.layers
    count = sum(layer.cfg.ffn.experts is not None for layer in layers)
    if not count:
      return None
    ways = self.ways("expert")
    travel = f"; tokens are sent to experts on {ways} devices, padded to {SLACK} of an even share per round" if ways > 1 else ""
    verdict = f", {self.grouped_verdict}" if self.grouped_verdict else ""
    return f"{self.decoder.cfg.grouped} for experts in {count} of {len(layers)} layers{verdict}{travel}"

  @property
  def copied_heads(self) -> str | None:
    """Describe the key-value heads that several devices compute; None if there are none."""
    return copied_kv_heads(self.spec, self.decoder.cfg.rules, self.mesh)

  @functools.cached_property
  def spec(self) -> Any:
    """The decoder's declared parameters, in their stored form."""
    declared = self.decoder.params()
    return declared if self.base is None else self.base.spec(declared)

  def draw(self, key: jax.Array) -> Any:
    """Draw initial parameters, in their stored form."""
    declared = self.decoder.params()
    return init(declared, key) if self.base is None else self.base.init(declared, key)

  @property
  def devices(self) -> list[Any]:
    """The devices of the mesh, which must not be an abstract one."""
    assert isinstance(self.mesh, jax.sharding.Mesh)
    return list(self.mesh.devices.flat)

  @functools.cached_property
  def abstract_params(self) -> Any:
    """A ``jax.ShapeDtypeStruct`` with a sharding for every parameter."""
    return placed(self.spec, self.mesh, self.decoder.cfg.rules)

  def lower_init(self) -> Any:
    """Lower the program that draws initial parameters from a seed (uint32 scalar). Every device draws its own part."""
    places = jax.tree.map(lambda x: x.sharding, self.abstract_params)
    with use_mesh(self.mesh):
      make = jax.jit(lambda seed: self.draw(jax.random.key(seed)), out_shardings=places)
      return make.lower(jax.ShapeDtypeStruct((), jnp.uint32))

  @functools.cached_property
  def rows(self) -> int:
    """Rows of one microbatch over all devices: ``per_device_batch_size`` times the number of devices of the mesh.

    Raises:
      UserError: the rows do not divide among the devices that the batch is split over.
    """
    each, devices, ways = self.config.training.per_device_batch_size, self.mesh.size, self.ways("batch")
    rows = round(each * devices)
    if abs(each * devices - rows) > 1e-6 or rows % ways or not rows:
      split = " x ".join(f"{axis} {self.mesh.shape[axis]}" for axis in self.decoder.cfg.rules.mesh_axes("batch", self.mesh))
      raise UserError(
        f"per_device_batch_size = {each} on {devices} devices is {each * devices:g} rows, which cannot be divided evenly among "
        f"{ways} parts of the mesh ({split or 'one device'})\n"
        f"  fix: per_device_batch_size={ways / devices:g}, or a multiple of it"
      )
    return rows

  def ways(self, axis: str) -> int:
    """Return the number of parts that the mesh splits a logical axis of the activations into."""
    return self.decoder.cfg.rules.ways(axis, self.mesh)

  def inputs(self, rows: int) -> Shapes:
    """Return the decoder's inputs for this many rows: int32 [rows, T]; with images also [rows, max_images_per_row, ...]."""
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
    """Sharding of a batch [B, T]: sequences are split over every mesh axis that the rules assign to "batch"."""
    return NamedSharding(self.mesh, PartitionSpec(self.decoder.cfg.rules.batch))

  def own_rows(self, rows: int) -> frozenset[int] | None:
    """Return the rows of a batch on this process's devices; None: all rows."""
    places = self.batch_sharding.addressable_devices_indices_map((rows,)).values()
    own = frozenset(row for place in places if place is not None for row in range(rows)[place[0]])
    return None if len(own) == rows else own


def placed(spec: Any, mesh: Mesh, rules: Rules) -> Any:
  """Return a ``jax.ShapeDtypeStruct`` with a sharding for every array of a tree of Params."""
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
  """Create the model of a configuration, without arrays.

  If a device is available, a fused kernel must pass a self-test before it is used (see ``attention_kernels``,
  ``grouped_kernels``).

  Args:
    config: the configuration.
    mesh: default: the ``mesh:`` section over all devices.
    platform: "cpu", "gpu" or "tpu": where it will run. Required for an abstract mesh; otherwise that of its devices.
    capability: CUDA compute capability of devices that do not report it (an abstract mesh or a topology); None if they are not
      NVIDIA GPUs or not known.
    runs_attention: False if attention over complete rows is never called, as in generation. No attention kernel is then chosen,
      and a vision tower runs in plain XLA.
    one_document: every row is one document followed by padding, so no document mask is needed.

  Raises:
    UserError: impossible sizes, sizes that the mesh cannot split, mesh axes that do not match the devices, or a kernel that the
      configuration names and that does not support the model or failed its self-test.
  """
  # Find the platform, and a device to test kernels on. The devices of a topology exist for the compiler only.
  t = config.training
  mesh = make_mesh(config.mesh) if mesh is None else mesh
  device = None
  if not isinstance(mesh, jax.sharding.AbstractMesh):
    first = mesh.devices.flat[0]
    own = "gpu" if first.platform in ("cuda", "rocm") else first.platform
    capability = getattr(first, "compute_capability", capability)
    platform = platform or own
    device = mesh.local_devices[0] if platform == own and first in jax.devices() else None
  assert platform is not None, "an abstract mesh does not say where the program will run"
  # Build the decoder, and check it against the device and the mesh.
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
  require_divisible(decoder.params(), t.max_target_length, decoder.cfg.rules, mesh)
  # Choose the kernels of attention, experts and norms, and test all of them at the same time.
  rules = decoder.cfg.rules
  target = Target(
    platform=platform, devices=mesh.size, capability=capability, device=device, cache=config.logging.compilation_cache_dir
  )
  rows = Rows(
    length=t.max_target_length,
    images=config.vision.use_multimodal,
    patches=config.vision.patches if config.vision.use_multimodal else None,
    context=rules.ways("sequence", mesh),
    segments=not one_document,
  )
  of_experts: dict[str, Any] = {
    "tokens": max(1, round(t.per_device_batch_size * t.max_target_length * mesh.size / rules.ways("batch", mesh))),
    "ways": rules.ways("expert", mesh),
  }
  tests: Tests = [(shape, grouped_selfcheck.self_test) for shape in grouped_kernels.first_shapes(decoder, **of_experts)]
  if runs_attention:  # generation computes no attention over complete rows, and no gradients of norms
    attention = attention_kernels.first_shapes(decoder, rows, target)
    tests += [(shape, attention_selfcheck.self_test) for shape in attention]
    of_norms = norm_kernels.first_shapes(decoder, target, asked=t.norm_kernel)
    tests += [(shape, norm_selfcheck.self_test) for shape in of_norms]
  else:
    tests += [(shape, decode_selfcheck.self_test) for shape in decode_kernels.first_shapes(decoder, target)]
  target = target.tested(tests)
  # Settle each kind of kernel with these verdicts. With "auto", another kernel may be tested then.
  kernels, norms, decode = (), "", ""
  if runs_attention:
    decoder, kernels = attention_kernels.settle(decoder, rows, target)
    decoder, norms = norm_kernels.settle(decoder, target, asked=t.norm_kernel)
  else:
    decoder, decode = decode_kernels.settle(plain_tower(decoder), target)
  decoder, verdict = grouped_kernels.settle(decoder, target, asked=t.grouped_product, **of_experts)
  return Model(config, mesh, decoder, platform, kernels, grouped_verdict=verdict, norms=norms, decode=decode)
