"""Layers that stay whole until it is known how much a prompt can lose."""

import dataclasses
import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, PyTree

from kvjax.cache.cache import Cache
from kvjax.cache.layers import Layer, LayerCache
from kvjax.cache.sharding import shard_cache
from kvjax.engine.plans import Kept, Plan
from kvjax.engine.step import lasting, settled, shortened
from kvjax.methods.base import Allowance, Method
from kvjax.model import Geometry, Model
from kvjax.options.budgets import Retention
from kvjax.prompts import Prompts, bucket
from kvjax.struct import static, struct


@struct
class Uncut:
  """A prompt's layers, and what methods have found in them.

  Attributes:
    layers: all keys and values; `cut_layers` takes them out.
    found: for each plan and layer, what it chooses by there; None where it
      chooses nothing.
    plans: as `Plan.judging` makes them.
  """

  layers: list[LayerCache]
  found: tuple[tuple[PyTree, ...], ...]
  plans: tuple[Plan, ...] = static()


@dataclasses.dataclass(frozen=True)
class Cut:
  """What a plan leaves of the rows of a batch, each having its retention.

  Attributes:
    plan: whose budgets these are.
    kept: what they come to.
    lengths: tokens of the rows.
    padded: what they are padded to.
  """

  plan: Plan
  kept: Kept
  lengths: Int[np.ndarray, " B"]
  padded: int

  @classmethod
  def of(
    cls,
    plan: Plan,
    retentions: Float[np.ndarray, " B"],
    prompts: Prompts,
    geometry: Geometry,
  ) -> "Cut":
    """Every row as if it were alone and its retention had been asked for.

    Raises:
      InputError: a row protects more tokens than it keeps.
    """
    lengths = np.asarray(prompts.lengths)
    each, together = [], []
    for row, share in enumerate(retentions):
      own = dataclasses.replace(plan, budget=Retention(float(share)))
      own.check_protected(prompts.row(row), geometry.layers)
      kept = own.kept(lengths[row : row + 1], geometry)
      each.append(kept.each)
      together.append(kept.together)
    kept = Kept(np.concatenate(each, axis=1), np.concatenate(together, axis=1))
    return cls(plan, kept, lengths, prompts.tokens.shape[1])

  def spares(self, layer: int) -> bool:
    """Whether no row loses anything in the layer."""
    return self.plan.method.keeps_all(layer) or bool(
      np.all(self.kept.each[layer] >= self.lengths)
    )

  def allowance(
    self, layer: int, protected: Bool[Array, "B S"] | None
  ) -> Allowance:
    """What the rows may keep of a layer; the capacity is one of few."""
    counts = self.kept.each[layer]
    return Allowance(
      jnp.asarray(counts),
      min(bucket(int(counts.max())), self.padded),
      together=jnp.asarray(self.kept.together[layer]),
      protected=protected,
    )


def cut_layers(
  model: Model,
  uncut: Uncut,
  cuts: Sequence[Cut],
  protected: Bool[Array, "B S"] | None,
) -> tuple[Cache, ...]:
  """Keeps of every layer what each plan allows its rows.

  A program is compiled for each method and capacity; other layers, prompts and
  retentions run it again.

  Args:
    model: turns keys where a method renumbers them.
    uncut: what is cut; its layers are taken out, so that none of them need
      outlive its turn.
    cuts: one for each cache.
    protected: by position, tokens that must be kept, if there are any.
  """
  geometry = model.geometry

  def kept(cut: Cut, index: int, layer: LayerCache) -> Layer:
    plan = cut.plan
    heads = geometry.heads if plan.per_query_head else geometry.kv_heads
    spared = cut.spares(index)
    found = uncut.found[uncut.plans.index(plan.judging)]
    return _cut(
      layer,
      None if spared else found[plan.method.source_layer(index)],
      None if spared else cut.allowance(index, protected),
      model=model,
      method=plan.method,
      storage=plan.storage,
      heads=heads,
    )

  by_layer = []
  for index in range(geometry.layers):
    layer = uncut.layers.pop(0)
    by_layer.append([kept(cut, index, layer) for cut in cuts])
  return tuple(
    lasting(cut.plan.method, layers, jnp.asarray(cut.lengths))
    for cut, layers in zip(cuts, zip(*by_layer, strict=True), strict=True)
  )


@functools.partial(
  jax.jit, static_argnames=("model", "method", "storage", "heads")
)
def _cut(
  layer: LayerCache,
  found: PyTree,
  allowance: Allowance | None,
  *,
  model: Model,
  method: Method,
  storage: str | None,
  heads: int,
) -> Layer:
  """The layer as it lasts; without an allowance nothing has to go."""
  left: Layer = layer.with_kv_heads(heads)
  if allowance is not None:
    assert isinstance(left, LayerCache)
    left = shortened(method, left, found, allowance)
  return settled(model, method, storage, shard_cache(left))
