"""Saved caches are read to the devices of any mesh, and to no other memory."""

import jax
import pytest
from saved_caches import QUESTIONS, ROWS, assert_same_bits, load, save

import kvjax
from kvjax import files
from kvjax.cache.sharding import parse_mesh, split_mesh
from kvjax.testing import TinyModel

MODEL = TinyModel(
  kvjax.Geometry.uniform(
    layers=2, heads=8, kv_heads=2, head_dim=8, max_positions=512
  )
)
PLANS = {
  "contiguous": "snapkv:window=4",
  "packed": "ada/keydiff",
  "pooled": "kvzip",
  "indexed": "quest:page=4",
  "offloaded": "ctkvr:offload=true",
}


def on(mesh):
  """A mesh whose axis "model" is split where it does not divide the heads."""
  return jax.set_mesh(split_mesh(parse_mesh(mesh), kv_heads=2))


def made(method):
  prompts = kvjax.Prompts.of(ROWS, padded=64)
  plan = kvjax.get_plan(method, kvjax.Tokens(15))
  return kvjax.prefill(MODEL, MODEL.init(), prompts, plan)[0]


def answers(cache):
  decoding = kvjax.Decoding(6)
  return kvjax.generate(MODEL, MODEL.init(), cache, QUESTIONS, decoding).rows()


def buffers(tree):
  """Where the parts of large arrays are."""
  return {
    shard.data.unsafe_buffer_pointer()
    for leaf in jax.tree.leaves(tree)
    if leaf.ndim > 3 and leaf.size
    for shard in leaf.addressable_shards
  }


@pytest.mark.parametrize("kind", PLANS)
@pytest.mark.parametrize(
  "mesh", ["data:2,model:2", "data:2,context:2", "model:4"]
)
def test_devices_read_their_own_parts(kind, mesh, tmp_path, monkeypatch):
  cache = made(PLANS[kind])
  expected = answers(cache)
  save(cache, tmp_path, model=MODEL)
  read = {}
  load_arrays = files.orbax().load

  def load_and_note(*arguments):
    read.update(load_arrays(*arguments))
    return read

  monkeypatch.setattr(files.orbax(), "load", load_and_note)
  with on(mesh):
    again = load(tmp_path, model=MODEL)
    # Nothing was moved or copied after it was read.
    assert buffers(again.stacks) <= buffers(
      [array for array in read.values() if isinstance(array, jax.Array)]
    )
    largest = max(jax.tree.leaves(again.stacks), key=lambda leaf: leaf.size)
    assert largest.addressable_shards[0].data.size < largest.size
    assert answers(again) == expected
  assert_same_bits(again, cache)
