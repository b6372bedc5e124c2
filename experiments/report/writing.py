"""Writes the reports of a finished run."""

import pathlib
from collections.abc import Mapping
from typing import Any

import rich.console

from kvjax.experiments.report import (
  compared,
  formats,
  rows,
  run_files,
  run_tables,
)
from kvjax.experiments.run import outputs


def write_comparison(
  folder: pathlib.Path, summary: Mapping[str, Any]
) -> rich.console.Group:
  """Writes summary.json, table.md and score_vs_retention.png atomically.

  Returns:
    The tables for a terminal.

  Raises:
    InputError: the folder's samples.jsonl cannot be read.
  """
  # Here, as programs would otherwise start a second later, for matplotlib.
  from kvjax.experiments.report import pictures, score_plots

  outputs.write_json(folder / run_files.SUMMARY, summary, outputs.ANSWERS)
  record = run_files.read(folder).ranked
  outputs.write_text(
    folder / "table.md", compared.markdown(record), outputs.ANSWERS
  )
  plot = pictures.png(score_plots.score_vs_retention(record))
  outputs.write_bytes(folder / "score_vs_retention.png", plot, outputs.ANSWERS)
  return compared.terminal(record)


def write_run(
  folder: pathlib.Path, summary: Mapping[str, Any]
) -> rich.console.Group:
  """Writes summary.json and the reports made from it.

  These are report.md, report.html, rows.csv and PNG files.

  Returns:
    The tables that fit on a terminal.

  Raises:
    InputError: the folder's samples.jsonl cannot be read.
  """
  from kvjax.experiments.report import page, pictures

  outputs.write_json(folder / run_files.SUMMARY, summary, outputs.ANSWERS)
  record = run_files.read(folder).ranked
  plots = pictures.pictures(record)
  for name, png in plots.items():
    outputs.write_bytes(folder / name, png, outputs.ANSWERS)
  texts = {
    "rows.csv": formats.to_csv(rows.identified(record)),
    "report.md": run_tables.markdown(record, list(plots)),
    "report.html": page.of_run(record, plots),
  }
  for name, text in texts.items():
    outputs.write_text(folder / name, text, outputs.ANSWERS)
  # Remove plots of lengths or turns that the run no longer has.
  for path in folder.glob("*.png"):
    if pictures.is_picture(path.name) and path.name not in plots:
      path.unlink()
  return run_tables.terminal(record)
