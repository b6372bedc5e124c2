"""Methods that another package brings are as good as ours."""

import importlib.metadata
import json
import os
import pathlib
import subprocess
import sys
import threading
import types

import pytest

import kvjax
from kvjax.registry import registry
from kvjax.testing import TinyModel

ROOT = pathlib.Path(__file__).parents[2]
PLUGINS = ROOT / "tests" / "plugins"


@pytest.fixture(scope="module")
def run(tmp_path_factory):
  """Runs Python where the example in tests/plugins is installed."""
  target = tmp_path_factory.mktemp("installed")
  pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-index"]
  how = ["--no-deps", "--no-build-isolation", "--no-compile"]
  subprocess.run(
    [*pip, *how, "--disable-pip-version-check", "--target", target, PLUGINS],
    check=True,
    env=os.environ | {"PYTHONDONTWRITEBYTECODE": "1"},
  )

  def run(*arguments):
    path = os.pathsep.join([str(ROOT), str(target)])
    return subprocess.run(
      [sys.executable, *map(str, arguments)],
      env=os.environ | {"PYTHONPATH": path, "PYTHONDONTWRITEBYTECODE": "1"},
      capture_output=True,
      text=True,
    )

  return run


def test_everything_works_with_them(run, tmp_path):
  done = run(PLUGINS / "use_all.py", tmp_path)
  assert done.returncode == 0, done.stderr
  assert done.stdout == "all done\n"
  # Here nothing is installed.
  model = TinyModel(kvjax.Geometry.uniform(1, 4, 2, 8, 4096))
  with pytest.raises(
    kvjax.InputError, match=r"LastVotes, which is not known.*not registered"
  ):
    kvjax.load_cache(tmp_path / "going_on_0", model=model, model_id="tiny")
  with pytest.raises(kvjax.InputError, match="Flipped, which is not known"):
    kvjax.load_cache(tmp_path / "going_on_1", model=model, model_id="tiny")
  with pytest.raises(kvjax.InputError, match="no method 'last_votes'"):
    kvjax.get_plan("last_votes", kvjax.Tokens(9))


def test_a_prefix_of_a_package_may_be_asked_for_first(run):
  code = "print(kvjax.get_plan('flipped/keydiff', 0.5).method.over.anchor)"
  done = run("-c", f"import kvjax; {code}")
  assert done.stdout == "mean_unit\n", done.stderr


@pytest.mark.slow
def test_they_pass_the_checks(run):
  done = run(PLUGINS / "check_all.py")
  assert done.returncode == 0, done.stderr
  assert done.stdout == "all checked\n"


@pytest.mark.slow
def test_the_command_line_knows_them(run, tmp_path):
  methods = ["last_votes:window=4", "mean_query.near"]
  done = run(
    *("-m", "kvjax.experiments.main", "compare"),
    *(f"--methods={','.join(methods)}", "--retention=0.5", "--tasks=passkey"),
    *("--samples=1", "--length=288", f"--output={tmp_path}"),
    "--model=reference",
  )
  assert done.returncode == 0, done.stderr
  lines = (tmp_path / "samples.jsonl").read_text().splitlines()
  asked = {json.loads(line)["method"] for line in lines}
  assert asked == {"full", *methods}
  wrong = run(
    *("-m", "kvjax.experiments.main", "compare", "--methods=last_vote")
  )
  assert wrong.returncode == 2
  assert "did you mean last_votes" in wrong.stderr


def a_point(name, load, dist="some-package"):
  return types.SimpleNamespace(
    name=name, load=load, dist=types.SimpleNamespace(name=dist)
  )


@pytest.fixture
def points(monkeypatch):
  """Loads plug-ins anew, which these are said to be."""
  names = (registry.METHODS, registry.RETRIEVALS)
  for each in names:
    list(each)  # what is installed is loaded once
    monkeypatch.setattr(each, "_entries", dict(each._entries))

  def load(*found):
    monkeypatch.setattr(
      importlib.metadata, "entry_points", lambda group: list(found)
    )
    registry.register_plugins()

  return load


def test_a_package_that_cannot_be_imported_is_left_out(points):
  def load():
    raise ImportError("No module named 'torch'")

  with pytest.warns(
    kvjax.InputWarning,
    match=r"'odd' of some-package is left out: No module named 'torch'\.$",
  ):
    points(a_point("odd", load), a_point("even", lambda: kvjax.methods.Tova))
  assert kvjax.get_method("even") == kvjax.methods.Tova()
  with pytest.raises(kvjax.InputError, match="no method 'odd'"):
    kvjax.get_method("odd")


