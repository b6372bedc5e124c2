"""Files and folders at addresses of other machines, such as gs://bucket/model.

fsspec copies them: `gs://` needs the package gcsfs, and `s3://` s3fs. What
kvjax reads and writes is always a copy on this machine.
"""

import contextlib
import errno
import functools
import hashlib
import pathlib
import re
import shutil
import tempfile
import time
import uuid
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import jax
from fsspec.core import url_to_fs
from fsspec.implementations.local import LocalFileSystem

from kvjax import files, user_cache
from kvjax.errors import InputError
from kvjax.progress import bytes_bar

# As a path, gs://bucket/name is a folder "gs:" of this machine.
_ADDRESS = re.compile(r"[A-Za-z][\w+.-]*://.*", re.DOTALL)
# Of an address in a message.
_LONGEST = 400
# Errors of the disk of this machine, which stores do not have.
_OF_THIS_DISK = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS)
# Start of the name of a folder that is not yet whole.
_SCRATCH = "part."
# Age of one that nobody is writing any more, in seconds.
_STALE = 86400.0
# Of digests in the names of folders.
_DIGITS = 16


def is_address(path: files.Path) -> bool:
  """Whether a path is an address, such as gs://bucket/folder."""
  return bool(_ADDRESS.fullmatch(str(path)))


def check_local(path: files.Path) -> None:
  """Refuses addresses where only a path of this machine will do.

  Raises:
    InputError: the path is an address.
  """
  if is_address(path):
    raise InputError(
      f"{str(path)[:_LONGEST]} is an address; give a file or folder of this "
      "machine, which may be a mounted bucket."
    )


def fetch(address: files.Path) -> pathlib.Path:
  """Copies what is at an address into the user's cache, as a whole.

  Every version has a folder of its own there, so that what has not changed is
  not copied again. Programs that fetch from an address at the same time wait
  for each other.

  Args:
    address: the address of a file or a folder.

  Returns:
    The path of the copy, which is not to be changed.

  Raises:
    InputError: nothing is there, it cannot be read, or the copy cannot be
      written.
  """
  place = Place.of(address)
  listed = place.listed()
  if not listed:
    raise InputError(f"There is nothing at {place.address}.")
  told = [(name, sorted(listed[name].items())) for name in sorted(listed)]
  version = _digest(repr(told))
  parent = user_cache.folder("addresses") / _digest(place.address)
  copy = parent / version / place.name
  if copy.exists():
    return copy
  try:
    parent.mkdir(parents=True, exist_ok=True)
    with files.locked(parent):
      # Another program may have fetched it in the meantime.
      if not copy.exists():
        _fetch(place, listed, parent / version)
  except OSError as error:
    if copy.exists():  # Another program was faster, where no lock holds.
      return copy
    raise InputError(
      f"{place.address} cannot be copied to {parent}: {files.reason(error)}."
    ) from error
  return copy


@functools.cache
def _fetched(address: str) -> pathlib.Path:
  return fetch(address)


def local(path: files.Path) -> pathlib.Path:
  """Returns a path of this machine; of an address, that of a copy.

  A program fetches an address once, whatever is written there meanwhile.

  Raises:
    InputError: see `fetch`.
  """
  return _fetched(str(path)) if is_address(path) else pathlib.Path(path)


def _fetch(
  place: "Place", listed: Mapping[str, Mapping[str, Any]], folder: pathlib.Path
) -> None:
  """Copies files into a new folder, which gets its name when all are there."""
  for left in folder.parent.glob(f"{_SCRATCH}*"):
    # By a program that was killed. On some file systems, no lock keeps others
    # from fetching now, or from removing it.
    with contextlib.suppress(FileNotFoundError):
      if time.time() - left.stat().st_mtime > _STALE:
        shutil.rmtree(left, ignore_errors=True)
  with tempfile.TemporaryDirectory(
    prefix=_SCRATCH, dir=folder.parent, ignore_cleanup_errors=True
  ) as scratch:
    whole = pathlib.Path(scratch) / folder.name
    place.download(listed, whole / place.name)
    for path in (*whole.rglob("*"), whole):
      files.sync(path)
    whole.rename(folder)
    files.sync(folder.parent)


