"""Bytes that compiled programs and their kernels move."""

import pytest

from kvjax.kernels.compiled.hlo import Module
from kvjax.kernels.compiled.host_arrays import copied_from_host
from kvjax.kernels.compiled.kernel_traffic import KernelTraffic
from kvjax.kernels.compiled.loops import turns
from kvjax.kernels.compiled.overlap import overlap
from kvjax.kernels.compiled.traffic import traffic

# What libtpu writes, shortened: 1,024 bfloat16 weights in four rows, fetched
# ahead in two parts, and a loop that reads a slot and writes another.
HLO = """\
HloModule jit_f, is_scheduled=true

%picked (p.0: bf16[8,128], p.1: s32[]) -> bf16[1,128] {
  %p.0 = bf16[8,128]{1,0:T(8,128)(2,1)} parameter(0)
  %p.1 = s32[]{:T(128)} parameter(1)
  %seen = bf16[8,128]{1,0} bitcast(%p.0)
  ROOT %pick = bf16[1,128]{1,0} dynamic-slice(%seen, %p.1), sizes={1,128}
}

%updated (p.2: bf16[8,128], p.3: bf16[1,128], p.4: s32[]) -> bf16[8,128] {
  %p.2 = bf16[8,128]{1,0:T(8,128)(2,1)} parameter(0)
  %p.3 = bf16[1,128]{1,0} parameter(1)
  %p.4 = s32[]{:T(128)} parameter(2)
  ROOT %up = bf16[8,128]{1,0} dynamic-update-slice(%p.2, %p.3, %p.4)
}

%body (s: (s32[], bf16[8,128])) -> (s32[], bf16[8,128]) {
  %s = (s32[]{:T(128)}, /*index=1*/bf16[8,128]{1,0}) parameter(0)
  %step = s32[]{:T(128)S(6)} get-tuple-element(%s), index=0
  %slots = bf16[8,128]{1,0:T(8,128)(2,1)} get-tuple-element(%s), index=1
  %one = bf16[1,128]{1,0:T(2,128)S(1)} fusion(%slots, %step), kind=kLoop, \
calls=%picked
  %all = bf16[8,128]{1,0} fusion(%slots, %one, %step), kind=kLoop, \
calls=%updated
  ROOT %t = (s32[]{:T(128)}, bf16[8,128]{1,0}) tuple(%step, %all)
}

%condition (c: (s32[], bf16[8,128])) -> pred[] {
  %c = (s32[]{:T(128)}, bf16[8,128]{1,0}) parameter(0)
  ROOT %go = pred[]{:T(512)S(6)} constant(true)
}

%idle (i: f32[256]) -> f32[256] {
  %i = f32[256]{0:T(256)} parameter(0)
  ROOT %abs = f32[256]{0:T(256)} abs(%i)
}

%busy (b: f32[256]) -> f32[256] {
  %b = f32[256]{0:T(256)} parameter(0)
  %negate = f32[256]{0:T(256)} negate(%b)
  ROOT %sum = f32[256]{0:T(256)} add(%negate, %b)
}

ENTRY %main (w: bf16[4,256], n: pred[], x: f32[256], y: (s32[], bf16[8,128])) \
-> f32[256] {
  %w = bf16[4,256]{1,0:T(8,128)(2,1)} parameter(0)
  %fetch = ((bf16[4,256]{1,0:T(8,128)(2,1)}), bf16[2,256]{1,0:T(8,128)S(1)}, \
s32[]{:S(2)}) slice-start(%w), slice={[0:2], [0:256]}
  %part = bf16[2,256]{1,0:T(8,128)S(1)} slice-done(%fetch)
  %n = pred[]{:T(512)S(6)} parameter(1)
  %x = f32[256]{0:T(256)} parameter(2)
  %y = (s32[]{:T(128)}, bf16[8,128]{1,0}) parameter(3)
  %loop = (s32[]{:T(128)}, bf16[8,128]{1,0}) while(%y), \
condition=%condition, body=%body
  %branch = f32[256]{0:T(256)} conditional(%n, %x, %x), \
branch_computations={%idle, %busy}
  ROOT %twice.1 = f32[256]{0:T(256)} custom-call(%branch, /*index=1*/%part), \
custom_call_target="tpu_custom_call", backend_config={"custom_call_config":\
{"body":"TUzv+/=="},"used_scoped_memory_configs":[{"memory_space":"1",\
"offset":"0","size":"4096"},{"memory_space":"6","offset":"0","size":"8"}]}
}
"""

