"""Attention to listed slots, against float64 loops; kernels interpreted."""

import contextlib
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu

from kvjax import kernels
from kvjax.kernels.attention import merge
from kvjax.kernels.attention.options import PLAIN, AttentionOptions
from kvjax.kernels.quantized import Quantized, quantize
from kvjax.kernels.sparse_decode import sparse_decode
from kvjax.kernels.sparse_decode.reference import sparse_decode_reference

B = 2
# KV heads, query heads per KV head, lists, slots of a list.
SHAPES = [(3, 2, 3, 11), (2, 4, 4, 17), (2, 3, 6, 1), (1, 1, 1, 40)]


@functools.cache
def case(shape, dtype="float32", bias=False, D=16, T=40):
  """Inputs, NaN in the slots that no list names."""
  kv_heads, group, lists, most = shape
  heads = kv_heads * group
  rng = np.random.default_rng(0)
  queries = rng.normal(size=(B, heads, D))
  keys, values = rng.normal(size=(2, B, kv_heads, T, D))
  slots = np.full((B, lists, most), -1, np.int32)
  named = np.zeros((B, kv_heads, T), bool)
  for b in range(B):
    for h in range(lists):
      count = min(most, 1 + 5 * h + most // 2) if (b, h) != (1, 0) else 0
      place = rng.permutation(most)[:count]
      slots[b, h, place] = rng.permutation(T)[:count]
      named[b, h * kv_heads // lists, slots[b, h, place]] = True
  slots[0, -1, -1] = T - 1  # the last of all
  slots[0, -1, :-1][slots[0, -1, :-1] == T - 1] = -1
  named[0, -1, T - 1] = True
  queries[0, 0] = 0.0  # scores that are all equal
  keys[~named], values[~named] = np.nan, np.nan
  extra = rng.normal(size=(B, heads, most)) if bias else None
  if bias:
    extra[rng.random(extra.shape) < 0.3] = -np.inf
    extra = jnp.asarray(extra, jnp.float32)
  arrays = (jnp.asarray(x.astype(dtype)) for x in (queries, keys, values))
  return *arrays, jnp.asarray(slots), extra


def in_stack(tree):
  """The second of three layers; the others hold other numbers."""
  return jax.tree.map(
    lambda x: jnp.stack([jnp.roll(x, 1, -2), x, jnp.roll(x, 2, -2)]), tree
  )


def read_layer(queries, keys, values, slots, bias):
  """The attention to a layer that stands in a stack."""
  keys, values = in_stack((keys, values))
  layer = jnp.int32(1)
  return sparse_decode(queries, keys, values, slots, bias, layer=layer)


def wide(x):
  """What it stands for, in float64."""
  if isinstance(x, Quantized):
    return wide(x.qvalue) * wide(x.scale)
  return np.asarray(x).astype(np.float64)


def by_hand(queries, keys, values, slots, bias):
  """Every head by itself, in float64."""
  queries, keys, values = map(wide, (queries, keys, values))
  slots = np.asarray(slots)
  bias = None if bias is None else np.asarray(bias)
  queries = queries / queries.shape[-1] ** 0.5
  output, lse = np.zeros(queries.shape), np.full(queries.shape[:2], -np.inf)
  heads = queries.shape[1]
  for b in range(len(queries)):
    for n in range(heads):
      k = n * keys.shape[1] // heads
      listed = slots[b, n * slots.shape[1] // heads]
      extra = np.zeros(len(listed)) if bias is None else bias[b, n]
      use = (listed >= 0) & np.isfinite(extra)
      logits = keys[b, k, listed[use]] @ queries[b, n] + extra[use]
      if use.any():
        weights = np.exp(logits - logits.max())
        lse[b, n] = logits.max() + np.log(weights.sum())
        output[b, n] = weights @ values[b, k, listed[use]] / weights.sum()
  return output, lse


def close(found, expected, tolerance):
  """Outputs relative to the largest; the log-sum-exps to 1e-5."""
  output, lse = expected
  largest = np.abs(output).max()
  found_output = np.asarray(found.output, np.float64)
  np.testing.assert_allclose(found_output, output, atol=tolerance * largest)
  np.testing.assert_allclose(found.lse, lse, rtol=1e-6, atol=1e-5)
  assert not np.isfinite(lse).all()  # a list is empty


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(
  "options", [PLAIN, AttentionOptions(scale=0.3, softcap=2.0)]
)
@pytest.mark.parametrize("shape", SHAPES)
def test_keys_are_not_read_if_logits_are_known(shape, options, bias):
  queries, keys, values, slots, extra = case(shape, bias=bias)
  expected = sparse_decode(queries, keys, values, slots, extra, options=options)
  lists = np.repeat(slots, queries.shape[1] // slots.shape[1], axis=1)
  share = queries.shape[1] // keys.shape[1]
  listed = np.take_along_axis(
    np.repeat(keys, share, axis=1), np.maximum(lists, 0)[..., None], axis=2
  )
  logits = np.einsum("bnd,bnmd->bnm", queries, listed)
  logits *= options.scale_of(queries.shape[-1])
  found = sparse_decode(
    queries,
    jnp.full_like(keys, jnp.nan),
    values,
    slots,
    extra,
    options=options,
    logits=jnp.asarray(np.where(lists >= 0, logits, np.nan)),
  )
  close(found, expected, 1e-6)


@contextlib.contextmanager
def on_tpu(**params):
  """The Pallas kernel, interpreted."""
  params = pltpu.InterpretParams(detect_races=True, **params)
  with pltpu.force_tpu_interpret_mode(params), kernels.use("pallas", "tpu"):
    yield


@contextlib.contextmanager
def padded_tpu():
  """A TPU's memory has whole words, of which the last ends in padding."""
  chip = jax.sharding.AbstractDevice("TPU v5e", 1, "tpu")
  chips = jax.sharding.AbstractMesh((), (), abstract_device=chip)
  with on_tpu(buffer_bounds="padded"), jax.sharding.use_abstract_mesh(chips):
    yield


@pytest.fixture
def short_chunks(chosen):
  """Lists of several chunks, of as many copies as are started in a row."""
  chosen({"sparse_decode/tpu": {"chunk": 8, "unroll": 8}})


@pytest.mark.parametrize(
  ("run", "number", "bias"),
  [
    (sparse_decode, 0, True),
    (sparse_decode, 1, False),
    (read_layer, 1, True),
    (read_layer, 2, True),
    (sparse_decode, 3, False),
    (sparse_decode_reference, 1, True),
    (sparse_decode_reference, 3, False),
  ],
)
def test_equals_the_loop(run, number, bias):
  inputs = case(SHAPES[number], bias=bias)
  close(jax.jit(run)(*inputs), by_hand(*inputs), 1e-5)


def test_bfloat16_keeps_its_dtype():
  inputs = case(SHAPES[0], "bfloat16")
  found = jax.jit(sparse_decode)(*inputs)
  assert found.output.dtype == jnp.bfloat16
  output, _ = by_hand(*inputs)
  np.testing.assert_allclose(
    np.float32(found.output), output, atol=2e-2 * np.abs(output).max()
  )


def test_parts_merge_to_the_joint_softmax():
  """Two disjoint lists are as good as one that holds both."""
  T = 40
  queries, keys, values, _, _ = case(SHAPES[3])
  values, keys = (np.nan_to_num(x) for x in (values, keys))
  order = np.random.default_rng(1).permutation(T).astype(np.int32)
  slots = np.broadcast_to(order, (B, 1, T))

  @jax.jit
  def run(*given):
    queries, keys, values, slots = given
    first = sparse_decode(queries, keys, values, slots[..., :13])
    second = sparse_decode(queries, keys, values, slots[..., 13:])
    return merge(first, second), sparse_decode(*given)

  both, whole = run(queries, keys, values, slots)
  np.testing.assert_allclose(both.output, whole.output, atol=1e-5)
  np.testing.assert_allclose(both.lse, whole.lse, atol=1e-5)


@functools.partial(jax.jit, static_argnums=1)
def eighths(inputs, dtype):
  """Keys and values in eight bits; NaN scales where they were NaN."""
  queries, keys, values, *rest = inputs

  def of(x):
    small = quantize(jnp.nan_to_num(x), dtype)
    lost = jnp.isnan(x).any(axis=-1, keepdims=True)
    return Quantized(small.qvalue, jnp.where(lost, jnp.nan, small.scale))

  return queries, of(keys), of(values), *rest


@pytest.mark.parametrize("dtype", ["int8", "float8_e4m3fn"])
def test_reads_what_eight_bits_stand_for(dtype):
  inputs = eighths(case(SHAPES[0], bias=True), dtype)
  close(jax.jit(sparse_decode)(*inputs), by_hand(*inputs), 1e-5)


@pytest.mark.usefixtures("short_chunks")
def test_tpu_kernel():
  inputs = case((2, 3, 2, 20), "float32", True, D=64)  # three chunks each
  with on_tpu():
    found = jax.jit(read_layer)(*inputs)
  close(found, by_hand(*inputs), 1e-5)


@pytest.mark.parametrize(
  ("dtype", "shape", "D"),
  # Two lists for the heads that read a KV head.
  [("bfloat16", (1, 4, 2, 9), 256), ("int8", (1, 1, 1, 7), 128)],
)
@pytest.mark.usefixtures("short_chunks")
def test_tpu_kernel_reads_the_last_word_of_an_odd_number_of_rows(
  dtype, shape, D
):
  inputs = case(shape, "bfloat16", D=D, T=37)
  if dtype == "int8":
    inputs = eighths(inputs, dtype)
  with padded_tpu():
    found = jax.jit(read_layer)(*inputs)
  close(found, by_hand(*inputs), 2e-2)


@functools.cache
def pages(dtype, page, T=44, D=128):
  """Lists of three pages of four heads; the last page lacks its last slot."""
  rng = np.random.default_rng(0)
  queries = rng.normal(size=(B, 4, D))
  keys, values = rng.normal(size=(2, B, 2, T, D))
  slots = np.full((B, 2, 3, page), -1, np.int32)
  named = np.zeros((B, 2, T), bool)
  for b, h in [(0, 0), (0, 1), (1, 1)]:
    for place, number in enumerate(rng.permutation(T // page)[: 3 - b]):
      slots[b, h, place] = number * page + np.arange(page)
    slots[b, h, 2 - b, -1] = -1
    named[b, h, slots[b, h][slots[b, h] >= 0]] = True
  keys[~named], values[~named] = np.nan, np.nan
  arrays = (jnp.asarray(x.astype(dtype)) for x in (queries, keys, values))
  return *arrays, jnp.asarray(slots.reshape(B, 2, -1)), None


@pytest.mark.parametrize(
  ("dtype", "page"),
  # In pieces that are no whole words, slots are copied one by one.
  [("float32", 4), ("bfloat16", 4), ("bfloat16", 1), ("int8", 4), ("int8", 2)],
)
@pytest.mark.usefixtures("short_chunks")
def test_tpu_kernel_reads_pages(dtype, page):
  inputs = pages("bfloat16" if dtype == "int8" else dtype, page)
  if dtype == "int8":
    inputs = eighths(inputs, dtype)
  with padded_tpu():
    found = jax.jit(functools.partial(sparse_decode, page=page))(*inputs)
  close(found, by_hand(*inputs), 1e-5 if dtype == "float32" else 2e-2)


@pytest.mark.slow
@pytest.mark.usefixtures("short_chunks")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_kernels_at_heads_of_every_size(dtype, head_sizes):
  D, G = head_sizes
  inputs = case((2, G, 2, 71), dtype, bias=G % 2 == 0, D=D, T=101)
  with padded_tpu():
    found = jax.jit(read_layer)(*inputs)
  close(found, by_hand(*inputs), 2e-2 if dtype == "bfloat16" else 1e-5)


@pytest.mark.slow
@pytest.mark.usefixtures("short_chunks")
def test_every_device_of_a_mesh_reads_its_rows_and_heads():
  inputs = eighths(case((2, 2, 4, 10), bias=True, D=128), "int8")
  axes = (jax.sharding.AxisType.Auto,) * 2
  mesh = jax.make_mesh((2, 2), ("data", "model"), axis_types=axes)
  with on_tpu(), jax.set_mesh(mesh):
    found = jax.jit(read_layer)(*inputs)
  close(found, by_hand(*inputs), 1e-5)


def test_kernels_decline():
  few, short = case(SHAPES[0], T=24), case((1, 1, 1, 7), D=128, T=37)
  narrower = jnp.asarray(np.asarray(short[2]).astype("bfloat16"))
  mixed = (*short[:2], narrower, *short[3:])
  tiny = eighths(short, "float8_e4m3fn")
  for inputs in (few, mixed, tiny):
    run = jax.jit(sparse_decode)
    with on_tpu(), pytest.raises(NotImplementedError):
      run(*inputs)
    with kernels.use(platform="tpu"):
      close(run(*inputs), by_hand(*inputs), 2e-2)
