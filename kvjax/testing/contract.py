"""The checks of eviction methods, for the tests of any package."""

import dataclasses
import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int, PyTree

from kvjax.activations import OPTIONAL, Activations
from kvjax.allocation.base import LayerBudget
from kvjax.cache.layers import LayerCache
from kvjax.cache.sharding import replicate
from kvjax.checkpoint.trees import describe
from kvjax.errors import InputError
from kvjax.methods.base import Method, ScoringMethod
from kvjax.options.budgets import Budget, Retention, Tokens
from kvjax.testing import checks
from kvjax.testing.checks import explain, require
from kvjax.testing.engine_contract import check_blocks, check_whole_prompts
from kvjax.testing.slots import Slots, check_slots
from kvjax.testing.subject import Subject

_BUDGETS: tuple[Budget, ...] = (Tokens(12), Retention(0.5))


def check_method(method: Method) -> None:
  """Checks that a method meets the engine's requirements and its traits.

  The method selects from random activations and from the prompts of a tiny
  model, one of whose layers has a window unless the method gives tokens new
  numbers: whole prompts and blocks, single rows and batches, several budgets,
  protected tokens, and NaN in all empty slots. It evicts while decoding, and
  its caches are saved and loaded, for which its class must be registered
  (`kvjax.register`). This takes about half a minute on a CPU.

  Args:
    method: a method whose options let it evict from a row of 56 tokens, or of
      three times its window or the last queries that it reads.

  Raises:
    InputError: a check fails; the message says what is wrong and how to fix it.

  Examples:
    >>> import kvjax
    >>> from kvjax.testing import check_method
    >>> check_method(kvjax.get_method("tova"))
  """
  checks.check_value(method, Method)
  subject = Subject(method)
  if subject.layer is not None:
    _check_evaluation(subject)
    _check_queries(subject)
    _check_files(subject)
    _check_choice(subject)
    _check_heads(subject)
    _check_memory(subject)
  _check_registered(subject)
  check_whole_prompts(subject)
  check_blocks(subject)


def _choose(
  method: Method,
  layer: Int[Array, ""],
  activations: Activations,
  budget: LayerBudget,
) -> Int[Array, "B K M"]:
  """Selects slots of a prompt as the engine does."""
  activations = activations.only(method.traits.activations)
  activations = activations.with_queries(method.traits.queries)
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
  """Selects slots from what `observe` stored, without the prompt's queries."""
  cache = LayerCache.of(activations)
  spread = method.allocation
  with jax.default_matmul_precision("highest"):
    seen = activations.only(method.traits.observes)
    cache = method.observe(layer, cache, seen)
    block = _empty_block(activations, method.traits.always)
    scores = spread.evaluate(method, layer, cache, block)
  return spread.select(method, scores, cache, budget)


def _empty_block(
  activations: Activations, names: frozenset[str]
) -> Activations:
  """A block without tokens, with what of `names` the model can do."""

  def blank(x: Array) -> Array:
    return jnp.zeros((*x.shape[:2], 0, x.shape[-1]), x.dtype)

  return Activations(
    blank(activations.queries),
    blank(activations.keys),
    blank(activations.values),
    jnp.zeros((activations.positions.shape[0], 0), jnp.int32),
    rerotate=activations.rerotate if "rerotate" in names else None,
  )


_choose_compiled = jax.jit(_choose, static_argnums=0)
_choose_later_compiled = jax.jit(_choose_later, static_argnums=0)


def _check_evaluation(subject: Subject) -> None:
  """Refuses failures to compile, undeclared activations and wrong scores."""
  try:
    for dtype in ("float32", "bfloat16"):
      _trace(subject, subject.traits.activations, dtype)
  except Exception as error:
    _explain_missing(subject, error)
    if isinstance(error, InputError):
      raise
    raise InputError(
      f"{subject.name} must evaluate a layer as the engine asks it, compiled "
      "and with the layer's number not known then; it fails with "
      f"{checks.first_line(error)}"
    ) from error
  if isinstance(subject.method, ScoringMethod):
    _check_numbers(subject, subject.method)


