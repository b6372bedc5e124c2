"""What devices say to each other while they run a program together."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax.cache.sharding import parse_mesh, split_mesh
from kvjax.engine import blocks
from kvjax.engine.preparing import prepare_repeated
from kvjax.experiments.compilation.engine_programs import (
  placed_shapes,
  share_bytes,
)
from kvjax.experiments.compilation.published import LLAMA, Published
from kvjax.kernels.attention import chunked
from kvjax.kernels.compiled.collectives import (
  Collective,
  collectives,
  counts,
  total_bytes,
)
from kvjax.kernels.compiled.hlo import Module
from kvjax.model import Geometry
from kvjax.registry.registry import METHODS
from kvjax.testing import TinyModel

_ROWS, _LENGTH, _BLOCK = 4, 96, 16
_ALL_REDUCE = re.compile(r" = (\S+) all-reduce\(")


def all_reduced(plan, model):
  """Shapes of what all devices sum up in a prefill in blocks."""
  lengths = np.full(_ROWS, _LENGTH)
  tokens = jax.ShapeDtypeStruct((_ROWS, _LENGTH), jnp.int32)
  prepared = prepare_repeated(plan, lengths, _LENGTH, model.geometry)
  program = blocks._prefill_blocks.lower(
    model,
    jax.eval_shape(model.init),
    tokens,
    jnp.asarray(lengths, jnp.int32),
    prepared,
    None,
  )
  return _ALL_REDUCE.findall(program.compile().as_text())


@pytest.mark.parametrize("method", ["full", "keydiff"])
def test_blocks_are_attended_to_without_asking_other_devices(
  monkeypatch, method
):
  # A block attends to the cache in chunks of a few slots.
  monkeypatch.setattr(chunked, "LOGITS", 2**8)
  model = TinyModel(Geometry.uniform(2, 4, 2, 8, 4096))
  plan = kvjax.get_plan(
    method, kvjax.Tokens(24), schedule=kvjax.Schedule(block=_BLOCK)
  )
  with jax.set_mesh(parse_mesh("data:4")):
    found = all_reduced(plan, model)
  # The first block and the loop over the others each ask whether any layer has
  # too many tokens, and for the length of the longest row that an eviction
  # leaves.
  evicting = ["pred[]", "s32[]"] * 2 if method == "keydiff" else []
  assert sorted(found) == sorted(evicting)


# Without methods that are made with a file, which is of another model, and
# those whose prefill reads numbers that shapes do not have.
_NOT_BY_SHAPES = {"kvzap", "fast_kvzip", "kvzip", "simlayerkv", "full"}
METHOD_NAMES = sorted({"ada/snapkv", *METHODS} - _NOT_BY_SHAPES)


def cache_of(name, model, params, tokens, rows):
  """Shapes of a cache of a quarter of a prompt, on the mesh in context."""
  plan = kvjax.get_plan(name, kvjax.Retention(0.25 if name != "full" else 1.0))
  lengths = np.full(rows, tokens, np.int32)

  def prefilled(params, given):
    prompts = kvjax.Prompts(given, lengths)
    cache, _ = kvjax.prefill(model, params, prompts, plan)
    return kvjax.reserve(cache, 32)

  given = jax.ShapeDtypeStruct((rows, tokens), jnp.int32)
  return placed_shapes(jax.eval_shape(prefilled, params, given))


@pytest.mark.parametrize("name", METHOD_NAMES)
def test_a_compressed_cache_takes_less_of_a_device_than_a_full_one(name):
  mesh = parse_mesh("model:4")
  model, params = LLAMA.shapes(mesh, 2)
  with jax.set_mesh(mesh):
    full, kept = (
      share_bytes(cache_of(each, model, params, 4096, 1))
      for each in ("full", name)
    )
  assert kept < full


@pytest.mark.parametrize("kv_heads", [2, 3])
@pytest.mark.parametrize("name", ["keydiff", "adakv"])
def test_devices_share_what_is_kept_of_heads_that_do_not_divide(name, kv_heads):
  """In pages: two on four devices, as eight on sixteen, and three."""
  heads = {"num_attention_heads": 12 * kv_heads, "head_dim": 128}
  fields = {**LLAMA.fields, **heads, "num_key_value_heads": kv_heads}
  mesh = split_mesh(parse_mesh("model:4"), kv_heads)
  model, params = Published("few", fields).shapes(mesh, 2)
  with jax.set_mesh(mesh):
    full, kept = (
      share_bytes(cache_of(each, model, params, 4096, 1))
      for each in ("full", name)
    )
  slots = 4096 * kv_heads * 2 * (2 * 128 * 2 + 4)
  # Besides, all devices of a head have room for the answer.
  assert slots / 4 < full < 1.05 * slots / 4
  assert kept < 0.3 * full


def test_collectives_in_loops_and_branches_are_counted():
  text = """
