"""Budgets that are thresholds of scores."""

import dataclasses
import math
import re
import subprocess
import sys

import jax
import numpy as np
import pytest
import replayed
import safetensors.numpy
from made_up_gates import (
  kvzap_tensors,
  made_up_fast_kvzip,
  made_up_kvzap,
  write_kvzap,
)

import kvjax
from kvjax.cache.packed import PAGE
from kvjax.cache.pooled import PooledLayers
from kvjax.cache.sharding import parse_mesh
from kvjax.engine.thresholds import _rounded
from kvjax.errors import InputError, InputWarning
from kvjax.methods import ScoringMethod
from kvjax.methods.traits import Traits
from kvjax.model import Geometry
from kvjax.testing import TinyModel, kept_positions, poison_cache

LAYERS, KV_HEADS, WIDTH, VOCABULARY = 3, 2, 32, 512
MODEL = TinyModel(Geometry.uniform(LAYERS, 4, KV_HEADS, 8, 4096), VOCABULARY)
PARAMS = MODEL.init()
LENGTHS = (261, 90, 40)
ROWS = [
  np.random.default_rng(n).integers(0, VOCABULARY, n).tolist() for n in LENGTHS
]
PROMPTS = kvjax.Prompts.of(ROWS)
QUESTIONS = kvjax.Prompts.of([[5, 6], [7], [1, 2, 3]])
DECODING = kvjax.Decoding(6)
EVERYTHING = [[list(range(n))] * KV_HEADS for n in LENGTHS]


@pytest.fixture(scope="module")
def name(tmp_path_factory):
  folder = tmp_path_factory.mktemp("gate")
  path = write_kvzap(folder, WIDTH, KV_HEADS, LAYERS, score_range=[-99, 99])
  return f"kvzap:gate={path}"


def caches(name, *thresholds, model=MODEL, prompts=PROMPTS, **options):
  plans = [kvjax.get_plan(name, t, **options) for t in thresholds]
  return kvjax.sweep(model, PARAMS, prompts, plans)[0]


@pytest.fixture(scope="module")
def inputs():
  """What each layer reads, by row: from a prefill that evicts nothing."""
  found = {}

  @dataclasses.dataclass(frozen=True)
  class Reader(ScoringMethod):
    @property
    def traits(self):
      return Traits(
        activations=frozenset({"inputs"}), whole_prompts_only="it reads"
      )

    def scores(self, layer, cache, activations):
      jax.debug.callback(
        lambda n, x: found.__setitem__(int(n), np.asarray(x, np.float64)),
        layer,
        activations.inputs,
      )
      return cache.keys[..., 0]

  plan = kvjax.Plan(Reader(), kvjax.Tokens(1))
  jax.block_until_ready(kvjax.prefill(MODEL, PARAMS, PROMPTS, plan)[0].stacks)
  jax.effects_barrier()
  return found


@pytest.fixture(scope="module")
def scores(inputs):
  """The scores of every layer and row, [K, n], in float64."""
  tensors = kvzap_tensors(WIDTH, KV_HEADS, LAYERS)
  weights = [
    (tensors[f"layers.{n}.weight"], tensors[f"layers.{n}.bias"])
    for n in range(LAYERS)
  ]
  return [
    [
      w.astype(np.float64) @ inputs[layer][row, :n].T + b[:, None]
      for layer, (w, b) in enumerate(weights)
    ]
    for row, n in enumerate(LENGTHS)
  ]


def reached_by(scores, share):
  """A threshold that this share of all scores reaches."""
  both = np.concatenate([np.ravel(x) for row in scores for x in row])
  return float(np.quantile(both, 1 - share))


@pytest.mark.parametrize(("share", "window"), [(0.5, 128), (0.3, 1), (0.1, 8)])
def test_each_head_keeps_what_reaches_it_and_the_last(
  name, scores, share, window
):
  least = reached_by(scores, share)
  (cache,) = caches(name, kvjax.Threshold(least, window))
  sizes = set()
  for row, length in enumerate(LENGTHS):
    stays = np.arange(length) >= length - window
    expected = [
      [np.flatnonzero(stays | (head >= least)).tolist() for head in layer]
      for layer in scores[row]
    ]
    assert kept_positions(cache, row) == expected
    sizes |= {len(head) for layer in expected for head in layer}
  assert len(sizes) > LAYERS
  assert isinstance(cache.stacks[0], PooledLayers)


