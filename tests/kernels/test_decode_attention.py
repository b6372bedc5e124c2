"""Attention of one token to rectangular caches by the GPU kernel for pages."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from kvjax import kernels
from kvjax.kernels import dispatch
from kvjax.kernels.attention import AttentionOptions, partial_attention
from kvjax.kernels.quantized import dequantize, quantize

B, K, G, T = 2, 2, 3, 148
LAST = np.int32([[140], [60]])


def drawn(D, dtype="bfloat16"):
  """A token's queries, and slots of which some are empty and NaN."""
  draw = np.random.default_rng(D)
  q, k, v = (
    draw.normal(size=(B, heads, slots, D))
    for heads, slots in ((K * G, 1), (K, T), (K, T))
  )
  positions = np.tile(np.arange(T, dtype=np.int32), (B, K, 1))
  empty = draw.random(positions.shape) < 0.3
  positions[empty] = -1
  k[empty] = v[empty] = np.nan
  return *(jnp.asarray(x, dtype) for x in (q, k, v)), jnp.asarray(positions)


def by_hand(q, k, v, positions, window=None, scale=None):
  """In float64, one head at a time; also the log-sum-exp."""
  q, k, v = (np.asarray(x, np.float64) for x in (q, k, v))
  output, lse = np.zeros(q.shape), np.zeros(q.shape[:3])
  for row in range(B):
    for head in range(K * G):
      at = np.asarray(positions[row, head // G])
      seen = (at >= 0) & (at <= LAST[row])
      if window is not None:
        seen &= at > LAST[row] - window
      logits = k[row, head // G][seen] @ q[row, head, 0]
      logits *= q.shape[-1] ** -0.5 if scale is None else scale
      weights = np.exp(logits - logits.max())
      output[row, head, 0] = weights / weights.sum() @ v[row, head // G][seen]
      lse[row, head, 0] = np.log(weights.sum()) + logits.max()
  return output, lse


@pytest.fixture
def served(monkeypatch):
  """Names of kernels that were traced."""
  names, on_mesh = [], dispatch.on_mesh

  def spy(kernel, *arguments, **options):
    result = on_mesh(kernel, *arguments, **options)
    names.append(kernel.func.__name__)
    return result

  monkeypatch.setattr(dispatch, "on_mesh", spy)
  return names


def attended(q, k, v, positions, **options):
  """Attention to the second layer of a stack, on an interpreted GPU."""
  stacked = jax.tree.map(lambda x: jnp.stack([x + 1, x]), (k, v))
  interpreted = plgpu.InterpretGPUParams(detect_races=True)
  with plgpu.force_gpu_interpret_mode(interpreted), kernels.use(platform="gpu"):
    run = jax.jit(partial_attention, static_argnames=("options",))
    return run(
      q,
      *stacked,
      jnp.asarray(LAST),
      positions,
      options=AttentionOptions(**options),
      layer=jnp.int32(1),
    )


def check(found, wanted, tolerance):
  output, lse = wanted
  np.testing.assert_allclose(
    np.float64(found.output), output, atol=tolerance * np.abs(output).max()
  )
  np.testing.assert_allclose(found.lse, lse, atol=1e-5)


@pytest.mark.parametrize(
  ("D", "window", "scale"), [(64, None, None), (64, 50, 0.2), (128, 50, None)]
)
def test_kernel_sees_what_a_token_sees(served, D, window, scale):
  q, k, v, positions = drawn(D)
  found = attended(q, k, v, positions, window=window, scale=scale)
  assert served == ["decode_attention_gpu"]
  check(found, by_hand(q, k, v, positions, window, scale), 2e-2)


def test_kernel_reads_eight_bits(served):
  q, k, v, positions = drawn(128)
  k, v = (quantize(jnp.nan_to_num(x), "int8") for x in (k, v))
  found = attended(q, k, v, positions)
  assert served == ["decode_attention_gpu"]
  k, v = (dequantize(x, jnp.float32) for x in (k, v))
  check(found, by_hand(q, k, v, positions), 2e-2)


def test_xla_serves_what_the_kernel_declines(served):
  q, k, v, positions = drawn(128, "float32")
  found = attended(q, k, v, positions)
  assert not served
  check(found, by_hand(q, k, v, positions), 1e-5)


def test_several_tokens_are_not_for_the_kernel(served):
  q, k, v, positions = drawn(128)
  with kernels.use("pallas", platform="gpu"):
    two = partial_attention(
      jnp.tile(q, (1, 1, 2, 1)), k, v, jnp.tile(LAST, 2), positions
    )
  assert not served
  check(
    jax.tree.map(lambda x: x[:, :, 1:], two), by_hand(q, k, v, positions), 2e-2
  )
