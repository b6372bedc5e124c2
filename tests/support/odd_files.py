"""What may stand in the place of a file, and what is said of it."""

import os

import pytest

from kvjax.errors import InputError


def refused(read, sentence):
  with pytest.raises(InputError, match=sentence) as caught:
    read()
  assert "\n" not in str(caught.value)
  assert str(caught.value).endswith(".")


# What stands in the place of a file, and what is said if text should be there.
ODD = {
  "a folder": (lambda path: path.mkdir(), "Is a directory"),
  "a loop": (lambda path: path.symlink_to(path.name), "Too many levels"),
  "no target": (lambda path: path.symlink_to("/no/such"), "No such file"),
  "a pipe": (os.mkfifo, "is a pipe or a device; give a regular file"),
  "zeros": (lambda path: path.symlink_to("/dev/zero"), "a pipe or a device"),
  "void": (lambda path: path.symlink_to("/dev/null"), "a pipe or a device"),
  "memory": (lambda path: path.symlink_to("/proc/self/mem"), "cannot be read"),
  "4 TiB": (
    lambda path: (path.touch(), os.truncate(path, 2**42)),
    "at most 2,147,483,648 are read at once",
  ),
  "Latin-1": (lambda path: path.write_bytes(b'{"\xe9": 1}\n'), "UTF-8"),
  "nothing": (lambda path: path.touch(), "not valid JSON"),
  "NULs": (lambda path: path.write_bytes(bytes(9) + b"\n"), "not valid JSON"),
  "a mark": (
    lambda path: path.write_bytes(b"\xef\xbb\xbf{}"),
    "not valid JSON",
  ),
  "depth": (lambda path: path.write_text("[" * 10**5 + "\n"), "too deeply"),
  "digits": (lambda path: path.write_text(f"{'9' * 5000}\n"), "4300 digits"),
  "half": (lambda path: path.write_text('"\\ud800"\n'), "surrogates not"),
  "a list": (lambda path: path.write_text("[]\n"), "must hold a JSON object"),
  "a number": (lambda path: path.write_text("1\n"), "must hold a JSON object"),
}

# That are no regular file of a moderate size, and that are no text either.
UNREAD = list(ODD)[:8]
UNDECODED = [*UNREAD, "Latin-1"]


def replace(path, kind):
  path.unlink(missing_ok=True)
  ODD[kind][0](path)
  return path
