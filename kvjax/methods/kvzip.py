"""KVzip: keep what the model needs to repeat its prompt."""

import dataclasses
import math
from typing import Literal

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from kvjax.activations import Activations
from kvjax.allocation.base import Allocation, Uniform
from kvjax.allocation.whole_layer import WholeLayer
from kvjax.allocation.whole_model import WholeModel
from kvjax.cache.layers import LayerCache
from kvjax.heads import by_kv_head
from kvjax.methods.base import ScoringMethod
from kvjax.methods.replay import Divisor, Replay, Weight
from kvjax.methods.traits import Traits
from kvjax.options.bounds import check_least, check_used

Level = Literal["model", "layer", "head"]

# Of tokens that are not replayed but kept: before all others.
_HIGHEST = float(jnp.finfo(jnp.float32).max)


@dataclasses.dataclass(frozen=True)
class KVzip(ScoringMethod):
  """Keeps the tokens that a replay of the prompt attends to.

  The model is asked to repeat its prompt, chunk by chunk, and reads each chunk
  again with its full cache. A token's score is the highest attention that any
  query of this replay pays to it, over the query heads of a KV head; see
  `kvjax.methods.replay.Replay`. By default, all heads of all layers compete for
  one budget, without a minimum for any of them. The method is query-agnostic,
  works on whole prompts only, and takes about one prefill more.

  The tokens of the chat template before the context are kept. Unlike in the
  authors' code, they count toward the budget, so that caches of all methods
  have equal sizes.

  Source: Kim et al., arXiv 2505.23416; KVzip+, which weighs attention by the
  output, from arXiv 2601.07891; KVgrad, which weighs it by gradients as well,
  from openreview.net/forum?id=cg1wTCJjjk.

  Attributes:
    weight: "attention", or "output" for KVzip+: attention times |v_u W_O|, over
      the norm |x_t| of the replayed token; or "gradient" for KVgrad:
      attention times |v_u W_O| and how much the hidden states after the last
      layer depend on what attention gives to the replayed token.
    divisor: x_t of KVzip+: the layer's normalized "input", as in the authors'
      code, or the "residual" before the norm, which the paper may mean.
    level: heads that share a budget: those of the "model" or of a "layer", or
      none, so that each "head" keeps as many tokens.
    chunk: tokens that are replayed at a time.
    overlap: tokens before a chunk that its request ends with.
    sinks: number of first tokens that are kept, and that attention includes
      beside the chunk; the rest of the chat template is evicted first, as in
      kvpress. 0 for all of the chat template, as in the authors' code.
  """

  weight: Weight = "attention"
  divisor: Divisor = "input"
  level: Level = "model"
  chunk: int = 2000
  overlap: int = 8
  sinks: int = 0

  def __post_init__(self) -> None:
    super().__post_init__()
    check_least(self, chunk=1, overlap=0, sinks=0)
    if self.weight != "output":
      check_used(self, "weight", "divisor")

  @property
  def traits(self) -> Traits:
    """It replays the prompt."""
    bounded = self.weight == "attention"
    return Traits(
      whole_prompts_only="it replays the whole prompt",
      replay=Replay(
        self.chunk, self.overlap, self.sinks, self.weight, self.divisor
      ),
      sinks=self.sinks,
      queries=0,
      score_range=(0.0, 1.0 if bounded else math.inf),
    )

  @property
  def allocation(self) -> Allocation:
    """The allocation that `level` defines."""
    return shared_by(self.level)

  def scores(
    self, layer: Int[Array, ""], cache: LayerCache, activations: Activations
  ) -> Float[Array, "B K T"]:
    """The highest score over the group's query heads."""
    del layer
    assert activations.replayed is not None
    replayed = activations.replayed.astype(jnp.float32)
    scores = jnp.max(by_kv_head(replayed, cache.keys.shape[1]), axis=2)
    return jnp.where(scores < 0, 0.0 if self.sinks else _HIGHEST, scores)


def shared_by(level: Level) -> Allocation:
  """The allocation of a budget that the heads of a level share."""
  if level == "model":
    return WholeModel()
  return Uniform() if level == "head" else WholeLayer()
