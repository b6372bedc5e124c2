"""A chip and a program for tests of what is compiled for TPUs."""

from kvjax.experiments.tpu import chips
from kvjax.experiments.tpu.programs import Program

MIB = 2**20


def chip(devices=()):
  """A v5e that is not there, or that stands on this machine's devices."""
  return chips.Chip(
    "v5e", "v5e:2x4", tuple(devices), 100 * MIB, 10 * MIB, 10**9, 10**12
  )


def unused(chip):
  raise AssertionError(chip)


def program(kind="kernel", name="twice", shapes="8 x 8", **changed):
  return Program(kind, name, shapes, **({"lower": unused} | changed))
