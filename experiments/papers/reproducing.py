"""The tables of docs/reproducing.md: the papers' experiments and numbers.

    python -m kvjax.experiments.papers.reproducing

writes them into the page, from the root of the repository.
"""

import collections
import pathlib
import re
from collections.abc import Iterator
from typing import NamedTuple

from kvjax import files
from kvjax.experiments.papers import printed
from kvjax.experiments.papers.data_model import (
  Analysis,
  Comparison,
  Experiment,
  Key,
  Program,
  Targets,
)
from kvjax.experiments.papers.registry import EXPERIMENTS
from kvjax.experiments.report import page_parts

PAGE = pathlib.Path("docs", "reproducing.md")
_PART = "experiments"
_HEAD = ("experiment", "needs", "arguments", "min", "the paper", "ours")
_ALIGNED = (":--", ":--", ":--", "--:", ":--", ":--")
_NOT_RUN = "not run"
_UNKNOWN = "no numbers known here"
# Lines of a table whose method does not bear the paper's name.
_MOST_LINES = 3
_PLACES = re.compile(r"(Table|Figure)s? (\d+(?:(?:, | and )\d+)*)")


class Recorded(NamedTuple):
  """A run of ours.

  Attributes:
    text: what it found, and on what.
    link: where it is described, from the page.
  """

  text: str
  link: str


_OF_KEYS = "results.md#keys-and-attention-in-keydiff"

RECORDED = {
  "E2.6": Recorded(
    "SmolLM2, 924 tokens: KeyDiff's are the highest, in 96 % of cases or more",
    _OF_KEYS,
  ),
  "E2.7": Recorded(
    "SmolLM2, 924 tokens: KeyDiff's spread most, but those of others, too",
    _OF_KEYS,
  ),
  "E2.8": Recorded(
    "SmolLM2, 924 tokens: correlations of −0.30 to −0.67 from layer 3 on, none "
    "by rank",
    _OF_KEYS,
  ),
  "E2.11": Recorded(
    "SmolLM2, 924 tokens: the four least alike get 44 % in layer 12, and 2 % "
    "in layer 2",
    _OF_KEYS,
  ),
  "E2.12": Recorded("SmolLM2, 924 tokens: in two of four heads", _OF_KEYS),
  "E3.7": Recorded(
    "SmolLM2, 512 tokens: Compactor keeps 98.0 % before and 87.4 % after",
    "finetuning.md#on-smollm2",
  ),
  "E3.9": Recorded(
    "SmolLM2, 256 tokens, mean of 30 layers: 5 % of the tokens get 47.2 % of "
    "the attention without the mask, the band along the diagonal 19.8 %",
    "results.md#attention-without-the-mask-in-compactor",
  ),
  "E4.6": Recorded(
    "2 CPU cores, in ms from 4K to 128K tokens: 19, 91, 355, 1,785, 6,045, "
    "28,328",
    "retrieval.md#index-construction-time",
  ),
  "E4.8": Recorded(
    "SmolLM2, 1,024 tokens, mean of six rounds: 72.2 with and without",
    "retrieval.md#conversations",
  ),
  "E4.10": Recorded(
    "SmolLM2, 2,048 tokens: cosines of 0.77 to 0.84 in the first ten layers, "
    "0.83 to 0.92 in the others",
    "retrieval.md#recall",
  ),
  "E4.11": Recorded(
    "SmolLM2, 924 tokens: 50 % of the keys of four lists are different, and "
    "22 % of 16, where reranking saves 38 %",
    "retrieval.md#recall",
  ),
}

