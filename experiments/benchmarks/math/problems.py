"""Problems of MATH-500 and AIME 2025, from a user's files.

Rows are those of the published sets (HuggingFaceH4/MATH-500, and AIME 2025 of
math-ai and opencompass), or of kvpress's copies, whose prompts are taken as
they are.
"""

import itertools
import pathlib
from typing import NamedTuple

from kvjax.errors import InputError
from kvjax.experiments.benchmarks import row_files
from kvjax.experiments.benchmarks.rows import Row

REQUEST = (
  "\n\nSolve this problem step by step. Write the final answer in \\boxed{}."
)


class Problem(NamedTuple):
  """A problem.

  Attributes:
    statement: what is given and asked for.
    request: what the answer should look like.
    answer_prefix: start of the model's turn.
    answer: the right answer.
    new_tokens: maximum tokens of an answer, if the file says so.
  """

  statement: str
  request: str
  answer_prefix: str
  answer: str
  new_tokens: int | None = None


def read(path: pathlib.Path, number: int | None) -> list[Problem]:
  """Reads the first problems of a file or folder.

  Raises:
    InputError: there are none, or a row has neither layout.
  """
  rows = (row for file in row_files.find(path) for row in file.rows())
  found = [*map(_problem, itertools.islice(rows, number))]
  if not found:
    raise InputError(f"{path} has no rows; give a file of problems by --data.")
  return found


def _problem(row: Row) -> Problem:
  answer = _answer(row)
  if "context" in row.fields:
    return Problem(
      row.text("context"),
      row.text("question"),
      row.text("answer_prefix") if row.fields.get("answer_prefix") else "",
      answer,
      row.number("max_new_tokens", 1)
      if "max_new_tokens" in row.fields
      else None,
    )
  name = "problem" if "problem" in row.fields else "question"
  return Problem(row.filled(name), REQUEST, "", answer)


def _answer(row: Row) -> str:
  """Returns the answer; AIME's are whole numbers in some files."""
  value = row.fields.get("answer")
  if type(value) is int:
    return str(value)
  if isinstance(value, list):
    return row.texts("answer")[0]
  return row.filled("answer")