def _check_queries(subject: Subject) -> None:
  """Refuses a method that reads more queries than its traits say."""
  count = subject.traits.queries
  if count is None:
    return
  one = subject.activations().only(subject.traits.activations)

  @jax.jit
  def evaluate(activations: Activations) -> PyTree[Array]:
    cache = LayerCache.of(activations)
    layer = jnp.asarray(subject.layer, jnp.int32)
    return subject.spread.evaluate(subject.method, layer, cache, activations)

  wrong = (
    f"{subject.name} reads more of the prompt's queries than its traits say, "
    f"queries={count}: a prefill drops the others; raise that, or leave it out."
  )
  try:
    found = evaluate(one.with_queries(count))
  except Exception as error:
    raise InputError(wrong) from error
  pairs = zip(
    jax.tree.leaves(found), jax.tree.leaves(evaluate(one)), strict=True
  )
  same = all(np.array_equal(x, y, equal_nan=True) for x, y in pairs)
  require(same, wrong)


def _check_numbers(subject: Subject, method: ScoringMethod) -> None:
  """Refuses NaN as the score of a token."""
  activations = subject.activations().only(subject.traits.activations)
  cache = LayerCache.of(activations)
  with explain(f"{subject.name} fails to score slots"):
    scores = jax.jit(method.scores)(
      jnp.int32(subject.layer), cache, activations
    )
  lost = np.argwhere(np.isnan(scores) & np.asarray(cache.valid))
  require(
    not lost.size,
    f"{subject.name} must give every token a score; that of {len(lost)} "
    "tokens is NaN here: a score of -inf evicts a token first, and NaN of "
    "empty slots must not reach a sum.",
  )


def _check_files(subject: Subject) -> None:
  """Refuses other scores without the names of files but with their arrays."""
  method, layer = subject.method, jnp.int32(subject.layer)
  if (known_as := method.without_files()) is method:
    return
  given = subject.activations().only(subject.traits.activations)
  cache = LayerCache.of(given)
  expected = method.evaluate(layer, cache, given)
  given = dataclasses.replace(given, weights=replicate(method.load()))
  found = known_as.evaluate(layer, cache, given)
  require(
    checks.same(expected, found),
    f"{subject.name} must score tokens alike without the names of its files "
    "(without_files), which compiled programs do not know, if it is given what "
    "load returns; leave out names of files only.",
  )


def _trace(
  subject: Subject, names: frozenset[str], dtype: str = "float32"
) -> None:
  """Evaluates a layer without computing anything."""

  def run(layer: Int[Array, ""], activations: Activations) -> PyTree:
    cache = LayerCache.of(activations)
    return subject.method.evaluate(layer, cache, activations)

  activations = jax.tree.map(
    lambda x: x.astype(dtype) if x.dtype == jnp.float32 else x,
    subject.activations(),
  )
  jax.eval_shape(run, jnp.int32(0), activations.only(names))


def _explain_missing(subject: Subject, error: Exception) -> None:
  """Raises an error that names missing activations, if they are the cause."""

  def works(names: frozenset[str]) -> bool:
    try:
      _trace(subject, names)
    except Exception:
      return False
    return True

  everything = frozenset(OPTIONAL)
  if not works(everything):
    return
  needed = [name for name in OPTIONAL if not works(everything - {name})]
  missing = [name for name in needed if name not in subject.traits.activations]
  if not missing:
    return
  fields = " and ".join(f"activations.{name}" for name in missing)
  names = ", ".join(
    f'"{n}"' for n in sorted({*needed, *subject.traits.activations})
  )
  raise InputError(
    f"{subject.name} reads {fields} without saying so, and the engine leaves "
    "out what nobody asks for; its traits need "
    f"activations=frozenset({{{names}}})."
  ) from error


