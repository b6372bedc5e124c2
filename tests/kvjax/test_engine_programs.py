"""How many programs prefill takes, and how large they are."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax.cache.cache import Cache
from kvjax.cache.layers import LayerCache
from kvjax.cache.window import WindowLayer
from kvjax.engine import building, generate, sweeping
from kvjax.engine.decode import DecodingInputs
from kvjax.methods import FullKV, KeyDiff
from kvjax.model import Geometry, LayerSpec
from kvjax.prompts import bucket, bucket_lengths
from kvjax.struct import tree_bytes
from kvjax.testing import TinyModel


def test_buckets_are_few_and_near():
  lengths = range(1, 100_000)
  sizes = [bucket(n) for n in lengths]
  padding = [size - n for n, size in zip(lengths, sizes, strict=True)]
  assert all(0 <= extra < max(32, n / 2) for n, extra in enumerate(padding, 1))
  # A long prompt pays for its own tokens.
  assert all(extra <= n / 8 for n, extra in enumerate(padding, 1) if n > 1024)
  assert len(set(sizes)) < 70
  assert all(n in bucket_lengths(bucket(n)) for n in lengths)


def test_a_layers_full_cache_does_not_outlive_the_layer(monkeypatch):
  """Bytes that live when a layer has been computed, over the prefill."""
  layers, length, budget = 8, 2048, 128
  model = TinyModel(Geometry.uniform(layers, 4, 2, 32, 4096))
  params = model.init()
  prompts = kvjax.Prompts.of([[n % 64 for n in range(length)]])
  spec = model.geometry.layers[0]
  slot = 2 * 4 * spec.key_dim + 4
  full_layer = spec.kv_heads * length * slot
  small_layer = spec.kv_heads * budget * slot

  def living():
    return sum(array.nbytes for array in jax.live_arrays())

  def watched(hidden):
    wait(hidden)
    alive.append(living() - before)

  wait = sweeping._wait_for
  monkeypatch.setattr(sweeping, "_wait_for", watched)

  def run(plan):
    alive.clear()
    cache, logits = kvjax.prefill(model, params, prompts, plan)
    del logits
    alive.append(living() - before)
    return cache

  alive, before = [], living()
  cache = run(kvjax.Plan(KeyDiff(), kvjax.Tokens(budget)))
  assert layers * small_layer < cache.nbytes < layers * small_layer + 4096
  assert alive.pop() < cache.nbytes + 4096
  assert len(alive) == layers
  # As much with the last layer as with the first: the stack of what is kept,
  # hidden states, and the activations of a single layer.
  assert max(alive) - min(alive) < 4096
  hidden = length * model.width * 4
  queries = spec.heads * length * spec.key_dim * 4
  most = cache.nbytes + full_layer + queries + 2 * hidden
  assert max(alive) < 1.1 * most
  del cache
  full = run(kvjax.Plan(FullKV(), kvjax.Retention(1.0)))
  assert full.nbytes > layers * full_layer
  assert alive[-2] > max(alive[-1], layers * full_layer)


@pytest.mark.parametrize("window", [None, 8192])
def test_tokens_are_written_into_the_cache_that_is_given(window):
  """A turn's temporaries are a layer's, whatever the number of layers."""
  rows, slots, width = 2, 8192, 8
  numbers = functools.partial(jax.ShapeDtypeStruct, dtype="int32")
  spec = LayerSpec(4, 2, 32, window=window)

  def compiled(layers):
    """What a turn uses, and the bytes of a layer's keys."""
    model = TinyModel(Geometry((spec,) * layers, 2 * slots))
    place = rows, spec.kv_heads, slots

    def empty():
      values = jnp.zeros((*place, 32))
      parts = values, values, jnp.full(place, -1, "int32")
      layer = (
        WindowLayer(*parts) if window else LayerCache(*parts, jnp.int32(0))
      )
      stack = jax.tree.map(lambda x: jnp.stack([x] * layers), layer)
      return Cache((stack,), jnp.zeros(rows, "int32"), order=(0,) * layers)

    cache = jax.eval_shape(empty)
    program = generate._generate_and_keep.lower(
      model,
      jax.eval_shape(model.init),
      None,
      cache,
      None,
      (numbers((rows, width)), numbers((rows,))),
      jax.eval_shape(
        lambda: DecodingInputs(
          jnp.zeros(rows, "int32"), None, None, jnp.int32(20)
        )
      ),
      decoding=kvjax.Decoding(20),
    )
    used = program.compile().memory_analysis()
    assert used.alias_size_in_bytes >= tree_bytes(cache)
    return used.temp_size_in_bytes, tree_bytes(cache.stacks[0].keys) / layers

  used, keys = compiled(4)
  # A chunk of a layer's keys and of its values, and the logits of the turn; no
  # layer is copied. A ring is taken out of its stack whole.
  logits = rows * 4 * width * slots * 4
  assert used < (2.9 if window else 0.9) * keys + logits
  more, _ = compiled(8)
  assert more - used < 0.01 * keys


def test_answers_of_other_lengths_take_no_new_program():
  model = TinyModel()
  params = model.init()
  prompts = kvjax.Prompts.of([[1, 2, 3, 4, 5], [6, 7, 8]])
  plan = kvjax.Plan(KeyDiff(), kvjax.Tokens(3))
  cache, logits = kvjax.prefill(model, params, prompts, plan)

  def tokens(most):
    decoding = kvjax.Decoding(most)
    return kvjax.generate(model, params, cache, logits, decoding).tokens

  longest = tokens(20)
  programs = generate._generate_and_discard._cache_size()
  for most in (5, 1, 20):
    np.testing.assert_array_equal(tokens(most), longest[:, :most])
  assert generate._generate_and_discard._cache_size() == programs


@pytest.mark.slow
def test_a_deeper_model_compiles_no_more_programs():
  """A sweep, an answer, and blocks that evict while decoding."""
  programs = []

  def count(event, _, **names):
    if event.endswith("/backend_compile_duration"):
      programs.append(names["fun_name"])

  def compiled(layers):
    model = TinyModel(Geometry.uniform(layers, 4, 2, 8, 256))
    params = model.init()
    prompts = kvjax.Prompts.of([list(range(20)), list(range(13))])
    names = ("keydiff", "snapkv:window=4", "ada/keydiff")
    plans = [kvjax.get_plan(name, kvjax.Tokens(8)) for name in names]
    schedule = kvjax.Schedule(block=8, every=2)
    jax.clear_caches()
    programs.clear()
    caches, logits = kvjax.sweep(model, params, prompts, plans)
    cache, _ = kvjax.prefill(
      model,
      params,
      prompts,
      kvjax.Plan(KeyDiff(), kvjax.Tokens(8), schedule=schedule),
    )
    decoding = kvjax.Decoding(4)
    for each in (*caches, cache):
      kvjax.generate(model, params, each, logits, decoding)
    return sorted(programs)

  jax.monitoring.register_event_duration_secs_listener(count)
  try:
    few = compiled(3)
    assert len(few) > 10
    assert compiled(6) == few
  finally:
    jax.monitoring.unregister_event_duration_listener(count)


def test_caches_of_methods_that_read_other_activations_share_programs():
  model = TinyModel()
  params, prompts = model.init(), kvjax.Prompts.of([list(range(40))])

  def programs(method):
    plan = kvjax.Plan(method, kvjax.Retention(0.5))
    kvjax.sweep(model, params, prompts, [plan])
    return building.keep_layer._cache_size()

  reader = kvjax.get_method("expected_attention")
  assert reader.traits.activations
  assert programs(KeyDiff()) == programs(reader)
