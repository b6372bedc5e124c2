"""Windows, scales, caps, sinks and wide values, against loops in float64."""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from plain_attention import (
  DECLINED,
  EVERYTHING,
  OPTIONS,
  SHAPES,
  SOME,
  assert_close,
  assert_declined,
  assert_partial,
  by_hand,
  layer,
  listed,
  listed_by_hand,
  most_of,
  paged,
  run_paged,
  sinks_of,
  weights_of,
)

from kvjax import kernels
from kvjax.kernels.attention import (
  AttentionOptions,
  Partial,
  attention,
  chunked,
  merge,
  partial_attention,
  with_sinks,
)
from kvjax.kernels.attention_mass import causal_mass
from kvjax.kernels.attention_mass import xla as mass_of_xla
from kvjax.kernels.attention_mass.reference import causal_mass_reference
from kvjax.kernels.paged_attention import paged_attention
from kvjax.kernels.paged_attention.reference import paged_attention_reference
from kvjax.kernels.quantized import quantize
from kvjax.kernels.sparse_decode import sparse_decode
from kvjax.kernels.sparse_decode.reference import sparse_decode_reference


@pytest.mark.parametrize(
  ("name", "value"),
  [
    ("window", 0),
    ("window", -3),
    ("scale", 0.0),
    ("scale", -1.0),
    ("scale", math.nan),
    ("softcap", 0.0),
    ("softcap", math.inf),
  ],
)
def test_options_without_meaning_are_refused(name, value):
  with pytest.raises(ValueError, match=f"^{name} must be [^.]*, not .*\\.$"):
    AttentionOptions(**{name: value})


def test_equal_options_share_compiled_programs():
  compiled = jax.jit(attention, static_argnames="options")
  operands = layer(*SHAPES["a few"])
  first = compiled(*operands, options=AttentionOptions(window=4))
  again = compiled(*operands, options=AttentionOptions(window=4))
  np.testing.assert_array_equal(first, again)
  assert compiled._cache_size() == 1


def whole_and_parts(options, implementation):
  """Attention with sinks, without, and of two halves of the slots, merged."""

  def run(queries, keys, values, query_positions, places, sinks):
    def of(part):
      return partial_attention(
        queries,
        *(x[:, :, part] for x in (keys, values)),
        query_positions,
        places[:, :, part],
        implementation,
        options,
      )

    half = keys.shape[2] // 2
    merged = merge(of(slice(half)), of(slice(half, None)))
    operands = (
      queries,
      keys,
      values,
      query_positions,
      places,
      implementation,
      options,
    )
    return (
      attention(*operands, sinks),
      of(slice(None)),
      with_sinks(merged, sinks),
    )

  return jax.jit(run)


@pytest.mark.usefixtures("small_chunks")
@pytest.mark.parametrize(
  ("name", "shape", "implementation"),
  [(name, "query chunks", "chunked") for name in OPTIONS]
  + [(name, "one query", "chunked") for name in SOME]
  + [(name, "a few", "chunked") for name in SOME]
  + [(name, "a few", "reference") for name in OPTIONS],
)
def test_attention(name, shape, implementation):
  options, operands = OPTIONS[name], layer(*SHAPES[shape])
  sinks = sinks_of(operands[0].shape[1])
  run = whole_and_parts(options, implementation)
  output, without, merged = run(*operands, sinks)
  expected, lse = by_hand(*operands, options, sinks)
  assert_close(output, expected)
  assert_partial(without, by_hand(*operands, options))
  assert_partial(
    merged, (expected, np.logaddexp(lse, np.asarray(sinks)[:, None]))
  )
  alone = np.isneginf(lse)
  assert alone.any() == (shape != "one query" or name == "a window of 1")
  assert not np.any(np.asarray(output)[alone])


@pytest.mark.usefixtures("small_chunks")
@pytest.mark.parametrize("shape", ["one query", "query chunks"])
def test_attention_in_bfloat16(shape):
  operands = layer(*SHAPES[shape], "bfloat16")
  sinks = sinks_of(operands[0].shape[1])
  run = whole_and_parts(EVERYTHING, "chunked")
  output, without, merged = run(*operands, sinks)
  assert {x.dtype for x in (output, without.output, merged.output)} == {
    jnp.dtype("bfloat16")
  }
  # Products are exact; rounded, each by 2^-9 of it at most, are the weights,
  # then the output: of a part, of the merged parts, and with the sinks.
  most = most_of(operands[2])
  expected, _ = by_hand(*operands, EVERYTHING, sinks)
  assert_close(output, expected, 3 * 2**-9 * most)
  assert_close(merged.output, expected, 4 * 2**-9 * most)
  assert_partial(without, by_hand(*operands, EVERYTHING), 2 * 2**-9 * most)


@pytest.mark.usefixtures("small_chunks")
def test_attention_to_eight_bits():
  q, k, v, *where = layer(*SHAPES["query chunks"])
  sinks = sinks_of(6)
  small = [quantize(jnp.nan_to_num(x), "int8") for x in (k, v)]
  whole = [np.float64(x.qvalue) * np.float64(x.scale) for x in small]
  run = jax.jit(
    lambda *operands: attention(*operands, "chunked", EVERYTHING, sinks)
  )
  expected, _ = by_hand(q, *whole, *where, EVERYTHING, sinks)
  assert_close(run(q, *small, *where), expected)


