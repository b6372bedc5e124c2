"""What callers give: refused in one sentence, or taken as it is meant."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax.errors import InputError
from kvjax.methods import H2O, SnapKV
from kvjax.testing import TinyModel, kept_positions

MODEL = TinyModel()
PARAMS = MODEL.init()
ROWS = [np.random.default_rng(n).permutation(64)[:n].tolist() for n in (50, 9)]
PROMPTS = kvjax.Prompts.of(ROWS)
QUESTIONS = kvjax.Prompts.of([[5, 3], [8]])
KEYDIFF = kvjax.get_plan("keydiff", kvjax.Tokens(9))


def prefilled(plan):
  return kvjax.prefill(MODEL, PARAMS, PROMPTS, plan)[0]


@pytest.mark.usefixtures("untyped")
@pytest.mark.parametrize(
  ("make", "said"),
  [
    (lambda: kvjax.Tokens(2.5), "A budget in tokens must be a whole number"),
    (lambda: kvjax.Tokens(0.5), r"give the share 0.5 as kvjax.Retention\(0.5"),
    (lambda: kvjax.Tokens("512"), "in tokens must be a number; '512' is not"),
    (lambda: kvjax.Retention("0.5"), "A retention must be a number; '0.5' is"),
    (lambda: kvjax.Sampling("0.7"), "temperature must be a number; '0.7' is"),
    (lambda: kvjax.Sampling(top_p="1"), "top_p must be a number; '1' is not"),
    (lambda: kvjax.Sampling(top_p=0.9), "change nothing at a temperature of 0"),
    (lambda: kvjax.Sampling(0.0, top_k=5), "give a temperature, such as 1.0"),
    (lambda: kvjax.Decoding(True), "whole number, 1 or more; True is not"),
    (lambda: kvjax.Schedule(block=2.5), "block must be a whole number"),
    (lambda: kvjax.Schedule(every=1.5), "every must be a whole number"),
    (lambda: kvjax.Sampling(1.0, top_k=2.5), "top_k must be a whole number"),
    (lambda: kvjax.Decoding(4, ["</s>"]), "as in .2.; '</s>' is not one"),
    (lambda: kvjax.Decoding(4, [2.5]), "must be token ids, .* 2.5 is not one"),
    (
      lambda: kvjax.Decoding(4, [None]),
      "must be token ids, .* None is not one",
    ),
    (lambda: kvjax.Decoding(4, np.array([2.0])), "must be token ids, as in"),
    (
      lambda: kvjax.Prompts.of([[1.7, 2.2]]),
      "ids must be whole numbers; those of .1.7",
    ),
    (lambda: kvjax.Prompts.of([[[1], [2]]]), "whole numbers; those of ..1., "),
    (lambda: kvjax.Prompts.of([[1], [2, [3]]]), "numbers; those of .2, .3.. "),
    (
      lambda: kvjax.Prompts.of([[3, -1]]),
      "must be 0 or more, and .* of .3, -1",
    ),
    (
      lambda: kvjax.Prompts.of([[2**31]]),
      "0 or more, and below .* of .2147483",
    ),
  ],
)
def test_numbers_that_are_not_whole_or_too_large(make, said):
  with pytest.raises(InputError, match=said):
    make()


@pytest.mark.usefixtures("untyped")
def test_methods_are_no_names():
  method = kvjax.get_method("keydiff")
  said = r"takes a name such as 'keydiff', not KeyDiff.* kvjax\.Plan\(method, "
  with pytest.raises(InputError, match=said):
    kvjax.get_plan(method, kvjax.Tokens(9))


def test_chunks_have_no_chunks():
  inner = kvjax.methods.Chunked(kvjax.get_method("keydiff"), 32)
  with pytest.raises(InputError, match="chunked/keydiff keeps its own"):
    kvjax.methods.Chunked(inner, 64)


@pytest.mark.usefixtures("untyped")
@pytest.mark.parametrize(
  "stops",
  [np.array([2, 3]), jnp.array([2, 3]), [np.int64(2), jnp.int32(3)]],
  ids=["NumPy", "JAX", "scalars"],
)
def test_stop_ids_may_be_integers_of_arrays(stops):
  decoding = kvjax.Decoding(4, stops)
  assert decoding == kvjax.Decoding(4, (2, 3))
  assert {*map(type, decoding.stop_ids)} == {int}
  assert hash(decoding) == hash(kvjax.Decoding(4, (2, 3)))


@pytest.mark.usefixtures("untyped")
@pytest.mark.parametrize("seeds", [[1, 2**31], [-(2**31) - 1, 0], [0.5, 1.0]])
def test_seeds_are_whole_numbers_in_range(seeds):
  cache = prefilled(kvjax.get_plan("keydiff", kvjax.Tokens(9)))
  sampling = kvjax.Sampling(1.0)
  for caches in (cache, [cache, cache]):
    with pytest.raises(InputError, match="Seeds must be whole numbers of 32"):
      kvjax.generate(
        MODEL,
        PARAMS,
        caches,
        QUESTIONS,
        kvjax.Decoding(2, sampling=sampling),
        seeds=seeds,
      )


def test_tokens_that_a_model_does_not_embed():
  plan = kvjax.get_plan("keydiff", kvjax.Tokens(9))
  blocks = kvjax.get_plan(
    "keydiff", kvjax.Tokens(9), schedule=kvjax.Schedule(block=8)
  )
  cache, _ = kvjax.prefill(MODEL, PARAMS, PROMPTS, plan)
  # What follows the end of a row is arbitrary.
  last = PROMPTS.tokens.shape[1] - 1
  tokens = np.array(PROMPTS.tokens)
  tokens[:, last] = 10**6
  padded = dataclasses.replace(PROMPTS, tokens=tokens)
  kvjax.prefill(MODEL, PARAMS, padded, plan)
  wrong = kvjax.Prompts.of([[5, 64], [1]])
  for call in (
    lambda: kvjax.prefill(MODEL, PARAMS, wrong, plan),
    lambda: kvjax.prefill(MODEL, PARAMS, wrong, blocks),
    lambda: kvjax.sweep(MODEL, PARAMS, wrong, [plan, plan]),
    lambda: kvjax.generate(MODEL, PARAMS, cache, wrong, kvjax.Decoding(2)),
    lambda: list(kvjax.stream(MODEL, PARAMS, cache, wrong, kvjax.Decoding(2))),
    lambda: kvjax.negative_log_likelihood(MODEL, PARAMS, wrong),
    lambda: kvjax.answer_nll(MODEL, PARAMS, cache, QUESTIONS, wrong),
    lambda: kvjax.calibrate_queries(MODEL, PARAMS, [[*range(9)], [64] * 9]),
  ):
    with pytest.raises(InputError, match="no token 64: this model embeds 64"):
      call()


def test_a_cache_on_the_host_decodes_and_joins(tmp_path):
  cache = prefilled(kvjax.get_plan("keydiff", kvjax.Tokens(9)))
  host = jax.device_get(cache)
  decoding = kvjax.Decoding(6)

  def rows(given):
    answers = kvjax.generate(MODEL, PARAMS, given, QUESTIONS, decoding)
    if isinstance(given, list):
      return [answer.rows() for answer in answers]
    return answers.rows()

  expected = rows(cache)
  assert rows(host) == expected
  assert rows([host, host]) == [expected] * 2
  kvjax.save_cache(host, tmp_path / "cache", model=MODEL, model_id="tiny")
  loaded = kvjax.load_cache(tmp_path / "cache", model=MODEL, model_id="tiny")
  assert rows(loaded) == expected


def test_an_allocation_that_is_named_can_be_saved(tmp_path):
  plan = kvjax.Plan(
    kvjax.get_method("keydiff"),
    kvjax.Tokens(9),
    schedule=kvjax.Schedule(every=4),
    allocation=kvjax.allocation.Uniform(),
  )
  cache = prefilled(plan)
  kvjax.save_cache(cache, tmp_path / "cache", model=MODEL, model_id="tiny")
  loaded = kvjax.load_cache(tmp_path / "cache", model=MODEL, model_id="tiny")
  assert loaded.plan == plan


class Patient:
  """Leaves layer 0 whole."""

  @property
  def traits(self):
    return dataclasses.replace(
      super().traits, keeps_layers=(0,), even="it leaves layers whole"
    )


@dataclasses.dataclass(frozen=True)
class PatientH2O(Patient, H2O):
  """Accumulates attention."""


@dataclasses.dataclass(frozen=True)
class PatientSnapKV(Patient, SnapKV):
  """Stores queries."""


@pytest.mark.parametrize("method", [PatientH2O(), PatientSnapKV(window=4)])
@pytest.mark.parametrize(
  "schedule",
  [kvjax.Schedule(block=16), kvjax.Schedule(block=16, every=4)],
  ids=str,
)
def test_methods_with_memory_may_leave_layers_whole(method, schedule):
  plan = kvjax.Plan(method, kvjax.Tokens(20), schedule=schedule)
  cache, logits = kvjax.prefill(MODEL, PARAMS, PROMPTS, plan)
  for row, tokens in enumerate(ROWS):
    first, *others = kept_positions(cache, row)
    assert first == [[*range(len(tokens))]] * len(first)
    for layer in others:
      assert {len(head) for head in layer} == {min(20, len(tokens))}
  answers = kvjax.generate(MODEL, PARAMS, cache, logits, kvjax.Decoding(9))
  assert all(len(row) == 9 for row in answers.rows())


WINDOWS = TinyModel(
  kvjax.Geometry((kvjax.LayerSpec(4, 2, 8, window=8),) * 2, 4096)
)


@pytest.mark.filterwarnings("ignore::kvjax.InputWarning")
@pytest.mark.parametrize(
  "name", ["keydiff", "kvzip", "simlayerkv", "pyramidkv", "lagkv"]
)
def test_a_model_of_windows_alone_has_nothing_to_compress(name):
  params = WINDOWS.init()
  protected = [[place < 2 for place in range(len(row))] for row in ROWS]
  answers = []
  for method, mask in ((name, None), (name, protected), ("full", None)):
    prompts = kvjax.Prompts.of(ROWS, protected=mask)
    plan = kvjax.get_plan(method, kvjax.Retention(0.5))
    cache, logits = kvjax.prefill(WINDOWS, params, prompts, plan)
    decoding = kvjax.Decoding(5)
    answers.append(
      kvjax.generate(WINDOWS, params, cache, logits, decoding).rows()
    )
  assert answers[0] == answers[1] == answers[2]


def test_the_room_that_is_said_to_suffice_does():
  plan = kvjax.get_plan(
    "tova", kvjax.Tokens(40), schedule=kvjax.Schedule(every=4)
  )
  question = kvjax.Prompts.of([[5, 6]], padded=8)

  def turns(slots):
    cache, _ = kvjax.prefill(MODEL, PARAMS, kvjax.Prompts.of([[1, 2, 3]]), plan)
    cache = kvjax.reserve(cache, slots - cache.layer(0).capacity)
    for _ in range(9):
      cache = kvjax.generate(
        MODEL, PARAMS, cache, question, kvjax.Decoding(8), keep=True
      ).cache
    return cache

  # The budget, a padded prompt and `every` tokens.
  cache = turns(40 + 8 + 4)
  assert cache.lengths[0].tolist() == [[40, 40]]
  with pytest.raises(InputError, match="free slots and the cache has"):
    turns(40)


def test_what_a_turn_needs_is_said_with_its_padding():
  cache = kvjax.reserve(prefilled(KEYDIFF), 7)
  question = kvjax.Prompts.of([[1, 2, 3]] * 2)
  said = "need 36 free slots .* has 7: the prompt takes 32 with its padding; gi"
  with pytest.raises(InputError, match=said):
    kvjax.generate(MODEL, PARAMS, cache, question, kvjax.Decoding(4), keep=True)


@pytest.mark.usefixtures("untyped")
def test_numbers_of_numpy_are_saved_like_others(tmp_path):
  tokens = kvjax.Tokens(np.int64(9))
  half = kvjax.Retention(np.float32(0.5))
  threshold = kvjax.Threshold(np.float32(-4), np.int64(8))
  schedule = kvjax.Schedule(np.int64(8), np.int32(9), np.int64(4))
  for options in (tokens, half, threshold, schedule):
    values = dataclasses.asdict(options).values()
    assert {*map(type, values)} <= {int, float, str}
  cache = prefilled(kvjax.get_plan("keydiff", tokens, schedule=schedule))
  kvjax.save_cache(cache, tmp_path / "cache", model=MODEL, model_id="tiny")
  loaded = kvjax.load_cache(tmp_path / "cache", model=MODEL, model_id="tiny")
  assert loaded.plan == cache.plan


@pytest.mark.usefixtures("untyped")
def test_a_prefill_takes_a_plan():
  with pytest.raises(
    InputError, match=r"takes a plan, .* 'keydiff' is not one"
  ):
    kvjax.prefill(MODEL, PARAMS, PROMPTS, "keydiff")


@pytest.mark.usefixtures("untyped")
def test_a_pair_that_a_prefill_returned_is_told_to_be_taken_apart():
  pair = kvjax.prefill(MODEL, PARAMS, PROMPTS, KEYDIFF)
  decoding = kvjax.Decoding(2)
  for call in (
    lambda: kvjax.generate(MODEL, PARAMS, pair, QUESTIONS, decoding),
    lambda: kvjax.generate(MODEL, PARAMS, None, QUESTIONS, decoding),
    lambda: kvjax.stream(MODEL, PARAMS, pair, QUESTIONS, decoding),
    lambda: kvjax.answer_nll(MODEL, PARAMS, pair, QUESTIONS, QUESTIONS),
    lambda: kvjax.recited(MODEL, PARAMS, PROMPTS, pair[0], pair),
    lambda: kvjax.recited(MODEL, PARAMS, PROMPTS, pair, [pair[0]]),
  ):
    with pytest.raises(InputError, match=r"as in `cache, logits = kvjax.prefi"):
      call()


@pytest.mark.usefixtures("untyped")
def test_how_to_decode_is_said_by_its_options():
  cache = prefilled(KEYDIFF)
  for caches in (cache, [cache]):
    with pytest.raises(InputError, match=r"kvjax.Decoding\(.*; 4 is not one"):
      kvjax.generate(MODEL, PARAMS, caches, QUESTIONS, 4)
  with pytest.raises(InputError, match=r"; 4 is not one"):
    list(kvjax.stream(MODEL, PARAMS, cache, QUESTIONS, 4))
  with pytest.raises(
    InputError, match=r"by a kvjax.Sampling, .* 'greedy' is n"
  ):
    kvjax.Decoding(4, sampling="greedy")


def test_plans_of_a_sweep_may_come_one_by_one():
  plans = [kvjax.get_plan("keydiff", kvjax.Tokens(count)) for count in (9, 7)]
  expected, _ = kvjax.sweep(MODEL, PARAMS, PROMPTS, plans)
  found, _ = kvjax.sweep(MODEL, PARAMS, PROMPTS, (plan for plan in plans))
  assert [kept_positions(cache, 0) for cache in found] == [
    kept_positions(cache, 0) for cache in expected
  ]
  measured = kvjax.measured_sweep(MODEL, PARAMS, PROMPTS, iter(plans))
  assert len(measured.caches) == len(measured.features) == 2


@pytest.mark.parametrize(
  ("name", "said"),
  [
    ("key_norm:skip_layers=99", "key_norm leaves layer 99 whole, .* is 1"),
    ("lagkv.key_norm:skip_layers=0+2", "lagkv leaves layer 2 whole"),
    ("quest:dense_layers=99", "quest leaves layer 99 whole, .* layer is 1"),
  ],
)
def test_layers_that_a_model_does_not_have_are_refused(name, said):
  plan = kvjax.get_plan(name, kvjax.Tokens(9))
  with pytest.raises(InputError, match=said):
    prefilled(plan)


def test_traits_name_no_negative_layer():
  with pytest.raises(InputError, match=r"keeps whole must be .* -1 is not"):
    kvjax.methods.Traits(keeps_layers=(-1,))


@pytest.mark.parametrize(
  ("names", "kind", "said"),
  [
    (("data", "model"), "Explicit", "has data: Explicit, model: Explicit"),
    (("model", "rows"), "Auto", "has model: Auto, rows: Auto"),
  ],
  ids=["by default", "other axes"],
)
def test_meshes_of_other_axes_are_refused(names, kind, said):
  """Those of `jax.make_mesh` are explicit by default."""
  kinds = (jax.sharding.AxisType[kind],) * 2
  mesh = jax.make_mesh((1, 1), names, kinds)
  plan = kvjax.get_plan("keydiff", kvjax.Tokens(9))
  for run in (
    lambda: kvjax.prefill(MODEL, PARAMS, PROMPTS, plan),
    lambda: kvjax.sweep(MODEL, PARAMS, PROMPTS, [plan]),
    lambda: kvjax.load("reference", mesh=mesh),
  ):
    with jax.set_mesh(mesh), pytest.raises(InputError, match=said):
      run()


def test_eight_bits_where_keys_are_read_as_computed():
  keydiff, budget = kvjax.get_method("keydiff"), kvjax.Tokens(20)
  with pytest.raises(InputError, match="one of int8, fp8; 'int4' is not"):
    kvjax.Plan(keydiff, budget, kv_dtype="int4")
  both = kvjax.Schedule(block=8, every=4)
  with pytest.raises(InputError, match="decoding where they are stored in fp8"):
    kvjax.Plan(keydiff, budget, schedule=both, kv_dtype="fp8")
  with pytest.raises(InputError, match="flat retrieves keys as they were"):
    kvjax.get_plan("flat/keydiff@8", budget, kv_dtype="int8")
  assert kvjax.get_plan("keydiff", budget, kv_dtype="int8").kv_dtype == "int8"
