"""How often the loops of a compiled program run."""

import re

from kvjax.experiments.tpu.hlo import Computation, Instruction, Module

# They answer the array that they are given, or one within it.
_SAME = frozenset(["copy", "bitcast"])


def turns(module: Module, own: Computation, loop: Instruction) -> int | None:
  """How often a loop runs that counts up to a number; None for others.

  The compiler tells of no loop how often it runs. One that counts has a counter
  in its tuple, which its condition compares with a constant, and its body adds
  a constant to.

  Args:
    module: the program.
    own: where the loop stands.
    loop: an instruction `while`.
  """
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
  start = _constant(own, own[own[loop.operands[0]].operands[place]])
  bound = _constant(test, end)
  if bound is None and (other := _place(end)) is not None:
    bound = _constant(own, own[own[loop.operands[0]].operands[other]])
  step = _step(module.computations[body], place)
  if start is None or bound is None or not step:
    return None
  return max(-((start - bound) // step), 0)


def _step(body: Computation, place: int) -> int | None:
  """What a loop's body adds to an element of its tuple, if that is all."""
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
  """Which element of a tuple an instruction answers, if it answers one."""
  found = re.search(r"\bindex=(\d+)", each.attributes)
  if each.opcode != "get-tuple-element" or found is None:
    return None
  return int(found[1])


def _source(own: Computation, each: Instruction) -> Instruction:
  """What made the array that an instruction passes on."""
  while each.opcode in _SAME:
    each = own[each.operands[0]]
  return each


def _constant(own: Computation, each: Instruction) -> int | None:
  """The number that an instruction answers, if it is written in the program."""
  each = _source(own, each)
  if each.opcode != "constant" or not re.fullmatch(r"-?\d+", each.operands[0]):
    return None
  return int(each.operands[0])
