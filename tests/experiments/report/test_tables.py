"""What tables hold, and that terminals and Markdown show all of it."""

import csv
import io

import pytest
import rich.console

from kvjax.experiments.report import (
  compared,
  formats,
  means,
  rows,
  run_tables,
  score_plots,
  series,
)
from kvjax.experiments.report.formats import Table
from kvjax.experiments.report.tables import tables


def shown(renderable):
  console = rich.console.Console(width=80, highlight=False)
  with console.capture() as capture:
    console.print(renderable)
  return capture.get()


def titled(record, start, brief=False):
  (table,) = (t for t in tables(record, brief) if t.title.startswith(start))
  return table


def test_a_comparison_shows_what_other_runs_have_not_answered(crowd):
  text = compared.markdown(crowd)
  details = text[text.index("score by task, n = ") :]
  header, _, full, first, *_ = [x for x in details.splitlines() if "|" in x]
  assert header.count("|") == full.count("|") == first.count("|")
  assert "–" not in full
  # 50 % has one task of thirteen.
  assert first.count("–") == 13
  _, *lines = titled(crowd, "score, mean over 13").lines
  assert {(line[2], line[4]) for line in lines} == {("–", "–")}
  assert all(line[3].startswith("50.0 ±") for line in lines)


def test_thirteen_tasks_and_twelve_methods_fit_a_terminal(crowd):
  text = shown(run_tables.terminal(crowd))
  lines = text.splitlines()
  assert max(map(len, lines)) <= 80
  assert len(lines) < 80
  for name in ("single_1", "query", "qa_2", "mean", "Δ full", "lagkv:lag=128"):
    assert name in text
  # In three tables, the one of the tasks in two parts.
  assert text.count("method_3 ") == 3
  assert "50.0 ±" in text


def test_tables_of_a_hybrid_say_which_layers_budgets_are_of(answer, record):
  """Windows keep 100 tokens of 800 whatever the budget."""
  full = answer("full", kept_tokens=450.0, global_tokens=800.0)
  quarter = answer("keydiff", kept_tokens=150.0, global_tokens=200.0)
  run_record = record([full, quarter])
  overview = next(t for t in tables(run_record) if "kept, all" in t.header)
  lines = [dict(zip(overview.header, x, strict=True)) for x in overview.lines]
  assert [line["kept, global"] for line in lines] == ["800", "200"]
  assert [line["kept, all"] for line in lines] == ["450", "150"]
  assert "kept" not in overview.header
  note = "budgets are of the layers without a window"
  assert sum(note in table.title for table in tables(run_record)) == 1
  _, row = rows.identified(run_record)
  assert (row["compression_ratio"], row["global_tokens"]) == (0.75, 200.0)
  plain = record([answer("full"), answer("keydiff")])
  assert not any(note in table.title for table in tables(plain))
  assert all("kept, all" not in table.header for table in tables(plain))
  assert all("global_tokens" not in row for row in plain.summary["rows"])


def test_an_overview_says_how_sure_every_score_is(answer, record):
  answers = [
    *(answer("full", sample=number, host_bytes=2048) for number in range(4)),
    *(
      answer("quest", sample=number, score=score, read_tokens=50.0)
      for number, score in enumerate((100.0, 100.0, 0.0, 0.0))
    ),
  ]
  table = titled(record(answers), "niah_single_1")
  assert table.header == [
    *("method", "budget", "kept", "read", "score", "95 %"),
    *("Δ full", "n", "KiB", "on host"),
  ]
  assert table.lines[0] == (
    *("full", "100 %", "800", "800", "100.0", "51.0–100.0"),
    *("–", "4", "800", "2.0"),
  )
  assert table.lines[1][:7] == (
    *("quest", "25 %", "200", "50", "50.0", "0.0–100.0", "−50.0"),
  )
  # A terminal has what is read in a table of its own, where it is less.
  table = titled(record(answers), "caches at 25 %", brief=True)
  assert table.header == ["method", "kept", "read", "KiB", "on host"]
  assert table.lines[1] == ("quest", "200", "50", "200", "0")


def test_every_length_has_tables_and_all_have_one(answer, record):
  answers = [
    answer(method, task=task, length=length, sample=sample, score=score)
    for method, score in (("full", 100.0), ("keydiff", 50.0))
    for task in ("a", "b")
    for length in (2048, 512)
    for sample in (0, 1)
  ]
  found = record(answers)
  titles = [table.title for table in tables(found)]
  for length in (512, 2048):
    for title in ("mean over 2 tasks: a, b", "tasks at 25 %"):
      assert f"{length} tokens: {title}" in titles
  table = titled(found, "score by length at 25 %")
  assert table.header == ["method", "512", "2048", "mean"]
  assert table.lines[1] == ["keydiff", "50.0", "50.0", "50.0"]
  for brief in (False, True):
    table = titled(found, "weighted by length", brief)
    assert table.lines[0] == ["full", "100.0", "100.0", "2048"]


