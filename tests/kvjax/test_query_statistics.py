"""Expected Attention and Q-Filters: their laws, their statistics and files."""

import os
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy

import kvjax
from kvjax.cache.layers import LayerCache
from kvjax.engine import blocks
from kvjax.engine import generate as generating
from kvjax.engine.rerotation import LayerRotation
from kvjax.errors import InputError
from kvjax.methods import ExpectedAttention, QFilters
from kvjax.methods.q_filters import main_directions
from kvjax.testing import TinyModel, random_activations
from kvjax.testing.checks import all_activations

MODEL = TinyModel()
PARAMS = MODEL.init()
ROTATION = LayerRotation(MODEL, MODEL.geometry.layers[0])
LAYERS, HEADS, KV_HEADS, DIM = 2, 4, 2, 8
LENGTH = 23
ROWS = [
  np.random.default_rng(n).integers(0, 64, n).tolist() for n in (61, 40, 4, 17)
]


def drawn(**replaced):
  """Random statistics of the tiny model."""
  random = np.random.default_rng(0)
  roots = random.standard_normal((LAYERS, HEADS, DIM, DIM)) * 0.3
  arrays = {
    "query_mean": random.standard_normal((LAYERS, HEADS, DIM)),
    "query_cov": roots @ np.swapaxes(roots, -1, -2),
    "q_filters": random.standard_normal((LAYERS, KV_HEADS, DIM)),
  }
  return {n: x.astype(np.float32) for n, x in (arrays | replaced).items()}


@pytest.fixture
def path(tmp_path):
  file = tmp_path / "queries.safetensors"
  safetensors.numpy.save_file(drawn(), file)
  return str(file)


def seen(**changes):
  activations = random_activations(3, [LENGTH], LENGTH)
  return activations.__class__(
    **{**vars(activations), "rerotate": ROTATION, **changes}
  )


def scores(method, activations, layer=1):
  with jax.default_matmul_precision("highest"):
    found = method.scores(
      jnp.int32(layer), LayerCache.of(activations), activations
    )
  return np.asarray(found, np.float64)[0]


def rotation(position):
  """R of one position in float64, [D, D]."""
  half = DIM // 2
  angles = position * 100.0 ** (-np.arange(half) / half)
  cos, sin = np.diag(np.cos(angles)), np.diag(np.sin(angles))
  return np.block([[cos, -sin], [sin, cos]])


def softmax(logits):
  weights = np.exp(logits - logits.max(axis=-1, keepdims=True))
  return weights / weights.sum(axis=-1, keepdims=True)


@pytest.mark.slow
def test_expected_attention_is_that_of_normal_queries(path):
  """The mean of exp(q.k / sqrt(D)) over a million queries, to 2 percent."""
  method = ExpectedAttention(
    future=1, sinks=0, value_norm=False, statistics=path
  )
  activations = seen()
  stored = {n: x.astype(np.float64) for n, x in drawn().items()}
  keys = np.asarray(activations.keys[0], np.float64)
  random, ours = np.random.default_rng(1), scores(method, activations)
  turn = rotation(LENGTH)
  for head in range(KV_HEADS):
    expected = np.zeros(LENGTH)
    for query_head in (2 * head, 2 * head + 1):
      queries = random.multivariate_normal(
        stored["query_mean"][1, query_head],
        stored["query_cov"][1, query_head],
        1_000_000,
      )
      masses = np.exp(queries @ turn.T @ keys[head].T / DIM**0.5).mean(axis=0)
      expected += masses / masses.sum() / 2
    np.testing.assert_allclose(ours[head], expected, rtol=0.02)


def test_without_a_covariance_it_is_the_attention_of_the_mean_query(path):
  method = ExpectedAttention(
    future=5, sinks=2, covariance=False, value_norm=False, statistics=path
  )
  activations = seen()
  turn = np.mean([rotation(LENGTH + j) for j in range(5)], axis=0)
  mean = drawn()["query_mean"][1].astype(np.float64) @ turn.T
  keys = np.asarray(activations.keys[0], np.float64)
  logits = np.einsum("kgd,ktd->kgt", mean.reshape(2, 2, -1), keys[:, 2:])
  expected = softmax(logits / DIM**0.5).mean(axis=1)
  ours = scores(method, activations)
  np.testing.assert_allclose(ours[:, 2:], expected, rtol=1e-4)
  np.testing.assert_array_equal(ours[:, :2], 0)


