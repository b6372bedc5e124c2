"""The contents of files that the options of methods name."""

import dataclasses
import pathlib
from collections.abc import Iterator

import kvjax
from kvjax.addresses import local
from kvjax.allocation.base import Allocation
from kvjax.experiments.run.digests import digest_of
from kvjax.methods.base import Method

# Of a folder, what methods read; programs may write others there.
_READ = ("*.safetensors", "*.pt", "config.json")


def contents(value: object) -> Iterator[str]:
  """Names the files that parts of a plan read, each with a digest.

  A file that has been replaced by another at the same path is told apart.
  """
  if not dataclasses.is_dataclass(value):
    return
  if isinstance(value, Method | Allocation):
    for path in value.named_files:
      yield f"{pathlib.PurePath(path).name}_{_digest(local(path))}"
  for field in dataclasses.fields(value):
    yield from contents(getattr(value, field.name))


def joined(plan: kvjax.Plan) -> str:
  """What `contents` yields, as a calibration record has it."""
  return ", ".join(dict.fromkeys(contents(plan)))


def _digest(path: pathlib.Path) -> str:
  if not path.is_dir():
    return digest_of([path])
  return digest_of(sorted(file for name in _READ for file in path.glob(name)))
