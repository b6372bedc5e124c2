"""Compares kvjax with kvpress on SmolLM2-135M-Instruct, press by press.

  python tests/golden/compare_kvpress_smollm2.py

computes with kvjax what make_kvpress_smollm2.py has stored in kvpress_smollm2/
and writes the table of docs/kvpress.md. tests/models/test_kvpress_smollm2.py
asserts the same.
"""

import pathlib
import sys
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

HERE = pathlib.Path(__file__).parent
sys.path.append(str(HERE))
import smollm2_counterparts as goldens  # noqa: E402
from smollm2_judge import Difference, Judge  # noqa: E402

import kvjax  # noqa: E402
from kvjax.cache.narrow import NarrowLayer  # noqa: E402
from kvjax.experiments.metrics.string_match import string_match_all  # noqa: E402
from kvjax.experiments.report import page_parts  # noqa: E402
from kvjax.models.pretrained import Pretrained, load  # noqa: E402

PAGE = HERE.parents[1] / "docs" / "kvpress.md"
MOST_TOKENS = 12
# Caches of this many plans are in memory at once.
AT_ONCE = 24


class Compressed(NamedTuple):
  """What kvjax makes of prompts.

  Attributes:
    kept: by case and prompt, bool [L, K, n] or [L, K, D].
    answers: by case and prompt.
  """

  kept: dict[str, dict[int, np.ndarray]]
  answers: dict[str, dict[int, list[int]]]


def compress(
  lm: Pretrained,
  chosen: Sequence[str],
  prompts: Sequence[int],
  rows: int = 2,
  answer: bool = True,
) -> Compressed:
  """Prefills prompts, keeps what the cases keep, and answers the questions.

  Args:
    lm: the model.
    chosen: the cases.
    prompts: their numbers.
    rows: prompts per batch.
    answer: whether the questions are asked.
  """
  found = Compressed({case: {} for case in chosen}, {c: {} for c in chosen})
  for start in range(0, len(prompts), rows):
    batch = prompts[start : start + rows]
    for first in range(0, len(chosen), AT_ONCE):
      _compress_batch(lm, chosen[first : first + AT_ONCE], batch, found, answer)
  return found


def _compress_batch(
  lm: Pretrained,
  chosen: Sequence[str],
  batch: Sequence[int],
  found: Compressed,
  answer: bool,
) -> None:
  """Adds what the cases keep and answer of some prompts."""
  contexts = [goldens.samples()[prompt]["context"] for prompt in batch]
  plans = {case: goldens.plan_of(case) for case in chosen}
  still = {case: goldens.in_place(plan) for case, plan in plans.items()}
  distinct = list(dict.fromkeys([*plans.values(), *still.values()]))
  swept, _ = kvjax.sweep(
    lm.model,
    lm.params,
    kvjax.Prompts.of(
      contexts, len(contexts[0]), repeat_request=kvjax.RepeatRequest.of(lm.text)
    ),
    distinct,
  )
  caches = dict(zip(distinct, swept, strict=True))
  for case in chosen:
    for row, prompt in enumerate(batch):
      found.kept[case][prompt] = _kept(caches[still[case]], row)
  if not answer:
    return
  questions = [goldens.samples()[prompt]["question"] for prompt in batch]
  generated = kvjax.generate(
    lm.model,
    lm.params,
    [caches[plans[case]] for case in chosen],
    kvjax.Prompts.of(questions),
    kvjax.Decoding(MOST_TOKENS, lm.text.eos_ids),
  )
  for case, answers in zip(chosen, generated, strict=True):
    found.answers[case].update(zip(batch, answers.rows(), strict=True))


