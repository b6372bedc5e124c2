"""The tasks of a comparison, by name, and their numbered samples."""

import dataclasses
import random
from collections.abc import Callable, Sequence

from kvjax.errors import InputError
from kvjax.experiments.tasks import fitting, niah, passkey, prose
from kvjax.experiments.tasks.sample import Sample
from kvjax.experiments.tasks.words import BUILT_IN, KeyWords
from kvjax.registry.parsing import suggest

# RULER's needle tasks in prose: one needle, four keys, four values, four
# questions at once.
DEFAULT = (
  *("niah_single_2", "niah_multikey_1", "niah_multivalue", "niah_multiquery"),
)
PASSKEY = "passkey"
# Tokens of an answer beside what it lists. Lengths are multiples, as samples
# whose answers are equally long decode together.
_MARGIN, _MULTIPLE = 4, 4
TASKS = (*niah.TASKS, PASSKEY)


def check_tasks(names: Sequence[str], tasks: Sequence[str] = TASKS) -> None:
  """Rejects names that are not tasks.

  Raises:
    InputError: a name is not in `tasks`, or there are no names.
  """
  if not names:
    raise InputError(f"Name a task; the tasks are {', '.join(tasks)}.")
  for name in names:
    if name not in tasks:
      raise InputError(
        f"There is no task {name!r}{suggest(name, tasks)}; the tasks are "
        f"{', '.join(tasks)}."
      )


def draws(task: str, number: int, seed: int) -> random.Random:
  """Returns the random generator of a sample."""
  return random.Random(f"{seed} {task} {number}")


def bound_answer(sample: Sample, count: Callable[[str], int]) -> Sample:
  """Gives a sample as many answer tokens as the right answer needs.

  RULER allows 128 tokens, in which a model that has lost the needle repeats
  itself. A right answer needs few: the values, and their keys if there are
  several. Half as many again are for values that are listed twice.

  Args:
    sample: of a needle task.
    count: number of tokens of a text.
  """
  keys = sample.metadata.get("keys", ())
  listed = [*sample.answers, *(keys if len(keys) > 1 else ())]
  needed = count(", and ".join(listed)) * 3 // 2 + _MARGIN
  most = -(-needed // _MULTIPLE) * _MULTIPLE
  return dataclasses.replace(
    sample, max_new_tokens=min(sample.max_new_tokens, most)
  )


def draw(
  task: str,
  number: int,
  seed: int,
  length: int,
  count: Callable[[str], int],
  essay: prose.Essay = "heldout",
  words: KeyWords = BUILT_IN,
) -> Sample:
  """Draws a sample that depends only on these arguments.

  Args:
    task: one of `TASKS`.
    number: number of the sample.
    seed: seed of all samples.
    length: maximum number of tokens of prompt and answer.
    count: counts the tokens of a text.
    essay: the prose in which needles are hidden.
    words: the words of needles' keys.

  Raises:
    TooShortError: `length` is too short for the task.
  """
  rng = draws(task, number, seed)
  try:
    if task == PASSKEY:
      return passkey.passkey(rng, length, count, essay=essay)
    needle_task = dataclasses.replace(niah.TASKS[task], words=words)
    return niah.sample(needle_task, rng, length, count, essay=essay)
  except fitting.TooShortError as error:
    raise fitting.TooShortError(length, error.least, task) from None
