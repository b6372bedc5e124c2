"""Programs run models of families that --plugins register."""

import re
import shutil

import numpy as np
import pytest

from kvjax.experiments.reference import vocabulary
from kvjax.testing import TinyModel

FAMILY = """
import jax.numpy as jnp
import numpy as np

import kvjax
from kvjax.testing import TinyModel


def load_tiny(directory, dtype, mesh):
  model = TinyModel(dtype=dtype, vocab_size=VOCABULARY)
  weights = np.load(directory / "embedding.npy")
  params = model.init()
  return model, params | {"embedding": jnp.asarray(weights, dtype)}


kvjax.models.register("tiny_of_a_file", load_tiny)
"""
LINE = ["--length=480", "--samples=1", "--batch=2", "--retention=0.5"]


@pytest.fixture
def files(tmp_path, tiny_directory):
  """A model of the family, and the file that registers it."""
  directory = tmp_path / "model"
  directory.mkdir()
  (directory / "config.json").write_text('{"model_type": "tiny_of_a_file"}')
  for name in ("tokenizer.json", "tokenizer_config.json"):
    shutil.copy(tiny_directory / name, directory)
  params = TinyModel(vocab_size=vocabulary.SIZE).init()
  np.save(directory / "embedding.npy", params["embedding"])
  plugin = tmp_path / "tiny.py"
  plugin.write_text(FAMILY.replace("VOCABULARY", str(vocabulary.SIZE)))
  return directory, plugin


def test_compare_runs_it_and_tells_changed_ones_apart(
  run_binary, refusal, files, tmp_path
):
  directory, plugin = files
  line = [
    "kvjax.experiments.compare",
    f"--model={directory}",
    f"--plugins={plugin}",
    "--methods=full,keydiff",
    "--tasks=niah_single_1",
    f"--output={tmp_path / 'results'}",
    *LINE,
  ]
  done = run_binary(*line)
  assert done.returncode == 0, done.stderr
  again = run_binary(*line)
  assert again.returncode == 0, again.stderr
  embedding = np.load(directory / "embedding.npy")
  np.save(directory / "embedding.npy", -embedding)
  assert "weights" in refusal(*line)
  np.save(directory / "embedding.npy", embedding)
  assert run_binary(*line).returncode == 0
  plugin.write_text(plugin.read_text().replace("model.init()", "model.init(1)"))
  assert "weights" in refusal(*line)


def test_without_the_file_it_is_unknown(refusal, files, tmp_path):
  directory, _ = files
  said = refusal(
    "kvjax.experiments.compare",
    f"--model={directory}",
    f"--output={tmp_path / 'results'}",
    *LINE,
  )
  assert re.search("model_type 'tiny_of_a_file'.*not supported", said)


def test_errors_of_the_file_are_named(refusal, files, tmp_path):
  directory, plugin = files
  line = [
    "kvjax.experiments.compare",
    f"--model={directory}",
    f"--plugins={plugin}",
    f"--output={tmp_path / 'results'}",
    *LINE,
  ]
  (directory / "embedding.npy").unlink()
  assert "embedding.npy" in refusal(*line)
  text = plugin.read_text()
  plugin.write_text(text.replace("model = ", "exit('No.') or "))
  assert "tiny.py, line 10, in load_tiny: SystemExit: No; kvjax" in refusal(
    *line
  )
  plugin.write_text(f"{text}exit(3)\n")
  assert "in <module>: SystemExit: 3; kvjax" in refusal(*line)


def test_what_needs_a_family_of_ours_says_so(refusal, files):
  directory, plugin = files
  flags = [f"--model={directory}", f"--plugins={plugin}"]
  said = refusal("kvjax.experiments.plan", *flags)
  assert "is a model of another package" in said


@pytest.mark.slow
def test_other_programs_run_it(run_binary, files, tmp_path):
  directory, plugin = files
  model = [f"--model={directory}", f"--plugins={plugin}"]
  documents = tmp_path / "documents"
  documents.mkdir()
  (documents / "text.txt").write_text(
    "The code of the door is 4817. Tea is at five. " * 200
  )
  for module, *flags in (
    ("evaluate", "--benchmark=passkey", "--methods=keydiff", *LINE),
    ("benchmark_decode", "--length=128", "--tokens=4", "--methods=keydiff"),
    ("reproduce", "E2.8", "--length=480", "--samples=1"),
    ("calibrate_queries", f"--documents={documents}", "--length=64"),
    ("show_kept", "--methods=keydiff", "--retention=0.5"),
    (
      "train_gate",
      f"--documents={documents}",
      "--length=64",
      "--epochs=1",
      "--samples=4",
    ),
  ):
    output = tmp_path / module
    output.mkdir()
    done = run_binary(
      f"kvjax.experiments.{module}",
      *model,
      *flags,
      f"--output={output / 'results'}",
    )
    assert done.returncode == 0, (module, done.stderr)