def test_the_extremes_are_everything_and_the_window(name):
  full, rest, one = caches(
    name,
    kvjax.Threshold(-math.inf),
    kvjax.Threshold(math.inf, 11),
    kvjax.Threshold(math.inf, 1),
  )
  whole, window = kvjax.sweep(
    MODEL,
    PARAMS,
    PROMPTS,
    [
      kvjax.get_plan("full", kvjax.Retention(1.0)),
      kvjax.get_plan("streaming:sinks=0", kvjax.Tokens(11)),
    ],
  )[0]
  jax.tree.map(np.testing.assert_array_equal, full, whole)
  for row, length in enumerate(LENGTHS):
    assert kept_positions(rest, row) == kept_positions(window, row)
    assert kept_positions(one, row) == [[[length - 1]] * KV_HEADS] * LAYERS
  both = [
    kvjax.generate(MODEL, PARAMS, c, QUESTIONS, DECODING).rows()
    for c in (rest, window)
  ]
  assert both[0] == both[1]


def test_a_score_that_equals_the_threshold_is_kept(tmp_path):
  """A token is evicted if its score is less."""
  path = write_kvzap(tmp_path, WIDTH, KV_HEADS, LAYERS, score_range=[-9, -1])
  tensors = kvzap_tensors(WIDTH, KV_HEADS, LAYERS)
  equal = {
    tensor: np.full_like(array, -4 if tensor.endswith("bias") else 0)
    for tensor, array in tensors.items()
  }
  safetensors.numpy.save_file(equal, tmp_path / "model.safetensors")
  above = float(np.nextafter(np.float32(-4), np.float32(0)))
  every, window = caches(
    f"kvzap:gate={path}", kvjax.Threshold(-4.0, 9), kvjax.Threshold(above, 9)
  )
  for row, length in enumerate(LENGTHS):
    assert kept_positions(every, row) == [EVERYTHING[row]] * LAYERS
    last = [*range(length - 9, length)]
    assert kept_positions(window, row) == [[last] * KV_HEADS] * LAYERS


