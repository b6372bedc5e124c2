"""Loss and optimizer step of fine-tuning, with little memory for 8B models.

The backward pass recomputes layers, the attention of a few queries at a time,
and the logits of a few positions at a time. Besides the weights, it stores
little more than the layers' inputs.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jaxtyping import Array, Float, Int, PyTree

from kvjax.activations import Activations
from kvjax.cache.layers import LayerCache
from kvjax.cache.sharding import shard_layer
from kvjax.engine.forward import Place, States, block_positions, run_layers
from kvjax.engine.likelihood import prompt_nll
from kvjax.kernels.attention import attention
from kvjax.models.language_model import DecoderModel

# Queries whose attention is recomputed at a time; rows are padded to a
# multiple.
QUERIES = 128

MOST_NORM = 1.0
WEIGHT_DECAY = 0.01
# Share of warm-up steps.
_WARM_UP = 0.05


class Schedule(NamedTuple):
  """Learning rates: a short warm-up, then cosine decay to zero."""

  peak: float
  steps: int

  def rate(self, step: Int[Array, ""]) -> Float[Array, ""]:
    """Returns the learning rate of a step."""
    done = step.astype(jnp.float32) / self.steps
    risen = jnp.minimum(1.0, (done + 1 / self.steps) / _WARM_UP)
    return self.peak * risen * 0.5 * (1.0 + jnp.cos(jnp.pi * done))


def optimizer(schedule: Schedule) -> optax.GradientTransformation:
  """Creates AdamW with gradient clipping."""
  return optax.chain(
    optax.clip_by_global_norm(MOST_NORM),
    optax.adamw(schedule.rate, weight_decay=WEIGHT_DECAY),
  )


def summed_nll(
  model: DecoderModel,
  params: nnx.State,
  tokens: Int[Array, "B S"],
  lengths: Int[Array, " B"],
) -> Float[Array, ""]:
  """Computes the sum of -ln p over all but the first token of each row.

  Args:
    model: the model.
    params: its weights.
    tokens: rows, padded to a multiple of `QUERIES` tokens.
    lengths: real tokens of each row; 0 to ignore a row.
  """
  positions = block_positions(jnp.zeros_like(lengths), tokens.shape[1], lengths)
  hidden, _ = run_layers(
    model, params, tokens, positions, States.none(model), _step, remat=True
  )
  means = prompt_nll(model, params, hidden, tokens, lengths)
  foretold = jnp.maximum(lengths - 1, 0).astype(jnp.float32)
  return jnp.sum(jnp.where(foretold > 0, means, 0.0) * foretold)


measure = jax.jit(summed_nll, static_argnames="model")


@functools.partial(
  jax.jit,
  static_argnames=("model", "schedule"),
  donate_argnames=("adapter", "moments"),
)
def train_step(
  model: DecoderModel,
  schedule: Schedule,
  adapter: nnx.State,
  moments: PyTree,
  frozen: nnx.State,
  tokens: Int[Array, "B S"],
  lengths: Int[Array, " B"],
) -> tuple[nnx.State, PyTree, Float[Array, ""]]:
  """Takes one step; returns adapters, optimizer state and loss per token."""
  count = jnp.sum(jnp.maximum(lengths - 1, 0)).astype(jnp.float32)

  def loss(adapter: nnx.State) -> Float[Array, ""]:
    params = nnx.merge_state(adapter, frozen)
    return summed_nll(model, params, tokens, lengths) / count

  value, gradients = jax.value_and_grad(loss)(adapter)
  # Adam's bias correction raises a float to an integer power, a promotion.
  with jax.numpy_dtype_promotion("standard"):
    updates, moments = optimizer(schedule).update(gradients, moments, adapter)
  return optax.apply_updates(adapter, updates), moments, value


def _step(
  place: Place, stack: None, activations: Activations
) -> tuple[Float[Array, "B N S D"], None]:
  """Computes causal attention without S x S weights for the gradient."""
  del place
  cache = shard_layer(LayerCache.of(activations))
  batch, heads, length, dim = activations.queries.shape
  parts = length // QUERIES

  @jax.checkpoint
  def part(
    block: tuple[Float[Array, "B N C D"], Int[Array, "B C"]],
  ) -> Float[Array, "B N C D"]:
    queries, positions = block
    return attention(
      queries,
      cache.keys,
      cache.values,
      positions,
      cache.positions,
      options=activations.attention,
      sinks=activations.sinks,
    )

  queries = activations.queries.reshape(batch, heads, parts, QUERIES, dim)
  positions = activations.positions.reshape(batch, parts, QUERIES)
  mixed = jax.lax.map(
    part, (jnp.moveaxis(queries, 2, 0), jnp.moveaxis(positions, 1, 0))
  )
  return jnp.moveaxis(mixed, 0, 2).reshape(activations.queries.shape), stack
