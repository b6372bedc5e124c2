"""The forward pass over the layers, compiled once per kind of layer."""

import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, PyTree

from kvjax.activations import Activations
from kvjax.engine.model_layers import index_layer, layer_stacks, run_block
from kvjax.kernels.dispatch import target_platform
from kvjax.kernels.prompt_attention import prompt_attention
from kvjax.model import LayerSpec, Model, ranks


class Place(NamedTuple):
  """The place of a layer, and of its state in `States`.

  Attributes:
    layer: the layer's number.
    stack: the number of its stack, known while tracing.
    rank: its index in the stack.
  """

  layer: Int[Array, ""]
  stack: int
  rank: Int[Array, ""]


# Maps a layer's place, the stack of its state and its activations to the
# attention output and the stack.
Step = Callable[[Place, Any, Activations], tuple[Float[Array, "B N S Dv"], Any]]
# Maps a layer's number as an int, its state and its activations to the
# attention output and the state.
LayerStep = Callable[
  [int, Any, Activations], tuple[Float[Array, "B N S Dv"], Any]
]


class States(NamedTuple):
  """States of the layers of a model, joined to stacks.

  Attributes:
    stacks: states of several layers each, with a leading axis.
    order: for each layer, the index of its stack, which contains states in the
      order of their layers; -1 for a layer without a state.
  """

  stacks: tuple[Any, ...]
  order: tuple[int, ...]

  @classmethod
  def none(cls, model: Model) -> "States":
    """Makes the states of layers that have none."""
    return cls((None,), (0,) * model.geometry.num_layers)


class _Kind(NamedTuple):
  """The properties that layers of one program have in common."""

  spec: LayerSpec
  stack: int


class _Run(NamedTuple):
  """A run of consecutive layers of one kind."""

  kind: _Kind
  length: int


# Hidden states, and the stacks of states.
_Carry = tuple[Float[Array, "B S E"], tuple[Any, ...]]


def run_layers(
  model: Model,
  params: PyTree,
  tokens: Int[Array, "B S"],
  positions: Int[Array, "B S"],
  states: States,
  step: Step,
  *,
  remat: bool = False,
) -> tuple[Float[Array, "B S E"], tuple[Any, ...]]:
  """Runs a block of tokens through all layers, with a loop per kind.

  Consecutive layers with equal specs and a common stack form one loop, so that
  compile time does not grow with depth. A repeating pattern, such as five local
  layers and a global one, is a loop of loops.

  Args:
    model: the functions.
    params: the weights.
    tokens: token ids.
    positions: position of each token in its row, -1 for padding.
    states: of the layers.
    step: the attention.
    remat: recompute activations for the gradient.

  Returns:
    The hidden states after the final norm, and the new stacks.
  """
  weights = layer_stacks(model, params)
  weight_index = jnp.asarray(model.geometry.weight_index, jnp.int32)
  state_index = jnp.asarray(ranks(states.order), jnp.int32)
  hidden, shared = model.embed(params, tokens, positions)
  one = _Pass(
    model,
    weights,
    weight_index,
    state_index,
    shared,
    positions,
    step,
    remat,
    step_on_gpu=tokens.shape[1] == 1 and target_platform() == "gpu",
  )
  kinds = zip(model.geometry.layers, states.order, strict=True)
  runs = _runs([_Kind(spec, stack) for spec, stack in kinds])
  period, repeats = _repetition(runs)
  carry: _Carry = (hidden, tuple(states.stacks))
  start = 0
  # In a loop of patterns, XLA would copy the weights of layers that are alone,
  # on GPUs. With many tokens, this matters less than the time to compile.
  if repeats > 1 and not one.step_on_gpu:
    pattern = runs[:period]
    size = sum(each.length for each in pattern)
    # The number of a period's first layer; weights and states follow from it.
    starts = size * jnp.arange(repeats, dtype=jnp.int32)
    carry, _ = jax.lax.scan(
      lambda carry, at: (one.run_all(carry, pattern, at), None), carry, starts
    )
    start = size * repeats
    runs = runs[period * repeats :]
  hidden, stacks = one.run_all(carry, runs, start)
  return model.normalize(params, hidden), stacks


