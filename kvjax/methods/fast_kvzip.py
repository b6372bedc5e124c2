"""Fast KVzip: keep what a gate of each layer lets through."""

import dataclasses

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from kvjax.activations import Activations
from kvjax.allocation.base import Allocation
from kvjax.cache.layers import LayerCache
from kvjax.errors import InputError
from kvjax.methods.base import ScoringMethod
from kvjax.methods.fast_kvzip_gate import FastKVzipGate
from kvjax.methods.kvzip import Level, shared_by
from kvjax.methods.traits import Traits
from kvjax.model import Geometry
from kvjax.options.bounds import check_least, check_share
from kvjax.selection import age, floor_share

# Prompts of so many tokens keep a window in place of a share.
_LONG = 32_000


@dataclasses.dataclass(frozen=True)
class FastKVzip(ScoringMethod):
  """Scores a token by a learned gate of the layer's input.

  The gate predicts the score that `KVzip` gives a token, between 0 and 1,
  without replaying the prompt; see `FastKVzipGate`. The first and the last
  tokens are kept. By default, all heads of all layers compete for one budget.
  In place of a budget, a plan may have a `kvjax.Threshold`.

  Source: Kim et al., arXiv 2601.17668.

  Attributes:
    gate: file with the weights of the model's gates, as they are published, or
      a folder with one such file.
    level: heads that share a budget; see `KVzip`.
    sinks: number of first tokens that are kept.
    recent: share of a prompt whose last tokens are kept, rounded down, at least
      one token.
    window: number of last tokens that are kept of a prompt of 32,000 tokens or
      more, in place of a share.
  """

  gate: str = ""
  level: Level = "model"
  sinks: int = 4
  recent: float = 0.02
  window: int = 4096

  def __post_init__(self) -> None:
    super().__post_init__()
    check_least(self, sinks=0, window=1)
    check_share(self, "recent")
    if self.gate:
      _ = self._weights

  @property
  def traits(self) -> Traits:
    """It reads the layers' inputs."""
    return Traits(
      whole_prompts_only="it reads the inputs of layers, which no cache stores",
      activations=frozenset({"inputs"}),
      score_range=(0.0, 1.0),
    )

  @property
  def allocation(self) -> Allocation:
    """The allocation that `level` defines."""
    return shared_by(self.level)

  def check_model(self, geometry: Geometry) -> None:
    """Refuses a model with other layers or KV heads than the weights."""
    self._weights.check(geometry)

  def scores(
    self, layer: Int[Array, ""], cache: LayerCache, activations: Activations
  ) -> Float[Array, "B K T"]:
    """Computes what the gates let through."""
    assert activations.inputs is not None
    scores = self._weights.predict(layer, activations.inputs)
    # Query heads that store keys of their own have the score of their group.
    groups = cache.keys.shape[1] // scores.shape[1]
    return jnp.repeat(scores, groups, axis=1)

  def protected(
    self, cache: LayerCache, counts: Int[Array, "B #K"]
  ) -> Bool[Array, "B K T"]:
    """The first and the last tokens."""
    del counts
    valid, lengths = cache.valid, cache.lengths
    share = jnp.maximum(floor_share(lengths, self.recent), 1)
    last = jnp.where(lengths < _LONG, share, self.window)
    is_last = age(valid) <= last[..., None]
    return valid & (is_last | (cache.positions < self.sinks))

  @property
  def _weights(self) -> FastKVzipGate:
    if not self.gate:
      raise InputError(
        "Fast KVzip scores tokens by learned gates; give their file, as in "
        "fast_kvzip:gate=FILE, which its authors publish."
      )
    return FastKVzipGate.read(self.gate)
