"""DuoAttention: which heads stream, what they keep, and the memory of it."""

import re

import numpy as np
import pytest

import kvjax
from kvjax.allocation import Sizes, StreamingHeads
from kvjax.errors import InputError
from kvjax.prompts import bucket_lengths
from kvjax.testing import TinyModel, kept_positions

MODEL = TinyModel(kvjax.Geometry.uniform(3, 4, 2, 8, 4096))
PARAMS = MODEL.init()
ROWS = [
  np.random.default_rng(n).permutation(64)[:n].tolist() for n in (60, 33, 7)
]
# Ties go to the lower layer, then to the lower head.
GATES = [[0.9, 0.2], [0.2, 0.7], [0.5, 0.2]]
ORDER = [(0, 1), (1, 0), (2, 1), (2, 0), (1, 1), (0, 0)]
SINKS, KEEP = 3, 10


@pytest.fixture
def path(tmp_path):
  file = tmp_path / "full_attention_heads.tsv"
  np.savetxt(file, GATES, delimiter="\t")
  return file


def kept(name, budget, **options):
  plan = kvjax.get_plan(name, budget, **options)
  cache, _ = kvjax.prefill(MODEL, PARAMS, kvjax.Prompts.of(ROWS), plan)
  return cache, [kept_positions(cache, row) for row in range(len(ROWS))]


def named(path, **options):
  options = {"sinks": SINKS, "keep": KEEP, **options}
  given = "".join(f":{name}={value}" for name, value in options.items())
  return f"duoattention:pattern={path}{given}"


@pytest.mark.parametrize("budget", [0.3, 0.5, 0.8, 1.0, 5, 12, 40])
def test_as_many_heads_stream_as_the_budget_requires(budget, path):
  limit = (
    kvjax.Tokens(budget) if isinstance(budget, int) else kvjax.Retention(budget)
  )
  _, rows = kept(named(path), limit)
  for row, layers in zip(ROWS, rows, strict=True):
    n, most = len(row), limit.num_kept(len(row))
    sizes = [len(layers[layer][head]) for layer, head in ORDER]
    assert sum(sizes) <= 6 * most
    if most <= KEEP:
      assert sizes == [min(most, n)] * 6
      continue
    # One head fewer would be too much.
    streaming = sum(size < n for size in sizes)
    assert sizes == [KEEP] * streaming + [n] * (6 - streaming)
    assert not streaming or sum(sizes) + n - KEEP > 6 * most
    for layer, head in ORDER[:streaming]:
      expected = [*range(SINKS), *range(n - KEEP + SINKS, n)]
      assert layers[layer][head] == expected


