"""The places of a cache on a mesh follow from its shapes alone."""

import jax
import numpy as np
import pytest

import kvjax
from kvjax.cache.sharding import parse_mesh
from kvjax.experiments.compilation.engine_programs import placed_shapes
from kvjax.testing import TinyModel

MODEL = TinyModel()
PLANS = {
  "rectangular": kvjax.get_plan("keydiff", 0.5),
  "observed": kvjax.get_plan(
    "snapkv:window=4", 16, schedule=kvjax.Schedule(every=4)
  ),
  "eight bits": kvjax.get_plan("keydiff", 0.5, kv_dtype="int8"),
  "pages": kvjax.get_plan("ada/snapkv:window=4", 0.5),
  "a pool": kvjax.get_plan("kvzip:chunk=16:overlap=4", 0.5),
  "an index": kvjax.get_plan("ctkvr", 0.25),
  "channels": kvjax.get_plan("think/keydiff", 0.5),
}


@pytest.mark.parametrize("mesh", ["data:2,model:2", "model:2"])
@pytest.mark.parametrize("case", PLANS)
def test_arrays_belong_where_those_of_a_cache_are(case, mesh, monkeypatch):
  """Nothing is compiled, which would take the memory of two caches."""
  rows = np.random.default_rng(0).integers(1, MODEL.vocab_size, (2, 64))
  with jax.set_mesh(parse_mesh(mesh)):
    prompts = kvjax.Prompts.of(rows.tolist())
    cache, _ = kvjax.prefill(MODEL, MODEL.init(), prompts, PLANS[case])
    cache = kvjax.reserve(cache, 8)
    shapes = jax.tree.map(
      lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), cache
    )
    monkeypatch.setattr(
      jax.stages.Lowered, "compile", lambda *given: pytest.fail("compiled")
    )
    placed = placed_shapes(shapes)
  divided = 0
  for found, array in zip(
    jax.tree.leaves(placed.stacks), jax.tree.leaves(cache.stacks), strict=True
  ):
    assert (found.shape, found.dtype) == (array.shape, array.dtype)
    assert found.sharding.is_equivalent_to(array.sharding, array.ndim)
    divided += not array.sharding.is_fully_replicated
  assert divided
