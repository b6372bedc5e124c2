"""The contract of methods finds what it is to find, and says it."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax.allocation.base import Allocation
from kvjax.errors import InputError
from kvjax.methods import HeadwiseMethod, Method, ScoringMethod, Traits
from kvjax.methods.last_queries import window_mass
from kvjax.methods.rerotated import Rerotated
from kvjax.retrieval import Flat, Retrieval
from kvjax.testing import (
  TinyModel,
  check_method,
  checks,
  contract,
  kept_positions,
)
from kvjax.testing.engine_contract import check_whole_prompts
from kvjax.testing.subject import Subject


@dataclasses.dataclass(frozen=True)
class Norm(HeadwiseMethod):
  """Does everything right, where nothing is overridden."""

  def score_head(self, head):
    return -jnp.sum(head.keys**2, axis=-1)


@dataclasses.dataclass(frozen=True)
class Undeclared(ScoringMethod):
  window: int = 0

  @property
  def traits(self):
    return Traits(window=self.window)

  def scores(self, layer, cache, activations):
    return jnp.mean(window_mass(cache, activations, 4), axis=2)


@dataclasses.dataclass(frozen=True)
class Silent(ScoringMethod):
  def scores(self, layer, cache, activations):
    keys = jnp.where(
      cache.valid[..., None], activations.keys_unrotated.astype("float32"), 0.0
    )
    inputs = activations.inputs[:, None, :, 0].astype("float32")
    return jnp.sum(keys, axis=-1) + jnp.where(cache.valid, inputs, 0.0)


@dataclasses.dataclass(frozen=True)
class HalfSilent(Silent):
  @property
  def traits(self):
    return Traits(activations=frozenset({"inputs"}))


@dataclasses.dataclass(frozen=True)
class Narrow(Norm):
  def score_head(self, head):
    return -jnp.sum(head.cached_keys**2, axis=-1)


@dataclasses.dataclass(frozen=True)
class Python(ScoringMethod):
  """Asks for the layer's number when it is not known."""

  def scores(self, layer, cache, activations):
    if layer == 0:
      return jnp.sum(cache.keys, axis=-1)
    return jnp.sum(cache.values, axis=-1)


@dataclasses.dataclass(frozen=True)
class Leaky(Norm):
  """Sees what empty slots hold."""

  def score_head(self, head):
    total = jnp.nansum(head.cached_keys.astype("float32"), axis=0)
    return head.keys @ total


@dataclasses.dataclass(frozen=True)
class NoNumber(Norm):
  """Divides zero by zero at one of the tokens."""

  def score_head(self, head):
    place = (head.positions - 5).astype("float32")
    return place / place


@dataclasses.dataclass(frozen=True)
class Sociable(ScoringMethod):
  """A row's scores depend on the other rows."""

  def scores(self, layer, cache, activations):
    keys = jnp.where(cache.valid[..., None], cache.keys.astype("float32"), 0.0)
    mean = jnp.mean(keys, axis=(0, 1, 2))
    return keys @ mean


@dataclasses.dataclass(frozen=True)
class FromTheEnd(Norm):
  """Scores depend on the padding."""

  def score_head(self, head):
    place = jnp.arange(head.positions.shape[0]).astype("float32")
    return jnp.sin(place - head.positions.shape[0])


@dataclasses.dataclass(frozen=True)
class Protective(Norm):
  """Says that more stays than does."""

  @property
  def traits(self):
    return Traits(protects=3)

  def protected(self, cache, counts):
    return jnp.zeros(cache.positions.shape, bool)


@dataclasses.dataclass(frozen=True)
class Sinking(Protective):
  """Says that the first ones stay."""

  @property
  def traits(self):
    return Traits(sinks=3)


@dataclasses.dataclass(frozen=True)
class Selecting(Method):
  """The first tokens, or what else `slots` makes of them."""

  def evaluate(self, layer, cache, activations):
    return cache.positions

  def select(self, scores, cache, budget):
    slots = jnp.arange(budget.capacity, dtype=jnp.int32)
    counts = jnp.minimum(budget.per_head, cache.lengths)[..., None]
    slots = jnp.broadcast_to(slots, (*cache.lengths.shape, budget.capacity))
    return self.changed(slots, counts)

  def changed(self, slots, counts):
    return jnp.where(slots < counts, slots, -1)


