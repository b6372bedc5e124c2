"""What the README shows is so."""

import json
import pathlib
import re
import shutil

import pytest
import safetensors.numpy

import kvjax
from kvjax.models import catalog
from kvjax.registry.registry import METHODS, RETRIEVALS

ROOT = pathlib.Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")


CODE = re.findall(r"```python\n(.*?)```", README, re.DOTALL)


def test_the_interface_takes_twelve_lines():
  lines = [line for line in CODE[0].splitlines() if line]
  assert len(lines) == 12


def _keep_layers(folder, count):
  """Leaves the first layers of a model; all of them compile alike."""
  config = folder / "config.json"
  fields = json.loads(config.read_text()) | {"num_hidden_layers": count}
  config.write_text(json.dumps(fields))
  path = folder / "model.safetensors"
  kept = {
    name: weight
    for name, weight in safetensors.numpy.load_file(path).items()
    if not (layer := re.search(r"layers\.(\d+)", name)) or int(layer[1]) < count
  }
  safetensors.numpy.save_file(kept, path, {"format": "pt"})


@pytest.mark.filterwarnings("ignore:unclosed file:ResourceWarning")
# The record was measured on longer contexts.
@pytest.mark.filterwarnings("ignore::kvjax.InputWarning")
def test_the_code_runs(tmp_path, monkeypatch, capsys):
  monkeypatch.chdir(tmp_path)
  (tmp_path / "notes.txt").write_text("The sky is blue. Ann called.\n" * 20)
  shutil.copytree(ROOT / "models" / "reference", "models/reference")
  # A small model stands in for the one that is fetched.
  monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
  name = "smollm2-135m-instruct"
  fetched = tmp_path / "cache" / "kvjax" / "models" / name
  shutil.copytree(ROOT / "models" / "reference", fetched)
  assert name in catalog.NAMED
  monkeypatch.setattr(catalog, "fetch", lambda source, folder: None)
  _keep_layers(fetched, 2)
  names = {}
  for code in CODE:
    exec(code, names)
  printed = capsys.readouterr().out
  assert printed.index("KeyDiff(") < printed.index("SnapKV(")
  assert len(names["answers"].rows()) == 1


def test_the_tables_list_every_method_as_it_is_registered():
  """Those of this package: tests may have registered others."""
  tables = re.findall(r"^\| Name .*\n.*\n((?:\|.*\n)+)", README, re.MULTILINE)
  assert len(tables) == 2
  for table, names in zip(tables, (METHODS, RETRIEVALS), strict=True):
    rows = [
      tuple(cell.strip() for cell in line.split("|")[1:-1])
      for line in table.splitlines()
    ]
    own = ("kvjax.methods.", "kvjax.registry.eviction", "kvjax.retrieval.")
    assert rows == [
      (f"`{name}`", entry.summary, entry.paper)
      for name, entry in names.items()
      if entry.make.__module__.startswith(own)
    ]
    assert all(summary for _, summary, _ in rows)


def test_methods_that_commands_name_exist():
  for names in re.findall(r"--methods=(\S+)", README):
    for name in names.split(","):
      kvjax.get_plan(name, kvjax.Retention(0.5))


def test_linked_files_exist():
  for target in re.findall(r"\]\(([^)]+)\)", README):
    assert (ROOT / target).exists(), target
