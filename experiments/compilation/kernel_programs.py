"""The kernels at the sizes of their `specs.py`."""

import functools
from collections import Counter
from collections.abc import Iterator

import jax
from jax.sharding import NamedSharding, PartitionSpec

from kvjax import kernels
from kvjax.experiments.compilation.chips import Chip
from kvjax.experiments.compilation.programs import Lowered, Program
from kvjax.kernels.programs import Platform
from kvjax.kernels.specs import Spec, named_specs


def kernel_programs(platform: Platform) -> Iterator[Program]:
  """Yields a program for each specification that a platform's kernel serves."""
  for operation, spec in named_specs():
    if platform in spec.platforms:
      yield of_spec(operation, spec)


def of_spec(operation: str, spec: Spec) -> Program:
  """Wraps a spec as a one-device program; a declining kernel is a fault."""
  function = getattr(spec.run, "func", spec.run)  # of a partial
  return Program(
    kind="kernel",
    name=operation,
    shapes=spec.name,
    lower=functools.partial(_lower, spec),
    operands=functools.partial(_operands, spec),
    function=getattr(function, "__name__", ""),
  )


def _lower(spec: Spec, chip: Chip) -> Lowered:
  replicated = NamedSharding(chip.lone, PartitionSpec())
  shapes = [
    jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=replicated)
    for x in spec.shapes
  ]
  with jax.set_mesh(chip.lone), kernels.use("pallas", platform=chip.platform):
    # Use a new function: a cached trace may be for another chip.
    traced = jax.jit(lambda *arrays: spec.run(*arrays)).trace(*shapes)
    return Lowered.of(traced, spec.ideal_bytes)


def _operands(spec: Spec) -> str:
  """Formats operands, as `2 bfloat16[1,8,32768,128], int32[1,8,32768]`."""
  counts = Counter(
    f"{x.dtype}[{','.join(map(str, x.shape))}]" for x in spec.shapes
  )
  return ", ".join(
    text if count == 1 else f"{count} {text}" for text, count in counts.items()
  )