def _check_choice(subject: Subject) -> None:
  """Refuses selections that depend on padding or on other rows."""
  method, name = subject.method, subject.name
  layer = jnp.int32(subject.layer)
  one, other = subject.activations(), subject.activations(7)
  swapped = checks.rows_of([(one, 2), (other, 1), (one, 0)], subject.padded)
  short = subject.lengths[1]
  # Without batch mates, and with other padding than in the batch.
  alone = checks.rows_of([(one, 1)], short + 3)
  # `one` has NaN in its padding; finite numbers must change nothing either.
  spoiled = jax.tree.map(
    lambda x: jnp.nan_to_num(x, nan=7.0) if x.dtype == jnp.float32 else x, one
  )
  for budget in _BUDGETS:
    layer_budget = subject.budget(budget)

    def choose(
      activations: Activations,
      layer_budget: LayerBudget = layer_budget,
      lengths: Sequence[int] = subject.lengths,
      padded: int = subject.padded,
    ) -> Slots:
      with explain(f"{name} fails to select slots"):
        slots = _choose_compiled(method, layer, activations, layer_budget)
      return check_slots(subject, slots, layer_budget, lengths, padded)

    kept = choose(one)
    require(
      choose(spoiled) == kept,
      f"What empty slots and padding hold must not change what {name} keeps; "
      "it does: mask what is not valid, and score by positions.",
    )
    require(
      not subject.traits.positional or choose(other) == kept,
      f"The traits of {name} say that it selects by positions alone "
      "(positional); other tokens change what it keeps.",
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
  with explain(f"{name} fails where it is not compiled"):
    eager = _choose(method, layer, one, layer_budget)
  require(
    check_slots(subject, eager, layer_budget, subject.lengths, subject.padded)
    == kept,
    f"{name} must keep the same compiled or not; it does not.",
  )
  with explain(f"{name} fails where every query head holds keys of its own"):
    wide = one.with_kv_heads(one.queries.shape[1])
    slots = jax.eval_shape(
      functools.partial(_choose, method), layer, wide, layer_budget
    )
  require(
    slots.shape[1] == wide.keys.shape[1],
    f"{name} must choose for every head that holds keys (per_query_head=True), "
    f"{wide.keys.shape[1]} here; it chooses for {slots.shape[1]}.",
  )


def _check_heads(subject: Subject) -> None:
  """Refuses a choice for all heads together without saying so, or the reverse.

  While decoding, heads may have different tokens, of another method.
  """
  traits, name = subject.traits, subject.name
  if traits.whole_prompts_only or subject.spread.ragged:
    return
  one = subject.activations()
  group = one.queries.shape[1] // checks.KV_HEADS
  assert one.keys_unrotated is not None
  other = dataclasses.replace(
    one,
    queries=one.queries.at[:, :group].multiply(-1.7),
    keys=one.keys.at[:, 0].multiply(-1.3),
    values=one.values.at[:, 0].multiply(-2.0),
    keys_unrotated=one.keys_unrotated.at[:, 0].multiply(-1.3),
  )
  layer, budget = jnp.int32(subject.layer), subject.budget(_BUDGETS[1])
  kept, later = (
    np.asarray(_choose_compiled(subject.method, layer, each, budget))
    for each in (one, other)
  )
  alike = bool((kept == kept[:, :1]).all())
  require(
    alike or not traits.joins_heads,
    f"The traits of {name} say that the heads of a layer keep the same tokens "
    "(joins_heads); they do not.",
  )
  together = alike and not np.array_equal(kept[:, 1:], later[:, 1:])
  require(
    traits.joins_heads or not together,
    f"{name} keeps the same tokens in all heads of a layer, by what all of "
    "them hold; its traits must say so: joins_heads=True.",
  )


def _check_registered(subject: Subject) -> None:
  """Refuses what caches cannot be saved with, before the checks that take long.

  Caches that are compressed once do not hold their method.
  """
  if not subject.traits.whole_prompts_only:
    describe(subject.method, "", {})


def _check_memory(subject: Subject) -> None:
  """Refuses a method that evicts in blocks but reads earlier blocks."""
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
    layer_budget = subject.budget(budget)
    with explain(
      f"{name} fails where a block has gone and only what observe remembers "
      f"of it is left; {remedy.removesuffix('.')}"
    ):
      remembered = _choose_later_compiled(
        method, layer, activations, layer_budget
      )
    current = _choose_compiled(method, layer, activations, layer_budget)
    require(
      checks.same(current, remembered),
      f"{name} chooses otherwise when the queries of a block have gone, as "
      f"they have where it evicts in blocks; {remedy}",
    )
