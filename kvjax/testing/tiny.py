"""Small things to test methods and models with, in this project and others."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, PyTree

from kvjax.activations import Activations
from kvjax.cache.cache import Cache
from kvjax.cache.layers import Layer, Slots
from kvjax.cache.packed import PackedLayer, Pages
from kvjax.cache.sparse import IndexedLayer
from kvjax.model import Attend, Geometry


@dataclasses.dataclass(frozen=True)
class TinyModel:
  """A random attention-only model of the `kvjax.Model` protocol.

  Attributes:
    geometry: its sizes.
    vocab_size: V.
    width: E.
    dtype: of weights, activations and cache.
  """

  geometry: Geometry = Geometry(
    layers=2, heads=4, kv_heads=2, head_dim=8, max_positions=4096
  )
  vocab_size: int = 64
  width: int = 32
  dtype: str = "float32"

  def init(self, seed: int = 0) -> PyTree:
    """Random weights."""
    shape = self.geometry
    query_width = shape.heads * shape.head_dim
    kv_width = shape.kv_heads * shape.head_dim
    sizes = {
      "query": (self.width, query_width),
      "key": (self.width, kv_width),
      "value": (self.width, kv_width),
      "output": (query_width, self.width),
    }
    draw = np.random.default_rng(seed)

    def matrix(rows: int, columns: int, scale: float = 1.0) -> Array:
      weights = draw.standard_normal((rows, columns)) * scale * rows**-0.5
      return jnp.asarray(weights, self.dtype)

    return {
      "embedding": matrix(self.vocab_size, self.width, 4.0),
      "layers": [
        {name: matrix(*size) for name, size in sizes.items()}
        for _ in range(shape.layers)
      ],
    }

  def hidden(
    self,
    params: PyTree,
    tokens: Int[Array, "B S"],
    positions: Int[Array, "B S"],
    states: Sequence[Any],
    attend: Attend[Any],
  ) -> tuple[Float[Array, "B S E"], tuple[Any, ...]]:
    """See `kvjax.Model.hidden`."""
    x = params["embedding"][tokens]
    new_states = []
    for index, weights in enumerate(params["layers"]):
      keys = self._heads(x @ weights["key"])
      seen = Activations(
        queries=_rotated(self._heads(x @ weights["query"]), positions),
        keys=_rotated(keys, positions),
        values=self._heads(x @ weights["value"]),
        keys_unrotated=keys,
        positions=positions,
      )
      attended, state = attend(index, states[index], seen)
      joined = jnp.swapaxes(attended, 1, 2).reshape(*x.shape[:2], -1)
      x = x + joined @ weights["output"]
      new_states.append(state)
    return x, tuple(new_states)

  def logits(
    self, params: PyTree, hidden: Float[Array, "*B E"]
  ) -> Float[Array, "*B V"]:
    """See `kvjax.Model.logits`."""
    embedding = params["embedding"].T
    return jnp.matmul(hidden, embedding, preferred_element_type=jnp.float32)

  def rerotated(
    self, keys: Float[Array, "B K T D"], by: Int[Array, "B K T"]
  ) -> Float[Array, "B K T D"]:
    """See `kvjax.engine.rerotation.RotaryModel`."""
    turned = _rotated(
      keys.reshape(-1, 1, *keys.shape[2:]), by.reshape(-1, by.shape[2])
    )
    return turned.reshape(keys.shape)

  def _heads(self, x: Float[Array, "B S W"]) -> Float[Array, "B H S D"]:
    batch, length, _ = x.shape
    split = x.reshape(batch, length, -1, self.geometry.head_dim)
    return jnp.swapaxes(split, 1, 2)


def _rotated(
  x: Float[Array, "B H S D"], positions: Int[Array, "B S"]
) -> Float[Array, "B H S D"]:
  half = x.shape[-1] // 2
  speed = 100.0 ** (-jnp.arange(half, dtype=jnp.float32) / half)
  places = positions.astype(jnp.float32)[:, None, :, None]
  angles = places * speed[None, None, None]
  low, high = jnp.split(x.astype(jnp.float32), 2, axis=-1)
  cos, sin = jnp.cos(angles), jnp.sin(angles)
  turned = (low * cos - high * sin, high * cos + low * sin)
  return jnp.concatenate(turned, axis=-1).astype(x.dtype)


def random_activations(
  seed: int,
  lengths: Sequence[int],
  padded: int,
  *,
  heads: int = 4,
  kv_heads: int = 2,
  head_dim: int = 8,
  dtype: str = "float32",
) -> Activations:
  """A right-padded block of random projections; the padding holds NaN."""
  rows = len(lengths)
  index = np.arange(padded)[None]
  real = index < np.asarray(lengths)[:, None]
  # Drawn without JAX, which would compile a program for each shape.
  draw = np.random.default_rng(seed)

  def normal(count: int) -> Array:
    x = draw.standard_normal((rows, count, padded, head_dim))
    return jnp.asarray(np.where(real[:, None, :, None], x, np.nan), dtype)

  return Activations(
    queries=normal(heads),
    keys=normal(kv_heads),
    values=normal(kv_heads),
    keys_unrotated=normal(kv_heads),
    positions=jnp.asarray(np.where(real, index, -1), jnp.int32),
  )


def poisoned[Tree](cache: Tree) -> Tree:
  """The same cache, or layer, with NaN wherever it holds no token."""

  def fill(part: Slots | Pages) -> Slots | Pages:
    held = (part.positions >= 0)[..., None]

    def spoilt(x: Array) -> Array:
      whole = jnp.issubdtype(x.dtype, jnp.integer)
      return jnp.where(held, x, jnp.asarray(99 if whole else jnp.nan, x.dtype))

    keys, values = jax.tree.map(spoilt, (part.keys, part.values))
    return dataclasses.replace(part, keys=keys, values=values)

  def leaf(part: Any) -> bool:
    return isinstance(part, Slots | Pages)

  found: Tree = jax.tree.map(
    lambda part: fill(part) if leaf(part) else part, cache, is_leaf=leaf
  )
  return found


def held_positions(cache: Cache, row: int) -> list[list[list[int]]]:
  """Positions of the tokens that a row holds, per layer and KV head."""
  return [layer_positions(layer, row) for layer in cache.layers]


def layer_positions(layer: Layer, row: int) -> list[list[int]]:
  """Positions of the tokens that a row holds in a layer, per KV head."""
  if isinstance(layer, PackedLayer):
    found = layer_positions(layer.tail, row)
    pages, heads = layer.pages.positions[row], layer.pages.heads[row]
    for page, head in zip(np.asarray(pages), np.asarray(heads), strict=True):
      if head >= 0:
        found[head] += [int(p) for p in page if p >= 0]
    return [sorted(head) for head in found]
  if isinstance(layer, IndexedLayer):
    near = layer_positions(layer.resident, row)
    far = layer_positions(layer.stored, row)
    return [sorted(both) for both in map(list.__add__, near, far)]
  assert isinstance(layer, Slots)
  return [
    [int(p) for p in head if p >= 0]
    for head in np.asarray(layer.positions)[row]
  ]
