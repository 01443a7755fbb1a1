"""Compiled HLO in small: what XLA prints, reduced to what is read."""

ADD = """%add (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %sum = f32[] add(%a, %b)
}
"""

STACK = """
FileNames
1 "/home/me/model.py"

FunctionNames
1 "step"

FileLocations
1 {file_name_id=1 function_name_id=1 line=12 end_line=12 column=1 end_column=9}

StackFrames
1 {file_location_id=1 parent_frame_id=1}

"""

EXPLICIT = f"""HloModule jit_step, is_scheduled=true
{STACK}{ADD}
ENTRY %main (p: f32[8,4]) -> f32[8,4] {{
  %p = f32[8,4]{{1,0}} parameter(0)
  ROOT %all-reduce.1 = f32[8,4]{{1,0}} all-reduce(%p), channel_id=1, replica_groups={{{{0,1,2,3}},{{4,5,6,7}}}}, \
use_global_device_ids=true, to_apply=%add, metadata={{op_name="jit(step)/dot_general" stack_frame_id=1}}
}}
"""

COMBINED = f"""HloModule jit_step
{ADD}
ENTRY %main (p: f32[8], q: bf16[4,4]) -> (f32[8], bf16[4,4]) {{
  %p = f32[8]{{0}} parameter(0)
  %q = bf16[4,4]{{1,0}} parameter(1)
  ROOT %all-reduce = (f32[8]{{0}}, /*index=1*/bf16[4,4]{{1,0}}) all-reduce(%p, /*index=1*/%q), \
replica_groups=[4,2]<=[2,4]T(1,0), to_apply=%add, metadata={{op_name="jit(step)/mul" source_file="/me/old.py" source_line=7}}
}}
"""

ASYNC = """HloModule jit_step

%wrapped (w: f32[16]) -> f32[2] {
  %w = f32[16]{0} parameter(0)
  ROOT %reduce-scatter.1 = f32[2]{0} reduce-scatter(%w), replica_groups={}, dimensions={0}, to_apply=%add
}

%add (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %max = f32[] maximum(%a, %b)
}

ENTRY %main (p: f32[2], q: f32[16]) -> (f32[8], f32[2], f32[2]) {
  %p = f32[2]{0} parameter(0)
  %q = f32[16]{0} parameter(1)
  %ag-start = (f32[2]{0}, f32[8]{0}) all-gather-start(%p), replica_groups=[2,4]<=[8], dimensions={0}
  %ag-done = f32[8]{0} all-gather-done(%ag-start)
  %rs-start = ((f32[16]{0}), f32[2]{0}, u32[]) async-start(%q), calls=%wrapped
  %rs-done = f32[2]{0} async-done(%rs-start), calls=%wrapped
  %cp-start = (f32[2]{0}, f32[2]{0}, u32[]{:S(2)}, u32[]{:S(2)}) collective-permute-start(%p), \
source_target_pairs={{0,4},{4,0},{1,5},{5,1},{2,6},{6,2},{3,7},{7,3}}
  %cp-done = f32[2]{0} collective-permute-done(%cp-start)
  ROOT %tuple = (f32[8]{0}, f32[2]{0}, f32[2]{0}) tuple(%ag-done, %rs-done, %cp-done)
}
"""

