"""Counts what the devices of a compiled program send each other."""

import dataclasses
from collections.abc import Iterator, Mapping

from kvjax.kernels.compiled.hlo import CALLS, Instruction, Module
from kvjax.kernels.compiled.loops import turns

OPCODES = (
  "all-gather",
  "all-reduce",
  "all-to-all",
  "collective-permute",
  "reduce-scatter",
)
# In the fusion that starts a collective.
_STARTS = 'custom_call_target="AsyncCollectiveStart"'
# Of a collective that several fusions share.
_CHAINED = "chain_id="


@dataclasses.dataclass(frozen=True)
class Collective:
  """A collective of a program.

  Attributes:
    opcode: one of `OPCODES`.
    nbytes: bytes of its results on a device, each time.
    largest: bytes of the largest of its results.
    times: how often it runs.
  """

  opcode: str
  nbytes: int
  largest: int
  times: int


def collectives(module: Module, *, turn: bool = False) -> list[Collective]:
  """Lists the collectives of a program.

  Those in a loop's body run once per turn, or once if data determine the number
  of turns. All branches of a condition count.

  Args:
    module: the program.
    turn: list only those of one turn of the program's loop; of several loops,
      the one whose turn sends the most bytes.
  """
  if not turn:
    return list(_within(module, module.entry, 1))
  bodies = [
    [
      found
      for name in each.called("body")
      for found in _within(module, name, 1)
    ]
    for each in module.computations[module.entry].values()
    if each.opcode == "while"
  ]
  return max(bodies, key=total_bytes, default=[])


def total_bytes(found: list[Collective]) -> int:
  """Bytes that collectives leave on each device."""
  return sum(each.nbytes * each.times for each in found)


def counts(found: list[Collective]) -> Mapping[str, int]:
  """How often each kind of collective runs."""
  numbers = dict.fromkeys(OPCODES, 0)
  for each in found:
    numbers[each.opcode] += each.times
  return {opcode: number for opcode, number in numbers.items() if number}


def _within(module: Module, name: str, times: int) -> Iterator[Collective]:
  """Lists the collectives of a computation that runs some times."""
  computation = module.computations[name]
  for each in computation.values():
    opcode = each.opcode.removesuffix("-start")
    if opcode in OPCODES:
      yield _collective(each, opcode, times)
    if each.opcode == "fusion":
      yield from _fused(module, each, times)
    if each.opcode == "async-start":
      for called in each.called("calls"):
        yield from _within(module, called, times)
    repeated = times
    if each.opcode == "while":
      repeated *= turns(module, computation, each) or 1
    for kind in CALLS.get(each.opcode, ()):
      for called in each.called(kind):
        yield from _within(module, called, repeated)


def _fused(
  module: Module, fusion: Instruction, times: int
) -> Iterator[Collective]:
  """Lists the collectives that a fusion of TPUs runs.

  One that runs beside products is in the fusion that starts it, in those of the
  products, and in the one that awaits it; the first of them counts.
  """
  for name in fusion.called("calls"):
    computation = module.computations[name]
    starts = any(_STARTS in each.attributes for each in computation.values())
    for each in computation.values():
      if each.opcode not in OPCODES:
        continue
      if name.startswith("all-reduce-scatter"):
        # The sum is padded, and each device takes its part.
        yield _collective(fusion, "reduce-scatter", times)
      elif starts or _CHAINED not in each.attributes:
        yield _collective(each, each.opcode, times)


def _collective(each: Instruction, opcode: str, times: int) -> Collective:
  sizes = [x.nbytes for x in each.results]
  # One that is started returns operands, results and counters; sums return
  # results only.
  if each.opcode == f"{opcode}-start" and opcode != "all-reduce":
    count = len(each.operands)
    sizes = sizes[count : 2 * count]
  return Collective(opcode, sum(sizes), max(sizes, default=0), times)
