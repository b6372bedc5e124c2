"""LagKV's scores of whole prompts, which are read where they are stored."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax.cache.layers import LayerCache
from kvjax.methods import LagKV
from kvjax.testing import random_activations

S, L = 3, 8


evaluate = jax.jit(
  lambda method, cache, seen: method.evaluate(jnp.int32(0), cache, seen),
  static_argnums=0,
)


def old_scores(method, seen):
  """By the slots of each partition, as after an eviction."""
  grown = LayerCache.of(seen).grow(1)
  return evaluate(method, grown, seen)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
  "method",
  [
    LagKV(S, L),
    LagKV(0, L, value_weight=0.0),
    LagKV(S, L, ddof=0, reference="own"),
    LagKV(S, L, mode="kvpress", cross_scoring=True),
  ],
  ids=["paper", "keys only", "local", "kvpress"],
)
def test_a_whole_prompt_has_the_scores_of_its_slots(method, dtype):
  """Rows of any length; what follows them is NaN."""
  lengths = [64, 60, 43, 19, 18, 1, 0]
  seen = random_activations(7, lengths, 64, dtype=dtype)
  found = evaluate(method, LayerCache.of(seen), seen)
  np.testing.assert_array_equal(found, old_scores(method, seen))
  for row, n in enumerate(lengths):
    scored = max((n - method.sinks) // L - 1, 0)
    assert np.all(np.asarray(found[row, :, :scored]) > 0)
    assert np.all(np.asarray(found[row, :, scored:]) == 0)


def test_a_whole_prompt_is_scored_where_it_is():
  """A gather would store all keys and values once more, in float32."""
  seen = random_activations(8, [4096], 4096, head_dim=64, dtype="bfloat16")
  method, cache = LagKV(16, 128), LayerCache.of(seen)
  program = evaluate.lower(method, cache, seen).compile()
  assert not re.search(r" = (f32|bf16)\S* gather\(", program.as_text())
  # On a CPU, which does not fuse all of it, scaled keys and values.
  stored = 2 * seen.keys.nbytes + seen.values.nbytes
  assert program.memory_analysis().temp_size_in_bytes < 2 * stored
