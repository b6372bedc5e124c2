"""Counts the floating-point operations of products in a traced program."""

import functools
import math
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.extend import core
from jax.interpreters import partial_eval

from kvjax.kernels.compiled.hlo import CALLS, Module
from kvjax.kernels.compiled.loops import turns

# None for arrays that are not known when a program is traced.
Known = np.ndarray | None


def traced(program: jax.extend.core.ClosedJaxpr, known: bool = True) -> int:
  """Counts what the products of a program take, without running them.

  Integers that depend on no argument, such as positions, are computed, so that
  the branches of conditions that the program would take are known. Of other
  conditions, the branch with the most products counts.

  Args:
    program: a jaxpr.
    known: whether to compute integers; otherwise, no branch is known.
  """
  counter = _Counter(known)
  counter.run(_as_compiled(program), [None] * len(program.jaxpr.invars))
  return counter.total


def compiled(text: str) -> int:
  """Counts the same in a compiled program, given its text.

  No branch is known, as for `traced` without known integers.
  """
  module = Module.of(text)
  return _in_computation(module, module.entry)


def _as_compiled(program: core.ClosedJaxpr) -> core.ClosedJaxpr:
  """Removes what the compiler would of the programs that are called."""

  def without_dead_code(each):
    if each.primitive.name not in ("jit", "pjit"):
      return each
    called = each.params["jaxpr"]
    needed, _ = partial_eval.dce_jaxpr(
      called.jaxpr, [True] * len(called.jaxpr.outvars), instantiate=True
    )
    called = core.ClosedJaxpr(needed, called.consts)
    return each.replace(params=each.params | {"jaxpr": called})

  jaxpr = program.jaxpr
  return core.ClosedJaxpr(
    jaxpr.replace(eqns=[*map(without_dead_code, jaxpr.eqns)]), program.consts
  )


class _Counter:
  """Runs a jaxpr on what is known, and adds up its products."""

  def __init__(self, known: bool) -> None:
    self.total, self._known = 0, known
    # What programs took, and which results they had, by what was known.
    self._before: dict[Any, tuple[int, list[Known]]] = {}

  def run(
    self, program: core.ClosedJaxpr, arguments: Sequence[Known]
  ) -> list[Known]:
    """Returns the results that are known."""
    if not _decides(program.jaxpr):
      arguments = [None] * len(arguments)
    given = tuple(None if x is None else x.tobytes() for x in arguments)
    key = id(program), given
    if key not in self._before:
      before = self.total
      found = self._run(program, arguments)
      self._before[key] = self.total - before, found
      self.total = before
    taken, found = self._before[key]
    self.total += taken
    return found

  def _run(
    self, program: core.ClosedJaxpr, arguments: Sequence[Known]
  ) -> list[Known]:
    values: dict[core.Var, Known] = {}

    def read(atom) -> Known:
      if isinstance(atom, core.Literal):
        return np.asarray(atom.val) if self._known else None
      return values.get(atom)

    jaxpr = program.jaxpr
    consts = [
      np.asarray(x) if self._known and _is_integer(x) else None
      for x in program.consts
    ]
    values.update(zip(jaxpr.constvars, consts, strict=True))
    values.update(zip(jaxpr.invars, arguments, strict=True))
    for each in jaxpr.eqns:
      found = self._equation(each, [read(x) for x in each.invars])
      values.update(zip(each.outvars, found, strict=True))
    return [read(x) for x in jaxpr.outvars]

  def _equation(self, each, inputs: list[Known]) -> list[Known]:
    name, params = each.primitive.name, each.params
    if name == "scan":
      return self._scan(each, inputs)
    if name == "while":
      return self._while(params, inputs)
    if name == "cond":
      return self._condition(params["branches"], inputs)
    for kind in ("jaxpr", "call_jaxpr"):
      if hasattr(params.get(kind), "eqns"):
        return self.run(params[kind], inputs)
    if name == "dot_general":
      self.total += _product(each)
    if all(x is not None for x in inputs) and all(
      _is_integer(x.aval) for x in each.outvars
    ):
      found = each.primitive.bind(*inputs, **params)
      found = found if each.primitive.multiple_results else [found]
      return [np.asarray(x) for x in found]
    return [None] * len(each.outvars)

  def _scan(self, each, inputs: list[Known]) -> list[Known]:
    params = each.params
    body = params["jaxpr"].jaxpr
    # Rows have one more axis outside of the loop.
    carries = _same_rank(each.outvars, body.outvars)
    consts = _same_rank(each.invars, body.invars) - carries
    fixed, carry = inputs[:consts], inputs[consts : consts + carries]
    rows = inputs[consts + carries :]
    if all(x is None for x in inputs):
      before = self.total
      found = self.run(params["jaxpr"], inputs)
      self.total += (params["length"] - 1) * (self.total - before)
      return [None] * len(found)
    stacked = []
    for turn in range(params["length"]):
      turn = params["length"] - 1 - turn if params["reverse"] else turn
      row = [None if x is None else x[turn] for x in rows]
      found = self.run(params["jaxpr"], [*fixed, *carry, *row])
      carry, new = found[:carries], found[carries:]
      stacked.append(new)
    columns = zip(*stacked, strict=True)
    return carry + [
      None if any(x is None for x in column) else np.stack(column)
      for column in columns
    ]

  def _while(self, params, inputs: list[Known]) -> list[Known]:
    """Runs a loop once if its number of turns is not known."""
    tests, bodies = params["cond_nconsts"], params["body_nconsts"]
    of_test, of_body = inputs[:tests], inputs[tests : tests + bodies]
    state = inputs[tests + bodies :]
    while True:
      (again,) = self.run(params["cond_jaxpr"], [*of_test, *state])
      if again is not None and not again:
        return state
      state = self.run(params["body_jaxpr"], [*of_body, *state])
      if again is None:
        return [None] * len(state)

  def _condition(self, branches, inputs: list[Known]) -> list[Known]:
    index, *others = inputs
    if index is not None:
      return self.run(branches[int(index)], others)
    start, most = self.total, 0
    for branch in branches:
      self.total = start
      found = self.run(branch, others)
      most = max(most, self.total - start)
    self.total = start + most
    return [None] * len(found)


