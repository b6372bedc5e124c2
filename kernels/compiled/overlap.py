"""Counts the device work that overlaps the host's work."""

from kvjax.kernels.compiled.hlo import Computation, Instruction, Module
from kvjax.kernels.compiled.loops import turns


def overlap(module: Module) -> int:
  """Counts fusions and kernels between the start and end of host work.

  The text of the module lists instructions in the order of execution. A loop of
  the program counts as one turn, a loop inside it with all of its turns.
  """
  entry = module.computations[module.entry]
  return _direct(entry) + sum(
    _nested(module, name)
    for instruction in entry.values()
    for name in _parts(instruction)
  )


def _nested(module: Module, name: str) -> int:
  """Counts those of a computation and of the computations it runs."""
  computation = module.computations[name]
  count = _direct(computation)
  for instruction in computation.values():
    times = (
      (turns(module, computation, instruction) or 1)
      if instruction.opcode == "while"
      else 1
    )
    count += times * sum(_nested(module, part) for part in _parts(instruction))
  return count


def _parts(instruction: Instruction) -> list[str]:
  """Returns names of the computations an instruction runs, without fusions."""
  kinds = _KINDS.get(instruction.opcode, ())
  return [name for kind in kinds for name in instruction.called(kind)]


_KINDS = {
  "while": ("body",),
  "conditional": ("branch_computations",),
  "call": ("to_apply",),
}


def _direct(computation: Computation) -> int:
  """Counts those of a computation itself."""
  count = 0
  awaited: set[str] = set()
  for instruction in computation.values():
    if instruction.opcode.endswith("-done"):
      awaited -= set(instruction.operands)
    elif instruction.opcode.endswith("-start") and instruction.is_on_host:
      awaited.add(instruction.name)
    elif awaited and (instruction.opcode == "fusion" or instruction.is_kernel):
      count += 1
  return count