def test_ruler_is_weighted_by_length_where_all_lengths_are_there(
  answer, record
):
  """With what its README prints of GPT-4-1106 and Command-R-plus."""
  lengths = [2**power * 1000 for power in range(2, 8)]
  printed = {
    "gpt-4": ([96.6, 96.3, 95.2, 93.2, 87.0, 81.2], ["89.0", "94.1", "64000"]),
    "command": (
      [95.6, 95.2, 94.2, 92.0, 84.3, 63.1],
      ["82.7", "92.1", "32000"],
    ),
    "poor": ([85.5] * 6, ["85.5", "85.5", "< 4000"]),
  }
  # Each has two tasks, and all but the last length another at the shortest.
  answers = [
    answer(method, task=task, length=length, score=score + shift)
    for method, (scores, _) in printed.items()
    for length, score in zip(reversed(lengths), reversed(scores), strict=True)
    for task, shift in (("a", -2.0), ("b", 2.0))
  ]
  answers += [answer("gpt-4", task="c", length=4000, score=0.0)]
  answers += [
    answer("short", task=task, length=n) for task in "ab" for n in lengths[:5]
  ]
  (table,) = series.weighted_by_length(record(answers))
  assert table.title == "weighted by length, mean over 2 tasks: a, b at 25 %"
  header = ["rising", "falling", "effective length (≥ 85.6)"]
  assert table.header == ["method", *header]
  assert {line[0]: line[1:] for line in table.lines} == {
    method: expected for method, (_, expected) in printed.items()
  }
  for other in (
    record(answers, benchmark="longbench"),
    record([a for a in answers if a.length == 4000]),
    record([answer(task="a"), answer(task="b", length=512)]),
  ):
    assert series.weighted_by_length(other) == []


def test_passkeys_have_all_their_scores_by_length(answer, record):
  answers = [
    answer(
      method,
      length=length,
      sample=sample,
      depth=float(sample),
      first_token=token,
      scores={"score": score, "partial": 60.0},
    )
    for method, token, score in (("full", 5, 100.0), ("keydiff", 6, 0.0))
    for length in (512, 1024)
    for sample in (0, 1)
  ]
  found = record(answers, benchmark="passkey")
  every = titled(found, "all scores at 25 %")
  assert every.header == ["method", "exact", "partial", "same first token"]
  assert every.lines == [
    ["full", "100.0", "60.0", "100.0"],
    ["keydiff", "0.0", "60.0", "0.0"],
  ]
  partial = titled(found, "partial by length", brief=True)
  assert partial.lines[1] == ["keydiff", "60.0", "60.0", "60.0"]


def test_turns_are_counted_from_one_with_what_is_kept(answer, record):
  answers = [
    answer(sample=turn, turn=turn, score=score, kept_tokens=200.0 + turn)
    for turn, score in enumerate((100.0, 50.0, 0.0))
  ]
  found = record(answers, benchmark="multiturn")
  scores = titled(found, "score by turn")
  assert scores.header == ["method", "1", "2", "3", "mean"]
  assert scores.lines == [["keydiff", "100.0", "50.0", "0.0", "50.0"]]
  kept = titled(found, "tokens kept by turn")
  assert kept.lines == [["keydiff", "200.0", "201.0", "202.0", "201.0"]]


def test_samples_of_no_texts_say_so(answer, record):
  assert "Data: no texts." in run_tables.markdown(
    record([answer()], data={}), []
  )


def test_only_lines_with_every_column_have_a_mean(answer, record):
  found = record([answer("full"), answer(), answer("full", length=2048)])
  table = titled(found, "score by length at 25 %")
  assert table.header == ["method", "1024", "2048", "mean"]
  assert table.lines == [
    ["full", "100.0", "100.0", "100.0"],
    ["keydiff", "100.0", "–", "–"],
  ]


def test_longbench_has_a_line_per_set_and_both_averages(answer, record):
  sets = {"qasper": 10.0, "hotpotqa": 30.0, "2wikimqa": 50.0}
  answers = [
    answer(method, task=task, score=score * share)
    for method, share in (("full", 1.0), ("keydiff", 0.5))
    for task, score in sets.items()
  ]
  table = titled(record(answers, benchmark="longbench"), "sets at 25 %")
  cells = {line[0].partition(" (")[0]: line[1:] for line in table.lines}
  assert table.header == ["set", "full", "keydiff"]
  assert cells["hotpotqa"] == ["30.0", "15.0"]
  assert cells["English, multi-document"] == ["40.0", "20.0"]
  assert cells["English, mean of the categories"] == ["25.0", "12.5"]
  assert cells["16 English and code sets, plain mean"] == ["30.0", "15.0"]
  assert cells["Δ full"] == ["–", "−15.0"]