@contextlib.contextmanager
def written(
  address: files.Path, *, overwrite: bool = False, stale: str = ""
) -> Iterator[pathlib.Path]:
  """Yields an empty folder, whose files are sent to an address in the end.

  They are sent in the order in which they were written, so that a description
  of others comes last if it was written last.

  Args:
    address: the address of the folder.
    overwrite: whether there may be files at the address.
    stale: start of the names of those that are removed once all is sent.

  Raises:
    InputError: the address cannot be written, has files and may not, or this is
      one of several hosts.
  """
  place = Place.of(address)
  if jax.process_count() > 1:
    raise InputError(
      f"Several hosts cannot write to {place.address}; give them a folder that "
      "they share, such as a mounted bucket."
    )
  before = place.listed()
  if before and not overwrite:
    raise InputError(
      f"{place.address} has files already; give another address, or remove "
      "them."
    )
  place.check_writable()
  with tempfile.TemporaryDirectory() as scratch:
    yield pathlib.Path(scratch)
    place.upload(pathlib.Path(scratch))
  place.remove([n for n in before if stale and n.startswith(stale)])


class Place(NamedTuple):
  """A file or a folder at an address.

  Attributes:
    address: the address, without a slash at the end.
    store: the file system of fsspec.
    root: the path in it.
  """

  address: str
  store: Any
  root: str

  @classmethod
  def of(cls, address: files.Path) -> "Place":
    """Opens an address.

    Raises:
      InputError: no package for such addresses is installed, or it names
        nothing.
    """
    text = str(address)
    scheme, _, rest = text.partition("://")
    rest = rest.rstrip("/")
    # A whole bucket may have any number of models.
    if "/" not in rest or rest.rpartition("/")[2] in ("", ".", ".."):
      raise InputError(
        f"{text[:_LONGEST]} names no file or folder; give the address of one, "
        "such as gs://bucket/folder."
      )
    text = f"{scheme}://{rest}"
    with _explained(text, "reached"):
      store, root = url_to_fs(text)
    return cls(text, store, root.rstrip("/"))

  @property
  def name(self) -> str:
    """Name of the file or folder."""
    return self.address.rpartition("/")[2]

  def listed(self) -> dict[str, Mapping[str, Any]]:
    """What the store says of the files by their names; "" for a file itself.

    Raises:
      InputError: it cannot be read.
    """
    listed: dict[str, Mapping[str, Any]] = {}
    with _explained(self.address, "read"):
      self.store.invalidate_cache()
      for path, about in self.store.find(self.root, detail=True).items():
        name = path.removeprefix(self.root).lstrip("/")
        # Some stores list a folder as an empty file.
        if about.get("type") != "directory" and not name.endswith("/"):
          listed[name] = about
    outside = [name for name in listed if ".." in name.split("/")]
    if outside:
      raise InputError(f"{self.address} has a file named {outside[0]}.")
    return listed

  def download(
    self, listed: Mapping[str, Mapping[str, Any]], target: pathlib.Path
  ) -> None:
    """Copies files to this machine.

    Raises:
      InputError: one cannot be read.
      OSError: one cannot be written.
    """
    done = 0
    with bytes_bar(f"fetching {self.name}", _total(listed)) as show:
      for name, about in listed.items():
        path = target / name if name else target
        path.parent.mkdir(parents=True, exist_ok=True)
        with _explained(self.address, "read", but=_OF_THIS_DISK):
          self.store.get_file(self._at(name), str(path))
        size, here = about.get("size"), path.stat().st_size
        # What is stored compressed may come as it was.
        encoded = about.get("contentEncoding")
        if size is not None and here != size and not encoded:
          raise InputError(
            f"{self.address} cannot be read: of {name or self.name}, {here:,} "
            f"of {size:,} bytes have come; try again."
          )
        done += here
        show(done)

  def upload(self, folder: pathlib.Path) -> None:
    """Copies the files of a folder of this machine, the oldest first.

    Raises:
      InputError: one cannot be written.
    """
    paths = [path for path in folder.rglob("*") if path.is_file()]
    paths.sort(key=lambda path: path.stat().st_mtime_ns)
    sizes = {path: path.stat().st_size for path in paths}
    done = 0
    with bytes_bar(f"sending {self.name}", sum(sizes.values())) as show:
      for path in paths:
        self.send(path, path.relative_to(folder).as_posix())
        done += sizes[path]
        show(done)

  def send(self, path: pathlib.Path, name: str) -> None:
    """Copies a file of this machine to a name at the address.

    Raises:
      InputError: it cannot be written.
    """
    target = self._at(name)
    with _explained(self.address, "written"):
      self._make_folder(target)
      if isinstance(self.store, LocalFileSystem):
        # Stores of objects replace them as a whole.
        files.write_bytes(pathlib.Path(target), path.read_bytes())
      else:
        self.store.put_file(str(path), target)

  def read(self, name: str) -> bytes:
    """Returns the content of a file.

    Raises:
      InputError: it cannot be read.
    """
    with _explained(self.address, "read"):
      content: bytes = self.store.cat_file(self._at(name))
    return content

  def check_writable(self) -> None:
    """Writes a small file to the folder, and removes it.

    Raises:
      InputError: it cannot be written.
    """
    self._try(self._at(_trial()))

  def check_file(self) -> None:
    """Writes a small file beside this one, and removes it.

    Raises:
      InputError: it cannot be written, or this one is a folder.
    """
    if self.listed().keys() - {""}:
      raise InputError(
        f"{self.address} cannot be written: it is a folder; give the address "
        "of a file."
      )
    self._try(f"{self.root.rpartition('/')[0]}/{_trial()}")

  def _try(self, path: str) -> None:
    """Writes a small file, and removes it."""
    with _explained(self.address, "written"):
      self._make_folder(path)
      self.store.pipe_file(path, b"kvjax")
      self.store.rm_file(path)

  def remove(self, names: list[str]) -> None:
    """Removes files, if they are there.

    Raises:
      InputError: one cannot be removed.
    """
    for name in names:
      with (
        _explained(self.address, "written"),
        contextlib.suppress(FileNotFoundError),
      ):
        self.store.rm_file(self._at(name))

  def _make_folder(self, path: str) -> None:
    """Makes the folder of a file; stores of objects have buckets alone."""
    folder = path.rpartition("/")[0]
    if "/" in folder.strip("/"):
      self.store.makedirs(folder, exist_ok=True)

  def _at(self, name: str) -> str:
    return f"{self.root}/{name}" if name else self.root


def _trial() -> str:
  """A name that no other file has."""
  return f".kvjax-{uuid.uuid4().hex}"


@contextlib.contextmanager
def _explained(
  address: str, what: str, but: tuple[int, ...] = ()
) -> Iterator[None]:
  """Says in a sentence what the library of a store raises.

  Args:
    address: the address.
    what: what cannot be done with it.
    but: numbers of errors of the system that are raised as they are.
  """
  try:
    yield
  # Each has errors of its own.
  except Exception as error:
    if isinstance(error, OSError) and error.errno in but:
      raise
    said = files.reason(error) or type(error).__name__
    if isinstance(error, FileNotFoundError):
      said = "there is no such bucket or folder"
    raise InputError(
      f"{address[:_LONGEST]} cannot be {what}: {said.rstrip('.')}."
    ) from error


def _total(listed: Mapping[str, Mapping[str, Any]]) -> int:
  return sum(about.get("size") or 0 for about in listed.values())


def _digest(text: str) -> str:
  return hashlib.sha256(text.encode()).hexdigest()[:_DIGITS]
