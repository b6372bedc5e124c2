"""TriAttention: its series written out in float64, its statistics and laws."""

import re

import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy
import scoring
from made_up_gates import torch_bytes

import kvjax
from kvjax.cache.layers import LayerCache
from kvjax.engine.rerotation import LayerRotation
from kvjax.errors import InputError
from kvjax.methods import LayerBudget, TriAttention
from kvjax.methods.triattention import pair_lengths
from kvjax.methods.triattention_file import read_statistics
from kvjax.models.rope import Rope
from kvjax.testing import TinyModel, kept_positions, random_activations

MODEL = TinyModel()
PARAMS = MODEL.init()
ROTATION = LayerRotation(MODEL, MODEL.geometry.layers[0])
LAYERS, HEADS, KV_HEADS, DIM = 2, 4, 2, 8
HALF = DIM // 2
LENGTH = 23
SPEEDS = 100.0 ** (-np.arange(HALF) / HALF)
ROWS = [
  np.random.default_rng(n).permutation(64)[:n].tolist() for n in (47, 30, 12)
]


def as_complex(x):
  """Pairs of channels as complex numbers, in the layout of the tiny model."""
  x = np.asarray(x, np.float64)
  return x[..., :HALF] + 1j * x[..., HALF:]


def drawn():
  """Random statistics of the tiny model; queries deviate from their center."""
  random = np.random.default_rng(0)
  center = random.standard_normal((LAYERS, HEADS, DIM))
  lengths = np.abs(as_complex(center)) + random.uniform(
    0, 1, (LAYERS, HEADS, HALF)
  )
  arrays = {"query_mean": center, "query_abs": np.tile(lengths, 2)}
  return {name: x.astype(np.float32) for name, x in arrays.items()}


@pytest.fixture
def path(tmp_path):
  file = tmp_path / "queries.safetensors"
  safetensors.numpy.save_file(drawn(), file)
  return str(file)


def seen(shift=0, **changes):
  activations = random_activations(3, [LENGTH], LENGTH)
  fields = {**vars(activations), "rerotate": ROTATION}
  if shift:
    by = jnp.full((1, KV_HEADS, LENGTH), shift)
    fields["keys"] = ROTATION(activations.keys, by)
    fields["positions"] = activations.positions + shift
  return activations.__class__(**{**fields, **changes})


def scores(method, activations, layer=1):
  found = scoring.evaluate(method, activations, layer)
  return np.asarray(found, np.float64)[0]


