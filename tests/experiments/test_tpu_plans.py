"""Plans take the memory of the programs that `make tpu-compile` measures."""

import dataclasses

import pytest
from plans_here import LIBTPU, silent

from kvjax.experiments.compilation import chips, engine_programs
from kvjax.experiments.planning import compiling, slices

BOTH = ("prefill", "decode")
SLOW = {
  "int8": engine_programs.KEYDIFF_IN_INT8,
  "offloaded": engine_programs.CTKVR,
  **{use.model.name: use for use in engine_programs.HYBRIDS},
}


@pytest.mark.libtpu
@pytest.mark.parametrize(
  ("use", "kinds"),
  [
    pytest.param(engine_programs.COMPACTOR, BOTH, id="stacked"),
    pytest.param(engine_programs.KEYDIFF, ("prefill",), id="blocks"),
    pytest.param(engine_programs.ADAKV_IN_INT8, ("decode",), id="packed"),
    *(
      pytest.param(use, ("decode",), id=name, marks=[pytest.mark.slow, LIBTPU])
      for name, use in SLOW.items()
    ),
  ],
)
def test_a_few_layers_tell_what_whole_models_take(use, kinds):
  """Within 5 % of these programs, planned whole and from a few layers."""
  chips.prepare_libtpu()
  chip = slices.find_slice("v5e-8").load(1, use.model.kv_heads)
  whole = compiling.compile_use(use, chip, silent)
  # Too little memory for the whole model, and so for more than a half.
  too_small = whole.sizes.weights + whole.sizes.cache - 1
  small = dataclasses.replace(chip, hbm_bytes=too_small)
  few = compiling.compile_use(use, small, silent)
  for kind in kinds:
    lower = getattr(engine_programs, f"lower_{kind}")
    v5e = chips.Chip.load("v5e")
    expected = lower(use, use.model.layers, v5e).measure().hbm
    for found in (whole, few):
      assert found.hbm(getattr(found, kind)) == pytest.approx(
        expected, rel=0.05
      )
