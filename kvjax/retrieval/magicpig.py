"""MagicPIG: keys sampled by locality-sensitive hashing and reweighted."""

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, UInt

from kvjax.clustering import unit
from kvjax.errors import InputError
from kvjax.options.bounds import check_least
from kvjax.retrieval.base import KeyBudget, Prompt, Retrieval, Selection, Store
from kvjax.struct import struct

_MOST_BITS = 31
_FLOOR = 1e-4


@struct
class Tables:
  """Hash tables of one KV head.

  Attributes:
    planes: normals of each table's H hyperplanes; a bit is the side of one.
    codes: bits of every key in each table.
    mean: mean key, which is subtracted before hashing.
  """

  planes: Float[Array, "*B L D H"]
  codes: UInt[Array, "*B L F"]
  mean: Float[Array, "*B D"]


@dataclasses.dataclass(frozen=True)
class MagicPIG(Retrieval):
  """Samples keys by hashing and corrects attention for their probability.

  Each of L tables hashes queries and centered keys to the K signs of their
  projections on Gaussian directions. A query head reads the keys that share all
  signs with it in at least two tables. If theta is the angle between query and
  centered key, this happens with the probability

    w = 1 - (1 - p^K)^L - L p^K (1 - p^K)^(L-1),  p = 1 - theta / pi.

  Therefore -log(w + 1e-4) is added to the key's logit. This is importance
  sampling, and it estimates dense attention.

  The paper also subtracts the mean from resident keys, which changes no softmax
  over both. Here the logits of all keys are those of the original keys; only
  hashes and angles use centered keys.

  The number of keys follows from K and L alone. The budget only decides which
  rows are short enough to read everything. As the number is not fixed, all
  slots are listed and those that no head reads are skipped, which is as slow
  as dense attention.

  Source: Chen et al., arXiv 2410.16179, Section 4.

  Attributes:
    bits: K, signs per table.
    tables: L, number of hash tables.
    dense_every: every so many layers, from layer 0 on, attend to everything,
      in addition to `dense_layers`; 0 for none.
    seed: seed of the directions.
  """

  bits: int = 9
  tables: int = 120
  dense_every: int = 16
  seed: int = 0

  def __post_init__(self) -> None:
    super().__post_init__()
    check_least(self, bits=1, tables=2, dense_every=0)
    if self.bits > _MOST_BITS:
      raise InputError(
        f"bits must be {_MOST_BITS} or less; {self.bits} is not."
      )

  def is_dense(self, layer: int) -> bool:
    """Whether a layer is in `dense_layers` or selected by `dense_every`."""
    regular = self.dense_every > 0 and layer % self.dense_every == 0
    return regular or super().is_dense(layer)

  def num_queries(self, length: int) -> int:
    """No queries: the index depends on keys alone."""
    return 0

  def index(self, prompt: Prompt, budget: KeyBudget) -> Tables:
    """Hashes all keys."""
    keys = prompt.stored_keys
    count = jnp.sum(prompt.stored.astype(jnp.float32))
    mean = jnp.sum(keys, axis=0) / jnp.maximum(count, 1.0)
    shape = (self.tables, keys.shape[1], self.bits)
    planes = jax.random.normal(prompt.key(self.seed), shape, jnp.float32)
    # One table at a time: the projections of all tables would be too large.
    centered = keys - mean[None]
    codes = jax.lax.map(lambda table: self._codes(centered, table), planes)
    return Tables(planes, codes, mean)

  def retrieve(
    self,
    index: Tables,
    queries: Float[Array, "G D"],
    store: Store,
    budget: KeyBudget,
  ) -> tuple[Selection, None]:
    """Selects all keys that collide with some head in two tables."""
    query_codes = jax.vmap(self._codes, (None, 0))(queries, index.planes)
    equal = query_codes[:, :, None] == index.codes[:, None]
    collides = jnp.sum(equal, axis=0, dtype=jnp.int32) >= 2
    sampled = collides & store.valid[None]
    assert store.keys is not None
    keys = store.keys.astype(jnp.float32) - index.mean[None]
    keys = jnp.where(store.valid[:, None], keys, 0.0)
    share = sampled_share(unit(queries) @ unit(keys).T, self.bits, self.tables)
    # Heads share one list: -inf hides a key from those that did not sample it.
    bias = jnp.where(sampled, -jnp.log(share + _FLOOR), -jnp.inf)
    slots = jnp.arange(store.valid.shape[0], dtype=jnp.int32)
    selected = jnp.where(jnp.any(sampled, axis=0), slots, -1)
    return Selection(selected[None], bias), None

  def _codes(
    self, x: Float[Array, "R D"], planes: Float[Array, "D H"]
  ) -> UInt[Array, " R"]:
    """Hash codes of vectors in one table."""
    powers = jnp.uint32(1) << jnp.arange(self.bits, dtype=jnp.uint32)
    sides = (x @ planes >= 0).astype(jnp.uint32)
    codes = jnp.sum(sides * powers[None], axis=1, dtype=jnp.uint32)
    # The index stores L codes per key, so narrow ones halve it.
    return codes.astype(jnp.uint16 if self.bits <= 16 else jnp.uint32)


def sampled_share(
  cosine: Float[Array, "*B"], bits: int, tables: int
) -> Float[Array, "*B"]:
  """Probability that two vectors collide in at least two hash tables.

  Args:
    cosine: cosine of the angle between them.
    bits: signs per table.
    tables: number of tables.
  """
  p = 1.0 - jnp.arccos(jnp.clip(cosine, -1.0, 1.0)) / jnp.pi
  single = p**bits
  # No collision or exactly one has the probability
  # (1 - single)^(L-1) (1 + (L-1) single). Logarithms avoid cancellation where
  # the result is small.
  rest = tables - 1
  # Equal vectors have single = 1 and log1p(-1) = -inf; the result is then 1.
  fewer = rest * jnp.log1p(-single) + jnp.log1p(rest * single)
  return jnp.maximum(-jnp.expm1(fewer), 0.0)
