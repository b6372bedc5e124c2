"""A forward pass over whole prompts, in compiled parts that layers share."""

import functools
import inspect
from collections.abc import Collection, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.interpreters.partial_eval import DynamicJaxprTracer
from jaxtyping import Array, Float, Int, PyTree

from kvjax.activations import Activations
from kvjax.cache.sharding import shard_activations, shard_residual, shard_tokens
from kvjax.calibration.features import TAIL
from kvjax.engine.by_row import Axes, by_row, map_rows, row_axes
from kvjax.engine.forward import attend_to_prompt, block_positions
from kvjax.engine.likelihood import prompt_and_tail_nll
from kvjax.engine.model_layers import index_layer, layer_stacks, run_block
from kvjax.model import LayerSpec, Model
from kvjax.prompts import Prompts

# Asks a pass for the prompt's queries, which are most of its activations.
QUERIES = "queries"


@functools.partial(jax.jit, static_argnames=("length",))
def positions(lengths: Int[Array, " B"], length: int) -> Int[Array, "B S"]:
  """Positions of right-padded rows; -1 for padding."""
  return block_positions(jnp.zeros_like(lengths), length, lengths)


@functools.partial(jax.jit, static_argnames=("model", "apart"))
def embed(
  model: Model,
  params: PyTree,
  tokens: Int[Array, "B S"],
  positions: Int[Array, "B S"],
  *,
  apart: bool = False,
) -> tuple[Float[Array, "B S E"], PyTree]:
  """Embeds tokens; see `Model.embed`.

  Args:
    model: the functions.
    params: the weights.
    tokens: the tokens.
    positions: their positions.
    apart: whether to embed them row by row.
  """
  hidden, shared = model.embed(params, tokens, positions)
  if apart:
    hidden = map_rows(
      lambda rows: shard_residual(model.embed(params, *rows)[0]),
      (tokens, positions),
    )
  return shard_residual(hidden), shard_tokens(shared, tokens.shape)


@functools.partial(
  jax.jit, static_argnames=("model", "how", "axes"), donate_argnames=("hidden",)
)
def forward_layer(
  stack: PyTree,
  index: Int[Array, ""],
  hidden: Float[Array, "B S E"],
  shared: PyTree,
  positions: Int[Array, "B S"],
  *,
  model: Model,
  how: tuple[LayerSpec, Collection[str]],
  axes: Axes | None = None,
) -> tuple[Float[Array, "B S E"], Activations | None]:
  """Runs a layer over whole prompts.

  Args:
    stack: stack of weights that contains the layer.
    index: index of the layer in the stack.
    hidden: hidden states after the previous layer; donated.
    shared: arrays that all layers share.
    positions: positions of the tokens.
    model: the functions.
    how: the layer's spec, and the activations to return besides keys and
      values: those of `kvjax.activations.OPTIONAL`, and `QUERIES`.
    axes: axes of rows of shared arrays to run row by row; None to run together.

  Returns:
    The hidden states, and the activations; None if the layer has no cache.
  """
  spec, optional = how

  def attend(
    activations: Activations,
  ) -> tuple[Float[Array, "B N S Dv"], Activations]:
    activations = shard_activations(activations)
    output = attend_to_prompt(activations)
    # XLA drops the activations that are no outputs.
    activations = activations.only(optional)
    if QUERIES not in optional:
      activations = activations.without_queries()
    return output, activations

  def run(
    index: Int[Array, ""],
    hidden: Float[Array, "R S E"],
    shared: PyTree,
    positions: Int[Array, "R S"],
  ) -> tuple[Float[Array, "R S E"], Activations | None]:
    weights = index_layer(stack, index)
    hidden, activations = run_block(
      model, weights, spec, hidden, shared, positions, attend
    )
    return shard_residual(hidden), activations if spec.cache else None

  run_all = run if axes is None else by_row(run, axes)
  return run_all(jnp.asarray(index), hidden, shared, positions)


# Donates nothing.
_forward_layer_kept = jax.jit(
  inspect.unwrap(forward_layer), static_argnames=("model", "how")
)


def needs_states_again(params: PyTree) -> bool:
  """Whether hidden states may not be donated, as gradients need them again.

  Within `jax.jit`, the compiler knows what it needs.
  """
  return any(map(_is_run_again, jax.tree.leaves(params)))


def _is_run_again(weight: Any) -> bool:
  if not isinstance(weight, DynamicJaxprTracer):
    return isinstance(weight, jax.core.Tracer)
  # `jax.checkpoint` traces as `jax.jit` does, but outside of it, JAX then runs
  # one program after another, each as it is.
  traced = weight._trace.frame.debug_info
  return traced is not None and "checkpoint" in traced.traced_for


def forward_layers(
  model: Model, params: PyTree, prompts: Prompts, optional: Collection[str]
) -> Iterator[tuple[Float[Array, "B S E"], Activations | None]]:
  """Runs whole prompts through the layers, one after another.

  Args:
    model: the functions.
    params: the weights.
    prompts: the prompts.
    optional: the activations to yield besides keys and values.

  Yields:
    The hidden states after each layer, which the next one may donate, and its
    activations; None if it has no cache.
  """
  geometry, tokens = model.geometry, jnp.asarray(prompts.tokens)
  lengths = jnp.asarray(prompts.lengths, jnp.int32)
  places = positions(lengths, tokens.shape[1])
  kept = needs_states_again(params)
  # Of rows alone, a gradient would need a copy of the weights for each.
  axes = None if kept else row_axes(model, params, tokens, places)
  apart = axes is not None
  hidden, shared = embed(model, params, tokens, places, apart=apart)
  weights = layer_stacks(model, params)
  run = _forward_layer_kept if kept else forward_layer
  for layer, spec in enumerate(geometry.layers):
    hidden, activations = run(
      weights[spec.weights],
      np.int32(geometry.weight_index[layer]),
      hidden,
      shared,
      places,
      model=model,
      how=(spec, frozenset(optional)),
      axes=axes,
    )
    yield hidden, activations


@functools.partial(jax.jit, static_argnames=("model", "measured"))
def head(
  params: PyTree,
  hidden: Float[Array, "B S E"],
  tokens: Int[Array, "B S"],
  lengths: Int[Array, " B"],
  *,
  model: Model,
  measured: bool,
) -> tuple[Float[Array, "B V"], Float[Array, "2 B"]]:
  """Logits after each row's last token; NLL(c) and tail NLL, or zeros."""
  last = jnp.take_along_axis(hidden, (lengths - 1)[:, None, None], axis=1)
  logits = model.logits(params, model.normalize(params, last)[:, 0])
  if not measured:
    # No NaN, which `jax_debug_nans` would take for an error.
    return logits, jnp.zeros((2, *lengths.shape), jnp.float32)
  hidden = model.normalize(params, hidden)
  nll = prompt_and_tail_nll(model, params, hidden, tokens, lengths, TAIL)
  return logits, nll
