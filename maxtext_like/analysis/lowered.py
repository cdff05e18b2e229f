"""The train step as program text for hardware that is not available: lowered for a platform, or compiled for a TPU slice."""

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import Any, Literal

from maxtext_like.capacity.topologies import Topology, assumed_gpu
from maxtext_like.config.parallelism import PARALLELISM
from maxtext_like.config.schema import Config
from maxtext_like.errors import UserError

Platform = Literal["tpu", "cuda", "cpu"]
PLATFORMS: tuple[Platform, ...] = ("tpu", "cuda", "cpu")
ABSTRACT_DEVICES = 8


def lower(config: Config, platform: Platform) -> tuple[Any, Any]:
  """Return the program of a run and its train step as a StableHLO module.

  The mesh is abstract: eight devices, or as many as the ``mesh:`` section names. cuDNN's attention cannot be lowered for an
  abstract mesh, so with it the program is that of one device. A GPU is assumed to be a Hopper GPU with cuDNN 9.10.

  Args:
    config: configuration of the run. Nothing is allocated, so the model may have any size. The program is that of a mesh or of
      a CPU: special cases for a single GPU (``partition.on_one_gpu``) are not included, but they do not affect any precision
      key.
    platform: "tpu", "cuda" or "cpu".

  Raises:
    UserError: as ``make_program``.
  """
  import jax

  from maxtext_like.sharding.mesh import abstract_mesh, make_mesh
  from maxtext_like.training.step.program import make_program

  devices = config.mesh.devices(ABSTRACT_DEVICES)
  kind = "gpu" if platform == "cuda" else platform
  program = make_program(config, mesh=abstract_mesh(config.mesh, devices), platform=kind)
  if any(use.kernel == "cudnn_flash" for use in program.model.kernels):
    alone = dataclasses.replace(config.mesh, **dict.fromkeys((key for keys in PARALLELISM.values() for key in keys), 1))
    program = make_program(config, mesh=make_mesh(alone, jax.devices()[:1]), platform=kind)
  with _short_locations(), assumed_gpu():
    lowered = program.lower_step(platform)
    return program, lowered.compiler_ir("stablehlo")


def compile_for(config: Config, topology: Topology) -> tuple[Any, Any, str]:
  """Return the program of a run and its train step for a slice, as a StableHLO module and as the HLO text that libtpu produces.

  Raises:
    UserError: libtpu is not available, the mesh does not fit the slice, or libtpu cannot compile or print the program.
  """
  from maxtext_like.capacity import aot_tpu

  aot_tpu.prepare_environment()
  import jax

  from maxtext_like.training.step.program import make_program

  program = make_program(config, mesh=aot_tpu.tpu_mesh(topology, config.mesh))
  try:
    with _short_locations():
      lowered = program.lower_step("tpu")
      module = lowered.compiler_ir("stablehlo")
      compiled = lowered.compile(compiler_options=aot_tpu.xla_flags("base"))
    return program, module, compiled.as_text()
  except jax.errors.JaxRuntimeError as error:
    raise UserError(
      f"topology={topology.name}: {str(error).strip().splitlines()[0]}\n"
      "  fix: run audit without a topology, which reads the program before compilation; `maxtext-like compile` shows what fits"
    ) from error


@contextlib.contextmanager
def _short_locations() -> Iterator[None]:
  """Let instructions carry the path of their names without Python stack frames."""
  import jax

  name = "jax_traceback_in_locations_limit"
  before = getattr(jax.config, name)
  jax.config.update(name, 0)
  try:
    yield
  finally:
    jax.config.update(name, before)