class Beyond(Selecting):
  def changed(self, slots, counts):
    return jnp.where(slots < counts, slots + 60, -1)


class Empty(Selecting):
  def changed(self, slots, counts):
    return jnp.where(slots < counts, slots + 30, -1)


class Descending(Selecting):
  def changed(self, slots, counts):
    return jnp.where(slots < counts, counts - 1 - slots, -1)


class TooMany(Selecting):
  def changed(self, slots, counts):
    return jnp.where(slots < counts + 1, slots, -1)


class TooFew(Selecting):
  def changed(self, slots, counts):
    return jnp.where(slots < jnp.maximum(counts - 1, 1), slots, -1)


class Mutable(Norm):
  """Two of them are never equal."""

  __hash__ = object.__hash__

  def __eq__(self, other):
    return self is other


@dataclasses.dataclass(frozen=True)
class Looking(Norm):
  @property
  def traits(self):
    return Traits(positional=True)


@dataclasses.dataclass(frozen=True)
class Forgetful(Norm):
  """Without its file, it prefers what it evicts with it."""

  sign: float = -1.0

  def load(self):
    return np.ones(1, np.float32)

  def without_files(self):
    return dataclasses.replace(self, sign=1.0)

  def scores(self, layer, cache, activations):
    return self.sign * super().scores(layer, cache, activations)


