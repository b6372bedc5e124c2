"""What a device does while its host works for it."""

from kvjax.experiments.tpu.hlo import Computation, Instruction, Module
from kvjax.experiments.tpu.loops import turns


def meanwhile(module: Module) -> int:
  """Fusions and kernels between the start of a host's work and its end.

  They stand in the text in the order in which they are run. Of a loop of the
  program one turn counts, and of a loop within that all of its turns.
  """
  entry = module.computations[module.entry]
  return _own(entry) + sum(
    _within(module, name) for each in entry.values() for name in _parts(each)
  )


def _within(module: Module, name: str) -> int:
  """Those of a computation and of what it runs."""
  own = module.computations[name]
  found = _own(own)
  for each in own.values():
    times = (turns(module, own, each) or 1) if each.opcode == "while" else 1
    found += times * sum(_within(module, part) for part in _parts(each))
  return found


def _parts(each: Instruction) -> list[str]:
  """Names of the computations that an instruction runs, fusions aside."""
  kinds = _KINDS.get(each.opcode, ())
  return [name for kind in kinds for name in each.called(kind)]


_KINDS = {
  "while": ("body",),
  "conditional": ("branch_computations",),
  "call": ("to_apply",),
}


def _own(computation: Computation) -> int:
  found = 0
  awaited: set[str] = set()
  for each in computation.values():
    if each.opcode.endswith("-done"):
      awaited -= set(each.operands)
    elif each.opcode.endswith("-start") and each.is_on_host:
      awaited.add(each.name)
    elif awaited and (each.opcode == "fusion" or each.is_kernel):
      found += 1
  return found