@pytest.mark.parametrize("S", [None, 3])
def test_a_sink_of_nothing_changes_nothing(S):
  """For attention of one token, too, which has no axis of queries."""
  rng = np.random.default_rng(0)
  axes = (2, 4) if S is None else (2, 4, S)
  lse = rng.normal(size=axes)
  lse[0, 0] = -np.inf
  output = np.where(np.isneginf(lse)[..., None], 0, rng.normal(size=(*axes, 5)))
  operands = Partial(*(jnp.asarray(x, jnp.float32) for x in (output, lse)))
  none = with_sinks(operands, jnp.full(4, -jnp.inf))
  np.testing.assert_allclose(none.output, operands.output, rtol=1e-6)
  np.testing.assert_allclose(none.lse, operands.lse, rtol=1e-6)
  some = with_sinks(operands, jnp.zeros(4, jnp.bfloat16))
  share = 1 / (1 + np.exp(-lse))
  np.testing.assert_allclose(some.output, output * share[..., None], rtol=1e-5)
  np.testing.assert_allclose(some.lse, np.log1p(np.exp(lse)), rtol=1e-5)


@pytest.mark.parametrize(
  ("window", "visits"),
  # Of 8 chunks of 8 slots, for queries 8 at a time: those up to the queries',
  # as far as the window of the first of them reaches.
  [(None, 36), (1000, 36), (1, 8), (2, 15), (9, 15), (10, 21)],
)
def test_chunks_outside_the_window_are_skipped(monkeypatch, window, visits):
  monkeypatch.setattr(chunked, "QUERY_CHUNK", 8)
  monkeypatch.setattr(chunked, "LOGITS", 64)
  count, after = [], chunked.Online.after

  def counted(*operands):
    jax.debug.callback(lambda: count.append(None))
    return after(*operands)

  monkeypatch.setattr(chunked.Online, "after", counted)
  options = AttentionOptions(window=window)
  rng = np.random.default_rng(0)
  q, k, v = rng.normal(size=(3, 2, 1, 64, 4)).astype("float32")
  places = np.tile(np.arange(64, dtype=np.int32), (2, 1))
  places[1, 40:] = -1
  operands = (*map(jnp.asarray, (q, k, v, places, places[:, None])),)
  actual = jax.jit(lambda *x: attention(*x, options=options))(*operands)
  assert_close(actual, by_hand(*operands, options)[0])
  jax.effects_barrier()
  assert len(count) == visits


@pytest.mark.usefixtures("small_chunks")
@pytest.mark.parametrize(
  ("name", "shape", "program"),
  [(name, "a few", paged_attention) for name in OPTIONS]
  + [(name, "query chunks", paged_attention) for name in SOME]
  + [(name, "one query", paged_attention) for name in SOME]
  + [(name, "a few", paged_attention_reference) for name in SOME],
)
def test_paged_attention(name, shape, program):
  options, operands = OPTIONS[name], layer(*SHAPES[shape])
  q, k, v, query_positions, places = operands
  keys, values, pages, heads = paged(k, v, places)
  run = run_paged(program, options, k.shape[1])
  actual = run(q, keys, values, query_positions, pages, heads)
  assert_partial(actual, by_hand(*operands, options))
  if program is paged_attention and name == "everything":
    small = [quantize(jnp.nan_to_num(x), "int8") for x in (keys, values)]
    whole = (x.qvalue.astype("float32") * x.scale for x in small)
    expected = run(q, *whole, query_positions, pages, heads)
    actual = run(q, *small, query_positions, pages, heads)
    assert_partial(actual, expected)


def test_paged_attention_in_bfloat16():
  operands = layer(*SHAPES["one query"], "bfloat16")
  q, k, v, query_positions, places = operands
  keys, values, pages, heads = paged(k, v, places)
  run = run_paged(paged_attention, EVERYTHING, k.shape[1])
  actual = run(q, keys, values, query_positions, pages, heads)
  # Rounded are the weights and the output.
  assert actual.output.dtype == jnp.bfloat16
  tolerance = 2 * 2**-9 * most_of(v)
  assert_partial(actual, by_hand(*operands, EVERYTHING), tolerance)


@pytest.mark.parametrize(
  ("name", "H", "bias", "program"),
  [
    ("plain", 2, False, sparse_decode),
    ("a scale", 4, True, sparse_decode),
    ("a cap", 2, True, sparse_decode),
    ("everything", 4, False, sparse_decode),
    ("everything", 2, True, sparse_decode_reference),
  ],
)
def test_sparse_decode(name, H, bias, program):
  options = dataclasses.replace(OPTIONS[name], window=None)
  operands, sinks = listed(2, 4, 2, H, 11, 30, 8, 6, bias), sinks_of(4)
  run = jax.jit(
    lambda *x: with_sinks(program(*x, options=options), sinks_of(4))
  )
  assert_partial(run(*operands), listed_by_hand(*operands, options, sinks))


