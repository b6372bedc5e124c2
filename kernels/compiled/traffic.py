"""Counts the bytes that a compiled program moves between HBM and the cores.

The compiler's own estimate leaves out kernels and counts prefetches several
times.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence

from kvjax.kernels.compiled.hlo import (
  CALLS,
  Buffer,
  Computation,
  Instruction,
  Module,
)
from kvjax.kernels.compiled.kernel_traffic import KernelTraffic
from kvjax.kernels.compiled.loops import turns

# Instructions that move nothing, or whose traffic is counted elsewhere.
_STILL = frozenset(
  "parameter constant tuple get-tuple-element bitcast after-all partition-id "
  "replica-id opt-barrier".split()
)
# Within a fusion, these pass on the part of their operand that is read.
_SAME = frozenset(["bitcast", "copy"])
# These read no more of their first operand than they return.
_PICKS = frozenset(["slice", "dynamic-slice", "gather"])

_Kernels = Mapping[tuple[str, tuple[tuple[int, ...], ...]], KernelTraffic]


def traffic(
  module: Module, kernels: Iterable[KernelTraffic], *, turn: bool = False
) -> int:
  """Counts the bytes that instructions read from HBM and write to it.

  For a condition, the branch with the most traffic counts. A loop's body counts
  once per turn, or once if data determine the number of turns.

  Args:
    module: the program.
    kernels: kernels that were traced into it. For other kernels, every operand
      counts once.
    turn: count only one turn of the program's loop; of several loops, the one
      with the most traffic per turn.
  """
  known = {(kernel.name, kernel.results): kernel for kernel in kernels}
  if not turn:
    return _computation(module, known, module.entry)
  return max(
    sum(_computation(module, known, name) for name in each.called("body"))
    for each in module.computations[module.entry].values()
    if each.opcode == "while"
  )


def _computation(module: Module, kernels: _Kernels, name: str) -> int:
  computation = module.computations[name]

  def moved(each: Instruction) -> int:
    called = [
      _computation(module, kernels, name)
      for kind in CALLS.get(each.opcode, ())
      for name in each.called(kind)
    ]
    if each.opcode == "conditional":
      return max(called)
    if each.opcode == "while":
      return (turns(module, computation, each) or 1) * sum(called)
    if called:
      return sum(called)
    if each.opcode == "fusion":
      return _fusion(module, computation, each)
    if each.is_kernel:
      return _kernel(computation, each, kernels)
    return _plain(computation, each)

  return sum(map(moved, computation.values()))


def _plain(computation: Computation, each: Instruction) -> int:
  """Counts the bytes of an instruction outside of fusions."""
  code = each.opcode
  result = sum(x.hbm for x in each.results)
  if code in _STILL or code.endswith(("-update", "-done")) or each.is_free:
    return 0
  if code == "slice-start":  # returns its source, then the slice
    source, part = each.results[:2]
    return part.hbm + (part.nbytes if source.hbm else 0)
  if code.endswith("-start"):  # also returns its operands
    return result
  if code in _PICKS:
    return result + min(
      each.results[0].nbytes, _hbm(computation, each.operands[:1])
    )
  if code == "dynamic-update-slice":
    update = computation[each.operands[1]].results[0]
    return update.hbm + (update.nbytes if result else 0)
  return result + _hbm(computation, each.operands)


def _fusion(module: Module, computation: Computation, each: Instruction) -> int:
  """Counts the bytes that a fusion reads of its operands and writes."""
  read = sum(
    min(needed, _hbm(computation, [operand]))
    for needed, operand in zip(
      _of_operands(module, each), each.operands, strict=True
    )
  )
  return read + sum(
    _written(inner, root) if root else result.hbm
    for inner, root, result in _roots(module, each)
    if result.hbm
  )


def _of_operands(module: Module, each: Instruction) -> list[int]:
  """Counts the bytes that a fusion reads of each operand, in any memory."""
  inner = _fused(module, each)
  numbered = {
    int(x.operands[0]): x for x in inner.values() if x.opcode == "parameter"
  }
  return [
    _needed(module, inner, numbered[number])
    for number in range(len(each.operands))
  ]


def _needed(module: Module, inner: Computation, source: Instruction) -> int:
  """Counts the bytes of a result that the rest of a fusion reads."""
  full_bytes = source.results[0].nbytes
  needed = 0
  for user in inner.values():
    if source.name not in user.operands:
      continue
    first = user.operands[0] == source.name
    if _is_same(module, user):
      needed += full_bytes if user.root else _needed(module, inner, user)
    elif user.opcode == "fusion":
      taken = zip(_of_operands(module, user), user.operands, strict=True)
      needed += sum(size for size, name in taken if name == source.name)
    elif user.opcode in _PICKS and first:
      needed += user.results[0].nbytes
    elif not (user.opcode == "dynamic-update-slice" and first):
      return full_bytes
  return min(needed, full_bytes)


def _is_same(module: Module, each: Instruction) -> bool:
  """Returns whether an instruction only changes an array's layout."""
  if each.opcode != "fusion":
    return each.opcode in _SAME
  opcodes = {x.opcode for x in _fused(module, each).values()}
  return opcodes <= {"parameter", *_SAME}


def _fused(module: Module, each: Instruction) -> Computation:
  (name,) = each.called("calls")
  return module.computations[name]


def _roots(
  module: Module, each: Instruction
) -> Iterator[tuple[Computation, Instruction | None, Buffer]]:
  """Returns the instructions that produce the arrays of a fusion."""
  inner = _fused(module, each)
  (root,) = (x for x in inner.values() if x.root)
  roots: Sequence[Instruction | None]
  if root.opcode == "tuple":
    roots = [inner[x] for x in root.operands]
  else:
    roots = [root] if len(each.results) == 1 else [None] * len(each.results)
  for made, result in zip(roots, each.results, strict=True):
    yield inner, made, result


def _written(inner: Computation, root: Instruction) -> int:
  """Counts the bytes of a result that are written; updates are in place."""
  if root.opcode == "bitcast":
    return _written(inner, inner[root.operands[0]])
  if root.opcode == "dynamic-update-slice":
    return inner[root.operands[1]].results[0].nbytes
  return root.results[0].nbytes


def _kernel(
  computation: Computation, each: Instruction, kernels: _Kernels
) -> int:
  """Counts the bytes of a Pallas kernel, without arrays in VMEM."""
  kernel = kernels.get((each.kernel, tuple(x.shape for x in each.results)))
  if kernel is None or len(kernel.read) != len(each.operands):
    return _plain(computation, each)
  read = zip(kernel.read, each.operands, strict=True)
  written = zip(kernel.written, each.results, strict=True)
  return sum(size for size, name in read if _hbm(computation, [name])) + sum(
    size for size, result in written if result.hbm
  )


def _hbm(computation: Computation, names: Sequence[str]) -> int:
  return sum(x.hbm for name in names for x in computation[name].results)
