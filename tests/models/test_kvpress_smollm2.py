"""SmolLM2-135M-Instruct keeps and answers what it does with kvpress 0.5.5.

The goldens and all comparisons are in tests/golden; docs/kvpress.md explains
them. Float32 sums in another order give other last digits, so tokens whose
scores agree up to these may be exchanged.
"""

import importlib.util
import pathlib
import sys

import pytest
from fetching import located

from kvjax.models.pretrained import load

SCRIPT = (
  pathlib.Path(__file__).parents[1] / "golden" / "compare_kvpress_smollm2.py"
)


def loaded_script():
  spec = importlib.util.spec_from_file_location(SCRIPT.stem, SCRIPT)
  assert spec is not None
  assert spec.loader is not None
  module = importlib.util.module_from_spec(spec)
  sys.modules[SCRIPT.stem] = module
  spec.loader.exec_module(module)
  return module


compare = loaded_script()
goldens = compare.goldens


@pytest.fixture(scope="module")
def lm():
  return load(located(goldens.MODEL))


def assert_ties(differences):
  assert all(each.gap <= each.rounding for each in differences), differences


def test_every_golden_has_a_counterpart():
  assert set(goldens.their_answers()) == {goldens.FULL, *goldens.cases()}
  for prompt in goldens.stored_prompts():
    assert set(goldens.their_kept(prompt)) == set(goldens.cases())


@pytest.mark.slow
def test_keydiff_keeps_the_same(lm):
  case = "keydiff_50"
  ours = compare.compress(lm, [case], [0], answer=False).kept[case][0]
  assert_ties(list(compare.Judge(lm).differences(case, 0, ours)))


@pytest.mark.slow
def test_all_presses_keep_and_answer_the_same(lm):
  for row in compare.compared(lm):
    assert_ties(row.differences)
    for theirs, ours in row.scores.values():
      assert theirs == ours, row
