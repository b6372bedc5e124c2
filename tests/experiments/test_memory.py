"""Contexts per prefill by the memory that their caches take."""

import dataclasses

import jax
import pytest

import kvjax
from kvjax import InputWarning
from kvjax.cache.sharding import parse_mesh
from kvjax.experiments.run import memory
from kvjax.experiments.run.candidates import Candidate, candidates

HALF = [kvjax.Retention(0.5)]


@pytest.fixture
def chosen():
  return candidates(["full", "keydiff", "streaming"], HALF)


def bytes_of(lm, plan, tokens):
  """What the engine allocates for a context of a bucket's length."""
  prompts = kvjax.Prompts.of([[1] * tokens])
  cache, _ = kvjax.prefill(lm.model, lm.params, prompts, plan)
  return sum(
    leaf.nbytes for layer in cache.stacks for leaf in (layer.keys, layer.values)
  )


@pytest.mark.parametrize("per_query_head", [False, True])
def test_estimates_are_what_is_allocated(tiny, per_query_head):
  names = ["full", "keydiff"]
  for made in candidates(names, HALF, per_query_head=per_query_head):
    estimate = memory.cache_bytes(tiny, made, 128)
    assert estimate == bytes_of(tiny, made.plan, 128)
    eight_bits = dataclasses.replace(made.plan, kv_dtype="int8")
    narrow = memory.cache_bytes(tiny, Candidate(made.method, eight_bits), 128)
    assert 4 * narrow == estimate


def test_fewer_rows_are_taken_where_they_do_not_fit(tiny, chosen, monkeypatch):
  row = sum(bytes_of(tiny, candidate.plan, 128) for candidate in chosen)
  monkeypatch.setattr(memory, "_memory", lambda: 3 * 5 * row)
  assert memory.rows_that_fit(tiny, chosen, 128, 5) == 5
  with pytest.warns(InputWarning, match="of 6 contexts .* 3 caches.*=5"):
    assert memory.rows_that_fit(tiny, chosen, 128, 6) == 5
  monkeypatch.setattr(memory, "_memory", lambda: 1)
  with pytest.warns(InputWarning, match="using --batch=1"):
    assert memory.rows_that_fit(tiny, chosen, 128, 6) == 1


def test_the_rows_that_fit_divide_over_the_mesh(tiny, chosen, monkeypatch):
  row = sum(bytes_of(tiny, candidate.plan, 128) for candidate in chosen)
  monkeypatch.setattr(memory, "_memory", lambda: 3 * 5 * row)
  with jax.set_mesh(parse_mesh("data:2")):
    with pytest.warns(InputWarning, match="using --batch=4"):
      assert memory.rows_that_fit(tiny, chosen, 128, 6) == 4
    assert memory.rows_that_fit(tiny, chosen, 128, 4) == 4


def test_retrieval_keeps_everything(tiny, chosen):
  retrieval, *_ = candidates(["ctkvr"], HALF)
  full = memory.cache_bytes(tiny, chosen[0], 128)
  assert memory.cache_bytes(tiny, retrieval, 128) == full


def test_all_caches_that_recite_count(tiny, chosen):
  full = memory.cache_bytes(tiny, chosen[0], 128)
  plan = kvjax.get_plan("keydiff", kvjax.Retention(1.0))
  record = kvjax.Calibration(
    *(0.0, 0.0, "tiny", plan.prompt_label, False),
    tau_range=(0.1, 1.0),
    error=0.0,
    triples=1,
    preset="recite",
    grid=(0.25, 0.5),
  )
  plan = dataclasses.replace(plan, budget=kvjax.Calibrated(record, 0.9))
  made = Candidate("keydiff", plan)
  assert memory.cache_bytes(tiny, made, 128) == 1.75 * full


def test_a_machine_has_memory():
  assert memory._memory() > 2**28
