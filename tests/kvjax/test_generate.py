"""Generation: from many caches, in parts, token by token, and sampled."""

import contextlib
import functools
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax import kernels
from kvjax.cache.sharding import parse_mesh
from kvjax.contexts import in_these_contexts
from kvjax.engine import generate as generating
from kvjax.engine.decode import _notify, listening
from kvjax.engine.sampling import Sampling, SamplingInputs, sample
from kvjax.errors import InputError
from kvjax.kernels import dispatch, tuning
from kvjax.methods import FullKV, KeyDiff
from kvjax.model import Geometry
from kvjax.testing import TinyModel

MODEL = TinyModel(Geometry.uniform(1, 4, 2, 8, 4096))
PARAMS = MODEL.init()
ROWS = [[3, 1, 4, 1, 5, 9, 2, 6], [2, 7, 1, 8, 2], list(range(30))]
QUESTIONS = [[5, 3], [8], [9, 7, 9]]


def ask(cache, questions=QUESTIONS):
  prompts, decoding = kvjax.Prompts.of(questions), kvjax.Decoding(5)
  return kvjax.generate(MODEL, PARAMS, cache, prompts, decoding)


@pytest.fixture(scope="module")
def full():
  plan = kvjax.Plan(FullKV(), kvjax.Retention(1.0))
  return kvjax.prefill(MODEL, PARAMS, kvjax.Prompts.of(ROWS), plan)


def test_many_caches_answer_as_each_alone():
  """Those of one kind together, in the order that they were given in."""
  prompts = kvjax.Prompts.of(ROWS)
  plans = [
    kvjax.get_plan(name, kvjax.Retention(share))
    for name, share in [
      ("keydiff", 0.4),
      ("adakv:window=2", 0.8),
      ("snapkv:window=2", 0.4),
    ]
  ]
  caches, _ = kvjax.sweep(MODEL, PARAMS, prompts, plans)
  alone = [ask(cache).rows() for cache in caches]
  joined = ask(kvjax.stack([caches[0], caches[2]]), QUESTIONS * 2).rows()
  assert joined == alone[0] + alone[2]
  questions, decoding = kvjax.Prompts.of(QUESTIONS), kvjax.Decoding(5)
  assert kvjax.group_caches(caches, 2**30) == [[0, 2], [1]]
  together = kvjax.generate(MODEL, PARAMS, caches, questions, decoding)
  assert [answers.rows() for answers in together] == alone


@pytest.mark.slow
def test_many_caches_go_on_from_logits():
  plans = [kvjax.Plan(KeyDiff(), kvjax.Tokens(n)) for n in (4, 3, 4)]
  caches, logits = kvjax.sweep(MODEL, PARAMS, kvjax.Prompts.of(ROWS), plans)
  seeds = jnp.arange(3)
  decoding = kvjax.Decoding(5, sampling=Sampling(temperature=1.0))
  go_on = functools.partial(
    kvjax.generate,
    MODEL,
    PARAMS,
    prompts=logits,
    decoding=decoding,
    seeds=seeds,
  )
  alone = [go_on(cache=cache).rows() for cache in caches]
  assert [answers.rows() for answers in go_on(cache=caches)] == alone
  assert alone[0] == alone[2]
  # The numbers of the rows are the seeds by default, in each of the caches.
  unseeded = go_on(cache=caches, seeds=None)
  assert [answers.rows() for answers in unseeded] == alone


def test_equal_rows_draw_different_answers():
  prompts = kvjax.Prompts.of([ROWS[0]] * 3)
  plan = kvjax.get_plan("full", kvjax.Retention(1.0))
  cache, logits = kvjax.prefill(MODEL, PARAMS, prompts, plan)
  decoding = kvjax.Decoding(8, sampling=Sampling(temperature=9.0))
  answers = kvjax.generate(MODEL, PARAMS, cache, logits, decoding).rows()
  assert len(set(map(tuple, answers))) == 3


@pytest.mark.slow
def test_many_caches_keep_their_turns():
  """As each alone, and the given ones are left as they were."""
  plans = [kvjax.Plan(KeyDiff(), kvjax.Tokens(n)) for n in (4, 3, 4)]
  caches, _ = kvjax.sweep(MODEL, PARAMS, kvjax.Prompts.of(ROWS), plans)
  caches = [kvjax.reserve(cache, 128) for cache in caches]
  questions, decoding = kvjax.Prompts.of(QUESTIONS), kvjax.Decoding(5)
  keep = functools.partial(
    kvjax.generate, MODEL, PARAMS, decoding=decoding, keep=True
  )
  together = keep(caches, prompts=questions)
  again = keep([turn.cache for turn in together], prompts=questions)
  for cache, first, second in zip(caches, together, again, strict=True):
    alone = keep(cache, prompts=questions)
    assert alone.rows() == first.rows()
    assert keep(alone.cache, prompts=questions).rows() == second.rows()


