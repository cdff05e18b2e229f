"""benchmarks/profile.py: the part, kind and stage of each instruction, and its tables of a step on this machine."""

import json
import subprocess
import sys

import pytest

from benchmarks.profile import busy, kernels, part_of, picture, totals
from maxtext_like.capacity.compiled_program import read_program
from maxtext_like.config.files import configs_folder

ROOT = configs_folder().parent
LAYER = "jit(step)/jit(main)/transpose(jvp(while))/body/row_0/stack_0/layer_0/checkpoint"
PROGRAM = f"""HloModule jit_step

%fused_cast (p: f32[8,8]) -> bf16[8,8] {{
  %p = f32[8,8]{{1,0}} parameter(0)
  ROOT %c = bf16[8,8]{{1,0}} convert(%p)
}}

%fused_gemm (q: bf16[8,8]) -> bf16[8,8] {{
  %q = bf16[8,8]{{1,0}} parameter(0)
  ROOT %d = bf16[8,8]{{1,0}} dot(%q, %q), lhs_contracting_dims={{1}}, rhs_contracting_dims={{0}}
}}

ENTRY %main (x: f32[8,8]) -> bf16[8,8] {{
  %x = f32[8,8]{{1,0}} parameter(0)
  %casting = bf16[8,8]{{1,0}} fusion(%x), kind=kLoop, calls=%fused_cast, metadata={{op_name="{LAYER}/mlp/convert"}}
  %gemm_fusion = bf16[8,8]{{1,0}} fusion(%casting), kind=kCustom, calls=%fused_gemm, metadata={{op_name="{LAYER}/mlp/dot"}}
  %flash = bf16[8,8]{{1,0}} custom-call(%gemm_fusion), custom_call_target="__cudnn$fmhaSoftmaxBackward", metadata={{op_name="{LAYER}/attention/cudnn_attention/x"}}
  %cublas = bf16[8,8]{{1,0}} custom-call(%flash), custom_call_target="__cublas$gemm", metadata={{op_name="{LAYER}/rematted_computation/attention/q"}}
  %loop = bf16[8,8]{{1,0}} while(%cublas), condition=%c, body=%b
  ROOT %adam = bf16[8,8]{{1,0}} add(%loop, %loop), metadata={{op_name="jit(step)/jit(main)/optimizer/add"}}
}}
"""  # fmt: skip  # noqa: E501


def test_every_event_is_given_to_what_asked_for_it():
  names = ["casting", "gemm_fusion", "flash", "cublas", "loop", "adam", "MemcpyD2D"]
  found = [(name, 1e6 * i, 5e5) for i, name in enumerate([*names, "flash"])]
  rows = {k.name: k for k in kernels(found, read_program(PROGRAM), steps=2)}
  assert {name: (k.part, k.kind, k.stage) for name, k in rows.items()} == {
    "casting": ("casts", "cast", "backward"),
    "gemm_fusion": ("feed-forward", "matrix product", "backward"),
    "flash": ("attention", "fused attention", "backward"),
    "cublas": ("attention", "matrix product", "recomputed"),
    "adam": ("update", "elementwise", "update"),
    "MemcpyD2D": ("outside the program", "outside the program", "update"),
  }
  assert (rows["flash"].milliseconds, rows["flash"].launches) == (0.5, 1)
  parts = totals(list(rows.values()), "part")
  assert next(iter(parts)) == "attention"
  assert parts["attention"] == {
    "forward": 0.0, "recomputed": 0.25, "backward": 0.5, "update": 0.0, "all": 0.75, "launches": 1.5,
  }  # fmt: skip
  assert picture(parts, "a < b").count("<rect") == 4 + 4 * len(parts)


def test_time_that_overlaps_is_counted_once():
  assert busy([("a", 0, 4e6), ("b", 2e6, 1e6), ("c", 3e6, 3e6), ("d", 9e6, 1e6)]) == (7.0, 10.0)


@pytest.mark.parametrize(
  ("scopes", "part"),
  [
    (("row_0", "attention", "q_norm", "norm"), "norms"),
    (("row_0", "moe", "experts", "lora"), "feed-forward"),
    (("row_0", "residual"), "between"),
    (("jvp", "head", "soft_cap"), "head and loss"),
    (("cond", "branch_0_fun"), "update"),
  ],
)
def test_the_innermost_part_decides(scopes, part):
  assert part_of(scopes, "elementwise") == part


@pytest.mark.slow
def test_the_tables_of_a_step(tmp_path):
  words = ["qwen3-tiny", "num_decoder_layers=1", "emb_dim=32", "mlp_dim=32", "max_target_length=16", "vocab_size=64"]
  command = [sys.executable, str(ROOT / "benchmarks" / "profile.py"), *words, "--steps=1", f"--out={tmp_path}"]
  done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)
  assert done.returncode == 0, done.stderr[-3000:]
  assert "| part | ms a step | share |" in done.stdout
  found = json.loads((tmp_path / "profile.json").read_text())
  assert {"attention", "feed-forward", "head and loss", "update", "norms"} <= set(found["parts"])
  assert "outside the program" not in found["parts"]
  assert found["kinds"]["matrix product"]["launches"] >= 20
  assert 0 < found["busy_ms"] <= found["traced_step_ms"]
  assert (tmp_path / "profile.svg").read_text().startswith("<svg")
