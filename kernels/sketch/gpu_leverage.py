"""Leverage scores of a chunk's tiles, on one warpgroup."""

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float

from kvjax.kernels.sketch.gpu_work import TILE, Ref, Scalar, Share
from kvjax.kernels.sketch.pieces import PAIRS, pieces


def leverage_tiles(
  share: Share,
  projected: Ref,
  mean: Ref,
  whitener: Ref,
  rows: Ref,
  *,
  whiteners: Ref,
  origin: Ref,
  tiles: Ref,
  cuts: Ref,
  lengths: Ref,
) -> None:
  """Computes the squared lengths of whitened columns.

  Args:
    share: this warpgroup's share of the work.
    projected: columns of all chunks.
    mean: mean of each chunk, padded with zeros.
    whitener: bfloat16 pieces of each whitener [3 k, k], padded with zeros.
    rows: output, the leverage scores of all chunks.
    whiteners: shared memory for the pieces of the whitener.
    origin: shared memory for the mean.
    tiles: shared memory for columns.
    cuts: shared memory for pieces of columns.
    lengths: shared memory to stage the output.
  """
  group, width, valid = share.group, tiles.shape[2], projected.shape[1]
  # Copies never write the padding rows, and 0 * NaN is NaN.
  if valid < width:
    for stage in range(tiles.shape[1]):
      tiles[group, stage] = jnp.zeros(tiles.shape[2:], jnp.float32)
    plgpu.commit_smem()
  share.load_once(
    (whitener.at[share.chunk], whiteners), (mean.at[share.chunk], origin)
  )

  def copies(start: Scalar, stage: Scalar) -> list[tuple[Ref, Ref]]:
    part = projected.at[share.chunk, :, pl.ds(start, TILE)]
    return [(part, tiles.at[group, stage, pl.ds(0, valid)])]

  def tile(start: Scalar, stage: Scalar, carry: None) -> None:
    x = tiles[group, stage]
    x = x - jax.lax.broadcast_in_dim(origin[...], x.shape, (0,))
    for i, piece in enumerate(pieces(x)):
      cuts[group, i] = piece
    # Wait until the previous copy has read `lengths`.
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
    plgpu.commit_smem()

    # Slots are rows of the product: the matrix units multiply at least 64.
    def whiten(acc: Ref) -> Float[Array, "C k"]:
      for i, j in PAIRS:
        right = whiteners.at[pl.ds(j * width, width)].transpose((1, 0))
        plgpu.wgmma(acc, cuts.at[group, i].transpose((1, 0)), right)
      return acc[...]

    whitened = pl.run_scoped(
      whiten, plgpu.WGMMAAccumulatorRef((TILE, width), jnp.float32)
    )
    lengths[group] = jnp.sum(whitened * whitened, axis=1)
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(
      lengths.at[group], rows.at[share.chunk, pl.ds(start, TILE)]
    )
    return carry

  share.over_tiles(copies, tile, None)
  plgpu.wait_smem_to_gmem(0)
