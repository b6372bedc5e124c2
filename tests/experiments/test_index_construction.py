"""Builders of indexes, what their lookups are worth, and the binary."""

import functools
import json
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax.errors import InputError
from kvjax.experiments import index_construction
from kvjax.experiments.timing import index_builders
from kvjax.experiments.timing.index_builders import Builder
from kvjax.retrieval import CTkvr

LENGTH, DIM, READS = 128, 8, 16
START, END = 4, LENGTH - 64
STORED = END - START
RETRIEVAL = CTkvr(keys=READS)


@pytest.fixture(scope="module")
def faiss():
  return pytest.importorskip("faiss")


# Two heads: a half of what four lists of 40 hold is more than there is.
@pytest.fixture(scope="module")
def workload():
  return index_builders.draw(RETRIEVAL, 0, LENGTH, 2, DIM)


@pytest.fixture(scope="module")
def builders(faiss, workload):
  made = index_builders.builders(faiss, RETRIEVAL, workload)
  return {builder.name: builder for builder in made}


@pytest.fixture(scope="module")
def built(builders):
  return {name: builder.build() for name, builder in builders.items()}


@pytest.fixture(scope="module")
def binary(run_binary):
  return functools.partial(run_binary, "kvjax.experiments.index_construction")


def worth(queries, keys):
  """The most that any head attends to each key, in float64."""
  logits = queries.astype(np.float64) @ keys.astype(np.float64).T / DIM**0.5
  weights = np.exp(logits)
  return (weights / weights.sum(axis=1, keepdims=True)).max(axis=0)


def test_recall_is_what_a_loop_over_tokens_counts(workload):
  keys = np.asarray(workload.prompt.head.cached_keys)[0, 0, START:END]
  all_queries = np.asarray(workload.queries)
  rng = np.random.default_rng(1)
  slots = np.stack([rng.permutation(STORED)[:30] for _ in all_queries])
  slots[:, 20:25] = -1
  slots[:, 25:] = slots[:, :5]  # two heads may name the same
  hits = []
  for queries, named in zip(all_queries, slots, strict=True):
    wanted = np.argsort(-worth(queries, keys))[:READS]
    known = np.array(sorted({*named.tolist()} - {-1}))
    read = known[np.argsort(-worth(queries, keys[known]))[:READS]]
    hits.append(len({*wanted.tolist()} & {*read.tolist()}) / READS)
  found = index_builders.recall(workload, jnp.asarray(slots, jnp.int32))
  assert 0.1 < np.mean(hits) < 0.9
  np.testing.assert_allclose(found, np.mean(hits), rtol=1e-6)


def test_jax_builds_and_reads_its_indexes_without_faiss(workload):
  """The other tests of builders are skipped where faiss is not installed."""
  queries = np.asarray(workload.queries)
  keys = np.asarray(workload.prompt.head.cached_keys)[0, 0, START:END]
  index = index_builders._compiled(RETRIEVAL, workload)()
  slots = index_builders._retrieve(
    workload, RETRIEVAL, jax.tree.map(lambda x: x[0, 0], index), READS
  )
  for own, read in zip(queries, np.asarray(slots), strict=True):
    read = read[read >= 0]
    assert len({*read.tolist()}) == len(read) <= READS
    assert read.max() < STORED
    weights = worth(own, keys)
    assert weights[read].mean() > 1.2 * weights.mean()


def test_queries_of_a_center_are_as_alike_as_said():
  all_queries = CTkvr(keys=READS, choice="random")
  head = index_builders.draw(all_queries, 0, 256, 1, 512).prompt.head
  queries = np.asarray(head.queries)[0, 0, 0]
  units = queries / np.linalg.norm(queries, axis=1, keepdims=True)
  cosines = (units @ units.T)[np.triu_indices(256, 1)]
  alike = cosines > 0.5
  assert abs(cosines[alike].mean() - 0.8) < 0.02
  assert abs(cosines[~alike].mean()) < 0.02
  assert abs(alike.mean() - 1 / index_builders.QUERY_CENTERS) < 0.02