def _kept(cache: kvjax.Cache, row: int) -> np.ndarray:
  """Which tokens of its context a row holds, bool [L, K, n].

  Of layers without some channels, which channels [L, K, D].
  """
  length = int(cache.next_positions[row])
  found = []
  for layer in cache.layers:
    assert layer is not None
    heads, width = layer.row_positions(row), length
    if isinstance(layer, NarrowLayer):
      heads, width = layer.channels[row].tolist(), layer.tail.keys.shape[-1]
    bits = np.zeros((len(heads), width), bool)
    for head, places in zip(bits, heads, strict=True):
      head[places] = True
    found.append(bits)
  return np.stack(found)


class Row(NamedTuple):
  """A row of the table: a press at a share removed.

  Attributes:
    case: the press and the percent.
    equal: layers of stored prompts in which all heads keep the same.
    layers: these layers.
    differences: where they do not.
    scores: by task, the share of needles found by kvpress and by kvjax.
    same_answers: answers that are equal, token by token.
    answers: number of answers.
  """

  case: str
  equal: int
  layers: int
  differences: list[Difference]
  scores: dict[str, tuple[float, float]]
  same_answers: int
  answers: int


def row_of(lm: Pretrained, judge: Judge, case: str, ours: Compressed) -> Row:
  """Compares what both made of all prompts."""
  found: list[Difference] = []
  layers = 0
  for prompt, kept in ours.kept[case].items():
    if case != goldens.FULL and prompt in goldens.stored_prompts():
      layers += len(kept)
      found += judge.differences(case, prompt, kept)
  scores: dict[str, list[tuple[float, float]]] = {}
  same = 0
  for prompt, answer in ours.answers[case].items():
    sample, other = (
      goldens.samples()[prompt],
      goldens.their_answers()[case][prompt],
    )
    same += answer == other
    both = [
      string_match_all(lm.text.decode(ids), sample["answers"])
      for ids in (other, answer)
    ]
    scores.setdefault(sample["task"], []).append((both[0], both[1]))
  means = {
    task: (float(theirs), float(mine))
    for task, pairs in scores.items()
    for theirs, mine in [np.mean(pairs, axis=0)]
  }
  answers = len(ours.answers[case])
  return Row(case, layers - len(found), layers, found, means, same, answers)


def compared(lm: Pretrained) -> list[Row]:
  """Compares all presses on all prompts."""
  chosen, judge = [goldens.FULL, *goldens.cases()], Judge(lm)
  with goldens.sketches_of_kvpress():
    ours = compress(lm, chosen, range(len(goldens.samples())))
    return [row_of(lm, judge, case, ours) for case in chosen]


def table(rows: Sequence[Row]) -> str:
  """The table of the page."""
  lines = []
  for row in rows:
    name = row.case.rsplit("_", 1)[0]
    press = (
      "none"
      if row.case == goldens.FULL
      else f"`{goldens.COUNTERPARTS[name].press}`"
    )
    method = (
      "full" if row.case == goldens.FULL else goldens.COUNTERPARTS[name].method
    )
    kept = f"{row.equal} of {row.layers}" if row.layers else "–"
    scores = [
      f"{100 * theirs:.0f} / {100 * ours:.0f}"
      for theirs, ours in row.scores.values()
    ]
    cells = [
      press,
      f"`{method}`",
      f"{goldens.percent_of(row.case) / 100:g}",
      kept,
      *scores,
      f"{row.same_answers} of {row.answers}",
    ]
    lines.append(f"| {' | '.join(cells)} |")
  head = (
    "| press | kvjax | ratio | kept sets equal "
    f"| {' | '.join(rows[0].scores)} | answers equal |"
  )
  rule = "| :-- | :-- | --: | --: | --: | --: | --: |"
  return "\n".join([head, rule, *lines])


def main() -> None:
  rows = compared(load(goldens.MODEL))
  for row in rows:
    for difference in row.differences:
      print(row.case, difference)
  text = PAGE.read_text(encoding="utf-8")
  page = page_parts.replace(text, "table", f"{table(rows)}\n")
  PAGE.write_text(page, encoding="utf-8")
  print(table(rows))


if __name__ == "__main__":
  main()
