"""Options of methods that name a file at an address."""

import numpy as np
import pytest
from made_up_gates import write_fast_kvzip, write_kvzap
from memory_store import empty_store

import kvjax
from kvjax import addresses
from kvjax.errors import InputError
from kvjax.testing import TinyModel, kept_positions

MODEL = TinyModel()
PARAMS = MODEL.init()
PROMPTS = kvjax.Prompts.of(
  [np.random.default_rng(n).permutation(64)[:n].tolist() for n in (40, 17)]
)
SIZES = (32, 2, 2)


@pytest.fixture(autouse=True)
def store(monkeypatch, tmp_path):
  """An empty store, and an empty cache of the user's."""
  monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
  addresses._fetched.cache_clear()
  yield empty_store(monkeypatch)
  addresses._fetched.cache_clear()


def gate(folder):
  return write_kvzap(folder / "gate", *SIZES, 5)


def fast(folder):
  (folder / "fast").mkdir()
  write_fast_kvzip(folder / "fast" / "gate.pt", *SIZES)
  return folder / "fast"


def queries(folder):
  path = folder / "queries.safetensors"
  kvjax.calibrate_queries(MODEL, PARAMS, [[1, 2, 3, 4, 5, 6]]).save(path)
  return path


def pattern(folder):
  path = folder / "pattern.tsv"
  path.write_text("0.1\t0.9\n0.4\t0.2\n")
  return path


def kept(name):
  plan = kvjax.get_plan(name, kvjax.Tokens(9))
  cache, _ = kvjax.prefill(MODEL, PARAMS, PROMPTS, plan)
  return [kept_positions(cache, row) for row in range(2)]


@pytest.mark.parametrize(
  ("name", "write"),
  [
    ("kvzap:gate={}:level=head", gate),
    ("ada/kvzap:level=head:gate={}", gate),
    ("fast_kvzip:gate={}", fast),
    ("qfilters:filters={}", queries),
    ("triattention:statistics={}", queries),
    ("chunked:length=8/qfilters:filters={}", queries),
    ("duoattention:pattern={}:share=0.5:sinks=2:keep=5", pattern),
  ],
)
def test_it_is_read_as_a_file_of_this_machine(name, write, store, tmp_path):
  path = write(tmp_path)
  there = f"memory://bucket/{tmp_path.name}"
  store.put(str(path), f"/bucket/{tmp_path.name}", recursive=True)
  assert kept(name.format(there)) == kept(name.format(path))


def test_it_is_fetched_once(store, tmp_path, monkeypatch):
  store.put(gate(tmp_path), "/bucket/gate", recursive=True)
  fetched = []
  real = addresses.fetch
  monkeypatch.setattr(
    addresses, "fetch", lambda at: (fetched.append(at), real(at))[1]
  )
  for budget in (5, 9):
    plan = kvjax.get_plan("kvzap:gate=memory://bucket/gate", budget)
    kvjax.prefill(MODEL, PARAMS, PROMPTS, plan)
  assert fetched == ["memory://bucket/gate"]


def test_nothing_there_is_one_sentence():
  match = "There is nothing at memory://bucket/gate"
  with pytest.raises(InputError, match=match):
    kvjax.get_plan("kvzap:gate=memory://bucket/gate", 5)
