"""The classes of memory at the peak, and the gaps between arrays, as read from a buffer assignment of libtpu."""

import re

import pytest

from maxtext_like.capacity.compiled_program import read_program
from maxtext_like.capacity.memory_layout import Held, lay_out

PROGRAM = read_program("""HloModule jit_step, is_scheduled=true

FileNames
1 "/home/me/maxtext_like/layers/mlp.py"

FileLocations
1 {file_name_id=1 function_name_id=1 line=12 end_line=12 column=2 end_column=2}

StackFrames
1 {file_location_id=1 parent_frame_id=1}

ENTRY %main (p: f32[4,8], m: f32[4,8], b: s32[4]) -> f32[] {
  %p = f32[4,8]{1,0} parameter(0), metadata={op_name="state[\\'params\\'][\\'mlp\\']"}
  %m = f32[4,8]{1,0} parameter(1), metadata={op_name="state[\\'opt_state\\'][0].mu[\\'mlp\\']"}
  %b = s32[4]{0} parameter(2), metadata={op_name="batch[\\'tokens\\']"}
  %kept = bf16[2,50]{1,0} add(%b, %b), metadata={op_name="jit(step)/jvp()/mlp/add" stack_frame_id=1}
  %early = bf16[2,60]{1,0} add(%b, %b), metadata={op_name="jit(step)/jvp()/mlp/mul" stack_frame_id=1}
  %copy = bf16[4,8]{1,0} convert(%p)
  %grad = f32[4,8]{1,0} add(%kept, %copy), metadata={op_name="jit(step)/transpose(jvp())/mlp/dot_general" stack_frame_id=1}
  %work = f32[9]{0} add(%kept, %grad), metadata={op_name="jit(step)/transpose(jvp())/mlp/mul"}
  ROOT %out = f32[] constant(0)
}
""")
ASSIGNMENT = """BufferAssignment:
allocation 0: size 128, parameter 0, shape |f32[4,8]| at ShapeIndex {}, maybe-live-out:
 value: <1 p @0> (size=128,offset=0): f32[4,8]{1,0}
allocation 1: size 128, parameter 1, shape |f32[4,8]| at ShapeIndex {}, maybe-live-out:
allocation 2: size 16, parameter 2, shape |s32[4]| at ShapeIndex {}:
allocation 8: size 777, color 5, preallocated-temp:
 value: <8 there @5> (size=700,offset=0): f32[175]{0}
allocation 3: size 1000, color 1, preallocated-temp:
 value: <9 on_chip @1> (size=900,offset=0): f32[225]{0}
allocation 4: size 640, preallocated-temp:
 value: <2 kept (phi) @0> (size=200,offset=0): bf16[2,50]{1,0}
 value: <3 early @0> (size=230,offset=400): bf16[2,60]{1,0}
 value: <4 copy @0> (size=64,offset=200): bf16[4,8]{1,0}
 value: <5 grad @0> (size=128,offset=264): f32[4,8]{1,0}
 value: <6 work @0> (size=40,offset=392): f32[9]{0}
 value: <7 alias{1} @0> (size=128,offset=264): f32[4,8]{1,0}
"""
RANGES = """HloLiveRange (max 8):
  InstructionSequence:
    0:p
    3:kept
    4:early
    5:copy
    6:grad
    7:work
  BufferLiveRange:
    kept{}:3-7
    early{}:4-4
    copy{}:5-7
    grad{}:6-8
    alias{1}:7-8
    work{}:7-7
"""


# The format of the libtpu of JAX 0.12.
WITH_PAGES = re.sub(r"^(allocation \d+: size \d+(?:, color \d+)?)", r"\1, page 0", ASSIGNMENT, flags=re.MULTILINE)


@pytest.mark.parametrize("assignment", [ASSIGNMENT, WITH_PAGES])
def test_classes_at_the_fullest_instant(assignment):
  layout = lay_out(PROGRAM, assignment, RANGES, count=3)
  assert layout.classes == {
    "parameters": 128,
    "optimizer": 128,
    "batch": 16,
    "gradients": 128,  # counted once: two values share this memory
    "activations": 200,  # "kept" is computed in the forward pass and last read by the backward pass
    "temporaries": 64 + 40,  # a copy of a parameter, and "work"
    "gaps": 640 - 200 - 64 - 128 - 40,
  }
  assert layout.bytes == 128 + 128 + 16 + 640
  assert layout.host == 777
  assert layout.at == "jit(step)/transpose(jvp())/mlp/mul"
  assert layout.largest[0] == Held(
    bytes=200, type="bf16[2,50]", kind="activations", path="jit(step)/jvp()/mlp/add", place="layers/mlp.py:12"
  )
  assert [held.kind for held in layout.largest[1:]] == ["parameters", "optimizer"]


def test_a_moment_on_the_host_takes_none_of_a_chip():
  there = ASSIGNMENT.replace("size 128, parameter 1", "size 128, color 5, parameter 1")
  layout = lay_out(PROGRAM, there, RANGES, count=3)
  assert layout.host == 777 + 128
  assert layout.classes["optimizer"] == 0
  assert layout.bytes == lay_out(PROGRAM, ASSIGNMENT, RANGES).bytes - 128


def test_what_shares_a_place_is_there_once():
  # The peak is 200 + 240 at "early". The end has 432, or 560 if the alias counted as a separate array.
  assert lay_out(PROGRAM, ASSIGNMENT.replace("size=230", "size=240"), RANGES).at == "jit(step)/jvp()/mlp/mul"


def test_arrays_alike_are_told_together():
  program = ASSIGNMENT.replace("<3 early @0> (size=230,offset=400)", "<3 kept{1} @0> (size=200,offset=440)")
  layout = lay_out(PROGRAM, program.replace("[2,60]", "[2,50]"), RANGES.replace("early{}:4-4", "kept{1}:4-7"), count=1)
  assert (layout.largest[0].count, layout.largest[0].bytes) == (2, 200)
