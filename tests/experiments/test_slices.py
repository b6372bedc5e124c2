"""Slices of TPUs: their names, devices and memory."""

import math

import jax
import pytest

from kvjax.errors import InputError
from kvjax.experiments.compilation import chips
from kvjax.experiments.planning import slices


def test_slices_have_the_devices_that_their_names_say():
  assert slices.find_slice("v5e-256").topology == "v5e:16x16"
  for each in slices.SLICES.values():
    kind = slices.KINDS[each.kind]
    shape = kind.shapes[each.chips]
    assert math.prod(map(int, shape.split("x"))) == each.chips
    cores = 2 if each.kind in ("v5p", "tpu7x") else 1
    assert each.name == f"{each.kind}-{each.chips * cores}"
  assert slices.find_slice("tpu7x-16").devices == 16
  assert slices.find_slice("v5p-16").devices == 8
  with pytest.raises(InputError, match="v5e-1/4/8/16/32/64/128/256, v5p-8/16/"):
    slices.find_slice("v5e-12")
  eight = slices.find_slice("v5e-8")
  slices.check_devices(eight, {"data": 2, "model": 4})
  with pytest.raises(InputError, match="--mesh has 4 devices; v5e-8 has 8"):
    slices.check_devices(eight, {"data": 2, "model": 2})


def test_a_slice_has_the_name_of_cloud_tools_too():
  assert slices.find_slice("v5litepod-16") == slices.find_slice("v5e-16")


@pytest.mark.libtpu
@pytest.mark.parametrize("name", ["v5e-1", "v5p-8", "v6e-1", "tpu7x-2"])
def test_programs_may_use_as_much_memory_as_a_slice_says(name):
  """The compiler takes a little less, and refuses a little more."""
  chips.prepare_libtpu()
  chip = slices.find_slice(name).load(1, 1)
  device = jax.sharding.SingleDeviceSharding(chip.devices[0])
  increment = jax.jit(lambda x: x + 1, donate_argnums=0)

  def compile_for(nbytes):
    shape = (nbytes // 4 // 1024, 1024)
    array = jax.ShapeDtypeStruct(shape, "float32", sharding=device)
    increment.lower(array).compile()

  compile_for(chip.hbm_bytes - 2**27)
  with pytest.raises(jax.errors.JaxRuntimeError, match="RESOURCE_EXHAUSTED"):
    compile_for(chip.hbm_bytes + 2**27)
