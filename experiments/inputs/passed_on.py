"""Flags that a program passes on to another one, or names in a command."""

import types
from collections.abc import Collection, Iterable

from absl import flags


def passed_on(
  modules: Iterable[types.ModuleType],
  always: Collection[str] = (),
  never: Collection[str] = (),
) -> list[str]:
  """Returns the given flags that some modules define, as they are written.

  Args:
    modules: modules that define flags of both programs.
    always: names of flags to pass on even if they have their defaults.
    never: names of flags to leave out.
  """
  by_module = flags.FLAGS.flags_by_module_dict()
  defined = [flag for each in modules for flag in by_module[each.__name__]]
  return [
    flag.serialize()
    for flag in defined
    if (flag.present or flag.name in always) and flag.name not in never
  ]
