"""The compiled forward pass over whole prompts, which plans share."""

import functools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, PyTree

from kvjax.activations import Activations
from kvjax.cache.cache import Cache
from kvjax.cache.layers import Layer, LayerCache
from kvjax.cache.sharding import shard_cache
from kvjax.cache.sparse import IndexedLayer
from kvjax.engine.likelihood import prompt_nll
from kvjax.engine.plans import Kept, Plan, Room
from kvjax.engine.step import (
  block_positions,
  compress,
  finished,
  judge,
  observe,
)
from kvjax.engine.uncut import Uncut
from kvjax.methods.base import Allowance
from kvjax.model import Model


class Pass(NamedTuple):
  """What a forward pass leaves.

  Attributes:
    caches: of the plans whose budgets are known.
    logits: after each row's last token.
    nll: of the rows; NaN if nobody asks.
    uncut: what waits for a budget.
  """

  caches: tuple[Cache, ...]
  logits: Float[Array, "B V"]
  nll: Float[Array, " B"]
  uncut: Uncut | None


class _LayerPass(NamedTuple):
  """The same of one layer.

  Attributes:
    kept: of the plans whose budgets are known.
    whole: the layer itself, if there are others.
    found: what these choose by, if it is this layer that they choose in.
  """

  kept: tuple[Layer, ...]
  whole: LayerCache | None
  found: tuple[PyTree, ...]


@functools.partial(
  jax.jit,
  static_argnames=(
    "model",
    "plans",
    "rooms",
    "most_reads",
    "waiting",
    "measured",
  ),
)
def one_pass(
  model: Model,
  params: PyTree,
  tokens: Int[Array, "B S"],
  lengths: Int[Array, " B"],
  counts: Sequence[Kept],
  reads: Sequence[Int[Array, " B"] | None],
  protected: Bool[Array, "B S"] | None,
  *,
  plans: tuple[Plan, ...],
  rooms: tuple[tuple[Room, ...], ...],
  most_reads: tuple[int, ...],
  waiting: tuple[Plan, ...] = (),
  measured: bool = False,
) -> Pass:
  """Runs the prompts and keeps of each layer what its plans choose.

  What several plans find in the same way is found once.

  Args:
    model: the functions.
    params: the weights.
    tokens: of the rows.
    lengths: of the rows.
    counts: for each plan, what the rows keep.
    reads: for each plan, what the rows look up, if anything.
    protected: by position, tokens that must be kept, if there are any.
    plans: those whose budgets are known.
    rooms: for each of them, the slots of the layers.
    most_reads: for each of them, the most that a row looks up.
    waiting: those whose budgets are not, as `Plan.judging` makes them.
    measured: whether the rows' likelihoods are asked for.
  """
  alike: dict[Plan, list[int]] = {plan: [] for plan in waiting}
  for index, plan in enumerate(plans):
    alike.setdefault(plan.judging, []).append(index)
  judged: dict[tuple[Plan, int], Callable[[], PyTree]] = {}

  def indexed(p: int, layer: int, cache: Layer, own: Activations) -> Layer:
    lookup, count = plans[p].lookup, reads[p]
    if lookup is None or count is None:
      return cache
    assert isinstance(cache, LayerCache)
    return IndexedLayer.of(
      lookup.retrieval, layer, cache, own, count, most_reads[p]
    )

  def allowance(p: int, layer: int) -> Allowance:
    plan, (each, together) = plans[p], counts[p]
    budget = plan.fixed_budget if plan.schedule.every else None
    room = rooms[p][layer]
    return Allowance(each[layer], *room, budget, together[layer], protected)

  def attend(
    layer: int, _: None, seen: Activations
  ) -> tuple[Float[Array, "B N S D"], _LayerPass]:
    output = seen.attend_to_themselves()
    kept: dict[int, Layer] = {}
    for like, group in alike.items():
      own, method = like.candidates(seen), like.method
      cache = LayerCache.of(own)
      if like.schedule.every:
        cache = observe(method, layer, cache, own)
      judged[like, layer] = functools.cache(
        functools.partial(judge, method, layer, cache, own)
      )
      source = judged[like, method.source_layer(layer)]
      allowances = [allowance(p, layer) for p in group]
      caches = compress(method, layer, cache, own, allowances, source)
      for p, found in zip(group, caches, strict=True):
        kept[p] = indexed(p, layer, found, own)
    return output, _LayerPass(
      tuple(shard_cache(kept[p]) for p in range(len(plans))),
      shard_cache(LayerCache.of(seen)) if waiting else None,
      tuple(
        judged[like, layer]() if like.chooses_in(layer, depth) else None
        for like in waiting
      ),
    )

  depth = model.geometry.layers
  positions = block_positions(jnp.zeros_like(lengths), tokens.shape[1], lengths)
  none = (None,) * depth
  hidden, layers = model.hidden(params, tokens, positions, none, attend)
  kept, wholes, found = zip(*layers, strict=True)
  last = jnp.take_along_axis(hidden, (lengths - 1)[:, None, None], axis=1)
  return Pass(
    tuple(
      finished(model, plan, own, lengths, protected)
      for plan, own in zip(plans, zip(*kept, strict=True), strict=True)
    ),
    model.logits(params, last[:, 0]),
    prompt_nll(model, params, hidden, tokens, lengths)
    if measured
    else jnp.full(lengths.shape, jnp.nan),
    Uncut(list(wholes), tuple(zip(*found, strict=True)), waiting)
    if waiting
    else None,
  )
