"""Replays of prompts: further passes over a prompt, with its full cache.

The prompt is cut into chunks, which the model reads again one after another,
each at the positions after the prompt. Nothing of a replay stays in a cache.
As in a prefill, the host calls one program per layer, which layers of one kind
share, and no array has the prompt's length squared.
"""

import functools
from collections.abc import Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, PyTree

from kvjax.activations import Activations
from kvjax.engine import prompt_programs
from kvjax.engine.model_layers import layer_stacks
from kvjax.engine.replay_gradient import run_with_gradients
from kvjax.engine.replay_layers import Chunk, How, Pass, Scores
from kvjax.errors import InputError
from kvjax.hosts import is_traced, read
from kvjax.methods.replay import Replay
from kvjax.model import Model
from kvjax.prompts import Prompts, bucket
from kvjax.repeat_request import RepeatRequest

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
    replays: what to compute; equal chunks share their passes, except that
      gradients have passes of their own.

  Returns:
    `Activations.replayed` by replay, by the layers' numbers.

  Raises:
    InputError: a prompt and the replay of a chunk are longer than the model's
      context.
  """
  found: dict[int, Replayed] = {}
  for kind in dict.fromkeys(map(_passes_of, replays)):
    alike = tuple(replay for replay in replays if _passes_of(replay) == kind)
    scores = _replay_alike(model, params, prompts, layers, alike)
    found = {n: {**found.get(n, {}), **of} for n, of in scores.items()}
  return found


def _passes_of(replay: Replay) -> tuple[int, int, bool]:
  """What replays that share their passes have in common."""
  return replay.chunk, replay.overlap, replay.weight == "gradient"


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
  parts: list[list[Scores]] = [[] for _ in specs]
  common = common_prefix(tokens, lengths, ids=request.prefix)
  # Where tokens are traced, no prompt begins with the template, as far as the
  # positions of its replay are concerned.
  prefix = 0 if is_traced(common) else read(common)
  of_chunk = replays[0].chunk
  widths = _widths(padded, of_chunk)
  # The last tokens of the chunk before, which may have fewer.
  overlap = min(replays[0].overlap, of_chunk)
  # Outside of the only chunk, there is the chat template alone.
  rest = padded if len(widths) > 1 else min(len(request.prefix), padded)
  for number, width in enumerate(widths):
    replayed, positions, chunk = _tokens_of_chunk(
      tokens,
      lengths,
      np.int32(number * of_chunk),
      request=request,
      sizes=(width, overlap if number else None),
    )
    starts = prefix + number * of_chunk
    _check_lengths(model, prompts, starts, width, replayed)
    hidden, shared = prompt_programs.embed(model, params, replayed, positions)
    one = Pass(
      model,
      weights,
      shared,
      positions,
      layers,
      chunk,
      tuple(How(spec, replays, width, first, rest) for spec in specs),
    )
    by_gradient = replays[0].weight == "gradient"
    found = run_with_gradients(one, hidden) if by_gradient else one.run(hidden)
    for layer, scores in enumerate(found):
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


def _check_lengths(
  model: Model,
  prompts: Prompts,
  starts: Int[np.ndarray, " B"] | int,
  width: int,
  replayed: Int[Array, "B R"],
) -> None:
  """Refuses prompts whose replay of a chunk has no positions left.

  Padding takes none, whether of the prompt or of the chunk.

  Args:
    model: the model.
    prompts: the prompts.
    starts: tokens before the chunk.
    width: slots of the chunk.
    replayed: tokens of the replay, which ends with these slots.
  """
  lengths = prompts.known_lengths
  counts = np.clip(lengths - starts, 0, width)
  tokens = replayed.shape[1] - width + counts
  # Rows that have ended before the chunk replay nothing.
  totals = lengths + np.where(counts > 0, tokens, 0)
  longest = tokens[np.argmax(totals)]
  limit = model.geometry.max_positions
  if totals.max() > limit:
    worst = np.argmax(totals)
    room = limit - lengths[worst] - (longest - counts[worst])
    advice = (
      f"give the method chunk={room} or less, or shorten"
      if (0 < room < counts[worst])
      else "shorten"
    )
    raise InputError(
      f"The prompt, with {longest} tokens to replay a chunk of it, has "
      f"{totals.max()} tokens; this model's context is {limit}: {advice} the "
      "prompt."
    )


@functools.partial(jax.jit, static_argnames=("request", "sizes"))
def _tokens_of_chunk(
  tokens: Int[Array, "B S"],
  lengths: Int[Array, " B"],
  offset: Int[Array, ""],
  *,
  request: RepeatRequest,
  sizes: tuple[int, int | None],
) -> tuple[Int[Array, "B R"], Int[Array, "B R"], Chunk]:
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
  prefix = common_prefix(tokens, lengths, ids=request.prefix)
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
  return replayed, positions, Chunk(start, count, prefix)


@functools.partial(jax.jit, static_argnames=("ids",))
def common_prefix(
  tokens: Int[Array, "B S"], lengths: Int[Array, " B"], *, ids: tuple[int, ...]
) -> Int[Array, " B"]:
  """Number of first tokens that each row has in common with `ids`."""
  ids = ids[: tokens.shape[1]]
  index = jnp.arange(len(ids), dtype=jnp.int32)[None]
  # Not in the dtype of the tokens, which may be too narrow for the ids.
  given = jnp.array(ids, jnp.int32).reshape(1, -1)
  same = tokens[:, : len(ids)].astype(jnp.int32) == given
  same = same & (index < lengths[:, None])
  common = jnp.cumprod(same, axis=1, dtype=jnp.int32)
  return jnp.sum(common, axis=1, dtype=jnp.int32)


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
