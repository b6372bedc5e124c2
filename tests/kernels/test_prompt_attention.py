"""Attention of prompts by libraries, against every weight in float64."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.cudnn import fused_attention_stablehlo as cudnn
from jax.experimental.pallas import tpu as pltpu
from jax.experimental.pallas.ops.tpu.splash_attention import (
  splash_attention_mask as masks,
)
from jax.experimental.pallas.ops.tpu.splash_attention import (
  splash_attention_mask_info as mask_info,
)

from kvjax import kernels
from kvjax.cache.sharding import parse_mesh
from kvjax.kernels.prompt_attention import prompt_attention, tpu
from kvjax.kernels.prompt_attention.halves import places
from kvjax.kernels.prompt_attention.specs import SPECS

LENGTHS = (101, 147)


def prompts(N, K, S, D, dtype, lengths=LENGTHS):
  """Rows of unequal lengths; the padding holds NaN.

  The first query head finds all keys alike.
  """
  rng = np.random.default_rng(S)
  real = np.arange(S)[None] < np.minimum(lengths, S)[:, None]

  def drawn(heads):
    x = rng.normal(size=(len(lengths), heads, S, D))
    return np.where(real[:, None, :, None], x, np.nan).astype(dtype)

  positions = np.where(real, np.arange(S), -1).astype(np.int32)
  queries = drawn(N)
  queries[:, 0] *= 0
  arrays = (queries, drawn(K), drawn(K), positions)
  return tuple(map(jnp.asarray, arrays)), real


def expected(queries, keys, values, row, length):
  """One prompt's attention, head by head."""
  heads = []
  for head in range(queries.shape[1]):
    own = head // (queries.shape[1] // keys.shape[1])
    q, k, v = (
      np.asarray(x[row, h, :length], np.float64)
      for x, h in [(queries, head), (keys, own), (values, own)]
    )
    weights = np.tril(np.exp(q @ k.T / np.sqrt(q.shape[1])))
    heads.append(weights @ v / weights.sum(axis=1, keepdims=True))
  return np.array(heads)


def assert_splash_attends(arrays, real):
  """To every weight, of rows up to their lengths."""
  params = pltpu.InterpretParams(detect_races=True)
  with pltpu.force_tpu_interpret_mode(params), kernels.use("pallas", "tpu"):
    actual = jax.jit(lambda *operands: prompt_attention(*operands))(*arrays)
  dtype = arrays[0].dtype
  assert actual.dtype == dtype
  tolerance = 2e-2 if dtype == jnp.bfloat16 else 1e-5
  for row, length in enumerate(real.sum(axis=1)):
    np.testing.assert_allclose(
      np.asarray(actual[row, :, :length], np.float64),
      expected(*arrays[:3], row, length),
      rtol=tolerance,
      atol=tolerance,
    )


@pytest.mark.parametrize(
  ("shape", "dtype"),
  [((4, 2, 147, 64), "float32"), ((4, 2, 133, 128), "bfloat16")],
)
def test_splash_attention_equals_every_weight(chosen, shape, dtype):
  chosen({"prompt_attention/tpu": {"block": 128}})
  assert_splash_attends(*prompts(*shape, dtype))


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_splash_attention_at_heads_of_every_size(chosen, dtype, head_sizes):
  """Of three rows the first holds nothing."""
  chosen({"prompt_attention/tpu": {"block": 128}})
  D, G = head_sizes
  assert_splash_attends(*prompts(2 * G, 2, 139, D, dtype, (0, 1, 139)))


@pytest.mark.parametrize(("blocks", "longer"), [(1, 1), (5, 1), (8, 2), (8, 4)])
def test_blocks_are_what_splash_attention_finds(blocks, longer):
  sizes = (128, 128 * longer)
  mask = masks.MultiHeadMask([masks.CausalMask((blocks * 128,) * 2)] * 2)
  wanted, _ = mask_info.process_mask(mask, sizes)
  actual = tpu.causal_blocks(blocks * 128, sizes)
  for ours, theirs in zip(actual, wanted, strict=True):
    assert (ours is None) == (theirs is None)
    if ours is not None:
      np.testing.assert_array_equal(ours, theirs)


@pytest.mark.parametrize("pairs", [2**16, 2])
def test_devices_attend_with_their_queries_to_all_keys(
  monkeypatch, chosen, pairs
):
  """In blocks of 128 queries, two on a device, and of twice as many keys."""
  chosen({"prompt_attention/tpu": {"block": 128}})
  monkeypatch.setattr(tpu, "PAIRS", pairs)
  mesh = parse_mesh("context:2,model:2")
  with jax.set_mesh(mesh):
    assert_splash_attends(*prompts(4, 2, 512, 64, "float32", (470, 201)))