WRONG = {
  "asks for a window it does not declare": (
    Undeclared(),
    r"must declare them as Traits\(window=4\)",
  ),
  "asks for a larger window than it declares": (
    Undeclared(window=2),
    r"must declare them as Traits\(window=4\)",
  ),
  "reads what it does not declare": (
    Silent(),
    "activations.keys_unrotated and activations.inputs .*"
    r'activations=frozenset\({"inputs", "keys_unrotated"}\)',
  ),
  "declares a half of it": (HalfSilent(), "activations.keys_unrotated without"),
  "narrow scores": (Narrow(), "float32.*bfloat16"),
  "the layer's number": (Python(), "not known then.*TracerBool"),
  "sees empty slots": (Leaky(), "empty slots and padding"),
  "no number": (NoNumber(), "that of 9 tokens is NaN here"),
  "sees batch mates": (Sociable(), "batch mates"),
  "sees padding": (FromTheEnd(), "padding"),
  "protects nothing": (Protective(), "last 3 tokens always stay"),
  "protects no sinks": (Sinking(), "first 3 tokens always stay"),
  "out of range": (
    Beyond(),
    "selects slot 6[4-9] of a layer whose slots are 0",
  ),
  "empty slots": (Empty(), "holds no token"),
  "descending": (Descending(), "ascending order"),
  "too many": (TooMany(), "keeps 13 tokens where a head may keep 12"),
  "too few": (
    TooFew(),
    "keeps 11 tokens where a head may keep 12.*let the traits say",
  ),
  "looks at tokens": (Looking(), "positions alone .*; other tokens change"),
  "needs its file": (Forgetful(), "without the names of its files"),
  "not equal": (Mutable(), "equal fields must be equal"),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_method_that_breaks_its_word_is_told_so_in_a_sentence(case):
  method, message = WRONG[case]
  with pytest.raises(kvjax.InputError, match=message) as caught:
    check_method(method)
  assert "\n" not in str(caught.value)


def test_a_method_without_a_name_is_refused_before_it_is_saved(
  registry, monkeypatch
):
  def fail(subject):
    raise AssertionError("The checks that take long come later.")

  monkeypatch.setattr(contract, "check_whole_prompts", fail)
  with pytest.raises(kvjax.InputError, match=r"class Norm cannot be.*regist"):
    check_method(Norm())


@pytest.mark.slow
def test_a_method_without_a_name_cannot_be_saved(registry):
  with pytest.raises(kvjax.InputError, match=r"class Norm cannot be.*regist"):
    check_method(Norm())
  kvjax.register("norm_of_a_test", Norm)
  check_method(Norm())


def test_what_the_user_protects_is_watched(registry):
  @dataclasses.dataclass(frozen=True)
  class Last(Selecting):
    def select(self, scores, cache, budget):
      counts = jnp.minimum(budget.per_head, cache.lengths)[..., None]
      slots = super().select(scores, cache, budget)
      start = cache.lengths[..., None] - counts
      return jnp.where(slots >= 0, slots + start, -1)

  kvjax.register("last_of_a_test", Last)
  with pytest.raises(kvjax.InputError, match=r"evicts .* of a whole prompt"):
    check_method(Last())


# One that remembers, one that works on whole prompts alone, and one that keeps
# the first layers, of which one has a window.
@pytest.mark.parametrize(
  "name",
  [
    "h2o",
    "compactor:chunk=16",
    "compactor.vllm:first=2:last=3:chunk=16:leverage_chunk=20",
  ],
)
def test_methods_of_ours_pass(name):
  check_method(kvjax.get_method(name))


def test_the_model_of_the_checks_has_a_window_between_other_layers():
  subject = Subject(kvjax.get_method("keydiff"))
  specs = subject.model.geometry.layers
  assert [spec.compressible for spec in specs] == [True, False, True, True]
  plan = kvjax.Plan(subject.method, kvjax.Tokens(20))
  cache, _ = kvjax.prefill(subject.model, subject.params, subject.prompts, plan)
  for row, length in enumerate(subject.lengths):
    by_layer = checks.global_positions(subject.model, cache, row)
    assert {n: [*map(len, heads)] for n, heads in by_layer.items()} == {
      layer: [20, 20] for layer in (0, 2, 3)
    }
    newest = [*range(length - specs[1].window, length)]
    assert kept_positions(cache, row)[1] == [newest] * 2


@dataclasses.dataclass(frozen=True)
class Falling(Allocation):
  """Every layer that is compressed keeps less than the one before."""

  every: bool = False

  @property
  def spreads_layers(self):
    return True

  def counts(self, budget, lengths, sizes):
    kept = np.array([budget.num_kept(int(n)) for n in lengths], np.int32)
    # As many as there are layers, or as there are without windows.
    layers = np.arange(sizes.layers + self.every, dtype=np.int32)
    return np.maximum(kept - layers[:, None], 1)


@dataclasses.dataclass(frozen=True)
class FallingNorm(Norm):
  every: bool = False

  @property
  def allocation(self):
    return Falling(self.every)


@pytest.mark.slow
def test_an_allocation_counts_the_layers_without_windows(registry):
  kvjax.register("falling_norm_of_a_test", FallingNorm)
  check_whole_prompts(Subject(FallingNorm()))
  with pytest.raises(InputError, match="counts gives each of 3 layers"):
    check_whole_prompts(Subject(FallingNorm(every=True)))


def test_one_is_not_the_other():
  """In the tests annotations refuse it first."""
  with pytest.raises(kvjax.InputError, match=r"kvjax.methods.Method; Flat"):
    checks.check_value(Flat(), Method)
  with pytest.raises(kvjax.InputError, match=r"kvjax.retrieval.Retrieval; No"):
    checks.check_value(Norm(), Retrieval)


def test_plans_refuse_traits_that_cannot_be():
  @dataclasses.dataclass(frozen=True)
  class Listed(Norm):
    @property
    def traits(self):
      return {"window": 3}

  with pytest.raises(InputError, match="of Listed must be a"):
    kvjax.Plan(Listed(), kvjax.Tokens(4))
  schedule = kvjax.Schedule(block=8)
  with pytest.raises(InputError, match="it reads inputs, which no cache"):
    kvjax.Plan(HalfSilent(), kvjax.Tokens(4), schedule=schedule)


def test_blocks_refuse_a_wider_window_than_is_declared():
  model = TinyModel()
  prompts = kvjax.Prompts.of([list(range(24))])
  plan = kvjax.Plan(
    Undeclared(window=2), kvjax.Tokens(8), schedule=kvjax.Schedule(block=8)
  )
  with pytest.raises(
    InputError, match=r"must declare them as Traits\(window=4"
  ):
    kvjax.prefill(model, model.init(), prompts, plan)


def test_methods_that_number_anew_are_checked_without_windows():
  """Engines refuse to move the tokens of a window."""
  windows = {
    name: [spec.window for spec in Subject(method).model.geometry.layers]
    for name, method in {
      "keydiff": kvjax.get_method("keydiff"),
      "rerotate": Rerotated(kvjax.get_method("keydiff")),
    }.items()
  }
  assert any(windows["keydiff"])
  assert not any(windows["rerotate"])
