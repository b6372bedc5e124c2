"""The registry of methods, including those of other packages."""

import dataclasses
import importlib.metadata
import inspect
import re
import threading
import types
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from kvjax.allocation.base import Allocation
from kvjax.errors import InputError, warn
from kvjax.labels import add_name
from kvjax.methods.base import Method
from kvjax.options.bounds import check_value
from kvjax.options.budgets import Rounding
from kvjax.retrieval.base import Retrieval

# Group of the entry points by which packages register methods.
ENTRY_POINTS = "kvjax.methods"


@dataclasses.dataclass(frozen=True)
class Recipe:
  """A method and the allocation of its budget.

  Attributes:
    method: the method.
    allocation: its allocation; None for the method's default.
    rounding: how a retention is rounded; None as the budget says.
  """

  method: Method
  allocation: Allocation | None = None
  rounding: Rounding | None = dataclasses.field(
    default=None, metadata={"option": False}
  )


@dataclasses.dataclass(frozen=True)
class Entry[Made]:
  """A registered method.

  Attributes:
    make: makes the method with its defaults.
    presets: presets by the suffix that follows the name and a dot.
    summary: a one-line description for tables.
    paper: number of its arXiv paper; empty if there is none.
  """

  make: Callable[[], Made]
  presets: Mapping[str, Made]
  summary: str
  paper: str


class Names[Made](Mapping[str, Entry[Made]]):
  """Registered methods of one kind by name, in order of registration.

  Installed packages are imported when all names, or an unknown one, are asked
  for: one that cannot be imported is then named, and not in every program.
  """

  def __init__(self) -> None:
    self._entries: dict[str, Entry[Made]] = {}

  def __getitem__(self, name: str) -> Entry[Made]:
    if all(name not in kind._entries for kind in (METHODS, RETRIEVALS)):
      load_plugins()
    return self._entries[name]

  def __iter__(self) -> Iterator[str]:
    load_plugins()
    return iter(self._entries)

  def __len__(self) -> int:
    load_plugins()
    return len(self._entries)

  def add(self, name: str, entry: Entry[Made]) -> None:
    """Adds an entry."""
    self._entries[name] = entry

  def find(self, name: str) -> Made | None:
    """Returns what a name or a preset's name stands for; None for nothing."""
    base, dot, preset = name.partition(".")
    entry = self.get(base)
    if entry is None:
      return None
    return entry.presets.get(preset) if dot else entry.make()

  @property
  def presets(self) -> Mapping[str, Made]:
    """All presets by their full names."""
    return {
      f"{name}.{preset}": made
      for name, entry in self.items()
      for preset, made in entry.presets.items()
    }

  def all_made(self) -> Iterator[Made]:
    """Yields what each name and each preset stands for."""
    for entry in self.values():
      yield entry.make()
      yield from entry.presets.values()


METHODS: Names[Method | Recipe] = Names()
RETRIEVALS: Names[Retrieval] = Names()
_NAME = re.compile(r"[a-z][a-z0-9_]*")
_PRESET = re.compile(r"[a-z0-9_]+")
# Names that are written before a method's, which no method may have.
PREFIXES: set[str] = set()
# Groups of entry points that are not loaded yet.
_UNLOADED = {ENTRY_POINTS}
# `here` is whether this thread is loading them.
_LOADING = threading.local()


def register(
  name: str,
  make: Callable[[], Method | Retrieval | Recipe],
  *,
  presets: Mapping[str, Any] | None = None,
  summary: str = "",
  paper: str = "",
) -> None:
  """Registers a method under a name, for `get_plan` and saved caches.

  A class or function of the same module and name replaces the one that was
  registered before, so that a notebook's cell may run again.

  The name is known in this process only. The programs of the command line know
  the methods that the files of their flag `--plugins` register, and those that
  installed packages name as entry points of the group `kvjax.methods`.

  Args:
    name: lower-case letters, digits and underscores.
    make: makes the method with its defaults; usually its class.
    presets: methods with other options, by the suffix after `name` and a dot.
    summary: a one-line description for tables.
    paper: number of its arXiv paper.

  Raises:
    InputError: the name is taken, or it or a preset's name cannot be written
      on a command line, or what is made, or a preset, is no method, or a class
      with fields is no dataclass.

  Examples:
    >>> import dataclasses, kvjax
    >>> @dataclasses.dataclass(frozen=True)
    ... class Newest(kvjax.methods.HeadwiseMethod):
    ...   def score_head(self, head):
    ...     return head.positions.astype("float32")
    >>> kvjax.register("newest_example", Newest, summary="the last tokens")
    >>> kvjax.get_method("newest_example")
    Newest()
  """
  _check_name(name, make)
  check_options(make)
  presets = _checked_presets(presets)
  made = _make_all(name, make, presets)
  names: Names[Any] = RETRIEVALS if isinstance(made[0], Retrieval) else METHODS
  for kind in (METHODS, RETRIEVALS):
    kind._entries.pop(name, None)
  names.add(name, Entry(make, presets, summary, paper))
  full = [name, *(f"{name}.{preset}" for preset in presets)]
  for each, called in zip(made, full, strict=True):
    if isinstance(each, Recipe):
      add_name(called, each.method, each.allocation)
    else:
      add_name(called, each)


