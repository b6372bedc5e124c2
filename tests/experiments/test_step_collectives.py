"""What devices send each other to decode is what docs/sharding.md says."""

import pathlib
import re

import pytest
from made_up_gates import write_fast_kvzip, write_kvzap
from made_up_statistics import made_up_statistics

from kvjax.experiments.compilation.published import Published
from kvjax.experiments.planning import step_collectives
from kvjax.experiments.planning.step_collectives import (
  ALIKE,
  KEPT,
  LAYERS,
  MESHES,
  MODEL,
  ROWS,
  Step,
  cell,
  sent,
  steps,
)
from kvjax.registry.registry import METHODS, RETRIEVALS

ROOT = pathlib.Path(__file__).parents[2]
PAGE = (ROOT / step_collectives.PAGE).read_text(encoding="utf-8")
STATISTICS = made_up_statistics(8, 2, 16, LAYERS)


def named(listed):
  return {f"{s.name}{' evicting' if s.evicts else ''}": s for s in listed}


STEPS, LIKE_OTHERS = named(steps(STATISTICS)), named(ALIKE)

# Bytes of a float32 for each token and query head; two heads' keys are twice as
# many.
SCORES = ROWS * 8 * (KEPT + 32) * 4
# Of one collective of an eviction, which asks whether any row is due, and may
# sum scores; devices with the same cache have nothing to ask.
MOST = {"data:4": 4, "context:4": 0}
# Whose scores compare query heads; those of others stay with their keys.
COMPARING = {
  *("h2o", "tova", "snapkv", "dropkv", "rkv"),
  "triattention:choice=model",
}


def kept_keys(kv_heads):
  """Bytes of a device's share of a layer's kept keys, on four devices."""
  return ROWS * kv_heads * KEPT * 16 * 2 // 4


def printed():
  """What each step sends on each mesh, as the page says."""
  found = {}
  for part, evicts in (("steps", False), ("evicting_steps", True)):
    (table,) = re.findall(rf"<!-- {part} -->\n(.*?)<!-- /", PAGE, re.S)
    header, _, *lines = (
      line.strip("| ").split(" | ") for line in table.splitlines()
    )
    assert header == ["method", *(f"`{axes}`" for axes in MESHES)]
    for names, *cells in lines:
      for name in names.replace("`", "").split(", "):
        assert Step(name, evicts) not in found
        found[Step(name, evicts)] = cells
  return found


PRINTED = printed()


def test_the_page_has_every_method():
  names = [step.name for step in PRINTED if not step.evicts]
  assert {*names} == {*METHODS, *RETRIEVALS, "think/snapkv"}
  evicting = {step.name for step in PRINTED if step.evicts}
  readme = (ROOT / "README.md").read_text(encoding="utf-8")
  ticked = re.findall(
    r"^\| \[`(\w+)`\].* \| (?:✓)? \| ✓ \| (?:✓)? \|$", readme, re.M
  )
  assert ticked
  assert {*ticked} - {"full"} <= evicting
  assert not COMPARING - evicting
  assert {step.name for step in ALIKE if step.evicts} <= evicting


@pytest.mark.filterwarnings("ignore:The .* devices of the axis 'context'")
@pytest.mark.parametrize("axes", MESHES)
@pytest.mark.parametrize("name", STEPS)
def test_a_step_sends_what_the_page_says_and_no_cached_keys(name, axes):
  step = STEPS[name]
  found = sent(step, axes)
  assert cell(found) == PRINTED[step][MESHES.index(axes)]
  largest = max((each.largest for each in found), default=0)
  if not step.evicts:
    assert 4 * largest < kept_keys(2)
    assert axes != "data:4" or not found
  else:
    assert largest <= MOST.get(axes, SCORES)
    assert step.name in COMPARING or 4 * largest < kept_keys(2)
    # Scores are ranked where the heads are.
    assert "all-to-all" not in {each.opcode for each in found}


def test_every_layer_sums_what_its_devices_have_of_two_products():
  """Those of attention and MLP, and the embedding once for all layers."""
  found = sent(STEPS["full"], "model:2")
  sums = [each for each in found if each.opcode == "all-reduce"]
  assert sum(each.times for each in sums) == 2 * LAYERS + 1
  # In float32, of each row's hidden state.
  width = MODEL.fields["hidden_size"]
  assert {each.nbytes for each in sums} == {ROWS * width * 4}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The .* devices of the axis 'context'")
@pytest.mark.parametrize("axes", MESHES)
@pytest.mark.parametrize("name", LIKE_OTHERS)
def test_methods_that_are_made_with_a_file_send_what_the_page_says(
  name, axes, tmp_path
):
  step = LIKE_OTHERS[name]
  gate = tmp_path / "gate"
  match step.name.partition(":")[0]:
    case "kvzap":
      file = f":gate={write_kvzap(gate, 32, 2, 2)}"
    case "fast_kvzip":
      file = f":gate={write_fast_kvzip(gate, 32, 2, 2, group=4)}"
    case "qfilters":
      file = f":filters={STATISTICS}"
  found = sent(Step(step.name, step.evicts, file), axes)
  assert cell(found) == PRINTED[step][MESHES.index(axes)]


@pytest.mark.parametrize("name", ["full", "keydiff", "adakv"])
def test_devices_with_heads_of_their_own_send_no_cached_keys(name):
  """Four for four KV heads, which shared out a prompt."""
  fields = {**MODEL.fields, "num_key_value_heads": 4}
  found = sent(Step(name), "context:2,model:2", Published("four", fields))
  assert found
  assert 4 * max(each.largest for each in found) < kept_keys(4)


def test_the_tables_are_current():
  """`python -m kvjax.experiments.planning.step_collectives` writes them."""
  cells = {step: PRINTED[step] for step in steps(STATISTICS)}
  assert step_collectives.replace_tables(PAGE, cells) == PAGE
  stale = PAGE.replace("all-reduce: ", "all-reduce: 1")
  assert step_collectives.replace_tables(stale, cells) == PAGE != stale
