"""Models of the hub by name: fetched once, whole or not at all."""

import hashlib
import importlib
import ssl
import sys
import types

import huggingface_hub
import pytest
from huggingface_hub import errors

from kvjax.errors import InputError
from kvjax.models import catalog
from kvjax.models.downloads import ModelFile, UnreachableError
from kvjax.models.pretrained import load
from kvjax.models.snapshots import Snapshot

NAME = "toy"
RECORD = ".verified.json"
# The hub's versions use different ones.
client = importlib.import_module(errors.HTTPError.__module__.split(".")[0])
SMALL = {"model.safetensors": b"weights", "config.json": b"{}"}


def _left(cache):
  return sorted(path.name for path in cache.rglob("*"))


@pytest.fixture
def hub(monkeypatch, cache):
  """A hub with one repository; returns what it is asked for."""
  asked = []

  def download(repository, *, revision, allow_patterns, local_dir):
    asked.append((repository, revision))
    for name, content in ({"pickle.bin": b"no"} | SMALL).items():
      if name in allow_patterns:
        (local_dir / name).write_bytes(content)
    (local_dir / ".cache").mkdir()
    return str(local_dir)

  monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
  model_files = tuple(
    ModelFile(name, len(content), hashlib.sha256(content).hexdigest())
    for name, content in SMALL.items()
  )
  snapshot = Snapshot(
    "org/toy", "0123456789abcdef" * 2, model_files, "Toy License"
  )
  monkeypatch.setattr(catalog, "NAMED", {NAME: snapshot})
  return asked


def test_a_model_of_the_hub_is_fetched_once(hub, cache, capsys):
  folder = catalog.locate(NAME)
  assert {p.name: p.read_bytes() for p in folder.glob("[!.]*")} == SMALL
  assert _left(cache) == sorted([RECORD, NAME, *SMALL])
  said = "Fetching org/toy at 0123456789ab (0 MB, license: Toy License).\n"
  assert capsys.readouterr().err == said
  catalog.locate(NAME)
  assert hub == [("org/toy", "0123456789abcdef" * 2)]
  (folder / "model.safetensors").write_bytes(b"halves!")
  catalog.locate(NAME)
  assert len(hub) == 2
  assert (folder / "model.safetensors").read_bytes() == b"weights"


def _answered(kind, status):
  """An error of the hub's for an answer."""
  response = types.SimpleNamespace(headers={}, request=None, status_code=status)
  return kind("x", response=response)


def _caused_by(cause, error):
  error.__cause__ = cause
  return error


@pytest.mark.parametrize(
  ("error", "said"),
  [
    (errors.OfflineModeIsEnabled("x\ny"), r"\(the hub cannot be reached\)"),
    (errors.LocalEntryNotFoundError("x"), r"\(the hub cannot be reached\)"),
    (ConnectionResetError("x"), r"\(the hub cannot be reached\)"),
    (RuntimeError("x"), r"\(its client has failed with RuntimeError\)"),
    (
      _answered(errors.RepositoryNotFoundError, 404),
      r"\(the hub does not give it to you\)",
    ),
    (
      _answered(errors.RevisionNotFoundError, 404),
      r"\(the hub does not give it to you\)",
    ),
    (OSError(28, "No space left on device"), r"toy \(No space left on devic"),
    (client.ConnectError("x"), r"\(the hub cannot be reached\)"),
    (client.ReadTimeout("x"), r"\(the hub cannot be reached\)"),
    (client.ReadError("x"), r"\(the hub cannot be reached\)"),
    # In the middle of a file.
    (client.RemoteProtocolError("x"), r"\(the hub cannot be reached\)"),
    (
      _caused_by(client.ReadError("x"), RuntimeError("y")),
      r"\(the hub cannot be reached\)",
    ),
    (client.UnsupportedProtocol("x"), "has failed with UnsupportedProtocol"),
    (
      _caused_by(ssl.SSLCertVerificationError("x"), client.ConnectError("y")),
      r"\(its certificate cannot be verified\)",
    ),
    *(
      (
        _caused_by(
          _answered(errors.HfHubHTTPError, status),
          errors.LocalEntryNotFoundError("x"),
        ),
        said,
      )
      for status, said in (
        (403, r"\(the hub has answered with status 403\)"),
        (407, r"\(the hub has answered with status 407\)"),
        (503, r"\(the hub cannot be reached\)"),
      )
    ),
  ],
  ids=range(17),
)
def test_a_hub_that_has_it_not(hub, cache, monkeypatch, error, said):
  def fail(*args, **kwargs):
    raise error

  monkeypatch.setattr(huggingface_hub, "snapshot_download", fail)
  with pytest.raises(InputError, match=said) as caught:
    load(NAME)
  assert "\n" not in str(caught.value)
  unreachable = isinstance(caught.value, UnreachableError)
  assert unreachable == ("cannot be reached" in said)
  assert _left(cache) == []


def test_another_snapshot_than_that_which_is_wanted(hub, cache, monkeypatch):
  for wrong, said in ((b"WEIGHTS", "has the sha256"), (None, "is missing")):
    contents = {"config.json": b"{}"}
    if wrong is not None:
      contents["model.safetensors"] = wrong
    monkeypatch.setattr(sys.modules[__name__], "SMALL", contents)
    with pytest.raises(InputError, match=rf"model\.safetensors {said}"):
      load(NAME)
    assert _left(cache) == []


def test_what_is_fetched_from_the_hub_runs_no_code():
  named = catalog.NAMED.values()
  found = [source for source in named if isinstance(source, Snapshot)]
  assert found
  for source in found:
    assert len(source.revision) == 40
    assert source.files[-1].name == "config.json"
    for file in source.files:
      assert file.name.endswith((".safetensors", ".json", ".txt"))
      assert len(bytes.fromhex(file.sha256)) == 32
