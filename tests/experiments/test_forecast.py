"""What a run says of its cost, beside what it then does."""

import dataclasses

import pytest
import rich.console

import kvjax
from kvjax.experiments.run import comparison, forecast
from kvjax.experiments.run.candidates import candidates
from kvjax.experiments.run.results import Part, Results, Settings
from kvjax.experiments.tasks.sample import Sample

SAMPLES = {
  Part(task, 64): [
    Sample(
      context=f"{task} one two three {number // 2}",
      question=f" ask {number}?",
      answer_prefix="",
      answers=("1",),
      task=task,
      max_new_tokens=4,
      metadata={},
    )
    for number in range(4)
  ]
  for task in ("a", "b")
}
CHOSEN = candidates(["streaming:sinks=1"], [kvjax.Retention(0.5)])


def shown(found):
  console = rich.console.Console(width=80)
  with console.capture() as capture:
    console.print(found)
  return " ".join(capture.get().split())


@pytest.fixture
def results(tmp_path):
  return Results(tmp_path / "run", Settings("tiny", "abc", "float32", 0))


def test_a_forecast_is_what_the_run_does(tiny, results, tmp_path):
  work = comparison.pending(tiny, CHOSEN, SAMPLES, results, 2)
  found = forecast.forecast(tiny, work)
  assert not (tmp_path / "run").exists()
  cost = found.cost
  # Two questions to each of two contexts of each task.
  assert (cost.contexts, cost.answers) == (4, 16)
  assert found.pace.first > found.pace.again > 0
  assert found.pace.again <= found.pace.total < 10 * found.pace.first
  text = shown(found)
  assert f"4 contexts of {cost.context_tokens:,} tokens in all, " in text
  assert f"questions of {cost.question_tokens:,} tokens in all, " in text
  assert "with up to 64 new tokens." in text
  assert "streaming:sinks=1 50 %" in text
  assert "Nothing was written." in text

  comparison.answer_all(tiny, work, results, lambda task, new: None)
  answers = list(results.records.values())
  assert len(answers) == cost.answers
  # Both questions to a context, by each cache, see the same context.
  per_context = 2 * len(CHOSEN)
  total = sum(answer.context_tokens for answer in answers)
  assert total == per_context * cost.context_tokens

  left = comparison.pending(tiny, CHOSEN, SAMPLES, results, 2)
  nothing = forecast.forecast(tiny, left)
  assert nothing.cost == (0, 0, 0, 0, 0)
  assert shown(nothing).startswith("0 contexts of 0 tokens in all, 0 answ")
  assert "expect" not in shown(nothing)


def test_an_estimate_is_of_what_the_run_does(tiny, results, monkeypatch):
  found = []

  def noted(lm, *given):
    found.append(given)
    return 1.0

  monkeypatch.setattr(forecast.estimate, "estimate", noted)
  work = comparison.pending(tiny, CHOSEN, SAMPLES, results, 2)
  forecast.estimate_of(tiny, work)
  ((chosen, batches),) = found
  cost = forecast.cost_of(work)
  assert sum(batch.rows for batch in batches) == cost.contexts
  new = sum(batch.rows * batch.steps for batch in batches)
  assert len(chosen) * new == cost.answer_tokens
  # Padded to shapes that other samples share.
  padded = sum(batch.rows * batch.context for batch in batches)
  assert cost.context_tokens <= padded < cost.context_tokens + 4 * 32
  fed = len(chosen) * sum(batch.rows * batch.fed for batch in batches)
  assert cost.question_tokens <= fed < cost.question_tokens + 16 * 8


def test_methods_of_equal_sizes_share_a_line_per_budget(tiny, results):
  budgets = [kvjax.Retention(0.5), kvjax.Retention(0.25)]
  chosen = candidates(["keydiff", "snapkv", "quest"], budgets)
  work = comparison.pending(tiny, chosen, SAMPLES, results, 2)
  table = forecast._caches(tiny, work)
  names = [line[0] for line in table.lines]
  # What reads less keeps everything.
  assert names == ["full", *2 * ["keydiff, snapkv"], *2 * ["quest"]]
  sizes = [float(line[2]) for line in table.lines]
  assert sizes == pytest.approx(
    [sizes[0] * share for share in (1, 0.5, 0.25, 1, 1)], abs=0.1
  )


def test_two_contexts_are_timed_however_many_a_batch_has(tiny, results):
  contexts = {
    Part("a", 64): [
      dataclasses.replace(sample, context=f"{number} one two three")
      for number, sample in enumerate(SAMPLES[Part("a", 64)])
    ]
  }
  work = comparison.pending(tiny, CHOSEN, contexts, results, 4)
  assert [shape.rows for shape, _ in work.batches] == [4]
  found = forecast.forecast(tiny, work)
  assert found.pace.contexts == 2
  assert str(found.pace).startswith("2 contexts took ")
  # Twice as many tokens, and the time to compile once.
  once = max(found.pace.first - found.pace.again, 0.0)
  assert found.pace.total == pytest.approx(2 * found.pace.again + once)


@pytest.mark.parametrize(
  ("seconds", "text"), [(0.4, "1 s"), (52, "52 s"), (150, "2.5 min")]
)
def test_what_was_timed_is_told_in_two_digits(seconds, text):
  pace = forecast.Pace(1, 2.0, 1.0, seconds)
  assert f"expect up to {text} for all" in str(pace)
