"""Eight devices keep and answer what one does, along each axis and both."""

import jax
import numpy as np
import pytest
from made_up_gates import made_up_kvzap
from made_up_statistics import made_up_statistics
from mesh_answers import answered, assert_same
from processes import call_with_devices

import kvjax
from kvjax.testing import TinyModel, kept_positions

# Four KV heads: two devices have the same ones where eight are for a row.
MODEL = TinyModel(kvjax.Geometry.uniform(2, 8, 4, 8, 4096))
MESHES = ("data:8", "data:2,model:4", "model:8")
RNG = np.random.default_rng(0)
# No token twice: equal keys would tie, and ties fall as rounding falls.
ROWS = [
  RNG.permutation(64)[:n].tolist() for n in (61, 43, 64, 50, 57, 48, 64, 39)
]
HALF = kvjax.Retention(0.5)
STORED = made_up_statistics(8, 4, 8, 2)
# Kept by each head alone, in pages of a layer, and of all layers; whole
# clusters; read but not evicted; and evicted again while decoding, by one
# selection for all layers and heads, or by one for each.
PLANS = {
  "keydiff": kvjax.get_plan("keydiff", HALF),
  "ada/snapkv": kvjax.get_plan("ada/snapkv:window=5", HALF),
  "kvzip": kvjax.get_plan("kvzip:chunk=32", HALF),
  "kvzap": kvjax.get_plan(f"kvzap:gate={made_up_kvzap(32, 4, 2)}", HALF),
  "protokv": kvjax.get_plan("protokv:window=5:tokens_per_prototype=4", HALF),
  "ctkvr": kvjax.get_plan("ctkvr:sinks=2:local=5:probes=2", kvjax.Tokens(8)),
  "joined": kvjax.get_plan(
    f"triattention:choice=model:farthest=64:statistics={STORED}",
    kvjax.Tokens(24),
    schedule=kvjax.Schedule(every=4),
  ),
  "evicting": kvjax.get_plan(
    "snapkv:window=5", kvjax.Tokens(24), schedule=kvjax.Schedule(every=4)
  ),
}


def compare(name):
  """Runs on eight devices; returns how many tokens one of them keeps."""
  assert len(jax.devices()) == 8
  one = answered(MODEL, PLANS[name], ROWS)
  for mesh in MESHES:
    spread = answered(MODEL, PLANS[name], ROWS, mesh)
    assert len(jax.tree.leaves(spread.cache)[0].devices()) == 8
    assert_same(one, spread)
  # What a method has read for one mesh serves others, too.
  assert_same(one, answered(MODEL, PLANS[name], ROWS, "data:2"))
  kept = [kept_positions(one.cache, row) for row in range(len(ROWS))]
  return sum(len(head) for row in kept for of in row for head in of)


@pytest.mark.parametrize("name", PLANS)
def test_eight_devices_keep_and_answer_what_one_does(name):
  kept = call_with_devices(8, compare, name)
  everything = 2 * 4 * sum(map(len, ROWS))
  assert 0 < kept <= everything
  assert (kept < everything) == (name != "ctkvr")
