"""Methods in files of one's own, which --plugins names."""

import importlib
import json
import re

import pytest

import kvjax
from kvjax import InputError
from kvjax.experiments.run import plugin_files
from kvjax.experiments.run.candidates import candidates
from kvjax.registry.registry import METHODS

METHOD = """
import dataclasses

import kvjax


@dataclasses.dataclass(frozen=True)
class Oldest(kvjax.methods.HeadwiseMethod):
  \"\"\"The first tokens.\"\"\"

  sign: float = -1.0

  def score_head(self, head):
    return self.sign * head.positions.astype("float32")


kvjax.register("oldest_of_a_file", Oldest, summary="the first tokens")
"""


@pytest.fixture
def load():
  def run(path):
    plugin_files.load([str(path)])

  yield run
  METHODS._entries.pop("oldest_of_a_file", None)


def test_its_name_is_known_with_its_options(tmp_path, load):
  # Not the module of Python's own that has this name.
  path = tmp_path / "json.py"
  path.write_text(METHOD)
  load(path)
  method = kvjax.get_method("oldest_of_a_file:sign=1.0")
  assert str(method) == "Oldest(sign=1.0)"


def test_answers_of_an_edited_file_are_others(tmp_path, load):
  path = tmp_path / "mine.py"

  def options():
    load(path)
    names = ["rerotate/oldest_of_a_file", "keydiff"]
    found = candidates(names, [kvjax.Retention(0.5)])
    return [candidate.options for candidate in found[1:]]

  path.write_text(METHOD)
  (first, keydiff), (again, _) = options(), options()
  METHODS._entries.pop("oldest_of_a_file")
  path.write_text(METHOD.replace("self.sign *", "2 * self.sign *"))
  edited, _ = options()
  assert first == again
  assert first != edited
  assert " of mine_" in first
  assert " of " not in keydiff


def test_answers_of_an_edited_helper_are_others(tmp_path, load, monkeypatch):
  monkeypatch.syspath_prepend(tmp_path)
  helpers = tmp_path / "signs_of_a_method"
  helpers.mkdir()
  (helpers / "__init__.py").write_text("from .all_signs import SIGN\n")
  (helpers / "all_signs.py").write_text("SIGN = -1.0\n")
  path = tmp_path / "mine.py"
  text = METHOD.replace("-1.0", "SIGN")
  path.write_text(f"from signs_of_a_method import SIGN\n{text}")

  def options():
    plugin_files.files_of.cache_clear()
    load(path)
    found = candidates(["oldest_of_a_file"], [kvjax.Retention(0.5)])
    return found[1].options

  first, again = options(), options()
  assert first == again
  assert " of mine_" in first
  assert " of signs_of_a_method.all_signs_" in first
  assert first.count(" of ") == 3
  (helpers / "all_signs.py").write_text("SIGN = 1.0\n")
  assert options() != first


def test_answers_of_an_installed_method_are_its_file_s(tmp_path, monkeypatch):
  monkeypatch.syspath_prepend(tmp_path)
  text = METHOD.replace("oldest_of_a_file", "oldest_of_a_package")
  (tmp_path / "package_of_a_method.py").write_text(text)
  importlib.import_module("package_of_a_method")
  found = candidates(["oldest_of_a_package"], [kvjax.Retention(0.5)])
  METHODS._entries.pop("oldest_of_a_package")
  assert " of package_of_a_method_" in found[1].options


@pytest.mark.parametrize(
  ("name", "text", "said"),
  [
    ("none.py", None, "none.py is none"),
    ("text.txt", METHOD, "takes Python files"),
    ("empty.py", "import kvjax", "registers no method; call kvjax.register"),
    ("broken.py", "import kvjax\nx = (", "is no Python: .*, line 2"),
  ],
  ids=["missing", "text", "empty", "broken"],
)
def test_what_registers_nothing_is_refused(tmp_path, load, name, text, said):
  path = tmp_path / name
  if text is not None:
    path.write_text(text)
  with pytest.raises(InputError, match=said):
    load(path)


def test_programs_take_it(tmp_path, run_binary):
  path = tmp_path / "mine.py"
  path.write_text(METHOD)
  shown = run_binary("kvjax.experiments.methods", f"--plugins={path}")
  assert "oldest_of_a_file" in shown.stdout
  compared = run_binary(
    "kvjax.experiments.compare",
    *(f"--plugins={path}", "--methods=oldest_of_a_file:power=2"),
  )
  assert compared.returncode == 2
  assert "sign" in compared.stderr


def test_hosts_meet_before_it_computes(tmp_path, run_binary, port):
  path = tmp_path / "mine.py"
  path.write_text(f"import jax.numpy as jnp\n\nONES = jnp.ones(3)\n{METHOD}")
  compared = run_binary(
    "kvjax.experiments.compare",
    *("--multihost", f"--coordinator=127.0.0.1:{port}"),
    *("--hosts=1", "--host=0", f"--plugins={path}"),
    "--methods=oldest_of_a_file:power=2",
  )
  assert compared.returncode == 2
  assert "sign" in compared.stderr


@pytest.mark.slow
def test_tables_have_the_answers_of_the_last_version_of_a_file(
  run_binary, tiny_directory, tmp_path
):
  path, folder = tmp_path / "mine.py", tmp_path / "out"

  def rows(*methods):
    done = run_binary(
      "kvjax.experiments.compare",
      *(f"--model={tiny_directory}", "--length=320", "--tasks=niah_single_1"),
      *(
        "--samples=3",
        "--retention=0.5,0.25",
        f"--methods={','.join(methods)}",
      ),
      *(f"--plugins={path}", f"--output={folder}"),
    )
    assert done.returncode == 0, done.stderr
    summary = json.loads((folder / "summary.json").read_text())
    return {(row["method"], row["options"]): row for row in summary["rows"]}

  path.write_text(METHOD)
  first = rows("oldest_of_a_file", "keydiff")
  path.write_text(METHOD.replace("self.sign *", "2 * self.sign *"))
  second = rows("oldest_of_a_file")
  assert first.keys() != second.keys()
  assert [name for name, _ in second] == ["full", "oldest_of_a_file", "keydiff"]
  assert {row["samples"] for row in second.values()} == {3}
  # An interval, too, where the last run had no answers.
  line, _ = re.findall(r"\| keydiff .*", (folder / "table.md").read_text())[:2]
  assert re.fullmatch(r"\| keydiff \|  (\| \d\S* (±|\()\S+ ){2}\|", line)
  # What was there before the edit, if that is undone.
  path.write_text(METHOD)
  assert rows("oldest_of_a_file").keys() == first.keys()