# A host's work that a fusion and a kernel run beside, and some that is waited
# for at once.
HOST = """\
ENTRY %main (x: f32[8,128]) -> f32[8,128] {
  %x = f32[8,128]{1,0} parameter(0)
  %copy = (f32[8,128]{1,0:S(1)}, f32[8,128]{1,0}, u32[]{:S(2)}) copy-start(%x)
  %before = f32[8,128]{1,0} fusion(%x), kind=kLoop, calls=%one
  %go = ((f32[8,128]{1,0:S(5)}), f32[8,128]{1,0}, u32[]{:S(2)}) \
custom-call-start(%x), async_execution_thread="host", \
custom_call_target="HostExecute", called_computations={%gather}
  %near = f32[8,128]{1,0} fusion(%before), kind=kLoop, calls=%one
  %there = f32[8,128]{1,0:S(1)} copy-done(%copy)
  %kernel.2 = f32[8,128]{1,0} custom-call(%near, %there), \
custom_call_target="tpu_custom_call"
  %rows = f32[8,128]{1,0} custom-call-done(%go)
  %after = f32[8,128]{1,0} fusion(%rows, %kernel.2), kind=kLoop, calls=%two
  %again = ((f32[8,128]{1,0:S(5)}), f32[8,128]{1,0}, u32[]{:S(2)}) \
custom-call-start(%after), async_execution_thread="host", \
custom_call_target="HostExecute", called_computations={%gather}
  ROOT %last = f32[8,128]{1,0} custom-call-done(%again)
}
"""

# What XLA writes for GPUs of either version of JAX, shortened.
GPU = """\
ENTRY %main (x: f32[8,128]) -> f32[8,128] {
  %x = f32[8,128]{1,0} parameter(0)
  %mpmd_map.4 = f32[8,128]{1,0} custom-call(%x), \
custom_call_target="mosaic_gpu_v2", api_version=API_VERSION_TYPED_FFI
  %potrf.1 = f32[8,128]{1,0} custom-call(%mpmd_map.4), \
custom_call_target="cusolver_potrf_ffi"
  ROOT %attend.2 = f32[8,128]{1,0} custom-call(%potrf.1), \
custom_call_target="__cudnn$fmhaSoftmax", backend_config={}
}
"""

# Of two caches on the host the device reads rows of one, and all of the other.
OFFLOADED = """\
ENTRY %main (rows: f32[64,128], all: f32[32,128], own: f32[64,128]) \
-> f32[8,128] {
  %rows = f32[64,128]{1,0:T(8,128)S(5)} parameter(0)
  %all = f32[32,128]{1,0:T(8,128)S(5)} parameter(1)
  %own = f32[16,128]{1,0:T(8,128)} parameter(2)
  %seen = f32[64,128]{1,0:T(8,128)S(5)} bitcast(%rows)
  %some = f32[8,128]{1,0:T(8,128)} dynamic-slice(%seen), sizes={8,128}
  %come = f32[32,128]{1,0:T(8,128)} copy(%all)
  %near = f32[32,128]{1,0:T(8,128)S(1)} copy(%come)
  %same = f32[16,128]{1,0:T(8,128)} copy(%own)
  ROOT %sum = f32[8,128]{1,0:T(8,128)} fusion(%some, %near, %same), \
kind=kLoop, calls=%one
}
"""

