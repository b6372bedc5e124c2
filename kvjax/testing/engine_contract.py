"""The checks of the caches that eviction methods make."""

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from kvjax.activations import Activations
from kvjax.allocation.base import Sizes
from kvjax.cache.cache import Cache
from kvjax.cache.layers import LayerCache
from kvjax.engine.compression_plan import Plan
from kvjax.engine.generate import generate, reserve
from kvjax.engine.joined_selection import select_joined
from kvjax.engine.prefill import prefill, sweep
from kvjax.errors import InputError
from kvjax.options.budgets import Budget, Retention, Tokens
from kvjax.options.schedules import Schedule
from kvjax.prompts import Prompts
from kvjax.testing import checks
from kvjax.testing.checks import explain, require
from kvjax.testing.subject import Subject
from kvjax.testing.tiny import kept_positions

_BUDGETS: tuple[Budget, ...] = (Tokens(12), Retention(0.5))
_PROTECTED = (1, 2, 7)
_SCHEDULE = Schedule(block=16, every=4)
_FREE = 64


def check_whole_prompts(subject: Subject) -> None:
  """Checks the caches of whole prompts."""
  _check_joined(subject)
  name, model, params = subject.name, subject.model, subject.params
  plans = [Plan(subject.method, budget) for budget in _BUDGETS]
  with explain(f"A sweep with {name} fails"):
    caches, _ = sweep(model, params, subject.prompts, plans)
    alone, _ = prefill(model, params, subject.prompts, plans[0])
  require(
    checks.same(alone, caches[0]),
    f"A sweep must keep with {name} what a prefill keeps; it does not.",
  )
  for plan, cache in zip(plans, caches, strict=True):
    _check_cache(subject, cache, plan.fixed_budget)
  one = Prompts.of(subject.rows[1:2], repeat_request=checks.REQUEST)
  row, _ = prefill(model, params, one, plans[0])
  require(
    kept_positions(row, 0) == kept_positions(caches[0], 1),
    f"What {name} keeps of a prompt must not depend on its batch mates; it "
    "does.",
  )
  checks.check_repeatable(name, model, caches[0])
  checks.check_saved(name, model, caches[0])
  protected, _ = prefill(model, params, _protect(subject), plans[1])
  _check_cache(subject, protected, plans[1].fixed_budget)
  _check_protected(subject, protected, "of a whole prompt")


def _check_joined(subject: Subject) -> None:
  """Refuses another selection where the layers to join are one layer."""
  if subject.layer is None or not subject.traits.joins_layers:
    return
  method, name = subject.method, subject.name
  activations = subject.activations().only(subject.traits.activations)
  cache, budget = LayerCache.of(activations), subject.budget(_BUDGETS[0])

  @jax.jit
  def choose(activations: Activations) -> tuple[Array, Array]:
    with jax.default_matmul_precision("highest"):
      scores = method.evaluate(jnp.int32(subject.layer), cache, activations)
    alone = method.select(scores, cache, budget)
    stacked = jax.tree.map(lambda x: x[None], scores)
    return alone, select_joined(method, stacked, cache, budget)

  with explain(f"{name} fails to join the scores of layers"):
    alone, joined = choose(activations)
  require(
    checks.same(alone, joined),
    "What join makes of the scores of a single layer must keep what these "
    f"scores keep; with {name} it does not.",
  )


def _protect(subject: Subject, rows: slice = slice(None)) -> Prompts:
  """Prompts of some of the rows, with protected tokens."""
  selected = subject.rows[rows]
  masks = [[n in _PROTECTED for n in range(len(row))] for row in selected]
  return Prompts.of(selected, protected=masks, repeat_request=checks.REQUEST)


def _check_protected(subject: Subject, cache: Cache, where: str) -> None:
  if subject.traits.renumbers:
    return
  for row in range(len(subject.rows)):
    by_layer = checks.global_positions(subject.model, cache, row)
    for heads in by_layer.values():
      for places in heads:
        lost = sorted({*_PROTECTED} - {*places})
        require(
          not lost,
          f"{subject.name} must keep what the user protects; it evicts "
          f"{lost} {where}: select what budget.must_keep(cache) names first.",
        )


