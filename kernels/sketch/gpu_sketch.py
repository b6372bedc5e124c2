"""The sketch of a chunk's tiles, on one warpgroup."""

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float

from kvjax.kernels.sketch.gpu_work import TILE, Ref, Scalar, Share
from kvjax.kernels.sketch.pieces import PAIRS, pieces


def sketch_tiles(
  share: Share,
  keys: Ref,
  valid: Ref,
  factor: Ref,
  shift: Ref,
  projected: Ref,
  total: Ref,
  moment: Ref,
  *,
  per_row: tuple[int, ...],
  factors: Ref,
  tiles: Ref,
  uses: Ref,
  cuts: Ref,
  columns: Ref,
  sums: Ref,
  origin: Ref | None = None,
  rests: Ref | None = None,
) -> None:
  """Projects tiles of keys and accumulates the Gram matrix.

  Args:
    share: this warpgroup's share of the work.
    keys: keys of all heads [N, T, D].
    valid: validity of all slots, by chunk and tile.
    factor: bfloat16 pieces of the transposed factors [K, 3 k, D].
    shift: subtracted from the keys of a chunk.
    projected: output, columns of all chunks.
    total: output, sums of columns by warpgroup.
    moment: output, a matrix by warpgroup; its mean with its transpose is the
      Gram matrix.
    per_row: KV heads of a row, chunks of a head, slots of a chunk.
    factors: shared memory for the pieces of the factor.
    tiles: shared memory for keys.
    uses: shared memory for their validity.
    cuts: shared memory for pieces of columns.
    columns: shared memory to stage a tile of columns.
    sums: shared memory to stage the sums.
    origin: shared memory for the shift; None, like `rests`, if keys are
      bfloat16 and there is no shift.
    rests: shared memory for pieces of keys.
  """
  heads, chunks, slots = per_row
  group, width = share.group, sums.shape[1]
  head = share.chunk // chunks
  shared_copies = [(factor.at[head % heads], factors)]
  if origin is not None:
    shared_copies.append((shift.at[share.chunk], origin))
  share.load_once(*shared_copies)

  def copies(start: Scalar, stage: Scalar) -> list[tuple[Ref, Ref]]:
    # The last tile of a chunk may read on into the next; `valid`, padded per
    # chunk, excludes these slots.
    first = share.chunk % chunks * slots + start
    return [
      (keys.at[head, pl.ds(first, TILE)], tiles.at[group, stage]),
      (valid.at[share.chunk, pl.ds(start, TILE)], uses.at[group, stage]),
    ]

  def operands(stage: Scalar) -> list[Ref]:
    """Returns keys as bfloat16 pieces."""
    if origin is None or rests is None:
      return [tiles.at[group, stage]]
    rest = tiles[group, stage].astype(jnp.float32)
    rest = rest - jax.lax.broadcast_in_dim(origin[...], rest.shape, (1,))
    for i, piece in enumerate(pieces(rest)):
      rests[group, i] = piece
    plgpu.commit_smem()
    return [rests.at[group, i] for i in range(3)]

  def tile(gram: Ref, start: Scalar, stage: Scalar, summed: Array) -> Array:
    rows = operands(stage)

    def project(acc: Ref) -> Float[Array, "k C"]:
      for i, j in PAIRS:
        if j < len(rows):
          piece = factors.at[pl.ds(i * width, width)]
          plgpu.wgmma(acc, piece, rows[j].transpose((1, 0)))
      return acc[...]

    x = pl.run_scoped(
      project, plgpu.WGMMAAccumulatorRef((width, TILE), jnp.float32)
    )
    use = jax.lax.broadcast_in_dim(uses[group, stage], x.shape, (1,))
    # An empty slot may contain NaN, which so far is in its own column only.
    x = jnp.where(use != 0, x, 0.0)
    # Wait until the previous copy has read `columns`.
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
    columns[group] = x
    near, middle, far = pieces(x)
    # Mixed products count twice, for the transposed ones that are left out.
    # Powers of two are exact; half of `middle` times twice of it is its square.
    for i, piece in enumerate((near, 2 * middle, 2 * far, middle / 2)):
      cuts[group, i] = piece
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(
      columns.at[group, pl.ds(0, projected.shape[1])],
      projected.at[share.chunk, :, pl.ds(start, TILE)],
    )
    for i, j in ((0, 0), (0, 1), (0, 2), (3, 1)):
      right = cuts.at[group, j].transpose((1, 0))
      plgpu.wgmma(gram, cuts.at[group, i], right)
    summed = summed + jnp.sum(x, axis=1)
    # The next tile overwrites `cuts`.
    plgpu.wgmma_wait(0)
    return summed

  def all_tiles(gram: Ref) -> None:
    zeros = jnp.zeros((width,), jnp.float32)
    zeros = plgpu.layout_cast(zeros, plgpu.Layout.WGMMA.reduce(1))
    summed = share.over_tiles(copies, functools.partial(tile, gram), zeros)
    sums[group] = summed
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(sums.at[group], total.at[share.index])
    # Staged in `columns`, which holds TILE columns at a time.
    gram_values = gram[...]
    for first in range(0, width, TILE):
      plgpu.wait_smem_to_gmem(0, wait_read_only=True)
      columns[group] = gram_values[:, first : first + TILE]
      plgpu.commit_smem()
      part = moment.at[share.index, :, pl.ds(first, TILE)]
      plgpu.copy_smem_to_gmem(columns.at[group], part)

  pl.run_scoped(
    all_tiles, plgpu.WGMMAAccumulatorRef((width, width), jnp.float32)
  )
  plgpu.wait_smem_to_gmem(0)
