"""The timing of retrieval, beside attention to the full cache."""

import pytest

from kvjax.errors import InputError
from kvjax.experiments.timing import sparse_timing
from kvjax.registry.names import get_retrieval

HEADS = sparse_timing.Heads(heads=4, kv_heads=2, head_dim=8)


def measure(names, length, keys=16):
  retrievals = {name: get_retrieval(name) for name in names}
  return sparse_timing.measure(retrievals, keys, length, HEADS, 2, seed=0)


@pytest.mark.slow
def test_each_cache_is_timed_and_reads_what_it_should():
  names = ["ctkvr:sinks=4:local=8", "quest", "shadowkv:outliers=8"]
  bandwidth, results = measure(names, 256)
  assert [result.name for result in results] == ["full", *names]
  assert all(len(r.seconds) == len(bandwidth.seconds) == 2 for r in results)
  full, ctkvr, *_ = results
  # Keys and values of two heads, and the positions of their slots.
  assert full.cache_bytes == pytest.approx(2 * 256 * (2 * 8 + 1) * 4, rel=0.1)
  assert full.read_tokens == 256
  assert ctkvr.read_tokens == 4 + 8 + 16
  assert all(result.read_tokens < 256 for result in results[1:])
  assert all(result.index_seconds > 0 for result in results[1:])


def test_a_method_that_reads_everything_is_refused():
  with pytest.raises(InputError, match="ctkvr reads all of 64 tokens; give a"):
    measure(["ctkvr"], 64)


def test_a_table_compares_with_the_full_cache():
  results = [
    sparse_timing.Attended("full", 2**20, 1000.0, [0.004, 0.9, 0.003]),
    sparse_timing.Attended("quest", 2**21, 100.0, [0.002, 0.001, 0.1], 0.5),
  ]
  assert sparse_timing.table({1000: results, 2000: results[:1]}).lines == [
    ("full", "1,000", "1.0", "1,000", "–", "4.00", "1.00"),
    ("quest", "1,000", "2.0", "100", "500.0", "2.00", "2.00"),
    ("full", "2,000", "1.0", "1,000", "–", "4.00", "1.00"),
  ]


def test_what_is_wrong_is_one_sentence(refusal):
  for argument, sentence in {
    "--methods=": "--methods is empty",
    "--methods=keydiff": "keydiff",
    "--length=0": "--length takes numbers of tokens",
  }.items():
    told = refusal("kvjax.experiments.benchmark_sparse", argument)
    assert sentence in told