def test_the_prompts_own_queries_are_moved_to_position_0():
  activations = seen()
  method = ExpectedAttention(future=3, sinks=4, value_norm=False)
  queries = np.asarray(activations.queries[0], np.float64)
  back = np.stack(
    [queries[:, p] @ rotation(-p).T for p in range(LENGTH)], axis=1
  )[:, 4:]
  mean = back.mean(axis=1)
  covariance = np.stack([np.cov(rows.T, bias=True) for rows in back])
  turn = np.mean([rotation(LENGTH + j) for j in range(3)], axis=0)
  mean, covariance = mean @ turn.T, turn @ covariance @ turn.T
  keys = np.repeat(np.asarray(activations.keys[0], np.float64), 2, axis=0)
  keys = keys[:, 4:]
  logits = np.einsum("ntd,nd->nt", keys, mean) / DIM**0.5
  logits += np.einsum("nti,nij,ntj->nt", keys, covariance, keys) / DIM / 2
  expected = softmax(logits).reshape(2, 2, -1).mean(axis=1)
  np.testing.assert_allclose(
    scores(method, activations)[:, 4:], expected, rtol=1e-4
  )


def test_equal_values_change_no_order_and_a_sink_takes_its_part():
  activations = seen(values=jnp.ones((1, KV_HEADS, LENGTH, DIM)))
  plain, scaled = (
    scores(ExpectedAttention(value_norm=norm), activations)
    for norm in (False, True)
  )
  np.testing.assert_array_equal(plain.argsort(axis=-1), scaled.argsort(axis=-1))
  np.testing.assert_allclose(plain.sum(axis=-1), 1, rtol=1e-5)
  certain = seen(sinks=jnp.full(HEADS, 50.0))
  assert scores(ExpectedAttention(value_norm=False), certain).max() < 1e-6


def test_a_prompt_of_sinks_alone_is_kept():
  plan = kvjax.get_plan("expected_attention:sinks=4", kvjax.Tokens(3))
  cache, _ = kvjax.prefill(
    MODEL, PARAMS, kvjax.Prompts.of([[1, 2, 3, 4], [5, 6]]), plan
  )
  assert cache.lengths[0].tolist() == [[3, 3], [2, 2]]


def test_filters_are_those_of_a_singular_value_decomposition():
  activations = all_activations(5, [41], 47)
  queries = np.asarray(activations.queries[0, :, :41], np.float64)
  filters = []
  for head in queries:
    left, _, right = np.linalg.svd(head, full_matrices=False)
    sign = 1 if (left[:, 0] > 0).mean() > 0.5 else -1
    filters.append(-sign * right[0])
  filters = np.reshape(filters, (3, 2, -1)).mean(axis=1)
  keys = np.asarray(activations.keys[0, :, :41], np.float64)
  expected = -np.einsum("ktd,kd->kt", keys, filters)
  ours = scores(QFilters(), activations)[:, :41]
  np.testing.assert_allclose(ours, expected, atol=1e-4)


def test_the_sign_of_a_direction_is_that_of_most_queries():
  """Of all of them together where as many are on either side."""
  up, down = [3.0, 0.1], [-1.0, 0.0]
  for rows, sign in (([up, up, down], 1), ([up, down], 1), ([down] * 3, -1)):
    for flip in (1.0, -1.0):
      direction = main_directions(flip * jnp.asarray([rows]))[0]
      assert np.sign(direction[0]) == flip * sign


