"""How warpgroups share the slots of chunks, and load them ahead."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array

# Slots per step of a warpgroup, and steps whose slots are loaded ahead.
TILE, STAGES = 64, 2

# Blocks that keep all processors busy.
_BLOCKS = 256
# Shared memory that a block may have, but for its barriers.
_SHARED_BYTES = 225 * 1024

# References to memory, of global arrays or shared by a block.
Ref = Any
Scalar = Any


@dataclasses.dataclass(frozen=True)
class Work:
  """The shares of a grid.

  Attributes:
    chunks: of all heads of all rows.
    slots: W, of a chunk.
    blocks: of threads, for each chunk.
    groups: warpgroups in a block.
  """

  chunks: int
  slots: int
  blocks: int
  groups: int

  @classmethod
  def of(cls, chunks: int, slots: int, once: int, per_slot: int) -> "Work":
    """Shares for a kernel.

    Args:
      chunks: of all heads of all rows.
      slots: of a chunk.
      once: bytes of shared memory for a block.
      per_slot: bytes of it for each slot of a step of a warpgroup.

    Raises:
      NotImplementedError: there is too little shared memory.
    """
    groups = min(2, (_SHARED_BYTES - once) // (TILE * per_slot))
    if groups < 1:
      raise NotImplementedError("Keys are too wide for the memory of a GPU.")
    blocks = min(pl.cdiv(slots, TILE * groups), pl.cdiv(_BLOCKS, chunks))
    return cls(chunks, slots, blocks, groups)

  @property
  def workers(self) -> int:
    """Warpgroups for each chunk."""
    return self.blocks * self.groups

  def run(
    self,
    kernel: Callable[..., None],
    out: Sequence[tuple[int, ...]],
    shared: Mapping[str, Any],
    loads: tuple[int, int],
    *operands: Array,
  ) -> list[Array]:
    """Runs a kernel on a share of the work in every warpgroup.

    Args:
      kernel: of a `Share`, references to operands and outputs, and scratch.
      out: shapes of the float32 outputs.
      shared: scratch in shared memory, by the names that the kernel gives it.
      loads: copies that `Share.load_once` makes, and those for a tile.
      *operands: arrays.
    """

    def body(*refs: Ref, once: Ref, loaded: Ref, **scratch: Ref) -> None:
      kernel(Share(self, once, loaded), *refs, **scratch)

    results: list[Array] = plgpu.kernel(
      body,
      out_type=[jax.ShapeDtypeStruct(shape, jnp.float32) for shape in out],
      grid=(self.chunks, self.blocks),
      grid_names=("chunk", "block"),
      num_threads=self.groups,
      thread_name="group",
      # Nothing is reduced over warps.
      compiler_params=plgpu.CompilerParams(reduction_scratch_bytes=0),
      scratch_types={
        **shared,
        "once": plgpu.Barrier(num_arrivals=loads[0]),
        "loaded": plgpu.Barrier(
          num_arrivals=loads[1], num_barriers=self.groups * STAGES
        ),
      },
    )(*operands)
    return results


class Share:
  """What one warpgroup does of the work.

  Attributes:
    chunk: its chunk.
    group: its number in its block.
    worker: its number among those of its chunk.
  """

  def __init__(self, work: Work, once: Ref, loaded: Ref) -> None:
    self.chunk: Scalar = jax.lax.axis_index("chunk")
    self.group: Scalar = jax.lax.axis_index("group")
    self.worker: Scalar = jax.lax.axis_index("block") * work.groups + self.group
    self._work, self._once, self._loaded = work, once, loaded

  @property
  def mine(self) -> Scalar:
    """Its number among all."""
    return self.chunk * self._work.workers + self.worker

  def load_once(self, *copies: tuple[Ref, Ref]) -> None:
    """Loads what the warpgroups of a block use together."""

    @pl.when(self.group == 0)
    def _() -> None:
      for source, target in copies:
        plgpu.copy_gmem_to_smem(source, target, self._once)

    plgpu.barrier_wait(self._once)

  def over_tiles(
    self,
    copies: Callable[[Scalar, Scalar], Sequence[tuple[Ref, Ref]]],
    body: Callable[[Scalar, Scalar, Any], Any],
    carry: Any,
  ) -> Any:
    """Goes over its tiles, every so many of the chunk's.

    Args:
      copies: what to load where, of a tile's first slot and its stage.
      body: of the first slot, the stage where it lies, and the carry, which it
        returns; all that it reads of the stage it has read by then.
      carry: at first.
    """
    workers = self._work.workers
    tiles = pl.cdiv(self._work.slots, TILE)
    steps = (tiles - self.worker + workers - 1) // workers

    def barrier(stage: Scalar) -> Ref:
      return self._loaded.at[self.group * STAGES + stage]

    def start(step: Scalar) -> Scalar:
      return (self.worker + step * workers) * TILE

    def load(step: Scalar) -> None:
      @pl.when(step < steps)
      def _() -> None:
        stage = step % STAGES
        for source, target in copies(start(step), stage):
          plgpu.copy_gmem_to_smem(source, target, barrier(stage))

    def step(number: Scalar, carry: Any) -> Any:
      stage = number % STAGES
      plgpu.barrier_wait(barrier(stage))
      carry = body(start(number), stage, carry)
      load(number + STAGES)
      return carry

    for number in range(STAGES):
      load(number)
    return jax.lax.fori_loop(0, steps, step, carry)
