"""What is installed: a package and its command, which take nobody's names."""

import importlib.metadata
import importlib.util
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile

import pytest

import kvjax

ROOT = pathlib.Path(__file__).parents[1]
LINKS = ("kernels", "models", "experiments")


@pytest.fixture(scope="module")
def archives(tmp_path_factory):
  """The wheel and the source archive, built without a network."""
  folder = tmp_path_factory.mktemp("dist")
  subprocess.run(
    [sys.executable, "-m", "hatchling", "build", "-d", folder],
    cwd=ROOT,
    check=True,
    capture_output=True,
    env=os.environ | {"PYTHONDONTWRITEBYTECODE": "1"},
  )
  (wheel,) = folder.glob("*.whl")
  (source,) = folder.glob("*.tar.gz")
  return wheel, source


def test_a_wheel_holds_one_package_and_its_command(archives):
  names = zipfile.ZipFile(archives[0]).namelist()
  assert len(names) == len({*names})
  folders = {name.partition("/")[0] for name in names}
  record = f"kvjax-{kvjax.__version__}.dist-info"
  assert folders == {"kvjax", "kvjax_command.py", record}
  assert "kvjax/py.typed" in names
  assert "kvjax/models/reference/model.safetensors" in names
  assert "kvjax/kernels/tuning.json" in names
  modules = {
    path.relative_to(ROOT).as_posix()
    for folder in LINKS
    for path in (ROOT / folder).rglob("*.py")
  }
  assert modules
  assert {f"kvjax/{name}" for name in modules} <= {*names}


def test_a_source_archive_holds_folders_in_place_of_links(archives):
  with tarfile.open(archives[1]) as archive:
    members = archive.getmembers()
  names = [member.name.partition("/")[2] for member in members]
  assert len(names) == len({*names})
  assert not [m.name for m in members if m.issym() or m.islnk()]
  for folder in LINKS:
    assert f"kvjax/{folder}/__init__.py" in names
    assert not [name for name in names if name.startswith(f"{folder}/")]
  assert {"CONTRIBUTING.md", "README.md", "LICENSE", "Makefile"} <= {*names}


_LOAD = """
import sys
import kvjax
late = {"kvjax.models", "kvjax.testing", "flax", "optax", "tokenizers"}
late |= {"rich", "jinja2"}
assert not late & {*sys.modules}
load = kvjax.load
assert load is kvjax.models.load
assert kvjax.testing.check_method
try:
  kvjax.lode
except AttributeError as error:
  print(error)
"""


def test_models_are_imported_when_one_is_loaded():
  done = subprocess.run(
    [sys.executable, "-c", _LOAD], capture_output=True, text=True
  )
  assert done.returncode == 0, done.stderr
  assert done.stdout == "module 'kvjax' has no attribute 'lode'\n"


_TRY = """
import kernels, models, sys
assert kernels.get_kernel and kernels.__file__.startswith(sys.argv[1])
assert models.OWNER == "the user", models.__file__
import kvjax, kvjax.models, kvjax.kernels.attention
assert kvjax.__file__.startswith(sys.argv[1]), kvjax.__file__
assert kvjax.models.__file__.startswith(sys.argv[1])
assert kernels is sys.modules["kernels"] and models is sys.modules["models"]
assert "experiments" not in sys.modules
from importlib.metadata import entry_points
(command,) = entry_points(group="console_scripts", name="kvjax")
assert command.load().__module__ == "kvjax_command"
print(kvjax.__version__)
"""


def install(site, *what):
  pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps"]
  subprocess.run(
    [*pip, "--no-compile", "--target", site, *what],
    check=True,
    env=os.environ | {"PIP_DISABLE_PIP_VERSION_CHECK": "1"},
  )


def write_package(folder, text):
  folder.mkdir(parents=True)
  (folder / "__init__.py").write_text(text)


@pytest.mark.parametrize(
  "real", [False, pytest.param(True, marks=pytest.mark.slow)]
)
def test_what_is_installed_leaves_other_names_alone(archives, tmp_path, real):
  """Hugging Face's `kernels` beside it, and the user's own folder `models`.

  Its own wheel, which needs a network, or a package of that name.
  """
  site, work = tmp_path / "site", tmp_path / "work"
  install(site, "--no-index", archives[0])
  if real:
    install(site, "kernels==0.17.2")
  else:
    write_package(site / "kernels", "get_kernel = True\n")
  write_package(work / "models", "OWNER = 'the user'\n")
  done = subprocess.run(
    [sys.executable, "-c", _TRY, str(site)],
    cwd=work,
    env=os.environ | {"PYTHONPATH": str(site)},
    capture_output=True,
    text=True,
  )
  assert done.returncode == 0, done.stderr
  assert done.stdout.strip() == kvjax.__version__


@pytest.mark.slow
def test_the_readme_runs_where_only_the_wheel_is_installed(archives, tmp_path):
  """In an environment of its own, outside of the checkout."""
  environment, work = tmp_path / "environment", tmp_path / "work"
  subprocess.run([sys.executable, "-m", "venv", environment], check=True)
  python = environment / "bin" / "python"
  pip = [python, "-m", "pip", "install", "--quiet", "--no-compile"]
  subprocess.run([*pip, archives[0]], check=True)
  (code,) = re.findall(
    r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL
  )
  (work / "docs").mkdir(parents=True)
  shutil.copy(ROOT / "docs" / "notes.txt", work / "docs")
  done = subprocess.run(
    [python, "-c", code], cwd=work, capture_output=True, text=True
  )
  assert done.returncode == 0, done.stderr
  assert "4817" in done.stdout
  listed = subprocess.run(
    [environment / "bin" / "kvjax"], cwd=work, capture_output=True, text=True
  )
  assert listed.returncode == 0, listed.stderr
  assert "show_kept" in listed.stdout


def test_links_work_where_the_tree_itself_is_installed():
  for folder in LINKS:
    spec = importlib.util.find_spec(f"kvjax.{folder}")
    origin = pathlib.Path(spec.origin).resolve()
    assert origin == ROOT / folder / "__init__.py"


def test_the_version_is_that_of_the_package():
  assert kvjax.__version__ == importlib.metadata.version("kvjax")


def test_the_public_interface_is_all_that_shows():
  """Whatever has been imported, as submodules become attributes."""
  import kvjax.checkpoint.saving
  import kvjax.experiments
  import kvjax.testing

  shown = dir(kvjax)
  assert shown == sorted(shown)
  assert {"prefill", "register", "LayerSpec", "__version__"} <= {*shown}
  modules = {n for n in shown if isinstance(getattr(kvjax, n), type(kvjax))}
  late = {"models", "testing"}
  assert modules == {"allocation", "methods", "retrieval"} | late
  private = [n for n in shown if n.startswith("_") and n != "__version__"]
  assert not private
  for hidden in ("checkpoint", "engine", "experiments", "importlib", "types"):
    assert hidden not in shown


def test_programs_do_not_wait_for_what_few_of_them_need():
  """Orbax saves caches, Matplotlib draws, and SciPy factorizes matrices.

  Jinja writes HTML, and renders the chats of models in a process of its own.

  SciPy's OpenBLAS reads how many threads it may have when it is loaded, which
  must be after programs have said so.
  """
  code = "import sys, kvjax.experiments.compare; print(*sys.modules)"
  modules = subprocess.run(
    [sys.executable, "-c", code],
    cwd=ROOT,
    check=True,
    capture_output=True,
    text=True,
  ).stdout.split()
  assert "jax" in modules
  late = {"orbax", "matplotlib", "scipy.linalg", "pandas", "datasets", "jinja2"}
  assert not late & {*modules}
