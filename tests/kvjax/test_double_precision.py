"""Programs in JAX's 64-bit mode: positions and scores stay in 32 bits."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax.cache.layers import LayerCache
from kvjax.engine.rerotation import LayerRotation
from kvjax.testing import TinyModel, kept_positions, random_activations

MODEL = TinyModel()
PROMPTS = kvjax.Prompts.of([[*range(1, 30)] * 2, [*range(1, 30)]])
QUESTIONS = kvjax.Prompts.of([[7], [8, 9]])


def answered(plan):
  params = MODEL.init()
  cache, logits = kvjax.prefill(MODEL, params, PROMPTS, plan)
  sampling = kvjax.Sampling(temperature=1.0, top_p=0.9)
  decoding = kvjax.Decoding(max_new_tokens=4, sampling=sampling)
  answers = kvjax.generate(MODEL, params, cache, QUESTIONS, decoding)
  return cache, logits, answers


@pytest.mark.parametrize(
  ("name", "schedule"),
  [
    ("keydiff", kvjax.Schedule(block=16)),
    ("h2o", kvjax.Schedule(every=2)),
    ("random", kvjax.Schedule(every=2)),
    ("chunkkv", kvjax.Schedule()),
    ("ctkvr:choice=random:local=8", kvjax.Schedule()),
    ("magicpig:dense_every=0:local=8", kvjax.Schedule()),
  ],
  ids=str,
)
def test_answers_are_those_of_32_bits(name, schedule):
  plan = kvjax.get_plan(name, kvjax.Tokens(24), schedule=schedule)
  expected = answered(plan)
  # Other tests let no types be promoted; users in 64 bits do.
  with jax.enable_x64(True), jax.numpy_dtype_promotion("standard"):
    found = answered(plan)
  assert [x.dtype for x in jax.tree.leaves(found)] == [
    x.dtype for x in jax.tree.leaves(expected)
  ]
  assert found[2].rows() == expected[2].rows()
  for row in range(2):
    assert kept_positions(found[0], row) == kept_positions(expected[0], row)
  for one, other in zip(*map(jax.tree.leaves, (found, expected)), strict=True):
    np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
  "name",
  [
    "ada/keydiff",
    "adakv.kvpress",
    "compactor.vllm:sketch_dim=4:chunk=8:leverage_chunk=16:first=2:last=2",
    "chunked:length=16/keydiff:recent_frac=0.2",
    "kvzip",
    "rkv",
    "simlayerkv",
  ],
)
def test_users_may_promote_no_types_in_64_bits_either(name):
  plan = kvjax.get_plan(name, kvjax.Tokens(24))
  expected = answered(plan)
  with jax.enable_x64(True):
    found = answered(plan)
  assert found[2].rows() == expected[2].rows()
  for row in range(2):
    assert kept_positions(found[0], row) == kept_positions(expected[0], row)


def scores_of(method):
  seen = random_activations(0, (40, 17), 48)
  rotation = LayerRotation(MODEL, MODEL.geometry.layers[0])
  seen = dataclasses.replace(seen, rerotate=rotation)

  def score(seen):
    return method.evaluate(jnp.int32(0), LayerCache.of(seen), seen)

  return jax.tree.leaves(jax.jit(score)(seen))


@pytest.mark.parametrize(
  "name",
  [
    "random",
    "cur:sketch=4",
    "compactor:chunk=8:sketch_dim=4",
    "leverage:solver=chol",
    "leverage:sketch=srht:sketch_dim=4",
    "protokv:window=4:prototypes=5",
    "expected_attention",
    "triattention",
  ],
)
def test_scores_are_those_of_32_bits(name):
  """What is drawn, too: a wider draw would be another one."""
  method = kvjax.get_method(name)
  expected = scores_of(method)
  with jax.enable_x64(True), jax.numpy_dtype_promotion("standard"):
    found = scores_of(method)
  for one, other in zip(found, expected, strict=True):
    assert one.dtype == other.dtype
    np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-5)
