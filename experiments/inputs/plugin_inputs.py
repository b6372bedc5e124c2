"""The flag for files that register methods."""

import importlib.util
import pathlib
import sys
from collections.abc import Sequence

from absl import flags

from kvjax.errors import InputError
from kvjax.registry.registry import METHODS, RETRIEVALS

PLUGINS = flags.DEFINE_list(
  "plugins",
  [],
  "Python files of your own that register methods by kvjax.register.",
)


def load(paths: Sequence[str]) -> None:
  """Runs files; the names of their methods are then known.

  What a file raises is not caught: its author needs the traceback.

  Raises:
    InputError: a file is missing, is no Python file, or registers nothing.
  """
  for path in paths:
    _run(pathlib.Path(path))


def _run(path: pathlib.Path) -> None:
  if path.suffix != ".py" or not path.is_file():
    raise InputError(f"--plugins takes Python files; {path} is none.")
  # No module that something else imports has this name.
  name = f"kvjax_plugins.{path.stem}"
  spec = importlib.util.spec_from_file_location(name, path)
  assert spec is not None
  assert spec.loader is not None
  module = importlib.util.module_from_spec(spec)
  # Dataclasses look their module up.
  sys.modules[name] = module
  before = {*METHODS, *RETRIEVALS}
  spec.loader.exec_module(module)
  if {*METHODS, *RETRIEVALS} == before:
    raise InputError(
      f'{path} registers no method; call kvjax.register("name", YourClass) at '
      "its end."
    )
