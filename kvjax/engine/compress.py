"""Compression of a layer's cache: evaluate, select, keep, finalize."""

import dataclasses
import functools
import inspect
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, PyTree

from kvjax.activations import Activations
from kvjax.allocation.base import Allocation, LayerBudget
from kvjax.cache.base import Layer
from kvjax.cache.cache import Cache
from kvjax.cache.layers import LayerCache
from kvjax.cache.narrow import NarrowLayer
from kvjax.cache.observation import ObservationWindow
from kvjax.cache.packed import PackedLayer
from kvjax.cache.pooled import PooledLayers
from kvjax.cache.sharding import gather_tokens, shard_layer, shard_stack
from kvjax.cache.sparse import SparseLayer
from kvjax.cache.window import WindowLayer
from kvjax.calibration.features import score_shape
from kvjax.engine.compression_plan import Plan
from kvjax.engine.prepared import LayerProgram
from kvjax.engine.rerotation import (
  LayerRotation,
  RotaryModel,
  close_gaps,
  rerotate,
)
from kvjax.errors import blamed_on
from kvjax.methods.base import Method
from kvjax.methods.traits import most_queries
from kvjax.model import Model
from kvjax.struct import struct


class Evaluation(NamedTuple):
  """An evaluation that all plans with equal values share.

  Attributes:
    method: the method whose scores are computed.
    allocation: what evaluates and selects; see `Allocation.selector`.
    per_query_head: whether each query head stores its own keys.
    observer: the method that evicts while decoding, for which state must be
      remembered; None if there is none.
    goes_on: whether the observer is the method itself, with the same files, so
      that its scores are of what it remembers.
  """

  method: Method
  allocation: Allocation
  per_query_head: bool
  observer: Method | None
  goes_on: bool

  @classmethod
  def of(cls, plan: Plan) -> "Evaluation":
    """Returns the evaluation that a plan needs."""
    later = plan.while_decoding
    observer = None if later is None else later.method
    return cls(
      plan.method,
      plan.spread.selector,
      plan.per_query_head,
      observer,
      observer == plan.method,
    )

  @property
  def activations(self) -> frozenset[str]:
    """Optional activations that the method scores by or the observer reads."""
    observed = () if self.observer is None else self.observer.traits.observes
    return self.method.traits.activations.union(observed)

  @property
  def queries(self) -> int | None:
    """How many last queries the method or the observer reads; None for all."""
    observed = 0 if self.observer is None else self.observer.traits.queries
    return most_queries((self.method.traits.queries, observed))

  def without_files(self) -> "Evaluation":
    """What compiled programs know it by, whatever its methods' files are."""
    observer = self.observer
    return self._replace(
      method=self.method.without_files(),
      observer=None if observer is None else observer.without_files(),
    )


@struct
class Evaluated:
  """The result of an evaluation of one layer.

  Attributes:
    scores: scores that the selection depends on.
    remembered: a number for each token; see `LayerCache`.
    window: the last queries; see `LayerCache`.
  """

  scores: PyTree[Array]
  remembered: Float[Array, "B K T"] | None
  window: ObservationWindow | None

  @property
  def has_scores(self) -> bool:
    """Whether scores were computed."""
    return self.scores is not None

  def drop_scores(self) -> "Evaluated | None":
    """Keeps only what the method remembers; None if that is nothing."""
    if self.remembered is None and self.window is None:
      return None
    return dataclasses.replace(self, scores=None)


@functools.partial(jax.jit, static_argnames=("evaluation", "scored"))
def evaluate_layer(
  evaluation: Evaluation,
  layer: Int[Array, ""],
  activations: Activations,
  observer_weights: PyTree[Array] = None,
  *,
  scored: bool = True,
) -> Evaluated:
  """Evaluates a layer of a prompt, in float32 on every backend.

  Args:
    evaluation: the method.
    layer: index of the layer in the model.
    activations: activations of the prompt.
    observer_weights: what the observer's files have.
    scored: whether to compute scores; if not, the method only remembers.
  """
  # Which tokens are kept has no gradient.
  activations = jax.lax.stop_gradient(activations)
  cache, activations = _candidates(evaluation.per_query_head, activations)
  method, scores, after = evaluation.method, None, cache
  with jax.default_matmul_precision("highest"):
    if evaluation.observer is not None:
      seen = dataclasses.replace(activations, weights=observer_weights)
      with blamed_on(evaluation.observer):
        after = evaluation.observer.observe(layer, cache, seen)
    # The method scores what it remembers, such as the attention received.
    if evaluation.goes_on:
      cache = after
    if scored:
      evaluate = evaluation.allocation.evaluate
      # Others of the sweep, or the observer, may read more.
      seen = activations.with_queries(method.traits.queries)
      with blamed_on(method):
        scores = evaluate(method, layer, cache, seen)
  # Heads select from all of their tokens.
  scores, remembered = gather_tokens((scores, after.remembered))
  return Evaluated(scores, remembered, after.window)


