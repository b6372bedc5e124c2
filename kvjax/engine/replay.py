"""Replays of prompts: further passes over a prompt, with its full cache.

The prompt is cut into chunks, which the model reads again one after another,
each at the positions after the prompt. Nothing of a replay stays in a cache.
As in a prefill, the host calls one program per layer, which layers of one kind
share, and no array has the prompt's length squared.
"""

import functools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, PyTree

from kvjax.activations import Activations
from kvjax.engine import prompt_programs
from kvjax.engine.model_layers import index_layer, layer_stacks, run_block
from kvjax.kernels.attention import merge, partial_attention, with_sinks
from kvjax.methods.replay import Replay, ReplayedChunk
from kvjax.model import LayerSpec, Model, check_context
from kvjax.prompts import Prompts, bucket
from kvjax.repeat_request import RepeatRequest
from kvjax.struct import struct


@struct
class _Chunk:
  """A chunk of C slots of every row.

  Attributes:
    start: its first slot in each row.
    count: its tokens in each row.
    prefix: number of tokens of the chat template that each row begins with.
  """

  start: Int[Array, " B"]
  count: Int[Array, " B"]
  prefix: Int[Array, " B"]


class _How(NamedTuple):
  """The static arguments of the program of a layer.

  Attributes:
    spec: spec of the layer.
    replays: the scores to compute.
    width: C, slots of the chunk.
    first: number of first tokens that may be sinks.
    rest: number of first tokens that include all outside of the chunk.
  """

  spec: LayerSpec
  replays: tuple[Replay, ...]
  width: int
  first: int
  rest: int


# Scores of a layer by each replay.
Replayed = Mapping[Replay, Float[Array, "B N S"]]


def replay_prompts(
  model: Model,
  params: PyTree,
  prompts: Prompts,
  layers: Mapping[int, Activations],
  replays: Sequence[Replay],
) -> dict[int, Replayed]:
  """Replays prompts and scores their tokens in every layer.

  Args:
    model: the functions.
    params: the weights.
    prompts: the prompts.
    layers: keys, values and positions of all tokens, by the layers' numbers.
    replays: what to compute; equal chunks share their passes.

  Returns:
    `Activations.replayed` by replay, by the layers' numbers.

  Raises:
    InputError: a prompt and the replay of a chunk are longer than the model's
      context.
  """
  found: dict[int, Replayed] = {}
  cuts = dict.fromkeys((replay.chunk, replay.overlap) for replay in replays)
  for chunk, overlap in cuts:
    alike = tuple(
      replay
      for replay in replays
      if (replay.chunk, replay.overlap) == (chunk, overlap)
    )
    scores = _replay_alike(model, params, prompts, layers, alike)
    found = {n: {**found.get(n, {}), **of} for n, of in scores.items()}
  return found


def _replay_alike(
  model: Model,
  params: PyTree,
  prompts: Prompts,
  layers: Mapping[int, Activations],
  replays: tuple[Replay, ...],
) -> dict[int, Replayed]:
  """Replays in chunks of one size; see `replay_prompts`."""
  specs, weights = model.geometry.layers, layer_stacks(model, params)
  request, padded = prompts.repeat_request, prompts.tokens.shape[1]
  first = min(max(len(request.prefix), *(r.sinks for r in replays)), padded)
  tokens = jnp.asarray(prompts.tokens)
  lengths = jnp.asarray(prompts.lengths, jnp.int32)
  parts: list[list[tuple[Float[Array, "B N C"], ...]]] = [[] for _ in specs]
  widths = _widths(padded, replays[0].chunk)
  # Outside of the only chunk, there is the chat template alone.
  rest = padded if len(widths) > 1 else min(len(request.prefix), padded)
  for number, width in enumerate(widths):
    replayed, positions, chunk = _tokens_of_chunk(
      tokens,
      lengths,
      np.int32(number * replays[0].chunk),
      request=request,
      sizes=(width, replays[0].overlap if number else None),
    )
    _check_length(model, prompts, replayed.shape[1])
    hidden, shared = prompt_programs.embed(model, params, replayed, positions)
    for layer, spec in enumerate(specs):
      hidden, scores = _replay_layer(
        weights[spec.weights],
        np.int32(model.geometry.weight_index[layer]),
        hidden,
        shared,
        positions,
        layers.get(layer),
        chunk,
        model=model,
        how=_How(spec, replays, width, first, rest),
      )
      parts[layer].append(scores)
  return {
    layer: {
      replay: _join(
        tuple(scores[index] for scores in of_layer),
        chunk.prefix,
        lengths,
        length=padded,
      )
      for index, replay in enumerate(replays)
    }
    for layer, of_layer in enumerate(parts)
    if specs[layer].compressible
  }


