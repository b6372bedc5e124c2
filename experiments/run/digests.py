"""Digests of files, which tell what answers and records belong to."""

import hashlib
import pathlib
from collections.abc import Iterable

from kvjax.experiments.benchmarks import hub

_BLOCKS = 64
_BLOCK_BYTES = 2**16


def data_name(path: pathlib.Path) -> str:
  """Names a file or folder of samples, with a digest, for tables."""
  published = hub.name_of(path)
  if published is not None:
    return published
  files = [path] if path.is_file() else sorted(path.rglob("*"))
  content = digest_of([file for file in files if file.is_file()])
  return f"{path.resolve().name} (sha256 {content})"


def digest_of(paths: Iterable[pathlib.Path], others: Iterable[str] = ()) -> str:
  """Hashes the names and contents of files, and other names.

  For files over 4 MiB, it reads evenly spaced blocks only, since hashing all of
  a large model would take minutes.
  """
  digest = hashlib.sha256("".join(others).encode())
  for path in paths:
    size = path.stat().st_size
    digest.update(f"{path.name} {size} ".encode())
    with path.open("rb") as file:
      for block in range(_BLOCKS):
        file.seek(max(size - _BLOCK_BYTES, 0) * block // (_BLOCKS - 1))
        digest.update(file.read(_BLOCK_BYTES))
  return digest.hexdigest()[:12]
