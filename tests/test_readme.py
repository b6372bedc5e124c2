"""README is short, and its tables are those of the registry and the results.

So is the table on the page of KVzip.
"""

import itertools
import pathlib
import re

import pytest

import kvjax
from kvjax.registry.registry import METHODS, RETRIEVALS

ROOT = pathlib.Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
METHODS_PAGE = ROOT / "docs" / "methods" / "README.md"


def table(header, text=README):
  """The rows below a header, each a list of cells."""
  lines = text.split(header)[1].splitlines()[2:]
  rows = itertools.takewhile(lambda line: line.startswith("|"), lines)
  return [[cell.strip() for cell in row.split("|")[1:-1]] for row in rows]


def scores(text):
  """The first table of scores, by method and budget."""
  start = "| method | 100 % |"
  budgets = (start + text.split(start)[1].splitlines()[0]).split("|")[2:-1]
  return {
    (name, budget.strip()): cell
    for name, *cells in table(start, text)
    for budget, cell in zip(budgets, cells, strict=True)
    if cell
  }


def test_it_is_short():
  assert len(README.splitlines()) <= 120
  (code,) = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
  lines = [line for line in code.splitlines() if line]
  assert len(lines) == 5
  assert lines[0] == "import kvjax"


def test_its_scores_are_those_of_the_results():
  """With a mark, those of the table with the question known."""
  results = (ROOT / "docs" / "results.md").read_text(encoding="utf-8")
  shown = scores(README)
  marked = {cell: shown.pop(cell) for cell in [*shown] if "†" in cell[0]}
  assert len(shown) > 5 * 3
  assert shown.items() <= scores(results).items()
  aware = scores(results.split("<!-- aware -->")[1])
  assert {name for name, _ in marked} == {"`protokv` †"}
  assert "\n† With the question known" in README
  assert {
    (name.removesuffix(" †"), budget): score
    for (name, budget), score in marked.items()
  }.items() <= aware.items()


def points(score):
  return float(score.split()[0])


def test_the_page_of_kvzip_has_the_scores_of_the_results():
  results = (ROOT / "docs" / "results.md").read_text(encoding="utf-8")
  page = (METHODS_PAGE.parent / "kvzip.md").read_text(encoding="utf-8")
  rows = table("| tokens | method | 100 % |", page)
  assert len(rows) == 3 * 4
  budgets = ("100 %", "50 %", "25 %", "10 %")
  for tokens, method, *cells in rows:
    found = scores(results.split(f"<!-- {tokens.replace(',', '')} -->")[1])
    for budget, cell in zip(budgets, cells, strict=True):
      if "`" in method:
        assert cell == found.get((method, budget), "")
      elif cell:
        others = [
          score
          for (name, each), score in found.items()
          if each == budget and "kvzip" not in name and "kvzap" not in name
        ]
        assert points(cell) == max(map(points, others))
        assert cell in others


def supports(name, schedule):
  try:
    kvjax.get_plan(name, kvjax.Retention(0.5), schedule=schedule)
  except kvjax.InputError:
    return ""
  return "✓"


def may_be_ragged(name, entry):
  """Heads share a budget by default, by a preset, or by ada/."""
  made = [entry.make(), *entry.presets.values()]
  spread = [getattr(each, "allocation", None) for each in made]
  names = [name, *(f"{name}.{preset}" for preset in entry.presets)]
  by_ada = [supports(f"ada/{each}", kvjax.Schedule()) for each in names]
  shared = any(getattr(each, "ragged", False) for each in spread)
  return "✓" if shared else max(by_ada)


def own(names):
  """Those of this package: tests may have registered others."""
  packages = ("kvjax.methods.", "kvjax.registry.eviction", "kvjax.retrieval.")
  return {
    name: entry
    for name, entry in names.items()
    if entry.make.__module__.startswith(packages)
  }


def test_the_page_of_methods_lists_each_as_it_is_registered():
  rows = table("| Name | Method |", METHODS_PAGE.read_text(encoding="utf-8"))
  (divider,) = (i for i, row in enumerate(rows) if row[0].startswith("**"))
  for names, part in (
    (METHODS, rows[:divider]),
    (RETRIEVALS, rows[divider + 1 :]),
  ):
    registered = own(names)
    assert len(part) == len(registered)
    for row, (name, entry) in zip(part, registered.items(), strict=True):
      linked, method, idea, *marks = row
      found = re.fullmatch(r"\[`(\w+)`\]\((\w+\.md)\)", linked)
      assert found
      assert found[1] == name
      assert (METHODS_PAGE.parent / found[2]).is_file()
      text, link = re.fullmatch(r"\[?([^]]+)\]?(?:\((.*)\))?", method).groups()
      assert text == entry.summary
      if entry.paper:
        assert link == f"https://arxiv.org/abs/{entry.paper}"
      assert idea
      if names is METHODS:
        assert marks == [
          supports(name, kvjax.Schedule(block=128)),
          supports(name, kvjax.Schedule(every=1)),
          may_be_ragged(name, entry),
        ], name
      else:
        assert marks == ["", "", ""]


def test_the_readme_lists_some_of_them_in_the_same_words():
  text = METHODS_PAGE.read_text(encoding="utf-8").replace(
    "](", "](docs/methods/"
  )
  everything = table(
    "| Name | Method |", text.replace("docs/methods/http", "http")
  )
  rows = table("| Name | Method |")
  assert [row for row in everything if row in rows] == rows
  named = {row[0].split("`")[1] for row in rows if "`" in row[0]}
  assert {"keydiff", "lagkv", "compactor", "protokv", "ctkvr"} <= named


def test_it_counts_the_methods():
  (evicted,) = re.search(
    r"implements more than (\d+) published methods", README
  ).groups()
  # Nothing, chance, and Compactor's two halves are no published methods.
  unpublished = {"full", "random", "leverage", "noncausal"}
  assert int(evicted) < len({*own(METHODS)} - unpublished)


@pytest.mark.parametrize("build", re.findall(r'"jax\[(\w+)\]"', README))
def test_jax_has_the_builds_that_it_names(build):
  import importlib.metadata

  extras = importlib.metadata.metadata("jax").get_all("Provides-Extra")
  assert build in extras
