"""What a method has in files or draws is an argument of compiled programs."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax.engine.compress import evaluate_layer
from kvjax.methods import ScoringMethod
from kvjax.methods.chunked import Chunked
from kvjax.methods.critical import Critical
from kvjax.methods.traits import Traits
from kvjax.methods.whole_chunks import WholeChunks
from kvjax.testing import TinyModel, check_method, kept_positions

MODEL = TinyModel()
PROMPTS = kvjax.Prompts.of([[*range(40)]])


@dataclasses.dataclass(frozen=True)
class Weighted(ScoringMethod):
  """Has weights of its own, by layer and channel."""

  seed: int = 0

  @property
  def traits(self):
    return Traits(weighs=True)

  def load(self):
    drawn = np.random.default_rng(self.seed).standard_normal((2, 1, 8))
    return {"channels": drawn.astype(np.float32)}

  def without_files(self):
    return dataclasses.replace(self, seed=-1)

  def scores(self, layer, cache, activations):
    channels = self.weights_of(activations)["channels"][layer]
    return jnp.square(jnp.sum(cache.float_keys * channels[None, None], axis=-1))


@pytest.mark.parametrize(
  "wrap",
  [
    lambda method: method,
    Critical,
    lambda method: Chunked(method, 16),
    lambda method: WholeChunks(method, 4),
  ],
  ids=["alone", "critical", "chunked", "whole chunks"],
)
def test_methods_of_other_weights_share_a_program(wrap):
  kept, before = [], evaluate_layer._cache_size()
  for seed in range(3):
    plan = kvjax.Plan(wrap(Weighted(seed)), kvjax.Tokens(20))
    cache, _ = kvjax.prefill(MODEL, MODEL.init(), PROMPTS, plan)
    kept.append(kept_positions(cache, 0))
  assert evaluate_layer._cache_size() == before + 1
  assert kept[0] != kept[1] != kept[2] != kept[0]


def test_a_strangers_weights_pass_the_contract(registry):
  kvjax.register("weighted", Weighted)
  check_method(Weighted())
