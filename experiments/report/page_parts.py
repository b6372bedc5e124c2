"""Parts of the pages in docs/ that programs write, between marks.

  python -m kvjax.experiments.report.page_parts results/scaling results/demo

puts table.md of a benchmark, or the scores of a comparison, between the marks
`<!-- scaling -->` and `<!-- /scaling -->` of its folder's name, in the page
that has them; of a comparison with --timed_rounds at several lengths, what the
methods cost. It is run from the root of the repository.
"""

import pathlib
from collections.abc import Sequence

from kvjax import files
from kvjax.errors import InputError
from kvjax.experiments import cli
from kvjax.experiments.report import benchmark_tables, costs, run_files, wording
from kvjax.experiments.report.tables import by_budget

# From the root of the checkout.
DOCS = pathlib.Path("docs")


def has(page: str, name: str) -> bool:
  """Returns whether a page has both marks of a name, in order."""
  before, _, after = page.partition(_first(name))
  return len(before) < len(page) and _last(name) in after


def replace(page: str, name: str, part: str) -> str:
  """Returns a page with another part.

  Args:
    page: text of the page, with both marks.
    name: the name in the marks.
    part: lines of Markdown.
  """
  before, first, rest = page.partition(_first(name))
  _, last, after = rest.partition(_last(name))
  return f"{before}{first}{part}{last}{after}"


def main(folders: Sequence[str]) -> None:
  """Reads all tables, then writes them into their pages."""
  if not folders:
    raise InputError("Name the folders of the tables, such as results/scaling.")
  changed: dict[pathlib.Path, str] = {}
  for folder in map(pathlib.Path, folders):
    part = _part_of(folder)
    page = _page_with(folder.name)
    text = changed.get(page) or files.read_text(page)
    changed[page] = replace(text, folder.name, part)
  for page, text in changed.items():
    files.write_text(page, text)


def scores(run: run_files.Record) -> str:
  """Returns the scores of a comparison by method and budget, and its settings.

  Raises:
    InputError: a run of several lengths has several such tables.
  """
  if len(run.values("length")) > 1:
    raise InputError(
      f"{run.folder} has several lengths; a page shows runs of one each."
    )
  table, summary = by_budget(run)._replace(title=""), run.summary
  about = (
    f"Percentage of {wording.scored(summary)}, ± the longer half of its 95 % "
    "interval, or with that interval where the percentage is at its end: "
    f"{wording.averaged(run.values('task'))}; {wording.title(summary)}. "
    f"{wording.circumstances(summary)}"
  )
  return benchmark_tables.markdown(table, about, code=True)


def of_costs(run: run_files.Record) -> str:
  """Returns what methods cost by length, and the settings of the run."""
  summary = run.summary
  about = (
    "Allocated MiB of the cache, and milliseconds from the prompt to it, of "
    f"one prompt of {wording.averaged(run.values('task'))}; "
    f"{wording.title(summary)}. {wording.circumstances(summary)}"
  )
  return benchmark_tables.markdown(costs.table(run), about, code=True)


def _part_of(folder: pathlib.Path) -> str:
  # `evaluate` writes a run below the folder that it is given.
  if any(folder.rglob(run_files.SAMPLES)):
    run = run_files.find_one(folder)
    return of_costs(run) if costs.are_known(run) else scores(run)
  return files.read_text(folder / "table.md")


def _page_with(name: str) -> pathlib.Path:
  for page in sorted(DOCS.rglob("*.md")):
    if has(files.read_text(page), name):
      return page
  raise InputError(
    f"No page in {DOCS} has the marks {_first(name).strip()} and "
    f"{_last(name).strip()}."
  )


def _first(name: str) -> str:
  return f"<!-- {name} -->\n"


def _last(name: str) -> str:
  return f"<!-- /{name} -->\n"


if __name__ == "__main__":
  cli.run_on_arguments(main)