def test_qcivf_lists_what_the_last_queries_attend_to(built, workload):
  head = workload.prompt.head
  keys, queries = np.asarray(head.keys)[0, 0], np.asarray(head.queries)[0, 0]
  lists = np.asarray(built["qcIVF"].slots)[0, 0]
  assert lists.shape == (LENGTH // 16, 40)
  for back, found in enumerate(lists[::-1]):
    attended = worth(queries[:, -1 - back], keys)[START:END]
    assert {*found.tolist()} == {*np.argsort(-attended)[:40].tolist()}


def test_indexes_of_faiss_hold_every_stored_key(built, faiss):
  ivf, hnsw = built["IVF"], built["HNSW"]
  assert ivf.ntotal == hnsw.ntotal == STORED
  assert ivf.nlist == round(4 * STORED**0.5)
  assert ivf.metric_type == hnsw.metric_type == faiss.METRIC_INNER_PRODUCT
  assert hnsw.hnsw.nb_neighbors(1) == 32
  clusters = built["K-means"]
  assert clusters.sizes.shape == (LENGTH // 16,)
  assert clusters.sizes.sum() == STORED
  assert sorted(clusters.slots.tolist()) == [*range(STORED)]


def test_clusters_of_faiss_gather_what_is_near(built, workload):
  """Every key is in the cluster of the centroid at the least distance."""
  clusters = built["K-means"]
  keys = np.asarray(workload.store.keys)
  centroids = np.asarray(clusters.centroids)
  apart = np.linalg.norm(keys[:, None] - centroids[None], axis=-1)
  own = np.repeat(np.arange(len(centroids)), clusters.sizes)
  nearest = np.argmin(apart, axis=1)[np.asarray(clusters.slots)]
  assert (own == nearest).all()


@pytest.mark.parametrize(("name", "least"), [("IVF", 1.0), ("HNSW", 0.95)])
def test_faiss_names_the_keys_of_the_highest_products(
  name, least, builders, built, workload
):
  """So many keys are looked at that IVF misses none; a graph may."""
  all_queries, keys = (
    np.asarray(workload.queries),
    np.asarray(workload.store.keys),
  )
  found = np.asarray(builders[name].candidates(built[name]))
  hits = []
  for queries, slots in zip(
    all_queries, found.reshape(-1, 2, READS), strict=True
  ):
    best = np.argsort(-queries.astype(np.float64) @ keys.T, axis=1)[:, :READS]
    hits += [np.isin(best[head], slots[head]).mean() for head in range(2)]
  assert least <= np.mean(hits) <= 1


@pytest.mark.parametrize("name", ["K-means", "K-means of kvjax"])
def test_clusters_are_read_until_there_are_enough(
  name, builders, built, workload
):
  """Two heads may read everything here, and so miss nothing."""
  slots = builders[name].candidates(built[name])
  assert index_builders.recall(workload, slots) == 1
  for token in np.asarray(slots).reshape(-1, STORED):
    assert sorted(token.tolist()) == [*range(STORED)]


def test_qcivf_finds_more_than_chance(builders, built, workload):
  """It reads READS of the STORED keys."""
  slots = builders["qcIVF"].candidates(built["qcIVF"])
  assert slots.shape == (index_builders.TOKENS, READS)
  assert READS / STORED + 0.3 < index_builders.recall(workload, slots) <= 1


def test_builds_take_turns_and_the_median_counts(workload, monkeypatch):
  now, order, ticks = [0.0], [], []
  seconds = {"one": iter([2.0, 9.0, 1.0]), "other": iter([8.0, 4.0, 5.0])}
  monkeypatch.setattr(time, "perf_counter", lambda: now[0])

  def build(name):
    order.append(name)
    now[0] += next(seconds[name])

  everything = jnp.broadcast_to(
    jnp.arange(STORED), (index_builders.TOKENS, STORED)
  )
  answers = {"one": jnp.full_like(everything, -1), "other": everything}
  builders = [
    Builder(name, functools.partial(build, name), lambda _, n=name: answers[n])
    for name in seconds
  ]
  rows = index_construction.measure(
    builders, workload, 3, lambda: ticks.append(len(order))
  )
  assert order == ["one", "other"] * 3
  assert ticks == [1, 2, 3, 4, 5, 6]
  assert rows == [
    {
      "index": "one",
      "seconds": [2.0, 9.0, 1.0],
      "median": 2.0,
      "ratio": 1.0,
      "recall": 0.0,
    },
    {
      "index": "other",
      "seconds": [8.0, 4.0, 5.0],
      "median": 5.0,
      "ratio": 2.5,
      "recall": 1.0,
    },
  ]


def test_a_run_writes_what_it_prints(faiss, binary, tmp_path):
  result = binary(
    "--lengths=128",
    "--head_dim=8",
    "--group=4",
    "--reads=16",
    "--repeats=2",
    f"--output={tmp_path}/new/run",
  )
  assert result.returncode == 0, result.stderr
  assert "128 tokens" in result.stderr
  folder = tmp_path / "new" / "run"
  assert {path.name for path in folder.iterdir()} == {
    "summary.json",
    "table.md",
  }
  summary = json.loads((folder / "summary.json").read_text())
  assert summary["faiss_threads"] >= 1
  assert summary["versions"]["faiss"] == faiss.__version__
  names = ["qcIVF", "IVF", "HNSW", "K-means", "K-means of kvjax"]
  rows = summary["rows"]
  assert [(row["length"], row["index"]) for row in rows] == [
    (LENGTH, name) for name in names
  ]
  assert all(len(row["seconds"]) == 2 for row in rows)
  assert all(row["recall"] > READS / STORED for row in rows)
  table = (folder / "table.md").read_text()
  lines = [line for line in table.splitlines() if line.startswith("|")]
  assert len(lines) == 2 + len(rows)
  printed = [line.split() for line in result.stdout.splitlines()]
  for row, line in zip(rows, lines[2:], strict=True):
    numbers = [
      f"{1000 * np.median(row['seconds']):,.0f}",
      f"{row['ratio']:.2f}",
      f"{100 * row['recall']:.1f}",
    ]
    cells = [cell.strip() for cell in line.strip("|").split("|")]
    assert cells[1:] == [row["index"], *numbers]
    assert any(words[-3:] == numbers for words in printed), printed
  assert "ratios, not the times" in " ".join(table.split())


@pytest.mark.parametrize(
  ("arguments", "sentence"),
  [
    (["--lengths=4096,8k"], "--lengths takes numbers of tokens such as 4096,8"),
    (["--lengths="], "--lengths takes numbers of tokens such as 4096,8192;"),
    (["--lengths=4096,99999999"], "takes numbers of at most 16,777,216; 99,9"),
    (["--lengths=4096,580"], "--lengths must be 581 or more, as 68 tokens are"),
    (["--repeats=0"], "flag --repeats=0: 0 is not a positive"),
    (["--reads=many"], "--reads takes a whole number, not 'many'"),
    (["--output=README.md"], "README.md cannot be written"),
    (["4096"], "There is no argument '4096'"),
  ],
)
def test_bad_flags_are_one_sentence(refusal, arguments, sentence):
  told = refusal("kvjax.experiments.index_construction", *arguments)
  assert sentence in told
  assert told.endswith(".\n")


def test_without_faiss_the_sentence_says_what_to_install(monkeypatch):
  monkeypatch.setitem(sys.modules, "faiss", None)
  with pytest.raises(InputError, match="`pip install faiss-cpu` installs it"):
    index_builders.load_faiss()
