"""Mistakes in a file of --plugins end in one sentence."""

import sys
import types

import numpy as np
import pytest

import kvjax
from kvjax.experiments import cli
from kvjax.experiments.run import plugin_failures, plugin_files
from kvjax.registry.registry import METHODS
from kvjax.testing import TinyModel

METHOD = """
import dataclasses

import jax.numpy as jnp
import numpy as np

import kvjax


@dataclasses.dataclass(frozen=True)
class Mine(kvjax.methods.HeadwiseMethod):
  def score_head(self, head):
    return jnp.sum(head.values, axis=-1)


kvjax.register("mistaken", Mine)
"""
SCORE = "jnp.sum(head.values, axis=-1)"
HINT = (
  "; kvjax.testing checks methods and models, and --verbosity=0 shows the "
  "traceback."
)


@pytest.fixture
def failure(tmp_path):
  """Returns the error of a prefill with the method, one text replaced."""

  def run(old, new):
    assert METHOD.count(old) == 1
    path = tmp_path / "mine.py"
    path.write_text(METHOD.replace(old, new))
    model = TinyModel()

    def compress():
      plugin_files.load([str(path)])
      plan = kvjax.get_plan("mistaken", kvjax.Tokens(2))
      prompts = kvjax.Prompts.of([[1, 2, 3, 4]])
      kvjax.prefill(model, model.init(), prompts, plan)

    with pytest.raises(Exception) as caught:  # noqa: PT011
      compress()
    return caught.value

  before = plugin_files.modules()
  yield run
  METHODS._entries.pop("mistaken", None)
  for module in plugin_files.modules():
    if module not in before:
      del sys.modules[module.__name__]


@pytest.mark.parametrize(
  ("old", "new", "said"),
  [
    ("(self, head)", "(self)", "12, in score_head: TypeError: Mine.score_head"),
    (
      "head.values",
      "head.vals",
      "13, in score_head: AttributeError: 'Head' object has no attribute "
      "'vals'",
    ),
    (SCORE, "head.values @ head.values", "13, in score_head: TypeError: "),
    (
      SCORE,
      "np.zeros(3) + np.zeros(4)",
      "13, in score_head: ValueError: operands could not be broadcast",
    ),
    (
      "jnp.sum(",
      "jnp.summ(",
      "13, in score_head: AttributeError: module 'jax.numpy' has no",
    ),
    ("jnp.sum(", "sums(", "13, in score_head: NameError: name 'sums' is not"),
    (
      "import kvjax\n",
      "import kvjacks\n",
      "7, in <module>: ModuleNotFoundError: No module named 'kvjacks'",
    ),
  ],
  ids=["signature", "field", "jax", "numpy", "function", "name", "import"],
)
def test_an_error_is_told_with_its_place(failure, old, new, said):
  told = plugin_failures.sentence(failure(old, new))
  assert told.startswith(f"mine.py, line {said}")
  assert told.endswith(HINT)
  assert told.isprintable()


@pytest.mark.parametrize(
  ("new", "given"),
  [
    ("jnp.sum(head.values, axis=0)", r"float32 \(1, 2, 8\)"),
    (f'{SCORE}.astype("float16")', r"float16 \(1, 2, 32\)"),
  ],
  ids=["axis", "half"],
)
def test_wrong_scores_are_refused_by_what_is_wrong(failure, new, given):
  error = failure(SCORE, new)
  with pytest.raises(
    kvjax.InputError,
    match=r"^mistaken must give every slot a score in float32, \(1, 2, 32\) of "
    rf"them here, whatever the cache's dtype; it gives {given}\.",
  ):
    raise error


def test_an_error_in_what_a_file_imports_is_told(
  failure, tmp_path, monkeypatch
):
  (tmp_path / "sums_of_mine.py").write_text(
    "def sum(values, axis):\n  return values.vals\n"
  )
  monkeypatch.syspath_prepend(tmp_path)
  error = failure("import jax.numpy as jnp", "import sums_of_mine as jnp")
  told = plugin_failures.sentence(error)
  assert told.startswith("sums_of_mine.py, line 2, in sum: AttributeError")
  assert told.endswith(HINT)


def test_errors_that_pass_no_file_are_not_explained(failure):
  # There is a file with a method, and it is not the reason.
  failure("head.values", "head.vals")
  for call in (
    lambda: np.zeros(3) + np.zeros(4),
    lambda: kvjax.Tokens(),
    lambda: kvjax.methods.HeadwiseMethod.score_head(),
  ):
    with pytest.raises((TypeError, ValueError)) as caught:
      call()
    assert plugin_failures.sentence(caught.value) is None


@pytest.mark.parametrize("verbosity", [-1, 0])
def test_a_program_ends_with_the_sentence(
  failure, parsed, monkeypatch, caplog, capsys, verbosity
):
  error = failure("head.values", "head.vals")

  def main():
    cli.logging.set_verbosity(verbosity)
    raise error

  before = cli.logging.get_verbosity()
  monkeypatch.setattr(
    cli.app, "run", lambda guarded, flags_parser: guarded(["program"])
  )
  monkeypatch.setattr(cli.warnings, "formatwarning", None)
  monkeypatch.setattr(cli, "_cache_programs", lambda: None)
  no_plugins = types.SimpleNamespace(value=None)
  monkeypatch.setattr(cli.plugin_inputs, "PLUGINS", no_plugins)
  try:
    with pytest.raises(SystemExit) as stopped:
      cli.run(main)
  finally:
    cli.logging.set_verbosity(before)
  assert stopped.value.code == 2
  assert capsys.readouterr().err == f"{plugin_failures.sentence(error)}\n"
  shown = any("Traceback" in (r.exc_text or "") for r in caplog.records)
  assert shown == (verbosity == 0)