# Layers that loop within tokens: a layer's key is read and written where it
# stands in a stack, in a fusion within a fusion; a row of the logits follows.
LAYERS = """\
%own (p.0: bf16[4,8,128], p.1: s32[]) -> bf16[8,128] {
  %p.0 = bf16[4,8,128]{2,1,0} parameter(0)
  %p.1 = s32[]{:T(128)} parameter(1)
  %zero.0 = s32[]{:T(128)} constant(0)
  %pick = bf16[1,8,128]{2,1,0} dynamic-slice(%p.0, %p.1, %zero.0, %zero.0)
  ROOT %flat = bf16[8,128]{1,0} bitcast(%pick)
}

%product (p.2: bf16[4,8,128], p.3: s32[], p.4: bf16[8]) -> bf16[128] {
  %p.2 = bf16[4,8,128]{2,1,0} parameter(0)
  %p.3 = s32[]{:T(128)} parameter(1)
  %p.4 = bf16[8]{0:S(1)} parameter(2)
  %weights = bf16[8,128]{1,0} fusion(%p.2, %p.3), kind=kLoop, calls=%own
  ROOT %times = bf16[128]{0:S(1)} dot(%p.4, %weights)
}

%layer (s: (s32[], bf16[8], bf16[4,8,128], s32[])) -> \
(s32[], bf16[8], bf16[4,8,128], s32[]) {
  %s = (s32[], bf16[8]{0:S(1)}, bf16[4,8,128]{2,1,0}, s32[]) parameter(0)
  %i = s32[] get-tuple-element(%s), index=0
  %x = bf16[8]{0:S(1)} get-tuple-element(%s), index=1
  %stack = bf16[4,8,128]{2,1,0} get-tuple-element(%s), index=2
  %last = s32[] get-tuple-element(%s), index=3
  %new = bf16[128]{0:S(1)} fusion(%stack, %i, %x), kind=kOutput, calls=%product
  %row = bf16[1,1,128]{2,1,0:S(1)} bitcast(%new)
  %written = bf16[4,8,128]{2,1,0} dynamic-update-slice(%stack, %row, %i, %i, %i)
  %one = s32[] constant(1)
  %next = s32[] add(%i, %one)
  ROOT %t = (s32[], bf16[8]{0:S(1)}, bf16[4,8,128]{2,1,0}, s32[]) \
tuple(%next, %x, %written, %last)
}

%more (c: (s32[], bf16[8], bf16[4,8,128], s32[])) -> pred[] {
  %c = (s32[], bf16[8]{0:S(1)}, bf16[4,8,128]{2,1,0}, s32[]) parameter(0)
  %j = s32[] get-tuple-element(%c), index=0
  %end = s32[] get-tuple-element(%c), index=3
  ROOT %less = pred[] compare(%j, %end), direction=LT
}

%token (u: (s32[], bf16[8], bf16[4,8,128])) -> (s32[], bf16[8], bf16[4,8,128]) {
  %u = (s32[], bf16[8]{0:S(1)}, bf16[4,8,128]{2,1,0}) parameter(0)
  %step = s32[] get-tuple-element(%u), index=0
  %y = bf16[8]{0:S(1)} get-tuple-element(%u), index=1
  %all = bf16[4,8,128]{2,1,0} get-tuple-element(%u), index=2
  %zero = s32[] constant(0)
  %first = s32[] copy(%zero)
  %four = s32[] constant(4)
  %given = (s32[], bf16[8]{0:S(1)}, bf16[4,8,128]{2,1,0}, s32[]) \
tuple(%first, %y, %all, %four)
  %layers = (s32[], bf16[8]{0:S(1)}, bf16[4,8,128]{2,1,0}, s32[]) \
while(%given), condition=%more, body=%layer
  %after = bf16[4,8,128]{2,1,0} get-tuple-element(%layers), index=2
  %two = s32[] constant(1)
  %then = s32[] add(%two, %step)
  ROOT %v = (s32[], bf16[8]{0:S(1)}, bf16[4,8,128]{2,1,0}) \
tuple(%then, %y, %after)
}

%on (d: (s32[], bf16[8], bf16[4,8,128])) -> pred[] {
  %d = (s32[], bf16[8]{0:S(1)}, bf16[4,8,128]{2,1,0}) parameter(0)
  %k = s32[] get-tuple-element(%d), index=0
  %most = s32[] constant(100)
  ROOT %below = pred[] compare(%k, %most), direction=LT
}

ENTRY %main (w: bf16[4,8,128], q: bf16[8]) -> bf16[4,8,128] {
  %w = bf16[4,8,128]{2,1,0} parameter(0)
  %q = bf16[8]{0:S(1)} parameter(1)
  %none = s32[] constant(0)
  %begin = (s32[], bf16[8]{0:S(1)}, bf16[4,8,128]{2,1,0}) tuple(%none, %q, %w)
  %tokens = (s32[], bf16[8]{0:S(1)}, bf16[4,8,128]{2,1,0}) while(%begin), \
condition=%on, body=%token
  ROOT %end.1 = bf16[4,8,128]{2,1,0} get-tuple-element(%tokens), index=2
}
"""

# The fetched part, the loop's slot read and written, the busy branch.
AROUND = 2 * 256 * 2 + 2 * 128 * 2 + 5 * 256 * 4


@pytest.fixture(scope="module")
def module():
  return Module.of(HLO)


def test_kernels_for_gpus_are_those_of_pallas_and_cudnn():
  module = Module.of(GPU)
  names = [each.kernel for each in module if each.is_kernel]
  assert names == ["mpmd_map", "attend"]


def test_a_program_is_read(module):
  assert module.entry == "main"
  assert [each.kernel for each in module if each.is_kernel] == ["twice"]
  (kernel,) = (each for each in module if each.is_kernel)
  assert kernel.operands == ("branch", "part")
  assert kernel.vmem == 4096
  fetch = module.computations["main"]["fetch"]
  assert [x.shape for x in fetch.results] == [(4, 256), (2, 256), ()]
  assert [x.space for x in fetch.results] == [0, 1, 2]
  go = module.computations["condition"]["go"]
  assert go.results[0].nbytes == 1


