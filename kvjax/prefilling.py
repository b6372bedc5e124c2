"""The prompt's forward pass, compressed layer by layer as it goes."""

import functools
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, PyTree

from kvjax.activations import Activations
from kvjax.budgets import Budget
from kvjax.cache import Cache, LayerCache
from kvjax.errors import InputError
from kvjax.methods.base import Allowance, Method
from kvjax.model import Model
from kvjax.prompts import Prompts
from kvjax.sharding import shard_cache
from kvjax.step import append_and_attend, block_positions, compress


class Room(NamedTuple):
  """Slots of a layer's new cache, and whether no row has to lose anything."""

  capacity: int
  whole: bool


class Plan(NamedTuple):
  """A method and what it may keep."""

  method: Method
  budget: Budget

  def counts(
    self, lengths: Int[np.ndarray, " B"], layers: int
  ) -> Int[np.ndarray, "L B"]:
    """Tokens that rows of these lengths keep in each layer."""
    kept = [
      self.method.layer_kept(self.budget, int(n), layers) for n in lengths
    ]
    return np.array(kept, np.int32).T

  def room(
    self, padded: int, lengths: Int[np.ndarray, " B"], layers: int
  ) -> tuple[Int[np.ndarray, "L B"], tuple[Room, ...]]:
    """What rows of these lengths, padded alike, keep in each layer."""
    counts = self.counts(lengths, layers)
    most = self.method.layer_capacities(self.budget, padded, layers)
    return counts, tuple(
      Room(
        capacity=min(max(slots, int(kept.max())), padded),
        whole=slots >= padded and bool(np.all(kept >= lengths)),
      )
      for slots, kept in zip(most, counts, strict=True)
    )


def prefill(
  model: Model,
  params: PyTree,
  prompts: Prompts,
  method: Method,
  budget: Budget,
) -> tuple[Cache, Float[Array, "B V"]]:
  """Runs whole prompts and keeps of each layer what the method chooses.

  A layer's full keys and values live only until the layer is done.

  Args:
    model: the functions.
    params: the weights.
    prompts: rows of unequal lengths; each is treated as if it were alone.
    method: what to keep.
    budget: how much to keep.

  Returns:
    The compressed cache, and the logits after each row's last token, which
    the compression has not touched.

  Raises:
    InputError: a prompt is longer than the model's context.
  """
  (cache,), logits = sweep(model, params, prompts, [Plan(method, budget)])
  return cache, logits


def sweep(
  model: Model, params: PyTree, prompts: Prompts, plans: Sequence[Plan]
) -> tuple[tuple[Cache, ...], Float[Array, "B V"]]:
  """As `prefill`, for many methods and budgets from one forward pass.

  A method's scores are computed once, whatever the number of its budgets.

  Returns:
    One cache for each plan, and the logits after each row's last token.

  Raises:
    InputError: a prompt is longer than the model's context.
  """
  if not plans:
    raise InputError("There is nothing to keep; give at least one plan.")
  lengths = np.asarray(prompts.lengths)
  padded = prompts.tokens.shape[1]
  check_context(model, lengths)
  layers = model.geometry.layers
  kept = [plan.room(padded, lengths, layers) for plan in plans]
  return _sweep(
    model,
    params,
    jnp.asarray(prompts.tokens),
    jnp.asarray(lengths),
    jnp.asarray(np.stack([counts for counts, _ in kept])),
    methods=tuple(plan.method for plan in plans),
    rooms=tuple(rooms for _, rooms in kept),
  )


def check_context(
  model: Model, lengths: Int[np.ndarray, " B"], what: str = "The prompt"
) -> None:
  """Refuses rows that are longer than the model's context."""
  limit = model.geometry.max_positions
  longest = int(lengths.max())
  if longest > limit:
    raise InputError(
      f"{what} has {longest} tokens; this model's context is {limit}."
    )


@functools.partial(jax.jit, static_argnames=("model", "methods", "rooms"))
def _sweep(
  model: Model,
  params: PyTree,
  tokens: Int[Array, "B S"],
  lengths: Int[Array, " B"],
  counts: Int[Array, "P L B"],
  *,
  methods: tuple[Method, ...],
  rooms: tuple[tuple[Room, ...], ...],
) -> tuple[tuple[Cache, ...], Float[Array, "B V"]]:
  plans_of: dict[Method, list[int]] = {}
  for plan, method in enumerate(methods):
    plans_of.setdefault(method, []).append(plan)

  def attend(
    layer: int, _: None, seen: Activations
  ) -> tuple[Float[Array, "B N S D"], tuple[LayerCache, ...]]:
    output, cache = append_and_attend(None, seen)
    kept: dict[int, LayerCache] = {}
    for method, plans in plans_of.items():
      allowances = [
        Allowance(counts[p, layer], *rooms[p][layer]) for p in plans
      ]
      caches = compress(method, layer, cache, seen, allowances)
      kept.update(zip(plans, caches, strict=True))
    return output, tuple(shard_cache(kept[p]) for p in range(len(methods)))

  positions = block_positions(jnp.zeros_like(lengths), tokens.shape[1], lengths)
  none = (None,) * model.geometry.layers
  hidden, layers = model.hidden(params, tokens, positions, none, attend)
  last = jnp.take_along_axis(hidden, (lengths - 1)[:, None, None], axis=1)
  caches = tuple(
    Cache(tuple(layer[p] for layer in layers), lengths)
    for p in range(len(methods))
  )
  return caches, model.logits(params, last[:, 0])
