"""Files of an --output that may be an address."""

import pytest
from fsspec.implementations.memory import MemoryFileSystem
from memory_store import contents, empty_store

from kvjax.errors import InputError
from kvjax.experiments.run import outputs

RUNS = "memory://bucket/runs"


@pytest.fixture
def store(monkeypatch):
  return empty_store(monkeypatch)


def test_a_file_that_cannot_be_sent_is_kept(store, monkeypatch, tmp_path):
  def fail(self, source, target, **options):
    raise ConnectionResetError("reset")

  with outputs.written_file(f"{RUNS}/a") as path:
    path.write_text("a")
  assert contents(store) == {"a": "a"}
  monkeypatch.setattr(MemoryFileSystem, "put_file", fail)
  with (
    pytest.raises(InputError, match=r"reset; it is kept as /") as error,
    outputs.written_file(f"{RUNS}/a") as path,
  ):
    path.write_text("b")
  assert str(path) in str(error.value)
  assert path.read_text() == "b"
  with (
    pytest.raises(ValueError, match="stopped"),
    outputs.written_file(f"{RUNS}/a") as path,
  ):
    raise ValueError("stopped")
  assert not path.parent.exists()


def test_a_folder_is_no_file(store):
  store.pipe({"/bucket/runs/a/b": b"1"})
  with pytest.raises(InputError, match="is a folder; give the address of a"):
    outputs.check_file(f"{RUNS}/a")
  outputs.check_file(f"{RUNS}/a/b")
  assert contents(store) == {"a/b": "1"}


def test_a_file_of_this_machine_gets_its_folder(tmp_path):
  path = tmp_path / "deep" / "a"
  with outputs.written_file(str(path)) as given:
    given.write_text("a")
  assert given == path
  assert path.read_text() == "a"
  with pytest.raises(InputError, match="deep"):
    outputs.check_file(str(path.parent))


@pytest.mark.parametrize("name", ["a:b", "a,b", "gs://a,b/c", "gs://a:b/c"])
def test_what_no_option_can_name_is_refused(name):
  with pytest.raises(InputError, match="without colons and commas"):
    outputs.check_option(name)


@pytest.mark.parametrize("name", ["a/b", "gs://bucket/a"])
def test_an_option_can_name_paths_and_addresses(name):
  outputs.check_option(name)
