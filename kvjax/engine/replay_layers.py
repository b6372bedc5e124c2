"""A layer of a replay: attention to a prompt's full cache, and its scores."""

import functools
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, PyTree

from kvjax.activations import Activations
from kvjax.engine.model_layers import index_layer, run_block
from kvjax.engine.prompt_programs import needs_states_again
from kvjax.kernels.attention import (
  Partial,
  merge,
  partial_attention,
  with_sinks,
)
from kvjax.methods.replay import Replay, ReplayedChunk
from kvjax.model import LayerSpec, Model
from kvjax.struct import struct

# Scores of a chunk by each replay.
Scores = tuple[Float[Array, "B N C"], ...]


@struct
class Chunk:
  """A chunk of C slots of every row.

  Attributes:
    start: its first slot in each row.
    count: its tokens in each row.
    prefix: number of tokens of the chat template that each row begins with.
  """

  start: Int[Array, " B"]
  count: Int[Array, " B"]
  prefix: Int[Array, " B"]


class How(NamedTuple):
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


class Given(NamedTuple):
  """What the program of a layer is given beside its hidden states.

  Attributes:
    stack: stack of weights that contains the layer.
    place: index of the layer in the stack.
    shared: arrays that all layers share.
    positions: positions of the replay.
    prompt: keys and values of the prompt; None if the layer has no cache.
    chunk: the chunk.
  """

  stack: PyTree
  place: Int[Array | np.ndarray, ""]
  shared: PyTree
  positions: Int[Array, "B R"]
  prompt: Activations | None
  chunk: Chunk

  @property
  def weights(self) -> PyTree:
    """The layer's own weights."""
    return index_layer(self.stack, jnp.asarray(self.place))


class Attended(NamedTuple):
  """Attention of a replay, and the chunk that it reads.

  Attributes:
    whole: attention to the prompt and the replay itself, with learned sinks.
    lse: log-sum-exp of the logits of the chunk and the replay itself.
    keys: rotated keys of the chunk.
    values: its values.
    valid: slots of the chunk that have a token.
  """

  whole: Partial
  lse: Float[Array, "B N R"]
  keys: Float[Array, "B K C D"]
  values: Float[Array, "B K C Dv"]
  valid: Bool[Array, "B C"]


class Pass(NamedTuple):
  """What the layers of the replay of a chunk have in common.

  Attributes:
    model: the functions.
    stacks: stacks of weights.
    shared: arrays that all layers share.
    positions: positions of the replay.
    prompt: keys and values of the prompt, by the layers' numbers.
    chunk: the chunk.
    hows: the static arguments of each layer.
  """

  model: Model
  stacks: tuple[PyTree, ...]
  shared: PyTree
  positions: Int[Array, "B R"]
  prompt: Mapping[int, Activations]
  chunk: Chunk
  hows: tuple[How, ...]

  def run(self, hidden: Float[Array, "B R E"]) -> list[Scores]:
    """Runs the layers up to the last that evicts; scores the chunk in each."""
    scores: list[Scores] = [()] * len(self.hows)
    kept = needs_states_again((hidden, self.stacks))
    run = replay_layer_compiled if kept else _replay_layer_once
    scored = (n for n, how in enumerate(self.hows) if how.spec.compressible)
    last = max(scored, default=-1)
    for layer, how in enumerate(self.hows[: last + 1]):
      given = self.given(layer)
      if layer < last:
        hidden, scores[layer] = run(hidden, given, model=self.model, how=how)
      else:
        # Nothing reads the hidden states after it.
        scores[layer] = _score_layer(hidden, given, model=self.model, how=how)
    return scores

  def given(self, layer: int) -> Given:
    """What the program of a layer is given."""
    index = self.model.geometry.weight_index[layer]
    return Given(
      self.stacks[self.hows[layer].spec.weights],
      np.asarray(index, np.int32),
      self.shared,
      self.positions,
      self.prompt.get(layer),
      self.chunk,
    )


def replay_layer(
  hidden: Float[Array, "B R E"], given: Given, *, model: Model, how: How
) -> tuple[Float[Array, "B R E"], Scores]:
  """Runs a layer over the replay of a chunk, and scores the chunk.

  Args:
    hidden: hidden states after the previous layer.
    given: the layer, the prompt and the chunk.
    model: the functions.
    how: see `How`.

  Returns:
    The hidden states, and the scores by each replay; none if no method evicts
    from the layer.
  """
  prompt, chunk = given.prompt, given.chunk

  def read(seen: Activations) -> tuple[Float[Array, "B N R Dv"], Any]:
    assert prompt is not None
    found = attend(seen, prompt, chunk, how)
    scores = score(seen, prompt, chunk, how, found, residual=hidden)
    return found.whole.output, scores

  hidden, scores = run_block(
    model, given.weights, how.spec, hidden, given.shared, given.positions, read
  )
  return hidden, scores if how.spec.cache else ()


replay_layer_compiled = jax.jit(replay_layer, static_argnames=("model", "how"))
# Donates the hidden states before the layer.
_replay_layer_once = jax.jit(
  replay_layer, static_argnames=("model", "how"), donate_argnames=("hidden",)
)


@functools.partial(jax.jit, static_argnames=("model", "how"))
def _score_layer(
  hidden: Float[Array, "B R E"], given: Given, *, model: Model, how: How
) -> Scores:
  """The scores of `replay_layer`, without what only hidden states depend on."""
  return replay_layer(hidden, given, model=model, how=how)[1]


def attend(
  seen: Activations, prompt: Activations, chunk: Chunk, how: How
) -> Attended:
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
  whole = of_chunk
  if how.rest:
    keys_of_rest, values_of_rest = (
      x[:, :, : how.rest] for x in (prompt.keys, prompt.values)
    )
    outside = jnp.where(inside, -1, prompt.positions[:, : how.rest])
    whole = merge(whole, partial(keys_of_rest, values_of_rest, outside))
  if seen.sinks is not None:
    whole = with_sinks(whole, seen.sinks)
  return Attended(whole, of_chunk.lse, keys, values, valid)


def score(
  seen: Activations,
  prompt: Activations,
  chunk: Chunk,
  how: How,
  found: Attended,
  gradients: Float[Array, "B R"] | None = None,
  residual: Float[Array, "B R E"] | None = None,
) -> Scores:
  """Scores a chunk by each replay; not at all if no method evicts.

  Args:
    seen: projections of the replay.
    prompt: keys and values of the prompt.
    chunk: the chunk.
    how: see `How`.
    found: the result of `attend`.
    gradients: `ReplayedChunk.gradients`, for replays that depend on them.
    residual: hidden states before the layer, for replays that divide by them.
  """
  if not how.spec.compressible:
    return ()
  scores = []
  with jax.default_matmul_precision("highest"):
    for replay in how.replays:
      needed = seen.only(replay.activations)
      block = ReplayedChunk(
        queries=seen.queries,
        positions=seen.positions,
        lse=found.lse,
        keys=found.keys,
        values=found.values,
        valid=found.valid,
        first_keys=prompt.keys[:, :, : how.first],
        start=chunk.start,
        prefix=chunk.prefix,
        inputs=needed.inputs,
        residual=residual,
        output_projection=needed.output_projection,
        gradients=gradients,
        sinks=seen.sinks,
        attention=seen.attention,
      )
      scores.append(replay.score(block))
  return tuple(scores)
