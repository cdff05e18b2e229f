# ruff: noqa: E501 (instructions are as long as compilers write them)
"""Memory traffic that is read from the text of a program, compared with counts by hand."""

import pytest

from maxtext_like.capacity.compiled_program import read_program
from maxtext_like.capacity.traffic import Traffic

# Two iterations over a stack of seven layers, as libtpu writes them. The fusion of a product slices its layer in a nested
# fusion, and again in a fusion inside another nested one. A gradient in on-chip memory is written to two stacks at once.
LOOP = """HloModule jit_step, is_scheduled=true

%cut (stack.1: f32[7,5,3], at.1: s32[]) -> bf16[5,3] {
  %stack.1 = f32[7,5,3]{2,1,0} parameter(0)
  %at.1 = s32[] parameter(1)
  %zero.1 = s32[] constant(0)
  %slice = f32[1,5,3]{2,1,0} dynamic-slice(%stack.1, %at.1, %zero.1, %zero.1), dynamic_slice_sizes={1,5,3}
  %flat = f32[5,3]{1,0} bitcast(%slice)
  ROOT %cast = bf16[5,3]{1,0} convert(%flat)
}

%inner (x.2: bf16[2,5], stack.2: f32[7,5,3], at.2: s32[]) -> bf16[2,3] {
  %x.2 = bf16[2,5]{1,0} parameter(0)
  %stack.2 = f32[7,5,3]{2,1,0} parameter(1)
  %at.2 = s32[] parameter(2)
  %again = bf16[5,3]{1,0} fusion(%stack.2, %at.2), kind=kLoop, calls=%cut
  ROOT %product.2 = bf16[2,3]{1,0} convolution(%x.2, %again), dim_labels=bf_io->bf
}

%product (stack.3: f32[7,5,3], at.3: s32[], x.3: bf16[2,5]) -> bf16[2,3] {
  %stack.3 = f32[7,5,3]{2,1,0} parameter(0)
  %at.3 = s32[]{:S(6)} parameter(1)
  %x.3 = bf16[2,5]{1,0:S(1)} parameter(2)
  %same = f32[7,5,3]{2,1,0} bitcast(%stack.3)
  %weight = bf16[5,3]{1,0} fusion(%same, %at.3), kind=kLoop, calls=%cut
  %other = bf16[2,3]{1,0} fusion(%x.3, %stack.3, %at.3), kind=kOutput, calls=%inner
  %convolution = bf16[2,3]{1,0} convolution(%x.3, %weight), dim_labels=bf_io->bf
  ROOT %sum = bf16[2,3]{1,0:S(1)} add(%convolution, %other)
}

%put (stack.5: f32[7,5,3], grad.5: f32[1,5,3], at.5: s32[]) -> f32[7,5,3] {
  %stack.5 = f32[7,5,3]{2,1,0} parameter(0)
  %grad.5 = f32[1,5,3]{2,1,0} parameter(1)
  %at.5 = s32[] parameter(2)
  %zero.5 = s32[] constant(0)
  ROOT %update.5 = f32[7,5,3]{2,1,0} dynamic-update-slice(%stack.5, %grad.5, %at.5, %zero.5, %zero.5)
}

%put_both (stack.4: f32[7,5,3], other.4: f32[7,5,3], grad.4: f32[1,5,3], at.4: s32[], kept.4: f32[9]) -> (f32[7,5,3], f32[7,5,3], f32[9], f32[5,3]) {
  %stack.4 = f32[7,5,3]{2,1,0} parameter(0)
  %other.4 = f32[7,5,3]{2,1,0} parameter(1)
  %grad.4 = f32[1,5,3]{2,1,0:S(1)} parameter(2)
  %at.4 = s32[]{:S(6)} parameter(3)
  %kept.4 = f32[9]{0} parameter(4)
  %zero.4 = s32[] constant(0)
  %update.4 = f32[7,5,3]{2,1,0} dynamic-update-slice(%stack.4, %grad.4, %at.4, %zero.4, %zero.4)
  %nested.4 = f32[7,5,3]{2,1,0} fusion(%other.4, %grad.4, %at.4), kind=kLoop, calls=%put
  %flat.4 = f32[7,5,3]{2,1,0} bitcast(%nested.4)
  %copy.4 = f32[5,3]{1,0} reshape(%grad.4)
  ROOT %tuple.4 = (f32[7,5,3]{2,1,0}, f32[7,5,3]{2,1,0}, f32[9]{0}, f32[5,3]{1,0}) tuple(%update.4, %flat.4, %kept.4, %copy.4)
}

%body (state: (s32[], f32[7,5,3], f32[7,5,3], f32[7,5,3], f32[9])) -> (s32[], f32[7,5,3], f32[7,5,3], f32[7,5,3], f32[9]) {
  %state = (s32[]{:S(6)}, f32[7,5,3]{2,1,0}, f32[7,5,3]{2,1,0}, f32[7,5,3]{2,1,0}, f32[9]{0}) parameter(0)
  %i = s32[]{:S(6)} get-tuple-element(%state), index=0
  %w = f32[7,5,3]{2,1,0} get-tuple-element(%state), index=1
  %g = f32[7,5,3]{2,1,0} get-tuple-element(%state), index=2
  %h = f32[7,5,3]{2,1,0} get-tuple-element(%state), index=3
  %k = f32[9]{0} get-tuple-element(%state), index=4
  %x = bf16[2,5]{1,0:S(1)} constant({...})
  %y = bf16[2,3]{1,0:S(1)} fusion(%w, %i, %x), kind=kOutput, calls=%product
  %grad = f32[1,5,3]{2,1,0:S(1)} constant({...})
  %both = (f32[7,5,3]{2,1,0}, f32[7,5,3]{2,1,0}, f32[9]{0}, f32[5,3]{1,0}) fusion(%g, %h, %grad, %i, %k), kind=kLoop, calls=%put_both
  %g.1 = f32[7,5,3]{2,1,0} get-tuple-element(%both), index=0
  %h.1 = f32[7,5,3]{2,1,0} get-tuple-element(%both), index=1
  ROOT %next = (s32[]{:S(6)}, f32[7,5,3]{2,1,0}, f32[7,5,3]{2,1,0}, f32[7,5,3]{2,1,0}, f32[9]{0}) tuple(%i, %w, %g.1, %h.1, %k)
}

%condition (state.1: (s32[], f32[7,5,3])) -> pred[] {
  %state.1 = (s32[], f32[7,5,3]{2,1,0}) parameter(0)
  %i.1 = s32[] get-tuple-element(%state.1), index=0
  %turns = s32[] constant(2)
  ROOT %lt = pred[] compare(%i.1, %turns), direction=LT
}

ENTRY %main (p: f32[7,5,3]) -> f32[] {
  %p = f32[7,5,3]{2,1,0} parameter(0)
  %start = s32[] constant(0)
  %init = (s32[], f32[7,5,3]{2,1,0}) tuple(%start, %p)
  %while.1 = (s32[], f32[7,5,3]{2,1,0}) while(%init), condition=%condition, body=%body
  ROOT %out = f32[] constant(0)
}
"""
LAYER = 5 * 3 * 4