@functools.partial(jax.jit, static_argnames=("evaluation",))
def select_layer(
  evaluation: Evaluation,
  activations: Activations,
  evaluated: Evaluated,
  budget: LayerBudget,
) -> Int[Array, "B K T"]:
  """Selects the slots of a prompt that a method keeps, ascending, then -1.

  Args:
    evaluation: the method.
    activations: activations of the prompt.
    evaluated: result of the evaluation.
    budget: how many slots to keep; its capacity is T.
  """
  cache = candidates_of(evaluation, activations, evaluated)
  allocation, method = evaluation.allocation, evaluation.method
  with blamed_on(method):
    return allocation.select(method, evaluated.scores, cache, budget)


def candidates_of(
  evaluation: Evaluation, activations: Activations, evaluated: Evaluated
) -> LayerCache:
  """The same candidates as in `evaluate_layer`."""
  cache, _ = _candidates(evaluation.per_query_head, activations)
  if evaluation.goes_on:
    cache = _remember(cache, evaluated)
  return cache


@functools.partial(jax.jit, static_argnames=("evaluation",))
def shape_of_scores(
  evaluation: Evaluation, activations: Activations, evaluated: Evaluated
) -> Float[Array, "3 B"]:
  """Computes how the scores of a layer are distributed; NaN without scores.

  See `kvjax.calibration.features.score_shape`.

  Args:
    evaluation: the method.
    activations: activations of the prompt.
    evaluated: result of the evaluation, with scores.
  """
  cache, _ = _candidates(evaluation.per_query_head, activations)
  scores = evaluation.allocation.token_scores(
    evaluation.method, evaluated.scores, cache
  )
  if scores is None:
    return jnp.full((3, cache.positions.shape[0]), jnp.nan, jnp.float32)
  return score_shape(scores.astype(jnp.float32), cache.valid)


class LayerInputs(NamedTuple):
  """The arrays that the cache of a layer is made from.

  Attributes:
    layer: index of the layer in the model.
    activations: activations of the prompt.
    evaluated: what the method remembers, if anything.
    slots: slots to keep, ascending, then -1; None for all.
    num_keys: keys that each row retrieves, for retrieval methods.
  """

  layer: Int[Array, ""] | np.int32
  activations: Activations
  evaluated: Evaluated | None
  slots: Int[Array, "B K T"] | None
  num_keys: Int[Array, " B"] | None


def compress_layer(
  model: Model, program: LayerProgram, inputs: LayerInputs
) -> Layer:
  """Makes the cache of a layer of a prompt, in its final form.

  Args:
    model: the model, which rerotates keys if the method renumbers tokens.
    program: what the compiled program depends on.
    inputs: the layer.
  """
  if program.window is not None:
    return shard_layer(WindowLayer.of(inputs.activations, program.window))
  cache, activations = _candidates(program.per_query_head, inputs.activations)
  if inputs.evaluated is not None:
    cache = _remember(cache, inputs.evaluated)
  if program.ragged:
    assert inputs.slots is not None
    # The capacity of ragged heads is their mean, rounded up.
    heads = cache.positions.shape[1]
    packed = PackedLayer.of(cache, inputs.slots, heads * program.capacity)
    return shard_layer(_quantize(packed, program.kv_dtype))
  if inputs.slots is not None:
    # Slots were selected with room for all T, so that budgets share a program;
    # beyond the capacity they are -1.
    cache = cache.take(inputs.slots[..., : program.capacity])
  if program.channels is not None:
    channels = program.channels.choose(cache, activations)
    return shard_layer(NarrowLayer.of(cache, channels))
  # Later evictions need keys in their own dtype and at their own positions.
  if program.recursive:
    return shard_layer(cache)
  if program.retrieval is not None:
    assert inputs.num_keys is not None
    sparse = SparseLayer.of(
      program.retrieval,
      jnp.asarray(inputs.layer),
      cache,
      activations,
      inputs.num_keys,
      program.max_keys,
    )
    return shard_layer(cache if sparse is None else sparse)
  return shard_layer(finalize_layer(model, program, cache))


