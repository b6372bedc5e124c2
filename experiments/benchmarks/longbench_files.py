"""Where a folder, a zip or a cache of LongBench holds which set."""

import pathlib
import zipfile
from collections.abc import Collection, Iterator

from kvjax.errors import InputError
from kvjax.experiments.benchmarks.row_files import RowFile, below, has_rows


def find(
  path: pathlib.Path, names: Collection[str]
) -> dict[str, list[RowFile]]:
  """The files of each set that there is, in the order of `names`.

  A file belongs to the set that it is named after, or the nearest folder
  around it. That is so in all published layouts:

  - `data.zip` of the hub, and the `<set>.jsonl` that come out of it;
  - `<set>/test-00000-of-00001.parquet` and `<set>/test/0000.parquet` of the
    hub, kvpress's `Xnhyacinth/LongBench` among them, and its local cache;
  - `<set>/data-00000-of-00001.arrow`, which `save_to_disk` writes;
  - `THUDM___long_bench/<set>/1.0.0/<hash>/long_bench-test.arrow`, the cache of
    `datasets`.

  Args:
    path: a file or folder.
    names: of the sets, with `_e` for those of LongBench-E.

  Raises:
    InputError: there is no such path, it holds no set, or a set in two places.
  """
  found: dict[str, list[RowFile]] = {name: [] for name in names}
  for file, parts in _files(path):
    nearest = next((part for part in reversed(parts) if part in found), None)
    if nearest is not None:
      found[nearest].append(file)
  found = {name: files for name, files in found.items() if files}
  if not found:
    raise InputError(
      f"{path} holds no set of LongBench; give its data.zip, or a folder with "
      "files such as hotpotqa.jsonl or hotpotqa/test-00000-of-00001.parquet."
    )
  for name, files in found.items():
    places = {
      (file.path.parent, file.path.suffix, file.name.parent) for file in files
    }
    if len(places) > 1:
      raise InputError(
        f"{path} holds {name} more than once, in {files[0]} and {files[-1]}; "
        "name one of the places."
      )
  return found


def _files(path: pathlib.Path) -> Iterator[tuple[RowFile, tuple[str, ...]]]:
  """Data files with the names that they may be called after, nearest last."""
  alone = path.is_file()
  # A folder's own name counts, and that of the folder that a file is in.
  above = path.absolute().parent.parent if alone else path.absolute().parent
  for file in below(path):
    if file.suffix == ".zip" and (alone or file.name == "data.zip"):
      yield from _members(file)
    elif has_rows(file):
      folders = file.absolute().relative_to(above).parts[:-1]
      yield RowFile(file), (*folders, file.stem)


def _members(path: pathlib.Path) -> Iterator[tuple[RowFile, tuple[str, ...]]]:
  try:
    with zipfile.ZipFile(path) as archive:
      names = sorted(archive.namelist())
  except (OSError, zipfile.BadZipFile) as error:
    raise InputError(f"{path} is no zip file: {error}.") from error
  for name in names:
    member = pathlib.PurePosixPath(name)
    if member.suffix in (".jsonl", ".json"):
      yield RowFile(path, name), (*member.parts[:-1], member.stem)
