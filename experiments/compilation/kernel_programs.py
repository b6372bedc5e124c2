"""The kernels at the sizes of their `specs.py`."""

import functools
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import PyTree

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
    lower=functools.partial(
      lower_kernel, spec.run, spec.shapes, spec.ideal_bytes
    ),
    operands=functools.partial(_operands, spec),
    function=getattr(function, "__name__", ""),
  )


def lower_kernel(
  run: Callable[..., Any],
  shapes: Sequence[PyTree],
  ideal: int | None,
  chip: Chip,
) -> Lowered:
  """Lowers a function of some shapes for one device, with its kernels."""
  replicated = NamedSharding(chip.lone, PartitionSpec())
  given = jax.tree.map(
    lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=replicated),
    shapes,
  )
  with jax.set_mesh(chip.lone), kernels.use("pallas", platform=chip.platform):
    # Use a new function: a cached trace may be for another chip.
    traced = jax.jit(lambda *arrays: run(*arrays)).trace(*given)
    return Lowered.of(traced, ideal)


def _operands(spec: Spec) -> str:
  """Formats operands, as `2 bfloat16[1,8,32768,128], int32[1,8,32768]`."""
  counts = Counter(
    f"{x.dtype}[{','.join(map(str, x.shape))}]" for x in spec.shapes
  )
  return ", ".join(
    text if count == 1 else f"{count} {text}" for text, count in counts.items()
  )
