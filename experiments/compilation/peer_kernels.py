"""Kernels of JAX that could attend to the pages of a packed cache.

A KV head of a row is a sequence of its own to them, with a list of pages, as
heads keep different numbers of tokens. They are only compiled: see
`kvjax.experiments.compilation.peer_table`.
"""

import functools
import importlib
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array

from kvjax.experiments.compilation.chips import Chip
from kvjax.experiments.compilation.kernel_programs import lower_kernel
from kvjax.experiments.compilation.programs import Lowered, Program
from kvjax.kernels.attention.options import PLAIN
from kvjax.kernels.paged_attention.decoding import decode_attention
from kvjax.kernels.paged_attention.specs import SPECS
from kvjax.kernels.programs import Platform
from kvjax.kernels.quantized import Quantized, stored

_OPS = "jax.experimental.pallas.ops"
_KV_HEADS = 8
# Pages that one step of a kernel copies.
_TOGETHER = 32
# A stack of layers of a cache with equally many slots for all heads.
OURS_IN_STACKS = "decode_attention"
_LAYERS, _SLOTS, _GROUP, _DIM = 4, 32_768, 4, 128

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
      cache = _shapes(spec.shapes, peer.joined)
      lower = functools.partial(_lower, peer.attend, cache)
      yield Program("kernel", name, spec.name, lower)


def stack_programs() -> Iterator[Program]:
  """Yields attention of a token to a layer of a stack on GPUs, ours first."""
  name = f"a layer of {_LAYERS}, {_KV_HEADS} x {_SLOTS:,} slots"
  for kernel, attend in (
    (OURS_IN_STACKS, _ours_in_stacks),
    ("JAX, decode_attention", _stacks_gpu),
  ):
    lower = functools.partial(_lower, attend, _stack_shapes())
    yield Program("kernel", kernel, name, lower)


def _lower(attend: Callable[[Any], Any], given: Any, chip: Chip) -> Lowered:
  with warnings.catch_warnings():
    # JAX's kernels for GPUs are deprecated.
    warnings.simplefilter("ignore", DeprecationWarning)
    return lower_kernel(attend, [given], None, chip)


def _shapes(operands: tuple[_Shape, ...], joined: bool) -> _Cache:
  """Returns the cache that our kernel has as operands."""
  queries, keys, scales, *_ = operands
  batch, heads, _, dim = queries.shape
  _, count, page, _ = keys.shape
  sequences = batch * _KV_HEADS
  both = (2,) if joined else ()
  pages: Any = _Shape((batch * count, page, *both, dim), keys.dtype)
  if keys.dtype == jnp.int8:
    scale: Any = _Shape((*pages.shape[:-1], 1), scales.dtype)
    pages = Quantized(pages, scale)
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


class _Stack(NamedTuple):
  """Layers of a cache.

  Attributes:
    queries: of a token, [1, N, 1, D].
    keys: [L, 1, K, T, D].
    values: likewise.
    position: of the token, [1, 1].
    positions: of the slots, [1, K, T].
    layer: index of the layer, [].
  """

  queries: Any
  keys: Any
  values: Any
  position: Any
  positions: Any
  layer: Any


def _stack_shapes() -> _Stack:
  slots = (1, _KV_HEADS, _SLOTS)
  stack = _Shape((_LAYERS, *slots, _DIM), jnp.bfloat16)
  return _Stack(
    _Shape((1, _KV_HEADS * _GROUP, 1, _DIM), jnp.bfloat16),
    stack,
    stack,
    _Shape((1, 1), jnp.int32),
    _Shape(slots, jnp.int32),
    _Shape((), jnp.int32),
  )


def _ours_in_stacks(stack: _Stack) -> Any:
  return decode_attention(
    *(stack.queries, stack.keys, stack.values),
    *(stack.position, stack.positions),
    PLAIN,
    stack.layer,
  )


def _stacks_gpu(stack: _Stack) -> Any:
  kernel = importlib.import_module(f"{_OPS}.gpu.decode_attention")
  keys, values = (x[stack.layer, 0] for x in (stack.keys, stack.values))
  lengths = jnp.sum(stack.positions[0] >= 0, axis=-1, dtype=jnp.int32)
  queries = stack.queries.reshape(_KV_HEADS, _GROUP, _DIM)
  return kernel.mqa(queries, keys, values, None, lengths, return_residuals=True)


_PEERS: Mapping[Platform, Mapping[str, _Peer]] = {
  "tpu": {
    "JAX, paged_attention": _Peer(_paged_tpu),
    "JAX, ragged_paged_attention": _Peer(_ragged_tpu),
    "JAX, ragged_paged_attention, joined": _Peer(_ragged_tpu, joined=True),
  },
  "gpu": {"JAX, paged_attention": _Peer(_paged_gpu)},
}