def test_names_with_markup_are_shown_as_they_are(answer, record):
  name = "x[red]<b>|y`*"
  found = record([answer(name)])
  assert name in shown(run_tables.terminal(found))
  text = run_tables.markdown(found, ["plot.png"])
  assert r"| x\[red\]\<b\>\|y\`\* | 25 % |" in text
  assert text.endswith("![plot.png](plot.png)\n")
  (line,) = csv.DictReader(io.StringIO(formats.to_csv(rows.identified(found))))
  assert line["method"] == name


def test_columns_that_do_not_fit_follow_below_with_the_names():
  header = ["method", *(f"column_{number}" for number in range(20))]
  text = shown(Table("t", header, [["a:b", *["1.0"] * 20]]))
  assert max(map(len, text.splitlines())) <= 80
  assert text.count("a:b") == text.count("method") == 3
  assert text.count("1.0") == 20


def test_rows_are_identified_and_compared_on_the_same_samples(answer, record):
  answers = [
    answer(method, depth=depth, sample=sample, score=score, length=length)
    for method, shift in (("full", 0.0), ("keydiff", -30.0))
    for sample, (length, depth, score) in enumerate(
      [(512, 0.0, 100.0 + shift), (1024, 1.0, 40.0 + shift)]
    )
  ]
  text = formats.to_csv(rows.identified(record(answers)))
  lines = list(csv.DictReader(io.StringIO(text)))
  assert [line["delta"] for line in lines] == ["0.0", "0.0", "-30.0", "-30.0"]
  last = lines[-1]
  assert [last[n] for n in ("model", "seed", "protocol", "data")] == [
    *("tiny", "7", "query-agnostic", "essay: texts of Python")
  ]
  assert (last["length"], last["depth"], last["turn"]) == ("1024", "1.0", "")
  assert (last["retention"], last["compression_ratio"]) == ("0.25", "0.75")


@pytest.mark.parametrize("benchmark", ["ruler", "longbench", "passkey"])
def test_a_single_answer_is_a_report(answer, record, benchmark):
  found = record([answer(score=0.0)], benchmark=benchmark)
  for text in (
    shown(run_tables.terminal(found)),
    run_tables.markdown(found, []),
  ):
    assert "keydiff" in text
    assert "nan" not in text.lower()


def test_the_mean_retention_reached_is_told(answer, record):
  shares = {"keydiff": (0.1, 0.3, 0.5), "compactor": (0.6, 0.8, 1.0)}
  answers = [answer("full", sample=number) for number in range(3)]
  for method, own in shares.items():
    answers.append(answer(method, "0.5", retention=0.5))
    answers += [
      answer(method, "auto at 0.95", sample=number, retention=share)
      for number, share in enumerate(own)
    ]
  found = record(answers)
  table = titled(found, "score, niah_single_1")
  assert table.header == ["method", "100 %", "50 %", "auto at 0.95"]
  assert [line[-1][-8:] for line in table.lines] == ["", " at 30 %", " at 80 %"]
  budgets = [line[1] for line in compared._details(found).lines]
  assert budgets[1:3] == ["50 %", "auto at 0.95: 30 %"]
  axes = score_plots.score_vs_retention(found).axes[0]
  ticks = [label.get_text() for label in axes.get_xticklabels()]
  assert set(ticks) == {"50 %", "100 %"}


def test_budgets_are_in_the_order_of_their_size(answer, record):
  """Whenever they were run, and whichever methods have them."""
  budgets = {"keydiff": ("0.1", "0.5"), "compactor": ("0.25", "0.5")}
  answers = [answer("full")] + [
    answer(method, budget, retention=float(budget))
    for method, own in budgets.items()
    for budget in own
  ]
  found = record(answers)
  table = titled(found, "score, niah_single_1")
  assert table.header == ["method", "100 %", "50 %", "25 %", "10 %"]
  names = [mean.name for mean in means.means(found.summary["rows"])]
  assert names[1:] == [
    ("keydiff", "0.5"),
    ("keydiff", "0.1"),
    ("compactor", "0.5"),
    ("compactor", "0.25"),
  ]


def test_tables_of_one_run_share_a_unit(answer, record):
  big = {"cache_bytes": 12 * 2**20, "decoding_bytes": 9 * 2**20}
  found = record(
    [answer("full", **big), answer("quest", cache_bytes=3 * 2**20)],
    benchmark="math500",
  )
  in_terminal = compared._details(found)
  assert in_terminal.header[-1] == "MiB"
  assert [line[-1] for line in in_terminal.lines] == ["12.0", "3.0"]
  in_full = titled(found, "niah_single_1")
  assert in_full.header[-3:] == ["MiB", "answer", "MiB, decoding"]
  assert in_full.lines[0][-3::2] == ("12.0", "9.0")
