"""Methods in files of one's own, which --plugins names."""

import pytest

import kvjax
from kvjax import InputError
from kvjax.experiments.inputs import plugin_inputs
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
    plugin_inputs.load([str(path)])

  yield run
  METHODS._entries.pop("oldest_of_a_file", None)


def test_its_name_is_known_with_its_options(tmp_path, load):
  # Not the module of Python's own that has this name.
  path = tmp_path / "json.py"
  path.write_text(METHOD)
  load(path)
  method = kvjax.get_method("oldest_of_a_file:sign=1.0")
  assert str(method) == "Oldest(sign=1.0)"


@pytest.mark.parametrize(
  ("name", "text", "said"),
  [
    ("none.py", None, "none.py is none"),
    ("text.txt", METHOD, "takes Python files"),
    ("empty.py", "import kvjax", "registers no method; call kvjax.register"),
  ],
  ids=["missing", "text", "empty"],
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
    *(f"--plugins={path}", "--methods=oldest_of_a_file", "--retention=2"),
  )
  assert compared.returncode == 2
  assert "oldest" not in compared.stderr
