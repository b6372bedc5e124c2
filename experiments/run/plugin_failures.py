"""Errors in files of --plugins, in a sentence that says where they are."""

import pathlib
import re
import traceback
import types
from typing import Any

from kvjax.experiments.run import plugin_files

# What Python says of a call, which does not reach the function's own frame.
_CALL = re.compile(r"([\w.]+)\(\) (?:takes|missing|got) ")
_SAID = 300


def sentence(error: BaseException) -> str | None:
  """Explains an error in code of --plugins; None for all others.

  It is in the last of these files, or of those that they import of their own,
  that it passes, as what is below was called with what that file gave, or in a
  function of theirs that cannot be called.
  """
  found = _passed(error) or _called(error)
  if found is None:
    return None
  code, line = found
  lines = str(error).strip().splitlines() or [""]
  said = f": {lines[0][:_SAID].rstrip('.:')}" if lines[0] else ""
  return (
    f"{pathlib.Path(code.co_filename).name}, line {line}, in {code.co_name}: "
    f"{type(error).__name__}{said}; kvjax.testing checks methods "
    "and models, and --verbosity=0 shows the traceback."
  )


def _passed(error: BaseException) -> tuple[types.CodeType, int] | None:
  """Finds the last line in one of the files that an error has passed."""
  found = None
  for frame, line in traceback.walk_tb(error.__traceback__):
    if _is_theirs(frame.f_code):
      found = frame.f_code, line
  return found


def _called(error: BaseException) -> tuple[types.CodeType, int] | None:
  """Finds the function in one of the files whose signature is wrong."""
  found = _CALL.match(str(error))
  if found is None or not isinstance(error, TypeError):
    return None
  named = [_named(found[1], part) for part in plugin_files.modules()]
  codes = [getattr(function, "__code__", None) for function in named]
  theirs = [code for code in codes if code is not None and _is_theirs(code)]
  # Of two files' functions with one name, it may be either.
  return (theirs[0], theirs[0].co_firstlineno) if len(theirs) == 1 else None


def _named(qualified: str, module: types.ModuleType) -> Any:
  part: Any = module
  for name in qualified.split("."):
    part = getattr(part, name, None)
  return part


def _is_theirs(code: types.CodeType) -> bool:
  return code.co_filename in {
    module.__file__ for module in plugin_files.modules()
  }
