"""Bytes that a compiled program moves between HBM and the cores.

The compiler's own estimate leaves kernels out and counts what it fetches ahead
several times.
"""

from collections.abc import Iterable, Mapping, Sequence

from kvjax.experiments.tpu.hlo import Computation, Instruction, Module
from kvjax.experiments.tpu.kernel_traffic import KernelTraffic

# Moves nothing, or something that is counted elsewhere.
_STILL = frozenset(
  "parameter constant tuple get-tuple-element bitcast after-all partition-id "
  "replica-id opt-barrier".split()
)
# Read no more of their first operand than they answer.
_PICKS = frozenset(["slice", "dynamic-slice", "gather"])

_Kernels = Mapping[tuple[str, tuple[tuple[int, ...], ...]], KernelTraffic]


def traffic(
  module: Module, kernels: Iterable[KernelTraffic], *, turn: bool = False
) -> int:
  """Bytes that instructions read from HBM and write to it.

  Of the branches of a condition the one that moves most counts; a loop's body
  counts once, as the program does not say how often it is run.

  Args:
    module: the program.
    kernels: those that were traced into it. Of a kernel that is not among them
      every operand counts once.
    turn: count the program's loop alone, of several the one that moves most.
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
  own = module.computations[name]

  def moved(each: Instruction) -> int:
    called = [
      _computation(module, kernels, name)
      for kind in _CALLS.get(each.opcode, ())
      for name in each.called(kind)
    ]
    if each.opcode == "conditional":
      return max(called)
    if called:
      return sum(called)
    if each.opcode == "fusion":
      (inner,) = each.called("calls")
      return _fusion(own, each, module.computations[inner])
    if each.is_kernel:
      return _kernel(own, each, kernels)
    return _alone(own, each)

  return sum(map(moved, own.values()))


# Instructions that run other computations, and the attributes that name these.
_CALLS = {
  "while": ("condition", "body"),
  "conditional": (
    "branch_computations",
    "true_computation",
    "false_computation",
  ),
  "call": ("to_apply",),
}


def _alone(own: Computation, each: Instruction) -> int:
  """Bytes of an instruction that is no part of another."""
  code = each.opcode
  result = sum(x.hbm for x in each.results)
  if code in _STILL or code.endswith(("-update", "-done")) or each.is_free:
    return 0
  if code == "slice-start":  # answers what it picks from, then the part
    source, part = each.results[:2]
    return part.hbm + (part.nbytes if source.hbm else 0)
  if code.endswith("-start"):  # answers its operands as well
    return result
  if code in _PICKS:
    return result + min(each.results[0].nbytes, _hbm(own, each.operands[:1]))
  if code == "dynamic-update-slice":
    update = own[each.operands[1]].results[0]
    return update.hbm + (update.nbytes if result else 0)
  return result + _hbm(own, each.operands)


def _fusion(own: Computation, each: Instruction, inner: Computation) -> int:
  """Bytes that a fusion needs of its operands, and those that it makes."""
  numbered = {
    int(x.operands[0]): x for x in inner.values() if x.opcode == "parameter"
  }
  read = sum(
    min(_needed(inner, numbered[number]), _hbm(own, [operand]))
    for number, operand in enumerate(each.operands)
  )
  return read + sum(
    _made(inner, root) if root else result.hbm
    for root, result in zip(_roots(inner, each), each.results, strict=True)
    if result.hbm
  )


def _needed(inner: Computation, source: Instruction) -> int:
  """Bytes that the rest of a fusion takes of what an instruction answers."""
  whole = source.results[0].nbytes
  needed = 0
  for user in inner.values():
    if source.name not in user.operands:
      continue
    first = user.operands[0] == source.name
    if user.opcode == "bitcast":
      needed += _needed(inner, user)
    elif user.opcode in _PICKS and first:
      needed += user.results[0].nbytes
    elif not (user.opcode == "dynamic-update-slice" and first):
      return whole
  return min(needed, whole)


def _roots(
  inner: Computation, each: Instruction
) -> Sequence[Instruction | None]:
  """What answers each array of a fusion, if that is an instruction's all."""
  (root,) = (x for x in inner.values() if x.root)
  if root.opcode == "tuple":
    return [inner[x] for x in root.operands]
  return [root] if len(each.results) == 1 else [None] * len(each.results)


def _made(inner: Computation, root: Instruction) -> int:
  """Bytes of an answer that are new: an update leaves the rest in its place."""
  if root.opcode == "bitcast":
    return _made(inner, inner[root.operands[0]])
  if root.opcode == "dynamic-update-slice":
    return inner[root.operands[1]].results[0].nbytes
  return root.results[0].nbytes


def _kernel(own: Computation, each: Instruction, kernels: _Kernels) -> int:
  """Bytes of a kernel of ours, but for arrays that are in VMEM already."""
  kernel = kernels.get((each.kernel, tuple(x.shape for x in each.results)))
  if kernel is None or len(kernel.read) != len(each.operands):
    return _alone(own, each)
  read = zip(kernel.read, each.operands, strict=True)
  written = zip(kernel.written, each.results, strict=True)
  return sum(size for size, name in read if _hbm(own, [name])) + sum(
    size for size, result in written if result.hbm
  )


def _hbm(own: Computation, names: Sequence[str]) -> int:
  return sum(x.hbm for name in names for x in own[name].results)