def series(activations, method, layer=1):
  """The authors' sum over frequencies and offsets, [K, G, T]."""
  center = as_complex(drawn()["query_mean"][layer])
  lengths = drawn()["query_abs"][layer][:, :HALF].astype(np.float64)
  rotated = as_complex(activations.keys[0])
  positions = np.asarray(activations.positions[0])
  now = positions.max() + 1
  # Each key back to position 0.
  keys = rotated * np.exp(-1j * positions[:, None] * SPEEDS)
  found = np.zeros((HEADS, LENGTH))
  for head in range(HEADS):
    own, c = keys[head // 2], center[head]
    by_offset = []
    offset = 1
    while offset <= method.farthest:
      distance = (now - positions + offset)[:, None] * SPEEDS
      wave = np.cos(distance + np.angle(c * own.conj()))
      total = np.zeros(LENGTH)
      if method.center:
        total += (np.abs(c) * np.abs(own) * wave).sum(axis=-1)
      if method.spread:
        total += ((lengths[head] - np.abs(c)) * np.abs(own)).sum(axis=-1)
      by_offset.append(total)
      offset *= 2
    reduce = np.mean if method.ahead == "mean" else np.max
    found[head] = reduce(by_offset, axis=0)
  return found.reshape(KV_HEADS, 2, LENGTH)


@pytest.mark.parametrize(
  "options",
  [
    {},
    {"ahead": "max", "farthest": 64},
    pytest.param({"spread": False, "farthest": 1}, marks=pytest.mark.slow),
    pytest.param({"center": False}, marks=pytest.mark.slow),
  ],
)
def test_scores_are_the_series_of_the_authors(options, path):
  method = TriAttention(statistics=path, **options)
  activations = seen()
  # Angles of 65,536 radians have an error of 0.004 in float32.
  np.testing.assert_allclose(
    scores(method, activations), series(activations, method), atol=2e-3
  )


def test_queries_that_equal_their_center_give_exact_logits(path, tmp_path):
  """One query at t + 1, without the scale of attention."""
  arrays = drawn()
  center = as_complex(arrays["query_mean"])
  arrays["query_abs"] = np.tile(np.abs(center), 2).astype(np.float32)
  file = tmp_path / "constant.safetensors"
  safetensors.numpy.save_file(arrays, file)
  method = TriAttention(statistics=str(file), farthest=1)
  activations = seen()
  query = center[1] * np.exp(1j * (LENGTH + 1) * SPEEDS)
  keys = as_complex(activations.keys[0]).repeat(2, axis=0)
  logits = np.einsum("nf,ntf->nt", query, keys.conj()).real
  np.testing.assert_allclose(
    scores(method, activations).reshape(HEADS, LENGTH), logits, atol=1e-4
  )


def test_a_shift_of_all_positions_changes_nothing(path):
  method = TriAttention(statistics=path, farthest=256)
  np.testing.assert_allclose(
    scores(method, seen(shift=300)), scores(method, seen()), atol=1e-3
  )


@pytest.mark.parametrize(
  ("interleaved", "dim"), [(False, 8), (True, 8), (False, 6), (True, 4)]
)
def test_pairs_are_those_of_the_rotary_embedding(interleaved, dim):
  """Of any layout; channels that none rotates stand alone."""
  rope = Rope("default", 1e6, dim, 4096, interleaved=interleaved)
  x = np.random.default_rng(0).standard_normal((1, 2, 5, 8)).astype("float32")
  ours = np.asarray(pair_lengths(jnp.asarray(x), rope.rerotate))
  expected = np.abs(x)
  for pair in range(dim // 2):
    of = (2 * pair, 2 * pair + 1) if interleaved else (pair, pair + dim // 2)
    length = np.linalg.norm(x[..., of], axis=-1, keepdims=True)
    expected[..., of] = length
  np.testing.assert_allclose(ours, expected, rtol=1e-5)


def test_the_best_of_standardized_scores_are_kept(path):
  """Standardized over the tokens that may go: the prompt's may not."""
  for group, reduce in (("max", np.max), ("mean", np.mean)):
    method = TriAttention(statistics=path, group=group, recent=2)
    activations = seen()
    cache = LayerCache.of(activations)
    found = scores(method, activations)
    budget = LayerBudget(
      jnp.asarray([9]), LENGTH, protected=jnp.arange(LENGTH)[None] < 4
    )
    slots = np.asarray(method.select(jnp.asarray(found[None]), cache, budget))
    free = found[..., 4:]
    mean = free.mean(axis=-1, keepdims=True)
    standard = (free - mean) / free.std(axis=-1, keepdims=True)
    mixed = reduce(standard, axis=1)
    mixed[:, -2:] = np.inf
    for head in range(KV_HEADS):
      best = 4 + np.argsort(-mixed[head], kind="stable")[:5]
      expected = [0, 1, 2, 3, *sorted(best.tolist())]
      assert slots[0, head, :9].tolist() == expected


def test_statistics_of_texts_are_means_of_lengths():
  found = kvjax.calibrate_queries(MODEL, PARAMS, ROWS, sinks=4)
  embedding = np.asarray(PARAMS["embedding"], np.float64)
  weights = np.asarray(PARAMS["layers"][0]["query"][0], np.float64)
  tokens = [token for row in ROWS for token in row[4:]]
  queries = (embedding[tokens] @ weights).reshape(len(tokens), HEADS, DIM)
  expected = np.abs(as_complex(queries)).mean(axis=0)
  np.testing.assert_allclose(
    found.query_abs[0], np.tile(expected, 2), rtol=1e-4
  )
  center = np.abs(as_complex(found.query_mean))
  assert (found.query_abs[..., :HALF] >= center).all()


def test_it_evicts_while_decoding_and_keeps_the_prompt(tmp_path):
  """As the authors do, where the user protects the prompt."""
  file = tmp_path / "queries.safetensors"
  kvjax.calibrate_queries(MODEL, PARAMS, ROWS).save(file)
  name = f"triattention:statistics={file}"
  rows = [row[:10] for row in ROWS]
  prompts = kvjax.Prompts.of(rows, protected=[[True] * 10] * 3)

  def generate(count):
    later = kvjax.get_plan(
      name, kvjax.Tokens(count), schedule=kvjax.Schedule(every=8)
    )
    plan = kvjax.get_plan("full", kvjax.Retention(1.0), decoding=later)
    cache, logits = kvjax.prefill(MODEL, PARAMS, prompts, plan)
    decoding = kvjax.Decoding(8)
    cache = kvjax.reserve(cache, 64)
    return kvjax.generate(MODEL, PARAMS, cache, logits, decoding, keep=True)

  everything, after = generate(100).cache, generate(14).cache
  method = kvjax.get_method(name)
  for row in range(3):
    for layer, heads in enumerate(kept_positions(after, row)):
      cache = everything.layers[layer]
      # Of 18 tokens, 10 stay and 4 of the others.
      found = scoring.evaluate(method, seen(), layer, cache)
      answered = np.asarray(cache.positions)[row, 0] >= 10
      free = np.asarray(found, np.float64)[row][..., answered]
      assert free.shape[-1] == 8
      mean = free.mean(axis=-1, keepdims=True)
      mixed = ((free - mean) / free.std(axis=-1, keepdims=True)).max(axis=1)
      for head in range(KV_HEADS):
        best = 10 + np.argsort(-mixed[head])[:4]
        assert heads[head] == [*range(10), *sorted(best.tolist())]
  with pytest.raises(InputError, match="protected"):
    generate(9)


def use(name, model):
  later = kvjax.get_plan(
    name, kvjax.Tokens(9), schedule=kvjax.Schedule(every=8)
  )
  plan = kvjax.get_plan("full", kvjax.Retention(1.0), decoding=later)
  kvjax.prefill(model, model.init(), kvjax.Prompts.of(ROWS), plan)


def refused(name, match, model=MODEL):
  with pytest.raises(InputError, match=re.escape(match)) as error:
    use(name, model)
  assert str(error.value).count(". ") == 0


def published(changes=(), **metadata):
  """The content of the authors' file, with the statistics of `drawn`."""
  arrays = drawn()
  center, lengths = as_complex(arrays["query_mean"]), arrays["query_abs"]
  stats = {
    f"layer{layer:02d}_head{head:02d}": {
      "q_mean_real": center.real[layer, head].astype(np.float32),
      "q_mean_imag": center.imag[layer, head].astype(np.float32),
      "q_abs_mean": lengths[layer, head, :HALF],
    }
    for layer in range(LAYERS)
    for head in range(HEADS)
  }
  return {"metadata": metadata, "stats": stats | dict(changes)}


def written(tmp_path, content):
  file = tmp_path / f"{len([*tmp_path.iterdir()])}.pt"
  file.write_bytes(torch_bytes(content))
  return str(file)


def test_the_authors_file_gives_the_same_scores(tmp_path, path):
  ours = scores(TriAttention(statistics=path), seen())
  for style in ({}, {"rope_style": "half"}):
    file = written(tmp_path, published(**style))
    np.testing.assert_array_equal(
      scores(TriAttention(statistics=file), seen()), ours
    )
  turned = written(tmp_path, published(rope_style="interleaved"))
  stored = read_statistics(turned).arrays
  for name, array in drawn().items():
    np.testing.assert_array_equal(stored[name][..., ::2], array[..., :HALF])
    np.testing.assert_array_equal(stored[name][..., 1::2], array[..., HALF:])


def test_other_files_of_torch_are_refused_in_one_sentence(tmp_path):
  whole = published()["stats"]["layer01_head03"]
  nan = {**whole, "q_abs_mean": np.full(HALF, np.nan, np.float32)}
  short = {name: x[:-1] for name, x in whole.items()}
  uneven = {
    head: {**of, "q_mean_real": of["q_mean_real"][:-1]}
    for head, of in published()["stats"].items()
  }
  for content, match in (
    ({"module": []}, "it has those of 0 heads"),
    ([1], "it has those of 0 heads"),
    (published({"layer02_head00": whole}), "it has those of 9 heads"),
    (published({"layer01_head03": nan}), "q_abs_mean"),
    (published({"layer01_head03": short}), "as many in all heads"),
    (published({"layer01_head03": {}}), "q_mean_real"),
    (published(uneven), "differ in size"),
    (published(rope_style="spiral"), "must be half or interleaved"),
  ):
    refused(f"triattention:statistics={written(tmp_path, content)}", match)
  wide = TinyModel(kvjax.Geometry.uniform(2, 4, 2, 16, 4096))
  file = written(tmp_path, published())
  refused(f"triattention:statistics={file}", "is of another model", wide)


def test_what_does_not_fit_is_refused_in_one_sentence(tmp_path, path):
  refused("triattention", "its statistics are those of a whole prompt")
  other = tmp_path / "other.safetensors"
  arrays = drawn()
  safetensors.numpy.save_file({"query_mean": arrays["query_mean"]}, other)
  refused(f"triattention:statistics={other}", "has no query_abs")
  wide = TinyModel(kvjax.Geometry.uniform(2, 4, 2, 16, 4096))
  refused(f"triattention:statistics={path}", "is of another model", wide)