def test_fusions_inside_fusions_read_what_they_cut_out_and_write_what_they_put_in():
  # Each iteration reads one layer, once for both products, and writes three: to each of two stacks, and a copy.
  assert Traffic(read_program(LOOP)).step() == 2 * (LAYER + 3 * LAYER)


def test_an_array_that_a_fusion_makes_is_written_whole():
  made = LOOP.replace("dynamic-update-slice(%stack.4,", "dynamic-update-slice(%zeros.4,")
  made = made.replace("  %update.4", "  %zeros.4 = f32[7,5,3]{2,1,0} broadcast(%zero.4), dimensions={}\n  %update.4")
  assert Traffic(read_program(made)).step() == 2 * (LAYER + (7 + 2) * LAYER)


ENTRY = """%sum (a: f32[8,6]) -> f32[4,6] {{
  %a = f32[8,6]{{1,0}} parameter(0)
  %c = s32[] constant(0)
  %all-reduce = f32[8,6]{{1,0}} all-reduce(%a), channel_id=6, replica_groups={{{{0,1}}}}, to_apply=%add
  ROOT %part = f32[4,6]{{1,0}} dynamic-slice(%all-reduce, %c, %c), dynamic_slice_sizes={{4,6}}
}}

%flat (b: f32[8,6]) -> f32[48] {{
  %b = f32[8,6]{{1,0}} parameter(0)
  ROOT %bitcast = f32[48]{{0}} bitcast(%b)
}}

%total (d: f32[8,6]) -> f32[] {{
  %d = f32[8,6]{{1,0}} parameter(0)
  %e = f32[48]{{0}} fusion(%d), kind=kLoop, calls=%flat
  %f = f32[] constant(0)
  ROOT %reduce = f32[]{{:S(6)}} reduce(%e, %f), dimensions={{0}}, to_apply=%add
}}

%one (q: f32[8,6]) -> f32[8,6] {{
  %q = f32[8,6]{{1,0}} parameter(0)
  ROOT %negate = f32[8,6]{{1,0}} negate(%q)
}}

%none (r: f32[8,6]) -> f32[8,6] {{
  ROOT %r = f32[8,6]{{1,0}} parameter(0)
}}

ENTRY %main () -> f32[] {{
  %x = f32[8,6]{{1,0}} parameter(0)
  %onchip = f32[1,6]{{1,0:S(1)}} constant({{...}})
  %i = s32[]{{:S(6)}} constant(0)
  ROOT %result = {line}
}}
"""
ROW, WHOLE = 6 * 4, 8 * 6 * 4


@pytest.mark.parametrize(
  ("line", "moved"),
  [
    ("f32[8,6]{1,0} copy(%x)", 2 * WHOLE),
    ("f32[1,6]{1,0} slice(%x), slice={[0:1], [0:6]}", 2 * ROW),
    ("f32[1,6]{1,0:S(1)} dynamic-slice(%x, %i, %i), dynamic_slice_sizes={1,6}", ROW),
    ("f32[8,6]{1,0} dynamic-update-slice(%x, %onchip, %i, %i)", ROW),
    # A device keeps a part of the sum, but the sum reads the complete operand.
    ("f32[4,6]{1,0:S(1)} fusion(%x), kind=kCustom, calls=%sum", WHOLE),
    ("f32[]{:S(6)} fusion(%x), kind=kLoop, calls=%total", WHOLE),
    ("f32[8,6]{1,0} fusion(%x), kind=kLoop, calls=%one, output_to_operand_aliasing={{}: (0, {})}", 0),
    ("(f32[8,6]{1,0:S(1)}, f32[8,6]{1,0}, u32[]) copy-start(%x)", WHOLE),
    ('f32[8,6]{1,0} custom-call(), custom_call_target="AllocateBuffer"', 0),
    ("f32[8,6]{1,0} conditional(%i, %x, %x), branch_computations={%none, %one}", 0),
  ],
)
def test_an_instruction(line, moved):
  assert Traffic(read_program(ENTRY.format(line=line))).step() == moved
