"""Libraries that only some benchmarks need, imported when they do."""

import functools
import importlib
import types
import warnings

from kvjax.errors import InputError


@functools.cache
def library(name: str) -> types.ModuleType:
  """A module that takes long to import, or is one of the `data` extra.

  Warnings about the module's own source are kept from the user, who cannot act
  on them: jieba's regular expressions are no valid escapes any more, and it
  asks for setuptools' old `pkg_resources`.

  Args:
    name: as in an import statement, such as `rapidfuzz.fuzz`.

  Raises:
    InputError: it is not installed.
  """
  try:
    with warnings.catch_warnings():
      warnings.simplefilter("ignore")
      return importlib.import_module(name)
  except ImportError as error:
    raise InputError(
      f"This benchmark needs {name.split('.')[0]}, which is not installed: "
      "`pip install 'kvjax[data]'` installs it."
    ) from error
