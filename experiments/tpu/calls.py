"""A function that calls compiled programs one after another, measured whole.

Each different program is compiled once. What is in memory at the worst moment
is counted from when arrays are made and last read.
"""

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import jax
from jax.extend.core import Literal, Var, jaxpr_as_fun
from jax.sharding import Sharding

from kvjax.experiments.tpu.footprints import Footprint
from kvjax.placement import is_on_host

# Opens contexts such as a mesh.
Within = Callable[[], AbstractContextManager[None]]


class Called(NamedTuple):
  """A call of a compiled program.

  Attributes:
    name: of the function that was compiled.
    footprint: what it takes by itself.
    arguments: the arrays that it reads.
    results: the arrays that it makes.
    reused: for each result, the argument whose memory it takes, if any.
  """

  name: str
  footprint: Footprint
  arguments: tuple[Var, ...]
  results: tuple[Var, ...]
  reused: tuple[Var | None, ...]


class Calls(NamedTuple):
  """What a function calls.

  Attributes:
    calls: in their order.
    shapes: of all arrays, with where they are.
    given: the arrays that the function takes.
    returned: those that it returns.
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
  """Compiles what a traced function calls, the result of one for the next.

  Args:
    jaxpr: the function, traced.
    given: what it takes, with where that is.
    place: where arrays are that the function makes itself, outside of all
      programs.
    within: opens the contexts that the function was traced in.
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
  """What a function takes that calls programs one after another.

  Args:
    calls: the programs.
    awaited: name of the program that the function waits for, each time: when it
      is called again, what was called before it has been computed, and what was
      called after it may not have been. Two such stretches can be in memory.
  """
  stretch, numbers = 0, []
  for call in calls.calls:
    stretch += call.name == awaited
    numbers.append(stretch)
  buffers = list(_buffers(calls, numbers))
  footprints = {id(x.footprint): x.footprint for x in calls.calls}.values()

  def peak(first: int) -> int:
    """Of a stretch and the next: all arrays, and a program's temporary ones."""
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
  )


class _Compiled(NamedTuple):
  footprint: Footprint
  shardings: Sequence[Sharding]


def _compile(equation: Any, inputs: Sequence[Any], within: Within) -> _Compiled:
  inner = equation.params.get("jaxpr")
  donated = equation.params.get("donated_invars", ())

  def alone(*arguments: Any) -> Any:
    found = equation.primitive.bind(*arguments, **equation.params)
    return found if equation.primitive.multiple_results else [found]

  run = alone if inner is None else jaxpr_as_fun(inner)
  numbers = tuple(i for i, own in enumerate(donated) if own)
  with within():
    traced = jax.jit(run, donate_argnums=numbers).trace(*inputs)
    lowered = traced.lower()
  ready = lowered.compile()
  shardings = jax.tree.leaves(ready.output_shardings)
  return _Compiled(Footprint.of(ready, traced.jaxpr), shardings)


def _key(equation: Any, inputs: Sequence[jax.ShapeDtypeStruct]) -> Any:
  """What calls of one program have in common."""
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
  free = [x for x, own in zip(invars, donated, strict=True) if own]

  def reuse(result: Var) -> Var | None:
    wanted = shapes[result]
    for each in free:
      own = shapes[each]
      if (own.shape, own.dtype) == (wanted.shape, wanted.dtype):
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
  """Memory that arrays take one after another, and when it is in use."""

  size: int
  start: int
  end: int


def _buffers(calls: Calls, numbers: Sequence[int]) -> Iterator[_Buffer]:
  """All memory that outlives a program.

  Args:
    calls: the programs.
    numbers: the stretch that each is called in.
  """
  last = max(numbers)
  owner = {variable: variable for variable in calls.given}
  start, end = dict.fromkeys(owner, 0), dict.fromkeys(owner, last)
  for call, number in zip(calls.calls, numbers, strict=True):
    for result, reused in zip(call.results, call.reused, strict=True):
      owner[result] = result if reused is None else owner[reused]
      start.setdefault(owner[result], number)
    for variable in (*call.arguments, *call.results):
      own = owner[variable]
      end[own] = max(end.get(own, 0), number)
  for variable in calls.returned:
    end[owner[variable]] = last
  for variable in start:
    yield _Buffer(_nbytes(calls, [variable]), start[variable], end[variable])


def _nbytes(calls: Calls, variables: Any) -> int:
  """Bytes of a device's share of arrays in its memory."""
  shapes = [calls.shapes[x] for x in variables]
  return sum(
    math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize
    for x in shapes
    if not is_on_host(x)
  )


def _shape(x: Any, place: Sharding) -> jax.ShapeDtypeStruct:
  return jax.ShapeDtypeStruct(x.aval.shape, x.aval.dtype, sharding=place)