def _check_name(name: Any, make: object) -> None:
  """Refuses a name that cannot be written, or is that of something else."""
  check_spelling("A method's name", name)
  if name in PREFIXES:
    raise InputError(
      f"{name!r} is written before a method's name, as in {name}/keydiff; "
      "register yours under another name."
    )
  check_no_method(name, make)


def check_spelling(what: str, name: Any) -> None:
  """Refuses a name that cannot be written on a command line.

  Args:
    what: what it is, for the message.
    name: the name.

  Raises:
    InputError: it cannot.
  """
  if not isinstance(name, str) or not _NAME.fullmatch(name):
    raise InputError(
      f"{what} has lower-case letters, digits and underscores and begins with "
      f"a letter; {name!r} does not fit."
    )


def check_no_method(name: str, make: object) -> None:
  """Refuses the name of another method.

  Args:
    name: the name.
    make: what is registered, which may replace itself.

  Raises:
    InputError: there is one.
  """
  for kind in (METHODS, RETRIEVALS):
    # Not by `kind[name]`, which would load the plug-ins before kvjax itself.
    taken = kind._entries.get(name)
    if taken is not None and not same_definition(taken.make, make):
      raise InputError(
        f"There is a method {name!r} already; register yours under another "
        "name."
      )


def _checked_presets(presets: Any) -> dict[str, Any]:
  """Copies presets by their suffixes; refuses those that cannot be written."""
  if not isinstance(presets or {}, Mapping):
    raise InputError(
      "Presets are given by the suffix of their name, as in "
      f"presets={{'near': Mine(power=2)}}; {presets!r} is no such mapping."
    )
  presets = dict(presets or {})
  for preset in presets:
    if not isinstance(preset, str) or not _PRESET.fullmatch(preset):
      raise InputError(
        "A preset's name has lower-case letters, digits and underscores; "
        f"{preset!r} does not fit."
      )
  return presets


def _make_all(
  name: str,
  make: Callable[[], Method | Retrieval | Recipe],
  presets: Mapping[str, Any],
) -> list[Method | Retrieval | Recipe]:
  """Makes what a name and its presets stand for; refuses what is no method."""
  try:
    made = [make(), *presets.values()]
  except Exception as error:
    said = str(error).removesuffix(".") or type(error).__name__
    raise InputError(
      f"{name!r} cannot be made with its defaults: {said}."
    ) from error
  kinds = Retrieval if isinstance(made[0], Retrieval) else (Method, Recipe)
  for each in made:
    if not isinstance(each, kinds):
      raise InputError(
        "What is registered is a kvjax.methods.Method or a "
        f"kvjax.retrieval.Retrieval, and so are its presets; {each!r} under "
        f"{name!r} is not."
      )
    check_value(each.method if isinstance(each, Recipe) else each)
  return made


def same_definition(one: Any, other: Any) -> bool:
  """Whether two classes or functions are of the same place and name."""
  if not all(isinstance(x, type | types.FunctionType) for x in (one, other)):
    return False
  return (
    one.__module__ == other.__module__
    and one.__qualname__ == other.__qualname__
    and "<lambda>" not in one.__qualname__
  )


def check_options(make: Any) -> None:
  """Refuses a class whose annotated fields are no options.

  Raises:
    InputError: it has such fields.
  """
  if not isinstance(make, type):
    return
  kinds = inspect.get_annotations(make).values()
  fields = [kind for kind in kinds if "ClassVar" not in str(kind)]
  if fields and "__dataclass_fields__" not in vars(make):
    raise InputError(
      f"{make.__name__} has fields that are no options; write "
      "@dataclasses.dataclass(frozen=True) before the class."
    )


def load_plugins() -> None:
  """Registers the methods of installed packages, the first time."""
  # A package may ask for a method while it is imported. Other threads load the
  # packages, too: a lock would wait for their imports, and these for the lock.
  if not _UNLOADED or getattr(_LOADING, "here", False):
    return
  _LOADING.here = True
  try:
    register_plugins()
  finally:
    _LOADING.here = False
  _UNLOADED.clear()


def register_plugins() -> None:
  """Registers the methods of installed packages by their entry points.

  An entry point is a class, which is registered under the entry point's name,
  or a function that calls `register` itself. One that fails is left out with an
  `InputWarning`.
  """
  for point in importlib.metadata.entry_points(group=ENTRY_POINTS):
    try:
      loaded = point.load()
      if isinstance(loaded, type):
        register(point.name, loaded)
      else:
        loaded()
    except Exception as error:
      package = point.dist.name if point.dist else "a package"
      said = " ".join(str(error).split()).removesuffix(".")
      warn(
        f"The method {point.name!r} of {package} is left out: "
        f"{said or type(error).__name__}."
      )


def recipe_of(made: Method | Recipe) -> Recipe:
  """Wraps a method in a recipe, if it is not one already."""
  return made if isinstance(made, Recipe) else Recipe(made)
