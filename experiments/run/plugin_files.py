"""Methods in files of a user's own."""

import dataclasses
import hashlib
import importlib.util
import pathlib
import sys
import types
from collections.abc import Iterator, Sequence

from kvjax import files
from kvjax.errors import InputError
from kvjax.registry.registry import METHODS, RETRIEVALS

# Begins the names of their modules, which end with a digest of the content.
_PACKAGE = "kvjax_plugins."
_DIGITS = 8


def load(paths: Sequence[str]) -> None:
  """Runs files; the names of their methods are then known.

  Raises:
    InputError: a file is missing, is no Python file, cannot be parsed, or
      registers nothing.
  """
  for path in dict.fromkeys(pathlib.Path(text).resolve() for text in paths):
    _run(path)


def modules() -> list[types.ModuleType]:
  """Returns the modules of the files that have been run, or failed to."""
  return [
    module for name, module in sys.modules.items() if name.startswith(_PACKAGE)
  ]


def _run(path: pathlib.Path) -> None:
  if path.suffix != ".py" or not path.is_file():
    raise InputError(f"--plugins takes Python files; {path} is none.")
  text = files.read_text(path)
  try:
    compile(text, path, "exec")
  except SyntaxError as error:
    raise InputError(
      f"{path} is no Python: {error.msg}, line {error.lineno}."
    ) from error
  digest = hashlib.sha256(text.encode()).hexdigest()[:_DIGITS]
  name = f"{_PACKAGE}{path.stem}_{digest}"
  if name in sys.modules:
    return
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


def origins(value: object) -> Iterator[str]:
  """Names the files, each with a digest, that parts of a plan come from.

  Answers of a method whose file has been edited since are not its own.
  """
  module = type(value).__module__
  if module.startswith(_PACKAGE):
    yield module.removeprefix(_PACKAGE)
  if dataclasses.is_dataclass(value):
    for field in dataclasses.fields(value):
      yield from origins(getattr(value, field.name))
