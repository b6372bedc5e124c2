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
from kvjax.engine.by_row import by_row, map_rows, runs_by_row
from kvjax.engine.forward import attend_to_prompt, block_positions
from kvjax.engine.likelihood import prompt_and_tail_nll
from kvjax.engine.model_layers import index_layer, layer_stacks, run_block
from kvjax.model import LayerSpec, Model
from kvjax.prompts import Prompts
from kvjax.struct import replace, struct


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
    apart: whether to embed them row by row, without what layers share.
  """
  if apart:
    hidden = map_rows(
      lambda rows: shard_residual(model.embed(params, *rows)[0]),
      (tokens, positions),
    )
    return shard_residual(hidden), None
  hidden, shared = model.embed(params, tokens, positions)
  return shard_residual(hidden), shard_tokens(shared, tokens.shape)


@struct
class Apart:
  """In place of what layers share, what each row's part is computed from.

  Cosines and sines of all rows would take as much memory as their keys.

  Attributes:
    params: the weights.
    tokens: the tokens.
  """

  params: PyTree[Array]
  tokens: Int[Array, "B S"]


@functools.partial(
  jax.jit, static_argnames=("model", "how"), donate_argnames=("hidden",)
)
def forward_layer(
  stack: PyTree,
  index: Int[Array, ""],
  hidden: Float[Array, "B S E"],
  shared: PyTree,
  positions: Int[Array, "B S"],
  *,
  model: Model,
  how: tuple[LayerSpec, Collection[str], int | None],
) -> tuple[Float[Array, "B S E"], Activations | None]:
  """Runs a layer over whole prompts.

  Args:
    stack: stack of weights that contains the layer.
    index: index of the layer in the stack.
    hidden: hidden states after the previous layer; donated.
    shared: arrays that all layers share; `Apart` to run row by row.
    positions: positions of the tokens.
    model: the functions.
    how: the layer's spec; the activations to return besides keys, values and
      queries, of those in `kvjax.activations.OPTIONAL`; and the number of last
      queries to return, None for all.

  Returns:
    The hidden states, and the activations; None if the layer has no cache.
  """
  spec, optional, queries = how

  def attend(
    activations: Activations,
  ) -> tuple[Float[Array, "B N S Dv"], Activations]:
    activations = shard_activations(activations)
    # XLA drops the activations that are no outputs.
    kept = activations.only(optional).with_queries(queries)
    if 0 < kept.queries.shape[2] < activations.queries.shape[2]:
      # XLA for TPUs would take the last queries after the attention, and hold
      # all of them until then.
      every, last = jax.lax.optimization_barrier(
        (activations.queries, kept.queries)
      )
      activations = replace(activations, queries=every)
      kept = replace(kept, queries=last)
    return attend_to_prompt(activations), kept

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

  index = jnp.asarray(index)
  if not isinstance(shared, Apart):
    return run(index, hidden, shared, positions)
  params = shared.params

  def run_rows(
    index: Int[Array, ""],
    hidden: Float[Array, "R S E"],
    tokens: Int[Array, "R S"],
    positions: Int[Array, "R S"],
  ) -> tuple[Float[Array, "R S E"], Activations | None]:
    own = model.embed(params, tokens, positions)[1]
    return run(index, hidden, own, positions)

  return by_row(run_rows)(index, hidden, shared.tokens, positions)


# Donates nothing.
_forward_layer_kept = jax.jit(
  inspect.unwrap(forward_layer), static_argnames=("model", "how")
)


def needs_states_again(arrays: PyTree) -> bool:
  """Whether nothing may be donated: a gradient needs it again, or it is mapped.

  Within `jax.jit`, the compiler knows what it needs.

  Args:
    arrays: weights, or what was computed with them.
  """
  return any(map(_is_run_again, jax.tree.leaves(arrays)))


def _is_run_again(x: Any) -> bool:
  if not isinstance(x, DynamicJaxprTracer):
    return isinstance(x, jax.core.Tracer)
  # `jax.checkpoint` traces as `jax.jit` does, but outside of it, JAX then runs
  # one program after another, each as it is.
  traced = x._trace.frame.debug_info
  return traced is not None and "checkpoint" in traced.traced_for


def forward_layers(
  model: Model,
  params: PyTree,
  prompts: Prompts,
  optional: Collection[str],
  queries: int | None = 0,
) -> Iterator[tuple[Float[Array, "B S E"], Activations | None]]:
  """Runs whole prompts through the layers, one after another.

  Args:
    model: the functions.
    params: the weights.
    prompts: the prompts.
    optional: the activations to yield besides keys, values and queries.
    queries: number of last queries of each row to yield; None for all.

  Yields:
    The hidden states after each layer, which the next one may donate, and its
    activations; None if it has no cache.
  """
  geometry, tokens = model.geometry, jnp.asarray(prompts.tokens)
  lengths = jnp.asarray(prompts.lengths, jnp.int32)
  places = positions(lengths, tokens.shape[1])
  kept = needs_states_again(params)
  # Of rows alone, a gradient would need a copy of the weights for each.
  apart = not kept and runs_by_row(tokens)
  hidden, shared = embed(model, params, tokens, places, apart=apart)
  if apart:
    shared = Apart(params, tokens)
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
      how=(spec, frozenset(optional), queries),
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
