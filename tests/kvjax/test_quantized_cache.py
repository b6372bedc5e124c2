"""Caches in eight bits: what rounding costs them, and nothing besides."""

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax.activations import Activations
from kvjax.cache.layers import Slots
from kvjax.cache.sharding import parse_mesh
from kvjax.calibration.record import Calibration
from kvjax.checkpoint.loading import load_cache
from kvjax.checkpoint.saving import save_cache
from kvjax.engine.compression_plan import Plan
from kvjax.engine.feed import feed
from kvjax.errors import InputError
from kvjax.kernels.quantized import Quantized
from kvjax.registry.names import get_method
from kvjax.testing import TinyModel, kept_positions, poison_cache

GEOMETRY = kvjax.Geometry.uniform(
  layers=2, heads=4, kv_heads=2, head_dim=16, max_positions=4096
)
MODEL = TinyModel(GEOMETRY)
RNG = np.random.default_rng(0)
# No token twice: equal keys would tie, and ties fall as rounding falls.
ROWS = [RNG.permutation(64)[:n].tolist() for n in (61, 40, 17, 52)]
PROTECTED = 11
PROMPTS = kvjax.Prompts.of(
  ROWS, protected=[[token == PROTECTED for token in row] for row in ROWS]
)
QUESTIONS = kvjax.Prompts.of([[5, 3], [8], [9, 7, 9], [1, 2]], 3)
DENSE, PACKED = "snapkv:window=8", "ada/snapkv:window=8"
BUDGET = kvjax.Tokens(20)
SMALL = {"int8": jnp.int8, "fp8": jnp.float8_e4m3fn}
LARGEST = {"int8": 127, "fp8": 448}


def parameters():
  """Of a model that says more than what it has just read."""
  params = MODEL.init()
  for weights in params["layers"]:
    weights["output"] *= 6
  return params


PARAMS = parameters()
HEADS, KV_HEADS = 4, 2
# Each layer's weights by themselves, in float64.
LAYERS = [
  {name: np.asarray(x[number], np.float64) for name, x in stack.items()}
  for stack in PARAMS["layers"]
  for number in range(len(stack["key"]))
]


def plan(name, kv_dtype, budget=BUDGET, **options):
  return kvjax.get_plan(name, budget, kv_dtype=kv_dtype, **options)


def swept(plans, prompts=PROMPTS):
  return kvjax.sweep(MODEL, PARAMS, prompts, plans)[0]


@pytest.fixture(scope="module")
def caches():
  """By method and kv_dtype, all from one prefill."""
  names = [(name, s) for name in (DENSE, PACKED) for s in (None, *SMALL)]
  found = swept([plan(*name) for name in names])
  return dict(zip(names, found, strict=True))


def parts(layer):
  """Keys, values, positions and heads: those of pages, then of the tail."""
  found = []
  layer.map_slots(lambda part: found.append(part) or part)
  slots, *pages = found
  heads = jnp.arange(slots.positions.shape[1])[None]
  heads = jnp.broadcast_to(heads, slots.positions.shape[:2])
  return [
    *((part.keys, part.values, part.positions, part.heads) for part in pages),
    (slots.keys, slots.values, slots.positions, heads),
  ]


def exact(x):
  """What is stored, in float64."""
  if not isinstance(x, Quantized):
    return np.asarray(x, np.float64)
  assert x.qvalue.dtype in SMALL.values()
  numbers = np.asarray(x.qvalue.astype(jnp.float32), np.float64)
  return numbers * np.asarray(x.scale, np.float64)


def exact_scale(x):
  return np.asarray(x.scale, np.float64)


def plain_attention(layer, queries, places):
  """Softmax over the stored numbers, a row and head at a time; in float64."""
  output = np.zeros(queries.shape)
  group = queries.shape[1] // KV_HEADS
  for row, head in np.ndindex(queries.shape[:2]):
    rows = []
    for keys, values, positions, heads in parts(layer):
      own = np.asarray(heads[row]) == head // group
      own = own[:, None] & (np.asarray(positions[row]) >= 0)
      found = (np.asarray(positions[row]), exact(keys)[row], exact(values)[row])
      rows.append([x[own] for x in found])
    positions, keys, values = (
      np.concatenate(x) for x in zip(*rows, strict=True)
    )
    for token, place in enumerate(places[row]):
      if place >= 0:
        logits = keys @ queries[row, head, token] * keys.shape[-1] ** -0.5
        weights = np.exp(logits - logits.max()) * (positions <= place)
        output[row, head, token] = weights @ values / weights.sum()
  return output


