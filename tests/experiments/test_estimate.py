"""About how long a run takes, from operations, bytes and rates."""

import contextlib
import dataclasses
import itertools

import jax
import jax.numpy as jnp
import pytest

import kvjax
from kvjax.cache.sharding import parse_mesh
from kvjax.experiments.run import estimate, stopwatch
from kvjax.experiments.run.candidates import Candidate, candidates
from kvjax.experiments.run.estimate import Batch, Rates
from kvjax.experiments.run.memory import cache_bytes
from kvjax.struct import tree_bytes

from .conftest import pretrained

WHOLE = candidates(["full"], [kvjax.Retention(1.0)])
HALF = candidates(["keydiff"], [kvjax.Retention(0.5)])
CONTEXT = Batch(rows=3, context=64, fed=0, steps=0)
# A device of no bandwidth to speak of, and one of no speed.
QUICK, WIDE = Rates(1e30, 1e6), Rates(1e6, 1e30)


@pytest.fixture
def seconds(monkeypatch):
  """Estimates at given rates, instead of those of this machine."""

  def at(rates, lm, *arguments):
    monkeypatch.setattr(Rates, "probe", lambda dtype: rates)
    return estimate.estimate(lm, *arguments)

  return at


@pytest.mark.parametrize("fields", [{}, {"tie_word_embeddings": False}])
def test_operations_are_those_that_xla_counts(fields, seconds):
  wide = {"hidden_size": 256, "intermediate_size": 512, "head_dim": 64}
  lm = pretrained(num_hidden_layers=1, **wide, **fields)
  model, (spec,) = lm.model, lm.config.geometry.layers
  tokens = jnp.zeros((1, 64), jnp.int32)
  positions = jnp.arange(64, dtype=jnp.int32)[None]

  def attend(activations):
    return activations.queries, (activations.keys, activations.values)

  def body(params):
    hidden, shared = model.embed(params, tokens, positions)
    weights = jax.tree.map(lambda x: x[0], model.layer_weights(params)[0])
    return model.block(weights, spec, hidden, shared, positions, attend)

  def flops(run, *operands):
    return jax.jit(run).lower(*operands).cost_analysis()["flops"]

  of_body = flops(body, lm.params)
  found = 1e6 * seconds(WIDE, lm, WHOLE, [Batch(1, 64, 0, 0)])
  # Attention: a token meets 32 keys and values of 4 heads on average.
  found -= 64 * 2 * 32 * 4 * 2 * 64
  # XLA counts norms, RoPE and activations besides products.
  assert 0.95 * of_body < found < of_body

  of_head = flops(model.logits, lm.params, jnp.zeros((1, 64, 256)))
  decoded = seconds(WIDE, lm, WHOLE, [Batch(1, 0, 0, 64)])
  fed = seconds(WIDE, lm, WHOLE, [Batch(1, 0, 64, 0)])
  assert 1e6 * (decoded - fed) == pytest.approx(of_head, rel=0.01)


def test_what_caches_recite_counts(seconds):
  """A pass for the caches of the grid, and a replay by each and by the full."""
  lm = pretrained(num_hidden_layers=1)
  plan = HALF[-1].plan
  record = kvjax.Calibration(
    *(0.0, 0.0, "tiny", plan.prompt_label, False),
    tau_range=(0.1, 1.0),
    error=0.0,
    triples=1,
    preset="recite",
    grid=(0.2, 0.5, 0.7),
  )
  budget = kvjax.Calibrated(record, 0.9)
  reciting = Candidate("keydiff", dataclasses.replace(plan, budget=budget))
  kvzip = candidates(["kvzip:chunk=64"], [kvjax.Retention(0.5)])[-1:]
  plain, replayed, recited = (
    seconds(WIDE, lm, chosen, [CONTEXT])
    for chosen in (HALF[-1:], kvzip, [reciting])
  )
  expected = 2 * plain + 4 * (replayed - plain)
  assert recited == pytest.approx(expected)


def test_of_experts_those_count_that_a_token_needs(seconds):
  moe = {
    "model_type": "qwen3_moe",
    "num_experts": 4,
    "moe_intermediate_size": 48,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "norm_topk_prob": True,
  }
  all_four, two = (
    seconds(
      WIDE, pretrained(num_experts_per_tok=n, **moe), WHOLE, [Batch(1, 0, 1, 0)]
    )
    for n in (4, 2)
  )
  # Two experts of two layers, each of three matrices.
  assert 1e6 * (all_four - two) == pytest.approx(2 * 2 * 2 * 3 * 32 * 48)


