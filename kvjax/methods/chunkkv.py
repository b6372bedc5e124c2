"""ChunkKV: whole chunks of the prefix are kept or dropped."""

import dataclasses
from typing import Literal

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from kvjax.activations import Activations
from kvjax.cache.layers import LayerCache
from kvjax.kernels.select import among_largest
from kvjax.methods.base import LayerBudget, Method
from kvjax.methods.heads import window_mass
from kvjax.methods.snapkv import SnapKV
from kvjax.methods.traits import Traits
from kvjax.options.bounds import check_least
from kvjax.selection import age, newest, true_slots

Scope = Literal["layer", "head"]


@dataclasses.dataclass(frozen=True)
class ChunkKV(Method):
  """Ranks contiguous chunks by the window's attention to them.

  The votes of the observation window are summed per chunk and, by default,
  over all heads of the layer, whose heads then keep the same tokens. The short
  last chunk competes by its mean times the chunk size. Of the budget B,
  floor((B - W) / c) chunks and the window are kept.

  Source: Liu et al., arXiv 2502.00299.

  Attributes:
    window: W, the last tokens, which always stay.
    chunk: c, tokens per chunk.
    scope: whether the heads of a "layer" choose together.
    layer_reuse: so many layers, one after another, keep what the first of them
      chose (the paper's layer-wise index reuse; 2 there).
  """

  window: int = 32
  chunk: int = 10
  scope: Scope = "layer"
  layer_reuse: int = 1

  def __post_init__(self) -> None:
    super().__post_init__()
    check_least(self, window=1, chunk=1, layer_reuse=1)

  @property
  def traits(self) -> Traits:
    """It reads the last W queries, whose tokens stay."""
    return Traits(
      whole_prompts_only="its chunks are those of a whole prompt",
      window=self.window,
      protects=self.window,
      reuse=self.layer_reuse,
    )

  @property
  def votes(self) -> SnapKV:
    """SnapKV's, with the same window."""
    return SnapKV(window=self.window, kernel=7, pooling="max")

  def evaluate(
    self, layer: Int[Array, ""], cache: LayerCache, activations: Activations
  ) -> Float[Array, "B K C"]:
    """The worth of every chunk; those outside the prefix get -inf."""
    del layer
    per_token = jnp.mean(window_mass(cache, activations, self.window), axis=2)
    prefix = self._prefix(cache)
    worth = self._chunks(jnp.where(prefix, per_token, 0.0)).sum(axis=-1)
    sizes = self._chunks(prefix.astype(jnp.float32)).sum(axis=-1)
    worth = worth * self.chunk / jnp.maximum(sizes, 1.0)
    if self.scope == "layer":
      total = jnp.sum(worth, axis=1, keepdims=True)
      worth = jnp.broadcast_to(total, worth.shape)
    return jnp.where(sizes > 0, worth, -jnp.inf)

  def select(
    self, scores: Float[Array, "B K C"], cache: LayerCache, budget: LayerBudget
  ) -> Int[Array, "B K M"]:
    """The best chunks that fit beside the window."""
    valid = cache.valid
    must_keep = budget.must_keep(cache)
    window = newest(valid, must_keep, budget.per_head, self.window)
    must_keep &= ~window
    taken = self.window + jnp.sum(must_keep.astype(jnp.int32), axis=-1)
    room = jnp.maximum(budget.per_head - taken, 0) // self.chunk
    # A row that fits keeps its short last chunk too.
    fits = jnp.sum(valid.astype(jnp.int32), axis=-1) <= budget.per_head
    chosen = among_largest(scores, room) | fits[..., None]
    slots = cache.capacity
    per_token = jnp.repeat(chosen, self.chunk, axis=-1)[..., :slots]
    kept = window | must_keep | (per_token & self._prefix(cache))
    return true_slots(kept, budget.capacity)

  def _prefix(self, cache: LayerCache) -> Bool[Array, "B K T"]:
    valid = cache.valid
    return valid & (age(valid) > self.window)

  def _chunks(self, x: Float[Array, "B K T"]) -> Float[Array, "B K C c"]:
    batch, kv_heads, slots = x.shape
    padded = jnp.pad(x, ((0, 0), (0, 0), (0, -slots % self.chunk)))
    return padded.reshape(batch, kv_heads, -1, self.chunk)
