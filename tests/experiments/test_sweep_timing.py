"""The arithmetic of a sweep's timing, by a clock that the test moves."""

import time

import pytest
from made_runs import MEASURED

import kvjax
from kvjax.errors import InputError
from kvjax.experiments.run.answering import Reply
from kvjax.experiments.run.candidates import candidates
from kvjax.experiments.run.prompting import Prompt
from kvjax.experiments.timing import sweep_timing

CHOSEN = candidates(["keydiff"], [kvjax.Tokens(n) for n in (8, 4, 2)])[1:]
PROMPT = Prompt([5] * 20, [6] * 3, 2)


def watch(monkeypatch, unequal):
  """How many caches are asked; a prefill takes 10 s at first, then 2, each 1 s.

  Args:
    monkeypatch: the fixture.
    unequal: whether a sweep answers otherwise than its parts.
  """
  calls, now = [], [0.0]
  calls_at_first = 1 + len(CHOSEN)
  monkeypatch.setattr(time, "perf_counter", lambda: now[0])

  def replies(lm, some, contexts, shape, seconds):
    assert contexts == [[PROMPT]]
    now[0] += (10 if len(calls) < calls_at_first else 2) + len(some)
    calls.append(len(some))
    for one in some:
      text = f"{one.budget} after {len(some) if unequal else 1}"
      yield [Reply(one, 0, 0, [5], text, **MEASURED)]

  monkeypatch.setattr(sweep_timing, "replies", replies)
  return calls


def test_both_ways_are_timed_by_turns_after_they_have_been_compiled(
  monkeypatch, tiny
):
  asked = watch(monkeypatch, unequal=False)
  timing = sweep_timing.measure(tiny, CHOSEN, PROMPT, 2)
  assert asked == [3, 1, 1, 1] * 3
  assert timing == ([5.0] * 2, [9.0] * 2)


def test_other_answers_are_refused(monkeypatch, tiny):
  watch(monkeypatch, unequal=True)
  with pytest.raises(InputError, match="answers otherwise than its methods"):
    sweep_timing.measure(tiny, CHOSEN, PROMPT, 2)


def test_medians_and_the_range_of_the_ratios_are_shown():
  timing = sweep_timing.Timing([1.0, 2.0, 4.0], [10.0, 18.0, 28.0])
  assert sweep_timing.table("3 of 20 tokens", timing).lines == [
    ("3 of 20 tokens", "2.000", "18.000", "9.0", "7.0–10.0")
  ]