def rotated(x, places):
  """RoPE as the model does it: x is [B, H, S, D]."""
  half = x.shape[-1] // 2
  angles = places[:, None, :, None] * 100.0 ** (-np.arange(half) / half)
  low, high = x[..., :half], x[..., half:]
  cos, sin = np.cos(angles), np.sin(angles)
  return np.concatenate([low * cos - high * sin, high * cos + low * sin], -1)


def plain_logits(cache, tokens, places):
  """Of tokens that are in the cache; what they attend to is in there too."""
  x = np.asarray(PARAMS["embedding"], np.float64)[tokens]
  for layer, weights in zip(cache.layers, LAYERS, strict=True):
    queries = x @ weights["query"]
    queries = queries.reshape(*tokens.shape, HEADS, -1)
    queries = rotated(queries.swapaxes(1, 2), places)
    attended = plain_attention(layer, queries, places).swapaxes(1, 2)
    x += attended.reshape(*tokens.shape, -1) @ weights["output"]
  return x @ np.asarray(PARAMS["embedding"], np.float64).T


def half_step(x, scale, kv_dtype):
  """How far rounding may move a number."""
  if kv_dtype == "int8":
    return scale / 2 * (1 + 1e-5)
  return np.maximum(np.abs(x) / 16, scale / 1024) * (1 + 1e-5)


def assert_appended(cache, tokens, places, kv_dtype):
  """The first layer's last part has a block in it, nearly as it was."""
  embedded = np.asarray(PARAMS["embedding"], np.float64)[tokens]
  keys, values, positions, _ = parts(cache.layers[0])[-1]
  for name, x in (("key", keys), ("value", values)):
    own = embedded @ LAYERS[0][name]
    own = own.reshape(*tokens.shape, KV_HEADS, -1).swapaxes(1, 2)
    own = rotated(own, places) if name == "key" else own
    for row, token in np.argwhere(places >= 0):
      found = np.asarray(positions[row]) == places[row, token]
      assert np.all(found.sum(axis=-1) == 1)
      wanted, scale = own[row, :, token], exact_scale(x)[row][found]
      off = np.abs(exact(x)[row][found] - wanted)
      assert np.all(off <= half_step(wanted, scale, kv_dtype) + 1e-5)
      np.testing.assert_allclose(
        scale[..., 0], np.abs(wanted).max(-1) / LARGEST[kv_dtype], rtol=1e-4
      )


fed = jax.jit(feed, static_argnames=("model",))


@pytest.mark.slow
@pytest.mark.parametrize(
  ("method", "kv_dtype"), [(DENSE, "int8"), (PACKED, "fp8")]
)
def test_answers_equal_a_plain_loop_over_the_stored_numbers(
  caches, method, kv_dtype
):
  """Question and answer are stored in eight bits too, before they are read."""
  cache = poison_cache(kvjax.reserve(caches[method, kv_dtype], 10))
  block, lengths = np.asarray(QUESTIONS.tokens), np.asarray(QUESTIONS.lengths)
  own, said = cache, []
  for _ in range(4):
    start = np.asarray(own.next_positions)
    logits, own = fed(MODEL, PARAMS, own, block, lengths)
    places = start[:, None] + np.arange(block.shape[1])[None]
    places = np.where(places < (start + lengths)[:, None], places, -1)
    assert_appended(own, block, places, kv_dtype)
    last = np.take_along_axis(
      plain_logits(own, block, places), lengths[:, None, None] - 1, axis=1
    )[:, 0]
    np.testing.assert_allclose(logits, last, atol=1e-5 * np.abs(last).max())
    said.append(last.argmax(-1))
    block, lengths = said[-1][:, None], np.ones_like(lengths)
  more = np.asarray(QUESTIONS.lengths)[None, :, None] + 3
  assert np.array_equal(own.lengths, caches[method, kv_dtype].lengths + more)
  said = np.stack(said, axis=1).tolist()
  assert len({tuple(row) for row in said}) == len(ROWS)

  given, places = buffers(cache)
  answers = conversed(cache)
  after = answers.cache
  assert answers.rows() == said
  # The conversation has written into the cache that it was given.
  assert all(leaf.is_deleted() for leaf in given)
  assert buffers(after)[1] == places


def conversed(cache):
  decoding = kvjax.Decoding(4)
  return kvjax.generate(MODEL, PARAMS, cache, QUESTIONS, decoding, keep=True)


