"""Files and folders at addresses, of which fsspec has one in memory."""

import contextlib
import errno
import json
import os
import pathlib
from concurrent.futures import ThreadPoolExecutor

import jax
import numpy as np
import pytest
from fsspec.implementations.memory import MemoryFileSystem
from memory_store import empty_store

import kvjax
import kvjax.models
from kvjax import addresses, files
from kvjax.errors import InputError
from kvjax.testing import TinyModel

RUN = "memory://bucket/run"


@pytest.fixture(autouse=True)
def store(monkeypatch, tmp_path):
  """An empty store, and an empty cache of the user's."""
  monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
  return empty_store(monkeypatch)


@pytest.fixture
def copies(monkeypatch):
  """The files that are copied from and to the store."""
  made = []
  for name in ("get_file", "put_file"):
    real = getattr(MemoryFileSystem, name)

    def copy(self, source, target, *arguments, real=real, name=name, **options):
      made.append(source if name == "get_file" else target)
      return real(self, source, target, *arguments, **options)

    monkeypatch.setattr(MemoryFileSystem, name, copy)
  return made


def read(folder):
  return {
    path.relative_to(folder).as_posix(): path.read_text()
    for path in folder.rglob("*")
    if path.is_file()
  }


@pytest.mark.parametrize("path", ["gs:/a", "C:/a", "./gs://a", "a", "a b://c"])
def test_a_path_is_no_address(path):
  assert not addresses.is_address(path)
  addresses.check_local(path)


@pytest.mark.parametrize(
  "path", ["gs://a", "gs://a/b c", "x+y.z://", "s3://a/"]
)
def test_an_address_is_no_path(path):
  assert addresses.is_address(path)
  with pytest.raises(InputError, match=" is an address; give a file or folder"):
    addresses.check_local(path)


def test_every_version_is_fetched_once(store, copies):
  store.pipe({"/bucket/run/a": b"1", "/bucket/run/in/b": b"2"})
  first = addresses.fetch(RUN + "/")
  assert first.name == "run"
  assert read(first) == {"a": "1", "in/b": "2"}
  assert addresses.fetch(RUN) == first
  assert len(copies) == 2
  store.pipe({"/bucket/run/a": b"3"})
  store.rm_file("/bucket/run/in/b")
  second = addresses.fetch(RUN)
  assert read(second) == {"a": "3"}
  # A program may be reading it.
  assert read(first) == {"a": "1", "in/b": "2"}


def test_a_neighbor_with_a_longer_name_is_not_fetched(store):
  store.pipe({"/bucket/run/a": b"1", "/bucket/run2/b": b"2"})
  assert read(addresses.fetch(RUN)) == {"a": "1"}


def test_a_file_keeps_its_name(store):
  store.pipe_file("/bucket/data.jsonl", b"{}")
  path = addresses.fetch("memory://bucket/data.jsonl")
  assert (path.name, path.read_text()) == ("data.jsonl", "{}")


@pytest.mark.parametrize(
  ("number", "said"),
  [
    (errno.EIO, f"{RUN} cannot be read: Input/output error"),
    (errno.ENOSPC, f"{RUN} cannot be copied to .*: No space left on device"),
  ],
  ids=["there", "here"],
)
def test_a_copy_is_whole_or_not_there(
  store, monkeypatch, tmp_path, number, said
):
  store.pipe({"/bucket/run/a": b"1", "/bucket/run/b": b"2"})
  real = MemoryFileSystem.get_file

  def fail(self, source, target, **options):
    if source.endswith("b"):
      raise OSError(number, os.strerror(number))
    return real(self, source, target, **options)

  with monkeypatch.context() as patch:
    patch.setattr(MemoryFileSystem, "get_file", fail)
    with pytest.raises(InputError, match=said):
      addresses.fetch(RUN)
  assert not [path for path in tmp_path.rglob("*") if path.is_file()]
  assert read(addresses.fetch(RUN)) == {"a": "1", "b": "2"}


