"""Writes and prints what a calibration has found."""

import pathlib
from collections.abc import Sequence
from typing import Any

import rich.console
import rich.text
from absl import logging

from kvjax.experiments.calibration import fits, pictures, record_files, tables
from kvjax.experiments.report import wording
from kvjax.experiments.report.pictures import png
from kvjax.experiments.run import outputs, sending

_RECORDS = "records"
# What is not lost if a file cannot be written.
_KEPT = "measurements"


def write(
  folder: pathlib.Path,
  summary: dict[str, Any],
  fitted: Sequence[fits.Fitted],
  console: rich.console.Console,
) -> None:
  """Writes pictures, records and tables, and prints the tables.

  Raises:
    InputError: a file cannot be written.
  """
  tau = summary["tau"]
  title = tables.title(summary)
  plots = {
    "ratio_curves.png": pictures.ratio_curves(fitted, title),
    "retention_bars.png": pictures.retention_bars(fitted, tau, title),
  }
  records_folder = folder / _RECORDS
  records_folder.mkdir(exist_ok=True)
  for method in fitted:
    name = record_files.file_name(method.name, method.plan.per_query_head)
    method.calibration.save(records_folder / name)
    logging.info("Wrote %s", records_folder / name)
  for name, figure in plots.items():
    outputs.write_bytes(folder / name, png(figure), _KEPT)
  text = tables.markdown(summary, list(plots))
  outputs.write_json(folder / "summary.json", summary, _KEPT)
  outputs.write_text(folder / "calibration.md", text, _KEPT)
  console.print(rich.text.Text(title), *tables.tables(summary), sep="\n")
  console.print(rich.text.Text(tables.circumstances(summary), style="dim"))
  records = wording.count(len(fitted), "record")
  console.print(
    f"{records} in {records_of(folder)}; all in {sending.named(str(folder))}",
    soft_wrap=True,
  )
  console.print(f"{tables.TRIALS} {summary['trials']}", soft_wrap=True)


def records_of(folder: pathlib.Path) -> str:
  """Names the folder, or the address, of the records of a run."""
  return sending.named(str(folder / _RECORDS))