%body (x: f32[4]) -> f32[4] {
  %x = (s32[], f32[4]{0}) parameter(0)
  %n = s32[] get-tuple-element(%x), index=0
  %one = s32[] constant(1)
  %next = s32[] add(%n, %one)
  %part = f32[4]{0} get-tuple-element(%x), index=1
  %sum = f32[4]{0} all-reduce(%part), to_apply=%add
  ROOT %out = (s32[], f32[4]{0}) tuple(%next, %sum)
}

%condition (x: f32[4]) -> pred[] {
  %x = (s32[], f32[4]{0}) parameter(0)
  %n = s32[] get-tuple-element(%x), index=0
  %three = s32[] constant(3)
  ROOT %less = pred[] compare(%n, %three), direction=LT
}

ENTRY %main (x: f32[4]) -> f32[4] {
  %x = f32[4]{0} parameter(0)
  %zero = s32[] constant(0)
  %start = (f32[4]{0}, f32[8]{0}) all-gather-start(%x), dimensions={0}
  %both = (s32[], f32[4]{0}) tuple(%zero, %x)
  %loop = (s32[], f32[4]{0}) while(%both), condition=%condition, body=%body
  ROOT %end = f32[4]{0} get-tuple-element(%loop), index=1
}
"""
  module = Module.of(text)
  found = collectives(module)
  assert found == [
    Collective("all-gather", 32, 32, 1),
    Collective("all-reduce", 16, 16, 3),
  ]
  assert counts(found) == {"all-gather": 1, "all-reduce": 3}
  assert total_bytes(found) == 80
  assert collectives(module, turn=True) == [Collective("all-reduce", 16, 16, 1)]


# As libtpu 0.0.50 compiles for v5e and v5p, with shorter lists of operands.
COMPILED = """
%fused_computation.9 (param_0.16: bf16[4096,1024]) -> (bf16[4096,1024], bf16[32768,1024], s32[2]) {
  %param_0.16 = bf16[4096,1024]{1,0:T(8,128)(2,1)} parameter(0)
  %all-gather.5 = bf16[32768,1024]{1,0:T(8,128)(2,1)} all-gather(%param_0.16), channel_id=1, dimensions={0}, frontend_attributes={chain_id="0"}
  ROOT %custom-call.1 = (bf16[4096,1024]{1,0:T(8,128)(2,1)}, bf16[32768,1024]{1,0:T(8,128)(2,1)S(1)}, s32[2]{0:S(4)}) custom-call(%all-gather.5), custom_call_target="AsyncCollectiveStart"
}

%async_collective_fusion.8 (param_0.19: bf16[4096,1024]) -> (bf16[4096,4096], bf16[32768,1024]) {
  %param_0.19 = bf16[4096,1024]{1,0:T(8,128)(2,1)} parameter(0)
  %product = bf16[4096,4096]{1,0:T(8,128)(2,1)} convolution(%param_0.19, %param_0.19), dim_labels=bf_io->bf
  %all-gather.7 = bf16[32768,1024]{1,0:T(8,128)(2,1)S(1)} all-gather(%param_0.19), channel_id=1, dimensions={0}, frontend_attributes={chain_id="0"}
  ROOT %tuple.11 = (bf16[4096,4096]{1,0:T(8,128)(2,1)}, bf16[32768,1024]{1,0:T(8,128)(2,1)S(1)}) tuple(%product, %all-gather.7)
}

%fused_computation.13 (param_0.26: bf16[4096,1024]) -> bf16[32768,1024] {
  %param_0.26 = bf16[4096,1024]{1,0:T(8,128)(2,1)} parameter(0)
  %all-gather.13 = bf16[32768,1024]{1,0:T(8,128)(2,1)} all-gather(%param_0.26), channel_id=1, dimensions={0}, frontend_attributes={chain_id="0"}
  ROOT %custom-call.3 = bf16[32768,1024]{1,0:T(8,128)(2,1)S(1)} custom-call(%param_0.26, %all-gather.13), custom_call_target="AsyncCollectiveDone"
}

