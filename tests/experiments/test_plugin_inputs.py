"""Methods in files of one's own, which --plugins names."""

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
