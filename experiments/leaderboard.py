"""Merges runs into one leaderboard.

  kvjax leaderboard results

reads every run of `kvjax evaluate` and `kvjax compare` in and below the given
folders, prints a table for each combination of settings and writes
leaderboard.csv, leaderboard.md, leaderboard.html and a plot for each table to
--output. A headline names the best method of each table. Methods are ranked by
their mean score over the budgets that all of them have, or else over their own;
equal ones share a rank, and the full cache has none. Runs with different
models, protocols, schedules, seeds, texts or tasks have separate tables. Of two
equal runs the newer one counts. Unfinished runs are listed and left out. It
takes a few seconds, and about a second for each table.

Runs may be at addresses, as in `kvjax leaderboard gs://bucket/results`, and so
may --output. `--kvpress=DIR` also writes folders in the layout of
NVIDIA/kvpress's evaluation, so that both results can be compared.
"""

import pathlib
from collections.abc import Sequence

import rich.console
from absl import flags

from kvjax.errors import InputError
from kvjax.experiments import cli
from kvjax.experiments.report import kvpress, ranking, run_files, wording
from kvjax.experiments.run import outputs
from kvjax.experiments.run.sentences import say

_OUTPUT = flags.DEFINE_string(
  "output", "results/leaderboard", "Output folder, or its address."
)
_KVPRESS = flags.DEFINE_string(
  "kvpress", None, "Parent folder of output in kvpress's layout."
)


def main(directories: Sequence[str]) -> None:
  """Reads all runs, then writes the leaderboard."""
  if not directories:
    raise InputError(
      "Name the folders that hold runs, as in kvjax leaderboard results."
    )
  outputs.check_run(_OUTPUT.value, writes=True)
  export = _KVPRESS.value
  export_folder = None if export is None else outputs.folder(export)
  sources = [outputs.run_folder(name) for name in directories]
  runs = run_files.find(sources)
  board = ranking.merge(runs, run_files.unfinished(sources))
  rich.console.Console(highlight=False).print(board.to_terminal())
  folder = outputs.run_folder(_OUTPUT.value)
  outputs.write_text(folder / "leaderboard.csv", board.to_csv())
  plots = board.plots()
  for name, png in plots.items():
    outputs.write_bytes(folder / name, png)
  outputs.write_text(folder / "leaderboard.md", board.to_markdown(list(plots)))
  outputs.write_text(
    folder / "leaderboard.html", board.to_html(list(plots.values()))
  )
  # Remove plots of tables that there no longer are; at an address, they stay.
  for path in folder.glob("leaderboard_*.png"):
    number = path.stem.removeprefix("leaderboard_")
    if number.isdecimal() and path.name not in plots:
      path.unlink()
  count = wording.count(len(runs), "run")
  say(f"{count}; leaderboard.csv, .md, .html and plots in {folder}")
  if export_folder is not None:
    _export(runs, export_folder)


def _export(runs: Sequence[run_files.Record], root: pathlib.Path) -> None:
  count = 0
  for record in runs:
    for folder in kvpress.folders(record):
      target = folder.place(root)
      for name, text in folder.files.items():
        outputs.write_text(target / name, text)
      count += 1
  folders = wording.count(count, "folder")
  say(f"{folders} in kvpress's layout in {root}")


if __name__ == "__main__":
  cli.run_on_arguments(main, sends=True)
