"""Bytes of weights and caches on each device, from their shapes alone."""

import math
from typing import Any, NamedTuple

import jax
from flax import nnx
from jaxtyping import PyTree

from kvjax.cache.cache import Cache
from kvjax.cache.layers import Slots
from kvjax.cache.packed import PackedLayer, Pages
from kvjax.cache.sparse import SparseLayer
from kvjax.errors import InputError
from kvjax.experiments.compilation.chips import Chip
from kvjax.experiments.compilation.engine_programs import (
  Use,
  cache_shapes,
  compiling_for,
  offloaded,
  on_device,
  share_bytes,
  unread,
)
from kvjax.hosts import TracedError
from kvjax.models.language_model import DecoderModel


class Sizes(NamedTuple):
  """What a model and its cache take on each device.

  Attributes:
    weights: bytes of the weights.
    cache: bytes of the cache, with room for the answer, in device memory.
    host: bytes of the cache in the host's memory, of this device.
    copies: bytes of weights and cache that another device for the same rows
      has, too.
    read: bytes that a step of decoding reads: weights but for rows of the
      embedding and idle experts, and the cache.
    flops: operations of products in a step of decoding.
    kinds: stacks of layers in the cache, each a part of compiled programs.
    retrieves: whether a step reads only some of what the cache holds.
  """

  weights: int
  cache: int
  host: int
  copies: int
  read: int
  flops: float
  kinds: int
  retrieves: bool


def sizes(use: Use, chip: Chip, layers: int | None = None) -> Sizes:
  """Measures the shapes of a model and its cache on a mesh.

  Args:
    use: the method and the model.
    chip: devices with their mesh.
    layers: number of layers, the first ones; None for all.

  Raises:
    InputError: the cache's shapes depend on numbers, such as scores.
  """
  model, params = use.model.shapes(chip.mesh, layers or use.model.layers)
  try:
    with compiling_for(chip):
      cache = cache_shapes(model, params, use, chip)
  except (TracedError, jax.errors.JAXTypeError) as error:
    raise InputError(
      f"What {use.name} keeps depends on numbers, which a plan does not have; "
      "plan another method with the same budget."
    ) from error
  weights, stored = share_bytes(params), share_bytes(on_device(cache))
  needed = weights - unread(model, params)
  return Sizes(
    weights=weights,
    cache=stored,
    host=share_bytes(offloaded(cache)),
    copies=_copied(params, chip) + _copied(cache, chip),
    read=needed + stored,
    flops=_flops(model, params, needed, cache, use, chip),
    kinds=len(cache.stacks),
    retrieves=any(isinstance(stack, SparseLayer) for stack in cache.stacks),
  )


def _copied(tree: PyTree, chip: Chip) -> int:
  """Counts the bytes of a device that others for its rows have, too."""
  along = len(chip.devices) // chip.rows

  def copied(x: Any) -> int:
    share = share_bytes(x)
    spec = x.sharding.spec
    whole = x.dtype.itemsize * math.prod(x.shape)
    rows = chip.rows if "data" in spec else 1
    return share - whole // (rows * along)

  # Norms and numbers of rows are whole everywhere, and small.
  return sum(copied(x) for x in jax.tree.leaves(tree))


def _flops(
  model: DecoderModel,
  params: nnx.State,
  needed: int,
  cache: Cache,
  use: Use,
  chip: Chip,
) -> float:
  """Counts the operations of a step in a device's products.

  Args:
    model: the functions.
    params: shapes of the weights.
    needed: bytes of the weights that a row reads.
    cache: shapes of the cache.
    use: the method and the model.
    chip: devices with their mesh.
  """
  itemsize = jax.tree.leaves(params)[0].dtype.itemsize
  products = 2 * needed / itemsize * use.rows / chip.rows
  group = model.config.num_heads // model.config.num_kv_heads
  parts = [
    part
    for stack in cache.stacks
    for part in (
      (stack.pages, stack.tail) if isinstance(stack, PackedLayer) else (stack,)
    )
    if isinstance(part, Slots | Pages)
  ]
  numbers = sum(
    math.prod(x.shape)
    for part in parts
    for x in jax.tree.leaves((part.keys, part.values))
  )
  # Each key and value meets the queries of its group.
  return products + 2 * group * numbers / len(chip.devices)
