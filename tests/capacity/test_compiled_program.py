# ruff: noqa: E501 (instructions are as long as compilers write them)
"""Operations, transfers and copies that are read from the text of a compiled program, compared with counts by hand."""

import re

import pytest

from maxtext_like.capacity.compiled_program import Transfer, read_program
from maxtext_like.capacity.traffic import Traffic
from maxtext_like.errors import UserError

# The program of two devices, reduced to what is counted: a loop of three iterations over a stack of weights, with a product; an
# all-gather that is waited for and others that overlap with computation; a reduce-scatter of a gradient inside a fusion; a
# transfer to another slice.
PROGRAM = """HloModule jit_step, is_scheduled=true

FileNames
1 "/home/me/maxtext_like/layers/mlp.py"
2 "/usr/lib/python3/jax/numpy.py"

FunctionNames
1 "MLP.__call__"
2 "einsum"

FileLocations
1 {file_name_id=1 function_name_id=1 line=12 end_line=12 column=2 end_column=2}
2 {file_name_id=2 function_name_id=2 line=99 end_line=99 column=2 end_column=2}

StackFrames
1 {file_location_id=1 parent_frame_id=1}
2 {file_location_id=2 parent_frame_id=1}


%all-reduce-scatter.1 (input.5: bf16[8,6]) -> bf16[4,6] {
  %input.5 = bf16[8,6]{1,0} parameter(0)
  %all-reduce.7 = bf16[8,6]{1,0} all-reduce(%input.5), channel_id=6, replica_groups={{0,1}}, to_apply=%add
  ROOT %dynamic-slice.38 = bf16[4,6]{1,0} dynamic-slice(%all-reduce.7, %c), dynamic_slice_sizes={4,6}
}

%begun (p0: bf16[4,6]) -> bf16[8,6] {
  %p0 = bf16[4,6]{1,0} parameter(0)
  ROOT %all-gather.9 = bf16[8,6]{1,0} all-gather(%p0), channel_id=9, replica_groups=[1,2]<=[2], dimensions={0}
}

%async_collective_fusion.3 (p0.1: bf16[4,6]) -> bf16[8,6] {
  %p0.1 = bf16[4,6]{1,0} parameter(0)
  ROOT %all-gather.10 = bf16[8,6]{1,0} all-gather(%p0.1), channel_id=9, replica_groups=[1,2]<=[2], dimensions={0}
}

%called_computation.1 (p0.2: bf16[4,6]) -> bf16[8,6] {
  %p0.2 = bf16[4,6]{1,0} parameter(0)
  ROOT %all-gather.11 = bf16[8,6]{1,0} all-gather(%p0.2), channel_id=10, replica_groups=[1,2]<=[2], dimensions={0}
}, execution_thread="sparsecore"

%async_computation.1 (p0.3: bf16[4,6]) -> bf16[8,6] {
  %p0.3 = bf16[4,6]{1,0} parameter(0)
  ROOT %all-gather.12 = bf16[8,6]{1,0} call(%p0.3), to_apply=%called_computation.1
}, execution_thread="sparsecore"

%one_layer (stack: f32[3,5,6], at: s32[]) -> f32[1,5,6] {
  %stack = f32[3,5,6]{2,1,0} parameter(0)
  %at = s32[] parameter(1)
  ROOT %slice = f32[1,5,6]{2,1,0} dynamic-slice(%stack, %at, %at, %at), dynamic_slice_sizes={1,5,6}
}

%body (state: (s32[], f32[3,5,6])) -> (s32[], f32[3,5,6]) {
  %state = (s32[], f32[3,5,6]{2,1,0}) parameter(0)
  %i = s32[] get-tuple-element(%state), index=0
  %w = f32[3,5,6]{2,1,0} get-tuple-element(%state), index=1
  %layer = f32[1,5,6]{2,1,0:T(8,128)S(1)} fusion(%w, %i), kind=kLoop, calls=%one_layer
  %x = f32[7,5]{1,0:T(8,128)S(1)} constant({...})
  %y = f32[5,6]{1,0:T(8,128)S(1)} bitcast(%layer)
  %convolution.1 = f32[7,6]{1,0:T(8,128)S(1)} convolution(%x, %y), dim_labels=bf_io->bf, metadata={op_name="jit(step)/mlp/dot_general" stack_frame_id=2}
  %grad = bf16[8,6]{1,0:T(8,128)S(1)} constant({...})
  %fusion.1 = bf16[4,6]{1,0:T(8,128)S(1)} fusion(%grad), kind=kCustom, calls=%all-reduce-scatter.1
  ROOT %next = (s32[], f32[3,5,6]{2,1,0}) tuple(%i, %w)
}

%condition (state.1: (s32[], f32[3,5,6])) -> pred[] {
  %state.1 = (s32[], f32[3,5,6]{2,1,0}) parameter(0)
  %i.1 = s32[] get-tuple-element(%state.1), index=0
  %turns = s32[] constant(3)
  ROOT %lt = pred[] compare(%i.1, %turns), direction=LT
}

ENTRY %main (p: f32[3,5,6]) -> f32[] {
  %p = f32[3,5,6]{2,1,0} parameter(0), metadata={op_name="state[\\'params\\'][\\'mlp\\']"}
  %zero = s32[] constant(0)
  %init = (s32[], f32[3,5,6]{2,1,0}) tuple(%zero, %p)
  %while.1 = (s32[], f32[3,5,6]{2,1,0}) while(%init), condition=%condition, body=%body
  %shard = bf16[4,6]{1,0:T(8,128)S(1)} constant({...})
  %all-gather.1 = bf16[8,6]{1,0:T(8,128)S(1)} all-gather(%shard), channel_id=2, replica_groups=mesh['a'=2,'b'=1] {'a'}, dimensions={0}
  %async-collective-start.1 = bf16[8,6]{1,0:T(8,128)S(1)} fusion(%shard), kind=kCustom, calls=%begun
  %fusion.9 = bf16[8,6]{1,0:T(8,128)S(1)} fusion(%shard), kind=kCustom, calls=%async_collective_fusion.3
  %all-gather.12.call-start = ((), (), (s32[1]{0:T(128)S(2)})) async-start(), calls=%async_computation.1
  %send = (f32[10]{0}, u32[], token[]) send(%p, %t), channel_id=3, frontend_attributes={_xla_megascale_target="{1,2}x{0:3}",_xla_megascale_transfer_type="ALL_REDUCE"}
  ROOT %out = f32[] constant(0)
}
"""


