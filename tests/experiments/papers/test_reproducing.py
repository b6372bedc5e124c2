"""The page of the papers' experiments says what the code has."""

import pathlib
import re

import pytest

from kvjax.experiments.papers import printed, reproducing
from kvjax.experiments.papers.data_model import Program
from kvjax.experiments.papers.registry import EXPERIMENTS

ROOT = pathlib.Path(__file__).parents[3]
PAGE = (ROOT / reproducing.PAGE).read_text(encoding="utf-8")


def row_of(name):
  (line,) = re.findall(
    rf"^\| \*\*{re.escape(name)}\*\* .*$", PAGE, re.MULTILINE
  )
  return [cell.strip() for cell in line.strip("|").split("|")]


def test_the_tables_are_current():
  """`python -m kvjax.experiments.papers.reproducing` writes them."""
  assert reproducing.replace_tables(PAGE) == PAGE
  stale = PAGE.replace("| not run |", "| 99.9 |")
  assert reproducing.replace_tables(stale) == PAGE != stale


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_every_experiment_has_a_row(name):
  experiment = EXPERIMENTS[name]
  title, needs, arguments, minutes, paper, ours = row_of(name)
  assert experiment.title in title
  assert experiment.needs in needs
  assert paper
  if experiment.why_not:
    assert (arguments, minutes, ours) == ("", "", "cannot run")
  else:
    assert arguments.startswith(f"`{name}")
    assert minutes == str(experiment.minutes)
    assert (ours == "not run") == (not experiment.recorded)


def test_numbers_and_places_are_those_that_are_printed():
  title, *_, paper, _ = row_of("E2.1")
  assert title.endswith("(Tables 11, 12)")
  assert "Full 49.74; KeyDiff 45.06 / 48.14 / 49.19 / 49.55" in paper
  assert printed.places("E2.3") == ["unknown", "Table 13"]
  assert printed.places("E5.1") == ["unknown"]
  assert row_of("E4.7")[0].endswith("(Table 4)")
  *_, paper, _ = row_of("E4.9")
  assert "CTkvr, 4 % of n 89.84 / 89.8 / 86.21 / 83.12 / 78.93" in paper
  assert row_of("E2.7")[0].endswith("(Figures 5, 8, 9, 10)")
  # Of a line without the numbers of some columns; one that is in doubt.
  assert "LagKV – / 89 / – / –" in row_of("E5.5")[4]


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_arguments_are_accepted(name):
  flags = re.findall(r"--(\w+)=", row_of(name)[2])
  takes = {
    flag
    for part in EXPERIMENTS[name].parts
    if isinstance(part, Program)
    for flag in part.takes
  }
  if takes:
    assert {*flags} <= takes


@pytest.mark.parametrize(
  "name", [name for name, e in EXPERIMENTS.items() if e.recorded]
)
def test_recorded_runs_have_the_numbers_of_their_pages(name):
  run = EXPERIMENTS[name]
  page, _, anchor = run.link.partition("#")
  sections = re.split(r"^## ", (ROOT / "docs" / page).read_text(), flags=re.M)
  (section,) = (
    text
    for text in sections
    if text.partition("\n")[0].lower().replace(" ", "-") == anchor
  )
  numbers = re.findall(r"\d[\d,.]*\d", run.recorded)
  assert numbers
  for number in numbers:
    assert number.replace(",", "") in section.replace(",", ""), number
