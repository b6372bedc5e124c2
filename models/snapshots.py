"""Download of a model from the Hugging Face hub."""

import dataclasses
import errno
import pathlib
import ssl

from kvjax.errors import InputError, causes
from kvjax.models.downloads import ModelFile, UnreachableError

# Of the disk; the hub's own errors have other numbers, or none.
_DISK = (errno.ENOSPC, errno.EDQUOT, errno.EACCES, errno.EROFS, errno.EFBIG)
# What clients of HTTP raise where no answer arrives, or half of one. By name:
# the hub's versions use different clients, whose errors have the same names.
_SILENT = {"NetworkError", "TimeoutException", "RemoteProtocolError"}
_SILENT |= {"ProxyError", "ConnectionError", "TimeoutError"}


@dataclasses.dataclass(frozen=True)
class Snapshot:
  """Files of a repository at one commit.

  Attributes:
    repository: its name, as in `org/name`.
    revision: the commit, 40 hexadecimal digits.
    files: those that are needed: safetensors, json and txt only.
    license: name of their license, and where it is.
  """

  repository: str
  revision: str
  files: tuple[ModelFile, ...]
  license: str

  @property
  def label(self) -> str:
    """Repository and commit."""
    return f"{self.repository} at {self.revision[:12]}"

  @property
  def nbytes(self) -> int:
    """Size of all files."""
    return sum(file.nbytes for file in self.files)

  @property
  def nbytes_needed(self) -> int:
    """Disk space; files are written once."""
    return self.nbytes

  def download(self, place: pathlib.Path, folder: pathlib.Path) -> None:
    """Downloads the files with the hub's own progress bar.

    Args:
      place: an empty folder.
      folder: where the model will be, for messages.

    Raises:
      UnreachableError: the hub cannot be reached.
      InputError: the hub does not have the commit, or something else fails.
      OSError: the folder cannot be written.
    """
    # Imported for downloads alone, as it takes a while.
    import huggingface_hub

    try:
      huggingface_hub.snapshot_download(
        self.repository,
        revision=self.revision,
        allow_patterns=[file.name for file in self.files],
        local_dir=place,
      )
    except Exception as error:  # Also those of the libraries that it uses.
      if isinstance(error, OSError) and error.errno in _DISK:
        raise
      kind, reason = _failure(error)
      names = ", ".join(file.name for file in self.files)
      raise kind(
        f"The model {self.label} cannot be fetched from the Hugging Face hub "
        f"({reason}); run this once with access to the hub, or put {names} "
        f"into {folder}."
      ) from error


def _failure(error: Exception) -> tuple[type[InputError], str]:
  """Returns the error to raise for one of the hub's client, and the reason."""
  from huggingface_hub import errors

  # The hub reports gated and private repositories as absent ones.
  absent = (errors.RepositoryNotFoundError, errors.RevisionNotFoundError)
  if isinstance(error, absent):
    return InputError, "the hub does not give it to you"
  for cause in causes(error):
    if isinstance(cause, ssl.SSLCertVerificationError):
      return InputError, "its certificate cannot be verified"
    if isinstance(cause, errors.HfHubHTTPError):
      status = cause.response.status_code
      if 400 <= status < 500:
        return InputError, f"the hub has answered with status {status}"
  # The first: neither on the hub, which does not answer, nor on the disk.
  silent = isinstance(error, errors.LocalEntryNotFoundError) or any(
    not _SILENT.isdisjoint(each.__name__ for each in type(cause).__mro__)
    for cause in causes(error)
  )
  if silent:
    return UnreachableError, "the hub cannot be reached"
  return InputError, f"its client has failed with {type(error).__name__}"