%all-reduce-scatter (input: bf16[4096,1024]) -> bf16[1056,1024] {
  %input = bf16[4096,1024]{1,0:T(8,128)(2,1)} parameter(0)
  %zero = bf16[] constant(0)
  %pad = bf16[4224,1024]{1,0:T(8,128)(2,1)} pad(%input, %zero), padding=0_128x0_0
  %all-reduce.1 = bf16[4224,1024]{1,0:T(8,128)(2,1)} all-reduce(%pad), channel_id=2, to_apply=%add
  %own = u32[] partition-id()
  ROOT %dynamic-slice.1 = bf16[1056,1024]{1,0:T(8,128)(2,1)} dynamic-slice(%all-reduce.1, %own), dynamic_slice_sizes={1056,1024}
}

ENTRY %main.0_spmd (param: bf16[4096,1024]) -> bf16[1056,1024] {
  %param = bf16[4096,1024]{1,0:T(8,128)(2,1)} parameter(0)
  %async-collective-start = (bf16[4096,1024]{1,0:T(8,128)(2,1)}, bf16[32768,1024]{1,0:T(8,128)(2,1)S(1)}, s32[2]{0:S(4)}) fusion(%param), kind=kCustom, calls=%fused_computation.9
  %fusion.8 = (bf16[4096,4096]{1,0:T(8,128)(2,1)}, bf16[32768,1024]{1,0:T(8,128)(2,1)S(1)}) fusion(%param), kind=kOutput, calls=%async_collective_fusion.8
  %async-collective-done = bf16[32768,1024]{1,0:T(8,128)(2,1)S(1)} fusion(%param), kind=kCustom, calls=%fused_computation.13
  %fusion = bf16[1056,1024]{1,0:T(8,128)(2,1)} fusion(%param), kind=kCustom, calls=%all-reduce-scatter
  %slice = bf16[96,1024]{1,0:T(8,128)(2,1)} slice(%param), slice={[0:96], [0:1024]}
  %collective-permute-start = (bf16[96,1024]{1,0:T(8,128)(2,1)}, bf16[96,1024]{1,0:T(8,128)(2,1)}, u32[]{:S(2)}, u32[]{:S(2)}) collective-permute-start(%slice), channel_id=1, source_target_pairs={{0,1},{1,2},{2,3}}
  %collective-permute-done = bf16[96,1024]{1,0:T(8,128)(2,1)} collective-permute-done(%collective-permute-start)
  ROOT %result = bf16[1056,1024]{1,0:T(8,128)(2,1)} copy(%fusion)
}
"""  # noqa: E501


def test_collectives_that_run_beside_products_count_once():
  gathered, scattered = 32768 * 1024 * 2, 1056 * 1024 * 2
  passed = 96 * 1024 * 2
  assert collectives(Module.of(COMPILED)) == [
    Collective("all-gather", gathered, gathered, 1),
    Collective("reduce-scatter", scattered, scattered, 1),
    Collective("collective-permute", passed, passed, 1),
  ]


def test_collectives_that_are_started_count_their_results_alone():
  """As XLA writes them for other devices."""
  text = """
%wrapped (x: f32[8]) -> f32[2] {
  %x = f32[8]{0} parameter(0)
  ROOT %sum = f32[2]{0} reduce-scatter(%x), dimensions={0}, to_apply=%add
}

ENTRY %main (x: f32[8], y: f32[4]) -> f32[8] {
  %x = f32[8]{0} parameter(0)
  %y = f32[4]{0} parameter(1)
  %sums = (f32[8]{0}, f32[4]{0}) all-reduce-start(%x, %y), to_apply=%add
  %all = ((f32[8]{0}, f32[4]{0}), (f32[32]{0}, f32[16]{0})) all-gather-start(%x, %y), dimensions={0}
  %part = ((f32[8]{0}), f32[2]{0}, u32[]) async-start(%x), calls=%wrapped
  ROOT %x.1 = f32[8]{0} copy(%x)
}
"""  # noqa: E501
  assert collectives(Module.of(text)) == [
    Collective("all-reduce", 48, 32, 1),
    Collective("all-gather", 192, 128, 1),
    Collective("reduce-scatter", 8, 8, 1),
  ]
