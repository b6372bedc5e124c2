"""The contract of eviction methods, for the tests of any package."""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int, PyTree

from kvjax.activations import OPTIONAL, Activations
from kvjax.allocation.base import Allocation, LayerBudget, Sizes, Uniform
from kvjax.cache.cache import Cache
from kvjax.cache.layers import LayerCache
from kvjax.engine.generate import generate, reserve
from kvjax.engine.plans import Plan
from kvjax.engine.prefill import prefill, sweep
from kvjax.errors import InputError
from kvjax.methods.base import Method, ScoringMethod
from kvjax.methods.traits import Traits
from kvjax.options.budgets import Budget, Retention, Tokens
from kvjax.options.schedules import Schedule
from kvjax.prompts import Prompts
from kvjax.testing import checks
from kvjax.testing.checks import explained, require
from kvjax.testing.tiny import kept_positions

_BUDGETS: tuple[Budget, ...] = (Tokens(12), Retention(0.5))
_PROTECTED = (1, 2, 7)
_SCHEDULE = Schedule(block=16, every=4)
_FREE = 64
# Methods whose first layers keep everything choose in one of these.
_LAYERS = 3
_MOST_LAYERS = 64

# Slots that were kept, of each row and head.
_Slots = list[list[list[int]]]


def check_method(method: Method, *, exact: bool = True) -> None:
  """Checks that a method does what the engine expects and its traits say.

  It chooses from random projections and from the prompts of a tiny model: as a
  whole and in blocks, alone and in a batch, at several budgets, with protected
  tokens, and with NaN wherever there is no token. It goes on while decoding,
  and its caches are saved and loaded, for which its class must be registered
  (`kvjax.register`). This takes seconds on a CPU.

  Args:
    method: with options that leave something to choose in a row of 56 tokens,
      or of three times its window.
    exact: whether it keeps as many tokens as it may; False for one of whole
      chunks, say, that may leave room.

  Raises:
    InputError: says in a sentence what is wrong and what would be right.

  Example:
    >>> import kvjax
    >>> check_method(kvjax.get_method("tova"))
  """
  checks.check_value(method, Method)
  subject = _Subject(method, exact)
  if subject.layer is not None:
    _check_evaluation(subject)
    _check_choice(subject)
    _check_memory(subject)
  _check_whole_prompts(subject)
  _check_blocks(subject)


