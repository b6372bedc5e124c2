"""Examples in docstrings: they run, and every public function has one."""

import doctest
import importlib
import inspect
import pkgutil
from unittest import mock

import pytest

import kvjax
from kvjax.registry.registry import METHODS
from kvjax.registry.wrappers import WRAPPERS

PUBLIC = [getattr(kvjax, name) for name in dir(kvjax)]
FUNCTIONS = [value for value in PUBLIC if inspect.isfunction(value)]
CLASSES = [
  kvjax.Cache,
  kvjax.Calibrated,
  kvjax.Calibration,
  kvjax.Decoding,
  kvjax.Geometry,
  kvjax.LayerSpec,
  kvjax.Plan,
  kvjax.Prompts,
  kvjax.Retention,
  kvjax.Sampling,
  kvjax.Schedule,
  kvjax.SparseAttention,
  kvjax.Tokens,
]
# They have no examples and take long to import.
SKIPPED = ("kvjax.experiments", "kvjax.models")


def modules():
  yield kvjax
  for module in pkgutil.walk_packages(kvjax.__path__, "kvjax."):
    if not module.name.startswith(SKIPPED):
      yield importlib.import_module(module.name)
  # kvjax passes its `load` on.
  yield importlib.import_module("kvjax.models.pretrained")
  yield importlib.import_module("kvjax.models.saving")


def documented(module):
  """Functions and classes of a module, and the methods of these, by name."""
  for name, value in vars(module).items():
    own = getattr(value, "__module__", None) == module.__name__
    if not own or not (inspect.isclass(value) or inspect.isroutine(value)):
      continue
    yield f"{module.__name__}.{name}", value
    for key, member in vars(value).items() if inspect.isclass(value) else ():
      member = getattr(member, "__func__", member)
      if inspect.isroutine(member) or isinstance(member, property):
        yield f"{module.__name__}.{name}.{key}", member


def examples():
  """The examples of all modules.

  They are found here and not by doctest, which leaves out functions that a
  decorator wraps, as that of the checks of shapes does in the tests.
  """
  finder = doctest.DocTestFinder(recurse=False)
  found = {}
  for module in modules():
    for name, value in documented(module):
      if ">>>" in (value.__doc__ or ""):
        (found[name],) = finder.find(value, name, module=False, globs={})
  return found


EXAMPLES = examples()
# The checks of methods, which have tests of their own.
SLOW = [name for name in EXAMPLES if name.startswith("kvjax.testing.")]
NAMES = [
  pytest.param(name, marks=[pytest.mark.slow] if name in SLOW else [])
  for name in EXAMPLES
]


@pytest.mark.parametrize("name", NAMES)
def test_examples_show_what_happens(name, monkeypatch):
  # Some of them register a name, which other tests must not see.
  monkeypatch.setattr(METHODS, "_entries", dict(METHODS._entries))
  said = []
  runner = doctest.DocTestRunner(verbose=False)
  with mock.patch.dict(WRAPPERS):
    result = runner.run(EXAMPLES[name], out=said.append)
  assert result.attempted
  assert not result.failed, "".join(said)


@pytest.mark.parametrize("value", [*FUNCTIONS, *CLASSES])
def test_what_is_public_has_an_example(value):
  assert f"{value.__module__}.{value.__name__}" in EXAMPLES
