"""Answers from the caches of a mesh, beside those of one device."""

import contextlib
from typing import NamedTuple

import jax
import numpy as np

import kvjax
from kvjax.cache.sharding import parse_mesh, split_mesh
from kvjax.testing import kept_positions

# Of rows in turn.
QUESTIONS = ([5, 6], [1, 2, 3])


class Answered(NamedTuple):
  """The cache of prompts, its logits, and the answers."""

  cache: kvjax.Cache
  logits: np.ndarray
  rows: list[list[int]]


def answered(model, plan, rows, mesh=None):
  """Prefills prompts on a mesh, named as in --mesh, and asks the questions."""
  devices = contextlib.nullcontext()
  if mesh is not None:
    kv_heads = model.geometry.layers[0].kv_heads
    devices = jax.set_mesh(split_mesh(parse_mesh(mesh), kv_heads))
  with devices:
    params, prompts = model.init(), kvjax.Prompts.of(rows)
    cache, logits = kvjax.prefill(model, params, prompts, plan)
    asked = [QUESTIONS[row % 2] for row in range(len(rows))]
    given = kvjax.generate(
      model, params, cache, kvjax.Prompts.of(asked), kvjax.Decoding(6)
    )
  return Answered(cache, np.asarray(logits), given.rows())


def assert_same(one, spread):
  """Asserts that the same tokens are kept, and the answers are the same."""
  for row in range(len(one.rows)):
    assert kept_positions(spread.cache, row) == kept_positions(one.cache, row)
  np.testing.assert_allclose(one.logits, spread.logits, rtol=0, atol=1e-4)
  assert spread.rows == one.rows
