"""Runs whose --output is an address."""

import datetime
import os
import pathlib
import tempfile
import threading

import pytest
from fsspec.implementations.memory import MemoryFileSystem
from memory_store import contents, empty_store

from kvjax import files
from kvjax.errors import InputError
from kvjax.experiments.run import outputs, sending
from kvjax.experiments.run.sentences import say

RUNS = "memory://bucket/runs"


@pytest.fixture(autouse=True)
def fresh(monkeypatch, tmp_path):
  """No copies, and a folder of their own for new ones."""
  monkeypatch.setattr(sending, "_COPIES", [])
  monkeypatch.setattr(sending, "_ANYWHERE", threading.Event())
  monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
  monkeypatch.setattr(sending, "_BETWEEN", 0.0)


@pytest.fixture
def store(monkeypatch):
  """An empty store, in memory."""
  return empty_store(monkeypatch)


@pytest.fixture
def sent(monkeypatch):
  """The files that are sent to the store."""
  made = []
  real = MemoryFileSystem.put_file

  def put_file(self, source, target, **options):
    made.append(target.removeprefix("/bucket/runs/"))
    return real(self, source, target, **options)

  monkeypatch.setattr(MemoryFileSystem, "put_file", put_file)
  return made


def run(act=lambda: None, then=lambda: None):
  """A program that writes a file; something happens before and after."""
  with sending.sending():
    folder = outputs.run_folder(RUNS)
    act()
    (folder / "a").write_text("own")
    sending.send_if_due()
    then()


def kept(tmp_path):
  """The folder of this machine."""
  (folder,) = tmp_path.glob("kvjax-*/runs")
  return folder


NINE_DIGITS = datetime.datetime.fromtimestamp(1e9, datetime.UTC)


@pytest.mark.parametrize(
  "told",
  [
    *({"mtime": 1e9}, {"updated": NINE_DIGITS.isoformat()}),
    *({"LastModified": NINE_DIGITS}, {"created": NINE_DIGITS}),
  ],
)
def test_copies_have_the_times_that_stores_tell(store, monkeypatch, told):
  """The newer of two equal runs counts in a leaderboard."""
  store.pipe("/bucket/runs/a", b"old")
  about = {"/bucket/runs/a": {"size": 3, "type": "file", **told}}
  monkeypatch.setattr(MemoryFileSystem, "find", lambda *a, **b: about)
  with sending.sending():
    assert (outputs.run_folder(RUNS) / "a").stat().st_mtime == 1e9


def test_what_changes_is_sent(store, sent):
  store.pipe({"/bucket/runs/a/1": b"old", "/bucket/runs/b/2": b"kept"})
  with sending.sending():
    folder = outputs.run_folder(RUNS)
    assert (folder / "a" / "1").read_text() == "old"
    sending.send_if_due()
    assert sent == []
    outputs.write_text(folder / "a" / "1", "new")
    assert sent == ["a/1"]
    outputs.write_text(folder / "c.json", "{}")
    (folder / "b" / "2").unlink()
    (folder / "last.png").write_bytes(b"png")
    assert sent == ["a/1", "c.json"]
  assert sent == ["a/1", "c.json", "last.png"]
  assert contents(store) == {
    "a/1": "new",
    "b/2": "kept",
    "c.json": "{}",
    "last.png": "png",
  }
  assert not folder.parent.exists()


def test_what_a_run_removes_of_its_own_scratch_is_removed_there(store):
  store.pipe({"/bucket/runs/.work/1": b"1", "/bucket/runs/.work/2": b"2"})
  with sending.sending():
    folder = outputs.run_folder(RUNS)
    outputs.write_text(folder / ".work" / "3", "3")
    assert len(contents(store)) == 3
    store.pipe({"/bucket/runs/.work/4": b"of another run"})
    for name in "13":
      (folder / ".work" / name).unlink()
  assert contents(store) == {".work/2": "2", ".work/4": "of another run"}


def test_a_removal_that_fails_is_done_again(store, monkeypatch):
  real = MemoryFileSystem.rm_file
  left = [ConnectionResetError("reset")]

  def remove(self, path):
    real(self, path)
    if left:
      raise left.pop()

  with sending.sending():
    folder = outputs.run_folder(RUNS)
    outputs.write_text(folder / ".work" / "1", "1")
    (folder / ".work" / "1").unlink()
    monkeypatch.setattr(MemoryFileSystem, "rm_file", remove)
    sending.send_if_due()
    assert not left
  assert contents(store) == {}


