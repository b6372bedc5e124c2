"""Counts the turns of loops in a compiled program."""

import re

from kvjax.kernels.compiled.hlo import Computation, Instruction, Module

# As XLA reports turns to CPUs and GPUs, where conditions are fused.
_KNOWN = re.compile(r'"known_trip_count":\{"n":"(\d+)"\}')
# Instructions that return their operand or a part of it.
_SAME = frozenset(["copy", "bitcast"])


def turns(
  module: Module, computation: Computation, loop: Instruction
) -> int | None:
  """Counts the turns of a loop with a constant number of them; None for others.

  libtpu does not report turns. A counting loop has a counter in its tuple that
  its condition compares with a constant and its body increments by a constant.

  Args:
    module: the program.
    computation: the computation of the loop.
    loop: an instruction `while`.
  """
  if known := _KNOWN.search(loop.attributes):
    return int(known[1])
  (condition,) = loop.called("condition")
  (body,) = loop.called("body")
  test = module.computations[condition]
  (root,) = (x for x in test.values() if x.root)
  if root.opcode != "compare" or "direction=LT" not in root.attributes:
    return None
  counter, end = (test[x] for x in root.operands)
  place = _place(counter)
  if place is None:
    return None
  start = _constant(
    computation, computation[computation[loop.operands[0]].operands[place]]
  )
  bound = _constant(test, end)
  if bound is None and (other := _place(end)) is not None:
    bound = _constant(
      computation, computation[computation[loop.operands[0]].operands[other]]
    )
  step = _step(module.computations[body], place)
  if start is None or bound is None or not step:
    return None
  return max(-((start - bound) // step), 0)


def _step(body: Computation, place: int) -> int | None:
  """Returns the increment of a tuple element in a loop's body, if constant."""
  (root,) = (x for x in body.values() if x.root)
  if root.opcode != "tuple":
    return None
  new = body[root.operands[place]]
  if new.opcode != "add":
    return None
  # Where a kernel is told the counter, what is added to is a copy of it.
  first, second = (_source(body, body[x]) for x in new.operands)
  if _place(second) == place:
    first, second = second, first
  return _constant(body, second) if _place(first) == place else None


def _place(each: Instruction) -> int | None:
  """Returns the number of the tuple element that an instruction selects."""
  match = re.search(r"\bindex=(\d+)", each.attributes)
  if each.opcode != "get-tuple-element" or match is None:
    return None
  return int(match[1])


def _source(computation: Computation, each: Instruction) -> Instruction:
  """Returns the instruction that produced the array passed on."""
  while each.opcode in _SAME:
    each = computation[each.operands[0]]
  return each


def _constant(computation: Computation, each: Instruction) -> int | None:
  """Returns the value of an instruction if it is a constant."""
  each = _source(computation, each)
  if each.opcode != "constant" or not re.fullmatch(r"-?\d+", each.operands[0]):
    return None
  return int(each.operands[0])