def buffers(cache):
  leaves = [x for x in jax.tree.leaves(cache.stacks) if x.ndim > 2]
  return leaves, {leaf.unsafe_buffer_pointer() for leaf in leaves}


@pytest.mark.parametrize(
  ("method", "kv_dtype", "dtype"),
  [
    (DENSE, "fp8", "float32"),
    (DENSE, "int8", "bfloat16"),
    (PACKED, "int8", "float32"),
    (PACKED, "fp8", "bfloat16"),
  ],
)
def test_attention_is_to_the_stored_numbers(caches, method, kv_dtype, dtype):
  rng = np.random.default_rng(1)
  queries = jnp.asarray(rng.normal(size=(4, 4, 3, 16)) * 2, dtype)
  places = np.asarray([[70, 71, 72], [50, 51, -1], [30, 31, 32], [60, -1, -1]])
  layer = poison_cache(caches[method, kv_dtype]).layers[1]
  keys = jnp.zeros((4, KV_HEADS, 3, 16), dtype)
  ours, after = layer.attend(
    Activations(queries, keys, keys, jnp.asarray(places, jnp.int32))
  )
  assert ours.dtype == jnp.dtype(dtype)
  assert after is layer
  theirs = plain_attention(layer, np.asarray(queries, np.float64), places)
  shown = np.asarray(ours, np.float64) * (places >= 0)[:, None, :, None]
  tolerance = 1e-5 if dtype == "float32" else 2e-2
  tolerance *= max(1, np.abs(theirs).max())
  np.testing.assert_allclose(shown, theirs, rtol=0, atol=tolerance)


@pytest.mark.parametrize("kv_dtype", [*SMALL])
@pytest.mark.parametrize("method", [DENSE, PACKED])
def test_the_same_tokens_are_kept_and_rounded_once(caches, method, kv_dtype):
  """Each number to the nearest there is; eight bits cost half a step."""
  ours, theirs = caches[method, kv_dtype], caches[method, None]
  assert ours.nbytes == sum(x.nbytes for x in jax.tree.leaves(ours))
  assert np.array_equal(ours.next_positions, theirs.next_positions)
  for row, tokens in enumerate(ROWS):
    valid = kept_positions(ours, row)
    assert valid == kept_positions(theirs, row)
    place = tokens.index(PROTECTED) if PROTECTED in tokens else -1
    assert all(place in head for layer in valid for head in layer) or place < 0
  for small, whole in zip(ours.layers, theirs.layers, strict=True):
    for small_part, part in zip(parts(small), parts(whole), strict=True):
      valid = np.asarray(part[2]) >= 0
      for x, y in zip(small_part[:2], part[:2], strict=True):
        assert x.qvalue.dtype == SMALL[kv_dtype]
        wanted, scale = exact(y)[valid], np.asarray(x.scale, np.float64)[valid]
        off = np.abs(exact(x)[valid] - wanted)
        assert np.all(off <= half_step(wanted, scale, kv_dtype))
        largest = np.abs(wanted).max(axis=-1, keepdims=True)
        np.testing.assert_allclose(
          scale, largest / LARGEST[kv_dtype], rtol=1e-6
        )


def assert_alike(ours, theirs, row=...):
  """Equal, but for sums in another order that round to the next number."""
  for one, other in zip(ours, theirs, strict=True):
    for part, expected in zip(parts(one), parts(other), strict=True):
      assert_part_alike(part, expected, row)


def assert_part_alike(part, expected, row=...):
  valid = np.asarray(part[2]) >= 0
  for x, y in zip(part[:2], expected[:2], strict=True):
    wanted = exact(y)[row].reshape(exact(x).shape)[valid]
    scale = exact_scale(y)[row].reshape(exact_scale(x).shape)[valid]
    off = np.abs(exact(x)[valid] - wanted)
    assert np.all(off <= 1.01 * np.maximum(np.abs(wanted) / 8, scale))
    assert np.sum(off > 0.1 * scale) <= 0.01 * off.size


def in_order(pages):
  """The tokens of pages by row, head and position, wherever the pages are."""
  positions = np.asarray(pages.positions)
  valid = positions >= 0
  rows, _, _ = np.nonzero(valid)
  heads = np.broadcast_to(np.asarray(pages.heads)[..., None], valid.shape)
  order = np.lexsort((positions[valid], heads[valid], rows))

  def sort(x):
    return np.asarray(x)[valid][order]

  parts = (pages.keys, pages.values, pages.positions)
  return jax.tree.map(sort, parts)


