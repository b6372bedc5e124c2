"""Times evictions while decoding, beside the steps between them."""

import functools
import statistics
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

import kvjax
from kvjax.engine.capacity import prepare_decoding
from kvjax.engine.evicting import evict_all
from kvjax.engine.prepared import PreparedPlan
from kvjax.experiments.report.formats import Table
from kvjax.experiments.run import progress_bar, stopwatch
from kvjax.experiments.run.candidates import seeded
from kvjax.models.pretrained import Pretrained

# What evicts, unless methods are named.
METHODS = ("keydiff", "snapkv", "rkv")
# Tokens of an answer; CPUs decode one as long as this layer by layer.
_ANSWER = 512
_evict = jax.jit(
  evict_all, static_argnames=("model",), donate_argnames=("cache",)
)


class Evicted(NamedTuple):
  """Evictions from the caches of all layers and rows.

  Attributes:
    method: the method.
    kept: tokens after an eviction, mean over rows, layers and KV heads.
    seconds: seconds of an eviction in each round.
    decoding: seconds per step of an answer in each round, observing steps and
      evictions included.
  """

  method: str
  kept: float
  seconds: Sequence[float]
  decoding: Sequence[float]


class _Full(NamedTuple):
  """A cache from which a method evicts."""

  cache: kvjax.Cache
  prepared: PreparedPlan


# A cache that an answer begins from, and the logits that continue it.
_Start = tuple[kvjax.Cache, Float[Array, "B V"]]


def plan_of(method: str, target: int, every: int, seed: int) -> kvjax.Plan:
  """Keeps the whole prompt, and later `target` tokens by a method.

  Args:
    method: name of the method.
    target: tokens that stay.
    every: tokens that are decoded before the next eviction.
    seed: of a method that is named without one.

  Raises:
    InputError: there is no such method, or it cannot evict so.
  """
  later = kvjax.get_plan(
    method, kvjax.Tokens(target), schedule=kvjax.Schedule(every=every)
  )
  later = seeded(method, later, seed)
  return kvjax.get_plan("full", kvjax.Retention(1.0), decoding=later)


def measure(
  lm: Pretrained,
  plans: Mapping[str, kvjax.Plan],
  contexts: kvjax.Prompts,
  schedule: tuple[int, int],
  rounds: int,
) -> tuple[list[float], list[Evicted]]:
  """Decodes without evictions, and evicts by each method, in turns.

  Args:
    lm: the model.
    plans: those of `plan_of` by the names of their methods.
    contexts: the prompts, each of at least as many tokens as a cache has when a
      method evicts.
    schedule: `target` and `every` of the plans.
    rounds: number of timings of each, after compilation.

  Returns:
    Seconds per step without evictions, in each round; and the evictions of each
    method, with the steps of answers, which end with equally many slots.
  """
  target, every = schedule
  answer = -(-_ANSWER // every) * every
  with progress_bar.progress_bar(None, "prefilling", transient=True):
    never = kvjax.get_plan("full", kvjax.Retention(1.0))
    # So short that the answer fills the slots that the others have.
    short = _cut(contexts, max(target + every - answer, 1))
    few = _cut(contexts, target)
    starts = [
      kvjax.prefill(lm.model, lm.params, prompts, plan)
      for prompts, plan in (
        (short, never),
        *((few, plan) for plan in plans.values()),
      )
    ]
    full = [
      _prefill(lm, of_method, _cut(contexts, target + every), every)
      for of_method in plans.values()
    ]

  def step(start: _Start) -> float:
    decoding = kvjax.Decoding(answer)
    return (
      stopwatch.seconds(
        lambda: kvjax.generate(lm.model, lm.params, *start, decoding)
      )
      / answer
    )

  def copied(one: _Full) -> kvjax.Cache:
    # As in the loop of decoding, the cache is changed in place.
    return jax.block_until_ready(jax.tree.map(jnp.copy, one.cache))

  def evict(one: _Full) -> float:
    own = copied(one)
    return stopwatch.seconds(lambda: _evict(lm.model, one.prepared, own))

  step(starts[0])
  kept = []
  pairs = list(zip(full, starts[1:], strict=True))
  for one, start in progress_bar.track(pairs, "compiling"):
    after = _evict(lm.model, one.prepared, copied(one))
    kept.append(float(np.mean(after.lengths)))
    step(start)
  steps, *others = stopwatch.in_turns(
    [
      *(functools.partial(step, start) for start in starts),
      *(functools.partial(evict, one) for one in full),
    ],
    progress_bar.track(range(rounds), "timing"),
  )
  decoding, times = others[: len(full)], others[len(full) :]
  return steps, [
    Evicted(*of_method)
    for of_method in zip(plans, kept, times, decoding, strict=True)
  ]


def _cut(contexts: kvjax.Prompts, length: int) -> kvjax.Prompts:
  """The first tokens of each context."""
  return kvjax.Prompts.of([row[:length] for row in contexts.rows()])


def _prefill(
  lm: Pretrained, plan: kvjax.Plan, contexts: kvjax.Prompts, every: int
) -> _Full:
  """A cache that is full, with what the method remembers of its tokens."""
  cache, _ = kvjax.prefill(lm.model, lm.params, contexts, plan)
  lengths = np.asarray(cache.next_positions)
  prepared = prepare_decoding(
    lm.model, cache, lengths, 0, kvjax.Decoding(every)
  )
  assert prepared is not None
  return _Full(cache, prepared)


HEADING = (
  "method",
  "keeps",
  "ms an eviction",
  "% of the steps between two",
  "% in all",
)


def table(
  steps: Sequence[float], evicted: Sequence[Evicted], every: int
) -> Table:
  """Builds the table, given the results of `measure`.

  The last column is how much longer an answer takes with a method: what it
  observes at each step, and its evictions. It is the median over rounds, as all
  of a round see the same interference.
  """
  step, lines = statistics.median(steps), []
  for one in evicted:
    seconds = statistics.median(one.seconds)
    pairs = zip(one.decoding, steps, strict=True)
    ratio = statistics.median(own / plain for own, plain in pairs)
    lines.append(
      (
        one.method,
        f"{one.kept:,.0f}",
        f"{1e3 * seconds:,.1f}",
        f"{100 * seconds / every / step:.1f}",
        # Adding zero makes -0.0 positive.
        f"{round(100 * (ratio - 1), 1) + 0.0:.1f}",
      )
    )
  return Table("", HEADING, lines)