@functools.partial(
  jax.jit, static_argnames=("model", "program"), donate_argnames=("stack",)
)
def keep_layer(
  stack: Layer,
  index: Int[Array, ""],
  inputs: LayerInputs,
  *,
  model: Model,
  program: LayerProgram,
) -> Layer:
  """Compresses a layer and writes it into its stack, which is donated."""
  # A stack on the host takes only updates that are there, too.
  layer = compress_layer(model, program, inputs).offload()
  if isinstance(stack, PooledLayers):
    assert isinstance(layer, PackedLayer)
    return shard_stack(stack.write(index, layer))
  write = jax.lax.dynamic_update_index_in_dim
  stack = jax.tree.map(lambda x, y: write(x, y, index, 0), stack, layer)
  return shard_stack(stack)


# Donates nothing: what `jax.vmap` maps has an axis that an empty stack lacks.
keep_layer_mapped = jax.jit(
  inspect.unwrap(keep_layer), static_argnames=("model", "program")
)


@functools.partial(jax.jit, static_argnames=("model", "program"))
def keep_single(
  inputs: LayerInputs, *, model: Model, program: LayerProgram
) -> Layer:
  """Compresses a layer and makes a stack of it alone."""
  layer = compress_layer(model, program, inputs)
  stack: Layer = jax.tree.map(lambda x: x[None], layer)
  return shard_stack(stack).offload()


def finalize_layer(
  model: Model, program: LayerProgram, layer: LayerCache
) -> Layer:
  """Finalizes a layer after its method has evicted for the last time.

  Args:
    model: the model.
    program: whether to number tokens anew, cut slots into pages and quantize.
    layer: the layer after eviction.
  """
  if program.paged:
    return _quantize(PackedLayer.even(layer), program.kv_dtype)
  if program.renumbers is not None:
    assert isinstance(model, RotaryModel)
    layer = rerotate(LayerRotation(model, program.renumbers), layer)
  return _quantize(layer, program.kv_dtype)


def _quantize(layer: Layer, kv_dtype: str | None) -> Layer:
  return layer if kv_dtype is None else layer.quantize(kv_dtype)


def finalize_cache(
  plan: Plan,
  stacks: tuple[Layer, ...],
  order: tuple[int, ...],
  lengths: Int[Array, " B"],
  protected: Bool[Array, "B P"] | None,
) -> Cache:
  """Makes the cache of rows of these lengths from its stacks.

  The cache contains the plan of evictions while decoding, if any. If the method
  has renumbered tokens, the next position follows the last kept token; all
  heads of all layers keep the same number of tokens then.
  """
  # A cache may be donated: prompts and other caches must keep their arrays.
  lengths, protected = jax.tree.map(jnp.copy, (lengths, protected))
  later = plan.while_decoding
  # Tokens keep their true positions as long as a plan goes on evicting.
  if later is not None:
    return Cache(stacks, lengths, protected, order, later)
  if plan.method.traits.renumbers:
    lengths = stacks[0].lengths[0, :, 0]
  return Cache(stacks, lengths, None, order)


def arrange_for(activations: Activations, plan: Plan | None) -> Any:
  """Maps a layer to what attention reads instead; None for the layer itself."""
  if plan is None or not plan.method.traits.renumbers:
    return None
  assert activations.rerotate is not None
  # Only what attention reads is renumbered; the cache keeps true positions.
  return functools.partial(close_gaps, activations.rerotate)


def _candidates(
  per_query_head: bool, activations: Activations
) -> tuple[LayerCache, Activations]:
  if per_query_head:
    activations = activations.with_kv_heads(activations.queries.shape[1])
  return LayerCache.of(activations), activations


def _remember(cache: LayerCache, evaluated: Evaluated) -> LayerCache:
  return LayerCache(
    cache.keys,
    cache.values,
    cache.positions,
    cache.cursor,
    evaluated.remembered,
    evaluated.window,
  )
