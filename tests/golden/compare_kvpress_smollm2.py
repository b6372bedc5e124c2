"""Compares kvjax with kvpress on SmolLM2-135M-Instruct, press by press.

  python tests/golden/compare_kvpress_smollm2.py

computes with kvjax what make_kvpress_smollm2.py has stored in kvpress_smollm2/
and writes the table of docs/kvpress.md. Names of presses may follow; the other
rows then stay as they are. tests/models/test_kvpress_smollm2.py asserts the
same.
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
    kept: by case and prompt, bool [L, K, n] or [L, K, D + n].
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

  In layers without some channels, the kept ones come first, [L, K, D + n].
  """
  length = int(cache.next_positions[row])
  found = []
  for layer in cache.layers:
    assert layer is not None
    bits = _bits(layer.row_positions(row), length)
    if isinstance(layer, NarrowLayer):
      channels = _bits(layer.channels[row].tolist(), layer.tail.keys.shape[-1])
      bits = np.concatenate([channels, bits], axis=-1)
    found.append(bits)
  return np.stack(found)


def _bits(heads: Sequence[Sequence[int]], width: int) -> np.ndarray:
  """Marks the places that each head has, bool [K, width]."""
  bits = np.zeros((len(heads), width), bool)
  for head, places in zip(bits, heads, strict=True):
    head[places] = True
  return bits


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


def compared(lm: Pretrained, names: Sequence[str] = ()) -> list[Row]:
  """Compares presses on all prompts.

  Args:
    lm: the model.
    names: of presses; if none are given, all of them and the full cache.
  """
  chosen = goldens.cases(names) if names else every_case()
  judge = Judge(lm)
  with goldens.sketches_of_kvpress():
    ours = compress(lm, chosen, range(len(goldens.samples())))
    return [row_of(lm, judge, case, ours) for case in chosen]


def every_case() -> list[str]:
  """The rows of the table, in their order."""
  return [goldens.FULL, *goldens.cases()]


def table(rows: Sequence[Row], before: str) -> str:
  """The table of the page.

  Args:
    rows: those that were compared.
    before: the table that has the others.
  """
  head = (
    "| press | kvjax | ratio | kept sets equal "
    f"| {' | '.join(rows[0].scores)} | answers equal |"
  )
  rule = "| :-- | :-- | --: | --: | --: | --: | --: |"
  new = {row.case: _line(row) for row in rows}
  lines = [new.get(case) or _stored(case, before) for case in every_case()]
  return "\n".join([head, rule, *lines])


def _start(case: str) -> str:
  """The first cells of a row."""
  press, method = "none", "full"
  if case != goldens.FULL:
    counterpart = goldens.COUNTERPARTS[case.rsplit("_", 1)[0]]
    press, method = f"`{counterpart.press}`", counterpart.method
  return f"| {press} | `{method}` | {goldens.percent_of(case) / 100:g} |"


def _stored(case: str, before: str) -> str:
  """A row as the page has it."""
  (line,) = (x for x in before.splitlines() if x.startswith(_start(case)))
  return line


def _line(row: Row) -> str:
  """A row of the table."""
  scores = [
    f"{100 * theirs:.0f} / {100 * ours:.0f}"
    for theirs, ours in row.scores.values()
  ]
  cells = [
    f"{row.equal} of {row.layers}" if row.layers else "–",
    *scores,
    f"{row.same_answers} of {row.answers}",
  ]
  return f"{_start(row.case)} {' | '.join(cells)} |"


def main() -> None:
  rows = compared(load(goldens.MODEL), sys.argv[1:])
  for row in rows:
    for difference in row.differences:
      print(row.case, difference)
  text = PAGE.read_text(encoding="utf-8")
  written = table(rows, text)
  page = page_parts.replace(text, "table", f"{written}\n")
  PAGE.write_text(page, encoding="utf-8")
  print(written)


if __name__ == "__main__":
  main()
