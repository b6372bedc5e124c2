"""What lookups miss: measured by hand, and through the binary."""

import json
import re

import jax
import numpy as np
import pytest
import tokenizers

import kvjax
from kvjax.engine.forward import hidden_states
from kvjax.experiments.run import retrieval_quality
from kvjax.testing import TinyModel

MODEL = TinyModel()
PARAMS = MODEL.init()
RNG = np.random.default_rng(0)
PROMPTS = kvjax.Prompts.of([RNG.permutation(64)[:n].tolist() for n in (60, 50)])
FEW = kvjax.Tokens(6)


def measure(prompts):
  names = [
    "flat:sinks=2:local=4",
    "ctkvr:sinks=2:local=4:probes=1:centroids=2",
    "ctkvr:sinks=2:local=4:probes=3:centroids=3:list_ratio=20:dense_layers=0",
  ]
  plans = [kvjax.get_plan(name, FEW) for name in names]
  return retrieval_quality.measure(MODEL, PARAMS, prompts, plans, 5)


@pytest.fixture(scope="module")
def measured():
  return measure(PROMPTS)


@pytest.mark.slow
def test_exact_search_misses_nothing_and_reads_what_it_may(measured):
  flat = measured[0][0]
  # Of two layers, for two rows each.
  assert [quality.recall.tolist() for quality in flat] == [[1.0, 1.0]] * 2
  # 2 + 4 resident ones, 6 retrieved, and 1 to 5 decoded.
  assert [quality.read.tolist() for quality in flat] == [[15.0, 15.0]] * 2


@pytest.mark.slow
def test_more_centroids_miss_less(measured):
  found, _ = measured
  few, all_lists = found[1], found[2]
  assert np.all(few[1].recall < 1.0)
  assert np.all(all_lists[1].recall == 1.0)
  assert np.all(few[1].error > found[0][1].error)
  assert np.all(found[0][1].error > 0)
  np.testing.assert_allclose(all_lists[1].error, found[0][1].error, rtol=1e-5)


@pytest.mark.slow
def test_layers_without_an_index_are_left_out(measured):
  found, _ = measured
  assert found[2][0] is None
  for mean, only in zip(
    retrieval_quality.mean(found[2]), found[2][1], strict=True
  ):
    np.testing.assert_array_equal(mean, only)


@pytest.mark.slow
def test_each_row_is_measured_as_if_alone(measured):
  for row in range(2):
    alone = kvjax.Prompts.of(
      [np.asarray(PROMPTS.tokens[row][: PROMPTS.lengths[row]]).tolist()]
    )
    layers = zip(measured[0], measure(alone)[0], strict=True)
    for together, own in layers:
      assert [layer is None for layer in together] == [q is None for q in own]
      for one, other in zip(together, own, strict=True):
        for value, expected in zip(one or (), other or (), strict=True):
          np.testing.assert_allclose(value[row], expected[0], rtol=1e-4)


@pytest.mark.slow
def test_cosines_are_those_of_neighboring_queries(measured):
  """Decoded once more, token by token."""
  _, cosines = measured
  plan = kvjax.get_plan("full", kvjax.Retention(1.0))
  cache, logits = kvjax.prefill(MODEL, PARAMS, PROMPTS, plan)
  answers = kvjax.generate(
    MODEL, PARAMS, cache, logits, kvjax.Decoding(5)
  ).rows()
  seen = []

  def attend(layer, state, block):
    seen.append(block.queries)
    return kvjax.LayerCache.of(block).attend(block)[0], state

  rows = [
    [*np.asarray(PROMPTS.tokens[row][:n]), *answers[row]]
    for row, n in enumerate(PROMPTS.lengths)
  ]
  whole = kvjax.Prompts.of([[int(t) for t in row] for row in rows])
  places = np.arange(whole.tokens.shape[1])[None]
  positions = np.where(places < np.asarray(whole.lengths)[:, None], places, -1)

  @jax.jit
  def queries_of(params, tokens, positions):
    hidden_states(MODEL, params, tokens, positions, (None, None), attend)
    return seen

  at = positions.astype(np.int32)
  for layer, queries in enumerate(queries_of(PARAMS, whole.tokens, at)):
    queries = np.array(queries, np.float64)
    found = []
    for row, n in enumerate(np.asarray(PROMPTS.lengths)):
      own = queries[row, :, n : n + 5]
      own /= np.linalg.norm(own, axis=-1, keepdims=True)
      found.append((own[:, 1:] * own[:, :-1]).sum(axis=-1).mean())
    np.testing.assert_allclose(cosines[layer], np.mean(found), atol=1e-5)