def test_lists_have_no_windows():
  operands = listed(2, 4, 2, 2, 11, 30, 8, 8, False)
  for implementation in (None, "xla", "pallas"):
    with (
      kernels.use(implementation),
      pytest.raises(NotImplementedError, match="where tokens stand"),
    ):
      sparse_decode(*operands, AttentionOptions(window=5))


@pytest.mark.usefixtures("small_chunks")
@pytest.mark.parametrize("few", [0, 64])
@pytest.mark.parametrize("sinks", [True, False])
@pytest.mark.parametrize(
  ("name", "shape", "program"),
  [(name, "query chunks", causal_mass) for name in OPTIONS]
  + [(name, "one query", causal_mass) for name in SOME]
  + [(name, "a few", causal_mass_reference) for name in SOME],
)
def test_causal_mass(monkeypatch, name, shape, program, sinks, few):
  # Of more queries, products begin with the queries.
  monkeypatch.setattr(mass_of_xla, "_FEW", few)
  options = OPTIONS[name]
  queries, keys, _, query_positions, places = layer(*SHAPES[shape])
  sinks = sinks_of(queries.shape[1]) if sinks else None
  queries = jnp.where((query_positions < 0)[:, None, :, None], jnp.nan, queries)
  operands = queries, keys, query_positions, places
  run = jax.jit(lambda *x: program(*x, options=options, sinks=sinks))
  weights, _ = weights_of(
    jnp.nan_to_num(queries), *operands[1:], options, sinks
  )
  actual, expected = run(*operands), weights.sum(axis=2)
  assert_close(actual, expected, 1e-5 * max(1, expected.max()))


def test_causal_mass_of_bfloat16_is_exact():
  queries, keys, _, *where = layer(*SHAPES["a few"], "bfloat16")
  sinks = sinks_of(3)
  run = functools.partial(causal_mass, options=EVERYTHING, sinks=sinks)
  actual = jax.jit(run)(queries, keys, *where)
  weights, _ = weights_of(queries, keys, *where, EVERYTHING, sinks)
  assert actual.dtype == jnp.float32
  assert_close(actual, weights.sum(axis=2))


@pytest.mark.parametrize("platform", ["tpu", "gpu"])
@pytest.mark.parametrize("reason", DECLINED)
def test_kernels_of_plain_attention_decline_the_rest(reason, platform):
  options, sinks, W = DECLINED[reason]
  operands = layer(2, 4, 2, 1, 37, 64, W)
  q, k, v, query_positions, places = operands
  # On GPUs, pages are read with any scale, and XLA reads lists.
  on_gpu = platform == "gpu"
  if not sinks and not (on_gpu and options.scale):
    keys, values, pages, heads = paged(k, v, places, P=32)
    paging = run_paged(paged_attention, options, 2)
    assert_declined(
      platform,
      reason,
      lambda: paging(q, keys, values, query_positions, pages, heads),
      lambda actual: assert_partial(actual, by_hand(*operands, options)),
    )
  if not sinks and options.window is None and not on_gpu:
    lists = listed(2, 4, 2, 2, 11, 37, 64, W, False)
    decoding = jax.jit(lambda *x: sparse_decode(*x, options=options))
    none = np.full(4, -np.inf)
    assert_declined(
      platform,
      reason,
      lambda: decoding(*lists),
      lambda actual: assert_partial(
        actual, listed_by_hand(*lists, options, none)
      ),
    )
  if W == 64:
    sinks = sinks_of(4) if sinks else None
    # GPUs have no kernel for a single query.
    q, k, _, query_positions, places = layer(2, 4, 2, 3, 37, 64, W)
    mass = jax.jit(lambda *x: causal_mass(*x, options=options, sinks=sinks))
    weights, _ = weights_of(q, k, query_positions, places, options, sinks)
    assert_declined(
      platform,
      reason,
      lambda: mass(q, k, query_positions, places),
      lambda actual: assert_close(actual, weights.sum(axis=2)),
    )


@pytest.mark.parametrize("platform", ["tpu", "gpu"])
def test_a_scale_that_is_the_default_is_plain(platform):
  options = AttentionOptions(scale=1 / math.sqrt(128))
  sizes = (37, 128, 128, "bfloat16")
  q, k, v, query_positions, places = layer(1, 2, 1, 1, *sizes)
  several, _, _, their_positions, _ = layer(1, 2, 1, 2, *sizes)
  keys, values, pages, heads = paged(k, v, places, P=32)
  lists = jnp.zeros((1, 1, 40), jnp.int32)
  with kernels.use("pallas", platform):
    for run, operands in (
      (
        functools.partial(causal_mass, options=options),
        (several, k, their_positions, places),
      ),
      (
        functools.partial(sparse_decode, options=options),
        (q[:, :, 0], k, v, lists),
      ),
      (
        functools.partial(paged_attention, kv_heads=1, options=options),
        (q, keys, values, query_positions, pages, heads),
      ),
    ):
      assert jax.eval_shape(run, *operands) is not None