def test_a_package_that_takes_our_name_is_left_out(points):
  with pytest.warns(kvjax.InputWarning, match="is a method 'snapkv' already"):
    points(a_point("snapkv", lambda: kvjax.methods.Tova))
  assert type(kvjax.get_method("snapkv")) is kvjax.methods.SnapKV


@pytest.mark.parametrize(
  ("loaded", "said"),
  [
    (kvjax.methods.Tova(), "'Tova' object is not callable"),
    (pathlib, "'module' object is not callable"),
    (kvjax.methods.Method, "'odd' cannot be made with its defaults"),
  ],
)
def test_what_is_no_method_is_left_out(points, loaded, said):
  with pytest.warns(kvjax.InputWarning, match=said):
    points(a_point("odd", lambda: loaded))


@pytest.mark.usefixtures("points")
def test_a_package_may_ask_for_methods_while_it_is_imported(monkeypatch):
  def load():
    assert kvjax.get_method("keydiff") == kvjax.methods.KeyDiff()
    return kvjax.methods.Tova

  found = [a_point("asks", load)]
  monkeypatch.setattr(importlib.metadata, "entry_points", lambda group: found)
  monkeypatch.setattr(registry, "_UNLOADED", {"all"})
  assert kvjax.get_method("asks") == kvjax.methods.Tova()


def test_a_class_and_a_function_are_registered(points):
  points(
    a_point("like_tova", lambda: kvjax.methods.Tova),
    a_point(
      "any", lambda: lambda: kvjax.register("by_hand", kvjax.methods.H2O)
    ),
  )
  assert kvjax.get_method("like_tova") == kvjax.methods.Tova()
  assert kvjax.get_method("by_hand") == kvjax.methods.H2O()


_ASKS = """
import warnings
import kvjax

# Warnings are errors: none of these names is of a package.
for name in ("keydiff", "ctkvr.512", "ada/snapkv:window=4", "flat/tova@8"):
  kvjax.get_plan(name, kvjax.Retention(0.5))
assert kvjax.get_method("snapkv.kvpress").kernel == 5
with warnings.catch_warnings(record=True) as caught:
  warnings.simplefilter("always")
  for _ in range(2):
    try:
      kvjax.get_plan("odd", kvjax.Retention(0.5))
    except kvjax.InputError as error:
      assert "no method 'odd'" in str(error)
print(*[each.message for each in caught], sep="\\n")
"""


def test_a_broken_package_is_named_once_where_unknown_names_are(tmp_path):
  info = tmp_path / "broken-1.0.dist-info"
  info.mkdir()
  (info / "METADATA").write_text("Name: broken\nVersion: 1.0\n")
  (info / "entry_points.txt").write_text("[kvjax.methods]\nodd = gone:Odd\n")
  done = subprocess.run(
    [sys.executable, "-W", "error", "-c", _ASKS],
    env=os.environ
    | {"PYTHONPATH": os.pathsep.join([str(ROOT), str(tmp_path)])},
    capture_output=True,
    text=True,
  )
  assert done.returncode == 0, done.stderr
  said = "The method 'odd' of broken is left out: No module named 'gone'.\n"
  assert done.stdout == said


def test_no_thread_goes_on_without_the_methods_of_packages(monkeypatch):
  begun, go_on, seen = threading.Event(), threading.Event(), []

  def slow():
    begun.set()
    assert go_on.wait(20)
    # As a package that asks for a method while it is imported.
    registry.load_plugins()
    seen.append("loaded")

  monkeypatch.setattr(registry, "_UNLOADED", {"all"})
  monkeypatch.setattr(registry, "register_plugins", slow)

  def ask():
    registry.load_plugins()
    seen.append("asked")

  threads = [threading.Thread(target=ask) for _ in range(2)]
  threads[0].start()
  assert begun.wait(20)
  threads[1].start()
  threads[1].join(0.2)
  assert not seen
  go_on.set()
  for thread in threads:
    thread.join(20)
  assert sorted(seen) == ["asked", "asked", "loaded", "loaded"]
  assert seen[0] == "loaded"
