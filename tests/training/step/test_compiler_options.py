"""The compiler options of a train step."""

import jax
import pytest
from jax.sharding import AbstractDevice, AbstractMesh, AxisType

from maxtext_like.config.load import load_config
from maxtext_like.training.step import compiler_options
from maxtext_like.training.step.program import make_program

TRITON = "xla_gpu_enable_triton_gemm"


def told(platform: str, devices: int = 1, *, in_backward: bool = True) -> dict[str, bool]:
  words = ["per_device_batch_size=1", "max_target_length=16", f"optimizer_in_backward={str(in_backward).lower()}"]
  step = make_program(load_config("qwen3-tiny", words).config).step
  mesh = AbstractMesh(
    (devices,), ("data",), axis_types=(AxisType.Auto,), abstract_device=AbstractDevice("any", devices, platform)
  )
  with jax.sharding.use_abstract_mesh(mesh):
    return compiler_options.of_step(step)


@pytest.mark.parametrize(
  ("platform", "devices", "in_backward", "expected"),
  [
    ("gpu", 1, True, {TRITON: False}),
    ("gpu", 1, False, {}),
    ("gpu", 2, True, {}),
    ("tpu", 1, True, {}),
    ("cpu", 1, True, {}),
  ],
)
def test_products_of_layers_updated_on_one_gpu_are_those_of_cublas(platform, devices, in_backward, expected, monkeypatch):
  monkeypatch.delenv("XLA_FLAGS", raising=False)
  assert told(platform, devices, in_backward=in_backward) == expected


def test_a_users_word_holds(monkeypatch, tmp_path):
  monkeypatch.setenv("XLA_FLAGS", f"--{TRITON}=true")
  assert told("gpu") == {}
  (file := tmp_path / "flags").write_text(f"--xla_dump_to=/tmp/x --{TRITON}=true")
  monkeypatch.setenv("XLA_FLAGS", str(file))
  assert told("gpu") == {}
  file.write_text("--xla_dump_to=/tmp/x --xla_gpu_enable_triton_gemm_int4=true")  # another flag
  assert told("gpu") == {TRITON: False}


def test_the_flags_are_options_of_this_xla():
  """XLA must know each option. An unknown one would end every run on a GPU, and the tests do not run on a GPU."""
  step = jax.jit(lambda x: x + 1, compiler_options={TRITON: False})
  assert step(1) == 2
