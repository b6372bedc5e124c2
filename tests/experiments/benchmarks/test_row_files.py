"""Rows of every kind of file, and what reading them costs."""

import csv
import gzip
import json
import os
import pathlib
import subprocess
import sys
import zipfile

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from kvjax.errors import InputError
from kvjax.experiments.benchmarks.row_files import RowFile, find
from kvjax.experiments.benchmarks.rows import printed_list

ROOT = pathlib.Path(__file__).parents[3]
ROWS = [{"a": f"x\u2028{number}", "b": [number]} for number in range(5)]


def as_lines(folder):
  path = folder / "rows.jsonl"
  lines = [json.dumps(row, ensure_ascii=False) for row in ROWS]
  path.write_text("\n".join(lines), "utf-8")
  return RowFile(path)


def as_json(folder):
  (folder / "rows.json").write_text(json.dumps(ROWS, indent=2))
  return RowFile(folder / "rows.json")


def as_marked_json(folder):
  (folder / "rows.json").write_text(json.dumps(ROWS), "utf-8-sig")
  return RowFile(folder / "rows.json")


def as_json_lines(folder):
  return RowFile(as_lines(folder).path.rename(folder / "rows.json"))


def as_parquet(folder):
  datasets.Dataset.from_list(ROWS).to_parquet(str(folder / "rows.parquet"))
  return RowFile(folder / "rows.parquet")


def as_arrow(folder):
  datasets.Dataset.from_list(ROWS).save_to_disk(str(folder))
  return RowFile(folder / "data-00000-of-00001.arrow")


def as_arrow_file(folder):
  """Arrow as pandas and Polars write it, not as a stream."""
  table = pa.Table.from_pylist(ROWS)
  with pa.ipc.new_file(folder / "rows.arrow", table.schema) as sink:
    sink.write_table(table)
  return RowFile(folder / "rows.arrow")


def as_zip(folder):
  return zipped(folder, as_lines(folder).path)


def as_zipped_json(folder):
  return zipped(folder, as_json(folder).path)


def as_zipped_parquet(folder):
  return zipped(folder, as_parquet(folder).path)


def as_zipped_arrow(folder):
  return zipped(folder, as_arrow(folder).path)


def as_gzip(folder):
  return compressed(as_lines(folder).path)


def as_json_gzip(folder):
  return compressed(as_json(folder).path)


def compressed(path):
  packed = path.with_name(f"{path.name}.gz")
  packed.write_bytes(gzip.compress(path.read_bytes()))
  return RowFile(packed)


def zipped(folder, path):
  with zipfile.ZipFile(folder / "data.zip", "w") as archive:
    archive.write(path, f"data/{path.name}")
  return RowFile(folder / "data.zip", f"data/{path.name}")


LAYOUTS = [
  as_lines,
  as_json,
  as_marked_json,
  as_json_lines,
  as_parquet,
  as_arrow,
  as_arrow_file,
  as_zip,
  as_zipped_json,
  as_zipped_parquet,
  as_zipped_arrow,
  as_gzip,
  as_json_gzip,
]