def test_a_stream_yields_every_token(full):
  cache, _ = full
  prompts, decoding = kvjax.Prompts.of(QUESTIONS), kvjax.Decoding(5)
  for _ in range(2):
    tokens = list(kvjax.stream(MODEL, PARAMS, cache, prompts, decoding))
    np.testing.assert_array_equal(np.stack(tokens).T, ask(cache).tokens)


@pytest.mark.parametrize("mesh", [None, "data:1", "data:1,model:2"])
def test_a_stream_reads_stored_keys_on_the_host(mesh):
  plan = kvjax.get_plan("flat:sinks=1:local=2:offload=true", kvjax.Tokens(6))
  prompts, decoding = kvjax.Prompts.of(QUESTIONS), kvjax.Decoding(5)
  place = contextlib.nullcontext()
  if mesh is not None:
    place = jax.set_mesh(parse_mesh(mesh))
  with place:
    cache, _ = kvjax.prefill(MODEL, PARAMS, kvjax.Prompts.of(ROWS), plan)
    tokens = list(kvjax.stream(MODEL, PARAMS, cache, prompts, decoding))
    np.testing.assert_array_equal(np.stack(tokens).T, ask(cache).tokens)


def test_steps_are_heard_in_their_order():
  heard = []
  with listening(lambda *step: heard.append(step)) as number:
    for step in (1, 0, 3, 4, 2):
      _notify(number, step, [step])
    assert [step for step, _ in heard] == [0, 1, 2, 3, 4]
  assert [tokens.tolist() for _, tokens in heard] == [[0], [1], [2], [3], [4]]


def test_a_stream_refuses_wrong_arguments_at_once(full):
  """Also if nobody asks for its tokens."""
  cache, _ = full
  questions, decoding = kvjax.Prompts.of(QUESTIONS), kvjax.Decoding(5)
  start = functools.partial(kvjax.stream, MODEL, PARAMS, cache)
  for call, said in (
    (lambda: start(kvjax.Prompts.of([[1]]), decoding), "and 1 questions"),
    (lambda: start(questions, decoding, seeds=[1]), "3 rows and 1 seeds"),
    (lambda: start(questions, decoding, keep=True), "free slots and the cache"),
    (lambda: start(questions, kvjax.Decoding(4096)), "context is 4096"),
  ):
    with pytest.raises(InputError, match=said):
      call()


def test_a_stream_decodes_in_the_contexts_of_its_caller(full):
  """A thread of its own has neither the mesh nor the kernels in use."""
  cache, _ = full
  prompts, decoding = kvjax.Prompts.of(QUESTIONS), kvjax.Decoding(2)
  seen = []

  class Watched(TinyModel):
    def block(self, *args):
      seen.append(
        (
          jax.sharding.get_abstract_mesh(),
          dispatch._implementation.value,
          dispatch._platform.value,
          dispatch._overrides.value,
          tuning.option("gather/tpu", "read"),
          jax.config.jax_default_matmul_precision,
        )
      )
      return super().block(*args)

  mesh = parse_mesh("data:1,model:1")
  with (
    jax.set_mesh(mesh),
    kernels.use("xla", "tpu", {"select": "pallas"}),
    kernels.use_table({"default": {"gather/tpu": {"read": 4096}}}),
    jax.default_matmul_precision("float32"),
  ):
    list(
      kvjax.stream(Watched(MODEL.geometry), PARAMS, cache, prompts, decoding)
    )
  uses = ("xla", "tpu", (("select", "pallas"),))
  assert set(seen) == {(mesh.abstract_mesh, *uses, 4096, "float32")}


