"""KVzip and KVzip+: replays written out in float64, and what is kept of them."""

import dataclasses

import jax
import numpy as np
import pytest

import kvjax
from kvjax.cache.sharding import parse_mesh
from kvjax.engine import prefill as engine
from kvjax.engine import replay as replays
from kvjax.errors import InputError
from kvjax.methods.replay import Replay
from kvjax.prompts import RepeatRequest
from kvjax.testing import TinyModel
from kvjax.testing.tiny import kept_positions
from support import replayed

LENGTHS = (45, 7, 33, 2)
REQUEST = RepeatRequest((3, 1, 4), (11, 12), (13, 14, 15), (9, 2))
REPLAYS = (
  Replay(chunk=16, overlap=8),
  Replay(chunk=16, overlap=8, by_output=True),
  Replay(chunk=16, overlap=8, sinks=4),
  Replay(chunk=100, overlap=3, sinks=2, by_output=True),
)
SPEC = kvjax.LayerSpec(heads=4, kv_heads=2, key_dim=8)
MODELS = {
  "plain": TinyModel(kvjax.Geometry((SPEC,) * 3, 4096)),
  "capped": TinyModel(
    kvjax.Geometry(
      (dataclasses.replace(SPEC, scale=0.5, softcap=2.0, sinks=True),) * 2,
      4096,
    )
  ),
}


def rows(seed=0):
  """The second and the last row begin as the template, or half of it."""
  draw = np.random.default_rng(seed)
  drawn = [draw.integers(5, 64, n).tolist() for n in LENGTHS]
  drawn[1][:3] = REQUEST.prefix
  drawn[3][:2] = REQUEST.prefix[:2]
  return drawn


def prompts(given=None, request=REQUEST, **kwargs):
  given = rows() if given is None else given
  return kvjax.Prompts.of(given, repeat_request=request, **kwargs)


def scored(model, given, chosen=REPLAYS, params=None):
  """What the engine finds, [N, n] by layer and replay, for every row."""
  params = model.init() if params is None else params
  seen = {}

  def listen(model, params, prompts, layers, replays_):
    found = replays_of(model, params, prompts, layers, chosen)
    seen["found"] = found
    return found

  replays_of = replays.replay_prompts
  with pytest.MonkeyPatch.context() as patch:
    patch.setattr("kvjax.engine.deferred.replay_prompts", listen)
    plan = kvjax.get_plan("kvzip:chunk=16", kvjax.Retention(0.5))
    kvjax.prefill(model, params, given, dataclasses.replace(plan))
  return seen["found"]