def test_a_description_is_sent_after_what_it_describes(store, sent):
  copy = sending.Copy(RUNS)
  for number, name in enumerate(["z", "y", "a"]):
    path = copy.folder / name
    path.write_text(name)
    os.utime(path, ns=(0, number))
  copy.send()
  assert sent == ["z", "y", "a"]


def test_what_is_being_written_is_not_sent(store, sent):
  copy = sending.Copy(RUNS)
  with files.replacing(copy.folder / "a") as part:
    part.write_bytes(b"half")
    copy.send()
    assert sent == []
  copy.send()
  assert sent == ["a"]


@pytest.mark.parametrize("reading", ["stat", "open"])
def test_a_file_that_vanishes_is_not_sent(store, sent, monkeypatch, reading):
  """As temporary files of libraries do."""
  copy = sending.Copy(RUNS)
  for name in ("a", "b"):
    (copy.folder / name).write_text(name)
  real = getattr(pathlib.Path, reading)

  def vanish(path, *given, **options):
    if path == copy.folder / "a":
      path.unlink(missing_ok=True)
    return real(path, *given, **options)

  monkeypatch.setattr(pathlib.Path, reading, vanish)
  copy.send()
  assert sent == ["b"]


def test_sends_wait_for_their_time(store, sent, monkeypatch):
  monkeypatch.setattr(sending, "_BETWEEN", 3600.0)
  with sending.sending():
    folder = outputs.run_folder(RUNS)
    outputs.write_text(folder / "a", "1")
    assert sent == []
    sending.send_if_due(now=True)
    assert sent == ["a"]
    outputs.write_text(folder / "b", "2")
    assert sent == ["a"]
  assert sent == ["a", "b"]


@pytest.mark.parametrize("before", [None, b"1"], ids=["new", "changed"])
def test_another_run_is_not_overwritten(store, tmp_path, before):
  if before:
    store.pipe_file("/bucket/runs/a", before)

  def meanwhile():
    store.pipe_file("/bucket/runs/a", b"other")
    store.pipe_file("/bucket/runs/b", b"other")

  said = f"Another run writes to {RUNS}/a; wait"
  with pytest.raises(InputError, match=said) as raised:
    run(meanwhile, then=lambda: pytest.fail("it has gone on"))
  assert contents(store) == {"a": "other", "b": "other"}
  folder = kept(tmp_path)
  assert (folder / "a").read_text() == "own"
  assert "--output" in str(raised.value)


def test_a_write_during_a_send_is_not_overwritten(store, monkeypatch):
  """Another run writes after the file was sent, and before it is looked at."""
  real = MemoryFileSystem.put_file

  def put_file(self, source, target, **options):
    real(self, source, target, **options)
    store.pipe_file(target, b"another")

  def twice():
    monkeypatch.setattr(MemoryFileSystem, "put_file", put_file)

  with pytest.raises(InputError, match="Another run writes"):
    run(twice)
  assert contents(store) == {"a": "another"}


def test_a_write_after_a_failed_send_is_not_overwritten(store, monkeypatch):
  def fail(self, source, target, **options):
    store.pipe_file(target, b"another")
    raise OSError(5, "Connection lost")

  def disconnect():
    monkeypatch.setattr(MemoryFileSystem, "put_file", fail)

  with pytest.raises(InputError, match="Another run writes"):
    run(disconnect)
  assert contents(store) == {"a": "another"}


def test_what_another_run_has_taken_does_not_keep_the_rest_from_being_sent(
  store, monkeypatch
):
  def run_three():
    with sending.sending():
      for name in "abc":
        (outputs.run_folder(RUNS, name) / "x").write_text("own")
      store.pipe_file("/bucket/runs/a/x", b"other")

  monkeypatch.setattr(sending, "_BETWEEN", 3600.0)
  with pytest.raises(InputError, match=f"run writes to {RUNS}/a/x; .*; what i"):
    run_three()
  assert contents(store) == {"a/x": "other", "b/x": "own", "c/x": "own"}


def test_runs_in_other_folders_do_not_matter(store):
  with sending.sending():
    folder = outputs.run_folder(RUNS)
    outputs.write_text(folder / "mine" / "a", "1")
    store.pipe_file("/bucket/runs/yours/a", b"2")
    outputs.write_text(folder / "mine" / "a", "3")
  assert contents(store) == {"mine/a": "3", "yours/a": "2"}