def test_a_thread_has_the_options_of_jax_of_its_caller():
  wanted = {
    "debug_infs": True,
    "debug_key_reuse": True,
    "debug_nans": True,
    "default_device": jax.devices()[1],
    "default_matmul_precision": "highest",
    "default_prng_impl": "rbg",
    "disable_jit": True,
    "enable_x64": True,
    "legacy_prng_key": "error",
    "numpy_dtype_promotion": "standard",
    "numpy_rank_promotion": "warn",
    "threefry_partitionable": False,
  }

  def options():
    return {name: getattr(jax.config, f"jax_{name}") for name in wanted}

  seen = []
  with contextlib.ExitStack() as stack:
    for name, value in wanted.items():
      assert options()[name] != value
      stack.enter_context(getattr(jax, name)(value))
    run = in_these_contexts(lambda: seen.append(options()))
  thread = threading.Thread(target=run)
  thread.start()
  thread.join()
  assert seen == [wanted]


@pytest.mark.slow
def test_a_stream_draws_with_the_random_bits_of_its_caller(full):
  cache, _ = full
  prompts = kvjax.Prompts.of(QUESTIONS)
  decoding = kvjax.Decoding(5, sampling=Sampling(900.0))
  given = MODEL, PARAMS, cache, prompts, decoding
  with jax.threefry_partitionable(False):
    tokens = kvjax.generate(*given).tokens
    streamed = np.stack(list(kvjax.stream(*given))).T
  np.testing.assert_array_equal(streamed, tokens)
  assert np.any(tokens != kvjax.generate(*given).tokens)


def test_another_listener_needs_no_other_program(full):
  cache, _ = full
  prompts, decoding = kvjax.Prompts.of(QUESTIONS), kvjax.Decoding(5)

  def listen():
    return len(list(kvjax.stream(MODEL, PARAMS, cache, prompts, decoding)))

  assert listen() == 5
  programs = generating._generate_and_discard._cache_size()
  assert listen() == 5
  assert generating._generate_and_discard._cache_size() == programs


def test_a_stream_keeps_its_turn(full):
  cache, _ = full
  prompts, decoding = kvjax.Prompts.of(QUESTIONS), kvjax.Decoding(5)
  expected = kvjax.generate(
    MODEL, PARAMS, kvjax.reserve(cache, 64), prompts, decoding, keep=True
  )
  answer = kvjax.stream(
    MODEL, PARAMS, kvjax.reserve(cache, 64), prompts, decoding, keep=True
  )
  assert answer.generated is None
  tokens = np.stack(list(answer)).T
  np.testing.assert_array_equal(tokens, expected.tokens)
  np.testing.assert_array_equal(answer.generated.tokens, expected.tokens)
  one, other = answer.generated.cache, expected.cache
  jax.tree.map(np.testing.assert_array_equal, one, other)


def test_a_stream_passes_an_error_on_and_has_ended(full):
  cache, _ = full

  class Broken(TinyModel):
    def logits(self, params, hidden):
      raise RuntimeError("no logits")

  model = Broken(MODEL.geometry)
  questions, decoding = kvjax.Prompts.of(QUESTIONS), kvjax.Decoding(2)
  answer = kvjax.stream(model, PARAMS, cache, questions, decoding)
  with pytest.raises(RuntimeError, match="no logits"):
    next(answer)
  assert list(answer) == []


def test_parts_of_a_cache_are_copies(full):
  cache, _ = full
  theirs = {id(leaf) for leaf in jax.tree.leaves(cache)}
  for count in (1, 3):
    parts = kvjax.unstack(cache, count)
    assert not theirs & {id(leaf) for leaf in jax.tree.leaves(parts)}
    jax.tree.map(np.testing.assert_array_equal, kvjax.stack(parts), cache)
  with pytest.raises(InputError, match="3 rows cannot be divided into 2"):
    kvjax.unstack(cache, 2)


def test_parts_of_a_cache_on_a_mesh_stay_on_it():
  plan = kvjax.Plan(KeyDiff(), kvjax.Tokens(4))
  rows = [row for row in (*ROWS, ROWS[0]) for _ in range(2)]
  with jax.set_mesh(parse_mesh("data:2,model:2")):
    cache, _ = kvjax.prefill(MODEL, PARAMS, kvjax.Prompts.of(rows), plan)
    parts = kvjax.unstack(cache, 2)
  for part in parts:
    keys = part.stacks[0].keys
    assert keys.sharding.spec == cache.stacks[0].keys.sharding.spec
    assert keys.addressable_shards[0].data.shape[1:3] == (2, 1)