def _widths(padded: int, chunk: int) -> list[int]:
  """Slots of the chunks of rows of a bucket; the last one may be shorter."""
  whole, rest = divmod(padded, chunk)
  return [chunk] * whole + ([min(bucket(rest), chunk)] if rest else [])


def _check_length(model: Model, prompts: Prompts, width: int) -> None:
  """Refuses prompts whose replay has no positions left."""
  what = f"The prompt, with {width} tokens to replay a chunk of it,"
  check_context(model, np.asarray(prompts.lengths) + width, what)


@functools.partial(jax.jit, static_argnames=("request", "sizes"))
def _tokens_of_chunk(
  tokens: Int[Array, "B S"],
  lengths: Int[Array, " B"],
  offset: Int[Array, ""],
  *,
  request: RepeatRequest,
  sizes: tuple[int, int | None],
) -> tuple[Int[Array, "B R"], Int[Array, "B R"], _Chunk]:
  """Makes the tokens of a replay: the request, then the chunk.

  Args:
    tokens: tokens of the prompts.
    lengths: their lengths.
    offset: slots between the chat template and the chunk.
    request: what precedes the chunk.
    sizes: slots of the chunk, and the tokens before it that are part of the
      request; None for the first chunk.

  Returns:
    The tokens, their positions, and the chunk.
  """
  width, overlap = sizes
  batch, padded = tokens.shape
  prefix = _common_prefix(tokens, lengths, request.prefix)
  start = prefix + offset
  count = jnp.clip(lengths - start, 0, width)

  def given(ids: tuple[int, ...]) -> Int[Array, "B I"]:
    row = jnp.array(ids, jnp.int32).reshape(1, -1)
    return jnp.broadcast_to(row, (batch, len(ids)))

  def taken(first: Int[Array, " B"], length: int) -> Int[Array, "B I"]:
    slots = first[:, None] + jnp.arange(length, dtype=jnp.int32)[None]
    slots = jnp.clip(slots, 0, padded - 1)
    return jnp.take_along_axis(tokens.astype(jnp.int32), slots, axis=1)

  parts = [given(request.first)]
  if overlap is not None:
    parts = [given(request.later), taken(start - overlap, overlap)]
  parts += [given(request.suffix), taken(start, width)]
  replayed = jnp.concatenate(parts, axis=1)
  before = replayed.shape[1] - width
  index = jnp.arange(replayed.shape[1], dtype=jnp.int32)[None]
  # Rows that have ended before the chunk replay nothing.
  real = (index < before + count[:, None]) & (count[:, None] > 0)
  positions = jnp.where(real, lengths[:, None] + index, -1)
  return replayed, positions, _Chunk(start, count, prefix)


def _common_prefix(
  tokens: Int[Array, "B S"], lengths: Int[Array, " B"], ids: tuple[int, ...]
) -> Int[Array, " B"]:
  """Number of first tokens that each row has in common with `ids`."""
  ids = ids[: tokens.shape[1]]
  index = jnp.arange(len(ids), dtype=jnp.int32)[None]
  same = tokens[:, : len(ids)] == jnp.array(ids, tokens.dtype).reshape(1, -1)
  same = same & (index < lengths[:, None])
  return jnp.sum(jnp.cumprod(same.astype(jnp.int32), axis=1), axis=1)


