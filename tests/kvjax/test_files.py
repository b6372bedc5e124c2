"""Files are written whole or not at all, and read within bounds."""

import ast
import contextlib
import os
import pathlib
import resource
import stat

import pytest

from kvjax import files
from kvjax.errors import InputError

ROOT = pathlib.Path(__file__).parents[2]


@contextlib.contextmanager
def full_disk(size):
  """A file that may not grow stands for a disk that is full."""
  limits = resource.getrlimit(resource.RLIMIT_FSIZE)
  resource.setrlimit(resource.RLIMIT_FSIZE, (size, limits[1]))
  try:
    yield
  finally:
    resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def names(folder):
  return sorted(path.name for path in folder.iterdir())


@pytest.mark.parametrize("before", [None, "what was there"])
@pytest.mark.parametrize("size", [0, 10, 4095])
def test_a_full_disk_leaves_what_was_there(tmp_path, before, size):
  path = tmp_path / "a.json"
  if before is not None:
    path.write_text(before)
  with (
    full_disk(size),
    pytest.raises(InputError, match=r"a\.json cannot be written: File too la"),
  ):
    files.write_text(path, "x" * 5000)
  assert names(tmp_path) == ([] if before is None else ["a.json"])
  assert before is None or path.read_text() == before
  files.write_text(path, "é\n")
  assert path.read_bytes() == "é\n".encode()
  assert names(tmp_path) == ["a.json"]


@pytest.mark.parametrize("error", [KeyboardInterrupt, ValueError])
def test_what_is_not_finished_leaves_what_was_there(tmp_path, error):
  path = tmp_path / "a.txt"
  path.write_text("before")

  def write_half():
    with files.replacing(path) as part:
      part.write_text("half")
      raise error

  with pytest.raises(error):
    write_half()
  assert path.read_text() == "before"
  assert names(tmp_path) == ["a.txt"]


def test_what_a_killed_program_leaves_is_in_nobodys_way(tmp_path):
  path = tmp_path / "a.txt"
  files.part_of(path).write_text("half of what a killed program wrote")
  files.write_text(path, "whole")
  assert path.read_text() == "whole"
  assert names(tmp_path) == ["a.txt"]


def test_a_link_stays_a_link(tmp_path):
  target, link = tmp_path / "target", tmp_path / "link"
  target.write_text("before")
  link.symlink_to("target")
  files.write_text(link, "after")
  assert link.is_symlink()
  assert target.read_text() == "after"
  new = tmp_path / "new"
  new.symlink_to("made")
  files.write_text(new, "made through it")
  assert (tmp_path / "made").read_text() == "made through it"


def test_files_are_for_whom_the_folders_other_files_are(tmp_path):
  (tmp_path / "other").touch()
  files.write_text(tmp_path / "a", "a")
  modes = {stat.S_IMODE(path.stat().st_mode) for path in tmp_path.iterdir()}
  assert len(modes) == 1


ODD = {
  "a folder": lambda path: path.mkdir(),
  "a loop": lambda path: path.symlink_to(path.name),
  "a pipe": os.mkfifo,
  "a device": lambda path: path.symlink_to("/dev/null"),
}


@pytest.mark.parametrize("kind", ODD)
def test_what_is_no_file_is_not_replaced(tmp_path, kind):
  """Else a program of root's with --output=/dev/null would remove that."""
  path = tmp_path / "odd"
  ODD[kind](path)
  before = path.lstat()
  for write in (files.write_bytes, files.append):
    with pytest.raises(InputError, match=r"odd cannot be written: (it i|I)s "):
      write(path, b"a")
  assert path.lstat().st_ino == before.st_ino
  assert pathlib.Path("/dev/null").is_char_device()


@pytest.mark.parametrize(
  ("name", "said"),
  [("no/a", "No such file"), ("file/a", "Not a dir"), ("x" * 300, "too long")],
)
def test_places_that_cannot_be_written(tmp_path, name, said):
  (tmp_path / "file").touch()
  for write in (files.write_bytes, files.append):
    with pytest.raises(InputError, match=f"cannot be written: .*{said}"):
      write(tmp_path / name, b"a")
  assert names(tmp_path) == ["file"]


def test_lines_are_appended_whole(tmp_path):
  path = tmp_path / "log"
  files.append(path, b"one\n")
  with (
    full_disk(9),
    pytest.raises(InputError, match="log cannot be written: F"),
  ):
    files.append(path, b"a longer one\n")
  assert path.read_bytes() == b"one\n"
  files.append(path, b"two\n")
  assert path.read_bytes() == b"one\ntwo\n"


@pytest.mark.parametrize(
  ("text", "said"),
  [
    ("", "Expecting value"),
    ("{", "Expecting property"),
    ("[" * 10**5, "nested too deeply"),
    ("9" * 5000, "4300 digits"),
    ('"\\ud800"', "surrogates not allowed"),
    ('{"\\uDFFF": 1}', "surrogates not allowed"),
    ("\ufeff{}", "BOM"),
  ],
)
def test_json_that_is_none(text, said):
  with pytest.raises(ValueError, match=said):
    files.parse_json(text)


def test_whole_pairs_are_characters():
  for text in ('"\\ud83d\\ude00"', '"😀"', '"\\\\ud800"'):
    files.parse_json(text)
    files.parse_json(text.encode())
  assert files.parse_json('"\\ud83d\\ude00"') == "😀"


# What may write by itself: the atomic functions; the lines that runs resume
# from; downloads, to a temporary folder of `kvjax.models.downloads`.
OWN = {
  *("kvjax/files.py", "experiments/run/line_files.py", "models/wheels.py"),
  # It resets a counter of the operating system, without kvjax at hand.
  "experiments/peers/serving.py",
}


def writes(tree):
  """Lines of methods that write a file, but for those of `kvjax.files`."""
  for node in ast.walk(tree):
    if not isinstance(node, ast.Call):
      continue
    given = [*node.args, *(word.value for word in node.keywords)]
    modes = [
      set(value.value)
      for value in given
      if isinstance(value, ast.Constant) and isinstance(value.value, str)
    ]
    name = getattr(node.func, "attr", getattr(node.func, "id", ""))
    opened = name == "open" and any(
      mode <= set("rwaxbt+") and mode & set("wax+") for mode in modes
    )
    of = getattr(getattr(node.func, "value", None), "id", "")
    direct = isinstance(node.func, ast.Attribute) and of not in (
      "files",
      "outputs",
    )
    if opened or (direct and name in ("write_text", "write_bytes", "touch")):
      yield node.lineno


def test_all_programs_write_through_the_atomic_functions():
  found = []
  for folder in ("kvjax", "models", "experiments"):
    for path in sorted((ROOT / folder).rglob("*.py")):
      name = path.relative_to(ROOT).as_posix()
      if name not in OWN:
        lines = writes(ast.parse(path.read_text(encoding="utf-8")))
        found += [f"{name}:{line}" for line in lines]
  # A file of weights is made within `files.replacing`.
  (weights,) = found
  assert weights.startswith("models/weights.py:")
