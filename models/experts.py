"""Sparse MLPs: a router sends every token to a few experts.

Each expert is a gated MLP. There are two programs, for equal results: a CPU
computes every expert for all tokens and masks, other platforms sort the tokens
by expert and multiply groups of rows (`jax.lax.ragged_dot`).
"""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from kvjax.cache.sharding import gather_residual
from kvjax.kernels.dispatch import target_platform
from kvjax.models.structure import GATES, ExpertSizes


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

  def masked(
    self,
    x: Float[Array, "T E"],
    experts: Int[Array, "T X"],
    weights: Float[Array, "T X"],
  ) -> Float[Array, "T E"]:
    """Computes all experts for all tokens, one expert at a time."""
    gate = GATES[self.gate]

    def add(
      total: Float[Array, "T E"], expert: Int[Array, ""]
    ) -> tuple[Float[Array, "T E"], None]:
      share = jnp.sum(jnp.where(experts == expert, weights, 0.0), axis=1)
      inner = gate(self.gate_proj.one(expert, x), self.up_proj.one(expert, x))
      y = self.down_proj.one(expert, inner).astype(jnp.float32)
      return total + share[:, None] * y, None

    numbers = jnp.arange(self.sizes.count, dtype=jnp.int32)
    total, _ = jax.lax.scan(add, jnp.zeros(x.shape, jnp.float32), numbers)
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
    flat = x.reshape(-1, x.shape[-1])
    experts, weights = self.route(flat)
    on_cpu = target_platform() == "cpu"
    compute = self.experts.masked if on_cpu else self.experts.grouped
    # Otherwise XLA shares out the tokens before it sums the experts' rows over
    # devices, which are several times as many, and in float32.
    return gather_residual(compute(flat, experts, weights).reshape(x.shape))
