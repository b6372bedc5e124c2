"""ShadowKV: chunks of keys, ranked by their means."""

import dataclasses

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from kvjax.clustering import unit
from kvjax.kernels.select import among_largest
from kvjax.options.bounds import check_least
from kvjax.retrieval.base import KeyBudget, Prompt, Selection, Store
from kvjax.retrieval.quest import Paged
from kvjax.retrieval.weights import max_attention
from kvjax.struct import struct


@struct
class Landmarks:
  """Summary of the keys of each chunk.

  Attributes:
    means: mean keys; zero for an empty chunk.
    outliers: chunks that are always read, as their means describe them badly.
  """

  means: Float[Array, "*B P D"]
  outliers: Bool[Array, "*B P"]


@dataclasses.dataclass(frozen=True)
class ShadowKV(Paged):
  """Reads the chunks whose mean keys the token attends to most.

  The landmark of a chunk is the mean of its rotated keys. Outliers are the
  chunks that their landmark describes worst, by the minimum over their keys of
  cos(key, landmark). Every token reads the outliers, in addition to its budget.
  It also reads the floor(budget / page) other chunks with the highest
  softmax(q landmark / sqrt(D)), maximum over the group's heads. The last four
  chunks and the incomplete one after them are resident.

  The paper also stores the keys as a low-rank product, computed before RoPE.
  That saves memory and does not affect the selection; here the keys are stored
  unchanged.

  Source: Sun et al., arXiv 2410.21465, Section 4.

  Attributes:
    page: tokens per chunk.
    outliers: number of chunks that are always read.
  """

  local: int = 32
  page: int = 8
  outliers: int = 48

  def __post_init__(self) -> None:
    super().__post_init__()
    check_least(self, outliers=0)

  def num_queries(self, length: int) -> int:
    """No queries: the index depends on keys alone."""
    return 0

  def index(self, prompt: Prompt, budget: KeyBudget) -> Landmarks:
    """Computes the means and the outliers."""
    valid = self.to_pages(prompt.stored)
    keys = self.to_pages(prompt.stored_keys)
    filled = self.filled(prompt.stored)
    sizes = jnp.maximum(jnp.sum(valid.astype(jnp.float32), axis=1), 1.0)
    means = jnp.sum(keys, axis=1) / sizes[:, None]
    cosine = jnp.einsum("pcd,pd->pc", unit(keys), unit(means))
    least = jnp.min(cosine, axis=1, where=valid, initial=jnp.inf)
    # -inf is never selected: a short row has fewer outliers.
    dissimilarity = jnp.where(filled, -least, -jnp.inf)
    return Landmarks(
      means.astype(prompt.head.cached_keys.dtype),
      among_largest(dissimilarity, jnp.asarray(self.outliers, jnp.int32)),
    )

  def retrieve(
    self,
    index: Landmarks,
    queries: Float[Array, "G D"],
    store: Store,
    budget: KeyBudget,
  ) -> tuple[Selection, None]:
    """Selects the slots of the outliers and of the best other chunks."""
    regular = self.filled(store.valid) & ~index.outliers
    means = index.means.astype(jnp.float32)
    scores = max_attention(queries, means, regular)
    # No softmax weight is above 1: outliers come first.
    scores = jnp.where(index.outliers, 2.0, scores)
    outliers = jnp.sum(index.outliers, dtype=jnp.int32)
    # Rounded up, so that a row that may read all of its keys can do so.
    max_pages = self.outliers + -(-budget.max_keys // self.page)
    num_pages = outliers + budget.num_keys // self.page
    best = self.select_best(scores[None], store.valid, max_pages, num_pages)
    return best, None