@pytest.mark.parametrize(
  ("dtype", "D", "blocks"),
  [("bfloat16", 128, 2), ("float32", 64, 2), ("bfloat16", 256, 4)],
)
def test_only_narrow_heads_have_blocks_of_more_than_512(
  chosen, dtype, D, blocks
):
  chosen({"prompt_attention/tpu": {"block": 1024}})
  arrays, _ = prompts(1, 1, 2048, D, dtype, (2048,))
  with kernels.use("pallas", "tpu"):
    program = str(jax.make_jaxpr(prompt_attention)(*arrays))
  assert set(re.findall(r"grid=\(([^)]*)\)", program)) == {
    f"1, {blocks}, {blocks}"
  }


@pytest.mark.parametrize("devices", [1, 2, 3, 4, 7, 8])
def test_devices_have_equal_work_of_their_own(devices):
  seen = {}
  for odd in range(2):
    pairs = places(devices, odd)
    owners, attending = zip(*pairs, strict=True)
    assert sorted(owners) == sorted(attending) == list(range(devices))
    for owner, device in pairs:
      seen.setdefault(device, []).append(2 * owner + odd)
  # Half h sees h halves before it and itself.
  assert {sum(halves) for halves in seen.values()} == {2 * devices - 1}


def test_an_odd_number_of_queries_stays_where_it_is():
  arrays, real = prompts(4, 2, 150, 8, "float32", (150, 101))
  with jax.set_mesh(parse_mesh("context:2,model:2")):
    actual = jax.jit(prompt_attention)(*arrays)
  for row, length in enumerate(real.sum(axis=1)):
    wanted = expected(*arrays[:3], row, length)
    np.testing.assert_allclose(actual[row, :, :length], wanted, atol=1e-5)


def test_more_pairs_of_blocks_than_a_table_has_are_declined(
  monkeypatch, chosen
):
  chosen({"prompt_attention/tpu": {"block": 128}})
  monkeypatch.setattr(tpu, "PAIRS", 7)
  arrays, _ = prompts(2, 1, 1024, 64, "float32")
  with (
    kernels.use("pallas", "tpu"),
    pytest.raises(NotImplementedError, match="1024 queries and 1024 keys have"),
  ):
    jax.eval_shape(prompt_attention, *arrays)


def test_queries_that_fill_no_block_are_declined():
  arrays, _ = prompts(4, 2, 320, 64, "float32")
  with (
    jax.set_mesh(parse_mesh("context:2")),
    kernels.use("pallas", "tpu"),
    pytest.raises(NotImplementedError, match="80 queries do not fill"),
  ):
    jax.eval_shape(prompt_attention, *arrays)


@pytest.mark.parametrize(
  ("dtype", "precision"), [("float32", "HIGHEST"), ("bfloat16", "DEFAULT")]
)
def test_float32_is_multiplied_whole(dtype, precision):
  arrays, _ = prompts(2, 1, 32, 64, dtype)
  with kernels.use("pallas", "tpu"), jax.default_matmul_precision("high"):
    program = str(jax.make_jaxpr(prompt_attention)(*arrays))
  assert set(re.findall(r"Precision\.(\w+)", program)) == {precision}


@pytest.fixture
def cudnn_call(monkeypatch):
  """How cuDNN is called on a Hopper GPU that is not there."""
  monkeypatch.setattr(cudnn, "check_cudnn_version", lambda: 91000)
  monkeypatch.setattr(cudnn, "check_compute_capability", lambda _: True)

  def of(*arrays):
    with kernels.use("pallas", "gpu"):
      traced = jax.jit(lambda *operands: prompt_attention(*operands)).trace(
        *arrays
      )
      lowered = traced.lower(lowering_platforms=("cuda",)).as_text()
    (call,) = re.findall(r"custom_call @__cudnn\$fmha.*", lowered)
    return call

  return of


def test_real_sizes_are_lowered_for_gpus(cudnn_call):
  call = cudnn_call(*SPECS[0].shapes)
  assert re.search(r"mask_type\\22: \\22CAUSAL\\22", call)
  scale = float(re.search(r"fmha_scale\\22: ([\d.]+)", call)[1])
  assert scale == pytest.approx(128**-0.5)


@pytest.mark.slow
def test_cudnn_takes_heads_of_every_size(cudnn_call, head_sizes):
  D, G = head_sizes
  arrays, _ = prompts(2 * G, 2, 139, D, "bfloat16")
  assert f"2x139x{2 * G}x{D}xbf16" in cudnn_call(*arrays)


@pytest.mark.parametrize("version", [None, 91000])
def test_without_cudnn_or_in_float32_xla_serves_on_gpus(monkeypatch, version):
  arrays, _ = prompts(2, 1, 32, 64, "float32")
  if version:
    monkeypatch.setattr(cudnn, "check_cudnn_version", lambda: version)
  with kernels.use(platform="gpu"):
    assert "exp" in str(jax.make_jaxpr(prompt_attention)(*arrays))
  with (
    kernels.use("pallas", "gpu"),
    pytest.raises(NotImplementedError, match="fp16" if version else "cuDNN"),
  ):
    jax.eval_shape(prompt_attention, *arrays)
