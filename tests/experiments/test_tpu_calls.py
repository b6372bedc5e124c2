"""Programs that a host calls one after the other: what they hold together."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec
from made_up_chip import chip

from kvjax.experiments.compilation import calls


@functools.partial(jax.jit, donate_argnums=0)
def move_on(state, weights):
  """A layer: what it adds to the state in place, and what it leaves behind."""
  return state + jnp.sum(weights), weights * 2


@jax.jit
def keep(left, lengths):
  return left[:2] * lengths


def layer_by_layer(weights, state):
  """Three layers; the host makes up lengths that the programs are given."""
  kept = []
  for _ in range(3):
    state, left = move_on(state, weights)
    kept.append(keep(left, jnp.asarray(np.full(2, 7, np.float32))))
  return state, kept


@pytest.fixture(scope="module")
def spread_calls():
  """Weights in halves, the state whole, on two of this machine's devices."""
  here = chip(jax.devices()[:2])
  spread = NamedSharding(here.mesh, PartitionSpec("model"))
  whole = NamedSharding(here.mesh, PartitionSpec())
  given = [
    jax.ShapeDtypeStruct((4096,), jnp.float32, sharding=spread),
    jax.ShapeDtypeStruct((1024,), jnp.float32, sharding=whole),
  ]
  jaxpr = jax.make_jaxpr(layer_by_layer)(*given)
  return calls.compile_calls(jaxpr, given, whole), spread, whole


def test_programs_that_are_called_are_compiled_once(spread_calls):
  """Where one leaves its results, the next takes them."""
  found, spread, whole = spread_calls
  layers = [x for x in found.calls if x.name in ("move_on", "keep")]
  assert [x.name for x in layers] == ["move_on", "keep"] * 3
  assert len({id(x.footprint) for x in layers}) == 2
  for move in layers[::2]:
    state, left = move.results
    assert move.reused == (move.arguments[0], None)
    assert found.shapes[state].sharding.is_equivalent_to(whole, 1)
    assert found.shapes[left].sharding.is_equivalent_to(spread, 1)
  assert layers[0].results[0] == layers[2].arguments[0]
  assert layers[0].footprint.arguments == 4096 * 4 // 2 + 1024 * 4


def test_calls_hold_what_two_stretches_hold_at_most(spread_calls):
  """Of three layers two leave halves of what is read; the state is reused."""
  found, _, _ = spread_calls
  weights, state, left, kept = 2048 * 4, 1024 * 4, 2048 * 4, 1 * 4
  lengths = 3 * 2 * 4
  temporary = max(x.footprint.temporary for x in found.calls)
  measured = calls.measure_calls(found, awaited="move_on")
  assert measured.arguments - lengths == weights + state
  assert measured.results == state + 3 * kept
  at_most = weights + 2 * left + state + 3 * kept + lengths + temporary
  assert measured.hbm == at_most
  # Nothing is awaited: what all layers leave behind may be there at once.
  together = calls.measure_calls(found, awaited="nothing")
  assert together.hbm == at_most + left
