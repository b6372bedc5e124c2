"""The tasks of a comparison, by name, and their numbered samples."""

import random
from collections.abc import Callable, Sequence

from kvjax.errors import InputError
from kvjax.experiments.tasks import needles, passkey, prose
from kvjax.experiments.tasks.sample import Sample
from kvjax.registry.naming import suggest

# RULER's needle tasks in prose: one needle, four keys, four values, four
# questions at once.
DEFAULT = (
  "niah_single_2",
  "niah_multikey_1",
  "niah_multivalue",
  "niah_multiquery",
)
PASSKEY = "passkey"
TASKS = (*needles.TASKS, PASSKEY)


def check_tasks(names: Sequence[str], tasks: Sequence[str] = TASKS) -> None:
  """Refuses names that are no task.

  Args:
    names: what the user asks for.
    tasks: what there is.

  Raises:
    InputError: a name is not in `tasks`, or there is none.
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
  """Where all that is drawn for a sample comes from."""
  return random.Random(f"{seed} {task} {number}")


def draw(
  task: str,
  number: int,
  seed: int,
  length: int,
  count: Callable[[str], int],
  essay: prose.Essay = "heldout",
) -> Sample:
  """A sample that depends on these arguments only.

  Args:
    task: one of `TASKS`.
    number: which of the task's samples.
    seed: of all samples.
    length: bound on the tokens of prompt and answer.
    count: number of tokens of a text.
    essay: what needles are hidden in, where that is prose.

  Raises:
    InputError: `length` is too short for the task.
  """
  rng = draws(task, number, seed)
  if task == PASSKEY:
    return passkey.passkey(rng, length, count)
  return needles.sample(needles.TASKS[task], rng, length, count, essay=essay)