# What the papers show and nothing here does.
_MISSING = {
  "ProtoKV": (
    "The paper was not available to us, only a note on it, its public reviews "
    "and the authors' notebooks. So its tables and figures are not numbered "
    "here, and it may show more."
  ),
  "KeyDiff": (
    "The end-to-end latencies of the abstract have no counterpart. Tables 4 "
    "and 6, of Math-500, have none in E2.13, which measures long texts; "
    "`kvjax evaluate --benchmark=math500` asks these problems."
  ),
  "Compactor": (
    "The model, layers, heads and text of Figures 2 and 8 are not known, so "
    "that E3.9 draws such figures for others. The authors' vLLM backend has no "
    "counterpart; E3.1 quotes its scores."
  ),
  "CTkvr": (
    "E4.4 has no counterpart, as there is no sparse prefill here. "
    "RetrievalAttention is not implemented; E4.1 quotes its scores. The paper "
    "has other tables and figures, among them Tables 3 and 13 to 15 and "
    "Figures 9 and 11 to 14; we do not know which of these experiments they "
    "belong to, if any."
  ),
  "LagKV": "Every table and every figure that we know of has a counterpart.",
}


def tables() -> str:
  """Formats a section with a table for each paper, in Markdown."""
  papers = dict.fromkeys(e.paper for e in EXPERIMENTS.values())
  return "\n".join(map(_section, papers))


def replace_tables(page: str) -> str:
  """Returns the page with its tables as they are now.

  Args:
    page: text of the page, with the marks before and after the tables.
  """
  return page_parts.replace(page, _PART, f"\n{tables()}\n")


def _section(paper: str) -> str:
  experiments = [e for e in EXPERIMENTS.values() if e.paper == paper]
  models = collections.Counter(e.models for e in experiments)
  usual = models.most_common(1)[0][0]
  rows = [_HEAD, _ALIGNED, *(_row(e, usual) for e in experiments)]
  lines = (
    "|".join(f" {cell} " if cell else " " for cell in row) for row in rows
  )
  table = "".join(f"|{line}|\n" for line in lines)
  return (
    f"## {paper}\n\nModels, unless a row names others: {usual}.\n\n"
    f"{table}\n{_MISSING[paper]}\n"
  )


def _row(experiment: Experiment, usual: str) -> tuple[str, ...]:
  models = "" if experiment.models == usual else experiment.models
  needs = "; ".join(filter(None, (models, experiment.needs)))
  runs = bool(experiment.parts)
  cells = (
    f"**{experiment.id}** {_titled(experiment)}",
    needs,
    " ".join(f"`{each}`" for each in _arguments(experiment)) if runs else "",
    str(experiment.minutes) if runs else "",
    " ".join(_of_paper(experiment)),
    _ours(experiment),
  )
  return tuple(cell.replace("|", "\\|") for cell in cells)


def _titled(experiment: Experiment) -> str:
  places = _places(experiment)
  return f"{experiment.title} ({places})" if places else experiment.title


def _places(experiment: Experiment) -> str:
  """The paper's tables and figures, as far as they are known."""
  text = " ".join(
    (
      *experiment.claims,
      *experiment.remarks,
      *printed.places(experiment.id),
    )
  )
  by_kind: dict[str, set[int]] = {}
  for kind, numbers in _PLACES.findall(text):
    by_kind.setdefault(kind, set()).update(
      map(int, re.findall(r"\d+", numbers))
    )
  return ", ".join(
    f"{kind}{'s' if len(numbers) > 1 else ''} "
    f"{', '.join(map(str, sorted(numbers)))}"
    for kind, numbers in sorted(by_kind.items(), reverse=True)
  )


def _arguments(experiment: Experiment) -> Iterator[str]:
  """Yields what follows `kvjax reproduce` for the paper's model and data."""
  yield experiment.id
  if any(map(_has_model, experiment.parts)):
    yield "--model=DIR"
  if "LongBench" in experiment.needs:
    yield "--data=DIR"
  if "SQuAD" in experiment.needs:
    yield "--squad=FILE"
  if "HotpotQA" in experiment.needs:
    yield "--hotpotqa=FILE"


def _has_model(part: Comparison | Analysis | Program) -> bool:
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
  cells = ["–" if n is None else f"{n:g}" for n in found[: 1 if same else None]]
  return f"{' / '.join(cells)}{doubt}"


def _ours(experiment: Experiment) -> str:
  run = RECORDED.get(experiment.id)
  if not experiment.parts:
    return "cannot run"
  return f"[{run.text}]({run.link})" if run else _NOT_RUN


if __name__ == "__main__":
  text = PAGE.read_text(encoding="utf-8")
  files.write_text(PAGE, replace_tables(text))
