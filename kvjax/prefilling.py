"""The prompt's forward pass, compressed layer by layer as it goes."""

import dataclasses
import functools
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, PyTree

from kvjax.activations import Activations
from kvjax.blocks import prefill_blocks
from kvjax.budgets import Retention
from kvjax.cache import Cache
from kvjax.errors import InputError
from kvjax.indexed import IndexedLayer
from kvjax.layers import Layer, LayerCache
from kvjax.methods.base import Allowance
from kvjax.model import Model
from kvjax.plans import Plan, Room
from kvjax.prompts import Prompts
from kvjax.rerotation import check_rotary
from kvjax.schedules import Schedule
from kvjax.sharding import shard_cache
from kvjax.step import block_positions, compress, finished, judge, observe

_ALL = Retention(1.0)


def prefill(
  model: Model,
  params: PyTree,
  prompts: Prompts,
  plan: Plan,
) -> tuple[Cache, Float[Array, "B V"]]:
  """Runs prompts and keeps of each layer what the method chooses.

  With whole prompts a layer's full keys and values live only until the layer
  is done; in blocks they never exist.

  Args:
    model: the functions.
    params: the weights.
    prompts: rows of unequal lengths; each is treated as if it were alone.
    plan: what to keep, how much, and when to evict.

  Returns:
    The compressed cache, and the logits after each row's last token. Whole
    prompts are compressed after these; blocks have attended to what was left.

  Raises:
    InputError: a prompt is longer than the model's context or protects more
      tokens than are kept, or the method turns keys and the model cannot.
  """
  if plan.schedule.block is None:
    (cache,), logits = sweep(model, params, prompts, [plan])
    return cache, logits
  layers = model.geometry.layers
  block = max(plan.schedule.block, plan.schedule.first or 0)
  lengths = np.asarray(prompts.lengths)
  check_context(model, plan.reach(lengths, layers, block))
  _check(model, prompts, plan)
  return prefill_blocks(model, params, prompts, plan)


def sweep(
  model: Model, params: PyTree, prompts: Prompts, plans: Sequence[Plan]
) -> tuple[tuple[Cache, ...], Float[Array, "B V"]]:
  """As `prefill`, for many methods and budgets from one forward pass.

  A method's scores are computed once, whatever the number of its budgets.

  Returns:
    One cache for each plan, and the logits after each row's last token.

  Raises:
    InputError: a prompt is longer than the model's context, there is no plan,
      or one works in blocks, which takes a forward pass of its own.
  """
  if not plans:
    raise InputError("There is nothing to keep; give at least one plan.")
  for plan in plans:
    if plan.schedule.block is not None:
      raise InputError(
        f"A sweep shares one pass over whole prompts; give the plan of "
        f"{plan.schedule} to kvjax.prefill."
      )
  lengths = np.asarray(prompts.lengths)
  padded = prompts.tokens.shape[1]
  check_context(model, lengths)
  layers = model.geometry.layers
  for plan in plans:
    _check(model, prompts, plan)
  protected = prompts.protected
  kept = [plan.room(padded, lengths, layers) for plan in plans]
  lookups = [plan.lookup for plan in plans]
  return _sweep(
    model,
    params,
    jnp.asarray(prompts.tokens),
    jnp.asarray(lengths),
    jnp.asarray(np.stack([counts for counts, _ in kept])),
    [x and jnp.asarray(x.counts(lengths)) for x in lookups],
    None if protected is None else jnp.asarray(protected),
    plans=tuple(plans),
    rooms=tuple(rooms for _, rooms in kept),
    most_reads=tuple(x.most(padded, lengths) if x else 0 for x in lookups),
  )


def _check(model: Model, prompts: Prompts, plan: Plan) -> None:
  """Refuses a plan that does not suit the prompts or the model."""
  plan.check_protected(prompts, model.geometry.layers)
  if plan.method.rerotates:
    check_rotary(model)


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


@functools.partial(
  jax.jit, static_argnames=("model", "plans", "rooms", "most_reads")
)
def _sweep(
  model: Model,
  params: PyTree,
  tokens: Int[Array, "B S"],
  lengths: Int[Array, " B"],
  counts: Int[Array, "P L B"],
  reads: Sequence[Int[Array, " B"] | None],
  protected: Bool[Array, "B S"] | None,
  *,
  plans: tuple[Plan, ...],
  rooms: tuple[tuple[Room, ...], ...],
  most_reads: tuple[int, ...],
) -> tuple[tuple[Cache, ...], Float[Array, "B V"]]:
  alike: dict[Plan, list[int]] = {}
  for index, plan in enumerate(plans):
    # What is found depends on neither the budget nor how often it is asked.
    every = 1 if plan.schedule.every else None
    like = dataclasses.replace(
      plan, budget=_ALL, schedule=Schedule(every=every), lookup=None
    )
    alike.setdefault(like, []).append(index)
  judged: dict[tuple[Plan, int], Callable[[], PyTree]] = {}

  def indexed(p: int, layer: int, cache: Layer, own: Activations) -> Layer:
    lookup, count = plans[p].lookup, reads[p]
    if lookup is None or count is None:
      return cache
    assert isinstance(cache, LayerCache)
    return IndexedLayer.of(
      lookup.retrieval, layer, cache, own, count, most_reads[p]
    )

  def attend(
    layer: int, _: None, seen: Activations
  ) -> tuple[Float[Array, "B N S D"], tuple[Layer, ...]]:
    output = LayerCache.of(seen).attend(seen.queries, seen.positions)[0]
    kept: dict[int, Layer] = {}
    for like, group in alike.items():
      own, method = like.candidates(seen), like.method
      cache = LayerCache.of(own)
      if like.schedule.every:
        cache = observe(method, layer, cache, own)
      allowances = [
        Allowance(
          counts[p, layer], *rooms[p][layer], plans[p].budget, protected
        )
        for p in group
      ]
      judged[like, layer] = functools.cache(
        functools.partial(judge, method, layer, cache, own)
      )
      source = judged[like, method.source_layer(layer)]
      caches = compress(method, layer, cache, own, allowances, source)
      for p, found in zip(group, caches, strict=True):
        kept[p] = indexed(p, layer, found, own)
    return output, tuple(shard_cache(kept[p]) for p in range(len(plans)))

  positions = block_positions(jnp.zeros_like(lengths), tokens.shape[1], lengths)
  none = (None,) * model.geometry.layers
  hidden, layers = model.hidden(params, tokens, positions, none, attend)
  last = jnp.take_along_axis(hidden, (lengths - 1)[:, None, None], axis=1)

  caches = tuple(
    finished(model, plan, own, lengths, protected)
    for plan, own in zip(plans, zip(*layers, strict=True), strict=True)
  )
  return caches, model.logits(params, last[:, 0])
