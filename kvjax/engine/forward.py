"""The model's layers, one after another: compiled once per kind of layer."""

import collections
import dataclasses
import itertools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, PyTree

from kvjax.activations import Activations
from kvjax.errors import InputError
from kvjax.kernels.prompt_attention import prompt_attention
from kvjax.model import LayerSpec, Model, ranks

# Given a layer's number, the stack that its state is in, its index there and
# its activations; returns the attention output and the stack.
Step = Callable[
  [Int[Array, ""], Any, Int[Array, ""], Activations],
  tuple[Float[Array, "B N S Dv"], Any],
]
# The same with a state of the layer's own, and the layer's number as an int.
LayerStep = Callable[
  [int, Any, Activations], tuple[Float[Array, "B N S Dv"], Any]
]


class States(NamedTuple):
  """What the layers of a model carry along.

  Attributes:
    stacks: states of several layers each, with a leading axis.
    order: for each layer, the stack that its state is in, where states of the
      same stack lie in the order of their layers; -1 for a layer without any.
  """

  stacks: tuple[Any, ...]
  order: tuple[int, ...]

  @classmethod
  def none(cls, model: Model) -> "States":
    """Of layers that carry nothing."""
    return cls((None,), (0,) * model.geometry.num_layers)


class _Kind(NamedTuple):
  """What layers that share a program have in common."""

  spec: LayerSpec
  stack: int


class _Run(NamedTuple):
  """So many layers of one kind, one after another."""

  kind: _Kind
  length: int


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
  """Runs a block of tokens through all layers, as loops over their kinds.

  Layers with equal specs whose states are in the same stack are one loop, so
  that the time to compile does not grow with depth. A pattern that repeats,
  such as five local layers and a global one, is a loop of loops.

  Args:
    model: the functions.
    params: the weights.
    tokens: token ids.
    positions: each token's place in its own row, -1 for padding.
    states: of the layers.
    step: the attention.
    remat: compute activations again for the gradient.

  Returns:
    The hidden states after the final norm, and the new stacks.
  """
  stacks, order = states
  geometry = model.geometry
  weights = layer_stacks(model, params)
  weight_index = jnp.asarray(geometry.weight_index, jnp.int32)
  state_index = jnp.asarray(ranks(order), jnp.int32)
  hidden, shared = model.embed(params, tokens, positions)

  def run(carry: Any, kind: _Kind, start: Any, length: int) -> Any:
    stack = weights[kind.spec.weights]
    # Slices that a scan makes of its inputs are what gradients flow through
    # best, but they must be all there are.
    whole = length == jax.tree.leaves(stack)[0].shape[0]

    def one_layer(carry: Any, xs: Any) -> tuple[Any, None]:
      hidden, states = carry
      layer, own = xs
      if not whole:
        own = index_layer(stack, weight_index[layer])

      def attend(activations: Activations) -> Any:
        activations = described(kind.spec, activations)
        state = states[kind.stack]
        return step(layer, state, state_index[layer], activations)

      hidden, state = model.block(
        own, kind.spec, hidden, shared, positions, attend
      )
      if kind.stack < 0:
        return (hidden, states), None
      new = (*states[: kind.stack], state, *states[kind.stack + 1 :])
      return (hidden, new), None

    body = jax.checkpoint(one_layer) if remat else one_layer
    layers = start + jnp.arange(length, dtype=jnp.int32)
    if length == 1 and whole:
      return body(carry, (layers[0], index_layer(stack, 0)))[0]
    if length == 1:
      # The layer's number must not be a constant: XLA would slice the weights
      # out of their stack, once and for all tokens, and compile for longer.
      hidden, states = carry
      layer, hidden = jax.lax.optimization_barrier((layers[0], hidden))
      return body((hidden, states), (layer, None))[0]
    return jax.lax.scan(body, carry, (layers, stack if whole else None))[0]

  runs = _runs(
    [_Kind(s, i) for s, i in zip(geometry.layers, order, strict=True)]
  )
  period, repeats = _repetition(runs)
  carry: Any = (hidden, tuple(stacks))

  def one_period(start: Any, carry: Any, which: Sequence[_Run]) -> Any:
    for kind, length in which:
      carry = run(carry, kind, start, length)
      start = start + length
    return carry

  start = 0
  if repeats > 1:
    pattern = runs[:period]
    size = sum(each.length for each in pattern)
    starts = size * jnp.arange(repeats, dtype=jnp.int32)
    carry, _ = jax.lax.scan(
      lambda carry, at: (one_period(at, carry, pattern), None), carry, starts
    )
    start = size * repeats
    runs = runs[period * repeats :]
  hidden, states = one_period(jnp.asarray(start, jnp.int32), carry, runs)
  return model.normalize(params, hidden), states