@pytest.mark.parametrize("failing", ["put_file", "find"])
def test_what_fails_is_sent_later(store, monkeypatch, failing):
  real = getattr(MemoryFileSystem, failing)
  calls = []

  def fail(self, *arguments, **options):
    calls.append(arguments)
    # The file is sent before the second listing fails.
    if failing == "put_file" or len(calls) == 2:
      raise OSError(5, "Connection lost")
    return real(self, *arguments, **options)

  with sending.sending():
    folder = outputs.run_folder(RUNS)
    with monkeypatch.context() as patch:
      patch.setattr(MemoryFileSystem, failing, fail)
      outputs.write_text(folder / "a", "1")
    assert calls
    outputs.write_text(folder / "a", "2")
  assert contents(store) == {"a": "2"}


def test_what_is_never_sent_is_kept(store, monkeypatch, tmp_path):
  def fail(self, *arguments, **options):
    raise OSError(5, "Connection lost")

  def disconnect():
    monkeypatch.setattr(MemoryFileSystem, "put_file", fail)

  with pytest.raises(InputError, match="lost; what it lacks is in ") as raised:
    run(disconnect)
  folder = kept(tmp_path)
  assert (folder / "a").read_text() == "own"
  assert str(folder.parent) in sending.named(str(raised.value))


@pytest.mark.parametrize("error", [KeyboardInterrupt, InputError, SystemExit])
def test_a_program_that_ends_early_sends_what_it_has(store, error, monkeypatch):
  def end():
    monkeypatch.setattr(sending, "_BETWEEN", 0.0)
    raise error("stop")

  monkeypatch.setattr(sending, "_BETWEEN", 3600.0)
  with pytest.raises(error):
    run(then=end)
  assert contents(store) == {"a": "own"}


@pytest.mark.parametrize("times", [1, 2])
def test_an_interrupt_of_the_last_send_has_it_done_again(
  store, monkeypatch, capfd, tmp_path, times
):
  """A second one ends it, with a word on what is not sent."""
  real = MemoryFileSystem.put_file
  calls = []

  def put_file(self, *arguments, **options):
    calls.append(arguments)
    if len(calls) <= times:
      raise KeyboardInterrupt
    return real(self, *arguments, **options)

  monkeypatch.setattr(MemoryFileSystem, "put_file", put_file)
  monkeypatch.setattr(sending, "_BETWEEN", 3600.0)
  with pytest.raises(KeyboardInterrupt):
    run()
  said = capfd.readouterr().err
  if times == 1:
    assert (contents(store), said) == ({"a": "own"}, "")
    return
  assert contents(store) == {}
  parent = kept(tmp_path).parent
  assert said == f"What {RUNS} lacks is in {parent}, as runs.\n"


def test_another_thread_sends_for_a_main_one_that_hangs(
  store, monkeypatch, tmp_path
):
  monkeypatch.setattr(sending, "_BETWEEN", 3600.0)
  outputs.write_text(outputs.run_folder(RUNS) / "a", "own")
  assert contents(store) == {}
  sending.send_at_once(60.0)
  assert contents(store) == {"a": "own"}
  assert list(tmp_path.glob("kvjax-*")) == []


def test_another_thread_says_what_it_cannot_send_in_time(
  store, monkeypatch, capfd
):
  waits = threading.Event()
  monkeypatch.setattr(
    MemoryFileSystem, "put_file", lambda *given, **options: waits.wait(60)
  )
  monkeypatch.setattr(sending, "_BETWEEN", 3600.0)
  folder = outputs.run_folder(RUNS)
  outputs.write_text(folder / "a", "own")
  sending.send_at_once(0.1)
  waits.set()
  said = f"What {RUNS} lacks is in {folder.parent}, as runs.\n"
  assert capfd.readouterr().err == said


def test_hosts_wait_for_the_last_send(store, monkeypatch):
  """Those that end would wait for the first one a few minutes only."""
  met = []
  monkeypatch.setattr(
    sending.multihost, "gather", lambda given: met.append(contents(store))
  )
  run()
  assert met == [{"a": "own"}]


def test_no_hosts_wait_where_nothing_is_sent(monkeypatch):
  monkeypatch.setattr(sending.multihost, "gather", pytest.fail)
  with sending.sending():
    pass


def test_messages_name_the_address(store, capsys):
  folder = outputs.run_folder(RUNS + "/")
  say(f"all in {folder / 'run'}")
  assert capsys.readouterr().out == f"all in {RUNS}/run\n"


def test_a_file_is_no_folder(store):
  store.pipe_file("/bucket/runs", b"")
  with pytest.raises(InputError, match="runs cannot be written: it is a file"):
    outputs.run_folder(RUNS)


def test_nothing_is_written_to_an_address_alone(store):
  """As --dry_run."""
  with sending.sending():
    outputs.run_folder(RUNS)
  assert contents(store) == {}