def test_what_comes_in_part_is_refused(store, monkeypatch, tmp_path):
  store.pipe_file("/bucket/run/a", b"12345")

  def cut(self, source, target, **options):
    pathlib.Path(target).write_bytes(b"123")

  with monkeypatch.context() as patch:
    patch.setattr(MemoryFileSystem, "get_file", cut)
    with pytest.raises(InputError, match="of a, 3 of 5 bytes have come; try"):
      addresses.fetch(RUN)
  assert not [path for path in tmp_path.rglob("*") if path.is_file()]
  assert read(addresses.fetch(RUN)) == {"a": "12345"}


def test_what_is_stored_compressed_has_another_size(store, monkeypatch):
  store.pipe_file("/bucket/run/a", b"12345")
  real = addresses.Place.listed

  def listed(place):
    return {
      name: {**about, "size": 3, "contentEncoding": "gzip"}
      for name, about in real(place).items()
    }

  monkeypatch.setattr(addresses.Place, "listed", listed)
  assert read(addresses.fetch(RUN)) == {"a": "12345"}


def test_a_copy_is_on_the_disk_before_it_gets_its_name(store, monkeypatch):
  seen = []
  rename, sync = pathlib.Path.rename, files.sync
  monkeypatch.setattr(
    pathlib.Path,
    "rename",
    lambda path, other: (seen.append("named"), rename(path, other)),
  )
  monkeypatch.setattr(
    files, "sync", lambda path: (seen.append(path.name), sync(path))
  )
  store.pipe({"/bucket/run/a": b"1", "/bucket/run/b": b"2"})
  copy = addresses.fetch(RUN)
  last = seen.index("named")
  assert sorted(seen[:last]) == sorted(["a", "b", "run", copy.parent.name])
  assert seen[last + 1 :] == [copy.parent.parent.name]


def test_what_a_killed_program_has_left_is_removed(store, tmp_path):
  store.pipe_file("/bucket/run/a", b"1")
  parent = addresses.fetch(RUN).parents[1]
  (parent / "part.abcdefgh").mkdir()
  (parent / "part.abcdefgh" / "a").write_bytes(b"1")
  os.utime(parent / "part.abcdefgh", (0, 0))
  # It may be one that is fetching, where no lock holds.
  (parent / "part.ijklmnop").mkdir()
  store.pipe_file("/bucket/run/a", b"2")
  copy = addresses.fetch(RUN)
  assert len(list(parent.iterdir())) == 3
  assert (parent / "part.ijklmnop").exists()
  assert read(copy) == {"a": "2"}


def test_programs_fetch_at_the_same_time_without_a_lock(store, monkeypatch):
  monkeypatch.setattr(files, "locked", lambda folder: contextlib.nullcontext())
  store.pipe_file("/bucket/run/a", b"1")
  real = MemoryFileSystem.get_file
  found = []

  def meanwhile(self, source, target, **options):
    monkeypatch.setattr(MemoryFileSystem, "get_file", real)
    found.append(addresses.fetch(RUN))
    return real(self, source, target, **options)

  monkeypatch.setattr(MemoryFileSystem, "get_file", meanwhile)
  assert [addresses.fetch(RUN)] == found
  assert read(found[0]) == {"a": "1"}


def test_threads_fetch_at_the_same_time_once(store, copies):
  store.pipe_file("/bucket/run/a", b"1")
  with ThreadPoolExecutor(4) as pool:
    found = set(pool.map(addresses.fetch, [RUN] * 4))
  assert copies == ["/bucket/run/a"]
  assert read(*found) == {"a": "1"}


def test_a_name_cannot_lead_out_of_the_copy(store, tmp_path):
  store.pipe_file("/bucket/run/../../../out", b"1")
  with pytest.raises(InputError, match=r"has a file named \.\./\.\./\.\./out"):
    addresses.fetch(RUN)
  assert not list(tmp_path.rglob("out"))