#: TPU: a fusion named all-reduce-scatter; and an all-reduce whose result is sliced by another fusion.
SCATTERS = f"""HloModule jit_step
{ADD}
%all-reduce-scatter.1 (input: f32[64,8]) -> f32[16,8] {{
  %input = f32[64,8]{{1,0}} parameter(0)
  %all-reduce.3 = f32[64,8]{{1,0:T(8,128)}} all-reduce(%input), \
replica_groups=mesh['axis_0'=2,'axis_1'=4] {{'axis_1'}}, to_apply=%add
  %zero = s32[] constant(0)
  %partition-id = u32[] partition-id()
  ROOT %dynamic-slice = f32[16,8]{{1,0}} dynamic-slice(%all-reduce.3, %partition-id, %zero), dynamic_slice_sizes={{16,8}}
}}

%slicing (whole: bf16[64,8], at: s32[]) -> bf16[16,8] {{
  %whole = bf16[64,8]{{1,0}} parameter(0)
  %at = s32[] parameter(1)
  %none = s32[] constant(0)
  ROOT %own = bf16[16,8]{{1,0}} dynamic-slice(%whole, %at, %none), dynamic_slice_sizes={{16,8}}
}}

%narrowing (wide: f32[64,8]) -> bf16[64,8] {{
  %wide = f32[64,8]{{1,0}} parameter(0)
  ROOT %narrow = bf16[64,8]{{1,0}} convert(%wide)
}}

%add.clone_promoted (a.1: f32[], b.1: f32[]) -> f32[] {{
  %a.1 = f32[] parameter(0)
  %b.1 = f32[] parameter(1)
  ROOT %sum.1 = f32[] add(%a.1, %b.1)
}}

ENTRY %main (p: f32[64,8], q: bf16[64,8], i: s32[]) -> (f32[16,8], bf16[16,8], f32[64,8]) {{
  %p = f32[64,8]{{1,0}} parameter(0)
  %q = bf16[64,8]{{1,0}} parameter(1)
  %i = s32[] parameter(2)
  %fusion.1 = f32[16,8]{{1,0}} fusion(%p), kind=kCustom, calls=%all-reduce-scatter.1, metadata={{op_name="jit(step)/grad"}}
  %wide.1 = f32[64,8]{{1,0}} convert(%q)
  %all-reduce.4 = (f32[64,8]{{1,0}}, f32[64,8]{{1,0}}) all-reduce(%wide.1, %p), replica_groups=[2,4]<=[8], \
to_apply=%add.clone_promoted
  %first = f32[64,8]{{1,0}} get-tuple-element(%all-reduce.4), index=0
  %second = f32[64,8]{{1,0}} get-tuple-element(%all-reduce.4), index=1
  %back = bf16[64,8]{{1,0}} fusion(%first), kind=kLoop, calls=%narrowing
  %mine = bf16[16,8]{{1,0}} fusion(%back, %i), kind=kLoop, calls=%slicing
  ROOT %tuple = (f32[16,8]{{1,0}}, bf16[16,8]{{1,0}}, f32[64,8]{{1,0}}) tuple(%fusion.1, %mine, %second)
}}
"""

#: Two loops, one in the other. The inner one counts to 9 by twos from 1, its step in a fusion; the outer one is annotated.
LOOPS = f"""HloModule jit_step
{ADD}
%advance (n: s32[]) -> s32[] {{
  %n = s32[] parameter(0)
  %two = s32[] constant(2)
  ROOT %next = s32[] add(%n, %two)
}}

%below (x: s32[], y: s32[]) -> pred[] {{
  %x = s32[] parameter(0)
  %y = s32[] parameter(1)
  ROOT %less = pred[] compare(%x, %y), direction=LT
}}

%inner_body (state: (s32[], f32[4], s32[])) -> (s32[], f32[4], s32[]) {{
  %state = (s32[], f32[4]{{0}}, s32[]) parameter(0)
  %k = s32[] get-tuple-element(%state), index=0
  %v = f32[4]{{0}} get-tuple-element(%state), index=1
  %limit = s32[] get-tuple-element(%state), index=2
  %all-reduce.5 = f32[4]{{0}} all-reduce(%v), replica_groups=[4,2]<=[8], to_apply=%add
  %k.next = s32[] fusion(%k), kind=kLoop, calls=%advance
  ROOT %out = (s32[], f32[4]{{0}}, s32[]) tuple(%k.next, %all-reduce.5, %limit)
}}

%inner_condition (state.1: (s32[], f32[4], s32[])) -> pred[] {{
  %state.1 = (s32[], f32[4]{{0}}, s32[]) parameter(0)
  %k.1 = s32[] get-tuple-element(%state.1), index=0
  %limit.1 = s32[] get-tuple-element(%state.1), index=2
  ROOT %go = pred[] fusion(%k.1, %limit.1), kind=kLoop, calls=%below
}}

%outer_body (carry: (s32[], f32[4])) -> (s32[], f32[4]) {{
  %carry = (s32[], f32[4]{{0}}) parameter(0)
  %o = s32[] get-tuple-element(%carry), index=0
  %w = f32[4]{{0}} get-tuple-element(%carry), index=1
  %start = s32[] constant(1)
  %nine = s32[] constant(9)
  %copied = s32[] copy(%start)
  %init = (s32[], f32[4]{{0}}, s32[]) tuple(%copied, %w, %nine)
  %while.inner = (s32[], f32[4]{{0}}, s32[]) while(%init), condition=%inner_condition, body=%inner_body
  %u = f32[4]{{0}} get-tuple-element(%while.inner), index=1
  ROOT %again = (s32[], f32[4]{{0}}) tuple(%o, %u)
}}

%outer_condition (carry.1: (s32[], f32[4])) -> pred[] {{
  %carry.1 = (s32[], f32[4]{{0}}) parameter(0)
  ROOT %unknown = pred[] custom-call(%carry.1), custom_call_target="ask"
}}

ENTRY %main (p: f32[4]) -> f32[4] {{
  %p = f32[4]{{0}} parameter(0)
  %zero = s32[] constant(0)
  %pair = (s32[], f32[4]{{0}}) tuple(%zero, %p)
  %while.outer = (s32[], f32[4]{{0}}) while(%pair), condition=%outer_condition, body=%outer_body, \
metadata={{op_name="jit(step)/while"}}, backend_config={{"known_trip_count":{{"n":"3"}}}}
  ROOT %result = f32[4]{{0}} get-tuple-element(%while.outer), index=1
}}
"""

