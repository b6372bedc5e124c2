"""Caches that are asked together, and shapes that prompts share."""

import jax.numpy as jnp

import kvjax
from experiments import answering
from experiments.candidates import candidates


def a_cache(*capacities):
  layers = tuple(
    kvjax.LayerCache(
      jnp.zeros((1, 1, capacity, 2), jnp.float32),
      jnp.zeros((1, 1, capacity, 2), jnp.float32),
      jnp.zeros((1, 1, capacity), jnp.int32),
      jnp.zeros((), jnp.int32),
    )
    for capacity in capacities
  )
  return kvjax.Cache(layers, jnp.zeros(1, jnp.int32))


def test_layers_of_unequal_capacities_join_the_next_larger_group():
  caches = [a_cache(8, 8), a_cache(4, 4), a_cache(6, 3), a_cache(4, 4)]
  same = candidates(["keydiff"], [kvjax.Tokens(4)])[1:] * 4
  assert answering.groups(same, caches) == [(8, [0, 2]), (4, [1, 3])]
  assert answering.groups(same[:2], caches[1:3]) == [(4, [0]), (6, [1])]


def test_only_what_is_stored_alike_is_asked_together():
  whole = candidates(["keydiff"], [kvjax.Tokens(4)])[1:]
  rounded = candidates(["keydiff"], [kvjax.Tokens(4)], storage="int8")[1:]
  caches = [a_cache(8, 8), a_cache(8, 8), a_cache(7, 7), a_cache(6, 3)]
  some = [*whole, *rounded, *whole, *rounded]
  assert answering.groups(some, caches) == [(8, [0]), (8, [1, 3]), (7, [2])]


def test_who_evicts_while_decoding_is_asked_alone():
  going_on = kvjax.Schedule(every=2)
  some = candidates(["keydiff"], [kvjax.Tokens(4)])[1:] * 2
  some += candidates(["keydiff"], [kvjax.Tokens(4)], going_on)[1:]
  caches = [a_cache(4, 4)] * 3
  assert answering.groups(some, caches) == [(4, [0, 1]), (4, [2])]


def test_widths_are_shared_by_neighbouring_lengths():
  prompts = [answering.Prompt([0] * n, [0] * 5, 1) for n in (33, 60)]
  assert answering.Shape.of(prompts, 4) == (4, 64, 32)
