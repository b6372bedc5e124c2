"""Times of each method and budget alone, measured once and shown in tables."""

import csv
import json

import pytest

import kvjax
from kvjax.experiments.run import prefilling, speed, stopwatch
from kvjax.experiments.run.candidates import candidates
from kvjax.experiments.run.prompting import QUERY_AWARE
from kvjax.experiments.run.results import Part, Settings
from kvjax.experiments.tasks.sample import Sample

SETTINGS = Settings("tiny", "abc", "float32", 0)
CHOSEN = candidates(["full", "keydiff"], [kvjax.Retention(0.5)])
SENTENCE = "The grass is green and the sky is blue. "


def a_sample(sentences):
  return Sample(
    context=SENTENCE * sentences,
    question="What is green?",
    answer_prefix=" It is",
    answers=("grass",),
    task="one",
    max_new_tokens=5,
    metadata={},
  )


SAMPLES = {
  Part("one", 64): [a_sample(2), a_sample(3)],
  Part("two", 64): [a_sample(3)],
  Part("one", 128): [a_sample(5)],
}


def measure(
  tiny, folder, chosen=CHOSEN, settings=SETTINGS, rounds=2, device="CPU"
):
  """Measures, and returns what the folder then knows, of all devices."""
  speeds = speed.Speeds(folder, settings, device)
  speeds.measure(tiny, chosen, SAMPLES, rounds)
  lines = (folder / "speeds.jsonl").read_text().splitlines()
  latest = {}
  for line in map(json.loads, lines):
    names = ("device", "length", "method", "budget")
    latest[tuple(line[name] for name in names)] = line
  return latest


@pytest.fixture
def seconds(monkeypatch):
  """Replaces the clock by one that the prefills and answers move.

  A prefill of a plan takes its retention in seconds, the first one a hundred
  more; an answer takes twice that of 32 seconds.
  """
  now, seen = [0.0], []
  prefill_all, generate = prefilling.prefill_all, kvjax.generate

  def prefill(lm, plans, contexts):
    (plan,) = plans
    share = getattr(plan.budget, "share", 1.0)
    key = share, int(contexts.lengths[0])
    now[0] += share + 100 * (key not in seen)
    seen.append(key)
    return prefill_all(lm, plans, contexts)

  def answer(model, params, cache, logits, decoding):
    now[0] += 2 * decoding.max_new_tokens
    assert decoding.stop_ids == ()
    return generate(model, params, cache, logits, decoding)

  monkeypatch.setattr(prefilling, "prefill_all", prefill)
  monkeypatch.setattr(kvjax, "generate", answer)
  monkeypatch.setattr(stopwatch.time, "perf_counter", lambda: now[0])
  return seen


def test_each_length_is_timed_and_the_first_round_compiles(
  tiny, tmp_path, seconds
):
  speeds = measure(tiny, tmp_path)
  assert len(speeds) == 4
  for (device, length, method, _), each in speeds.items():
    assert device == "CPU"
    assert length in (64, 128)
    assert each["rounds"] == 2
    assert each["prefill_seconds"] == pytest.approx(
      {"full": 1.0, "keydiff": 0.5}[method]
    )
    assert each["token_seconds"] == pytest.approx(2.0)
  # Candidates take turns.
  assert [share for share, _ in seconds] == [1.0, 0.5] * 6


def test_only_what_is_missing_is_timed(tiny, tmp_path, seconds):
  first = measure(tiny, tmp_path, CHOSEN[:1])
  del seconds[:]
  both = measure(tiny, tmp_path, rounds=1)
  assert {share for share, _ in seconds} == {0.5}
  assert first.items() < both.items()
  del seconds[:]
  more = measure(tiny, tmp_path)
  assert {share for share, _ in seconds} == {0.5}
  assert more.keys() == both.keys()
  assert {each["rounds"] for each in more.values()} == {2}
  del seconds[:]
  measure(tiny, tmp_path, CHOSEN[:1], device="GPU")
  assert {share for share, _ in seconds} == {1.0}


