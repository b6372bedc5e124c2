"""Tables and plots of a summary, and the files that hold them."""

import itertools
import json

import pytest
import rich.console

from experiments import plots, reports, results, tables

TASKS = ("niah_single_2", "niah_multikey_1")


def a_row(method, retention, task, score):
  return {
    "method": method,
    "retention": retention,
    "budget": f"{retention:g}",
    "task": task,
    "score": score,
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
    "model": "tiny",
    "protocol": "query-agnostic",
    "schedule": "whole prompt",
    "heads": "kv head",
    "length": 1024,
    "seed": 7,
    "dtype": "float32",
    "device": "CPU, 2 cores",
    "versions": {"jax": "1.2.3"},
    "rows": rows,
  }


def test_rows_at_retention_one_change_neither_table_nor_plot(summary):
  before = tables.means(summary["rows"])
  rows = results.at_retention_one(summary["rows"], ["random", "snapkv.orig"])
  assert [
    (r["method"], r["retention"], r["task"], r["score"]) for r in rows
  ] == [
    (method, 1.0, task, 100.0)
    for method in ("random", "snapkv.orig")
    for task in TASKS
  ]
  assert tables.means([*summary["rows"], *rows]) == before


def test_markdown_has_a_line_per_method_and_budget(summary):
  lines = tables.to_markdown(summary).splitlines()
  assert lines[0] == (
    "**tiny, 1024 tokens, query-agnostic, whole prompt, per kv head, "
    "4 samples per task**"
  )
  assert lines[2].split(" | ")[2:5] == ["single_2", "multikey_1", "mean"]
  assert lines[4] == ("| full | 100 % | 100.0 | 100.0 | 100.0 | 800 | 1024 |")
  assert lines[5] == "| random | 50 % | 50.0 | 12.5 | 31.2 | 400 | 512 |"
  assert len(lines) == 11
  assert lines[-1] == ("Seed 7, greedy, float32 on CPU, 2 cores; jax 1.2.3.")


def test_the_terminal_names_a_method_once(summary):
  console = rich.console.Console(width=80)
  with console.capture() as capture:
    console.print(tables.to_terminal(summary))
  shown = capture.get()
  assert shown.count("snapkv.orig") == 1
  assert all(part in shown for part in ("query-agnostic", "31.2", "Seed 7"))


def test_means_without_a_full_cache_are_plotted_too(summary, tmp_path):
  summary["rows"] = [r for r in summary["rows"] if r["method"] == "random"][:2]
  plots.score_vs_retention(summary, tmp_path / "plot")
  assert (tmp_path / "plot").read_bytes().startswith(b"\x89PNG")


def test_labels_stand_apart_and_near_their_lines():
  assert plots._spread([10.0, 50.0]) == [10.0, 50.0]
  spread = plots._spread([0.0, 0.0, 0.0, 40.0])
  assert spread[0] >= 0
  assert all(b - a > 5 for a, b in itertools.pairwise(spread))
  assert spread[3] == 40
  spread = plots._spread([80.0] + [100.0] * 4)
  assert spread[-1] <= 100
  assert all(b - a > 5 for a, b in itertools.pairwise(spread))


def test_all_files_are_written_whole(summary, tmp_path):
  reports.write(tmp_path, summary)
  assert {path.name for path in tmp_path.iterdir()} == {
    "summary.json",
    "table.md",
    "score_vs_retention.png",
  }
  assert json.loads((tmp_path / "summary.json").read_text()) == summary
  assert (tmp_path / "table.md").read_text() == tables.to_markdown(summary)


def test_the_circumstances_are_those_of_this_machine():
  assert {"python", "jax", "flax"} <= set(reports.versions())
  assert "CPU" in reports.device()
  assert reports.device(4).startswith("4 x CPU")
