"""Kernels of JAX and tokamax that could attend to the pages of a packed cache.

A KV head of a row is a sequence of its own to them, with a list of pages, as
heads keep different numbers of tokens. They are only compiled: see
`kvjax.experiments.tpu.peer_table`.
"""

import functools
import importlib
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array

from kvjax.experiments.tpu.chips import Chip
from kvjax.experiments.tpu.programs import Lowered, Program
from kvjax.kernels.paged_attention.specs import SPECS
from kvjax.kernels.programs import Platform
from kvjax.kernels.quantized import Quantized, stored

_OPS = "jax.experimental.pallas.ops"
_TOKAMAX = "tokamax._src.ops.batched_rpa.kernel"
_KV_HEADS = 8
# Pages that one step of a kernel copies.
_TOGETHER = 32

_Shape = jax.ShapeDtypeStruct


class _Cache(NamedTuple):
  """What a peer is given, as shapes or arrays; s counts KV heads of all rows.

  Attributes:
    queries: of a token, [s, G, D].
    keys: pages of all rows, [R, P, D]; or keys and values, [R, P, 2, D].
    values: pages of all rows; None if `keys` has them.
    lengths: tokens of each KV head of a row, [s].
    lists: its pages, at most all of its row, [s, R / B].
  """

  queries: Any
  keys: Any
  values: Any
  lengths: Any
  lists: Any


class _Peer(NamedTuple):
  """A kernel of another library.

  Attributes:
    attend: calls it.
    joined: whether its pages hold keys and values.
  """

  attend: Callable[[_Cache], Any]
  joined: bool = False


def peer_programs(platform: Platform) -> Iterator[Program]:
  """Yields every peer at the sizes of `paged_attention.specs`."""
  for spec in SPECS:
    for name, peer in _PEERS[platform].items():
      lower = functools.partial(_lower, peer, spec.shapes)
      yield Program("kernel", name, spec.name, lower)


def _lower(peer: _Peer, operands: tuple[_Shape, ...], chip: Chip) -> Lowered:
  place = NamedSharding(chip.lone, PartitionSpec())
  cache = jax.tree.map(
    lambda x: _Shape(x.shape, x.dtype, sharding=place),
    _shapes(operands, peer.joined),
  )
  with jax.set_mesh(chip.lone), warnings.catch_warnings():
    # JAX's kernels for GPUs are deprecated.
    warnings.simplefilter("ignore", DeprecationWarning)
    # Use a new function: a cached trace may be for another chip.
    traced = jax.jit(lambda given: peer.attend(given)).trace(cache)
    return Lowered.of(traced)


def _shapes(operands: tuple[_Shape, ...], joined: bool) -> _Cache:
  """Returns the cache that our kernel has as operands."""
  queries, keys, scales, *_ = operands
  batch, heads, _, dim = queries.shape
  _, count, page, _ = keys.shape
  sequences = batch * _KV_HEADS
  both = (2,) if joined else ()
  pages: Any = _Shape((batch * count, page, *both, dim), keys.dtype)
  if keys.dtype == jnp.int8:
    pages = Quantized(pages, _Shape((*pages.shape[:-1], 1), scales.dtype))
  return _Cache(
    _Shape((sequences, heads // _KV_HEADS, dim), queries.dtype),
    pages,
    None if joined else pages,
    _Shape((sequences,), jnp.int32),
    _Shape((sequences, count), jnp.int32),
  )


def _scaled(cache: _Cache) -> Array:
  """Returns queries for kernels that do not scale logits."""
  queries: Array = cache.queries
  return queries * jnp.asarray(queries.shape[-1] ** -0.5, queries.dtype)


def _paged_tpu(cache: _Cache) -> Any:
  package = f"{_OPS}.tpu.paged_attention"
  kernel = importlib.import_module(f"{package}.paged_attention_kernel")
  quantization = importlib.import_module(f"{package}.quantization_utils")

  def pages(x: Any) -> Any:
    if isinstance(x, Quantized):
      return quantization.QuantizedTensor(x.qvalue[None], x.scale[None])
    return x[None]

  return kernel.paged_attention(
    *(_scaled(cache), pages(cache.keys), pages(cache.values)),
    *(cache.lengths, cache.lists),
    pages_per_compute_block=_TOGETHER,
  )


def _ragged_tpu(cache: _Cache) -> Any:
  kernel = importlib.import_module(f"{_OPS}.tpu.ragged_paged_attention.kernel")
  pages = stored(cache.keys)
  if cache.values is not None:
    pages = jnp.stack([pages, stored(cache.values)], axis=2)
  sequences, _, dim = cache.queries.shape
  return kernel.ragged_paged_attention(
    *(cache.queries, pages, cache.lengths, cache.lists),
    jnp.arange(sequences + 1, dtype=jnp.int32),
    jnp.full((1,), sequences, jnp.int32),
    sm_scale=dim**-0.5,
    # It finds the sizes of its own for an attached chip only.
    num_kv_pages_per_block=_TOGETHER,
    num_queries_per_block=8,
  )


def _batched_tpu(cache: _Cache) -> Any:
  wrapper = importlib.import_module(f"{_TOKAMAX}.wrapper")
  configs = importlib.import_module(f"{_TOKAMAX}.configs")
  sequences, _, dim = cache.queries.shape
  pages = stored(cache.keys)
  # The token's own key and value, which it is told not to read.
  new = jnp.zeros((sequences, 1, dim), pages.dtype)
  return wrapper.ragged_paged_attention(
    *(cache.queries, new, new, pages, cache.lengths + 1),
    cache.lists.reshape(-1),
    jnp.arange(sequences + 1, dtype=jnp.int32),
    jnp.full((3,), sequences, jnp.int32),
    sm_scale=dim**-0.5,
    skip_kv_update=True,
    attention_scope=configs.AttentionScope.CACHE_ONLY,
    return_lse=True,
  )


def _paged_gpu(cache: _Cache) -> Any:
  kernel = importlib.import_module(f"{_OPS}.gpu.paged_attention")
  scales = [
    x.scale[None, ..., 0]
    for x in (cache.keys, cache.values)
    if isinstance(x, Quantized)
  ]
  return kernel.paged_attention(
    *(_scaled(cache), stored(cache.keys)[None], stored(cache.values)[None]),
    *(cache.lists, cache.lengths, *scales),
  )


_PEERS: Mapping[Platform, Mapping[str, _Peer]] = {
  "tpu": {
    "JAX, paged_attention": _Peer(_paged_tpu),
    "JAX, ragged_paged_attention": _Peer(_ragged_tpu),
    "JAX, ragged_paged_attention, joined": _Peer(_ragged_tpu, joined=True),
    "tokamax, batched_rpa, joined": _Peer(_batched_tpu, joined=True),
  },
  "gpu": {"JAX, paged_attention": _Peer(_paged_gpu)},
}