def test_statistics_are_those_of_all_texts_together():
  """Against float64; texts that are too short do not count."""
  done = []
  found = kvjax.calibrate_queries(
    MODEL, PARAMS, ROWS, sinks=4, on_text=lambda: done.append(1)
  )
  long_enough = [row for row in ROWS if len(row) > 4]
  assert len(done) == len(long_enough) < len(ROWS)
  shorter = kvjax.calibrate_queries(MODEL, PARAMS, long_enough)
  for name, array in vars(found).items():
    np.testing.assert_array_equal(array, getattr(shorter, name))
  # In the first layer, queries are projections of the embedding.
  embedding = np.asarray(PARAMS["embedding"], np.float64)
  weights = np.asarray(PARAMS["layers"][0]["query"][0], np.float64)
  tokens = [token for row in ROWS for token in row[4:]]
  queries = (embedding[tokens] @ weights).reshape(len(tokens), HEADS, DIM)
  queries = queries.swapaxes(0, 1)
  np.testing.assert_allclose(
    found.query_mean[0], queries.mean(axis=1), atol=1e-4
  )
  for head in range(HEADS):
    np.testing.assert_allclose(
      found.query_cov[0, head], np.cov(queries[head].T), rtol=1e-4, atol=1e-4
    )


def test_filters_of_a_text_are_those_of_its_rotated_queries():
  """All of which are drawn, where they are fewer than 3,000."""
  row, sinks = ROWS[0], 4
  embedding = np.asarray(PARAMS["embedding"], np.float64)
  weights = np.asarray(PARAMS["layers"][0]["query"][0], np.float64)
  queries = (embedding[row] @ weights).reshape(len(row), HEADS, DIM)
  rotated = np.stack([q @ rotation(p).T for p, q in enumerate(queries)])
  directions = []
  for head in range(HEADS):
    of_head = rotated[sinks:, head]
    left, _, right = np.linalg.svd(of_head, full_matrices=False)
    directions.append(right[0] if (left[:, 0] > 0).mean() > 0.5 else -right[0])
  expected = -np.reshape(directions, (KV_HEADS, 2, DIM)).mean(axis=1)
  found = kvjax.calibrate_queries(MODEL, PARAMS, [row], sinks=sinks)
  np.testing.assert_allclose(found.q_filters[0], expected, atol=1e-3)


def test_what_is_written_is_read(tmp_path):
  found = kvjax.calibrate_queries(MODEL, PARAMS, ROWS)
  file = tmp_path / "models" / "queries.safetensors"
  file.parent.mkdir()
  found.save(file)
  method = kvjax.get_method(f"qfilters:filters={file}")
  activations = seen()
  expected = -np.einsum(
    "ktd,kd->kt", np.asarray(activations.keys[0]), found.q_filters[1]
  )
  np.testing.assert_allclose(scores(method, activations), expected, atol=1e-5)
  # A folder, as models are published, and in blocks.
  os.link(file, file.parent / "model.safetensors")
  names = [
    f"{name}={path}"
    for name, path in (
      ("qfilters:filters", file),
      ("qfilters:filters", file.parent),
    )
  ]
  schedule = kvjax.Schedule(block=8, every=4)
  one, other = (
    kvjax.prefill(
      MODEL,
      PARAMS,
      kvjax.Prompts.of(ROWS),
      kvjax.get_plan(name, kvjax.Tokens(7), schedule=schedule),
    )[0]
    for name in names
  )
  np.testing.assert_array_equal(one.stacks[0].keys, other.stacks[0].keys)
  wide = kvjax.get_plan(names[0], kvjax.Tokens(7), per_query_head=True)
  cache, _ = kvjax.prefill(MODEL, PARAMS, kvjax.Prompts.of(ROWS), wide)
  assert cache.lengths[0].shape == (len(ROWS), HEADS)


def use(name):
  plan = kvjax.get_plan(name, kvjax.Tokens(7))
  kvjax.prefill(MODEL, PARAMS, kvjax.Prompts.of(ROWS), plan)


def refused(name, match):
  with pytest.raises(InputError, match=re.escape(match)) as error:
    use(name)
  assert str(error.value).count(". ") == 0


