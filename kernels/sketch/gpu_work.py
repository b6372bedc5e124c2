"""Divides the slots of chunks among warpgroups and prefetches them."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array

from kvjax.kernels import tuning

# Slots per step of a warpgroup, and the number of prefetched steps. They are
# fixed: the matrix units multiply 64 rows, and with more steps in the shared
# memory, the kernel would decline more columns.
TILE, STAGES = 64, 2

# Shared memory available to a block, without its barriers.
# Hopper has 227 KiB; sums and barriers take the rest.
_SHARED_BYTES = 225 * 1024

# References to global or shared memory.
Ref = Any
Scalar = Any


@dataclasses.dataclass(frozen=True)
class Work:
  """The division of the work over a grid.

  Attributes:
    chunks: number of chunks of all heads and rows.
    slots: W, slots per chunk.
    blocks: thread blocks per chunk.
    groups: warpgroups per block.
  """

  chunks: int
  slots: int
  blocks: int
  groups: int

  @classmethod
  def of(cls, chunks: int, slots: int, once: int, per_slot: int) -> "Work":
    """Divides the work by the shared memory that a kernel needs.

    Args:
      chunks: number of chunks of all heads and rows.
      slots: slots per chunk.
      once: bytes of shared memory per block.
      per_slot: additional bytes per slot of a warpgroup's step.

    Raises:
      NotImplementedError: the shared memory is too small.
    """
    groups = min(2, (_SHARED_BYTES - once) // (TILE * per_slot))
    if groups < 1:
      raise NotImplementedError("Keys are too wide for the memory of a GPU.")
    # Those that keep all multiprocessors busy.
    blocks = pl.cdiv(tuning.option("sketch/gpu", "blocks"), chunks)
    blocks = min(pl.cdiv(slots, TILE * groups), blocks)
    return cls(chunks, slots, blocks, groups)

  @property
  def workers(self) -> int:
    """Warpgroups per chunk."""
    return self.blocks * self.groups

  def run(
    self,
    kernel: Callable[..., None],
    out: Sequence[tuple[int, ...]],
    shared: Mapping[str, Any],
    loads: tuple[int, int],
    *operands: Array,
  ) -> list[Array]:
    """Runs a kernel on every warpgroup's share of the work.

    Args:
      kernel: a function of a `Share`, references to operands and outputs, and
        scratch.
      out: shapes of the float32 outputs.
      shared: scratch in shared memory, by the kernel's argument names.
      loads: number of copies of `Share.load_once`, and per tile.
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
      # No reduction crosses warps, so it needs no scratch.
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
  """One warpgroup's share of the work.

  Attributes:
    chunk: the chunk it works on.
    group: its number in its block.
    worker: its number among the warpgroups of its chunk.
  """

  def __init__(self, work: Work, once: Ref, loaded: Ref) -> None:
    self.chunk: Scalar = jax.lax.axis_index("chunk")
    self.group: Scalar = jax.lax.axis_index("group")
    self.worker: Scalar = jax.lax.axis_index("block") * work.groups + self.group
    self._work, self._once, self._loaded = work, once, loaded

  @property
  def index(self) -> Scalar:
    """Its number among all warpgroups."""
    return self.chunk * self._work.workers + self.worker

  def load_once(self, *copies: tuple[Ref, Ref]) -> None:
    """Loads the data that all warpgroups of a block share."""

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
    """Loops over its tiles, which are interleaved with those of other workers.

    Args:
      copies: returns the sources and targets to load, given a tile's first slot
        and its stage.
      body: updates the carry, given a tile's first slot, its stage and the
        carry. It must have read the stage when it returns.
      carry: the initial carry.
    """
    workers = self._work.workers
    tiles = pl.cdiv(self._work.slots, TILE)
    # Rounded up; not negative, since the worker's number is below `workers`.
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
      # Only now has the stage been read.
      load(number + STAGES)
      return carry

    for number in range(STAGES):
      load(number)
    return jax.lax.fori_loop(0, steps, step, carry)