class _Subject:
  """A method, and what it is tried on.

  Attributes:
    method: the method.
    exact: whether it keeps as many tokens as it may.
    name: of its class.
    traits: its traits.
    spread: its allocation.
    layer: the first layer in which it chooses; None if there is none.
    lengths: of the rows.
    padded: width of their batch.
    model: has layers for it to choose in.
    params: the weights.
    prompts: the rows.
  """

  def __init__(self, method: Method, exact: bool) -> None:
    self.method = method
    self.exact = exact or isinstance(method, ScoringMethod)
    self.name = type(method).__name__
    self.traits, self.spread = method.traits, method.allocation
    require(
      isinstance(self.traits, Traits) and isinstance(self.spread, Allocation),
      f"The traits of {self.name} must be a kvjax.methods.Traits and its "
      "allocation a kvjax.allocation.Allocation; they are "
      f"{self.traits!r} and {self.spread!r}.",
    )
    chosen = (n for n in range(_MOST_LAYERS) if not self.traits.keeps_layer(n))
    self.layer = next(chosen, None)
    longest = max(56, 3 * max(self.traits.window, self.traits.protects))
    self.lengths = [longest, longest // 2, longest * 2 // 3]
    self.padded = longest + 8
    self.model = checks.model_for(max(_LAYERS, (self.layer or 0) + 1), longest)
    self.params = self.model.init()
    self.rows = checks.tokens(self.lengths)
    self.prompts = Prompts.of(self.rows)

  def activations(self, seed: int = 0) -> Activations:
    """Random projections with every optional one."""
    return checks.all_activations(seed, self.lengths, self.padded)

  def budget(
    self,
    budget: Budget,
    lengths: Sequence[int] | None = None,
    padded: int | None = None,
  ) -> LayerBudget:
    """What rows may keep of the layer in which the method is tried."""
    assert self.layer is not None
    sizes = Sizes((checks.KV_HEADS,) * (self.layer + 1))
    of = np.array(lengths or self.lengths)
    counts = self.spread.counts(budget, of, sizes)[self.layer]
    totals = self.spread.totals(budget, of, sizes)[self.layer]
    return LayerBudget(
      jnp.asarray(counts), padded or self.padded, total=jnp.asarray(totals)
    )

  def check_held(
    self,
    heads: Sequence[Sequence[int]],
    length: int,
    count: int,
    total: int,
    where: str,
  ) -> None:
    """Refuses heads of a row that hold too much or too little.

    Args:
      heads: places of what each holds.
      length: of the row.
      count: what each may hold, or all of them on average.
      total: what all may hold together.
      where: for the message.
    """
    valid = [len(places) for places in heads]
    who, most = "a head", min(count, length)
    if self.spread.ragged:
      who, most, valid = "all heads together", total, [sum(valid)]
    require(
      max(valid) <= most,
      f"{self.name} keeps {max(valid)} tokens where {who} may keep {most} "
      f"({where}); select at most the budget's counts.",
    )
    require(
      min(valid) == most if self.exact else min(valid) >= 1,
      f"{self.name} keeps {min(valid)} tokens where {who} may keep {most} "
      f"({where}); keep as many as that, or check with exact=False if it is "
      "meant to leave room.",
    )


def _choose(
  method: Method,
  layer: Int[Array, ""],
  activations: Activations,
  budget: LayerBudget,
) -> Int[Array, "B K M"]:
  """What a method keeps of a prompt, as the engine asks it."""
  activations = activations.only(method.traits.reads)
  cache = LayerCache.of(activations)
  spread = method.allocation
  with jax.default_matmul_precision("highest"):
    scores = spread.evaluate(method, layer, cache, activations)
  return spread.select(method, scores, cache, budget)


def _choose_later(
  method: Method,
  layer: Int[Array, ""],
  activations: Activations,
  budget: LayerBudget,
) -> Int[Array, "B K M"]:
  """The same when the prompt is gone but for what was remembered of it."""
  cache = LayerCache.of(activations)
  spread = method.allocation
  with jax.default_matmul_precision("highest"):
    cache = method.observe(layer, cache, activations)
    scores = spread.evaluate(method, layer, cache, _padding_like(activations))
  return spread.select(method, scores, cache, budget)


def _padding_like(activations: Activations) -> Activations:
  """A block of a token of padding, without optional activations."""

  def blank(x: Array) -> Array:
    return jnp.zeros((*x.shape[:2], 1, x.shape[-1]), x.dtype)

  return Activations(
    blank(activations.queries),
    blank(activations.keys),
    blank(activations.values),
    jnp.full((activations.positions.shape[0], 1), -1, jnp.int32),
  )


_chosen = jax.jit(_choose, static_argnums=0)
_chosen_later = jax.jit(_choose_later, static_argnums=0)


def _check_evaluation(subject: _Subject) -> None:
  """Refuses what cannot be compiled, undeclared reads and odd scores."""
  try:
    found = _traced(subject, subject.traits.reads)
  except Exception as error:
    _explain_reads(subject, error)
    raise InputError(
      f"{subject.name} must evaluate a layer as the engine asks it, compiled "
      "and with the layer's number not known then; it fails with "
      f"{checks.first_line(error)}"
    ) from error
  if not isinstance(subject.method, ScoringMethod):
    return
  shape = (len(subject.lengths), checks.KV_HEADS, subject.padded)
  for scores in (found, _traced(subject, subject.traits.reads, "bfloat16")):
    require(
      scores.shape == shape and scores.dtype == jnp.float32,
      f"{subject.name} must give every slot a score in float32, {shape} of "
      "them here, whatever the cache's dtype; it gives "
      f"{scores.dtype} {scores.shape}.",
    )


def _traced(
  subject: _Subject, reads: frozenset[str], dtype: str = "float32"
) -> Any:
  """Shapes of the scores, or of what else the method evaluates to."""
  method = subject.method
  evaluate = (
    method.scores if isinstance(method, ScoringMethod) else method.evaluate
  )

  def run(layer: Int[Array, ""], activations: Activations) -> PyTree:
    return evaluate(layer, LayerCache.of(activations), activations)

  activations = jax.tree.map(
    lambda x: x.astype(dtype) if x.dtype == jnp.float32 else x,
    subject.activations(),
  )
  return jax.eval_shape(run, jnp.int32(0), activations.only(reads))


def _explain_reads(subject: _Subject, error: Exception) -> None:
  """Names the activations whose absence is the cause, if they are."""

  def works(reads: frozenset[str]) -> bool:
    try:
      _traced(subject, reads)
    except Exception:
      return False
    return True

  everything = frozenset(OPTIONAL)
  if not works(everything):
    return
  needed = [name for name in OPTIONAL if not works(everything - {name})]
  missing = [name for name in needed if name not in subject.traits.reads]
  if not missing:
    return
  fields = " and ".join(f"activations.{name}" for name in missing)
  names = ", ".join(f'"{n}"' for n in sorted({*needed, *subject.traits.reads}))
  raise InputError(
    f"{subject.name} reads {fields} without saying so, and the engine leaves "
    f"out what nobody asks for; its traits need reads=frozenset({{{names}}})."
  ) from error


def _checked(
  subject: _Subject,
  slots: Any,
  budget: LayerBudget,
  lengths: Sequence[int],
  padded: int,
) -> _Slots:
  """Slots as lists, if they are such.

  Raises:
    InputError: they are out of range, empty, unsorted, too many or too few.
  """
  slots, name = np.asarray(slots), subject.name
  require(
    slots.ndim == 3
    and slots.shape[:2] == (len(lengths), checks.KV_HEADS)
    and np.issubdtype(slots.dtype, np.integer),
    f"{name} must select whole numbers of slots, a list for each row and KV "
    f"head; it gives {slots.dtype} {slots.shape}.",
  )
  found = []
  counts, totals = np.asarray(budget.counts), np.asarray(budget.total)
  rows = zip(slots, lengths, counts.tolist(), totals.tolist(), strict=True)
  for row, length, count, total in rows:
    heads = [_checked_head(name, head, length, padded) for head in row]
    where = f"of {length}"
    subject.check_held(heads, length, count, total, where)
    for places in heads:
      window = min(
        subject.traits.protects,
        len(places) if subject.spread.ragged else min(count, length),
      )
      newest = set(range(length - window, length))
      require(
        newest <= {*places},
        f"The traits of {name} say that the last {subject.traits.protects} "
        f"tokens always stay (protects); it evicts "
        f"{sorted(newest - {*places})} {where}.",
      )
    found.append(heads)
  return found


def _checked_head(
  name: str, slots: Int[np.ndarray, " M"], length: int, padded: int
) -> list[int]:
  outside = slots[(slots < -1) | (slots >= padded)]
  require(
    not outside.size,
    f"{name} selects slot {outside[:1].sum()} of a layer whose slots are 0 to "
    f"{padded - 1}; give those, ascending, then -1 for what is not filled.",
  )
  filled: list[int] = slots[slots >= 0].tolist()
  require(
    slots[: len(filled)].tolist() == filled == sorted({*filled}),
    f"{name} must select every slot once, in ascending order, then -1; it "
    f"gives {slots.tolist()}.",
  )
  empty = [slot for slot in filled if slot >= length]
  require(
    not empty,
    f"{name} selects slot {empty[:1]}, which holds no token; only slots of "
    "cache.held may be kept.",
  )
  return filled


def _check_choice(subject: _Subject) -> None:
  """Refuses slots that do not follow from a row's own tokens alone."""
  method, name = subject.method, subject.name
  layer = jnp.int32(subject.layer)
  one, other = subject.activations(), subject.activations(7)
  swapped = checks.rows_of([(one, 2), (other, 1), (one, 0)], subject.padded)
  short = subject.lengths[1]
  alone = checks.rows_of([(one, 1)], short + 3)
  spoiled = jax.tree.map(
    lambda x: jnp.nan_to_num(x, nan=7.0) if x.dtype == jnp.float32 else x, one
  )
  for budget in _BUDGETS:
    own = subject.budget(budget)

    def choose(
      activations: Activations,
      own: LayerBudget = own,
      lengths: Sequence[int] = subject.lengths,
      padded: int = subject.padded,
    ) -> _Slots:
      with explained(f"{name} fails to select slots"):
        slots = _chosen(method, layer, activations, own)
      return _checked(subject, slots, own, lengths, padded)

    kept = choose(one)
    require(
      choose(spoiled) == kept,
      f"What empty slots and padding hold must not change what {name} keeps; "
      "it does: mask by cache.held and by positions.",
    )
    backwards = subject.lengths[::-1]
    turned = choose(swapped, subject.budget(budget, backwards), backwards)
    require(
      turned[0] == kept[2] and turned[2] == kept[0],
      f"What {name} keeps of a row must not depend on its batch mates nor on "
      "its place among them; it does.",
    )
    lone = choose(
      alone, subject.budget(budget, [short], short + 3), [short], short + 3
    )
    require(
      lone[0] == kept[1],
      f"What {name} keeps of a row must not depend on its padding; it does.",
    )
  with explained(f"{name} fails where it is not compiled"):
    eager = _choose(method, layer, one, own)
  require(
    _checked(subject, eager, own, subject.lengths, subject.padded) == kept,
    f"{name} must keep the same compiled or not; it does not.",
  )
  with explained(f"{name} fails where every query head holds keys of its own"):
    wide = one.with_kv_heads(one.queries.shape[1])
    slots = jax.eval_shape(functools.partial(_choose, method), layer, wide, own)
  require(
    slots.shape[1] == wide.keys.shape[1],
    f"{name} must choose for every head that holds keys (per_query_head=True), "
    f"{wide.keys.shape[1]} here; it chooses for {slots.shape[1]}.",
  )


def _check_memory(subject: _Subject) -> None:
  """Refuses a method that evicts in blocks and reads what is gone by then."""
  if subject.traits.whole_prompts_only:
    return
  method, name = subject.method, subject.name
  layer, activations = jnp.int32(subject.layer), subject.activations()
  window = subject.traits.window
  remedy = (
    "declare the last queries that it reads as traits.window (it is "
    f"{window}), remember more in observe, or say in traits.whole_prompts_only "
    "why it needs a whole prompt."
  )
  for budget in _BUDGETS:
    own = subject.budget(budget)
    with explained(
      f"{name} fails where a block has gone and only what observe remembers "
      f"of it is left; {remedy.removesuffix('.')}"
    ):
      later = _chosen_later(method, layer, activations, own)
    now = _chosen(method, layer, activations, own)
    require(
      checks.same(now, later),
      f"{name} chooses otherwise when the queries of a block have gone, as "
      f"they have where it evicts in blocks; {remedy}",
    )


def _check_whole_prompts(subject: _Subject) -> None:
  """Refuses caches of whole prompts that break the contract."""
  name, model, params = subject.name, subject.model, subject.params
  plans = [Plan(subject.method, budget) for budget in _BUDGETS]
  with explained(f"A sweep with {name} fails"):
    caches, _ = sweep(model, params, subject.prompts, plans)
    alone, _ = prefill(model, params, subject.prompts, plans[0])
  require(
    checks.same(alone, caches[0]),
    f"A sweep must keep with {name} what a prefill keeps; it does not.",
  )
  for plan, cache in zip(plans, caches, strict=True):
    _check_cache(subject, cache, plan.fixed_budget)
  row, _ = prefill(model, params, Prompts.of(subject.rows[1:2]), plans[0])
  require(
    kept_positions(row, 0) == kept_positions(caches[0], 1),
    f"What {name} keeps of a prompt must not depend on its batch mates; it "
    "does.",
  )
  checks.check_asked(name, model, caches[0])
  checks.check_saved(name, model, caches[0])
  guarded, _ = prefill(model, params, _guarded(subject), plans[1])
  _check_cache(subject, guarded, plans[1].fixed_budget)
  _check_guarded(subject, guarded, "of a whole prompt")


def _guarded(subject: _Subject, rows: slice = slice(None)) -> Prompts:
  """Some of the rows with protected tokens."""
  own = subject.rows[rows]
  masks = [[n in _PROTECTED for n in range(len(row))] for row in own]
  return Prompts.of(own, protected=masks)


def _check_guarded(subject: _Subject, cache: Cache, where: str) -> None:
  if subject.traits.renumbers:
    return
  for row in range(len(subject.rows)):
    for heads in kept_positions(cache, row):
      for places in heads:
        lost = sorted({*_PROTECTED} - {*places})
        require(
          not lost,
          f"{subject.name} must keep what the user protects; it evicts "
          f"{lost} {where}: select what budget.must_keep(cache) names first.",
        )


def _check_cache(subject: _Subject, cache: Cache, budget: Budget) -> None:
  """Refuses a cache that holds more or less than its budget."""
  layers = subject.model.geometry.num_layers
  sizes = Sizes((2,) * layers)
  lengths = np.array(subject.lengths)
  counts = subject.spread.counts(budget, lengths, sizes)
  totals = subject.spread.totals(budget, lengths, sizes)
  for row, length in enumerate(subject.lengths):
    for layer, heads in enumerate(kept_positions(cache, row)):
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
      count, total = int(counts[layer, row]), int(totals[layer, row])
      subject.check_held(heads, length, count, total, where)


def _check_blocks(subject: _Subject) -> None:
  """Refuses caches of blocks that break the contract.

  A method that works on whole prompts alone must say so to the user.
  """
  method, name = subject.method, subject.name
  reason = subject.traits.whole_prompts_only
  plans = []
  for budget in _BUDGETS:
    try:
      plans.append(Plan(method, budget, _SCHEDULE))
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
    with explained(f"Evicting in blocks with {name} fails"):
      _check_recursive_plan(subject, plans[0])


def _check_recursive_plan(subject: _Subject, plan: Plan) -> None:
  name, model, params = subject.name, subject.model, subject.params
  cache, _ = prefill(model, params, _guarded(subject), plan)
  _check_guarded(subject, cache, f"in blocks at {plan.budget}")
  budget = plan.fixed_budget
  limits = _limits(subject, budget)
  for row, limit in enumerate(limits):
    _check_limit(subject, cache, row, limit, f"in blocks at {budget}")
  loaded = checks.check_saved(name, model, cache)
  roomy = reserve(loaded, _FREE)
  after = generate(
    model, params, roomy, checks.QUESTIONS, checks.DECODING, keep=True
  ).cache
  assert after is not None
  _check_guarded(subject, after, f"while decoding at {budget}")
  assert plan.schedule.every is not None
  for row, limit in enumerate(limits):
    most = limit and limit + plan.schedule.every
    _check_limit(subject, after, row, most, f"while decoding at {budget}")
  alone, _ = prefill(model, params, _guarded(subject, slice(1, 2)), plan)
  require(
    kept_positions(alone, 0) == kept_positions(cache, 1),
    f"What {name} keeps of a row in blocks must not depend on its batch mates; "
    "it does.",
  )


def _limits(subject: _Subject, budget: Budget) -> list[int | None]:
  """What rows may hold after a block; None where a law of its own says it."""
  if not isinstance(subject.spread, Uniform):
    return [None] * len(subject.lengths)
  return [budget.kept(length) for length in subject.lengths]


def _check_limit(
  subject: _Subject, cache: Cache, row: int, limit: int | None, where: str
) -> None:
  if limit is None:
    return
  for layer, heads in enumerate(kept_positions(cache, row)):
    if subject.traits.keeps_layer(layer):
      continue
    valid = max(map(len, heads))
    require(
      valid <= limit,
      f"{subject.name} holds {valid} tokens where {limit} may stay ({where}); "
      "select at most the budget's counts.",
    )