@pytest.mark.parametrize(
  ("address", "said"),
  [
    ("what://bucket/a", "cannot be reached: Protocol not known: what."),
    ("memory://bucket/none", "There is nothing at memory://bucket/none."),
    ("file:///proc/none", "There is nothing at file:///proc/none."),
    ("memory:///", "names no file or folder; give the address of one"),
    ("memory://bucket/", "names no file or folder; give the address of one"),
    ("memory://bucket/..", "names no file or folder; give the address of one"),
  ],
  ids=["unknown", "none", "no_file", "nameless", "bucket", "parent"],
)
def test_what_cannot_be_fetched_is_one_sentence(address, said):
  with pytest.raises(InputError) as raised:
    addresses.fetch(address)
  assert said in str(raised.value)
  assert "\n" not in str(raised.value)


def test_a_cache_that_cannot_be_written_is_one_sentence(store, monkeypatch):
  store.pipe_file("/bucket/run/a", b"1")
  monkeypatch.setenv("XDG_CACHE_HOME", "/proc")
  with pytest.raises(InputError, match=f"{RUN} cannot be copied to /proc/"):
    addresses.fetch(RUN)


def test_what_cannot_be_written_is_said_before_anything_is_done():
  with (
    pytest.raises(InputError, match=r"file:///proc/run cannot be written: "),
    addresses.written("file:///proc/run"),
  ):
    pytest.fail("the work has begun")


def test_a_description_is_sent_after_what_it_describes(store, copies):
  with addresses.written(RUN) as folder:
    for seconds, name in enumerate(["z", "m", "a"]):
      (folder / name).write_text(name)
      os.utime(folder / name, (seconds, seconds))
  assert copies == [f"/bucket/run/{name}" for name in "zma"]
  # The file by which writing was tried is gone.
  assert sorted(store.find("/bucket")) == sorted(copies)


def test_a_failure_sends_nothing(store):
  def fail():
    with addresses.written(RUN) as folder:
      (folder / "a").write_text("1")
      raise ArithmeticError

  with pytest.raises(ArithmeticError):
    fail()
  assert not store.find("/bucket")


def saved(tokens, address, **options):
  model = TinyModel()
  params = model.init()
  plan = kvjax.get_plan("keydiff", kvjax.Tokens(tokens))
  prompts = kvjax.Prompts.of([[1, 2, 3, 4], [5, 6]])
  cache, _ = kvjax.prefill(model, params, prompts, plan)
  kvjax.save_cache(cache, address, model=model, model_id="tiny", **options)
  return model, cache


def test_a_cache_is_saved_at_an_address(store):
  model, cache = saved(3, "memory://bucket/cache")
  loaded = kvjax.load_cache(
    "memory://bucket/cache", model=model, model_id="tiny"
  )
  same = jax.tree.map(np.array_equal, loaded, cache)
  assert all(jax.tree.leaves(same))
  with pytest.raises(InputError, match=r"has files already; give another"):
    saved(2, "memory://bucket/cache")
  files = set(store.find("/bucket/cache"))
  _, cache = saved(2, "memory://bucket/cache", overwrite=True)
  loaded = kvjax.load_cache(
    "memory://bucket/cache", model=model, model_id="tiny"
  )
  assert loaded.lengths.tolist() == cache.lengths.tolist()
  # The arrays of the cache before are gone.
  both = files & set(store.find("/bucket/cache"))
  assert both == {"/bucket/cache/cache.json"}


def test_a_model_is_saved_and_loaded_at_an_address(store):
  lm = kvjax.load("reference")
  kvjax.models.save(lm, "memory://bucket/model")
  assert json.loads(store.cat_file("/bucket/model/config.json"))
  loaded = kvjax.load("memory://bucket/model")
  assert loaded.model == lm.model
  same = jax.tree.map(np.array_equal, loaded.params, lm.params)
  assert all(jax.tree.leaves(same))
  # Its weights could win over those of another format.
  with pytest.raises(InputError, match="has files already; give another"):
    kvjax.models.save(lm, "memory://bucket/model", format="orbax")


def test_several_hosts_need_a_folder(monkeypatch):
  monkeypatch.setattr(jax, "process_count", lambda: 2)
  with (
    pytest.raises(InputError, match="Several hosts cannot write to memory://"),
    addresses.written(RUN),
  ):
    pytest.fail("the work has begun")
