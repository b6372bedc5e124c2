"""How many units fit a length, beside plain counting."""

import random

import pytest

from kvjax.experiments.tasks import fitting


class Costs:
  """Costs that rise unevenly, and what has been asked of them."""

  def __init__(self, rng, largest_rise):
    rises = [rng.choice([0, 1, 1, 2, largest_rise]) for _ in range(200)]
    self.known = [20 + sum(rises[:units]) for units in range(201)]
    self.asked = []

  def __call__(self, units):
    self.asked.append(units)
    return self.known[units] if units <= 200 else 10_000 * units


@pytest.mark.parametrize("largest_rise", [0, 9, 50])
def test_the_most_units_are_those_that_counting_finds(largest_rise):
  rng = random.Random(largest_rise)
  for _ in range(100):
    costs = Costs(rng, largest_rise)
    least, length = rng.randrange(1, 20), rng.randrange(50, 400)
    fits = [n for n in range(least, 201) if costs.known[n] <= length]
    if not fits:
      with pytest.raises(fitting.TooShortError, match=f"{length}") as refused:
        fitting.most_units(costs, length, least=least)
      assert refused.value.least == costs.known[least]
      continue
    assert fitting.most_units(costs, length, least=least) == max(fits)
    assert len(costs.asked) < 30
    costs.asked.clear()
    most = rng.randrange(least, 201)
    found = fitting.most_units(costs, length, least=least, most=most)
    assert found == min(max(fits), most)
    assert max(costs.asked) <= most


def test_even_costs_are_asked_for_a_few_times():
  asked = []

  def cost(units):
    asked.append(units)
    return 200 + 3 * units

  assert fitting.most_units(cost, 100_000) == 33_266
  assert len(asked) <= 5
