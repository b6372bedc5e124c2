"""Puts runs into one leaderboard.

  python -m kvjax.experiments.report results

reads every run in and below the folders that are named, as
`kvjax.experiments.evaluate` and `kvjax.experiments.compare` leave them, prints
a table for
each kind of settings and writes leaderboard.csv, leaderboard.md and
leaderboard.html to --output. Runs with other models, protocols, schedules,
seeds, texts or tasks stand apart; of two runs of the same the newer counts, and
runs that are not finished are named and left out.

`--kvpress=DIR` also writes folders like those of NVIDIA/kvpress's evaluation,
so that both can stand side by side.
"""

import pathlib
from collections.abc import Sequence

import rich.console
from absl import flags

from kvjax.errors import InputError
from kvjax.experiments import cli, reports, results
from kvjax.experiments.reporting import kvpress, leaderboard, records, wording

_OUTPUT = flags.DEFINE_string(
  "output", "results/leaderboard", "Folder to write to."
)
_KVPRESS = flags.DEFINE_string(
  "kvpress", None, "Folder for folders such as kvpress writes."
)


def main(directories: Sequence[str]) -> None:
  """Reads all runs before anything is written."""
  if not directories:
    raise InputError(
      "Name the folders that hold runs, as in kvjax.experiments.report results."
    )
  folder = pathlib.Path(_OUTPUT.value)
  beside = None if _KVPRESS.value is None else pathlib.Path(_KVPRESS.value)
  for place in (folder, beside):
    if place is not None:
      results.check_writable(place)
  named = [pathlib.Path(name) for name in directories]
  found = records.find(named)
  board = leaderboard.merge(found, records.unfinished(named))
  console = rich.console.Console(highlight=False)
  console.print(board.to_terminal())
  folder.mkdir(parents=True, exist_ok=True)
  reports.write_text(folder / "leaderboard.csv", board.to_csv())
  reports.write_text(folder / "leaderboard.md", board.to_markdown())
  reports.write_text(folder / "leaderboard.html", board.to_html())
  count = wording.count(len(found), "run")
  console.print(f"{count}; leaderboard.csv, .md and .html in {folder}")
  if beside is not None:
    _export(found, beside, console)


def _export(
  found: Sequence[records.Record],
  root: pathlib.Path,
  console: rich.console.Console,
) -> None:
  count = 0
  for record in found:
    for folder in kvpress.folders(record):
      place = folder.place(root)
      place.mkdir(parents=True, exist_ok=True)
      for name, text in folder.files.items():
        reports.write_text(place / name, text)
      count += 1
  folders = wording.count(count, "folder")
  console.print(f"{folders} in kvpress's layout in {root}")


if __name__ == "__main__":
  cli.run_on_arguments(main)
