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
OTHERS = ([9, 8, 7], [4])


class Answered(NamedTuple):
  """The cache of prompts and what follows it.

  A tiny model's own answers repeat the question, whatever it is asked about:
  the likelihood of other ones shows what is read of the cache.
  """

  cache: kvjax.Cache
  logits: np.ndarray
  rows: list[list[int]]
  # Of given answers, or the cache after evictions while decoding.
  nll: np.ndarray | None
  after: kvjax.Cache | None


def answered(model, plan, rows, mesh=None):
  """Prefills prompts on a mesh, named as in --mesh, and asks the questions."""
  devices = contextlib.nullcontext()
  if mesh is not None:
    kv_heads = model.geometry.layers[0].kv_heads
    devices = jax.set_mesh(split_mesh(parse_mesh(mesh), kv_heads))
  evicts = plan.while_decoding is not None
  with devices:
    params, prompts = model.init(), kvjax.Prompts.of(rows)
    cache, logits = kvjax.prefill(model, params, prompts, plan)
    asked, others = (
      kvjax.Prompts.of([given[row % 2] for row in range(len(rows))])
      for given in (QUESTIONS, OTHERS)
    )
    given = kvjax.generate(
      *(model, params, kvjax.reserve(cache, 64) if evicts else cache, asked),
      kvjax.Decoding(6),
      keep=evicts,
    )
    nll = None
    if not evicts:
      nll = np.asarray(kvjax.answer_nll(model, params, cache, asked, others))
  return Answered(cache, np.asarray(logits), given.rows(), nll, given.cache)


def assert_same(one, spread):
  """Asserts that the same tokens are kept, and the answers are the same."""
  for ours, theirs in ((one.cache, spread.cache), (one.after, spread.after)):
    for row in range(len(one.rows) if ours is not None else 0):
      assert kept_positions(theirs, row) == kept_positions(ours, row)
  np.testing.assert_allclose(one.logits, spread.logits, rtol=0, atol=1e-4)
  assert spread.rows == one.rows
  if one.nll is not None:
    np.testing.assert_allclose(one.nll, spread.nll, rtol=0, atol=1e-4)
