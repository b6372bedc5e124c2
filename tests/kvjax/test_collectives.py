"""What devices say to each other while they run a program together."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax.cache.sharding import parse_mesh
from kvjax.engine import blocks
from kvjax.engine.prepared import prepare_repeated
from kvjax.kernels.attention import chunked
from kvjax.model import Geometry
from kvjax.testing import TinyModel

_ROWS, _LENGTH, _BLOCK = 4, 96, 16
_ALL_REDUCE = re.compile(r" = (\S+) all-reduce\(")


def all_reduced(plan, model):
  """Shapes of what all devices sum up in a prefill in blocks."""
  lengths = np.full(_ROWS, _LENGTH)
  tokens = jax.ShapeDtypeStruct((_ROWS, _LENGTH), jnp.int32)
  prepared = prepare_repeated(plan, lengths, _LENGTH, model.geometry)
  program = blocks._prefill_blocks.lower(
    model,
    jax.eval_shape(model.init),
    tokens,
    jnp.asarray(lengths, jnp.int32),
    prepared,
    None,
  )
  return _ALL_REDUCE.findall(program.compile().as_text())


@pytest.mark.parametrize("method", ["full", "keydiff"])
def test_blocks_are_attended_to_without_asking_other_devices(
  monkeypatch, method
):
  # A block attends to the cache in chunks of a few slots.
  monkeypatch.setattr(chunked, "LOGITS", 2**8)
  model = TinyModel(Geometry.uniform(2, 4, 2, 8, 4096))
  plan = kvjax.get_plan(
    method, kvjax.Tokens(24), schedule=kvjax.Schedule(block=_BLOCK)
  )
  with jax.set_mesh(parse_mesh("data:4")):
    found = all_reduced(plan, model)
  # The first block and the loop over the others each ask whether any layer has
  # too many tokens, and for the length of the longest row that an eviction
  # leaves.
  evicting = ["pred[]", "s32[]"] * 2 if method == "keydiff" else []
  assert sorted(found) == sorted(evicting)