#: TPU: one all-gather drawn out over three fusions, the middle one inside a loop.
PIECES = """HloModule jit_step

%start (s: bf16[2,8]) -> bf16[16,8] {
  %s = bf16[2,8]{1,0} parameter(0)
  ROOT %all-gather.1 = bf16[16,8]{1,0} all-gather(%s), channel_id=5, replica_groups=mesh['axis_0'=8] {'axis_0'}, \
dimensions={0}, frontend_attributes={chain_id="0"}
}

%async_collective_fusion.7 (m: bf16[2,8]) -> bf16[16,8] {
  %m = bf16[2,8]{1,0} parameter(0)
  ROOT %all-gather.2 = bf16[16,8]{1,0} all-gather(%m), channel_id=5, replica_groups=mesh['axis_0'=8] {'axis_0'}, \
dimensions={0}, frontend_attributes={chain_id="0"}
}

%body (c: (s32[], bf16[2,8])) -> (s32[], bf16[2,8]) {
  %c = (s32[], bf16[2,8]{1,0}) parameter(0)
  %i = s32[] get-tuple-element(%c), index=0
  %x = bf16[2,8]{1,0} get-tuple-element(%c), index=1
  %piece = bf16[16,8]{1,0} fusion(%x), kind=kOutput, calls=%async_collective_fusion.7, \
backend_config={"window_config":{"estimated_cycles":"100"}}
  %one = s32[] constant(1)
  %next = s32[] add(%i, %one)
  ROOT %t = (s32[], bf16[2,8]{1,0}) tuple(%next, %x)
}

%condition (d: (s32[], bf16[2,8])) -> pred[] {
  %d = (s32[], bf16[2,8]{1,0}) parameter(0)
  %j = s32[] get-tuple-element(%d), index=0
  %four = s32[] constant(4)
  ROOT %less = pred[] compare(%j, %four), direction=LT
}

%done (e: bf16[2,8]) -> bf16[16,8] {
  %e = bf16[2,8]{1,0} parameter(0)
  ROOT %all-gather.3 = bf16[16,8]{1,0} all-gather(%e), channel_id=5, replica_groups=mesh['axis_0'=8] {'axis_0'}, \
dimensions={0}, frontend_attributes={chain_id="0"}
}

ENTRY %main (p: bf16[2,8]) -> bf16[16,8] {
  %p = bf16[2,8]{1,0} parameter(0)
  %async-collective-start = bf16[16,8]{1,0} fusion(%p), kind=kCustom, calls=%start, metadata={op_name="jit(step)/dot_general"}
  %zero = s32[] constant(0)
  %init = (s32[], bf16[2,8]{1,0}) tuple(%zero, %p)
  %while = (s32[], bf16[2,8]{1,0}) while(%init), condition=%condition, body=%body
  ROOT %async-collective-done = bf16[16,8]{1,0} fusion(%p), kind=kCustom, calls=%done, \
backend_config={"window_config":{"estimated_cycles":"7"}}
}
"""

_RING = "{{0,1},{1,2},{2,3},{3,0},{4,5},{5,6},{6,7},{7,4}}"
_BACK = "{{1,0},{2,1},{3,2},{0,3},{5,4},{6,5},{7,6},{4,7}}"

