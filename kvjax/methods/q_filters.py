"""Q-Filters: keep keys that point where a head's queries do."""

import dataclasses
from typing import Self

import jax.numpy as jnp
from jaxtyping import Array, Float, Int, PyTree

from kvjax import openblas
from kvjax.activations import Activations
from kvjax.cache.layers import LayerCache
from kvjax.errors import InputError
from kvjax.heads import by_kv_head
from kvjax.methods.base import ScoringMethod
from kvjax.methods.stored import Stored
from kvjax.methods.traits import Traits
from kvjax.model import Geometry
from kvjax.options.bounds import check_least

_NAME = "q_filters"


@dataclasses.dataclass(frozen=True)
class QFilters(ScoringMethod):
  """Scores a key by its product with the main direction of the queries.

  The score is -f.k. The filter f of a KV head is the mean over its query heads
  of -v, where v is the first right singular vector of the rotated queries, with
  the sign that most of them have in common. It depends on the model alone and
  is computed once, from some texts.

  Source: Godey et al., arXiv 2503.02812, Section 3.

  Attributes:
    filters: file or folder with filters of the model, as
      `kvjax.calibrate_queries` writes them or as they are published; empty
      computes them from the prompt's own queries.
    recent: number of last tokens that are always kept; 64 while decoding in the
      authors' code.
  """

  filters: str = ""
  recent: int = 0

  def __post_init__(self) -> None:
    super().__post_init__()
    check_least(self, recent=0)
    if self.filters:
      _ = self._stored

  @property
  def traits(self) -> Traits:
    """With filters of a file it reads keys alone."""
    reason = "without a file, its filters are those of a whole prompt"
    return Traits(
      whole_prompts_only="" if self.filters else reason,
      protects=self.recent,
      queries=0 if self.filters else None,
    )

  def check_model(self, geometry: Geometry) -> None:
    """Refuses a model with other heads than the filters.

    Raises:
      InputError: they differ.
    """
    if self.filters:
      self._stored.check(geometry, _NAME, per_query_head=False)

  def load(self) -> PyTree:
    """Returns the filters, if a file is named."""
    return dict(self._stored.arrays) if self.filters else None

  def without_files(self) -> Self:
    """Names no file."""
    return dataclasses.replace(self, filters="")

  def scores(
    self, layer: Int[Array, ""], cache: LayerCache, activations: Activations
  ) -> Float[Array, "B K T"]:
    """Computes the products of keys with minus the filter of their head."""
    kv_heads, dim = cache.keys.shape[1], cache.keys.shape[3]
    weights = self.weights_of(activations)
    if weights is not None:
      filters = weights[_NAME][layer][None]
      if kv_heads % filters.shape[1] or dim != filters.shape[2]:
        raise InputError(
          f"The filters are of another model: they are for "
          f"{filters.shape[1]} KV heads of {filters.shape[2]} numbers, and "
          f"this layer has {kv_heads} of {dim}."
        )
      # Query heads that store keys of their own use their group's filter.
      filters = jnp.repeat(filters, kv_heads // filters.shape[1], axis=1)
    else:
      real = (activations.positions >= 0)[:, None, :, None]
      queries = activations.queries.astype(jnp.float32)
      directions = main_directions(jnp.where(real, queries, 0.0))
      filters = -jnp.mean(by_kv_head(directions, kv_heads), axis=2)
    return -jnp.sum(cache.keys.astype(jnp.float32) * filters[:, :, None], -1)

  @property
  def _stored(self) -> Stored:
    return Stored.read(self.filters, {_NAME: 3})


def main_directions(queries: Float[Array, "*B S D"]) -> Float[Array, "*B D"]:
  """First right singular vectors, to which most queries have an acute angle.

  Args:
    queries: float32; those that are zero do not count.
  """
  openblas.load()
  products = jnp.swapaxes(queries, -1, -2) @ queries
  # In ascending order of eigenvalues.
  direction = jnp.linalg.eigh(products)[1][..., -1]
  along = jnp.einsum("...sd,...d->...s", queries, direction)
  # The sign of an eigenvector is arbitrary, also where half are on each side.
  majority = jnp.sum(jnp.sign(along), axis=-1)
  sign = jnp.where(majority == 0, jnp.sum(along, axis=-1), majority)
  return jnp.where((sign > 0)[..., None], direction, -direction)
