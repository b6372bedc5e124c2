"""What runs leave behind, and a comparison's table and plot."""

import json
import os
import pathlib

import pytest
import rich.console
from made_runs import make_answer

from kvjax.errors import InputError
from kvjax.experiments.report import compared, score_plots, wording, writing
from kvjax.experiments.report.run_files import Record
from kvjax.experiments.run import environment, outputs
from kvjax.experiments.run.results import Results, Settings

TASKS = ("niah_single_2", "niah_multikey_1")


def test_what_is_no_file_is_never_replaced(tmp_path):
  """A device, which `root` may replace; a pipe stands for it here."""
  pipe = tmp_path / "pipe"
  os.mkfifo(pipe)
  with pytest.raises(InputError, match="cannot be written: it is no regular"):
    outputs.write_text(pipe, "text")
  assert pipe.is_fifo()
  assert [*tmp_path.iterdir()] == [pipe]


def a_row(method, retention, task, score):
  return {
    "method": method,
    "options": f"{method}()",
    "retention": retention,
    "budget": f"{retention:g}",
    "task": task,
    "length": 1024,
    "depth": None,
    "turn": None,
    "score": score,
    "interval": [score, score],
    "scores": {},
    "samples": 4,
    "context_tokens": 800.0,
    "kept_tokens": 800 * retention,
    "read_tokens": 800 * retention,
    "cache_bytes": round(2**20 * retention),
    "host_bytes": 0,
  }


@pytest.fixture
def summary():
  rows = [a_row("full", 1.0, task, 100.0) for task in TASKS]
  for method, scores in (("random", (50, 0)), ("snapkv.orig", (100, 0))):
    for retention, score in zip((0.5, 0.1), scores, strict=True):
      rows.append(a_row(method, retention, TASKS[0], float(score)))
      rows.append(a_row(method, retention, TASKS[1], score / 4))
  return {
    "benchmark": "needles",
    "model": "tiny",
    "weights": "abc",
    "dtype": "float32",
    "seed": 7,
    "python": "3.12.1",
    "protocol": "query-agnostic",
    "schedule": "whole prompt",
    "heads": "kv head",
    "kv_dtype": "",
    "data": {"essay": "texts"},
    "decoding": "greedy",
    "device": "CPU, 2 cores",
    "versions": {"jax": "1.2.3"},
    "seconds": {"total": 1.0},
    "rows": rows,
  }


def test_a_comparison_has_a_cell_and_a_line_per_method_and_budget(summary):
  text = compared.markdown(Record(pathlib.Path(), summary))
  title, best, name, grid, _, details, end = text.split("\n\n")
  assert title == (
    "**tiny, 1024 tokens, query-agnostic, whole prompt, per kv head, "
    "4 samples per task**"
  )
  assert best == (
    "Best of 2 methods: snapkv.orig (50 %: 62.5, 10 %: 0.0); full cache 100.0."
  )
  assert name.startswith("**score, mean over 2 tasks: niah")
  assert grid.splitlines()[0::2] == [
    "| method | 100 % | 50 % | 10 % |",
    "| full | 100.0 |  |  |",
    "| random |  | 31.2 | 0.0 |",
  ]
  lines = details.splitlines()
  assert lines[0].split(" | ")[2:5] == ["single_2", "multikey_1", "mean"]
  assert lines[2] == ("| full | 100 % | 100.0 | 100.0 | 100.0 | 800 | 1024 |")
  assert lines[3].startswith("| snapkv.orig | 50 % | 100.0 | 25.0 | 62.5 |")
  assert lines[5] == "| random | 50 % | 50.0 | 12.5 | 31.2 | 400 | 512 |"
  assert len(lines) == 7
  assert end == "Seed 7, greedy, float32 on CPU, 2 cores; jax 1.2.3.\n"


def on_terminal(summary):
  console = rich.console.Console(width=80)
  with console.capture() as capture:
    console.print(compared.terminal(Record(pathlib.Path(), summary)))
  return capture.get()


def test_a_title_has_the_fewest_and_the_most_samples_of_a_task(summary):
  assert wording.title(summary).endswith(", 4 samples per task")
  summary["rows"][-1]["samples"] = 6
  assert wording.title(summary).endswith(", 4 to 6 samples per task")


