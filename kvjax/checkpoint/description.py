"""The description of a saved cache: `cache.json`."""

import dataclasses
import json
import pathlib
import zlib
from typing import Any

from kvjax.model import Model

LAYOUT = 3
DESCRIPTION = "cache.json"
# How the names of folders of arrays begin.
ARRAYS = "arrays-"
_BLOCK = 2**20


def identity_of(model: Model, model_id: str) -> dict[str, Any]:
  """Says which model a cache is of."""
  description = {"id": model_id, **dataclasses.asdict(model.geometry)}
  for layer in description["layers"]:
    # It says nothing about the cache.
    del layer["parallel"]
  # As it will be read: with lists for tuples.
  identity: dict[str, Any] = json.loads(json.dumps(description))
  return identity


def checksum_of(description: dict[str, Any]) -> int:
  """CRC-32 of a description."""
  return zlib.crc32(json.dumps(description).encode())


def checksums_in(directory: pathlib.Path) -> dict[str, int]:
  """CRC-32 of every file in a directory and its subdirectories."""
  checksums = {}
  for path in sorted(p for p in directory.rglob("*") if p.is_file()):
    checksum = 0
    with path.open("rb") as file:
      while block := file.read(_BLOCK):
        checksum = zlib.crc32(block, checksum)
    checksums[path.relative_to(directory).as_posix()] = checksum
  return checksums
