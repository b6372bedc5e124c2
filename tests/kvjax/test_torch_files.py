"""Files of torch are read without running, trusting or inflating them."""

import collections
import pickle
import struct
import tracemalloc
import zipfile

import numpy as np
import pytest
from made_up_gates import torch_archive, torch_bytes

from kvjax.errors import InputError
from kvjax.methods import torch_files
from kvjax.methods.torch_files import read_torch

NUMBERS = np.arange(6, dtype=np.float32)
REBUILD = b"ctorch._utils\n_rebuild_tensor_v2\n"


class Dangerous:
  """What would run a command if it were unpickled."""

  def __reduce__(self):
    import os

    return os.mkdir, ("made by a pickle",)


def test_a_file_of_torch_calls_nothing(tmp_path, monkeypatch):
  monkeypatch.chdir(tmp_path)
  array = np.arange(12, dtype=np.float32).reshape(3, 4)
  content = {
    "module": [array.T, array[1:]],
    "more": (1, 2.5, "text", None),
    "dangerous": Dangerous(),
  }
  (tmp_path / "file.pt").write_bytes(torch_bytes(content))
  found = read_torch(tmp_path / "file.pt")
  assert found["more"] == content["more"]
  for read, written in zip(found["module"], content["module"], strict=True):
    np.testing.assert_array_equal(read, written)
  assert not (tmp_path / "made by a pickle").exists()


def number(n):
  return pickle.BININT + struct.pack("<i", n)


def numbers(*given):
  return b"(" + b"".join(map(number, given)) + b"t"


def text(content):
  return b"X" + struct.pack("<I", len(content)) + content.encode()


STORAGE = b"(%sctorch\nFloatStorage\n%s%s%stQ" % (
  text("storage"),
  text("0"),
  text("cpu"),
  number(6),
)


def tensor(storage, offset, size, stride):
  """Instructions that make a tensor."""
  return REBUILD + b"(" + storage + number(offset) + size + stride + b"tR"


def read(path, instructions):
  data = pickle.PROTO + b"\x02" + instructions + pickle.STOP
  path.write_bytes(torch_archive(data, [NUMBERS.tobytes()]))
  return read_torch(path)


def test_parts_of_a_storage_are_read(tmp_path):
  path = tmp_path / "file.pt"
  for offset, size, stride, expected in (
    (0, (2, 3), (3, 1), NUMBERS.reshape(2, 3)),
    (1, (2, 2), (1, 3), NUMBERS[1:].reshape(-1)[[[0, 3], [1, 4]]]),
    (5, (1,), (9,), NUMBERS[5:]),
    (2, (), (), NUMBERS[2]),
    (0, (3, 0), (0, 1), np.zeros((3, 0), np.float32)),
  ):
    code = tensor(STORAGE, offset, numbers(*size), numbers(*stride))
    np.testing.assert_array_equal(read(path, code), expected)


EMPTY = tensor(STORAGE, 0, numbers(99, 0), numbers(1, 1))


@pytest.mark.parametrize(
  ("instructions", "match"),
  [
    # One past the end, and what is repeated without end.
    (tensor(STORAGE, 3, numbers(2, 2), numbers(2, 1)), "larger than its"),
    (tensor(STORAGE, 0, numbers(4096, 4096), numbers(0, 0)), "larger than its"),
    (tensor(STORAGE, -1, numbers(2), numbers(1)), "no whole numbers"),
    (tensor(STORAGE, 0, numbers(2), numbers(-1)), "no whole numbers"),
    (tensor(STORAGE, 0, numbers(2), numbers()), "no whole numbers"),
    (tensor(STORAGE, 0, text("2"), numbers(1)), "no whole numbers"),
    (tensor(STORAGE, 0, b"]" + number(2) + b"a", numbers(1)), "no whole"),
    # A key within many tuples.
    (b"}" + numbers(1) + number(1) + b"s", "other keys than texts"),
    (b"}(" + numbers(1) + number(1) + b"u", "other keys than texts"),
    # Python 2's class instances, and the registry of extensions.
    (b"(ios\ngetcwd\n", "instruction that torch.save never"),
    (pickle.EXT1 + b"\x01", "instruction that torch.save never"),
  ],
)
def test_hostile_pickles_are_refused(instructions, match, tmp_path):
  with pytest.raises(InputError, match=match):
    read(tmp_path / "file.pt", instructions)


def test_a_tensor_is_no_storage(tmp_path):
  """An empty tensor has a length and no memory."""
  code = tensor(EMPTY, 0, numbers(9), numbers(1))
  assert not isinstance(read(tmp_path / "file.pt", code), np.ndarray)


def test_no_attribute_of_anything_is_set(tmp_path):
  state = b"N}" + text("__defaults__") + number(1) + b"\x85s\x86b"
  for name in (REBUILD, b"ccollections\nOrderedDict\n", b"cos\nsystem\n"):
    read(tmp_path / "file.pt", name + state)
  assert torch_files._tensor.__defaults__ is None
  assert not hasattr(torch_files._Ignored, "__defaults__")


def test_a_state_dictionary_with_metadata_is_read(tmp_path):
  weights = collections.OrderedDict(a=NUMBERS)
  weights._metadata = {"version": 1}
  (tmp_path / "file.pt").write_bytes(torch_bytes({"module": [weights]}))
  ((found,),) = read_torch(tmp_path / "file.pt").values()
  np.testing.assert_array_equal(found["a"], NUMBERS)


def test_the_highest_number_of_an_object_takes_no_memory(tmp_path):
  code = pickle.NONE + pickle.LONG_BINPUT + struct.pack("<I", 2**24)
  tracemalloc.start()
  try:
    assert read(tmp_path / "file.pt", code) is None
    assert tracemalloc.get_traced_memory()[1] < 2**20
  finally:
    tracemalloc.stop()


def test_a_file_takes_no_more_memory_than_its_size(tmp_path):
  path = tmp_path / "file.pt"
  for storages, compression, match in (
    ([b"0" * 2**20], zipfile.ZIP_DEFLATED, "it is compressed"),
    ([], zipfile.ZIP_STORED, "data.pkl is larger than"),
  ):
    data = b"\x80\x02N" + b"0N" * 2**21 + b"."
    path.write_bytes(torch_archive(data, storages, compression))
    with pytest.raises(InputError, match=match):
      read_torch(path)
  with zipfile.ZipFile(path, "w") as archive:
    archive.writestr("gate/data.pkl", b"\x80\x02N.")
    archive.writestr("gate/data/0", b"0000")
    for entry in archive.filelist:
      entry.file_size = entry.compress_size = 300
  with pytest.raises(InputError, match="entries are larger than the file"):
    read_torch(path)