def _check_cache(subject: Subject, cache: Cache, budget: Budget) -> None:
  """Refuses a cache with more or fewer tokens than its budget."""
  specs = subject.model.geometry.layers
  sizes = Sizes(
    tuple(s.kv_heads for s in specs if s.compressible), subject.traits.protects
  )
  lengths = np.array(subject.lengths)
  counts = subject.spread.counts(budget, lengths, sizes)
  totals = subject.spread.totals(budget, lengths, sizes)
  for row, length in enumerate(subject.lengths):
    by_layer = checks.global_positions(subject.model, cache, row)
    if subject.spread.whole_model:
      all_heads = [places for heads in by_layer.values() for places in heads]
      total = int(totals[:, row].sum())
      subject.check_counts(all_heads, length, total, total, f"at {budget}")
    for share, (layer, heads) in enumerate(by_layer.items()):
      where = f"layer {layer} at {budget} of {length}"
      for places in heads:
        require(
          len({*places}) == len(places) and {*places} <= {*range(length)},
          f"A cache of {subject.name} must hold tokens of the prompt, each "
          f"once; {where} it holds {places}.",
        )
      if subject.traits.keeps_layer(layer):
        require(
          all(len(places) == length for places in heads),
          f"The traits of {subject.name} keep layer {layer} whole; it is not.",
        )
        continue
      if subject.spread.whole_model:
        continue
      count, total = int(counts[share, row]), int(totals[share, row])
      subject.check_counts(heads, length, count, total, where)


def check_blocks(subject: Subject) -> None:
  """Checks the caches of block-wise prefill.

  A method that works on whole prompts only must say so in its error message.
  """
  method, name = subject.method, subject.name
  reason = subject.traits.whole_prompts_only
  plans = []
  # Repeated evictions must have room for more than what always stays.
  always = subject.traits.protects + subject.traits.sinks
  for budget in (Tokens(max(12, always + 4)), Retention(0.5)):
    try:
      plans.append(Plan(method, budget, schedule=_SCHEDULE))
    except InputError as error:
      require(
        not reason or reason in str(error),
        f"Where {name} cannot evict in blocks, the error must give the reason "
        f"{reason!r}; it is {str(error)!r}.",
      )
  require(
    bool(plans) != bool(reason),
    f"{name} evicts in blocks for no budget and its traits do not say why; "
    "give the reason as traits.whole_prompts_only.",
  )
  if plans:
    with explain(f"Evicting in blocks with {name} fails"):
      _check_recursive_plan(subject, plans[0])


def _check_recursive_plan(subject: Subject, plan: Plan) -> None:
  name, model, params = subject.name, subject.model, subject.params
  cache, _ = prefill(model, params, _protect(subject), plan)
  _check_protected(subject, cache, f"in blocks at {plan.budget}")
  budget = plan.fixed_budget
  for row, length in enumerate(subject.lengths):
    limit = subject.spread.capacity_between(budget, length)
    _check_limit(subject, cache, row, limit, f"in blocks at {budget}")
  loaded = checks.check_saved(name, model, cache)
  roomy = reserve(loaded, _FREE)
  after = generate(
    model, params, roomy, checks.QUESTIONS, checks.DECODING, keep=True
  ).cache
  assert after is not None
  _check_protected(subject, after, f"while decoding at {budget}")
  assert plan.schedule.every is not None
  turn = checks.QUESTIONS.tokens.shape[1] + checks.DECODING.max_new_tokens
  for row, length in enumerate(subject.lengths):
    limit = subject.spread.capacity_between(budget, length + turn)
    # Between two evictions, rows grow by `every` tokens.
    most = limit + plan.schedule.every
    _check_limit(subject, after, row, most, f"while decoding at {budget}")
  alone, _ = prefill(model, params, _protect(subject, slice(1, 2)), plan)
  require(
    kept_positions(alone, 0) == kept_positions(cache, 1),
    f"What {name} keeps of a row in blocks must not depend on its batch mates; "
    "it does.",
  )


def _check_limit(
  subject: Subject, cache: Cache, row: int, limit: int, where: str
) -> None:
  by_layer = checks.global_positions(subject.model, cache, row)
  for layer, heads in by_layer.items():
    if subject.traits.keeps_layer(layer):
      continue
    valid = max(map(len, heads))
    require(
      valid <= limit,
      f"{subject.name} holds {valid} tokens where {limit} may stay ({where}); "
      "select at most the budget's counts.",
    )
