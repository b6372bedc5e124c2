"""A tiny model and test data for methods, in this project and others."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, PyTree

from kvjax.activations import Activations
from kvjax.cache.base import Layer
from kvjax.cache.cache import Cache
from kvjax.errors import InputError
from kvjax.model import Attend, Geometry, LayerSpec, ranks
from kvjax.placement import is_on_host, to_host
from kvjax.struct import replace


@dataclasses.dataclass(frozen=True)
class TinyModel:
  """A random model of the `kvjax.Model` protocol.

  Layers attend, or add a nonlinear projection if their spec has no cache, or
  do both in parallel if it says so.

  Attributes:
    geometry: sizes of the layers.
    vocab_size: V.
    width: E.
    dtype: dtype of weights, activations and cache.
  """

  geometry: Geometry = Geometry.uniform(
    layers=2, heads=4, kv_heads=2, head_dim=8, max_positions=4096
  )
  vocab_size: int = 64
  width: int = 32
  dtype: str = "float32"

  def init(self, seed: int = 0) -> PyTree:
    """Draws random weights."""
    draw = np.random.default_rng(seed)

    def matrix(rows: int, columns: int, scale: float = 1.0) -> np.ndarray:
      return draw.standard_normal((rows, columns)) * scale * rows**-0.5

    embedding = matrix(self.vocab_size, self.width, 4.0)
    stacks: dict[int, list[dict[str, np.ndarray]]] = {}
    for spec in self.geometry.layers:
      values = spec.value_width
      if not spec.cache:
        square = matrix(self.width, self.width)
        stacks.setdefault(spec.weights, []).append({"square": square})
        continue
      weights = {
        "query": matrix(self.width, spec.heads * spec.key_dim),
        "key": matrix(self.width, spec.kv_heads * spec.key_dim),
        "value": matrix(self.width, spec.kv_heads * values),
        "output": matrix(spec.heads * values, self.width),
      }
      if spec.sinks:
        weights["sinks"] = draw.standard_normal(spec.heads)
      if spec.parallel:
        weights["square"] = matrix(self.width, self.width)
      stacks.setdefault(spec.weights, []).append(weights)

    def stack(*leaves: np.ndarray) -> Array:
      return jnp.asarray(np.stack(leaves), self.dtype)

    return {
      "embedding": jnp.asarray(embedding, self.dtype),
      "layers": [
        jax.tree.map(stack, *stacks[number]) for number in sorted(stacks)
      ],
    }

  def embed(
    self,
    params: PyTree,
    tokens: Int[Array, "B S"],
    positions: Int[Array, "B S"],
  ) -> tuple[Float[Array, "B S E"], PyTree]:
    """Embeds tokens; layers share nothing."""
    del positions
    return params["embedding"][tokens], None

  def layer_weights(self, params: PyTree) -> tuple[PyTree, ...]:
    """Returns the stacks of the layers' weights."""
    return tuple(params["layers"])

  def block(
    self,
    weights: PyTree,
    spec: LayerSpec,
    hidden: Float[Array, "B S E"],
    shared: PyTree,
    positions: Int[Array, "B S"],
    attend: Attend,
  ) -> tuple[Float[Array, "B S E"], Any]:
    """Runs one layer: a residual connection around attention or tanh."""
    del shared
    if not spec.cache:
      return hidden + jnp.tanh(hidden @ weights["square"]), None
    queries = _heads(hidden @ weights["query"], spec.heads, spec.key_dim)
    keys = _heads(hidden @ weights["key"], spec.kv_heads, spec.key_dim)
    values = _heads(hidden @ weights["value"], spec.kv_heads, spec.value_width)
    activations = Activations(
      queries=_rotate(queries, positions[:, None]),
      keys=_rotate(keys, positions[:, None]),
      values=values,
      positions=positions,
      keys_unrotated=keys,
      queries_unrotated=queries,
      inputs=hidden,
      output_projection=weights["output"].reshape(
        spec.heads, spec.value_width, self.width
      ),
      sinks=weights["sinks"] if spec.sinks else None,
    )
    attended, state = attend(activations)
    joined = jnp.swapaxes(attended, 1, 2).reshape(*hidden.shape[:2], -1)
    output = hidden + joined @ weights["output"]
    if spec.parallel:
      output += jnp.tanh(hidden @ weights["square"])
    return output, state

  def normalize(
    self, params: PyTree, hidden: Float[Array, "B S E"]
  ) -> Float[Array, "B S E"]:
    """Returns the hidden states, as there is no norm."""
    del params
    return hidden

  def logits(
    self, params: PyTree, hidden: Float[Array, "*B E"]
  ) -> Float[Array, "*B V"]:
    """Computes logits with the tied embedding."""
    embedding = params["embedding"].T
    return jnp.matmul(hidden, embedding, preferred_element_type=jnp.float32)

  def rerotate(
    self,
    keys: Float[Array, "B K T D"],
    by: Int[Array, "B K T"],
    spec: LayerSpec,
  ) -> Float[Array, "B K T D"]:
    """Moves keys that were rotated at positions p to p + `by`."""
    del spec  # All layers rotate in the same way.
    return _rotate(keys, by)


