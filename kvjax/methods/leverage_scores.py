"""Leverage alone: keep the keys that the others predict least."""

import dataclasses

import jax
from jaxtyping import Array, Bool, Float, Int

from kvjax.activations import Activations
from kvjax.cache.layers import LayerCache
from kvjax.methods.base import ScoringMethod
from kvjax.methods.leverage import Factor, Solver, draw_factors, leverage
from kvjax.methods.traits import Traits
from kvjax.options.bounds import check_least


@dataclasses.dataclass(frozen=True)
class LeverageScores(ScoringMethod):
  """Scores a token by the leverage of its key before RoPE.

  It is the part of Compactor's score that finds outliers: the squared norm of
  the key's row in an orthonormal basis of a random sketch of all keys.

  Source: Chari and Van Durme, arXiv 2507.08143, Section 3. The preset `kvpress`
  follows kvpress's LeverageScorePress, but for the random numbers.

  Attributes:
    sketch: "gaussian", "srht" (randomized Hadamard), or "none" for exact
      leverage.
    sketch_dim: k, columns of the sketch. Keys of at most k dimensions are not
      sketched, since a sketch that wide does not change the leverage. Solver
      "chol" sketches them nevertheless, as in kvpress: the effect of its jitter
      depends on the sketch.
    solver: how leverage is computed; see `kvjax.methods.leverage`.
    center: subtract the mean key first.
    chunk: tokens per chunk, which are independent; 0 for a single chunk.
    seed: seed of the sketches, which differ between layers and KV heads.
  """

  sketch: Factor = "gaussian"
  sketch_dim: int = 64
  solver: Solver = "svd"
  center: bool = False
  chunk: int = 0
  seed: int = 0

  def __post_init__(self) -> None:
    super().__post_init__()
    check_least(self, sketch_dim=1, chunk=0)

  @property
  def traits(self) -> Traits:
    """It needs keys before RoPE, and its sketches are random."""
    return Traits(
      whole_prompts_only="its leverage is that of a whole prompt",
      stochastic=self.sketch != "none",
      queries=0,
      activations=frozenset({"keys_unrotated"}),
    )

  def scores(
    self, layer: Int[Array, ""], cache: LayerCache, activations: Activations
  ) -> Float[Array, "B K T"]:
    """Computes the leverage of every key, between 0 and 1."""
    assert activations.keys_unrotated is not None
    return self.of_keys(layer, activations.keys_unrotated, cache.valid)

  def of_keys(
    self,
    layer: Int[Array, ""],
    keys: Float[Array, "B K T D"],
    valid: Bool[Array, "B K T"],
  ) -> Float[Array, "B K T"]:
    """Computes the leverage of keys before RoPE.

    Args:
      layer: index of the layer in the model.
      keys: the keys; arbitrary in empty slots.
      valid: slots that count.
    """
    key = jax.random.fold_in(jax.random.key(self.seed), layer)
    heads, dim = keys.shape[1], keys.shape[3]
    factors = draw_factors(self.sketch, key, heads, dim, self.sketch_dim)
    return leverage(keys, valid, factors, self.solver, self.center, self.chunk)
