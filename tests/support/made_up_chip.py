"""A chip, a program and its memory, for tests of what is compiled."""

from kvjax.experiments.compilation import chips
from kvjax.experiments.compilation.programs import Program
from kvjax.kernels.compiled.footprints import Footprint

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


def footprint(**changed):
  """What a program takes, of which some is changed."""
  given = dict(
    arguments=3 * MIB,
    results=1 * MIB,
    temporary=2 * MIB,
    host=0,
    copied=0,
    moved=8 * MIB,
    overlap=3,
    kernels=("twice",),
    vmem=5 * MIB,
    sent=(),
  )
  return Footprint(**(given | changed))
