"""KV heads that the axis "model" does not divide: devices in groups."""

import functools
import math

import jax
import jax.numpy as jnp
import mesh_answers
import numpy as np
import pytest
from mesh_answers import answered, assert_same

import kvjax
from kvjax.cache.sharding import parse_mesh, split_mesh
from kvjax.kernels.attention import attention
from kvjax.model import Geometry
from kvjax.testing import TinyModel

RNG = np.random.default_rng(0)
# No token twice: equal keys would tie, and ties fall as rounding falls.
ROWS = [RNG.permutation(64)[:n].tolist() for n in (50, 41)]
# Query heads and KV heads, and devices of "model" and "group", of four.
HEADS = {
  "3": (12, 3, 1, 4),
  "2": (8, 2, 2, 2),
  "1": (4, 1, 1, 4),
  "6": (12, 6, 2, 2),
  # Query heads that four devices cannot share out.
  "3x2": (6, 3, 1, 4),
}
PLANS = {
  "dense": kvjax.get_plan("full", kvjax.Retention(1.0)),
  "evicting": kvjax.get_plan("snapkv:window=5", kvjax.Retention(0.5)),
  "int8": kvjax.get_plan("keydiff", kvjax.Retention(0.5), kv_dtype="int8"),
  "chunks": kvjax.get_plan(
    "keydiff", kvjax.Tokens(24), schedule=kvjax.Schedule(block=16)
  ),
  "blocks": kvjax.get_plan(
    "keydiff", kvjax.Tokens(24), schedule=kvjax.Schedule(block=16, every=4)
  ),
  "masses": kvjax.get_plan("compactor:chunk=16", kvjax.Retention(0.5)),
  "packed": kvjax.get_plan("ada/snapkv:window=5", kvjax.Retention(0.5)),
  "sparse": kvjax.get_plan("ctkvr:sinks=2:local=5:probes=2", kvjax.Tokens(8)),
  "lists": kvjax.get_plan("quest:dense_layers=", kvjax.Tokens(16)),
}


def model_of(heads):
  queries, kv_heads, *_ = HEADS[heads]
  return TinyModel(Geometry.uniform(2, queries, kv_heads, 8, 512))


@functools.cache
def answers(heads, name, mesh=None):
  return answered(model_of(heads), PLANS[name], ROWS, mesh)


@pytest.mark.parametrize("mesh", ["model:4", "data:2,model:2"])
@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("name", PLANS)
def test_devices_in_groups_answer_as_one(name, heads, mesh):
  assert_same(answers(heads, name), answers(heads, name, mesh))


@pytest.mark.parametrize("heads", HEADS)
def test_the_axis_is_split_by_what_divides_the_heads(heads):
  _, kv_heads, model, group = HEADS[heads]
  mesh = split_mesh(parse_mesh("model:4"), kv_heads)
  assert dict(mesh.shape) == {"data": 1, "model": model, "group": group}
  assert model == math.gcd(kv_heads, 4)
  assert mesh.devices.ravel().tolist() == jax.devices()
  whole = parse_mesh("data:2,model:2")
  assert split_mesh(whole, 2 * kv_heads) is whole


def shares(tree):
  """Shapes of what a device has of the arrays of a tree."""
  return [x.addressable_shards[0].data.shape for x in jax.tree.leaves(tree)]


def test_a_device_has_its_part_of_the_heads():
  (stack,) = answers("2", "blocks", "model:4")[0].stacks
  (keys,) = shares(stack.keys)
  assert keys[2] == 1  # of two
  (stack,) = answers("6", "blocks", "model:4")[0].stacks
  (keys,) = shares(stack.keys)
  assert keys[2] == 3  # of six


@pytest.mark.parametrize("name", ["dense", "evicting", "chunks", "packed"])
def test_a_device_has_its_part_of_the_pages(name):
  for heads in ("3", "2"):
    (stack,) = answers(heads, name, "model:4")[0].stacks
    whole = stack.pages.heads.shape[2]
    assert shares(stack.pages.heads) == [(2, 2, whole // 4)]


def device_bytes(tree):
  shards = (x.addressable_shards[0].data for x in jax.tree.leaves(tree))
  return sum(shard.nbytes for shard in shards)


@pytest.mark.parametrize("block", [None, 64])
def test_a_group_shares_out_the_slots_of_its_heads(block):
  """Two heads on four devices take half of what they take on two devices."""
  model = model_of("2")
  rows = [(np.arange(256) % 64).tolist()]
  plan = kvjax.get_plan(
    "keydiff", kvjax.Tokens(128), schedule=kvjax.Schedule(block=block)
  )
  stacks = []
  for axes in ("model:2", "model:4"):
    with jax.set_mesh(split_mesh(parse_mesh(axes), 2)):
      cache, _ = kvjax.prefill(
        model, model.init(), kvjax.Prompts.of(rows), plan
      )
    stacks += cache.stacks
  slots, packed = stacks
  pages = packed.pages
  assert packed.tail.capacity == 0
  for ours, theirs in (
    (pages.keys, slots.keys),
    (pages.values, slots.values),
    (pages.positions, slots.positions),
  ):
    assert 2 * device_bytes(ours) == device_bytes(theirs)
  # A number for each of two layers' pages, of 32 slots each.
  assert device_bytes(pages.heads) == 4 * 2 * 128 // 2 // 32


def test_a_mesh_that_is_not_split_answers_as_one(monkeypatch):
  monkeypatch.setattr(mesh_answers, "split_mesh", lambda mesh, kv_heads: mesh)
  spread = answered(model_of("3"), PLANS["dense"], ROWS, "model:4")
  assert_same(answers("3", "dense"), spread)
  (stack,) = spread.cache.stacks
  whole = stack.pages.heads.shape[2]
  assert shares(stack.pages.heads) == [(2, 2, whole // 4)]


@pytest.mark.parametrize("heads", HEADS)
def test_queries_are_shared_out_over_all_devices(heads):
  """Each attends with a part of every KV head's, as the reference does."""
  queries, kv_heads, model, group = HEADS[heads]
  rng = np.random.default_rng(1)
  draw = functools.partial(rng.standard_normal, dtype=np.float32)
  q = jnp.asarray(draw((2, queries, 3, 8)))
  k, v = (jnp.asarray(draw((2, kv_heads, 16, 8))) for _ in range(2))
  sinks = jnp.asarray(draw((queries,)))
  asked = jnp.broadcast_to(jnp.arange(13, 16), (2, 3))
  places = jnp.broadcast_to(jnp.arange(16), (2, kv_heads, 16))
  run = jax.jit(lambda *given: attention(*given, sinks=sinks))
  expected = attention(q, k, v, asked, places, "reference", sinks=sinks)
  with jax.set_mesh(split_mesh(parse_mesh("model:4"), kv_heads)):
    found = run(q, k, v, asked, places)
    text = run.lower(q, k, v, asked, places).compile().as_text()
  np.testing.assert_allclose(found, expected, rtol=0, atol=1e-5)
  own = queries // model
  if queries % 4 == 0:
    own //= group
  # The logits of a device: of its queries to all slots.
  assert f"f32[2,{kv_heads // model},{3 * own * model // kv_heads},16]" in text