@pytest.mark.parametrize("budget", [1, 2, 4, 7, 9])
def test_a_small_budget_is_shared_by_sinks_and_recent_tokens(budget, path):
  _, rows = kept(named(path), kvjax.Tokens(budget))
  for row, layers in zip(ROWS, rows, strict=True):
    n, first = len(row), min(SINKS, budget // 2)
    expected = [*range(first), *range(n - budget + first, n)]
    if budget >= n:
      expected = [*range(n)]
    assert {tuple(head) for layer in layers for head in layer} == {
      tuple(expected)
    }


@pytest.mark.parametrize(("share", "streaming"), [(0.3, 2), (0.5, 3), (1.0, 6)])
def test_a_share_of_heads_streams_whatever_the_budget(share, streaming, path):
  _, rows = kept(named(path, share=share), kvjax.Retention(0.9))
  for row, layers in zip(ROWS, rows, strict=True):
    sizes = [len(layers[layer][head]) for layer, head in ORDER]
    least = min(KEEP, len(row))
    assert sizes == [least] * streaming + [len(row)] * (6 - streaming)


def test_what_streaming_heads_evict_is_freed(path):
  prompts = kvjax.Prompts.of([ROWS[0] * 20])
  plans = [
    kvjax.get_plan(name, kvjax.Retention(0.5))
    for name in ("full", named(path, share=1 / 3), named(path, share=1.0))
  ]
  caches, _ = kvjax.sweep(MODEL, PARAMS, prompts, plans)
  full, third, none = (cache.nbytes for cache in caches)
  # Two of six heads keep 10 of 1200 tokens; layers round their sizes up.
  assert third < 0.75 * full
  assert none < 0.1 * full


def test_query_heads_have_the_gate_of_their_group(path):
  _, rows = kept(
    named(path, share=0.5), kvjax.Retention(0.5), per_query_head=True
  )
  sizes = np.array([[len(head) for head in layer] for layer in rows[0]])
  expected = np.full((3, 4), 60)
  for layer, head in ORDER[:3]:
    expected[layer, 2 * head : 2 * head + 2] = KEEP
  np.testing.assert_array_equal(sizes, expected)


def test_another_method_may_choose_in_streaming_heads(path):
  plan = kvjax.Plan(
    kvjax.get_method("keydiff"),
    kvjax.Retention(0.5),
    allocation=StreamingHeads(str(path), KEEP),
  )
  cache, _ = kvjax.prefill(MODEL, PARAMS, kvjax.Prompts.of(ROWS), plan)
  layers = kept_positions(cache, 0)
  assert len(layers[0][1]) == KEEP
  assert layers[0][1] != [*range(60 - KEEP, 60)]


def test_capacities_hold_every_length_of_a_bucket(path):
  spread, sizes = StreamingHeads(str(path), KEEP), Sizes((2, 2, 2))
  for budget in (kvjax.Retention(0.5), kvjax.Tokens(20)):
    counts = spread.counts(budget, np.array(bucket_lengths(64)), sizes)
    capacities = spread.capacities(budget, 64, sizes)
    assert (capacities[:, None] >= counts).all()


def test_too_much_protection_is_refused(path):
  mask = [i < 12 for i in range(60)]
  prompts = kvjax.Prompts.of(ROWS[:1], protected=[mask])
  plan = kvjax.get_plan(named(path), kvjax.Retention(0.5))
  with pytest.raises(InputError, match="streaming head keeps 10"):
    kvjax.prefill(MODEL, PARAMS, prompts, plan)


@pytest.mark.parametrize(
  ("text", "match"),
  [
    ("0.5\t0.5\n0.1\t0.2\n", "for 2 layers with 2 KV heads"),
    ("0.5\n0.1\n0.2\n", "for 3 layers with 1 KV heads"),
    ("a\tb\n", "must have a line for each layer"),
    ("0.5\tnan\n", "must have a line for each layer"),
    ("0.5\t0.5\n0.5\n", "must have a line for each layer"),
    ("", "must have a line for each layer"),
  ],
)
@pytest.mark.filterwarnings("ignore:loadtxt")
def test_a_pattern_that_does_not_fit_is_refused(text, match, tmp_path):
  file = tmp_path / "gates.tsv"
  file.write_text(text)
  with pytest.raises(InputError, match=re.escape(match)):
    kept(f"duoattention:pattern={file}", kvjax.Retention(0.5))


def test_a_pattern_that_is_written_again_is_read_again(path):
  budget = kvjax.Retention(0.5)
  _, before = kept(named(path), budget)
  np.savetxt(path, 1 - np.array(GATES), delimiter="\t")
  _, after = kept(named(path), budget)
  fewer, more = ([len(x) for x in rows[0][0]] for rows in (before, after))
  # The first head of the first layer was the last to stream.
  assert (fewer[0], more[0]) == (len(ROWS[0]), KEEP)


def test_a_model_with_local_layers_is_refused(path):
  layer = kvjax.LayerSpec(4, 2, 8)
  local = kvjax.LayerSpec(4, 2, 8, window=8)
  model = TinyModel(kvjax.Geometry((layer, layer, local), 4096))
  plan = kvjax.get_plan(named(path), kvjax.Retention(0.5))
  with pytest.raises(InputError, match="attend to the whole context"):
    kvjax.prefill(model, model.init(), kvjax.Prompts.of(ROWS), plan)


def test_a_file_that_is_not_there_is_refused():
  with pytest.raises(InputError, match="nowhere"):
    kvjax.get_plan("duoattention:pattern=nowhere", kvjax.Retention(0.5))
