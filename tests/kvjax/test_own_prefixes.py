"""Names of one's own before those of methods."""

import dataclasses

import numpy as np
import pytest

import kvjax
from kvjax.allocation import Allocation, Uniform
from kvjax.labels import name_of
from kvjax.methods import Around
from kvjax.testing import TinyModel, check_method, kept_positions

MODEL = TinyModel(kvjax.Geometry.uniform(4, 4, 2, 8, 64))
PROMPTS = kvjax.Prompts.of([list(range(40)), list(range(17))])

pytestmark = pytest.mark.usefixtures("registry")


@dataclasses.dataclass(frozen=True)
class Flipped(Around):
  """Keeps what another method would drop.

  Attributes:
    over: the method.
    sign: -1, or 1 to change nothing.
  """

  sign: int = -1

  @property
  def traits(self):
    return dataclasses.replace(self.over.traits, weighs=False)

  def evaluate(self, layer, cache, activations):
    return self.sign * self.over.evaluate(layer, cache, activations)


@dataclasses.dataclass(frozen=True)
class Lower(Allocation):
  """The upper half of the layers keeps a share."""

  spreads_layers = True

  share: float = 0.5

  def counts(self, budget, lengths, sizes):
    kept = np.array([budget.num_kept(int(n)) for n in lengths], np.int32)
    counts = np.tile(kept, (sizes.layers, 1))
    upper = counts[sizes.layers // 2 :]
    upper[:] = np.maximum(upper * self.share, 1)
    return counts


@dataclasses.dataclass(frozen=True)
class Halved(Allocation):
  """Half of what another allocation gives."""

  over: Allocation

  def counts(self, budget, lengths, sizes):
    return np.maximum(self.over.counts(budget, lengths, sizes) // 2, 1)


def kept(name):
  plan = kvjax.get_plan(name, kvjax.Tokens(8))
  cache, _ = kvjax.prefill(MODEL, MODEL.init(), PROMPTS, plan)
  return [
    [[{*head} for head in layer] for layer in kept_positions(cache, row)]
    for row in range(2)
  ]


def test_a_method_around_others_changes_what_they_keep():
  kvjax.register_prefix("flipped", Flipped, summary="the others")
  assert kvjax.get_method("flipped/keydiff") == Flipped(
    kvjax.get_method("keydiff")
  )
  check_method(kvjax.get_method("flipped/keydiff"))
  assert name_of(kvjax.get_method("flipped/keydiff")) == "flipped/keydiff"
  for name in ("flipped:sign=1/keydiff", "flipped/keydiff:sign=1"):
    assert kept(name) == kept("keydiff")
  # The scores have an order: the lowest of a row with 17 tokens.
  highest, lowest = kept("keydiff")[1], kept("flipped/keydiff")[1]
  assert not any(
    one & other
    for layers in zip(highest, lowest, strict=True)
    for one, other in zip(*layers, strict=True)
  )


class Same(Around):
  """Changes nothing."""


def test_a_method_around_others_changes_nothing_by_itself():
  kvjax.register_prefix("same", Same)
  for name in ("snapkv:window=4", "lagkv:sinks=2:lag=4", "adakv:window=4"):
    inner = kvjax.get_plan(name, kvjax.Tokens(8)).method
    assert Same(inner).traits == inner.traits
    assert Same(inner).allocation == inner.allocation
  assert kept("same/snapkv:window=4") == kept("snapkv:window=4")


@dataclasses.dataclass(frozen=True)
class Voting(Flipped):
  """Selects by the flipped scores what heads have by the others."""

  @property
  def votes(self):
    return self.over


def test_heads_compete_by_what_a_method_around_others_says():
  kvjax.register_prefix("flipped", Flipped)
  kvjax.register_prefix("voting", Voting)

  def sizes(name):
    return [[[*map(len, layer)] for layer in row] for row in kept(name)]

  assert sizes("ada/voting/keydiff") == sizes("ada/keydiff")
  assert kept("ada/voting/keydiff") != kept("ada/keydiff")
  with pytest.raises(kvjax.InputError, match="flipped/keydiff has neither"):
    kvjax.get_plan("ada/flipped/keydiff", 0.5)


def test_an_allocation_spreads_anew_or_on():
  kvjax.register_prefix("lower", Lower)
  kvjax.register_prefix("halved", Halved)

  def counts(name):
    return [[len(layer[0]) for layer in row] for row in kept(name)]

  assert counts("lower/keydiff") == [[8, 8, 4, 4]] * 2
  assert counts("lower:share=0.25/keydiff") == [[8, 8, 2, 2]] * 2
  assert counts("halved/keydiff") == [[4] * 4] * 2
  assert [sum(row) for row in counts("pyramid/halved/keydiff")] == [16, 16]


def test_a_notebooks_cell_runs_again():
  for _ in range(2):
    kvjax.register_prefix("flipped", Flipped)


@dataclasses.dataclass(frozen=True)
class Needy(Around):
  size: int


@dataclasses.dataclass(frozen=True)
class Alone(kvjax.methods.Tova):
  """A method that stands around nothing."""


class Undecorated(Around):
  size: int = 3


@dataclasses.dataclass(frozen=True)
class Uncounted(Allocation):
  """An allocation that counts nothing."""


@pytest.mark.parametrize(
  ("name", "outer", "said"),
  [
    ("Mine", Flipped, "has lower-case letters, .* 'Mine' does not fit"),
    ("my/own", Flipped, "has lower-case letters, .* 'my/own' does not fit"),
    ("keydiff", Flipped, "There is a method 'keydiff' already"),
    ("ctkvr", Flipped, "There is a method 'ctkvr' already"),
    ("ada", Flipped, "ada/ is there already"),
    ("mine", Needy, "Options of Needy need defaults: size"),
    ("mine", Alone, "gets the method behind its name as the field 'over'"),
    ("mine", Undecorated, "has fields that are no options; write @data"),
    ("mine", Uncounted, "lacks what each such class defines: counts"),
  ],
)
def test_what_cannot_stand_before_methods_is_refused(name, outer, said):
  with pytest.raises(kvjax.InputError, match=said):
    kvjax.register_prefix(name, outer)


def test_no_method_takes_the_name_and_no_budget_is_spread_twice():
  kvjax.register_prefix("lower", Lower)
  kvjax.register_prefix("halved", Halved)
  with pytest.raises(kvjax.InputError, match="'lower' is written before"):
    kvjax.register("lower", kvjax.methods.Tova)
  for name in ("lower/adakv", "lower/lagkv"):
    with pytest.raises(kvjax.InputError, match="is spread already"):
      kvjax.get_plan(name, 0.5)
  with pytest.raises(kvjax.InputError, match="its layers have their shares"):
    kvjax.get_plan("halved/lower/keydiff", 0.5)
  with pytest.raises(kvjax.InputError, match="did you mean lower"):
    kvjax.get_plan("lowr/keydiff", 0.5)
  assert isinstance(kvjax.get_method("keydiff").allocation, Uniform)
