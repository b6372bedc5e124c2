"""Names of modules that a reader could take for one another."""

import pathlib

ROOT = pathlib.Path(__file__).parents[2] / "experiments"
FOLDERS = [path.parent for path in ROOT.rglob("__init__.py")]
MODULES = [*FOLDERS, *(path.with_suffix("") for path in ROOT.rglob("*.py"))]


def test_no_module_is_named_as_a_folder_at_the_top():
  top = {path.name for path in FOLDERS if path.parent == ROOT}
  assert "report" in top
  below = {path.name for path in MODULES if path.parent != ROOT}
  assert not top & below