@pytest.mark.parametrize("folder", ["plain", "a [1] * b"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_all_kinds_hold_the_same_rows(layout, folder, tmp_path):
  place = tmp_path / folder
  place.mkdir()
  file = layout(place)
  rows = list(file.rows())
  assert [dict(row.fields) for row in rows] == ROWS
  lines = layout in (as_lines, as_json_lines, as_zip, as_gzip)
  word = "Line" if lines else "Row"
  assert [row.place for row in rows] == [
    f"{word} {number} of {file}" for number in range(1, 6)
  ]


def test_groups_of_a_table_may_be_empty(tmp_path):
  table = pa.Table.from_pylist(ROWS)
  for name, groups in {"none": [0], "late": [0, 3, 0, 2]}.items():
    path, first = tmp_path / f"{name}.parquet", 0
    with pq.ParquetWriter(path, table.schema) as sink:
      for count in groups:
        sink.write_table(table.slice(first, count))
        first += count
    found = [dict(row.fields) for row in RowFile(path).rows()]
    assert found == ROWS[:first]


def test_what_a_set_says_of_itself_is_no_row(tmp_path):
  as_arrow(tmp_path)
  files = [file.path.name for file in find(tmp_path)]
  assert files == ["data-00000-of-00001.arrow"]
  assert (tmp_path / "dataset_info.json").exists()


@pytest.mark.parametrize(
  ("name", "content", "complaint"),
  [
    ("rows.json", b'[{"a": 1}, {"a": ', "is not valid JSON: Expecting value"),
    ("rows.parquet", b"PAR1 cut", "is no parquet file, or is cut short"),
    ("rows.arrow", b"", "is no arrow file, or is cut short"),
    ("rows.csv", b'a,b\n1,2\n"x', "is not valid CSV after line 2"),
    ("rows.csv", b"a,b\n\xff,2\n", "is not valid CSV after line 1"),
    ("rows.jsonl.gz", b"text", "cannot be read: Not a gzipped file"),
    (
      "rows.jsonl.gz",
      gzip.compress(b'{"a": 1}', mtime=0)[:-9],
      "cannot be read: Comp",
    ),
    ("rows.arrow", b"text", "is no arrow file, or is cut short"),
  ],
)
def test_a_broken_file_is_named_in_one_sentence(
  name, content, complaint, tmp_path, capfd
):
  (tmp_path / name).write_bytes(content)
  with pytest.raises(InputError, match=rf"{name} {complaint}") as caught:
    list(RowFile(tmp_path / name).rows())
  assert "\n" not in str(caught.value)
  assert capfd.readouterr() == ("", "")


def test_the_line_that_is_no_utf8_is_named_in_archives_too(tmp_path):
  (tmp_path / "rows.jsonl").write_bytes(b'{"a": 1}\n{"a": "\xff"}\n')
  plain = RowFile(tmp_path / "rows.jsonl")
  packed = (zipped(tmp_path, plain.path), compressed(plain.path))
  for file in (plain, *packed):
    with pytest.raises(InputError, match=r"^Line 2 of .* is not valid JSON"):
      list(file.rows())


@pytest.mark.parametrize(
  ("content", "wrong"),
  [
    ('[{"a": 1}, [2]]', r"^Row 2 of \S+rows\.json must hold a JSON object"),
    ('{"a": 1}\n{"a"', r"^Line 2 of \S+rows\.json is not valid JSON"),
    ('{"a": 1}\n[]', r"^Line 2 of \S+rows\.json must hold a JSON object"),
  ],
)
def test_the_row_of_a_json_file_that_is_wrong_is_named(
  content, wrong, tmp_path
):
  (tmp_path / "rows.json").write_text(content)
  with pytest.raises(InputError, match=wrong):
    list(RowFile(tmp_path / "rows.json").rows())


def test_what_json_says_is_not_taken_for_something_else(tmp_path):
  rows = [{"a": "2020-01-01"}, {"a": 7, "b": None}, {"a": ["2020-01-01"]}]
  (tmp_path / "rows.json").write_text(json.dumps(rows))
  (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
  for name in ("rows.json", "rows.jsonl"):
    found = RowFile(tmp_path / name).rows()
    assert [row.fields for row in found] == rows


def test_a_missing_file_is_named(tmp_path):
  with pytest.raises(InputError, match=r"none\.jsonl cannot be read"):
    list(RowFile(tmp_path / "none.jsonl").rows())


CSV_ROWS = [
  {
    "text": 'a "quoted",\ncell: Å\u2028',
    "digits": "007",
    "list": "['7', \"'\"]",
  },
  {"text": "", "digits": "12", "list": "one"},
]


@pytest.mark.parametrize("pack", [RowFile, compressed, None])
@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig"])
def test_cells_of_csv_are_texts_that_may_print_lists_and_numbers(
  encoding, pack, tmp_path
):
  path = tmp_path / "rows.csv"
  with path.open("w", encoding=encoding, newline="") as sink:
    writer = csv.DictWriter(sink, list(CSV_ROWS[0]))
    writer.writeheader()
    writer.writerows(CSV_ROWS)
  file = pack(path) if pack else zipped(tmp_path, path)
  first, second = file.rows()
  assert [first.fields, second.fields] == CSV_ROWS
  # The first line has the names, and the first row has two.
  assert first.place == f"Row 1 (line 3) of {file}"
  assert first.text("digits") == "007"
  assert first.number("digits") == 7
  assert first.texts("list") == ("7", "'")
  assert second.texts("list") == ("one",)
  with pytest.raises(InputError, match=r"^Row 2 \(line 4\) .* whole number un"):
    second.number("list")


@pytest.mark.parametrize("ending", ["\n", "\r\n", "\r"])
def test_line_endings_within_a_cell_stay_whatever_ends_the_rows(
  ending, tmp_path
):
  cells = {"a": "two\r\nlines", "b": "old\rMac\n"}
  with open(tmp_path / "rows.csv", "w", newline="") as sink:
    writer = csv.DictWriter(sink, list(cells), lineterminator=ending)
    writer.writeheader()
    writer.writerow(cells)
  (row,) = RowFile(tmp_path / "rows.csv").rows()
  assert row.fields == cells


@pytest.mark.parametrize("line", ["1", "1,2,3"])
def test_a_row_of_csv_with_other_fields_is_named(line, tmp_path):
  (tmp_path / "rows.csv").write_text(f'a,b\n1,"2\n"\n\n{line}\n')
  with pytest.raises(
    InputError, match=r"^Row 2 \(line 5\) of \S+rows\.csv must have 2 fi"
  ):
    list(RowFile(tmp_path / "rows.csv").rows())


@pytest.mark.parametrize(
  "items", [["a", "b"], ["it's", 'say "no"', "a, b"], ["7"], ["x" * 90, "y"]]
)
def test_lists_are_read_as_python_and_numpy_print_them(items):
  assert printed_list(str(items)) == tuple(items)
  assert printed_list(str(np.array(items, dtype=object))) == tuple(items)
  assert printed_list(str(np.array(items))) == tuple(items)


def test_what_no_list_is_remains_a_text():
  assert printed_list("[1, 2]") == ("1", "2")
  for text in ("", "[", "[a]", "[1] or [2]", "1, 2", "[f()]", "[1"):
    assert printed_list(text) is None


def test_files_of_rows_are_found_in_folders_and_zips(tmp_path):
  as_gzip(tmp_path)
  (tmp_path / "notes.txt.gz").touch()
  (tmp_path / "notes.md").touch()
  with zipfile.ZipFile(tmp_path / "other.zip", "w") as archive:
    archive.writestr("4096/b.parquet", b"")
    archive.writestr("4096/a.csv", b"")
    # `datasets` does not read these.
    archive.writestr("4096/a.csv.gz", b"")
    archive.writestr("readme.txt", b"")
    archive.writestr("__MACOSX/4096/._a.csv", b"")
  names = ["rows.jsonl", "rows.jsonl.gz"]
  assert [file.path.name for file in find(tmp_path)] == names
  members = ["4096/a.csv", "4096/b.parquet"]
  assert [f.member for f in find(tmp_path / "other.zip")] == members
  (tmp_path / "other.zip").rename(tmp_path / "data.zip")
  assert [f.member for f in find(tmp_path)] == [*members, "", ""]
  (tmp_path / "data.zip").write_text("text")
  with pytest.raises(InputError, match=r"data\.zip is no zip file"):
    find(tmp_path)


@pytest.mark.slow
def test_the_library_is_imported_for_rows_alone_and_copies_none(tmp_path):
  """Programs that read no data do not wait for it."""
  home = tmp_path / "home"
  home.mkdir()
  names = []
  for layout in (as_lines, as_parquet, as_arrow, as_zip):
    folder = tmp_path / layout.__name__
    folder.mkdir()
    file = layout(folder)
    names.append((str(file.path), file.member))
  code = (
    "import pathlib, sys, kvjax.experiments.evaluate\n"
    "from kvjax.experiments.benchmarks.row_files import RowFile\n"
    "assert not {'datasets', 'pyarrow', 'huggingface_hub'} & {*sys.modules}\n"
    f"for path, member in {names!r}:\n"
    "  assert len(list(RowFile(pathlib.Path(path), member).rows())) == 5\n"
    "assert 'datasets' in sys.modules"
  )
  done = subprocess.run(
    [sys.executable, "-W", "error", "-c", code],
    cwd=ROOT,
    env=os.environ | {"HF_HOME": str(home)},
    capture_output=True,
    text=True,
  )
  assert done.returncode == 0, done.stderr
  files = [path for path in home.rglob("*") if path.is_file()]
  assert sum(path.stat().st_size for path in files) == 0  # Locks.
