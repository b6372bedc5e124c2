"""ShadowKV: chunks of keys, ranked by their means."""

import dataclasses

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from kvjax.clustering import unit
from kvjax.kernels.select import among_largest
from kvjax.options.bounds import check_least
from kvjax.retrieval.base import (
  Found,
  Prompt,
  Reads,
  Store,
  attention_worth,
)
from kvjax.retrieval.quest import Paged
from kvjax.struct import struct


@struct
class Landmarks:
  """What stands for the keys of each chunk.

  Attributes:
    means: of the keys; zero where a chunk holds none.
    outliers: chunks that are always read, as their means do not tell of them.
  """

  means: Float[Array, "*B P D"]
  outliers: Bool[Array, "*B P"]


@dataclasses.dataclass(frozen=True)
class ShadowKV(Paged):
  """Reads the chunks whose mean keys the token attends to most.

  The landmark of a chunk is the mean of its rotated keys. The chunks that it
  describes worst, those of the lowest min over their keys of cos(key,
  landmark), are outliers: every token reads them, beside its budget. Of the
  others it reads the floor(budget / page) chunks of the highest
  softmax(q landmark / sqrt(D)) over them, max over the group's heads. The last
  four chunks and what is left over behind them are resident.

  The paper also holds the keys as a product of low rank, made before they are
  rotated. That saves memory and chooses nothing; here they are held as they
  are.

  Source: Sun et al., arXiv 2410.21465, Section 4.

  Attributes:
    page: tokens of a chunk.
    outliers: chunks that are always read.
  """

  local: int = 32
  page: int = 8
  outliers: int = 48

  def __post_init__(self) -> None:
    super().__post_init__()
    check_least(self, outliers=0)

  def index(self, prompt: Prompt, reads: Reads) -> Landmarks:
    """Means and outliers."""
    valid = self.pages(prompt.stored)
    keys = self.pages(prompt.stored_keys)
    filled = self.filled(prompt.stored)
    count = jnp.maximum(jnp.sum(valid.astype(jnp.float32), axis=1), 1.0)
    means = jnp.sum(keys, axis=1) / count[:, None]
    cosine = jnp.einsum("pcd,pd->pc", unit(keys), unit(means))
    least = jnp.min(cosine, axis=1, where=valid, initial=jnp.inf)
    unlike = jnp.where(filled, -least, -jnp.inf)
    return Landmarks(
      means.astype(prompt.head.cached_keys.dtype),
      among_largest(unlike, jnp.asarray(self.outliers)),
    )

  def retrieve(
    self,
    index: Landmarks,
    queries: Float[Array, "G D"],
    store: Store,
    reads: Reads,
  ) -> tuple[Found, None]:
    """The slots of the outliers and of the best other chunks."""
    others = self.filled(store.valid) & ~index.outliers
    means = index.means.astype(jnp.float32)
    worth = attention_worth(queries, means, others)
    # No softmax weight is above 1: outliers come first.
    worth = jnp.where(index.outliers, 2.0, worth)
    outliers = jnp.sum(index.outliers.astype(jnp.int32))
    # Rounded up, so that a row that may read all of its keys has the places.
    most = self.outliers + -(-reads.most // self.page)
    count = outliers + reads.count // self.page
    return Found(self.best(worth[None], store.valid, most, count)), None
