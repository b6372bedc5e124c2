"""The program that measures queries: its file, and what it refuses."""

import numpy as np
import pytest
import safetensors.numpy

import kvjax
from kvjax.experiments.main import PROGRAMS

MODULE = "kvjax.experiments.calibrate_queries"


@pytest.fixture
def folder(tmp_path):
  documents = tmp_path / "documents"
  documents.mkdir()
  for name, times in (("a.txt", 40), ("b.md", 3)):
    text = f"The file {name} has been read, and so have the others. "
    (documents / name).write_text(text * times, encoding="utf-8")
  return documents


def test_the_file_is_that_of_the_longest_chunks(
  tiny, tiny_directory, run_binary, folder, tmp_path
):
  output = tmp_path / "results" / "queries.safetensors"
  done = run_binary(
    MODULE,
    f"--model={tiny_directory}",
    f"--documents={folder}",
    "--length=64",
    "--samples=2",
    f"--output={output}",
  )
  assert done.returncode == 0, done.stderr
  assert str(output) in done.stdout
  arrays = safetensors.numpy.load_file(output)
  spec, layers = tiny.model.geometry.layers[0], len(tiny.model.geometry.layers)
  shapes = {name: array.shape for name, array in arrays.items()}
  assert shapes == {
    "query_mean": (layers, spec.heads, spec.key_dim),
    "query_cov": (layers, spec.heads, spec.key_dim, spec.key_dim),
    "q_filters": (layers, spec.kv_heads, spec.key_dim),
    "query_abs": (layers, spec.heads, spec.key_dim),
  }
  assert np.abs(arrays["query_cov"]).max() > 0
  prompts = kvjax.Prompts.of([list(range(3, 40))])
  for name in (
    "qfilters:filters",
    "expected_attention:statistics",
    "triattention:statistics",
  ):
    plan = kvjax.get_plan(f"{name}={output}", kvjax.Tokens(9))
    cache, _ = kvjax.prefill(tiny.model, tiny.params, prompts, plan)
    assert cache.lengths.max() == 9


@pytest.mark.parametrize(
  ("arguments", "sentence"),
  [
    ([], "Name a folder"),
    (["--documents=nowhere"], "nowhere is no folder"),
    (["--documents=.", "--output=a:b"], "without colons and commas"),
  ],
)
def test_what_is_wrong_is_one_sentence(refusal, arguments, sentence):
  assert sentence in refusal(MODULE, *arguments)


def test_it_is_a_program():
  assert MODULE.rpartition(".")[2] in PROGRAMS
