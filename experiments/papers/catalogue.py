"""The list of experiments, one per line."""

import rich.box
import rich.console
import rich.table

from kvjax.experiments.papers.registry import EXPERIMENTS


def terminal() -> rich.console.Group:
  """Formats a table per paper."""
  papers = dict.fromkeys(e.paper for e in EXPERIMENTS.values())
  return rich.console.Group(
    *map(_table, papers),
    "kvjax reproduce ID runs one; --model=DIR takes your model and --data=DIR "
    "LongBench's files. The minutes are for the bundled model and generated "
    "prompts on two cores.",
  )


def _table(paper: str) -> rich.table.Table:
  experiments = [e for e in EXPERIMENTS.values() if e.paper == paper]
  table = rich.table.Table(
    title=f"{paper}: {experiments[0].models}",
    box=rich.box.SIMPLE_HEAD,
    pad_edge=False,
    padding=(0, 1, 0, 0),
    title_justify="left",
  )
  table.add_column("id", no_wrap=True)
  for name in ("shows", "data needed", "runs without model and data"):
    table.add_column(name)
  table.add_column("min", justify="right", no_wrap=True)
  for experiment in experiments:
    table.add_row(
      experiment.id,
      experiment.title,
      experiment.needs or "none",
      experiment.why_not or experiment.instead,
      "" if experiment.why_not else str(experiment.minutes),
    )
  return table
