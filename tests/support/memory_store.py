"""A store in memory, which stands for a bucket."""

import fsspec
from fsspec.implementations.memory import MemoryFileSystem


def empty_store(monkeypatch):
  """Empties the store of fsspec for a test, and returns it."""
  monkeypatch.setattr(MemoryFileSystem, "store", {})
  monkeypatch.setattr(MemoryFileSystem, "pseudo_dirs", [""])
  return fsspec.filesystem("memory")


def contents(store, folder="/bucket/runs"):
  """The texts in a folder, by their names there."""
  return {
    name.removeprefix(f"{folder}/"): store.cat(name).decode()
    for name in store.find(folder)
  }