def test_sampling_follows_the_distribution():
  logits = jnp.log(jnp.asarray([0.5, 0.3, 0.15, 0.05]))
  rows = jnp.broadcast_to(logits, (4000, 4))
  seeds = jnp.arange(4000)
  places = jnp.zeros(4000, jnp.int32)

  def draw(sampling):
    return sample(rows, SamplingInputs.of(sampling), seeds, places)

  drawn = draw(Sampling(1.0))
  shares = np.bincount(drawn, minlength=4) / 4000
  np.testing.assert_allclose(shares, [0.5, 0.3, 0.15, 0.05], atol=0.03)
  # 0.5 + 0.3 reaches 0.6: two tokens stay, in their ratio.
  drawn = draw(Sampling(1.0, top_p=0.6))
  shares = np.bincount(drawn, minlength=4) / 4000
  np.testing.assert_allclose(shares, [0.625, 0.375, 0, 0], atol=0.03)
  drawn = draw(Sampling(1.0, top_k=2))
  assert set(np.unique(drawn)) == set(np.argsort(rows[0])[-2:].tolist())
  cold = draw(Sampling(0.01))
  assert np.all(np.asarray(cold) == 0)


# The last one is 0 in float32.
@pytest.mark.parametrize("top_p", [1.0, 0.9, 1e-50])
def test_the_lowest_temperatures_take_the_most_likely_token(top_p):
  logits = jnp.asarray([[5.0, 9.0, 30.0, 8.0]] * 3)
  # A tiny `top_p` leaves the most likely token at any temperature.
  for temperature in (1e-38, 1e-300, *([1.0, 50.0] if top_p < 0.5 else [])):
    inputs = SamplingInputs.of(Sampling(temperature, top_p))
    drawn = sample(logits, inputs, jnp.arange(3), jnp.zeros(3, jnp.int32))
    assert drawn.tolist() == [2, 2, 2]


@pytest.mark.parametrize("top_k", [0, 4])
def test_numbers_of_sampling_draw_as_constants_of_a_program(top_k):
  logits = 5 * jax.random.normal(jax.random.key(0), (64, 50))
  seeds, places = jnp.arange(64), jnp.zeros(64, jnp.int32)
  draw = jax.jit(lambda inputs: sample(logits, inputs, seeds, places))
  for temperature, top_p in ((0.3, 1.0), (0.7, 1.0), (0.7, 0.9), (1.9, 0.5)):
    sampling = Sampling(temperature, top_p, top_k)
    left = jax.jit(functools.partial(divided, sampling=sampling))(logits)
    np.testing.assert_array_equal(
      draw(SamplingInputs.of(sampling)),
      jax.vmap(drawn_from)(left, seeds, places),
    )
  # One without `top_p`, and one with it.
  assert draw._cache_size() == 2


def divided(logits, sampling):
  """Logits of what may be drawn, by the numbers as they are."""
  logits = logits / sampling.temperature
  if sampling.top_k:
    least = jnp.sort(logits)[:, -sampling.top_k, None]
    logits = jnp.where(logits >= least, logits, -jnp.inf)
  order = jnp.argsort(-logits)
  share = jax.nn.softmax(jnp.take_along_axis(logits, order, axis=1))
  kept = jnp.cumsum(share, axis=1) - share < sampling.top_p
  kept = jnp.take_along_axis(kept, jnp.argsort(order), axis=1)
  return jnp.where(kept, logits, -jnp.inf)


def drawn_from(logits, seed, place):
  key = jax.random.fold_in(jax.random.key(seed), place)
  return jax.random.categorical(key, logits)


def test_other_temperatures_and_shares_take_no_new_program(full):
  cache, _ = full

  def rows(sampling):
    prompts = kvjax.Prompts.of(QUESTIONS)
    decoding = kvjax.Decoding(5, sampling=sampling)
    return kvjax.generate(MODEL, PARAMS, cache, prompts, decoding).rows()

  programs = generating._generate_and_discard._cache_size
  sizes, answers = [], []
  for samplings in (
    [Sampling(heat) for heat in (0.01, 2.0, 20.0)],
    [Sampling(900.0, share) for share in (0.01, 0.9)],
    [Sampling(), Sampling(0.0)],
  ):
    before = programs()
    answers.append([rows(sampling) for sampling in samplings])
    sizes.append(programs() - before)
  assert max(sizes) <= 1
  greedy = answers[2][0]
  cold, warm, warmer = answers[0]
  assert cold == greedy != warm != warmer
  # Few tokens to draw from are as good as the cold.
  assert answers[1][0] == greedy != answers[1][1]
