"""Non-causal attention alone: keep the keys that their chunk attends to."""

import dataclasses

from jaxtyping import Array, Float, Int

from kvjax.activations import Activations
from kvjax.cache.layers import LayerCache
from kvjax.methods.base import ScoringMethod
from kvjax.methods.noncausal import Scale, ValueNorm, noncausal_attention
from kvjax.methods.traits import Traits
from kvjax.options.bounds import check_least, check_odd


@dataclasses.dataclass(frozen=True)
class ChunkAttention(ScoringMethod):
  """Scores a token by the attention that its chunk of the prompt pays to it.

  It is the part of Compactor's score that finds context: the attention includes
  later tokens and is scaled by the norm of the value.

  Source: Chari and Van Durme, arXiv 2507.08143, Section 3. The preset `kvpress`
  follows kvpress's NonCausalAttnPress, but for prompts that are no whole number
  of chunks: in the last chunk, kvpress lets padding take part in the attention.

  Attributes:
    chunk: C, tokens per chunk; the last one may be shorter.
    scale: of the logits: 1, or "rsqrt_d" for the layer's own.
    value_norm: "l2", "l1", or "none".
    pool: odd width of the average over neighbors; 1 is none.
  """

  chunk: int = 256
  scale: Scale = "one"
  value_norm: ValueNorm = "l2"
  pool: int = 3

  def __post_init__(self) -> None:
    super().__post_init__()
    check_least(self, chunk=1)
    check_odd(self, "pool")

  @property
  def traits(self) -> Traits:
    """It needs the queries of the whole prompt."""
    return Traits(
      whole_prompts_only="its attention is that of a whole prompt",
      weighs=self.value_norm == "none",
    )

  def scores(
    self, layer: Int[Array, ""], cache: LayerCache, activations: Activations
  ) -> Float[Array, "B K T"]:
    """Computes the attention that keys receive, averaged over neighbors."""
    del layer
    return noncausal_attention(
      activations.queries,
      cache.keys,
      cache.float_values,
      cache.valid,
      chunk=self.chunk,
      options=activations.attention,
      scale=self.scale,
      value_norm=self.value_norm,
      width=self.pool,
    )
