"""Measures a function that calls several compiled programs in sequence.

Each distinct program is compiled once. The peak memory follows from the times
at which arrays are created and last read.
"""

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import jax
from jax.extend.core import Literal, Var, jaxpr_as_fun
from jax.sharding import Sharding

from kvjax.kernels.compiled.footprints import Footprint
from kvjax.placement import is_on_host

# Opens contexts, such as a mesh.
Within = Callable[[], AbstractContextManager[None]]


class Called(NamedTuple):
  """A call of a compiled program.

  Attributes:
    name: name of the compiled function.
    footprint: footprint of the program itself.
    arguments: the arrays that it reads.
    results: the arrays that it creates.
    reused: for each result, the argument whose memory it reuses, if any.
  """

  name: str
  footprint: Footprint
  arguments: tuple[Var, ...]
  results: tuple[Var, ...]
  reused: tuple[Var | None, ...]


class Calls(NamedTuple):
  """The calls of a function.

  Attributes:
    calls: the calls in order.
    shapes: shapes of all arrays, with their sharding.
    given: the arguments of the function.
    returned: its results.
  """

  calls: tuple[Called, ...]
  shapes: Mapping[Var, jax.ShapeDtypeStruct]
  given: frozenset[Var]
  returned: frozenset[Var]


def compile_calls(
  jaxpr: Any,
  given: Sequence[jax.ShapeDtypeStruct],
  place: Sharding,
  within: Within = contextlib.nullcontext,
) -> Calls:
  """Compiles the calls of a traced function, from the results of earlier ones.

  Args:
    jaxpr: the traced function.
    given: shapes and sharding of its arguments.
    place: sharding of arrays that the function creates outside of all programs.
    within: opens the contexts in which the function was traced.
  """
  shapes: dict[Var, jax.ShapeDtypeStruct] = {}
  program = jaxpr.jaxpr
  for variable, shape in zip(program.invars, given, strict=True):
    shapes[variable] = shape
  for variable in program.constvars:
    shapes[variable] = _shape(variable, place)
  compiled: dict[Any, _Compiled] = {}
  calls = []
  for equation in program.eqns:
    inputs = [
      _shape(x, place) if isinstance(x, Literal) else shapes[x]
      for x in equation.invars
    ]
    key = _key(equation, inputs)
    if key not in compiled:
      compiled[key] = _compile(equation, inputs, within)
    made = compiled[key]
    for variable, sharding in zip(
      equation.outvars, made.shardings, strict=True
    ):
      shapes[variable] = _shape(variable, sharding)
    calls.append(_call(equation, made.footprint, shapes))
  return Calls(
    tuple(calls),
    shapes,
    frozenset([*program.invars, *program.constvars]),
    frozenset(x for x in program.outvars if isinstance(x, Var)),
  )


def measure_calls(calls: Calls, awaited: str) -> Footprint:
  """Computes the footprint of a function that calls programs in sequence.

  Args:
    calls: the programs.
    awaited: name of the program that the function waits for each time. When it
      is called again, the programs before its last call have finished, while
      those after it may still run. Two such stretches can be in memory.
  """
  stretch, numbers = 0, []
  for call in calls.calls:
    stretch += call.name == awaited
    numbers.append(stretch)
  buffers = list(_buffers(calls, numbers))
  footprints = {id(x.footprint): x.footprint for x in calls.calls}.values()

  def peak(first: int) -> int:
    """Computes the peak of a stretch and the next, with temporary arrays."""
    here = (first, first + 1)
    alive = sum(
      each.size
      for each in buffers
      if each.start <= here[1] and here[0] <= each.end
    )
    running = (
      call.footprint.temporary
      for call, number in zip(calls.calls, numbers, strict=True)
      if number in here
    )
    return alive + max(running, default=0)

  arguments = _nbytes(calls, calls.given)
  results = _nbytes(calls, calls.returned)
  most = max(map(peak, range(stretch + 1)))
  return Footprint(
    arguments=arguments,
    results=results,
    temporary=most - arguments - results,
    host=max(x.host for x in footprints),
    copied=max(x.copied for x in footprints),
    moved=sum(x.footprint.moved for x in calls.calls),
    overlap=sum(x.footprint.overlap for x in calls.calls),
    kernels=tuple(sorted({name for x in footprints for name in x.kernels})),
    vmem=max(x.vmem for x in footprints),
    sent=tuple(each for x in calls.calls for each in x.footprint.sent),
  )