def test_what_is_timed_is_written_before_the_next_ones(
  tiny, tmp_path, monkeypatch
):
  monkeypatch.setattr(speed, "_TURNS", 1)
  time = speed._time

  def fail(lm, candidate, prompt, shape):
    if candidate.method != "full":
      raise KeyboardInterrupt
    return time(lm, candidate, prompt, shape)

  monkeypatch.setattr(speed, "_time", fail)
  with pytest.raises(KeyboardInterrupt):
    measure(tiny, tmp_path, rounds=1)
  (line,) = (tmp_path / "speeds.jsonl").read_text().splitlines()
  assert json.loads(line)["method"] == "full"


def test_evictions_while_decoding_are_part_of_a_tokens_time(
  tiny, tmp_path, monkeypatch
):
  counts = []
  generate = kvjax.generate

  def spy(model, params, cache, logits, decoding):
    counts.append(decoding.max_new_tokens)
    return generate(model, params, cache, logits, decoding)

  monkeypatch.setattr(kvjax, "generate", spy)
  schedule = kvjax.Schedule(every=40)
  chosen = candidates(["full", "keydiff"], [kvjax.Tokens(8)], schedule)
  measure(tiny, tmp_path, chosen, rounds=1)
  assert counts == [32, 40] * 4


def test_a_known_question_is_timed_with_its_context(tiny, tmp_path, seconds):
  settings = Settings("tiny", "abc", "float32", 0, protocol=QUERY_AWARE)
  chosen = CHOSEN[:1]
  measure(tiny, tmp_path / "aware", chosen, settings)
  aware = {tokens for _, tokens in seconds}
  del seconds[:]
  measure(tiny, tmp_path / "agnostic", chosen)
  agnostic = {tokens for _, tokens in seconds}
  assert min(aware) > min(agnostic)


def test_rows_have_the_times_of_their_device(tiny, tmp_path, seconds):
  measure(tiny, tmp_path, rounds=1)
  full = CHOSEN[0]
  row = {"length": 64, "method": full.method, "options": full.options}
  rows = [row | {"budget": full.budget}, row | {"budget": "0.25"}]
  timed, same = speed.Speeds(tmp_path, SETTINGS, "CPU").add_to(rows)
  assert timed == rows[0] | {"prefill_seconds": 1.0, "token_seconds": 2.0}
  assert same == rows[1]
  assert speed.Speeds(tmp_path, SETTINGS, "GPU").add_to(rows) == rows


def test_times_that_cannot_be_read_are_refused_before_any_answer(
  refusal, tiny_directory, tmp_path
):
  (tmp_path / "speeds.jsonl").write_text("{}\n")
  told = refusal(
    "kvjax.experiments.compare",
    f"--model={tiny_directory}",
    *("--tasks=niah_single_1", "--samples=1", "--length=288"),
    *("--methods=full", f"--output={tmp_path}"),
  )
  assert "Line 1 of" in told
  assert "is no speed; remove the file" in told
  assert not (tmp_path / "samples.jsonl").exists()


@pytest.mark.slow
def test_tables_show_the_seconds(run_binary, tiny_directory, tmp_path):
  flags = (
    f"--model={tiny_directory}",
    *("--benchmark=ruler", "--tasks=niah_single_1", "--samples=1"),
    *("--length=288,400", "--methods=full,streaming:sinks=2"),
    *("--retention=0.5", f"--output={tmp_path / 'runs'}"),
  )
  result = run_binary("kvjax.experiments.evaluate", *flags, "--timed_rounds=1")
  assert result.returncode == 0, result.stderr
  (folder,) = (tmp_path / "runs").iterdir()
  assert "| prefill, ms | token, ms |" in (folder / "report.md").read_text()
  summary = json.loads((folder / "summary.json").read_text())
  assert all(row["prefill_seconds"] > 0 for row in summary["rows"])
  lines = (folder / "speeds.jsonl").read_bytes()
  # Without the flag, a run shows what the folder knows.
  again = run_binary("kvjax.experiments.evaluate", *flags)
  assert again.returncode == 0, again.stderr
  assert (folder / "speeds.jsonl").read_bytes() == lines
  assert "| prefill, ms |" in (folder / "report.md").read_text()
  board = run_binary(
    "kvjax.experiments.leaderboard",
    tmp_path / "runs",
    f"--output={tmp_path / 'board'}",
  )
  assert board.returncode == 0, board.stderr
  with (tmp_path / "board" / "leaderboard.csv").open() as file:
    seconds = [float(line["prefill_seconds"]) for line in csv.DictReader(file)]
  assert len(seconds) == 4
  assert min(seconds) > 0