def hidden_states(
  model: Model,
  params: PyTree,
  tokens: Int[Array, "B S"],
  positions: Int[Array, "B S"],
  states: Sequence[Any],
  attend: LayerStep,
) -> tuple[Float[Array, "B S E"], tuple[Any, ...]]:
  """Runs a block through the layers, each written out by itself.

  For analyses whose states differ from layer to layer; what is compiled grows
  with depth.

  Args:
    model: the functions.
    params: the weights.
    tokens: token ids.
    positions: each token's place in its own row, -1 for padding.
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

    def own(
      activations: Activations, layer: int = layer, spec: LayerSpec = spec
    ) -> Any:
      return attend(layer, states[layer], described(spec, activations))

    hidden, state = model.block(
      index_layer(weights[spec.weights], index),
      spec,
      hidden,
      shared,
      positions,
      own,
    )
    new.append(state)
  return model.normalize(params, hidden), tuple(new)


def prompt_hidden(
  model: Model,
  params: PyTree,
  tokens: Int[Array, "B S"],
  lengths: Int[Array, " B"],
  *,
  remat: bool = False,
) -> Float[Array, "B S E"]:
  """Hidden states of whole prompts, which nothing is kept of.

  Args:
    model: the functions.
    params: the weights.
    tokens: right-padded rows.
    lengths: tokens of each row.
    remat: compute activations again for the gradient.
  """

  def step(
    layer: Int[Array, ""],
    stack: None,
    index: Int[Array, ""],
    activations: Activations,
  ) -> tuple[Float[Array, "B N S Dv"], None]:
    del layer, stack, index
    return attend_to_prompt(activations), None

  positions = block_positions(jnp.zeros_like(lengths), tokens.shape[1], lengths)
  states = States.none(model)
  return run_layers(
    model, params, tokens, positions, states, step, remat=remat
  )[0]


def layer_stacks(model: Model, params: PyTree) -> tuple[PyTree, ...]:
  """`Model.layer_weights`, if they are those of as many layers as have specs.

  Raises:
    InputError: they are not, or a spec names a stack that is not there.
  """
  stacks = model.layer_weights(params)
  specs = collections.Counter(spec.weights for spec in model.geometry.layers)
  for number, count in specs.items():
    if not 0 <= number < len(stacks):
      raise InputError(
        f"A layer's spec has weights={number}; this model's layer_weights are "
        f"{len(stacks)}, numbered from 0."
      )
    valid = {leaf.shape[:1] for leaf in jax.tree.leaves(stacks[number])}
    if valid != {(count,)}:
      raise InputError(
        f"layer_weights {number} must hold the {count} layers whose specs name "
        "them, along the leading axis of every leaf; the axes have "
        f"{', '.join(str(*size) for size in sorted(valid)) or 'no'} layers."
      )
  return stacks


def described(spec: LayerSpec, activations: Activations) -> Activations:
  """Activations that know how their layer attends.

  Raises:
    InputError: the model gives sinks where the spec has none, or none where it
      has, or heads of other sizes.
  """
  queries, keys = activations.queries.shape, activations.keys.shape
  sizes = (queries[1], keys[1], keys[3], activations.values.shape[3])
  wanted = (spec.heads, spec.kv_heads, spec.key_dim, spec.value_width)
  if sizes != wanted or queries[3] != keys[3]:
    raise InputError(
      "A layer projects what its spec says; this one has query heads, KV "
      f"heads, key and value widths {sizes}, and its spec {wanted}."
    )
  if (activations.sinks is not None) != spec.sinks:
    raise InputError(
      "A layer has sinks where its spec says so; this one "
      f"{'lacks them' if spec.sinks else 'has them unsaid'}."
    )
  return dataclasses.replace(activations, attention=spec.attention)


def attend_to_prompt(activations: Activations) -> Float[Array, "B N S Dv"]:
  """Attention of rows that begin with the block, padded on the right."""
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
  """Positions of a right-padded block, -1 where it is padding."""
  index = jnp.arange(length, dtype=jnp.int32)
  real = index[None] < lengths[:, None]
  return jnp.where(real, start[:, None] + index[None], -1)


def index_layer(stack: PyTree, layer: Int[Array, ""] | int) -> PyTree:
  """One layer of a stack, whose leaves lose their leading axis."""
  return jax.tree.map(
    lambda x: (
      jax.lax.dynamic_index_in_dim(x, layer, keepdims=False)
      if isinstance(layer, jax.Array)
      else x[layer]
    ),
    stack,
  )


def _runs(kinds: Sequence[_Kind]) -> list[_Run]:
  return [
    _Run(kind, len(list(group))) for kind, group in itertools.groupby(kinds)
  ]


def _repetition(runs: Sequence[_Run]) -> tuple[int, int]:
  """The length of the pattern that runs begin with, and how often it comes.

  Of all patterns it is the one that covers most runs, and the shortest such.
  """
  best = (len(runs), 1)
  covered = 0
  for period in range(1, len(runs) // 2 + 1):
    repeats = 1
    while runs[repeats * period : (repeats + 1) * period] == runs[:period]:
      repeats += 1
    if repeats > 1 and repeats * period > covered:
      best, covered = (period, repeats), repeats * period
  return best
