"""Tasks and setups that the experiments of several papers share."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, get_args

from kvjax.experiments.benchmarks.longbench.sets import SETS, Category
from kvjax.experiments.benchmarks.ruler.generator import TASKS
from kvjax.experiments.papers.data_model import (
  Average,
  Column,
  Line,
  Place,
  Setup,
  Way,
)
from kvjax.experiments.tasks import niah, suite
from kvjax.options.budgets import Budget
from kvjax.options.schedules import WHOLE, Schedule

# In LongBench's order, like the papers' tables.
ALL_21 = tuple(SETS)
ENGLISH_16 = tuple(s for s in SETS if SETS[s].language == "English")

# The maximum tokens of LongBench's prompts, for models of 32K.
LIMIT_32K = 31500

# The tasks of RULER that the bundled model can answer.
NEEDLES = tuple(niah.TASKS)
# Needle tasks in prose, the substitute for LongBench.
FOUR_NEEDLES = suite.DEFAULT


def of_category(*categories: Category) -> tuple[str, ...]:
  """Lists the English datasets of LongBench in some categories."""
  return tuple(s for s in ENGLISH_16 if SETS[s].category in categories)


def plain(name: str, tasks: tuple[str, ...], score: str = "score") -> Average:
  """Defines the mean of all tasks."""
  return Average(name, (tasks,), score)


# The means of LongBench's categories, without code.
CATEGORIES = tuple(
  plain(name, of_category(name))
  for name in get_args(Category)
  if name != "code"
)


def code_scores() -> tuple[Average, Average]:
  """Defines LongBench's code with python-Levenshtein, and without it."""
  tasks = of_category("code")
  return plain("code", tasks), plain("code by difflib", tasks, "difflib")


def longbench(
  tasks: tuple[str, ...],
  limit: int,
  schedule: Schedule = WHOLE,
  samples: int | None = None,
) -> Setup:
  """Defines LongBench as in a paper, with prompts of at most `limit` tokens."""
  return Setup("longbench", tasks, (limit,), samples, schedule=schedule)


def four_needles(schedule: Schedule = WHOLE, samples: int = 4) -> Setup:
  """Defines the substitute for LongBench."""
  return Setup("ruler", FOUR_NEEDLES, (1024,), samples, schedule=schedule)


def ruler(
  lengths: tuple[int, ...], samples: int, tasks: tuple[str, ...] = TASKS
) -> Setup:
  """Defines RULER as in a paper, by default with all tasks."""
  return Setup("ruler", tasks, lengths, samples)


# Most papers' mean over RULER.
MEAN_13 = plain("mean of 13", TASKS)


def heatmap(
  lengths: tuple[int, ...], depths: int = 5, schedule: Schedule = WHOLE
) -> Setup:
  """Defines a needle at several depths; the papers have ten of them."""
  return Setup("needle", ("needle",), lengths, 1, depths, schedule)


NEEDLES_FOUND = plain("needles found", ("needle",))


def prose(length: int, samples: int) -> Setup:
  """Defines prompts of prose with a needle, for analyses."""
  return Setup("ruler", ("niah_single_2",), (length,), samples)


def at_random(*lengths: int) -> Setup:
  """Defines lengths only, for analyses of random data."""
  return Setup("ruler", (), lengths, 0)


def lines(methods: Mapping[str, Sequence[str]]) -> tuple[Line, ...]:
  """Defines lines by the paper's names; a second method is the small one."""
  result = []
  for name, method in methods.items():
    paper, small = (method, method) if isinstance(method, str) else method
    result.append(Line(name, Way(paper), Way(small)))
  return tuple(result)


def fixed(
  name: str,
  method: str,
  budget: Budget | None,
  small: Budget | None = None,
  small_method: str | None = None,
) -> Line:
  """Defines a line with its own budget; without a small one it is left out."""
  small_way = None if small is None else Way(small_method or method, small)
  return Line(name, Way(method, budget), small_way)


def budgets(
  columns: Mapping[str, Budget | tuple[Budget, Budget | None]],
) -> tuple[Column, ...]:
  """Defines columns of budgets: the paper's and the small ones, or of both."""
  return _columns("budget", columns)


def small_at(columns: Sequence[Column], *indexes: int) -> tuple[Column, ...]:
  """Leaves all columns but these out of the small setup."""
  return tuple(
    column if index in indexes else dataclasses.replace(column, small=None)
    for index, column in enumerate(columns)
  )


def lengths(
  columns: Mapping[str, tuple[int, int | None]],
) -> tuple[Column, ...]:
  """Defines columns of lengths, the paper's and the small ones."""
  return _columns("length", columns)


def _columns(field: str, columns: Mapping[str, Any]) -> tuple[Column, ...]:
  result = []
  for name, both in columns.items():
    paper, small = both if isinstance(both, tuple) else (both, both)
    of_small = None if small is None else Place(**{field: small})
    result.append(Column(name, Place(**{field: paper}), of_small))
  return tuple(result)
