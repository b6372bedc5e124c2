"""The tables of docs/reproducing.md: the papers' experiments and numbers.

    python -m kvjax.experiments.papers.reproducing

writes them into the page, from the root of the repository.
"""

import pathlib
import re
from collections.abc import Iterator

from kvjax import files
from kvjax.experiments.papers import printed
from kvjax.experiments.papers.data_model import (
  Analysis,
  Comparison,
  Experiment,
  Key,
  Part,
  Targets,
)
from kvjax.experiments.papers.registry import EXPERIMENTS, PAPERS
from kvjax.experiments.report import formats, page_parts, wording

PAGE = pathlib.Path("docs", "reproducing.md")
_PART = "experiments"
_HEAD = ("experiment", "needs", "arguments", "min", "the paper", "ours")
_LEFT = (0, 1, 2, 4, 5)
_NOT_RUN = "not run"
_UNKNOWN = "no numbers known here"
# Lines of a table whose method does not bear the paper's name.
_MOST_LINES = 3
_PLACES = re.compile(r"(Table|Figure)s? (\d+(?:(?:, | and )\d+)*)")


def replace_tables(page: str) -> str:
  """Returns the page with its tables as they are now.

  Args:
    page: text of the page, with the marks before and after the tables.
  """
  sections = "\n".join(map(_section, PAPERS))
  return page_parts.replace(page, _PART, f"\n{sections}\n")


def _section(paper: str) -> str:
  """Formats the table of a paper in Markdown, below its title."""
  experiments = [e for e in EXPERIMENTS.values() if e.paper == paper]
  usual = PAPERS[paper]["models"]
  rows = (_row(e, usual) for e in experiments)
  table = formats.grid(_HEAD, rows, _LEFT)
  return (
    f"## {paper}\n\nModels, unless a row names others: {usual}.\n\n"
    f"{table}\n{PAPERS[paper]['missing']}\n"
  )


def _row(experiment: Experiment, usual: str) -> tuple[str, ...]:
  models = "" if experiment.models == usual else experiment.models
  needs = "; ".join(filter(None, (models, experiment.needs)))
  runs = bool(experiment.parts)
  cells = (
    f"**{experiment.id}** {experiment.title}{_places(experiment)}",
    needs,
    " ".join(f"`{each}`" for each in _arguments(experiment)) if runs else "",
    str(experiment.minutes) if runs else "",
    " ".join(_of_paper(experiment)),
    _ours(experiment),
  )
  return tuple(cell.replace("|", "\\|") for cell in cells)


def _places(experiment: Experiment) -> str:
  """The paper's tables and figures in parentheses, as far as known."""
  text = " ".join(
    (*experiment.claims, *experiment.remarks, *printed.places(experiment.id))
  )
  by_kind: dict[str, set[int]] = {}
  for kind, numbers in _PLACES.findall(text):
    by_kind.setdefault(kind, set()).update(
      map(int, re.findall(r"\d+", numbers))
    )
  places = ", ".join(
    f"{kind}{'s' if len(numbers) > 1 else ''} "
    f"{', '.join(map(str, sorted(numbers)))}"
    for kind, numbers in sorted(by_kind.items(), reverse=True)
  )
  return f" ({places})" if places else ""


def _arguments(experiment: Experiment) -> Iterator[str]:
  """Yields what follows `kvjax reproduce` for the paper's model and data."""
  yield experiment.id
  if any(map(_has_model, experiment.parts)):
    yield "--model=DIR"
  if "LongBench" in experiment.needs:
    yield "--data=DIR"
  if "Math-500" in experiment.needs:
    yield "--data=FILE"
  if "SQuAD" in experiment.needs:
    yield "--squad=FILE"
  if "HotpotQA" in experiment.needs:
    yield "--hotpotqa=FILE"


def _has_model(part: Part) -> bool:
  if isinstance(part, Analysis):
    return part.model
  return isinstance(part, Comparison) or "model" in part.takes


def _of_paper(experiment: Experiment) -> Iterator[str]:
  """Yields the headline numbers of each comparison, or else the claims."""
  compared = [
    part
    for part in experiment.parts
    if isinstance(part, Comparison) and part.targets
  ]
  # Comparisons that differ in how heads select have the same numbers.
  distinct = {id(part.targets): part for part in reversed(compared)}
  for part in reversed(distinct.values()):
    name = f"{part.name}, " if len(distinct) > 1 else ""
    yield f"{name}{_headline(part, experiment.paper)}"
  if not compared:
    yield from experiment.claims or (_UNKNOWN,)


def _headline(part: Comparison, paper: str) -> str:
  """Formats the first average of a comparison for the paper's first model."""
  targets = part.targets[0]
  what = next(
    average.name
    for average in part.averages
    if any(key.what == average.name for key in targets.numbers)
  )
  keys = [key for key in targets.numbers if key.what == what]
  columns = [c.name for c in part.columns if c.name in {k.column for k in keys}]
  at = "" if len(part.columns) == 1 else f" at {' / '.join(columns)}"
  lines = (
    f"{line} {_numbers(targets, line, columns, what)}"
    for line in _shown([key.line for key in keys], paper)
  )
  return f"{what}{at} ({targets.model}): {'; '.join(lines)}."


def _shown(lines: list[str], paper: str) -> list[str]:
  """Picks the full cache and the paper's method, or else the first lines."""
  lines = list(dict.fromkeys(lines))
  others = [line for line in lines if line != "Full"]
  own = [line for line in others if line.startswith(paper)]
  full = [line for line in lines if line == "Full"]
  return full + (own or others[:_MOST_LINES])


def _numbers(targets: Targets, line: str, columns: list[str], what: str) -> str:
  keys = [Key(line, column, what) for column in columns]
  found = [targets.numbers.get(key) for key in keys]
  doubt = "?" if line in targets.doubts else ""
  # The full cache has one number for all budgets.
  same = len({*found}) == 1
  shown = found[: 1 if same else None]
  cells = [wording.NOTHING if n is None else f"{n:g}" for n in shown]
  return f"{' / '.join(cells)}{doubt}"


def _ours(experiment: Experiment) -> str:
  if not experiment.parts:
    return "cannot run"
  if not experiment.recorded:
    return _NOT_RUN
  return f"[{experiment.recorded}]({experiment.link})"


if __name__ == "__main__":
  text = PAGE.read_text(encoding="utf-8")
  files.write_text(PAGE, replace_tables(text))
