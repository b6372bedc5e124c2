"""Imports optional libraries on first use."""

import functools
import importlib
import types
import warnings

from kvjax.errors import InputError

# Modules of the packages that kvjax itself requires.
_REQUIRED = ("datasets", "huggingface_hub")


@functools.cache
def library(name: str) -> types.ModuleType:
  """Imports a module that is slow to import or in the `data` extra.

  Warnings about the module's source are suppressed, since users cannot act on
  them: jieba has invalid escapes in regular expressions and uses setuptools'
  old `pkg_resources`.

  Raises:
    InputError: the module is not installed.
  """
  try:
    with warnings.catch_warnings():
      warnings.simplefilter("ignore")
      return importlib.import_module(name)
  except ImportError as error:
    package = name.split(".")[0]
    source = "kvjax" if package in _REQUIRED else "kvjax[data]"
    raise InputError(
      f"This benchmark needs {package}, which is not installed: "
      f"`pip install '{source}'` installs it."
    ) from error
