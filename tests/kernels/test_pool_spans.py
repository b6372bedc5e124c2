"""Attention to the pages of a layer where they lie in a pool."""

import contextlib
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from page_rows import block, by_hand, close, eighths, on, paged

from kvjax.kernels.attention import merge
from kvjax.kernels.paged_attention import Span, paged_attention


def in_pool(pages, starts, part):
  """Pages in turns among the parts of a row, from a page on in each.

  Those before and after them are of no head, and have tokens to attend to.
  """
  parts = len(starts[0])

  def put(x, fill):
    x = np.asarray(x)
    pool = np.full((2, parts, part, *x.shape[2:]), fill, x.dtype)
    for b, n in np.ndindex(2, parts):
      mine = x[b, n::parts]
      pool[b, n, starts[b][n] : starts[b][n] + len(mine)] = mine
    return jnp.asarray(pool.reshape(2, parts * part, *x.shape[2:]))

  return jax.tree.map(
    put, pages, (*jax.tree.map(lambda _: 3, pages[:2]), 0, -1)
  )


# Pages at the beginning and the end of a pool, and in the middle of a block.
ENDS = ((0,), (17,)), ((6,), (3,))


@pytest.mark.parametrize("starts", ENDS)
@pytest.mark.parametrize("dtype", ["bfloat16", "int8"])
@pytest.mark.parametrize("platform", ["cpu", "tpu", "gpu"])
def test_a_layer_is_read_where_it_is_in_a_pool(chosen, platform, dtype, starts):
  chosen({"paged_attention/tpu": {"block": 128}})
  q, k, v, places, kept = block(13, 2, 3, 1, D=128, dtype="bfloat16", T=150)
  pages = paged(k, v, kept, unused=0, PAGE=32)
  most = pages[3].shape[1]
  part = 17 + most
  if dtype == "int8":
    k, v, pages = eighths(k, v, pages)
  keys, values, positions, heads = in_pool(pages, starts, part)
  run = jax.jit(
    functools.partial(paged_attention, kv_heads=2, span=Span(part, most))
  )
  with contextlib.nullcontext() if platform == "cpu" else on(platform):
    found = run(q, keys, values, places, positions, heads)
  close(found, by_hand(q, k, v, places, kept), 2e-2)


# The parts of two devices, and how many of the pages a device has here.
@pytest.mark.parametrize("cut", [1, 2, 3])
@pytest.mark.parametrize("S", [1, 5])
def test_a_device_may_have_parts_of_several(S, cut):
  """All of both, or a mesh of other devices has cut through them."""
  q, k, v, places, kept = block(14, 3, 2, S)
  pages = paged(k, v, kept, unused=1)
  most, part = -(-pages[3].shape[1] // 2), 30
  starts = ((4, 30 - most), (9, 0))
  keys, values, positions, heads = in_pool(pages, starts, part)
  run = jax.jit(
    functools.partial(paged_attention, kv_heads=3, span=Span(part, most))
  )
  share = 2 * part // cut
  found = [
    run(
      q, keys[:, own], values[:, own], places, positions[:, own], heads[:, own]
    )
    for own in (slice(n * share, (n + 1) * share) for n in range(cut))
  ]
  whole = functools.reduce(jax.jit(merge), found)
  close(whole, by_hand(q, k, v, places, kept), 1e-5)


@pytest.mark.parametrize("platform", ["tpu", "gpu"])
def test_kernels_read_one_place_of_a_row(platform):
  q, k, v, places, kept = block(10, 2, 2, 1, D=128, dtype="bfloat16")
  pages = paged(k, v, kept, unused=0, PAGE=32)
  part = pages[3].shape[1]
  keys, values, *rest = in_pool(pages, ((0, 0), (0, 0)), part)
  span = Span(part, part - 1)
  run = functools.partial(paged_attention, kv_heads=2, span=span)
  with on(platform), pytest.raises(NotImplementedError, match="several places"):
    jax.eval_shape(run, q, keys, values, places, *rest)
