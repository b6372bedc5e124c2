"""Programs that fetch the same model: one waits, one is killed."""

import contextlib
import pathlib
import select
import subprocess
import sys

import pytest

_FETCH_SLOWLY = """
import hashlib, pathlib, sys
from kvjax.models import downloads

content = b"content"
sha256 = hashlib.sha256(content).hexdigest()
file = downloads.ModelFile("a", len(content), sha256)

class Slow:
  label, license, files = "slow", "Toy License", (file,)
  nbytes = nbytes_needed = 7

  def download(self, place, folder):
    print(place, flush=True)
    sys.stdin.readline()
    assert place.is_dir()
    (place / "a").write_bytes(content)

downloads.fetch(Slow(), pathlib.Path(sys.argv[1]))
print("done", flush=True)
"""


@contextlib.contextmanager
def _fetching(folder):
  """A program that fetches a model when it reads a line."""
  with subprocess.Popen(
    [sys.executable, "-c", _FETCH_SLOWLY, folder],
    stdin=subprocess.PIPE,
    stdout=subprocess.PIPE,
    stderr=subprocess.DEVNULL,
    text=True,
  ) as process:
    try:
      yield process
    finally:
      process.kill()


@pytest.mark.slow
def test_what_a_killed_program_leaves_is_removed(tmp_path):
  """By the next one, which waits for one that is alive."""
  folder, other = tmp_path / "toy", tmp_path / "toy.bf16"
  other.mkdir()
  with _fetching(folder) as killed:
    left = pathlib.Path(killed.stdout.readline().strip())
    assert left.parent == tmp_path
    killed.kill()
    killed.wait()
  assert left.is_dir()
  with _fetching(folder) as alive:
    mine = pathlib.Path(alive.stdout.readline().strip())
    assert not left.exists()
    with _fetching(folder) as waiting:
      # It would say where it fetches to, if it did not wait.
      assert not select.select([waiting.stdout], [], [], 3.0)[0]
      assert mine.is_dir()
      alive.communicate("go\n")
      assert waiting.stdout.readline() == "done\n"
  assert sorted(path.name for path in tmp_path.iterdir()) == ["toy", "toy.bf16"]
