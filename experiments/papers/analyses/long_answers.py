"""E2.13: eviction while a model writes a text much longer than its prompt."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Float, Int
from matplotlib.figure import Figure

import kvjax
from kvjax.experiments.papers.analyses.drawing import LABEL, canvas, finish
from kvjax.experiments.papers.findings import Findings, Subject
from kvjax.experiments.report import wording
from kvjax.experiments.report.formats import Table
from kvjax.experiments.report.lines import styled
from kvjax.experiments.run.progress_bar import track

# Where the prompt begins in each row, past its instructions, its length, and
# that of the text. Budgets are the paper's shares of the text.
_START, _PROMPT, _TEXT = 128, 64, 256
_BUDGETS = (_TEXT // 4, _TEXT // 2)
METHODS = {"KeyDiff": "keydiff:recent_frac=0.2", "SnapKV": "snapkv.keydiff"}


class _Written(NamedTuple):
  """The texts of a method at a budget, compared with those of the full cache.

  Attributes:
    name: the method and its budget.
    method: the method.
    budget: tokens that each KV head keeps.
    same: tokens of each text before the first that differs.
    nll: mean of -ln p of each text by the full cache.
  """

  name: str
  method: str
  budget: int
  same: Int[np.ndarray, " B"]
  nll: Float[np.ndarray, " B"]


def measure(subject: Subject) -> Findings:
  """Continues the beginnings of prompts with each method at each budget."""
  prompts = [_beginning(row) for row in subject.rows]
  full = kvjax.get_plan("full", kvjax.Retention(1.0))
  expected = _texts(subject, prompts, full)
  lines = [
    ["Full", "", str(_TEXT), "", _mean(_nll(subject, prompts, expected))]
  ]
  written = []
  for name, method in track(list(METHODS.items())):
    for budget in _BUDGETS:
      plan = kvjax.get_plan(
        method, kvjax.Tokens(budget), schedule=kvjax.Schedule(every=1)
      )
      texts = _texts(subject, prompts, plan)
      one = _Written(
        f"{name}, N = {budget}",
        name,
        budget,
        same_until(expected, texts),
        _nll(subject, prompts, texts),
      )
      written.append(one)
      lines.append(
        [
          name,
          str(budget),
          f"{one.same.mean():.0f}",
          f"{100 * (one.same == _TEXT).mean():.0f} %",
          _mean(one.nll),
        ]
      )
  header = [
    *("method", "N", "tokens until it differs", "texts that never differ"),
    "NLL by the full cache",
  ]
  title = (
    f"{wording.count(len(prompts), 'text')} of {_TEXT} tokens after "
    f"{len(prompts[0])} of a prompt, greedy"
  )
  return Findings(
    [Table(title, header, lines, names=2)],
    [
      "In place of Math-500's problems, a model continues prose; its text with "
      "the full cache takes the place of the solutions. Methods evict after "
      "every token beyond N. KeyDiff protects the newest 20 % of N, as in the "
      "paper."
    ],
    {"long_answers.png": _draw(written)},
  )


def same_until(
  expected: Int[np.ndarray, "B S"], texts: Int[np.ndarray, "B S"]
) -> Int[np.ndarray, " B"]:
  """Counts the tokens before the first that differs."""
  equal = expected == texts
  return np.where(equal.all(axis=1), equal.shape[1], equal.argmin(axis=1))


def _beginning(row: Sequence[int]) -> list[int]:
  """Cuts a text to be continued out of a prompt."""
  start = min(_START, max(len(row) - _PROMPT, 0))
  return list(row[start : start + _PROMPT])


def _texts(
  subject: Subject, prompts: Sequence[Sequence[int]], plan: kvjax.Plan
) -> Int[np.ndarray, "B S"]:
  lm = subject.lm
  cache, logits = kvjax.prefill(
    lm.model, lm.params, kvjax.Prompts.of(prompts), plan
  )
  decoding = kvjax.Decoding(_TEXT)
  rows = kvjax.generate(lm.model, lm.params, cache, logits, decoding).rows()
  return np.array(rows)


def _nll(
  subject: Subject,
  prompts: Sequence[Sequence[int]],
  texts: Int[np.ndarray, "B S"],
) -> Float[np.ndarray, " B"]:
  """Computes the mean of -ln p of texts after their prompts, per token."""
  lm = subject.lm
  both = [[*a, *b.tolist()] for a, b in zip(prompts, texts, strict=True)]
  whole = kvjax.negative_log_likelihood(
    lm.model, lm.params, kvjax.Prompts.of(both)
  )
  first = kvjax.negative_log_likelihood(
    lm.model, lm.params, kvjax.Prompts.of(prompts)
  )
  total = np.array([len(row) - 1 for row in both])
  before = np.array([len(row) - 1 for row in prompts])
  sums = total * np.asarray(whole) - before * np.asarray(first)
  return sums / (total - before)


def _mean(values: Float[np.ndarray, " B"]) -> str:
  return f"{values.mean():.2f}"


def _draw(written: Sequence[_Written]) -> Figure:
  """Draws the share of texts that are still those of the full cache."""
  figure = canvas(6.4, 3.6)
  axes = figure.add_subplot()
  places = np.arange(_TEXT + 1)
  for index, one in enumerate(written):
    style = styled(one.name, [], index)
    share = 100 * (one.same[None] >= places[:, None]).mean(axis=1)
    axes.plot(
      places,
      share,
      color=style.color,
      dashes=style.dashes,
      marker=style.marker,
      markevery=_TEXT // 8,
      markersize=4,
      label=one.name,
    )
  axes.set_ylim(-3, 103)
  finish(axes, "tokens written", "% of texts as with the full cache")
  axes.legend(fontsize=LABEL)
  return figure