class _Compiled(NamedTuple):
  footprint: Footprint
  shardings: Sequence[Sharding]


def _compile(equation: Any, inputs: Sequence[Any], within: Within) -> _Compiled:
  inner = equation.params.get("jaxpr")
  donated = equation.params.get("donated_invars", ())

  def alone(*arguments: Any) -> Any:
    results = equation.primitive.bind(*arguments, **equation.params)
    return results if equation.primitive.multiple_results else [results]

  run = alone if inner is None else jaxpr_as_fun(inner)
  numbers = tuple(i for i, is_donated in enumerate(donated) if is_donated)
  with within():
    traced = jax.jit(run, donate_argnums=numbers).trace(*inputs)
    lowered = traced.lower()
  ready = lowered.compile()
  shardings = jax.tree.leaves(ready.output_shardings)
  return _Compiled(Footprint.of(ready, traced.jaxpr), shardings)


def _key(equation: Any, inputs: Sequence[jax.ShapeDtypeStruct]) -> Any:
  """Returns the key that identifies a program."""
  places = tuple((x.shape, x.dtype, x.sharding) for x in inputs)
  inner = equation.params.get("jaxpr")
  if inner is None:
    return equation.primitive, str(equation.params), places
  return id(inner), equation.params.get("donated_invars"), places


def _call(
  equation: Any,
  footprint: Footprint,
  shapes: Mapping[Var, jax.ShapeDtypeStruct],
) -> Called:
  invars = equation.invars
  donated = equation.params.get("donated_invars", (False,) * len(invars))
  free = [x for x, d in zip(invars, donated, strict=True) if d]

  def reuse(result: Var) -> Var | None:
    wanted = shapes[result]
    for each in free:
      shape = shapes[each]
      if (shape.shape, shape.dtype) == (wanted.shape, wanted.dtype):
        free.remove(each)
        return each
    return None

  return Called(
    str(equation.params.get("name", equation.primitive)),
    footprint,
    tuple(x for x in equation.invars if isinstance(x, Var)),
    tuple(equation.outvars),
    tuple(map(reuse, equation.outvars)),
  )


class _Buffer(NamedTuple):
  """Memory that arrays use in sequence, and its lifetime."""

  size: int
  start: int
  end: int


def _buffers(calls: Calls, numbers: Sequence[int]) -> Iterator[_Buffer]:
  """Yields all memory that outlives a program."""
  last = max(numbers)
  owner = {variable: variable for variable in calls.given}
  start, end = dict.fromkeys(owner, 0), dict.fromkeys(owner, last)
  for call, number in zip(calls.calls, numbers, strict=True):
    for result, reused in zip(call.results, call.reused, strict=True):
      owner[result] = result if reused is None else owner[reused]
      start.setdefault(owner[result], number)
    for variable in (*call.arguments, *call.results):
      buffer = owner[variable]
      end[buffer] = max(end.get(buffer, 0), number)
  for variable in calls.returned:
    end[owner[variable]] = last
  for variable in start:
    yield _Buffer(_nbytes(calls, [variable]), start[variable], end[variable])


def _nbytes(calls: Calls, variables: Any) -> int:
  """Counts the bytes of a device's shard of arrays in its memory."""
  shapes = [calls.shapes[x] for x in variables]
  return sum(
    math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize
    for x in shapes
    if not is_on_host(x)
  )


def _shape(x: Any, place: Sharding) -> jax.ShapeDtypeStruct:
  return jax.ShapeDtypeStruct(x.aval.shape, x.aval.dtype, sharding=place)
