"""Finds LongBench's datasets in folders, zips and caches."""

import pathlib
from collections.abc import Collection, Iterator

from kvjax.errors import InputError
from kvjax.experiments.benchmarks import row_files
from kvjax.experiments.benchmarks.row_files import RowFile


def find(
  path: pathlib.Path, names: Collection[str]
) -> dict[str, list[RowFile]]:
  """Finds the files of each available dataset, in the order of `names`.

  The name of a file, or else of the nearest parent folder, determines its
  dataset. This covers all published layouts:

  - `data.zip` of the hub or another zip, and the extracted `<set>.jsonl`, which
    may be compressed, or CSV;
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
      (file.path.parent, file.name.suffix, file.name.parent) for file in files
    }
    if len(places) > 1:
      raise InputError(
        f"{path} holds {name} more than once, in {files[0]} and {files[-1]}; "
        "name one of the places."
      )
  return files_of


def _files(path: pathlib.Path) -> Iterator[tuple[RowFile, tuple[str, ...]]]:
  """Yields data files with candidate dataset names, the nearest last."""
  # The names of the given folder and of a given file's folder count too.
  folder = path.absolute().parent if path.is_file() else path.absolute()
  for file in row_files.find(path):
    if file.member:
      folders = file.name.parts[:-1]
    else:
      folders = file.path.absolute().relative_to(folder.parent).parts[:-1]
    yield file, (*folders, file.stem)
