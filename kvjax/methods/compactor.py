"""Compactor: approximate leverage blended with non-causal attention."""

import dataclasses
from typing import Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from kernels.attention_mass import chunk_mass
from kvjax.activations import Activations
from kvjax.cache import LayerCache
from kvjax.errors import InputError
from kvjax.methods.base import Allowance, Head, Method, heads_of
from kvjax.methods.leverage import (
  Solver,
  gaussian_sketch,
  hadamard_sketch,
  leverage,
)
from kvjax.methods.snapkv import pool
from kvjax.selection import age, top_slots
from kvjax.struct import struct

Sketch = Literal["gaussian", "srht", "none"]
Scale = Literal["one", "rsqrt_d"]
ValueNorm = Literal["l2", "l1", "none"]
Scope = Literal["head", "layer"]


@struct
class Parts:
  """The two standardised scores of every slot, zero at the protected ends."""

  attention: Float[Array, "B K T"]
  outlier: Float[Array, "B K T"]


@dataclasses.dataclass(frozen=True)
class Compactor(Method):
  """Keeps keys that stand apart and keys that their neighbourhood attends to.

  The score is z(a) + blend z(o). o is the leverage of the keys before RoPE,
  from a random sketch of them; a the attention that a key receives from its
  own chunk of the prompt, later tokens included, times the norm of its value
  and averaged with its neighbours. Query-agnostic; whole prompts only.

  Source: Chari and Van Durme, arXiv 2507.08143, Section 3.

  Attributes:
    blend: weight of the leverage; 0 leaves attention alone.
    blend_removed: use the share of tokens removed as the weight instead.
    sketch: "gaussian", "srht" (randomised Hadamard), or "none": exact.
    sketch_dim: k, columns of the sketch.
    solver: how leverage is computed; see `kvjax.methods.leverage`.
    center: subtract the mean key first.
    leverage_chunk: tokens that a leverage is relative to; 0 is all.
    chunk: C, tokens per chunk of attention.
    scale: of the logits: 1, or "rsqrt_d".
    value_norm: "l2", "l1", or "none".
    pool: odd width of the average over neighbours; 1 is none.
    z_scope: standardise per "head", or over all heads of a "layer".
    first: first tokens that always stay and are left out of every score.
    last: last tokens, likewise.
    seed: of the sketches, one per layer and KV head.
  """

  blend: float = 0.3
  blend_removed: bool = False
  sketch: Sketch = "gaussian"
  sketch_dim: int = 64
  solver: Solver = "svd"
  center: bool = False
  leverage_chunk: int = 0
  chunk: int = 256
  scale: Scale = "one"
  value_norm: ValueNorm = "l2"
  pool: int = 3
  z_scope: Scope = "head"
  first: int = 0
  last: int = 0
  seed: int = 0

  def __post_init__(self) -> None:
    super().__post_init__()
    for name, least in (
      ("sketch_dim", 1),
      ("chunk", 1),
      ("leverage_chunk", 0),
      ("first", 0),
      ("last", 0),
    ):
      if getattr(self, name) < least:
        raise InputError(
          f"{name} must be {least} or more; {getattr(self, name)} is not."
        )
    if self.pool < 1 or self.pool % 2 == 0:
      raise InputError(f"pool must be odd; {self.pool} is not.")

  def evaluate(self, layer: int, cache: LayerCache, seen: Activations) -> Parts:
    """Both scores, standardised."""
    heads = heads_of(cache, seen)
    sketches = self._sketches(layer, heads.positions.shape[1], seen)
    per_head = jax.vmap(self._score_head, in_axes=(0, 0))
    attention, outlier = jax.vmap(per_head, in_axes=(0, None))(heads, sketches)
    middle = (cache.positions >= 0) & ~self._ends(cache.positions)
    return Parts(self._z(attention, middle), self._z(outlier, middle))

  def select(
    self, found: Parts, cache: LayerCache, allowance: Allowance
  ) -> Int[Array, "B K M"]:
    """The highest blended scores beside the protected ends."""
    held = cache.positions >= 0
    blend = jnp.full(allowance.counts.shape, self.blend, jnp.float32)
    if self.blend_removed:
      length = jnp.sum(held[:, 0].astype(jnp.float32), axis=-1)
      blend = 1.0 - allowance.counts.astype(jnp.float32) / length
    scores = found.attention + blend[:, None, None] * found.outlier
    return top_slots(
      scores,
      held,
      self._ends(cache.positions),
      allowance.counts,
      allowance.capacity,
    )

  def _sketches(
    self, layer: int, kv_heads: int, seen: Activations
  ) -> Float[Array, "K D k"] | None:
    """One sketch per KV head, shared by the rows of a batch."""
    if self.sketch == "none":
      return None
    draw = gaussian_sketch if self.sketch == "gaussian" else hadamard_sketch
    key = jax.random.fold_in(jax.random.key(self.seed), layer)
    keys = jax.vmap(jax.random.fold_in, (None, 0))(key, jnp.arange(kv_heads))
    dim = seen.keys.shape[-1]
    return jax.vmap(lambda head: draw(head, dim, self.sketch_dim))(keys)

  def _score_head(
    self, head: Head, sketch: Float[Array, "D k"] | None
  ) -> tuple[Float[Array, " T"], Float[Array, " T"]]:
    """Attention and leverage of the tokens between the protected ends."""
    middle = head.held & ~self._ends(head.positions)
    front = min(self.first, len(middle))
    inner = middle[front:]
    attention = self._attention(head, inner, front)
    keys = head.block_keys_unrotated[front:].astype(jnp.float32)
    outlier = self._outlier(jnp.where(inner[:, None], keys, 0.0), inner, sketch)
    return jnp.pad(attention, (front, 0)), jnp.pad(outlier, (front, 0))

  def _attention(
    self, head: Head, inner: Bool[Array, " I"], front: int
  ) -> Float[Array, " I"]:
    dim = head.queries.shape[-1]
    mass = chunk_mass(
      head.queries[:, front:],
      head.cached_keys[front:],
      inner,
      self.chunk,
      1.0 if self.scale == "one" else dim**-0.5,
    )
    scores = jnp.mean(mass, axis=0)
    if self.value_norm != "none":
      order = 2 if self.value_norm == "l2" else 1
      values = head.values[front:]
      scores = scores * jnp.linalg.norm(values, ord=order, axis=-1)
    return pool(scores, self.pool, "avg")

  def _outlier(
    self,
    keys: Float[Array, "I D"],
    inner: Bool[Array, " I"],
    sketch: Float[Array, "D k"] | None,
  ) -> Float[Array, " I"]:
    if self.leverage_chunk == 0:
      return leverage(keys, inner, sketch, self.solver, self.center)
    length, size = len(keys), self.leverage_chunk
    extra = -length % size
    keys = jnp.pad(keys, ((0, extra), (0, 0))).reshape(-1, size, keys.shape[1])
    inner = jnp.pad(inner, (0, extra)).reshape(-1, size)
    per_chunk = jax.vmap(
      lambda k, h: leverage(k, h, sketch, self.solver, self.center)
    )
    return per_chunk(keys, inner).reshape(-1)[:length]

  def _ends(self, positions: Int[Array, "*B T"]) -> Bool[Array, "*B T"]:
    """The first and last tokens, which always stay."""
    held = positions >= 0
    return held & ((positions < self.first) | (age(held) <= self.last))

  def _z(
    self, scores: Float[Array, "B K T"], middle: Bool[Array, "B K T"]
  ) -> Float[Array, "B K T"]:
    """Zero mean and unit variance per head or layer; constant becomes 0."""
    axes = -1 if self.z_scope == "head" else (-2, -1)

    def mean(x: Float[Array, "B K T"]) -> Float[Array, "B _ _"]:
      total = jnp.sum(jnp.where(middle, x, 0.0), axes, keepdims=True)
      count = jnp.sum(middle.astype(jnp.float32), axes, keepdims=True)
      return total / jnp.maximum(count, 1.0)

    middle_mean = mean(scores)
    centered = scores - middle_mean
    deviation = jnp.sqrt(mean(centered * centered))
    # Where rows are no more than directions every leverage is 1: what is left
    # of its deviation is rounding and must not decide.
    flat = deviation < jnp.maximum(1e-12, 1e-5 * jnp.abs(middle_mean))
    z = centered / jnp.where(flat, 1.0, deviation)
    return jnp.where(middle & ~flat, z, 0.0)
