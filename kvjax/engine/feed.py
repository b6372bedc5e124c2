"""The step of prefill and decoding: append a block."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, PyTree

from kvjax.activations import Activations
from kvjax.cache.base import Layer
from kvjax.cache.cache import Cache
from kvjax.cache.layers import LayerCache
from kvjax.engine.compress import arrange_for
from kvjax.engine.forward import Place, States, block_positions, run_layers
from kvjax.engine.prepared import PreparedPlan
from kvjax.errors import blamed_on
from kvjax.model import Model


def feed(
  model: Model,
  params: PyTree,
  cache: Cache,
  tokens: Int[Array, "B S"],
  lengths: Int[Array, " B"],
  prepared: PreparedPlan | None = None,
  *,
  decoded: bool = False,
) -> tuple[Float[Array, "B V"], Cache]:
  """Appends a block and returns the logits after each row's last token.

  Arguments are those of `append_block`.
  """
  hidden, cache = append_block(
    model, params, cache, tokens, lengths, prepared, decoded=decoded
  )
  # A row without tokens reads an arbitrary state, which nobody uses.
  last = jnp.maximum(lengths - 1, 0)[:, None, None]
  last = jnp.take_along_axis(hidden, last, axis=1)[:, 0]
  return model.logits(params, last), cache


def append_block(
  model: Model,
  params: PyTree,
  cache: Cache,
  tokens: Int[Array, "B S"],
  lengths: Int[Array, " B"],
  prepared: PreparedPlan | None = None,
  *,
  decoded: bool = False,
) -> tuple[Float[Array, "B S E"], Cache]:
  """Appends a block of tokens, which attend to the cache and to each other.

  Args:
    model: the functions.
    params: the weights.
    cache: has room for the block.
    tokens: right-padded rows.
    lengths: tokens of each row, 0 for none.
    prepared: the plan, if layers evict later; the method then remembers what it
      needs of the block.
    decoded: whether the block is of decoded tokens, one per row.

  Returns:
    Hidden states of the block, and the cache.
  """
  # The cache's own plan also renumbers where it has nothing left to evict.
  plan = cache.plan if prepared is None else prepared.plan
  # Layers that a method keeps whole have no memory for it.
  evicting = set()
  if prepared is not None:
    evicting = {
      stack
      for stack, evicts in zip(cache.order, prepared.compressed, strict=True)
      if evicts
    }

  def step(
    place: Place, stack: Layer, activations: Activations
  ) -> tuple[Float[Array, "B N S Dv"], Layer]:
    activations = dataclasses.replace(activations, decoded=decoded)
    arrange = arrange_for(activations, plan)
    output, stack = stack.step(activations, place.rank, arrange)
    if prepared is not None and place.stack in evicting:
      # Methods see one layer; `put` writes only what the method changed.
      view: Any = stack.at(place.rank)
      after = observe(prepared, place.layer, view, activations)
      stack = stack.put(place.rank, view, after)
    return output, stack

  positions = block_positions(cache.next_positions, tokens.shape[1], lengths)
  hidden, stacks = run_layers(
    model, params, tokens, positions, States(cache.stacks, cache.order), step
  )
  return hidden, dataclasses.replace(
    cache, stacks=stacks, next_positions=cache.next_positions + lengths
  )


def observe(
  prepared: PreparedPlan,
  layer: Int[Array, ""],
  cache: LayerCache,
  activations: Activations,
) -> LayerCache:
  """Lets a method store in the cache of a layer what it needs of a block.

  Args:
    prepared: the method's plan.
    layer: index of the layer in the model.
    cache: the layer's cache, which ends with the block.
    activations: activations of the block.

  Raises:
    InputError: the model does not provide what the method reads.
  """
  plan, method = prepared.plan, prepared.plan.method
  seen = plan.candidates(activations.only(method.traits.observes))
  method.check_activations(seen)
  seen = dataclasses.replace(seen, weights=prepared.weights)
  with blamed_on(method), jax.default_matmul_precision("highest"):
    return method.observe(layer, cache, seen)
