"""Methods and models in files of a user's own."""

import ast
import dataclasses
import functools
import hashlib
import importlib.util
import pathlib
import sys
import tokenize
import types
from collections.abc import Iterator, Sequence

from kvjax import files
from kvjax.errors import InputError
from kvjax.models import other_families
from kvjax.registry.registry import METHODS, RETRIEVALS
from kvjax.registry.wrappers import WRAPPERS

# Begins the names of their modules, which end with a digest of the content.
_PACKAGE = "kvjax_plugins."
_DIGITS = 8
# Packages whose files are not of a method's author.
_LIBRARIES = {"kvjax", "jax", *sys.stdlib_module_names}
# Folders of what is installed.
_INSTALLED = {"site-packages", "dist-packages"}


def load(paths: Sequence[str]) -> None:
  """Runs files, which register methods and families of models.

  Raises:
    InputError: a file is missing, is no Python file, cannot be parsed, or
      registers nothing.
  """
  for path in dict.fromkeys(pathlib.Path(text).resolve() for text in paths):
    _run(path)


def modules() -> list[types.ModuleType]:
  """Returns the modules of the files that have been run, or failed to.

  Those that they import of their own are among them.
  """
  found: dict[str, pathlib.Path] = {}
  for name in [name for name in sys.modules if name.startswith(_PACKAGE)]:
    _add_files(name, found)
  return [sys.modules[name] for name in found]


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
  digest = _digest(path.read_bytes())
  name = f"{_PACKAGE}{path.stem}_{digest}"
  if name in sys.modules:
    return
  spec = importlib.util.spec_from_file_location(name, path)
  assert spec is not None
  assert spec.loader is not None
  module = importlib.util.module_from_spec(spec)
  # Dataclasses look their module up.
  sys.modules[name] = module
  before = _registered()
  spec.loader.exec_module(module)
  if _registered() == before:
    raise InputError(
      f'{path} registers no method; call kvjax.register("name", YourClass) at '
      "its end, or kvjax.models.register if it loads models."
    )


def _registered() -> set[str]:
  return {*METHODS, *RETRIEVALS, *WRAPPERS, *other_families.LOADS}


def origins(value: object) -> Iterator[str]:
  """Names the files, each with a digest, that parts of a plan come from.

  They are those of --plugins and of other packages than kvjax, with what they
  import of their own. Answers of a method whose file has been edited since are
  not its own.
  """
  if not dataclasses.is_dataclass(value):
    return
  yield from files_of(type(value).__module__)
  for field in dataclasses.fields(value):
    yield from origins(getattr(value, field.name))


@functools.cache
def files_of(module: str) -> tuple[str, ...]:
  """Names the file of a module of others and those that it imports.

  A digest of its content ends each name.
  """
  if module.partition(".")[0] in _LIBRARIES:
    return ()
  found: dict[str, pathlib.Path] = {}
  _add_files(module, found)
  return tuple(_label(name, path) for name, path in found.items())


def _label(name: str, path: pathlib.Path) -> str:
  digest = _digest(path.read_bytes())
  # The names of --plugins have it already.
  return f"{name.removeprefix(_PACKAGE).removesuffix(f'_{digest}')}_{digest}"


def _add_files(name: str, found: dict[str, pathlib.Path]) -> None:
  """Adds the file of a loaded module, and those of its imports."""
  module = sys.modules.get(name)
  path = pathlib.Path(getattr(module, "__file__", None) or "")
  if name in found or path.suffix != ".py" or not path.is_file():
    return
  found[name] = path
  for imported in _imports(path, getattr(module, "__package__", None) or ""):
    package = imported.partition(".")[0]
    other = getattr(sys.modules.get(imported), "__file__", None) or ""
    installed = bool(_INSTALLED & {*pathlib.Path(other).parts})
    if package not in _LIBRARIES and (
      not installed or package == name.partition(".")[0]
    ):
      _add_files(imported, found)


def _imports(path: pathlib.Path, package: str) -> Iterator[str]:
  """Yields the modules that a file imports, and what they may contain."""
  try:
    with tokenize.open(path) as file:
      tree = ast.parse(file.read())
  except SyntaxError:  # It has been edited since it was imported.
    return
  for node in ast.walk(tree):
    if isinstance(node, ast.Import):
      yield from (alias.name for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
      above = package.split(".")[: 1 - node.level or None] if node.level else ()
      base = ".".join(filter(None, [*above, node.module]))
      yield base
      yield from (f"{base}.{alias.name}" for alias in node.names)


def _digest(content: bytes) -> str:
  return hashlib.sha256(content).hexdigest()[:_DIGITS]
