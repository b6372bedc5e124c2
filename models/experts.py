"""Sparse MLPs: a router sends every token to a few experts.

Each expert is a gated MLP. There are three programs, for equal results. If few
tokens decode on CPUs or TPUs, each token's experts are computed one by one, and
no other is read. Otherwise TPUs sort the rows by expert and multiply groups of
rows (`jax.lax.ragged_dot`), which on other platforms multiplies all rows by all
experts. CPUs compute blocks of rows that share an expert; so do GPUs, once so
many rows are not limited by memory bandwidth.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec
from jaxtyping import Array, Bool, Float, Int

from kvjax.cache.sharding import residual_axes
from kvjax.kernels.dispatch import target_platform
from kvjax.kernels.mesh_axes import (
  CONTEXT,
  DATA,
  HEADS,
  Spread,
  axis_size,
  spread_over,
)
from kvjax.models.sharding import expert_specs
from kvjax.models.structure import GATES, ExpertSizes

# Rows above which products of all experts are limited by compute, not by memory
# bandwidth: about the FLOPs per byte of an H100.
_COMPUTE_BOUND = 256

_Program = Callable[
  [Float[Array, "T E"], Int[Array, "T X"], Float[Array, "T X"]],
  Float[Array, "T E"],
]


class Projections(nnx.Module):
  """A matrix, and a bias if there are any, for each of E experts."""

  def __init__(
    self,
    sizes: ExpertSizes,
    inputs: int,
    outputs: int,
    dtype: Any,
    rngs: nnx.Rngs,
  ) -> None:
    shape = (sizes.count, inputs, outputs)
    draw = jax.random.normal(rngs.params(), shape, jnp.float32)
    self.kernel = nnx.Param((draw * inputs**-0.5).astype(dtype))
    if sizes.bias:
      self.bias = nnx.Param(jnp.zeros((sizes.count, outputs), dtype))

  def keep_bias(self, kept: Bool[Array, ""]) -> None:
    """Removes the bias unless it is kept."""
    if hasattr(self, "bias"):
      self.bias[...] = jnp.where(kept, self.bias[...], 0)

  def one(
    self, expert: Int[Array, ""], x: Float[Array, "T I"]
  ) -> Float[Array, "T O"]:
    """Projects all rows by one expert."""
    y = x @ self.kernel[...][expert]
    return y + self.bias[...][expert][None] if hasattr(self, "bias") else y

  def grouped(
    self,
    x: Float[Array, "T I"],
    experts: Int[Array, " T"],
    sizes: Int[Array, " E"],
  ) -> Float[Array, "T O"]:
    """Projects rows that are sorted by their experts.

    Args:
      x: the rows.
      experts: the expert of each row, ascending.
      sizes: number of rows of each expert.
    """
    y = jax.lax.ragged_dot(x, self.kernel[...], sizes)
    return y + self.bias[...][experts] if hasattr(self, "bias") else y


class Experts(nnx.Module):
  """The gated MLPs of all experts."""

  def __init__(
    self, sizes: ExpertSizes, width: int, gate: str, dtype: Any, rngs: nnx.Rngs
  ) -> None:
    self.sizes, self.gate = sizes, gate
    self.gate_proj = Projections(sizes, width, sizes.width, dtype, rngs)
    self.up_proj = Projections(sizes, width, sizes.width, dtype, rngs)
    self.down_proj = Projections(sizes, sizes.width, width, dtype, rngs)

  def one(
    self, expert: Int[Array, ""], x: Float[Array, "T E"]
  ) -> Float[Array, "T E"]:
    """Computes one expert for all tokens, in float32."""
    gate, up = self.gate_proj.one(expert, x), self.up_proj.one(expert, x)
    inner = GATES[self.gate](gate, up)
    return self.down_proj.one(expert, inner).astype(jnp.float32)

  def picked(
    self,
    x: Float[Array, "T E"],
    experts: Int[Array, "T X"],
    weights: Float[Array, "T X"],
  ) -> Float[Array, "T E"]:
    """Computes each token's experts alone, one by one."""
    tokens, per_token = experts.shape
    total = jnp.zeros(x.shape, jnp.float32)
    # Unrolled: a loop would first copy all experts out of the stack of layers.
    for token in range(tokens):
      row = x[token][None]
      for place in range(per_token):
        y = self.one(experts[token, place], row)[0]
        total = total.at[token].add(weights[token, place] * y)
    return total.astype(x.dtype)

  def blocked(
    self,
    x: Float[Array, "T E"],
    experts: Int[Array, "T X"],
    weights: Float[Array, "T X"],
  ) -> Float[Array, "T E"]:
    """Computes each token's experts alone, in blocks of rows of one expert."""
    count, per_token = self.sizes.count, experts.shape[1]
    flat, shares = experts.reshape(-1), weights.reshape(-1)
    # Up to as many rows as an expert has on average: each may have a block that
    # is not full.
    size = 1 << min(max((flat.size // count).bit_length() - 1, 3), 8)
    order = jnp.argsort(flat, stable=True).astype(jnp.int32)
    rows = jnp.bincount(flat, length=count).astype(jnp.int32)
    blocks = -(-rows // size)
    most = flat.size // size + count
    ends = jnp.cumsum(blocks)
    number = jnp.arange(most, dtype=jnp.int32)
    expert = jnp.minimum(
      jnp.searchsorted(ends, number, side="right"), count - 1
    ).astype(jnp.int32)
    # Rows of the expert before the block, and before the expert.
    skipped = (number - (ends - blocks)[expert]) * size
    first = (jnp.cumsum(rows) - rows)[expert] + skipped
    left = rows[expert] - skipped

    def add(
      total: Float[Array, "T E"],
      block: tuple[Int[Array, ""], Int[Array, ""], Int[Array, ""]],
    ) -> tuple[Float[Array, "T E"], None]:
      chosen, start, rest = block
      index = jnp.arange(size, dtype=jnp.int32)
      place = order[jnp.minimum(start + index, flat.size - 1)]
      token = place // per_token
      y = shares[place][:, None] * self.one(chosen, x[token])
      # The other rows are of tokens that other experts are for.
      y = jnp.where((index < rest)[:, None], y, 0.0)
      return total.at[token].add(y), None

    zero = jnp.zeros(x.shape, jnp.float32)
    total, _ = jax.lax.scan(add, zero, (expert, first, left))
    return total.astype(x.dtype)

  def grouped(
    self,
    x: Float[Array, "T E"],
    experts: Int[Array, "T X"],
    weights: Float[Array, "T X"],
  ) -> Float[Array, "T E"]:
    """Computes each token's experts alone, in groups of rows."""
    tokens, per_token = experts.shape
    flat = experts.reshape(-1)
    order = jnp.argsort(flat, stable=True)
    sorted_experts = flat[order]
    sizes = jnp.bincount(flat, length=self.sizes.count).astype(jnp.int32)
    rows = x[order // per_token]
    inner = GATES[self.gate](
      self.gate_proj.grouped(rows, sorted_experts, sizes),
      self.up_proj.grouped(rows, sorted_experts, sizes),
    )
    y = self.down_proj.grouped(inner, sorted_experts, sizes)
    # Back to the order of the tokens, without adding to scattered rows.
    back = jnp.argsort(order)
    y = y[back].reshape(tokens, per_token, -1).astype(jnp.float32)
    return jnp.sum(y * weights[:, :, None], axis=1).astype(x.dtype)


class SparseMlp(nnx.Module):
  """A router and its experts."""

  def __init__(
    self, sizes: ExpertSizes, width: int, gate: str, dtype: Any, rngs: nnx.Rngs
  ) -> None:
    self.sizes = sizes
    self.router = nnx.Linear(
      width,
      sizes.count,
      use_bias=sizes.bias,
      dtype=dtype,
      param_dtype=dtype,
      rngs=rngs,
    )
    self.experts = Experts(sizes, width, gate, dtype, rngs)

  def route(
    self, x: Float[Array, "T E"]
  ) -> tuple[Int[Array, "T X"], Float[Array, "T X"]]:
    """Chooses the experts of every token, and their float32 weights."""
    shares = jax.nn.softmax(self.router(x).astype(jnp.float32), axis=-1)
    weights, experts = jax.lax.top_k(shares, self.sizes.per_token)
    if self.sizes.normalized:
      weights = weights / jnp.sum(weights, axis=-1, keepdims=True)
    return experts, weights

  def __call__(self, x: Float[Array, "B S E"]) -> Float[Array, "B S E"]:
    """Transforms every token independently."""
    if jax.sharding.get_abstract_mesh().size < 2:
      return self._computed(x)
    return self._spread(x)

  def _spread(self, x: Float[Array, "B S E"]) -> Float[Array, "B S E"]:
    """Computes with each device's tokens and part of all experts, and sums.

    A device first sums the experts of a token. XLA would sum each expert's rows
    over devices, which are as many times more.
    """
    sizes = jax.sharding.get_abstract_mesh().shape
    graph, state = nnx.split(self)

    def spread(axis: str, length: int) -> Spread:
      names = spread_over(axis, [length], sizes)
      return names if axis_size(names, sizes) > 1 else None

    inner = spread(HEADS, self.sizes.width)
    given = PartitionSpec(spread(DATA, x.shape[0]), spread(CONTEXT, x.shape[1]))
    keeps = inner is not None and residual_axes(x.shape) == inner

    @functools.partial(
      jax.shard_map,
      in_specs=(expert_specs(state, sizes), given),
      out_specs=PartitionSpec(given[0], inner) if keeps else given,
      check_vma=False,
    )
    def computed(
      state: nnx.State, x: Float[Array, "B S E"]
    ) -> Float[Array, "B s E"]:
      own: SparseMlp = nnx.merge(graph, state)
      if inner is None:
        return own._computed(x)
      own.experts.down_proj.keep_bias(jax.lax.axis_index(inner) == 0)
      part = own._computed(x)
      if keeps:
        return jax.lax.psum_scatter(
          part, inner, scatter_dimension=1, tiled=True
        )
      return jax.lax.psum(part, inner)

    result: Float[Array, "B S E"] = computed(state, x)
    return result

  def _computed(self, x: Float[Array, "B S E"]) -> Float[Array, "B S E"]:
    """Routes the tokens, and computes their experts."""
    flat = x.reshape(-1, x.shape[-1])
    compute = self._program(flat.shape[0])
    return compute(flat, *self.route(flat)).reshape(x.shape)

  def _program(self, tokens: int) -> _Program:
    """Chooses the program for a number of tokens."""
    platform, experts = target_platform(), self.experts
    # XLA for GPUs copies an expert that is indexed.
    if platform != "gpu" and tokens <= self.sizes.most_alone:
      return experts.picked
    few = tokens * self.sizes.per_token <= _COMPUTE_BOUND
    if platform == "tpu" or (platform == "gpu" and few):
      return experts.grouped
    return experts.blocked
