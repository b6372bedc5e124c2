"""ClusterKV: clusters of similar keys, ranked by their means."""

import dataclasses

import jax.numpy as jnp
from jaxtyping import Array, Float

from kvjax.retrieval.base import KeyBudget, Prompt, Selection, Store
from kvjax.retrieval.clusters import ClusterRetrieval, Clusters


@dataclasses.dataclass(frozen=True)
class ClusterKV(ClusterRetrieval):
  """Reads whole clusters of keys, nearest mean first.

  K-means groups the keys by cosine: a key joins the cluster whose centroid, the
  mean of its raw keys, has the highest cosine with it. Every query head reads
  the clusters with the highest q centroid until the budget is full. It reads
  only the first tokens of the cluster that overflows the budget.

  The budget counts retrieved keys only, as in all retrieval methods. The paper
  counts the 16 sinks as part of the budget: its 1,024 is `keys=1008` here. It
  also clusters decoded tokens after a while; here they stay resident.

  Source: Liu et al., arXiv 2412.03213. Per-head selection and the number of
  K-means iterations follow the authors' code, which makes 400 clusters for
  every length.
  """

  sinks: int = 16
  local: int = 0
  dense_layers: tuple[int, ...] = (0, 1)

  def num_queries(self, length: int) -> int:
    """No queries: clusters depend on keys alone."""
    return 0

  def index(self, prompt: Prompt, budget: KeyBudget) -> Clusters:
    """Clusters the keys."""
    return self.cluster_keys(prompt, prompt.stored_keys)

  def retrieve(
    self,
    index: Clusters,
    queries: Float[Array, "G D"],
    store: Store,
    budget: KeyBudget,
  ) -> tuple[Selection, None]:
    """Selects the keys of the best clusters."""
    scores = queries @ index.centroids.astype(jnp.float32).T
    return Selection(index.select_best(scores, budget)), None