def _heads(
  x: Float[Array, "B S W"], heads: int, dim: int
) -> Float[Array, "B H S D"]:
  batch, length, width = x.shape
  if width != heads * dim:
    raise InputError(
      f"A layer's spec has {heads} heads of width {dim} where its weights "
      f"project {width} numbers; they must be as many."
    )
  return jnp.swapaxes(x.reshape(batch, length, heads, dim), 1, 2)


def _rotate(
  x: Float[Array, "B H S D"], positions: Int[Array, " B #H S"]
) -> Float[Array, "B H S D"]:
  half = x.shape[-1] // 2
  speed = 100.0 ** (-jnp.arange(half, dtype=jnp.float32) / half)
  places = positions.astype(jnp.float32)[..., None]
  angles = places * speed[None, None, None]
  low, high = jnp.split(x.astype(jnp.float32), 2, axis=-1)
  cos, sin = jnp.cos(angles), jnp.sin(angles)
  rotated = (low * cos - high * sin, high * cos + low * sin)
  return jnp.concatenate(rotated, axis=-1).astype(x.dtype)


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
  """Draws activations of a right-padded block; the padding is NaN."""
  rows = len(lengths)
  index = np.arange(padded)[None]
  real = index < np.asarray(lengths)[:, None]
  # Drawn without JAX, which would compile a program for each shape.
  draw = np.random.default_rng(seed)

  def normal(count: int) -> Array:
    x = draw.standard_normal((rows, count, padded, head_dim))
    x = np.where(real[:, None, :, None], x, np.nan)
    return jnp.asarray(x.astype(jnp.dtype(dtype)))

  return Activations(
    queries=normal(heads),
    keys=normal(kv_heads),
    values=normal(kv_heads),
    keys_unrotated=normal(kv_heads),
    positions=jnp.asarray(np.where(real, index, -1).astype(np.int32)),
  )


def poison_cache(cache: Cache) -> Cache:
  """Fills all empty slots of a cache with NaN."""
  stacks = tuple(poison_layer(stack) for stack in cache.stacks)
  return dataclasses.replace(cache, stacks=stacks)


def poison_layer[L: Layer](layer: L) -> L:
  """Fills all empty slots of a layer, or of a stack of layers, with NaN."""

  def fill(part: Any) -> Any:
    valid = (part.positions >= 0)[..., None]

    def spoil(x: Array) -> Array:
      # Eight-bit integers have no NaN; their scales get it.
      is_integer = jnp.issubdtype(x.dtype, jnp.integer)
      here = jax.device_put(x, jax.memory.Space.Device)
      spoiled = jnp.where(
        valid, here, jnp.asarray(99 if is_integer else jnp.nan, x.dtype)
      )
      return to_host(spoiled) if is_on_host(x) else spoiled

    keys, values = jax.tree.map(spoil, (part.keys, part.values))
    return replace(part, keys=keys, values=values)

  return layer.map_slots(fill)


def kept_positions(cache: Cache, row: int) -> list[list[list[int]]]:
  """Returns the positions of a row's tokens, per layer and KV head."""
  return [
    [sorted(head) for head in cache.stacks[stack].row_positions(row, index)]
    for stack, index in zip(cache.order, ranks(cache.order), strict=True)
    if stack >= 0
  ]


def layer_positions(layer: Layer, row: int) -> list[list[int]]:
  """Returns the positions of a row's tokens in a layer, per KV head."""
  return [sorted(head) for head in layer.row_positions(row)]
