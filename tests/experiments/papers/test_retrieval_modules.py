"""The modules of E4.5: together they are a step; all have a time."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax.cache.layers import LayerCache
from kvjax.cache.sparse import SparseLayer
from kvjax.experiments.papers.analyses import retrieval_modules, scorer_timing
from kvjax.experiments.papers.findings import Subject
from kvjax.kernels.attention import merge
from kvjax.registry.names import get_retrieval
from kvjax.testing import random_activations


def token():
  prompt = random_activations(0, [200, 150], 200, heads=4, kv_heads=2)
  method = get_retrieval("ctkvr:sinks=2:local=5")
  layer = SparseLayer.of(
    method,
    jnp.int32(0),
    LayerCache.of(prompt),
    prompt,
    jnp.asarray([16, 9], jnp.int32),
    16,
  )
  return retrieval_modules.token_of(layer)


@pytest.mark.parametrize("place", ["on_device", "offloaded"])
def test_modules_together_are_a_step(place):
  one = token()
  modules = getattr(retrieval_modules, place)(one)
  *_, resident, update, step = modules
  if place == "on_device":
    retrieved = modules["attention to retrieved keys"]()
  else:
    retrieved, _ = modules[
      "rerank and attention to retrieved keys, by the host"
    ]()
  resident = modules[resident]()
  output, after = one.layer.attend(one.activations)
  merged = merge(
    resident,
    type(resident)(retrieved.output[:, :, None], retrieved.lse[:, :, None]),
  )
  np.testing.assert_allclose(merged.output, output, atol=1e-5)
  np.testing.assert_allclose(modules[step](), output, atol=1e-5)
  assert not np.allclose(resident.output, output, atol=1e-2)
  jax.tree.map(np.testing.assert_array_equal, modules[update](), after.index)


def test_every_module_has_a_time(tiny, monkeypatch):
  """Of all layers; what takes how long is the device's business."""
  timed = []

  def once(run, rounds):
    assert rounds > 9
    timed.append(jax.block_until_ready(run()))
    return 0.5

  monkeypatch.setattr(scorer_timing, "median_seconds", once)
  subject = Subject(tiny, {}, (256,), "small", 0)
  (table,) = retrieval_modules.measure(subject).tables
  layers = len(tiny.model.geometry.layers)
  both = f"{500 * layers:,.2f}"
  assert f", {layers} layers" in table.title
  assert [list(line) for line in table.lines] == [
    ["recall", both, both],
    ["rerank", both, "–"],
    ["attention to retrieved keys", both, "–"],
    ["rerank and attention to retrieved keys, by the host", "–", both],
    ["attention to resident keys", both, both],
    ["centroid update", both, both],
    ["all of these, compiled together", both, both],
  ]
  assert len(timed) == 11