class _Pass(NamedTuple):
  """What the layers have in common while a block of tokens runs through them.

  Attributes:
    model: the functions.
    weights: stacks of weights.
    weight_index: index of each layer in its stack of weights.
    state_index: index of each layer in its stack of states.
    shared: arrays that all layers share.
    positions: position of each token in its row, -1 for padding.
    step: the attention.
    remat: recompute activations for the gradient.
    step_on_gpu: whether it is a step of decoding on a GPU.
  """

  model: Model
  weights: tuple[PyTree, ...]
  weight_index: Int[Array, " L"]
  state_index: Int[Array, " L"]
  shared: PyTree
  positions: Int[Array, "B S"]
  step: Step
  remat: bool
  step_on_gpu: bool

  def run_all(
    self, carry: _Carry, runs: Sequence[_Run], start: Int[Array, ""] | int
  ) -> _Carry:
    """Runs several runs of layers, of which the first begins at `start`."""
    for kind, length in runs:
      carry = self._run(carry, kind, start, length)
      start = start + length
    return carry

  def _run(self, carry: _Carry, kind: _Kind, start: Any, length: int) -> _Carry:
    """Runs consecutive layers of a kind, in a loop if there are several."""
    stack = self.weights[kind.spec.weights]
    index = self.model.geometry.weight_index
    # Gradients flow best through slices that a scan makes of its inputs, which
    # requires that the loop covers the whole stack.
    covers_stack = length == jax.tree.leaves(stack)[0].shape[0]
    body: Any = functools.partial(self._layer, kind)
    body = jax.checkpoint(body) if self.remat else body
    layers = start + jnp.arange(length, dtype=jnp.int32)
    if length == 1 and covers_stack:
      return body(carry, (layers[0], index_layer(stack, 0)))[0]
    if length == 1 and self.step_on_gpu:
      # A product reads a static part of the stack in place.
      here = index_layer(stack, index[start])
      return body(carry, (layers[0], here))[0]
    if self.step_on_gpu and not covers_stack:
      # Likewise, where the loop's own number says which part.
      ahead = index[start] - start
      return jax.lax.fori_loop(
        start,
        start + length,
        lambda i, carry: body(carry, (i, index_layer(stack, i + ahead)))[0],
        carry,
      )
    if length == 1:
      # The barrier hides that the layer's number is constant. Otherwise XLA
      # slices the weights out of their stack, and takes longer to compile.
      hidden, states = carry
      layer, hidden = jax.lax.optimization_barrier((layers[0], hidden))
      return body((hidden, states), (layer, None))[0]
    xs = (layers, stack if covers_stack else None)
    return jax.lax.scan(body, carry, xs)[0]

  def _layer(
    self, kind: _Kind, carry: _Carry, xs: tuple[Int[Array, ""], PyTree]
  ) -> tuple[_Carry, None]:
    """Runs a layer, given its number, and its weights if they are sliced."""
    hidden, states = carry
    layer, weights = xs
    if weights is None:
      stack = self.weights[kind.spec.weights]
      weights = index_layer(stack, self.weight_index[layer])

    def attend(activations: Activations) -> Any:
      # The whole stack: XLA updates a carry of the loop in place.
      state = states[kind.stack]
      place = Place(layer, kind.stack, self.state_index[layer])
      return self.step(place, state, activations)

    hidden, state = run_block(
      self.model,
      weights,
      kind.spec,
      hidden,
      self.shared,
      self.positions,
      attend,
    )
    if kind.stack < 0:
      return (hidden, states), None
    new = (*states[: kind.stack], state, *states[kind.stack + 1 :])
    return (hidden, new), None


def hidden_states(
  model: Model,
  params: PyTree,
  tokens: Int[Array, "B S"],
  positions: Int[Array, "B S"],
  states: Sequence[Any],
  attend: LayerStep,
) -> tuple[Float[Array, "B S E"], tuple[Any, ...]]:
  """Runs a block through the layers, unrolled.

  It is for analyses whose states differ between layers. The size of the program
  grows with depth.

  Args:
    model: the functions.
    params: the weights.
    tokens: token ids.
    positions: position of each token in its row, -1 for padding.
    states: one per layer.
    attend: the attention of every layer.

  Returns:
    The hidden states after the final norm, and the layers' new states.
  """
  hidden, shared = model.embed(params, tokens, positions)
  weights = layer_stacks(model, params)
  new = []
  geometry = model.geometry
  places = zip(geometry.layers, geometry.weight_index, strict=True)
  for layer, (spec, index) in enumerate(places):

    def attend_layer(activations: Activations, layer: int = layer) -> Any:
      return attend(layer, states[layer], activations)

    hidden, state = run_block(
      model,
      index_layer(weights[spec.weights], index),
      spec,
      hidden,
      shared,
      positions,
      attend_layer,
    )
    new.append(state)
  return model.normalize(params, hidden), tuple(new)


def prompt_hidden(
  model: Model,
  params: PyTree,
  tokens: Int[Array, "B S"],
  lengths: Int[Array, " B"],
) -> Float[Array, "B S E"]:
  """Computes the hidden states of whole prompts, without a cache.

  Args:
    model: the functions.
    params: the weights.
    tokens: right-padded rows.
    lengths: tokens of each row.
  """

  def step(
    place: Place, stack: None, activations: Activations
  ) -> tuple[Float[Array, "B N S Dv"], None]:
    del place, stack
    return attend_to_prompt(activations), None

  positions = block_positions(jnp.zeros_like(lengths), tokens.shape[1], lengths)
  states = States.none(model)
  return run_layers(model, params, tokens, positions, states, step)[0]


def attend_to_prompt(activations: Activations) -> Float[Array, "B N S Dv"]:
  """Computes the attention of whole prompts, padded on the right."""
  return prompt_attention(
    activations.queries,
    activations.keys,
    activations.values,
    activations.positions,
    options=activations.attention,
    sinks=activations.sinks,
  )


def block_positions(
  start: Int[Array, " B"], length: int, lengths: Int[Array, " B"]
) -> Int[Array, "B S"]:
  """Positions of a right-padded block, -1 for padding."""
  index = jnp.arange(length, dtype=jnp.int32)
  real = index[None] < lengths[:, None]
  return jnp.where(real, start[:, None] + index[None], -1)


def _runs(kinds: Sequence[_Kind]) -> list[_Run]:
  return [
    _Run(kind, len(list(group))) for kind, group in itertools.groupby(kinds)
  ]


def _repetition(runs: Sequence[_Run]) -> tuple[int, int]:
  """Finds the repeating pattern at the start that covers the most runs.

  Ties prefer the shortest pattern.

  Returns:
    The number of runs of the pattern, and the number of its repetitions.
  """
  best = (len(runs), 1)
  covered = 0
  for period in range(1, len(runs) // 2 + 1):
    repeats = 1
    # A shorter rest at the end never equals the pattern.
    while runs[repeats * period : (repeats + 1) * period] == runs[:period]:
      repeats += 1
    if repeats > 1 and repeats * period > covered:
      best, covered = (period, repeats), repeats * period
  return best