@functools.partial(
  jax.jit, static_argnames=("model", "how"), donate_argnames=("hidden",)
)
def _replay_layer(
  stack: PyTree,
  index: Int[Array, ""],
  hidden: Float[Array, "B R E"],
  shared: PyTree,
  positions: Int[Array, "B R"],
  prompt: Activations | None,
  chunk: _Chunk,
  *,
  model: Model,
  how: _How,
) -> tuple[Float[Array, "B R E"], tuple[Float[Array, "B N C"], ...]]:
  """Runs a layer over the replay of a chunk, and scores the chunk.

  Args:
    stack: stack of weights that contains the layer.
    index: index of the layer in the stack.
    hidden: hidden states after the previous layer; donated.
    shared: arrays that all layers share.
    positions: positions of the replay.
    prompt: keys and values of the prompt; None if the layer has no cache.
    chunk: the chunk.
    model: the functions.
    how: see `_How`.

  Returns:
    The hidden states, and the scores by each replay; none if no method evicts
    from the layer.
  """

  def attend(seen: Activations) -> tuple[Float[Array, "B N R Dv"], Any]:
    assert prompt is not None
    return _attend(seen, prompt, chunk, how)

  hidden, scores = run_block(
    model,
    index_layer(stack, jnp.asarray(index)),
    how.spec,
    hidden,
    shared,
    positions,
    attend,
  )
  return hidden, scores if how.spec.cache else ()


def _attend(
  seen: Activations, prompt: Activations, chunk: _Chunk, how: _How
) -> tuple[Float[Array, "B N R Dv"], tuple[Float[Array, "B N C"], ...]]:
  """Attends to the chunk, the replay itself and the rest of the prompt."""
  padded, kv_heads = prompt.positions.shape[1], prompt.keys.shape[1]
  slots = jnp.arange(how.width, dtype=jnp.int32)[None] + chunk.start[:, None]
  valid = slots < (chunk.start + chunk.count)[:, None]
  gather = jnp.minimum(slots, padded - 1)[:, None, :, None]
  keys, values = (
    jnp.take_along_axis(x, gather, axis=2) for x in (prompt.keys, prompt.values)
  )
  every = jnp.arange(how.rest, dtype=jnp.int32)[None]
  inside = every >= chunk.start[:, None]
  inside &= every < (chunk.start + chunk.count)[:, None]

  def partial(keys: Any, values: Any, positions: Int[Array, "B T"]) -> Any:
    shape = (positions.shape[0], kv_heads, positions.shape[1])
    return partial_attention(
      seen.queries,
      keys,
      values,
      seen.positions,
      jnp.broadcast_to(positions[:, None], shape),
      options=seen.attention,
    )

  of_chunk = partial(keys, values, jnp.where(valid, slots, -1))
  of_chunk = merge(of_chunk, partial(seen.keys, seen.values, seen.positions))
  attended = of_chunk
  if how.rest:
    keys_of_rest, values_of_rest = (
      x[:, :, : how.rest] for x in (prompt.keys, prompt.values)
    )
    outside = jnp.where(inside, -1, prompt.positions[:, : how.rest])
    attended = merge(attended, partial(keys_of_rest, values_of_rest, outside))
  if seen.sinks is not None:
    attended = with_sinks(attended, seen.sinks)
  if not how.spec.compressible:
    return attended.output, ()
  scores = []
  with jax.default_matmul_precision("highest"):
    for replay in how.replays:
      needed = seen.only(replay.activations)
      block = ReplayedChunk(
        queries=seen.queries,
        positions=seen.positions,
        lse=of_chunk.lse,
        keys=keys,
        values=values,
        valid=valid,
        first_keys=prompt.keys[:, :, : how.first],
        start=chunk.start,
        prefix=chunk.prefix,
        inputs=needed.inputs,
        output_projection=needed.output_projection,
        sinks=seen.sinks,
        attention=seen.attention,
      )
      scores.append(replay.score(block))
  return attended.output, tuple(scores)


@functools.partial(jax.jit, static_argnames=("length",))
def _join(
  chunks: tuple[Float[Array, "B N _"], ...],
  prefix: Int[Array, " B"],
  lengths: Int[Array, " B"],
  length: int,
) -> Float[Array, "B N S"]:
  """Puts the scores of the chunks at their slots; -1 for all other slots."""
  scores = jnp.concatenate(chunks, axis=-1)
  slots = jnp.arange(length, dtype=jnp.int32)[None]
  from_slot = jnp.clip(slots - prefix[:, None], 0, scores.shape[-1] - 1)
  placed = jnp.take_along_axis(scores, from_slot[:, None], axis=-1)
  inside = (slots >= prefix[:, None]) & (slots < lengths[:, None])
  return jnp.where(inside[:, None], placed, -1.0)