@pytest.mark.slow
def test_a_row_stands_alone(caches):
  names = [(DENSE, "int8"), (PACKED, "fp8")]
  alone = swept([plan(*name) for name in names], prompts=PROMPTS.row(1))
  for name, own in zip(names, alone, strict=True):
    assert kept_positions(own, 0) == kept_positions(caches[name], 1)
    assert_alike(own.layers, caches[name].layers, 1)


@pytest.mark.parametrize(
  ("method", "kv_dtype"), [(DENSE, "fp8"), (PACKED, "int8")]
)
def test_saved_and_loaded_bit_by_bit(caches, method, kv_dtype, tmp_path):
  cache = poison_cache(caches[method, kv_dtype])
  save_cache(cache, tmp_path, model=MODEL, model_id="tiny")
  again = load_cache(tmp_path, model=MODEL, model_id="tiny")
  assert jax.tree.structure(again) == jax.tree.structure(cache)
  for one, other in zip(
    jax.tree.leaves(again), jax.tree.leaves(cache), strict=True
  ):
    assert one.dtype == other.dtype
    assert np.asarray(one).tobytes() == np.asarray(other).tobytes()


def test_rows_are_joined_with_their_like(caches):
  int8, fp8 = caches[DENSE, "int8"], caches[DENSE, "fp8"]
  joined = kvjax.stack([int8, int8])
  for row in (1, 5):
    assert kept_positions(joined, row) == kept_positions(int8, 1)
  assert joined.layers[0].keys.qvalue.dtype == jnp.int8
  assert joined.layers[0].keys.scale.shape[0] == 8
  for other in (fp8, caches[DENSE, None]):
    with pytest.raises(InputError, match="can be joined"):
      kvjax.stack([int8, other])


@pytest.mark.slow
def test_a_mesh_equals_one_device(caches):
  with jax.set_mesh(parse_mesh("data:2,model:2")):
    dense, packed = swept([plan(DENSE, "int8"), plan(PACKED, "int8")])
    said = conversed(kvjax.reserve(dense, 10)).rows()
  (stack,) = dense.stacks
  for leaf in (*stack.keys, *stack.values):
    assert leaf.sharding.shard_shape(leaf.shape)[:3] == (2, 2, 1)
  for leaf in packed.stacks[0].pages.keys:
    assert leaf.sharding.shard_shape(leaf.shape)[:2] == (2, 2)
  assert_alike(dense.layers, caches[DENSE, "int8"].layers)
  for layer, whole in zip(
    packed.layers, caches[PACKED, "int8"].layers, strict=True
  ):
    ours, theirs = in_order(layer.pages), in_order(whole.pages)
    assert np.array_equal(ours[2], theirs[2])
    assert_part_alike(ours, theirs)
  alone = kvjax.reserve(caches[DENSE, "int8"], 10)
  assert said == conversed(alone).rows()


@pytest.mark.slow
def test_every_way_to_a_cache_ends_in_rounding():
  """With keys that turn, by what each row can bear, and in blocks."""
  turned, keydiff = get_method("streaming:rerotate=true"), get_method("keydiff")
  # Retentions of a half, whatever the row.
  record = Calibration(
    0.0, 1e-3, "tiny", str(turned), False, (0.1, 1.0), 0.0, 1
  )
  half = kvjax.Calibrated(record, 0.5)
  record = dataclasses.replace(record, method=str(keydiff))
  whole = kvjax.Calibrated(record, 1.0)
  free = kvjax.Prompts.of(ROWS)
  pairs = itertools.product(
    ((turned, BUDGET), (turned, half), (keydiff, whole)), (None, "int8")
  )
  found = swept(
    [Plan(*chosen, kv_dtype=kv_dtype) for chosen, kv_dtype in pairs],
    prompts=free,
  )
  for whole, small in zip(found[::2], found[1::2], strict=True):
    assert np.array_equal(whole.next_positions, small.next_positions)
    layers = []
    for layer, rounded in zip(whole.layers, small.layers, strict=True):
      assert type(rounded) is Slots
      layers.append(layer.quantize("int8"))
      assert np.array_equal(layer.positions, rounded.positions)
      assert int(layer.cursor) == int(rounded.cursor)
    assert_alike(small.layers, layers)

  blocks = plan("keydiff", "int8", schedule=kvjax.Schedule(block=16))
  cache, _ = jax.eval_shape(
    lambda params: kvjax.prefill(MODEL, params, free, blocks), PARAMS
  )
  assert {type(stack) for stack in cache.stacks} == {Slots}
  assert cache.stacks[0].keys.qvalue.dtype == jnp.int8
