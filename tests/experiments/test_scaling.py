"""How methods scale: exponents, tables, and memory of compiled programs."""

import math

import pytest

import kvjax
from kvjax.errors import InputError
from kvjax.experiments.report import pictures
from kvjax.experiments.timing import layer_compression, scaling
from kvjax.experiments.timing.scaling import Scaled
from kvjax.model import Geometry

HEADS = (4, 2, 16)
# Whole-prompt methods that need no model.
METHODS = (
  *("random", "streaming", "key_norm", "h2o", "tova", "snapkv", "adakv"),
  *("chunkkv", "keydiff", "lagkv:lag=128", "compactor", "leverage"),
  *("noncausal", "protokv", "cur", "qfilters", "rkv"),
)


def plan_of(name):
  return kvjax.get_plan(name, kvjax.Retention(0.25))


def test_an_exponent_is_that_of_the_longer_half():
  assert scaling.slope({1: 9.0, 2: 9.0, 4: 3.0, 8: 12.0}) == pytest.approx(2.0)
  assert scaling.slope({8: 12.0, 4: 12.0}) == pytest.approx(0.0)
  assert math.isnan(scaling.slope({1: 1.0, 2: 0.0}))


def test_a_table_has_the_fastest_first():
  results = [
    Scaled("a", {1024: 0.002, 2048: 0.008}, {1024: 2**20, 2048: 2**21}),
    Scaled("b", {1024: 0.004, 2048: 0.004}, {1024: 0, 2048: 0}),
  ]
  assert scaling.table(results).lines == [
    ("b", "4.0", "4.0", "0.00", "0.0", "–"),
    ("a", "2.0", "8.0", "2.00", "2.0", "1.00"),
  ]
  assert len(scaling.picture(results).axes) == 2


def test_attention_is_what_the_others_are_shares_of():
  results = [
    Scaled("a", {64: 0.001, 128: 0.002}, {64: 1, 128: 2}),
    Scaled(scaling.ATTENTION, {64: 0.01, 128: 0.04}, {64: 1, 128: 2}),
  ]
  found = scaling.table(results)
  assert list(found.header)[3] == "% of attention"
  assert [line[3] for line in found.lines] == ["5.0", "100.0"]


@pytest.mark.slow
@pytest.mark.parametrize("name", METHODS)
def test_scoring_takes_memory_linear_in_the_prompt(name):
  """From compiled programs: no method makes an array of n x n."""
  compression = layer_compression.Compression(plan_of(name))
  shorter, longer = (
    compression.temporary_bytes(Geometry.uniform(1, *HEADS, length), length)
    for length in (8192, 16384)
  )
  # Tiles have a fixed size or are linear.
  assert longer <= 2.1 * shorter + 2**16


@pytest.mark.parametrize(("name", "copies"), [("key_norm", 0), ("keydiff", 1)])
def test_scores_of_keys_copy_them_no_more_than_needed(name, copies):
  """A mask of empty slots would copy all keys; KeyDiff's mean needs one."""
  _, kv_heads, dim = HEADS
  compression = layer_compression.Compression(plan_of(name))
  taken = compression.temporary_bytes(Geometry.uniform(1, *HEADS, 8192), 8192)
  keys = kv_heads * 8192 * dim * 4
  assert taken <= (copies + 0.1) * keys


@pytest.mark.slow
def test_methods_take_turns_at_each_length():
  operations = {
    name: layer_compression.Compression(plan_of(name))
    for name in ("keydiff", "snapkv:window=8")
  }
  operations[scaling.ATTENTION] = layer_compression.Attention()
  results = scaling.measure(operations, HEADS, [64, 128], 1, "bfloat16")
  assert [one.name for one in results] == list(operations)
  for one in results:
    assert list(one.seconds) == list(one.temporary) == [64, 128]
    assert min(one.seconds.values()) > 0


def test_what_is_wrong_is_one_sentence(refusal):
  for argument, sentence in {
    "--methods=": "--methods is empty",
    "--methods=full": "full keeps all keys",
    "--length=64": "needs two lengths or more",
  }.items():
    told = refusal("kvjax.experiments.benchmark_scaling", argument)
    assert sentence in told


@pytest.mark.parametrize(
  ("name", "sentence"),
  [
    ("quest", "quest keeps all keys"),
    ("kvzip", "kvzip needs more than one layer"),
    ("triattention.code", "triattention.code needs more than one layer"),
    ("expected_attention", "reads .*, which only a model has"),
    ("criticalkv", "reads .*, which only a model has"),
  ],
)
def test_what_a_layer_alone_cannot_do_is_refused(name, sentence):
  with pytest.raises(InputError, match=sentence):
    layer_compression.check(name, plan_of(name))


@pytest.mark.parametrize("name", METHODS)
def test_other_methods_are_timed(name):
  layer_compression.check(name, plan_of(name))


def test_a_picture_has_room_for_nothing():
  nothing = Scaled("a", {1024: 0.002, 2048: 0.008}, {1024: 0, 2048: 0})
  assert pictures.png(scaling.picture([nothing]))