def test_an_axis_names_a_mean_only_of_several_tasks(summary):
  assert wording.score_axis(summary).endswith(", mean over tasks (%)")
  first = summary["rows"][0]["task"]
  summary["rows"] = [row for row in summary["rows"] if row["task"] == first]
  assert "mean" not in wording.score_axis(summary)


def test_the_terminal_has_the_details_of_the_middle_budget(summary):
  shown = on_terminal(summary)
  # In the headline, in the table of budgets, and in that of tasks.
  assert shown.count("snapkv.orig ") == 3
  assert all(part in shown for part in ("query-agnostic", "31.2", "Seed 7"))
  details = shown[shown.index("score by task, n = ") :]
  assert " 10 % " in details
  assert " 50 % " not in details


def test_one_budget_needs_no_table_of_budgets(summary):
  summary["rows"] = [r for r in summary["rows"] if r["retention"] != 0.1]
  shown = on_terminal(summary)
  assert shown.count("snapkv.orig ") == 2
  assert "62.5" in shown


def test_means_without_a_full_cache_are_plotted_too(summary):
  summary["rows"] = [r for r in summary["rows"] if r["method"] == "random"][:2]
  (axes,) = score_plots.score_vs_retention(Record(pathlib.Path(), summary)).axes
  assert [text.get_text() for text in axes.texts if text.get_text()] == [
    "random"
  ]


def test_all_files_of_a_comparison_are_written_whole(summary, tmp_path):
  (tmp_path / "samples.jsonl").touch()
  writing.write_comparison(tmp_path, summary)
  assert {path.name for path in tmp_path.iterdir()} == {
    "samples.jsonl",
    "summary.json",
    "table.md",
    "score_vs_retention.png",
  }
  assert json.loads((tmp_path / "summary.json").read_text()) == summary
  assert (tmp_path / "table.md").read_text() == compared.markdown(
    Record(tmp_path, summary)
  )
  plot = (tmp_path / "score_vs_retention.png").read_bytes()
  assert plot.startswith(b"\x89PNG")


def test_a_run_is_reported_beside_its_answers(summary, tmp_path):
  row = a_row("random", 0.5, TASKS[0], 100.0)
  names = ("interval", "samples", "score", "scores", "context_tokens")
  fields = {name: row[name] for name in row if name not in names}
  answer = make_answer(**fields, question="Who?")
  Results(tmp_path, Settings("tiny", "abc", "float32", 7)).add([answer])
  summary["rows"] = [row | {"samples": 1}]
  # Of the run before, and the user's own.
  for name in ("score_vs_retention_512.png", "mine.png"):
    (tmp_path / name).touch()
  console = rich.console.Console(width=80)
  with console.capture() as capture:
    console.print(writing.write_run(tmp_path, summary))
  assert "random" in capture.get()
  assert {path.name for path in tmp_path.iterdir()} == {
    *("samples.jsonl", "summary.json", "rows.csv", "report.md", "report.html"),
    *("score_vs_retention.png", "score_vs_bytes.png", "mine.png"),
  }
  assert json.loads((tmp_path / "summary.json").read_text()) == summary
  page = (tmp_path / "report.html").read_text()
  assert page.count("data:image/png;base64,iVBORw0KGgo") == 2
  assert "Who?" in page
  assert "](score_vs_bytes.png)" in (tmp_path / "report.md").read_text()


@pytest.mark.parametrize(
  ("kept", "end"),
  [
    ("", "."),
    ("answers", "; the answers are kept, and the same command goes on from"),
  ],
)
def test_a_file_that_cannot_be_written_says_what_is_kept(tmp_path, kept, end):
  path = tmp_path / "table.md"
  path.mkdir()
  with pytest.raises(InputError) as error:
    outputs.write_text(path, "text", kept)
  said = f"{path} cannot be written: Is a directory{end}"
  assert str(error.value).startswith(said)
  assert ("kept" in str(error.value)) == bool(kept)
  assert list(tmp_path.iterdir()) == [path]


def test_the_circumstances_are_those_of_this_machine():
  assert {"python", "jax", "flax"} <= set(environment.versions())
  assert "CPU" in environment.device()
  assert environment.device(4).startswith("4 x CPU")