@pytest.mark.slow
def test_an_interrupted_run_resumes(
  run_binary, refusal, tiny_directory, tmp_path
):
  program = "kvjax.experiments.retrieval_recall"
  given = (
    *(f"--model={tiny_directory}", "--methods=flat,ctkvr", "--budget=20"),
    *("--tasks=niah_single_2", "--samples=3", "--batch=1", "--length=256"),
  )

  def summary(folder):
    done = run_binary(program, *given, "--steps=2", f"--output={folder}")
    assert done.returncode == 0, done.stderr
    return (folder / "summary.json").read_text()

  one, two = tmp_path / "one", tmp_path / "two"
  expected = summary(one)
  lines = (one / "batches.jsonl").read_text().splitlines(keepends=True)
  assert len(lines) == 3
  two.mkdir()
  # A batch that the rest shows to be read, not measured again.
  changed = json.loads(lines[1])
  changed["qualities"][0][2] = [changed["qualities"][0][2][0] + 30]
  (two / "batches.jsonl").write_text(
    lines[0] + json.dumps(changed) + "\n" + lines[2][:100]
  )
  found, expected = map(json.loads, (summary(two), expected))
  assert found["rows"][0]["read"] == expected["rows"][0]["read"] + 10
  assert found["rows"][1] == expected["rows"][1]
  told = refusal(program, *given, "--steps=4", f"--output={two}")
  assert "holds measurements with steps 2, and this run has steps 4" in told


@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["", "file://"], ids=["path", "address"])
def test_the_binary_prints_and_writes_a_table(
  run_binary, tiny_directory, tmp_path, scheme
):
  folder = tmp_path / "out"
  done = run_binary(
    "kvjax.experiments.retrieval_recall",
    f"--model={tiny_directory}",
    "--methods=flat,ctkvr",
    "--seed=5",
    "--budget=20",
    "--tasks=niah_single_2",
    "--samples=2",
    "--batch=2",
    "--length=256",
    "--steps=2",
    f"--output={scheme}{folder}",
  )
  assert done.returncode == 0, done.stderr
  assert re.search(r"flat +20 tokens +100\.0 \(100\.0–100\.0\) ", done.stdout)
  summary = json.loads((folder / "summary.json").read_text())
  assert [row["method"] for row in summary["rows"]] == ["flat", "ctkvr"]
  assert "seed=5" in summary["rows"][1]["options"]
  assert summary["rows"][0]["recall"] == 1.0
  written = (folder / "table.md").read_text()
  assert "| flat | 20 tokens | 100.0 (100.0–100.0) |" in written
  low, high = summary["rows"][1]["intervals"]["error"]
  assert low < summary["rows"][1]["error"] < high
  # Packages, and nothing else that a summary has.
  versions = written.replace("\n", " ").partition("; python ")[2]
  assert versions.rstrip().endswith(f"{tokenizers.__version__}.")
  assert "rows" not in versions


@pytest.mark.slow
@pytest.mark.parametrize(
  ("arguments", "budgets"),
  [([], ["512 tokens", "128 tokens"]), (["--retention=0.5"], ["0.5"])],
)
def test_a_token_reads_a_fixed_number_of_keys_unless_a_share_is_asked_for(
  run_binary, tmp_path, arguments, budgets
):
  done = run_binary(
    "kvjax.experiments.retrieval_recall",
    *("--model=reference", "--methods=flat", "--tasks=niah_single_2"),
    *("--samples=1", "--steps=2", f"--output={tmp_path}", *arguments),
  )
  assert done.returncode == 0, done.stderr
  rows = json.loads((tmp_path / "summary.json").read_text())["rows"]
  assert [row["budget"] for row in rows] == budgets


@pytest.mark.parametrize(
  ("arguments", "sentence"),
  [
    (["--methods=keydiff"], "None of --methods looks anything up; retrieval"),
    (["--methods=ctkrv"], "There is no method 'ctkrv' (did you mean ctkvr"),
    (["--budget=64", "--retention=0.5"], "--retention and --budget do not go"),
    (["--budget=0"], "A budget of 0 tokens keeps nothing; give 1 or more."),
    (
      ["--methods=quest:dense_layers=0+1", "--length=320", "--samples=1"],
      "A method has an index in none of the layers",
    ),
    (["--steps=9000", "--length=320", "--samples=1"], "answer (up to 9000) "),
  ],
)
def test_what_is_wrong_is_one_sentence(
  refusal, tiny_directory, tmp_path, arguments, sentence
):
  output = tmp_path / "out"
  told = refusal(
    "kvjax.experiments.retrieval_recall",
    f"--model={tiny_directory}",
    f"--output={output}",
    *arguments,
  )
  assert sentence in told
  assert not output.exists()