@functools.cache
def _decides(jaxpr: core.Jaxpr) -> bool:
  """Whether branches or integers may depend on what is known."""
  return any(_is_integer(x.aval) for x in jaxpr.outvars) or any(
    each.primitive.name in ("cond", "while") or any(map(_decides, _inner(each)))
    for each in jaxpr.eqns
  )


def _inner(each) -> list[core.Jaxpr]:
  """The programs that an equation runs once or in a loop."""
  found = [each.params.get(kind) for kind in ("jaxpr", "call_jaxpr")]
  return [x.jaxpr for x in found if hasattr(x, "eqns")]


def _same_rank(outer, inner) -> int:
  pairs = zip(outer, inner, strict=True)
  return sum(one.aval.ndim == other.aval.ndim for one, other in pairs)


def _is_integer(x) -> bool:
  return not np.issubdtype(x.dtype, np.inexact) and x.dtype.kind in "iub"


def _product(each) -> int:
  (contracted, _), _ = each.params["dimension_numbers"]
  sizes = each.invars[0].aval.shape
  return (
    2
    * math.prod(each.outvars[0].aval.shape)
    * math.prod(sizes[axis] for axis in contracted)
  )


def _in_computation(module: Module, name: str) -> int:
  computation, total = module.computations[name], 0
  for each in computation.values():
    if each.opcode == "dot":
      total += _in_dot(computation, each)
    kinds = (*CALLS.get(each.opcode, ()), "calls")
    called = [
      _in_computation(module, name)
      for kind in kinds
      for name in each.called(kind)
    ]
    if each.opcode == "conditional":
      total += max(called)
    elif each.opcode == "while":
      total += (turns(module, computation, each) or 1) * sum(called)
    else:
      total += sum(called)
  return total


def _in_dot(computation, each) -> int:
  axes = each.attributes.partition("lhs_contracting_dims={")[2]
  axes = axes.partition("}")[0].split(",")
  sizes = computation[each.operands[0]].results[0].shape
  return (
    2
    * math.prod(each.results[0].shape)
    * math.prod(sizes[int(axis)] for axis in axes if axis)
  )
