"""The KV cache of a layer, as slots for keys and values."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, Protocol, Self, runtime_checkable

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int

from kvjax.activations import Activations
from kvjax.cache.base import AXES, Arrange, Index, Layer, LayerSizes, host_copy
from kvjax.cache.observation import ObservationWindow
from kvjax.kernels.attention import (
  Partial,
  attention,
  partial_attention,
  with_sinks,
)
from kvjax.kernels.gather import compact
from kvjax.kernels.layouts import row_major
from kvjax.kernels.quantized import Quantized, quantize
from kvjax.kernels.stacks import index_stack
from kvjax.struct import replace, struct

# The dtypes of an eight-bit cache by their names in plans and flags.
KV_DTYPES: Mapping[str, DTypeLike] = {
  "int8": jnp.int8,
  "fp8": jnp.float8_e4m3fn,
}


@struct
class Slots(Layer):
  """Keys and values of one layer in T slots per row and KV head.

  A slot with position -1 is empty, whatever its key and value are. Tokens are
  in the order of their positions. New tokens of all rows and heads are written
  from slot `cursor` on, so that a write is one slice update. Rows and heads
  with fewer tokens have empty slots before it.

  Attributes:
    keys: rotated keys; quantized if the plan has a `kv_dtype`.
    values: values, quantized like the keys.
    positions: position of each token in its uncompressed row; -1 for empty.
    cursor: the next slot to write.
  """

  keys: Float[Array, "B K T D"] | Quantized
  values: Float[Array, "B K T Dv"] | Quantized
  positions: Int[Array, "B K T"]
  cursor: Int[Array, ""]

  @property
  def capacity(self) -> int:
    """T, the number of slots."""
    return self.positions.shape[-1]

  @property
  def sizes(self) -> LayerSizes:
    """Heads and widths of the arrays."""
    keys, values = (
      x.qvalue if isinstance(x, Quantized) else x
      for x in (self.keys, self.values)
    )
    kv_heads = self.positions.shape[-2]
    return LayerSizes(kv_heads, keys.shape[-1], values.shape[-1])

  @property
  def next_slot(self) -> Int[Array, "*L"]:
    """The cursor."""
    return self.cursor

  @property
  def lengths(self) -> Int[Array, "*L B K"]:
    """Number of tokens per row and KV head."""
    return jnp.sum(self.valid, axis=-1, dtype=jnp.int32)

  @property
  def valid(self) -> Bool[Array, "*L B K T"]:
    """Mask of the slots that contain a token."""
    return self.positions >= 0

  def attend(
    self, activations: Activations
  ) -> tuple[Float[Array, "B N S Dv"], Self]:
    """Attends to all slots."""
    return self._attend(activations, self.positions, None), self

  def step(
    self, activations: Activations, index: Index, arrange: Arrange | None = None
  ) -> tuple[Float[Array, "B N S Dv"], Self]:
    """Appends a block and attends; slots are read in place, in the stack."""
    if arrange is not None:
      return super().step(activations, index, arrange)
    stack = self.append(activations, index)
    # Attention reads keys and values inside the stack; only the positions,
    # which are small, are sliced out.
    positions = stack.positions
    if index is not None:
      positions = index_stack(positions, index)
    return stack._attend(activations, positions, index), stack

  def _attend(
    self, activations: Activations, positions: Int[Array, "B K T"], layer: Index
  ) -> Float[Array, "B N S Dv"]:
    return attention(
      activations.queries,
      self.keys,
      self.values,
      activations.positions,
      positions,
      options=activations.attention,
      sinks=activations.sinks,
      layer=layer,
    )

  def grow(self, extra: int) -> Self:
    """Adds `extra` empty slots at the end."""

    def pad(x: Array, axis: int, fill: int = 0) -> Array:
      padding = [(0, 0)] * x.ndim
      padding[axis] = (0, extra)
      return jnp.pad(x, padding, constant_values=fill)

    # Axis -2 is T in the scales of quantized keys, too.
    keys, values = jax.tree.map(lambda x: pad(x, -2), (self.keys, self.values))
    positions = pad(self.positions, -1, -1)
    return replace(self, keys=keys, values=values, positions=positions)

  def append(self, activations: Activations, index: Index = None) -> Self:
    """Writes a block at the cursor, quantized if the layer is.

    There must be room for it, which callers check first, as `kvjax.generate`
    does. Otherwise the block would overwrite the newest tokens, because JAX
    moves a slice update to fit.
    """
    kv_heads = self.positions.shape[-2]
    # The slots may be those of query heads (`Plan.per_query_head`).
    block = LayerCache.of(activations.with_kv_heads(kv_heads))
    # Without the barrier, XLA fuses the write into the reads of the slots and
    # copies all slots.
    keys, values, positions = jax.lax.optimization_barrier(
      (
        self._write(self.keys, block.keys, index),
        self._write(self.values, block.values, index),
        self._write(self.positions, block.positions, index),
      )
    )
    # Padding advances the cursor, too, and leaves empty slots.
    cursor = self.cursor + block.cursor
    if index is not None:
      cursor = self.cursor.at[index].add(block.cursor)
    return replace(
      self, keys=keys, values=values, positions=positions, cursor=cursor
    )

  def map_slots(self, change: Callable[[Any], Any]) -> Self:
    """Changes every part that has keys, values and positions."""
    changed: Self = change(self)
    return changed

  def row_positions(
    self, row: int, index: int | None = None
  ) -> list[list[int]]:
    """Positions of the tokens of a row, per KV head; on the host."""
    heads = host_copy(self.positions, index)[row]
    return [[int(p) for p in head if p >= 0] for head in heads]

  def quantize(self, kv_dtype: str) -> "Slots":
    """Quantizes keys and values to eight bits."""
    assert not isinstance(self.keys, Quantized)
    assert not isinstance(self.values, Quantized)
    dtype = KV_DTYPES[kv_dtype]
    keys, values = quantize(self.keys, dtype), quantize(self.values, dtype)
    # Not a LayerCache, as no method evicts from eight bits.
    return Slots(keys, values, self.positions, self.cursor)

  def _write(self, old: Any, new: Any, index: Index) -> Any:
    """Writes the block of a layer at its cursor."""
    zero = jnp.zeros((), jnp.int32)
    start: tuple[Any, ...] = (zero, zero, self.cursor)
    if index is not None:
      start = (index, zero, zero, self.cursor[index])
    if isinstance(old, Quantized):
      new = quantize(new, old.qvalue.dtype)

    def write(x: Array, y: Array) -> Array:
      y = y.astype(x.dtype) if index is None else y.astype(x.dtype)[None]
      # Positions lack the axis D that keys and values have.
      where = (*start, *(zero,) * (y.ndim - len(start)))
      return jax.lax.dynamic_update_slice(x, row_major(y), where)

    return jax.tree.map(write, old, new)


@struct
class LayerCache(Slots):
  """Unquantized slots, which a method may evict from.

  Attributes:
    remembered: a number for each token that a method needs between evictions,
      such as the attention it has received so far or its score; None if the
      method needs none.
    window: the last queries, if a method needs them between evictions.
  """

  compressible: ClassVar[bool] = True

  keys: Float[Array, "B K T D"]
  values: Float[Array, "B K T Dv"]
  remembered: Float[Array, "B K T"] | None = None
  window: ObservationWindow | None = None

  @property
  def float_keys(self) -> Float[Array, "B K T D"]:
    """Float32 keys; zero in empty slots."""
    return jnp.where(self.valid[..., None], self.keys.astype(jnp.float32), 0.0)

  @property
  def float_values(self) -> Float[Array, "B K T Dv"]:
    """Float32 values; zero in empty slots."""
    values = self.values.astype(jnp.float32)
    return jnp.where(self.valid[..., None], values, 0.0)

  @classmethod
  def of(cls, activations: Activations) -> "LayerCache":
    """Makes a cache of a block alone."""
    batch, kv_heads, length, _ = activations.keys.shape
    positions = jnp.broadcast_to(
      activations.positions[:, None], (batch, kv_heads, length)
    )
    cursor = jnp.asarray(length, jnp.int32)
    return cls(activations.keys, activations.values, positions, cursor)

  def grow(self, extra: int) -> "LayerCache":
    """Adds `extra` empty slots at the end."""
    remembered = jax.tree.map(
      lambda x: jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, extra)]),
      self.remembered,
    )
    return replace(super().grow(extra), remembered=remembered)

  def shrink(self, capacity: int) -> "LayerCache":
    """Cuts off all slots after the first `capacity`, which must be empty."""
    return replace(
      self,
      keys=self.keys[..., :capacity, :],
      values=self.values[..., :capacity, :],
      positions=self.positions[..., :capacity],
      cursor=jnp.minimum(self.cursor, capacity),
      remembered=jax.tree.map(lambda x: x[..., :capacity], self.remembered),
    )

  def clear(self) -> "LayerCache":
    """Empties all slots and what a method remembers."""
    window = self.window
    if window is not None:
      window = replace(window, positions=jnp.full_like(window.positions, -1))
    return replace(
      super().clear(),
      cursor=jnp.zeros_like(self.cursor),
      remembered=jax.tree.map(jnp.zeros_like, self.remembered),
      window=window,
    )

  def without_memory(self) -> "LayerCache":
    """Drops what a method remembers between evictions."""
    return replace(self, remembered=None, window=None)

  def append(
    self, activations: Activations, index: Index = None
  ) -> "LayerCache":
    """Writes a block at the cursor; nothing is remembered of it yet."""
    remembered = self.remembered
    if remembered is not None:
      batch, length = activations.positions.shape
      shape = (batch, self.positions.shape[-2], length)
      none = jnp.zeros(shape, remembered.dtype)
      remembered = self._write(remembered, none, index)
    return replace(super().append(activations, index), remembered=remembered)

  def place(
    self, place_tree: Callable[[Any, Sequence[str]], Any]
  ) -> "LayerCache":
    """Places the arrays on a mesh, the window as its queries need."""
    placed: LayerCache = place_tree(replace(self, window=None), AXES)
    window = self.window
    if window is not None:
      window = window.place(place_tree)
    return replace(placed, window=window)

  def take(self, slots: Int[Array, "B K M"]) -> "LayerCache":
    """Gathers the given slots, ascending, then -1 for empty slots."""
    kept = compact(
      self.keys, self.values, self.positions, self.remembered, slots
    )
    # All rows and heads share the cursor, so it follows the fullest of them.
    counts = jnp.sum(kept.positions >= 0, axis=-1, dtype=jnp.int32)
    return dataclasses.replace(self, cursor=jnp.max(counts), **kept._asdict())


@runtime_checkable
class Attendable(Protocol):
  """Slots of a layer that attention reads: `Slots`, or those of a window."""

  @property
  def keys(self) -> Float[Array, "B K T D"] | Quantized:
    """Rotated keys."""
    ...

  @property
  def values(self) -> Float[Array, "B K T Dv"] | Quantized:
    """Values."""
    ...

  @property
  def positions(self) -> Int[Array, "B K T"]:
    """Position of each token in its row; -1 for an empty slot."""
    ...


def attend_partially(slots: Attendable, activations: Activations) -> Partial:
  """Attends to slots, without sinks, for `kvjax.kernels.attention.merge`."""
  return partial_attention(
    activations.queries,
    slots.keys,
    slots.values,
    activations.positions,
    slots.positions,
    options=activations.attention,
  )


def attention_output(
  merged: Partial, activations: Activations
) -> Float[Array, "B N S Dv"]:
  """Adds the layer's sinks, if any, to the attention to all of its slots.

  Once, after all merges: each part would add the sinks' logits again.
  """
  if activations.sinks is None:
    return merged.output
  return with_sinks(merged, activations.sinks).output
