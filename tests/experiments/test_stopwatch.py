"""The stopwatch, by a clock that the test moves."""

import pytest

from kvjax.experiments.run import stopwatch


@pytest.fixture
def call(monkeypatch):
  """Makes calls that take given numbers of seconds, and return them."""
  now = [0.0]
  monkeypatch.setattr(stopwatch.time, "perf_counter", lambda: now[0])

  def make(*seconds):
    left = iter(seconds)

    def run():
      taken = next(left)
      now[0] += taken
      return taken

    return run

  return make


def test_a_call_is_timed_until_it_is_ready(call):
  assert stopwatch.timed(call(5.0)) == (5.0, 5.0)

  class Pending:
    """What a device still computes."""

    block_until_ready = staticmethod(call(3.0))

  assert stopwatch.seconds(Pending) == 3.0


def test_the_call_that_compiles_does_not_count(call):
  assert stopwatch.repeated(call(50.0, 1.0, 9.0, 2.0), 3) == [1.0, 9.0, 2.0]


def test_timers_take_turns():
  order = []

  def timer(name):
    return lambda: order.append(name) or len(order)

  found = stopwatch.in_turns([timer("one"), timer("other")], range(3))
  assert order == ["one", "other"] * 3
  assert found == [[1, 3, 5], [2, 4, 6]]