#: TPU: a gather inside a windowed product: one permute before its loop, two in each trip.
WINDOWED_LOOP = f"""HloModule jit_step

%windowed_dot_general_body_ag.2.clone (c: (u32[], f32[8], f32[8])) -> (u32[], f32[8], f32[8]) {{
  %c = (u32[], f32[8]{{0}}, f32[8]{{0}}) parameter(0)
  %i = u32[] get-tuple-element(%c), index=0
  %left = f32[8]{{0}} get-tuple-element(%c), index=1
  %right = f32[8]{{0}} get-tuple-element(%c), index=2
  %cp-start.1 = (f32[8]{{0}}, f32[8]{{0}}, u32[], u32[]) collective-permute-start(%left), source_target_pairs={_RING}
  %cp-start.2 = (f32[8]{{0}}, f32[8]{{0}}, u32[], u32[]) collective-permute-start(%right), source_target_pairs={_BACK}
  %cp-done.1 = f32[8]{{0}} collective-permute-done(%cp-start.1)
  %cp-done.2 = f32[8]{{0}} collective-permute-done(%cp-start.2)
  %two = u32[] constant(2)
  %next = u32[] add(%i, %two)
  ROOT %t = (u32[], f32[8]{{0}}, f32[8]{{0}}) tuple(%next, %cp-done.1, %cp-done.2)
}}

%windowed_dot_general_cond_ag.2.clone (d: (u32[], f32[8], f32[8])) -> pred[] {{
  %d = (u32[], f32[8]{{0}}, f32[8]{{0}}) parameter(0)
  %j = u32[] get-tuple-element(%d), index=0
  %four = u32[] constant(4)
  ROOT %less = pred[] compare(%j, %four), direction=LT
}}

ENTRY %main (p: f32[8]) -> f32[8] {{
  %p = f32[8]{{0}} parameter(0)
  %cp-start = (f32[8]{{0}}, f32[8]{{0}}, u32[], u32[]) collective-permute-start(%p), source_target_pairs={_RING}
  %cp-done = f32[8]{{0}} collective-permute-done(%cp-start)
  %zero = u32[] constant(0)
  %init = (u32[], f32[8]{{0}}, f32[8]{{0}}) tuple(%zero, %p, %cp-done)
  %while = (u32[], f32[8]{{0}}, f32[8]{{0}}) while(%init), condition=%windowed_dot_general_cond_ag.2.clone, \
body=%windowed_dot_general_body_ag.2.clone, metadata={{op_name="jit(step)/dot_general"}}
  ROOT %result = f32[8]{{0}} get-tuple-element(%while), index=1
}}
"""

#: TPU: a scatter inside a windowed product whose loop was unrolled. The first permute, of zeros, is part of it.
WINDOWED_CHAIN = f"""HloModule jit_step

%addition (u: f32[8], v: f32[8]) -> f32[8] {{
  %u = f32[8]{{0}} parameter(0)
  %v = f32[8]{{0}} parameter(1)
  ROOT %s = f32[8]{{0}} add(%u, %v)
}}

ENTRY %main (p: f32[8]) -> f32[8] {{
  %p = f32[8]{{0}} parameter(0)
  %zero = f32[] constant(0)
  %zeros = f32[8]{{0}} broadcast(%zero), dimensions={{}}
  %cp-start = (f32[8]{{0}}, f32[8]{{0}}, u32[], u32[]) collective-permute-start(%zeros), source_target_pairs={_RING}, \
metadata={{op_name="jit(step)/dot_general"}}
  %cp-done = f32[8]{{0}} collective-permute-done(%cp-start)
  %fusion.1 = f32[8]{{0}} fusion(%cp-done, %p), kind=kLoop, calls=%addition
  %cp-start.1 = (f32[8]{{0}}, f32[8]{{0}}, u32[], u32[]) collective-permute-start(%fusion.1), source_target_pairs={_RING}, \
metadata={{op_name="jit(step)/dot_general"}}
  %cp-done.1 = f32[8]{{0}} collective-permute-done(%cp-start.1)
  %fusion.2 = f32[8]{{0}} fusion(%cp-done.1, %p), kind=kLoop, calls=%addition
  %cp-start.2 = (f32[8]{{0}}, f32[8]{{0}}, u32[], u32[]) collective-permute-start(%fusion.2), source_target_pairs={_RING}, \
metadata={{op_name="jit(step)/dot_general"}}
  %cp-done.2 = f32[8]{{0}} collective-permute-done(%cp-start.2)
  ROOT %fusion.3 = f32[8]{{0}} fusion(%cp-done.2, %p), kind=kLoop, calls=%addition
}}
"""

CONDITIONAL = f"""HloModule jit_step
{ADD}
%yes (y: f32[8]) -> f32[8] {{
  %y = f32[8]{{0}} parameter(0)
  ROOT %all-reduce.6 = f32[8]{{0}} all-reduce(%y), replica_groups={{{{0,1}},{{2,3}},{{4,5}},{{6,7}}}}, to_apply=%add
}}

%no (n: f32[8]) -> f32[8] {{
  ROOT %n = f32[8]{{0}} parameter(0)
}}

ENTRY %main (p: f32[8], b: s32[]) -> f32[8] {{
  %p = f32[8]{{0}} parameter(0)
  %b = s32[] parameter(1)
  %alone = f32[8]{{0}} all-reduce(%p), replica_groups=[8,1]<=[8], to_apply=%add
  ROOT %choice = f32[8]{{0}} conditional(%b, %alone, %alone), branch_computations={{%yes, %no}}
}}
"""
