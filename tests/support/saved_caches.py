"""A small cache, and how it is saved, loaded and compared."""

import jax
import numpy as np

import kvjax
from kvjax.checkpoint.loading import load_cache
from kvjax.checkpoint.saving import save_cache
from kvjax.testing import TinyModel

GEOMETRY = kvjax.Geometry.uniform(
  layers=2, heads=4, kv_heads=2, head_dim=8, max_positions=512
)
MODEL = TinyModel(GEOMETRY)
ROWS = [list(range(n)) for n in (50, 20, 33, 41)]
LAYER_CACHE = "LayerCache"
QUESTIONS = kvjax.Prompts.of([[5, 6], [7], [1, 2, 3], [9]])


def prefilled(model=MODEL, method="pyramidkv:beta=5.0"):
  prompts = kvjax.Prompts.of(ROWS)
  plan = kvjax.get_plan(method, kvjax.Tokens(15))
  return kvjax.prefill(model, model.init(), prompts, plan)[0]


def save(cache, directory, **options):
  options = {"model": MODEL, "model_id": "tiny", **options}
  save_cache(cache, directory, **options)


def load(directory, **options):
  return load_cache(
    directory, **{"model": MODEL, "model_id": "tiny", **options}
  )


def answers(cache, model=MODEL):
  decoding = kvjax.Decoding(6)
  found = kvjax.generate(model, model.init(), cache, QUESTIONS, decoding)
  return found.rows()


def assert_same_bits(ours, theirs):
  assert jax.tree.structure(ours) == jax.tree.structure(theirs)
  for one, other in zip(
    jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True
  ):
    assert isinstance(one, jax.Array)
    assert (one.dtype, one.shape) == (other.dtype, other.shape)
    assert np.asarray(one).tobytes() == np.asarray(other).tobytes()