def test_a_step_reads_weights_and_caches(tiny, seconds):
  both = [*WHOLE, *HALF[1:]]
  cached = 3 * sum(cache_bytes(tiny, each, 64) for each in both)
  found = seconds(QUICK, tiny, both, [CONTEXT._replace(steps=5)])
  assert found == pytest.approx(5 * (tree_bytes(tiny.params) + cached) / 1e6)


def test_methods_share_a_pass_unless_they_need_their_own(tiny, seconds):
  def of(*names, block=None):
    chosen = [
      each
      for name in names
      for each in candidates(
        [name], [kvjax.Retention(0.5)], kvjax.Schedule(block=block)
      )[1:]
    ]
    return seconds(WIDE, tiny, chosen, [CONTEXT])

  once = of("keydiff")
  assert of("keydiff", "snapkv", "tova") == once
  assert of("keydiff", "streaming", block=16) == pytest.approx(2 * once)
  replayed = of("keydiff", "kvzip")
  assert 2 * once < replayed < 4 * once
  assert of("keydiff", "kvzip", "kvzip.plus") == replayed
  assert of("keydiff", "kvzip", "kvzip.grad") > replayed + 2 * once


def test_a_window_bounds_what_a_token_attends_to(hybrid, seconds):
  by_length = [
    seconds(WIDE, hybrid, WHOLE, [Batch(1, length, 0, 0)]) / length
    for length in (64, 128, 192)
  ]
  steps = [b - a for a, b in itertools.pairwise(by_length)]
  # Only the layer without one attends to more: 32 more tokens of 4 heads.
  assert steps == pytest.approx([2 * 32 * 4 * 16 / 1e6] * 2)


def test_devices_share_the_work_but_not_the_weights(tiny, seconds):
  batches = [CONTEXT._replace(fed=4, steps=7)]
  alone = [seconds(rates, tiny, WHOLE, batches) for rates in (WIDE, QUICK)]
  with jax.set_mesh(parse_mesh("data:2,model:2")):
    shared = [seconds(rates, tiny, WHOLE, batches) for rates in (WIDE, QUICK)]
  assert shared[0] == pytest.approx(alone[0] / 4)
  again = 7 * tree_bytes(tiny.params) / 1e6
  assert shared[1] == pytest.approx((alone[1] + again) / 4)


def test_rates_are_a_third_of_what_is_measured(monkeypatch):
  # A clock by which the first call, which compiles, takes 50 s, others 2 s.
  ticks = itertools.accumulate(itertools.cycle([0, 50, 0, 2, 0, 2]))
  monkeypatch.setattr(stopwatch.time, "perf_counter", lambda: next(ticks))
  rates = Rates.probe.__wrapped__(Rates, jnp.dtype("float32"))
  assert rates.operations == pytest.approx(2 * 1536**3 / 2 / 3)
  assert rates.nbytes == pytest.approx(2 * 2**26 / 2 / 3)


@pytest.mark.parametrize("mesh", [None, "data:2,model:2"])
def test_this_device_has_rates(mesh):
  on_mesh = jax.set_mesh(parse_mesh(mesh)) if mesh else contextlib.nullcontext()
  with on_mesh:
    rates = Rates.probe.__wrapped__(Rates, jnp.dtype("bfloat16"))
  assert 1e6 < rates.nbytes < 1e14
  assert 1e6 < rates.operations < 1e17


@pytest.mark.parametrize(
  ("seconds", "text"),
  [
    (0.2, "1 s"),
    (44, "40 s"),
    (57, "1 min"),
    (140, "2 min"),
    (2300, "40 min"),
    (3500, "1 h"),
    (86400, "20 h"),
  ],
)
def test_times_are_rounded_to_one_digit(seconds, text):
  assert estimate.in_words(seconds) == text


def test_an_estimate_says_what_it_leaves_out():
  said = estimate.expected(57.0)
  assert said.startswith("Expect about 1 min here, less if answers are s")
  assert "are compiled, which adds some seconds for each method" in said
