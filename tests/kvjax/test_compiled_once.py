"""Prompts of other lengths are answered by the programs of the first ones."""

import contextlib

import jax
import numpy as np
import pytest
from made_up_gates import write_kvzap

import kvjax
from kvjax.testing import TinyModel

HALF, SOME = kvjax.Retention(0.5), kvjax.Tokens(24)
BLOCKS = kvjax.Schedule(block=16)
PLANS = {
  "kvzip by gradients": ("kvzip.grad:chunk=32:level=head", HALF),
  "simlayerkv": ("simlayerkv", HALF),
  "duoattention": ("duoattention", HALF),
  "packed": ("ada/snapkv:window=5", HALF),
  "pyramid": ("pyramidkv:window=5", HALF),
  "in blocks": ("keydiff", SOME),
  "evicting": ("snapkv:window=5", SOME),
  "evicting a share": ("h2o", HALF),
  "evicting by lags": ("lagkv:lag=8:sinks=2", HALF),
  "ctkvr": ("ctkvr:sinks=2:local=5:probes=2", kvjax.Tokens(8)),
  "quest": ("quest:dense_layers=", kvjax.Tokens(16)),
}
SCHEDULES = {
  "in blocks": BLOCKS,
  "evicting": kvjax.Schedule(every=4),
  "evicting a share": kvjax.Schedule(every=4),
  "evicting by lags": kvjax.Schedule(block=16, every=4),
}


def plan_of(name):
  schedule = SCHEDULES.get(name, kvjax.Schedule())
  return kvjax.get_plan(*PLANS[name], schedule=schedule)


@contextlib.contextmanager
def compiled():
  """Names of the programs that are compiled meanwhile."""
  names = []

  def count(event, _, **about):
    if event.endswith("/backend_compile_duration"):
      names.append(about.get("fun_name"))

  jax.monitoring.register_event_duration_secs_listener(count)
  try:
    yield names
  finally:
    jax.monitoring.unregister_event_duration_listener(count)


def ask(plans, lengths, questions):
  """Prefills two prompts, and answers two questions about each."""
  rng = np.random.default_rng(0)
  rows = [rng.permutation(64)[:length].tolist() for length in lengths]
  model = TinyModel()
  params, prompts = model.init(), kvjax.Prompts.of(rows)
  if isinstance(plans, kvjax.Plan):
    caches = [kvjax.prefill(model, params, prompts, plans)[0]]
  else:
    caches, _ = kvjax.sweep(model, params, prompts, plans)
  asked = kvjax.Prompts.of([[1] * length for length in questions])
  for cache in caches:
    kvjax.generate(model, params, cache, asked, kvjax.Decoding(5)).rows()


def compiles_anew(plans, lengths=(55, 50)):
  """Programs of a second call, for prompts of other lengths."""
  jax.clear_caches()
  ask(plans, (61, 43), (3, 2))
  with compiled() as names:
    ask(plans, lengths, (5, 1))
  return names


@pytest.mark.parametrize("name", PLANS)
def test_other_lengths_compile_nothing(name):
  assert compiles_anew(plan_of(name)) == []


@pytest.mark.parametrize("kind", ["shared budget", "threshold"])
def test_a_cache_of_another_size_compiles_no_pass_over_the_prompt(
  tmp_path, kind
):
  """The prompt decides how much a layer keeps, in steps."""
  plan = kvjax.get_plan("kvzip:chunk=32", HALF)
  if kind == "threshold":
    gate = write_kvzap(tmp_path, 32, 2, 2, score_range=[-99, 99])
    threshold = kvjax.Threshold(0.0, window=8)
    plan = kvjax.get_plan(f"kvzap:gate={gate}", threshold)
  names = {*compiles_anew(plan)}
  assert {"jit(_empty_stack)", "jit(keep_layer)"} <= names
  assert not names & {
    *("jit(embed)", "jit(forward_layer)", "jit(head)"),
    *("jit(replay_layer)", "jit(evaluate_layer)", "jit(select_layer)"),
  }


@pytest.mark.slow
def test_a_sweep_of_other_lengths_compiles_nothing():
  plans = map(plan_of, PLANS)
  whole = [plan for plan in plans if plan.schedule.block is None]
  assert len(whole) == len(PLANS) - 2
  assert compiles_anew(whole) == []


def test_weights_that_are_committed_to_a_device_need_no_more_programs():
  plan = kvjax.get_plan("keydiff", HALF)
  prompts = kvjax.Prompts.of([[*range(1, 60)], [*range(1, 40)]])
  counts = []
  for device in (None, jax.devices()[0]):
    jax.clear_caches()
    model = TinyModel()
    params = jax.device_put(model.init(), device)
    with compiled() as names:
      kvjax.prefill(model, params, prompts, plan)
    counts.append(names.count("jit(keep_layer)"))
  assert counts == [1, 1]


def test_other_shapes_are_counted():
  with compiled() as names:
    jax.jit(lambda x: x * 3 + 11)(np.ones(7, np.float32))
  assert names
