"""ClusterKV: clusters of like keys, ranked by their means."""

import dataclasses

import jax.numpy as jnp
from jaxtyping import Array, Float

from kvjax.retrieval.base import Found, Prompt, Reads, Store
from kvjax.retrieval.clusters import Clustered, Clusters


@dataclasses.dataclass(frozen=True)
class ClusterKV(Clustered):
  """Reads whole clusters of keys, those first whose mean is nearest.

  K-means gathers the keys by their cosines: a key joins the cluster whose
  centroid, the mean of its raw keys, has the highest cosine with it. Every
  query head reads the clusters of the highest q centroid until the budget is
  full; of the one that overflows it reads the first tokens.

  As everywhere the budget is what is looked up. The paper counts the 16 sinks
  as a part of it: its budget of 1,024 is `reads=1008` here. It also clusters
  decoded tokens after a while; here they are resident.

  Source: Liu et al., arXiv 2412.03213. That heads choose for themselves and how
  often K-means iterates are the authors' code's, which makes 400 clusters
  whatever the length.
  """

  sinks: int = 16
  local: int = 0
  dense_layers: tuple[int, ...] = (0, 1)

  def index(self, prompt: Prompt, reads: Reads) -> Clusters:
    """The clusters."""
    return self.clustered(prompt, prompt.stored_keys)

  def retrieve(
    self,
    index: Clusters,
    queries: Float[Array, "G D"],
    store: Store,
    reads: Reads,
  ) -> tuple[Found, None]:
    """The keys of the best clusters."""
    worth = queries @ index.centroids.astype(jnp.float32).T
    return Found(index.best(worth, reads)), None
