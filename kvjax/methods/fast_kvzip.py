"""Fast KVzip: keep what a gate of each layer lets through."""

import dataclasses
from typing import ClassVar

import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from kvjax.cache.layers import LayerCache
from kvjax.methods.fast_kvzip_gate import FastKVzipGate
from kvjax.methods.gated import GatedMethod
from kvjax.methods.traits import Traits
from kvjax.options.bounds import check_least, check_share
from kvjax.selection import floor_share, last_tokens

# Prompts of so many tokens keep a window in place of a share.
_LONG = 32_000


@dataclasses.dataclass(frozen=True)
class FastKVzip(GatedMethod):
  """Scores a token by a learned gate of the layer's input.

  The gate predicts the score that `KVzip` gives a token, between 0 and 1,
  without replaying the prompt; see `FastKVzipGate`. The first and the last
  tokens are kept. By default, all heads of all layers compete for one budget.
  In place of a budget, a plan may have a `kvjax.Threshold`.

  Source: Kim et al., arXiv 2601.17668.

  Attributes:
    gate: file with the weights of the model's gates, as they are published or
      as `kvjax train_gate --kind=fast_kvzip` writes them, or a folder with one
      such file.
    level: heads that share a budget; see `KVzip`.
    sinks: number of first tokens that are kept.
    recent: share of the tokens so far whose last ones are kept, rounded down,
      at least one token.
    window: number of last tokens that are kept of 32,000 tokens or more, in
      place of a share.
  """

  sinks: int = 4
  recent: float = 0.02
  window: int = 4096

  kind: ClassVar[type[FastKVzipGate]] = FastKVzipGate
  missing: ClassVar[str] = (
    "Fast KVzip scores tokens by learned gates; give their file, as in "
    "fast_kvzip:gate=FILE, which its authors publish, or kvjax train_gate "
    "--kind=fast_kvzip writes."
  )

  def __post_init__(self) -> None:
    super().__post_init__()
    check_least(self, sinks=0, window=1)
    check_share(self, "recent")

  @property
  def traits(self) -> Traits:
    """It reads the layers' inputs, and keeps first tokens and a last one."""
    return dataclasses.replace(super().traits, sinks=self.sinks, protects=1)

  @property
  def score_range(self) -> tuple[float, float]:
    """That of a sigmoid."""
    return 0.0, 1.0

  def protected(
    self, cache: LayerCache, counts: Int[Array, " B #K"]
  ) -> Bool[Array, "B K T"]:
    """The first and the last tokens."""
    del counts
    valid, lengths = cache.valid, cache.lengths
    share = jnp.maximum(floor_share(lengths, self.recent), 1)
    last = jnp.where(lengths < _LONG, share, self.window)
    sinks = valid & (cache.positions < self.sinks)
    return sinks | last_tokens(valid, last)