def test_files_that_do_not_fit_are_refused_in_one_sentence(tmp_path, path):
  def wrong(number, **replaced):
    arrays = {n: x for n, x in drawn(**replaced).items() if x.size}
    file = tmp_path / f"{number}.safetensors"
    safetensors.numpy.save_file(arrays, file)
    return file

  refused("qfilters:filters=nowhere", "nowhere cannot be read")
  text = tmp_path / "text"
  text.write_text("no tensors")
  refused(f"qfilters:filters={text}", "is no file of safetensors")
  small = wrong(0, q_filters=np.ones((LAYERS, KV_HEADS, 4)))
  refused(
    f"ada/qfilters:filters={small}",
    "is of another model: its q_filters is for 2 layers with 2 KV heads of 4 "
    "numbers, and this model has 2 layers with 2 KV heads of 8",
  )
  deep = wrong(1, query_mean=np.ones((3, HEADS, DIM)))
  refused(f"expected_attention:statistics={deep}", "is for 3 layers")
  none = wrong(2, q_filters=np.ones((0, 1)))
  refused(f"qfilters:filters={none}", "has no q_filters")
  flat = wrong(3, q_filters=np.ones((LAYERS, DIM)))
  refused(f"qfilters:filters={flat}", "with 3 axes")
  odd = wrong(4, q_filters=np.full((LAYERS, KV_HEADS, DIM), np.nan))
  refused(f"qfilters:filters={odd}", "must be finite")


def test_a_file_that_has_changed_is_read_again(tmp_path, path):
  method = kvjax.get_method(f"qfilters:filters={path}")
  before = scores(method, seen())
  changed = drawn()
  changed["q_filters"] *= -2
  safetensors.numpy.save_file(changed | {"more": np.ones(3)}, path)
  np.testing.assert_array_equal(scores(method, seen()), -2 * before)


@pytest.mark.parametrize("block", [None, 8])
def test_programs_that_evict_repeatedly_have_no_statistics(
  block, path, monkeypatch
):
  """The block's program is that of the prompt, and the other one decodes."""
  lowered = []

  def watch(program):
    def call(*arguments, **named):
      lowered.append(program.lower(*arguments, **named).as_text())
      return program(*arguments, **named)

    return call

  for name in ("_generate_and_discard", "_generate_and_keep"):
    monkeypatch.setattr(generating, name, watch(vars(generating)[name]))
  monkeypatch.setattr(blocks, "_prefill_blocks", watch(blocks._prefill_blocks))
  later = kvjax.Schedule(block=block, every=4)
  plan = kvjax.get_plan(
    f"qfilters:filters={path}", kvjax.Tokens(9), schedule=later
  )
  prompts = kvjax.Prompts.of(ROWS)
  cache, logits = kvjax.prefill(MODEL, PARAMS, prompts, plan)
  kvjax.generate(MODEL, PARAMS, cache, logits, kvjax.Decoding(6))
  assert len(lowered) == (1 if block is None else 2)
  shape = f"tensor<{LAYERS}x{KV_HEADS}x{DIM}xf32>"
  for program in lowered:
    found = [line for line in program.splitlines() if shape in line]
    assert found
    assert not [line for line in found if "constant dense" in line]


@pytest.mark.parametrize(
  "texts",
  [[1, 2, 3], kvjax.Prompts.of(ROWS), ["a text"], 7],
  ids=["one text", "prompts", "letters", "a number"],
)
def test_what_is_no_list_of_texts_is_refused(texts, untyped):
  with pytest.raises(InputError, match=r"rows of token ids.* is no row"):
    kvjax.calibrate_queries(MODEL, PARAMS, texts)


def test_texts_that_say_nothing_are_refused():
  with pytest.raises(InputError, match="more than 4 tokens"):
    kvjax.calibrate_queries(MODEL, PARAMS, [[1, 2, 3]])
  with pytest.raises(InputError, match="context"):
    kvjax.calibrate_queries(MODEL, PARAMS, [[1] * 5000])


@pytest.mark.usefixtures("untyped")
@pytest.mark.parametrize("name", ["sinks", "seed"])
@pytest.mark.parametrize("number", [-1, 2.5])
def test_numbers_are_whole_and_not_negative(name, number):
  """Below 0, padding would count, whose position is -1."""
  with pytest.raises(InputError, match=f"{name} must be a whole number, 0 or"):
    kvjax.calibrate_queries(MODEL, PARAMS, ROWS, **{name: number})