def test_what_a_method_protects_stays_below_a_threshold():
  gate = made_up_kvzap(WIDTH, KV_HEADS, LAYERS)
  fast = made_up_fast_kvzip(WIDTH, KV_HEADS, LAYERS)
  # No score reaches these thresholds.
  first = {
    (f"kvzap:gate={gate}", math.inf): (0, 0),
    (f"fast_kvzip:gate={fast}:recent=0.1", 1.0): (4, 4),
    ("kvzip:sinks=2", 1.0): (2, 2),
    # As many as are of the chat template.
    ("kvzip", 1.0): (0, 3),
  }
  rows = [ROWS[1], [7, 8, 9, *ROWS[2]]]
  request = kvjax.RepeatRequest(prefix=(7, 8, 9), first=(3, 4), suffix=(5,))
  prompts = kvjax.Prompts.of(rows, repeat_request=request)
  for (name, least), count in first.items():
    plan = kvjax.get_plan(name, kvjax.Threshold(least, 1))
    cache, _ = kvjax.prefill(MODEL, PARAMS, prompts, plan)
    for row, tokens in enumerate(rows):
      last = max(1, len(tokens) // 10) if name.startswith("fast") else 1
      stays = [*range(count[row]), *range(len(tokens) - last, len(tokens))]
      assert kept_positions(cache, row) == [[stays] * KV_HEADS] * LAYERS, name


def test_short_rows_are_kept_whole_beside_others(name, scores):
  (cache,) = caches(name, kvjax.Threshold(reached_by(scores, 0.2), 100))
  assert len(kept_positions(cache, 0)[0][0]) < LENGTHS[0]
  for row in (1, 2):
    assert kept_positions(cache, row) == [EVERYTHING[row]] * LAYERS


def test_a_row_stands_alone_and_protected_tokens_stay(name, scores):
  threshold = kvjax.Threshold(reached_by(scores, 0.2), 4)
  (together,) = caches(name, threshold)
  (alone,) = caches(name, threshold, prompts=kvjax.Prompts.of([ROWS[1]]))
  assert kept_positions(alone, 0) == kept_positions(together, 1)
  mask = [[p in (3, 30) for p in range(n)] for n in LENGTHS]
  prompts = kvjax.Prompts.of(ROWS, protected=mask)
  (protected,) = caches(name, threshold, prompts=prompts)
  for row in range(3):
    expected = [
      [sorted({*head, 3, 30}) for head in layer]
      for layer in kept_positions(together, row)
    ]
    assert kept_positions(protected, row) == expected


def test_memory_follows_what_is_kept(name, scores):
  tight, loose, full = (
    caches(name, kvjax.Threshold(reached_by(scores, share), 8))[0]
    for share in (0.2, 0.6, 1.0)
  )
  assert tight.nbytes < loose.nbytes < full.nbytes
  for cache in (tight, loose):
    heads = LAYERS * KV_HEADS
    kept = int(np.asarray(cache.lengths).sum(axis=(0, 2)).max())
    slots = cache.stacks[0].pages.positions[:, 0].size
    # Beyond the fullest row, a page to round up, one per head and layer.
    bound = kept + heads * PAGE + (heads + LAYERS) * PAGE
    assert kept <= slots <= bound


def test_sizes_are_few_and_waste_little():
  sizes = {count: _rounded(count) for count in range(1, 20_000)}
  for count, size in sizes.items():
    assert count <= size < count + max(PAGE, count / 16 + 1)
    assert size % PAGE == 0
  assert len({*sizes.values()}) <= 100


def test_empty_slots_may_hold_nan_and_eight_bits_keep_the_same(name, scores):
  threshold = kvjax.Threshold(reached_by(scores, 0.3), 8)
  (cache,), (small,) = (
    caches(name, threshold),
    caches(name, threshold, kv_dtype="int8"),
  )
  asked = [
    kvjax.generate(MODEL, PARAMS, c, QUESTIONS, DECODING).rows()
    for c in (cache, poison_cache(cache))
  ]
  assert asked[0] == asked[1]
  for row in range(3):
    assert kept_positions(small, row) == kept_positions(cache, row)


def test_query_heads_of_their_own_keep_what_their_group_does(name, scores):
  threshold = kvjax.Threshold(reached_by(scores, 0.3), 8)
  (cache,) = caches(name, threshold)
  (wide,) = caches(name, threshold, per_query_head=True)
  for row in range(3):
    assert kept_positions(wide, row) == [
      [head for head in layer for _ in range(2)]
      for layer in kept_positions(cache, row)
    ]


def test_four_devices_equal_one(name, scores):
  rows = kvjax.Prompts.of([*ROWS, ROWS[0][:99]])
  threshold = kvjax.Threshold(reached_by(scores, 0.3), 8)
  (one,) = caches(name, threshold, prompts=rows)
  with jax.set_mesh(parse_mesh("data:2,model:2")):
    (four,) = caches(name, threshold, prompts=rows)
    for row in range(4):
      assert kept_positions(four, row) == kept_positions(one, row)


def test_the_scores_of_a_replay_have_a_threshold_too():
  rows = [row[:n] for row, n in zip(ROWS, (40, 23, 31), strict=True)]
  request = kvjax.RepeatRequest(first=(3, 4), suffix=(5,))
  prompts = kvjax.Prompts.of(rows, repeat_request=request)
  method = kvjax.get_method("kvzip")
  found = [
    np.array(replayed.scores(MODEL, PARAMS, row, request, method.traits.replay))
    for row in rows
  ]
  least = float(np.quantile(np.concatenate(found, axis=-1), 0.8))
  plan = kvjax.get_plan("kvzip", kvjax.Threshold(least, 5))
  cache, _ = kvjax.prefill(MODEL, PARAMS, prompts, plan)
  for row, (of_row, tokens) in enumerate(zip(found, rows, strict=True)):
    groups = of_row.reshape(LAYERS, KV_HEADS, 2, -1).max(axis=2)
    stays = np.arange(len(tokens)) >= len(tokens) - 5
    expected = [
      [np.flatnonzero(stays | (head >= least)).tolist() for head in layer]
      for layer in groups
    ]
    assert kept_positions(cache, row) == expected


def test_a_sweep_waits_for_all_of_its_thresholds_at_once(
  name, scores, monkeypatch
):
  transfers = []

  def counted(tree):
    transfers.append(tree)
    return original(tree)

  original = jax.device_get
  thresholds = [kvjax.Threshold(reached_by(scores, s), 8) for s in (0.2, 0.5)]
  with monkeypatch.context() as patch:
    patch.setattr(jax, "device_get", counted)
    together = caches(name, *thresholds)
  assert len(transfers) == 1
  for cache, threshold in zip(together, thresholds, strict=True):
    (alone,) = caches(name, threshold)
    jax.tree.map(np.testing.assert_array_equal, cache, alone)


def refused(match, name, threshold=kvjax.Threshold(-4.0), **options):  # noqa: B008
  with pytest.raises(InputError, match=re.escape(match)) as error:
    kvjax.get_plan(name, threshold, **options)
  assert str(error.value).count(". ") == 0


def test_what_has_no_threshold_is_refused_in_one_sentence(name):
  alike = f"{name}:level=head"
  for method in ("keydiff", "snapkv", "chunked/" + alike):
    refused("its scores have no range that all prompts", method)
  refused("leave out one of the two", f"ada/{alike}")
  for schedule in (kvjax.Schedule(block=8), kvjax.Schedule(every=8)):
    refused("tokens are judged once", "kvzip", schedule=schedule)
    refused("tokens are judged once", name, schedule=schedule)
  later = kvjax.get_plan(
    "keydiff", kvjax.Tokens(8), schedule=kvjax.Schedule(every=4)
  )
  refused("which cannot be evicted from again", name, decoding=later)
  refused("so give it the number of keys", "quest")
  for wrong in ({"least": math.nan}, {"least": 0.0, "window": 0}):
    with pytest.raises(InputError, match="threshold"):
      kvjax.Threshold(**wrong)


def test_a_threshold_outside_of_the_tested_scores_is_told(tmp_path):
  path = write_kvzap(
    tmp_path, WIDTH, KV_HEADS, LAYERS, score_range=[-9.5, -0.5]
  )
  name = f"kvzap:gate={path}"
  kvjax.get_plan(name, kvjax.Threshold(-9.5))
  kvjax.get_plan(name, kvjax.Threshold(-math.inf))
  for least, match in (
    (-10.0, "the threshold is -10: it is likely to keep all tokens"),
    (0.0, "the threshold is 0: it is likely to keep few but the last"),
  ):
    with pytest.warns(InputWarning, match=re.escape(match)) as warned:
      kvjax.get_plan(name, kvjax.Threshold(least))
    said = str(warned[0].message)
    assert "from -9.5 to -0.5" in said
    assert "the texts it was tested with" in said


def test_a_threshold_of_scores_without_a_known_range_is_told(tmp_path):
  path = write_kvzap(tmp_path, WIDTH, KV_HEADS, LAYERS)
  for name in ("kvzap", f"kvzap:gate={path}"):
    with pytest.warns(InputWarning, match="may keep all tokens or few") as told:
      kvjax.get_plan(name, kvjax.Threshold(-4.0))
    assert "the threshold -4 " in str(told[0].message)
    # What they keep is known.
    for least in (-math.inf, math.inf):
      kvjax.get_plan(name, kvjax.Threshold(least))


def test_users_without_type_checks_are_told_their_line(tmp_path):
  path = write_kvzap(tmp_path, WIDTH, KV_HEADS, LAYERS, score_range=[-9, -1])
  program = tmp_path / "program.py"
  program.write_text(f"""
import kvjax
name = "kvzap:gate={path}"
kvjax.get_plan(name, kvjax.Threshold(-10))
kvjax.Plan(kvjax.get_method(name), kvjax.Threshold(-10))
for wrong in ("-4", None):
  try:
    kvjax.Threshold(wrong)
  except kvjax.InputError as error:
    print(error)
""")
  done = subprocess.run(
    [sys.executable, program], capture_output=True, text=True, check=True
  )
  lines = re.findall(r"program.py:(\d+): InputWarning", done.stderr)
  assert lines == ["4", "5"]
  assert done.stdout.splitlines() == [
    "A threshold must be a score, such as -4.0, not '-4'.",
    "A threshold must be a score, such as -4.0, not None.",
  ]
