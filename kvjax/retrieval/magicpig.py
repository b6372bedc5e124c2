"""MagicPIG: keys sampled by locality-sensitive hashing, and reweighted."""

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, UInt

from kvjax.clustering import unit
from kvjax.errors import InputError
from kvjax.options.bounds import check_least
from kvjax.retrieval.base import Found, Prompt, Reads, Retrieval, Store
from kvjax.struct import struct

_MOST_BITS = 31
_FLOOR = 1e-4


@struct
class Tables:
  """Hash tables of one KV head.

  Attributes:
    planes: normals of the hyperplanes whose sides are a table's H bits.
    codes: of every key, its bits in each table.
    mean: of the keys, from where the sides are told.
  """

  planes: Float[Array, "*B L D H"]
  codes: UInt[Array, "*B L F"]
  mean: Float[Array, "*B D"]


@dataclasses.dataclass(frozen=True)
class MagicPIG(Retrieval):
  """Samples keys by hashing, and corrects attention for how likely each was.

  Each of L tables gives a key, less the mean of the stored keys, and a query
  the K signs of their projections on Gaussian directions. A query head reads
  the keys that have all signs in common with it in two tables at least. Where
  theta is the angle between both, that happens with the probability

    w = 1 - (1 - p^K)^L - L p^K (1 - p^K)^(L-1),  p = 1 - theta / pi,

  so that -log(w + 1e-4) is added to the key's logit: importance sampling, which
  estimates dense attention.

  The paper takes the mean from resident keys too, as that changes no softmax
  over both. Here the logits of all keys stay as they are, and only hashes and
  angles are those of centered keys.

  How many keys are read follows from K and L alone. The budget only says which
  rows are short enough to read everything. As the number is not fixed, every
  slot is listed that some head reads and the others are passed over: this is
  as slow as dense attention.

  Source: Chen et al., arXiv 2410.16179, Section 4.

  Attributes:
    bits: K, signs per table.
    tables: L.
    dense_every: layers 0, this, twice this and so on attend to everything, as
      `dense_layers` do; 0 for none.
    seed: of the directions.
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
    """Every so many layers, and those that are named."""
    regular = self.dense_every > 0 and layer % self.dense_every == 0
    return regular or super().is_dense(layer)

  def index(self, prompt: Prompt, reads: Reads) -> Tables:
    """Codes of all keys."""
    keys = prompt.stored_keys
    count = jnp.sum(prompt.stored.astype(jnp.float32))
    mean = jnp.sum(keys, axis=0) / jnp.maximum(count, 1.0)
    shape = (self.tables, keys.shape[1], self.bits)
    planes = jax.random.normal(prompt.key(self.seed), shape)
    # One table at a time: all signs of all keys would be many floats.
    centered = keys - mean[None]
    codes = jax.lax.map(lambda table: self._codes(centered, table), planes)
    return Tables(planes, codes, mean)

  def retrieve(
    self,
    index: Tables,
    queries: Float[Array, "G D"],
    store: Store,
    reads: Reads,
  ) -> tuple[Found, None]:
    """All keys that some head meets in two tables."""
    mine = jax.vmap(self._codes, (None, 0))(queries, index.planes)
    same = mine[:, :, None] == index.codes[:, None]
    met = jnp.sum(same.astype(jnp.int32), axis=0) >= 2
    sampled = met & store.valid[None]
    assert store.keys is not None
    keys = store.keys.astype(jnp.float32) - index.mean[None]
    keys = jnp.where(store.valid[:, None], keys, 0.0)
    share = sampled_share(unit(queries) @ unit(keys).T, self.bits, self.tables)
    bias = jnp.where(sampled, -jnp.log(share + _FLOOR), -jnp.inf)
    slots = jnp.arange(store.valid.shape[0], dtype=jnp.int32)
    listed = jnp.where(jnp.any(sampled, axis=0), slots, -1)
    return Found(listed[None], bias), None

  def _codes(
    self, x: Float[Array, "R D"], planes: Float[Array, "D H"]
  ) -> UInt[Array, " R"]:
    """The sides of a table's hyperplanes that vectors lie on, as bits."""
    powers = jnp.uint32(1) << jnp.arange(self.bits, dtype=jnp.uint32)
    sides = (x @ planes >= 0).astype(jnp.uint32)
    codes = jnp.sum(sides * powers[None], axis=1, dtype=jnp.uint32)
    return codes.astype(jnp.uint16 if self.bits <= 16 else jnp.uint32)


def sampled_share(
  cosine: Float[Array, "*B"], bits: int, tables: int
) -> Float[Array, "*B"]:
  """How likely two vectors agree in two tables of random signs at least.

  Args:
    cosine: of the angle between them.
    bits: signs of a table.
    tables: how many there are.
  """
  p = 1.0 - jnp.arccos(jnp.clip(cosine, -1.0, 1.0)) / jnp.pi
  one = p**bits
  # None and exactly one together are (1 - one)^(L-1) (1 + (L-1) one); of small
  # shares, rounding would leave nothing without the logarithms.
  others = tables - 1
  fewer = others * jnp.log1p(-one) + jnp.log1p(others * one)
  return jnp.maximum(-jnp.expm1(fewer), 0.0)