def by_number(text: str) -> str:
  """Rewrite tuple elements as %tuple#index, as compilers from the second half of 2026 do, which write no get-tuple-element."""
  for line, name, of, index in re.findall(r"(  %([\w.]+) = .* get-tuple-element\(%([\w.]+)\), index=(\d+)\n)", text):
    text = re.sub(rf"%{re.escape(name)}(?![\w.])", f"%{of}#{index}", text.replace(line, ""))
  assert "get-tuple-element" not in text
  assert "#1" in text
  return text


@pytest.fixture(scope="module", params=[str, by_number])
def program(request):
  return read_program(request.param(PROGRAM))


def test_loops_count_as_often_as_they_turn(program):
  assert program.flops(lambda op, operands: 0.0) == 3 * 2 * 7 * 5 * 6


def test_of_a_stack_the_layer_that_is_read_counts(program):
  # Each iteration reads the slice and its index. "send" reads its operand and writes its result. All else is in on-chip memory.
  assert Traffic(program).step() == 3 * (5 * 6 * 4 + 4) + (3 * 5 * 6 * 4 + 10 * 4 + 4)


def test_transfers_by_kind_and_manner(program):
  assert program.transfers(chips_per_slice=2) == [
    Transfer("all-gather", 8 * 6 * 2 // 2, 1, asynchronous=False),
    Transfer("all-gather", 2 * 8 * 6 * 2 // 2, 2, asynchronous=True),  # one of them on the SparseCores
    Transfer("reduce-scatter", 3 * 8 * 6 * 2 // 2, 3, asynchronous=False),
    Transfer("all-reduce", 10 * 4, 1, asynchronous=True, between_slices=True),
  ]
  assert [t.between_slices for t in program.transfers(chips_per_slice=1)] == [True] * 4


def test_who_asked_for_an_operation(program):
  assert program.requested_by("convolution.1") == ("jit(step)/mlp/dot_general", "layers/mlp.py:12")
  assert program.requested_by("p") == ("state['params']['mlp']", "")
  assert program.requested_by("zero") == ("", "")


@pytest.mark.parametrize(
  ("line", "flops"),
  [
    # A batch of 3 products [2, 4] x [4, 5], written as a convolution with a dilated input, as on TPUs.
    ("f32[3,2,5]{2,1,0} convolution(%x, %y), window={size=3 stride=2 pad=0_0 lhs_dilate=3}, dim_labels=0bf_0io->0bf", 3 * 80),
    # Padding takes no FLOPs: a window of size 3 over 4 entries, padded by one on each side.
    ("f32[4,2,5]{2,1,0} convolution(%x, %z), window={size=3 pad=1_1}, dim_labels=0bf_0io->0bf", (4 * 3 - 2) * 80),
    ("f32[3,2,5]{2,1,0} dot(%x, %y), lhs_batch_dims={0}, lhs_contracting_dims={2}, rhs_batch_dims={0}, rhs_contracting_dims={1}", 240),
  ],
)  # fmt: skip
def test_products_of_every_form(line, flops):
  rows = 4 if "pad=1_1" in line else 3
  text = f"""ENTRY %main () -> f32[] {{
  %x = f32[{rows},2,4]{{2,1,0}} constant({{...}})
  %y = f32[3,4,5]{{2,1,0}} constant({{...}})
  %z = f32[3,4,5]{{2,1,0}} constant({{...}})
  ROOT %c = {line}
}}
"""
  assert read_program(text).flops(lambda op, operands: 0.0) == flops


def test_a_loop_that_does_not_say_how_often_it_turns():
  program = read_program(PROGRAM.replace("direction=LT", "direction=NE"))
  with pytest.raises(UserError, match=r"number of iterations of loop while\.1 is unknown"):
    list(program.running())


def test_how_often_a_loop_turns_that_says_so():
  text = PROGRAM.replace("body=%body", 'body=%body, backend_config={"known_trip_count":{"n":"7"}}')
  times = {op.name: times for op, times in read_program(text).running()}
  assert times["convolution.1"] == 7


@pytest.mark.parametrize(
  ("mesh", "size", "between"),
  [
    ("mesh['a'=2,'b'=2] {'b'}", 2, False),
    ("mesh['a'=2,'b'=2] {'a'}", 2, True),
    ("mesh['a'=2,'b'=2], device_ids=([2,2]T(1,0)) {'b'}", 2, True),
    ("mesh['a'=2,'b'=2], device_ids=([2,2]T(1,0)) {'a'}", 2, False),
    ("mesh['a'=2,'b'=2], device_ids=(0,2,1,3) {'a'}", 2, False),
    ("mesh['a'=4] {'a':(2)2}", 2, False),
    ("mesh['a'=4] {'a':(1)2}", 2, True),
    ("mesh['a'=2,'b'=2] {'a','b'}", 4, True),
  ],
)
def test_groups_of_a_mesh_that_is_written_by_its_axes(mesh, size, between):
  text = PROGRAM.replace("mesh['a'=2,'b'=1] {'a'}", mesh)
  gathers = [t for t in read_program(text).transfers(chips_per_slice=2) if t.kind == "all-gather" and not t.asynchronous]
  assert [t.between_slices for t in gathers] == [between]
  assert gathers[0].bytes == gathers[0].times * (8 * 6 * 2) * (size - 1) / size


# The first iteration is peeled off. The loop copies a layer's input to host memory, S(5), and reads one back.
COPIES = """HloModule jit_step, is_scheduled=true

%put (host: bf16[3,7,5], row: bf16[1,7,5], at: s32[]) -> bf16[3,7,5] {
  %host = bf16[3,7,5]{2,1,0:S(5)} parameter(0)
  %row = bf16[1,7,5]{2,1,0} parameter(1)
  %at = s32[] parameter(2)
  ROOT %update = bf16[3,7,5]{2,1,0:S(5)} dynamic-update-slice(%host, %row, %at, %at, %at)
}

%work (x.1: bf16[7,5]) -> bf16[7,5] {
  %x.1 = bf16[7,5]{1,0} parameter(0)
  ROOT %double = bf16[7,5]{1,0} add(%x.1, %x.1)
}

%body (state: (s32[], bf16[3,7,5], bf16[1,7,5])) -> (s32[], bf16[3,7,5], bf16[1,7,5]) {
  %state = (s32[], bf16[3,7,5]{2,1,0:S(5)}, bf16[1,7,5]{2,1,0}) parameter(0)
  %i = s32[] get-tuple-element(%state), index=0
  %all = bf16[3,7,5]{2,1,0:S(5)} get-tuple-element(%state), index=1
  %one = bf16[1,7,5]{2,1,0} get-tuple-element(%state), index=2
  %start = ((bf16[3,7,5]{2,1,0:S(5)}, bf16[1,7,5]{2,1,0}, s32[]), bf16[3,7,5]{2,1,0:S(5)}, u32[]{:S(2)}) async-start(%all, %one, %i), calls=%put
  %x = bf16[7,5]{1,0:S(1)} constant({...})
  %y = bf16[7,5]{1,0:S(1)} fusion(%x), kind=kLoop, calls=%work
  %done = bf16[3,7,5]{2,1,0:S(5)} async-done(%start)
  %cut = ((bf16[3,7,5]{2,1,0:S(5)}, s32[], s32[], s32[]), bf16[1,7,5]{2,1,0}, u32[]{:S(2)}) dynamic-slice-start(%done, %i, %i, %i), dynamic_slice_sizes={1,7,5}
  %back = bf16[1,7,5]{2,1,0} dynamic-slice-done(%cut)
  ROOT %next = (s32[], bf16[3,7,5]{2,1,0:S(5)}, bf16[1,7,5]{2,1,0}) tuple(%i, %done, %back)
}

%condition (state.1: (s32[], bf16[3,7,5], bf16[1,7,5])) -> pred[] {
  %state.1 = (s32[], bf16[3,7,5]{2,1,0:S(5)}, bf16[1,7,5]{2,1,0}) parameter(0)
  %i.1 = s32[] get-tuple-element(%state.1), index=0
  %turns = s32[] constant(3)
  ROOT %lt = pred[] compare(%i.1, %turns), direction=LT
}

ENTRY %main (p: bf16[1,7,5]) -> f32[] {
  %p = bf16[1,7,5]{2,1,0} parameter(0)
  %first = s32[]{:S(6)} constant(1)
  %counter = s32[]{:S(6)} copy(%first)
  %empty = bf16[3,7,5]{2,1,0:S(5)} custom-call(), custom_call_target="AllocateBuffer"
  %init = (s32[], bf16[3,7,5]{2,1,0:S(5)}, bf16[1,7,5]{2,1,0}) tuple(%counter, %empty, %p)
  %while.1 = (s32[], bf16[3,7,5]{2,1,0:S(5)}, bf16[1,7,5]{2,1,0}) while(%init), condition=%condition, body=%body
  %out.1 = (bf16[1,7,5]{2,1,0:S(5)}, bf16[1,7,5]{2,1,0}, u32[]{:S(2)}) copy-start(%p)
  %out.2 = bf16[1,7,5]{2,1,0:S(5)} copy-done(%out.1)
  ROOT %out = f32[] constant(0)
}
"""


@pytest.mark.parametrize("written", [str, by_number])
def test_copies_to_the_host_and_back(written):
  """The loop has two iterations. A copy counts as asynchronous only if something is computed between its start and its end."""
  program, size = read_program(written(COPIES)), 7 * 5 * 2
  assert program.transfers(chips_per_slice=1) == [
    Transfer("from host", 2 * size, 2, asynchronous=False),
    Transfer("to host", size, 1, asynchronous=False),
    Transfer("to host", 2 * size, 2, asynchronous=True),
  ]
  assert Traffic(program).step() == 2 * 2 * size + size  # reads and writes of device memory
