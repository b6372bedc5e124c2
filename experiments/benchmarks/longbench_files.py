"""Finds LongBench's datasets in folders, zips and caches."""

import pathlib
import zipfile
from collections.abc import Collection, Iterator

from kvjax.errors import InputError
from kvjax.experiments.benchmarks.row_files import RowFile, below, has_rows
from kvjax.files import check_regular


def find(
  path: pathlib.Path, names: Collection[str]
) -> dict[str, list[RowFile]]:
  """Finds the files of each available dataset, in the order of `names`.

  The name of a file, or else of the nearest parent folder, determines its
  dataset. This covers all published layouts:

  - `data.zip` of the hub, and the extracted `<set>.jsonl`;
  - `<set>/test-00000-of-00001.parquet` and `<set>/test/0000.parquet` of the
    hub, kvpress's `Xnhyacinth/LongBench` among them, and its local cache;
  - `<set>/data-00000-of-00001.arrow`, which `save_to_disk` writes;
  - `THUDM___long_bench/<set>/1.0.0/<hash>/long_bench-test.arrow`, the cache of
    `datasets`.

  Args:
    path: a file or folder.
    names: datasets, with `_e` for those of LongBench-E.

  Raises:
    InputError: the path does not exist, has no dataset, or has one twice.
  """
  files_of: dict[str, list[RowFile]] = {name: [] for name in names}
  for file, parts in _files(path):
    nearest = next((part for part in reversed(parts) if part in files_of), None)
    if nearest is not None:
      files_of[nearest].append(file)
  files_of = {name: files for name, files in files_of.items() if files}
  if not files_of:
    raise InputError(
      f"{path} holds no set of LongBench; give its data.zip, or a folder with "
      "files such as hotpotqa.jsonl or hotpotqa/test-00000-of-00001.parquet."
    )
  for name, files in files_of.items():
    places = {
      (file.path.parent, file.path.suffix, file.name.parent) for file in files
    }
    if len(places) > 1:
      raise InputError(
        f"{path} holds {name} more than once, in {files[0]} and {files[-1]}; "
        "name one of the places."
      )
  return files_of


def _files(path: pathlib.Path) -> Iterator[tuple[RowFile, tuple[str, ...]]]:
  """Yields data files with candidate dataset names, the nearest last."""
  is_file = path.is_file()
  # The names of the given folder and of a given file's folder count too.
  above = path.absolute().parent.parent if is_file else path.absolute().parent
  for file in below(path):
    if file.suffix == ".zip" and (is_file or file.name == "data.zip"):
      yield from _members(file)
    elif has_rows(file):
      folders = file.absolute().relative_to(above).parts[:-1]
      yield RowFile(file), (*folders, file.stem)


def _members(path: pathlib.Path) -> Iterator[tuple[RowFile, tuple[str, ...]]]:
  check_regular(path)
  try:
    with zipfile.ZipFile(path) as archive:
      names = sorted(archive.namelist())
  except (OSError, zipfile.BadZipFile) as error:
    raise InputError(f"{path} is no zip file: {error}.") from error
  for name in names:
    member = pathlib.PurePosixPath(name)
    if member.suffix in (".jsonl", ".json"):
      yield RowFile(path, name), (*member.parts[:-1], member.stem)