def test_what_runs_beside_the_host_is_counted(module):
  assert overlap(Module.of(HOST)) == 2
  assert overlap(module) == 0


def test_traffic_is_what_passes_between_hbm_and_cores(module):
  """Of an unknown kernel what is in HBM: not the part that was fetched."""
  assert traffic(module, []) == AROUND + 2 * 256 * 4
  assert traffic(module, [], turn=True) == 2 * 128 * 2


# What a layer reads of its own, the key that it writes, and its counter, which
# is read as an index, added to and compared.
LAYER = 8 * 128 * 2 + 128 * 2 + 4 + 3 * 4 + 2 * 4 + 1


def test_layers_count_as_often_as_a_token_passes_them():
  found = Module.of(LAYERS)
  loops = {
    each.name: turns(found, own, each)
    for own in found.computations.values()
    for each in own.values()
    if each.opcode == "while"
  }
  assert loops == {"layers": 4, "tokens": 100}
  token = 4 * LAYER + 2 * 4 + 3 * 4
  assert traffic(found, [], turn=True) == token
  assert traffic(found, []) == 100 * (token + 2 * 4 + 1)


def test_what_a_fusion_lays_out_anew_counts_as_far_as_it_is_read():
  """On tpu7x the stack is laid out anew within the fusion that picks of it."""
  pick = "  %pick = bf16[1,8,128]{2,1,0} dynamic-slice(%p.0"
  anew = """\
%anew (p.5: bf16[4,8,128]) -> bf16[4,8,128] {
  %p.5 = bf16[4,8,128]{2,1,0:T(16,128)(2,1)} parameter(0)
  ROOT %same = bf16[4,8,128]{2,1,0:T(8,128)(2,1)} copy(%p.5)
}

"""
  again = (
    "  %again = bf16[4,8,128]{2,1,0} fusion(%p.0), kind=kLoop, calls=%anew\n"
  )
  assert pick in LAYERS
  text = anew + LAYERS.replace(pick, again + pick.replace("%p.0", "%again"))
  found, before = Module.of(text), Module.of(LAYERS)
  assert traffic(found, []) == traffic(before, [])
  alone = """\
ENTRY %main (w: bf16[4,8,128]) -> bf16[4,8,128] {
  %w = bf16[4,8,128]{2,1,0} parameter(0)
  ROOT %x = bf16[4,8,128]{2,1,0} fusion(%w), kind=kLoop, calls=%anew
}
"""
  assert traffic(Module.of(anew + alone), []) == 2 * (4 * 8 * 128 * 2)


@pytest.mark.parametrize(
  ("old", "new"),
  [
    # It counts down, by what data say, from what data say, or to it.
    ("compare(%k, %most), direction=LT", "compare(%most, %k), direction=LT"),
    ("add(%two, %step)", "add(%step, %step)"),
    ("tuple(%none, %q, %w)", "tuple(%drawn, %q, %w)"),
    ("%most = s32[] constant(100)", "%most = s32[] parameter(1)"),
  ],
)
def test_a_loop_that_data_end_has_no_number(old, new):
  assert old in LAYERS
  drawn = "  %none = s32[] constant(0)\n"
  text = LAYERS.replace(drawn, f"{drawn}  %drawn = s32[] parameter(2)\n")
  found = Module.of(text.replace(old, new))
  entry = found.computations["main"]
  assert turns(found, entry, entry["tokens"]) is None


def test_work_beside_the_host_counts_in_every_layer():
  """Within the tokens' loop, which counts once: as for bytes."""
  beside = """\
  %go = (bf16[8]{0:S(5)}, bf16[8]{0}, u32[]{:S(2)}) \
custom-call-start(%x), async_execution_thread="host", \
custom_call_target="HostExecute", called_computations={%gather}
  %new = """
  done = """\
  %found = bf16[8]{0} custom-call-done(%go)
  %row = """
  text = LAYERS.replace("  %new = ", beside).replace("  %row = ", done)
  assert overlap(Module.of(text)) == 4
  assert overlap(Module.of(LAYERS)) == 0


def test_a_known_kernel_counts_as_its_blocks_do(module):
  known = KernelTraffic("twice", ((256,),), read=(70, 9000), written=(7,))
  other = KernelTraffic("twice", ((255,),), read=(1, 1), written=(1,))
  assert traffic(module, [other, known]) == AROUND + 77


def test_what_comes_whole_from_the_host_counts():
  assert copied_from_host(Module.of(OFFLOADED)) == 32 * 128 * 4
  rows_alone = OFFLOADED.replace("%come = f32[32", "%come = f32[31")
  assert copied_from_host(Module.of(rows_alone)) == 0
