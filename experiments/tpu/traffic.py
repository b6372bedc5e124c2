"""Bytes that a compiled program moves between HBM and the cores.

The compiler's own estimate leaves kernels out and counts what it fetches ahead
several times.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence

from kvjax.experiments.tpu.hlo import Buffer, Computation, Instruction, Module
from kvjax.experiments.tpu.kernel_traffic import KernelTraffic
from kvjax.experiments.tpu.loops import turns

# Moves nothing, or something that is counted elsewhere.
_STILL = frozenset(
  "parameter constant tuple get-tuple-element bitcast after-all partition-id "
  "replica-id opt-barrier".split()
)
# Within a fusion they answer what they are given, as far as others read it.
_SAME = frozenset(["bitcast", "copy"])
# Read no more of their first operand than they answer.
_PICKS = frozenset(["slice", "dynamic-slice", "gather"])

_Kernels = Mapping[tuple[str, tuple[tuple[int, ...], ...]], KernelTraffic]


def traffic(
  module: Module, kernels: Iterable[KernelTraffic], *, turn: bool = False
) -> int:
  """Bytes that instructions read from HBM and write to it.

  Of the branches of a condition the one that moves most counts; a loop's body
  counts as often as it is run, and once where data decide.

  Args:
    module: the program.
    kernels: those that were traced into it. Of a kernel that is not among them
      every operand counts once.
    turn: count one turn of the program's loop alone, of several the one whose
      turn moves most.
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
    if each.opcode == "while":
      return (turns(module, own, each) or 1) * sum(called)
    if called:
      return sum(called)
    if each.opcode == "fusion":
      return _fusion(module, own, each)
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


def _fusion(module: Module, own: Computation, each: Instruction) -> int:
  """Bytes that a fusion needs of its operands, and those that it makes."""
  read = sum(
    min(needed, _hbm(own, [operand]))
    for needed, operand in zip(
      _of_operands(module, each), each.operands, strict=True
    )
  )
  return read + sum(
    _made(inner, root) if root else result.hbm
    for inner, root, result in _roots(module, each)
    if result.hbm
  )


def _of_operands(module: Module, each: Instruction) -> list[int]:
  """Bytes that a fusion takes of each of its operands, wherever they are."""
  inner = _fused(module, each)
  numbered = {
    int(x.operands[0]): x for x in inner.values() if x.opcode == "parameter"
  }
  return [
    _needed(module, inner, numbered[number])
    for number in range(len(each.operands))
  ]


def _needed(module: Module, inner: Computation, source: Instruction) -> int:
  """Bytes that the rest of a fusion takes of what an instruction answers."""
  whole = source.results[0].nbytes
  needed = 0
  for user in inner.values():
    if source.name not in user.operands:
      continue
    first = user.operands[0] == source.name
    if _is_same(module, user):
      needed += whole if user.root else _needed(module, inner, user)
    elif user.opcode == "fusion":
      taken = zip(_of_operands(module, user), user.operands, strict=True)
      needed += sum(size for size, name in taken if name == source.name)
    elif user.opcode in _PICKS and first:
      needed += user.results[0].nbytes
    elif not (user.opcode == "dynamic-update-slice" and first):
      return whole
  return min(needed, whole)


def _is_same(module: Module, each: Instruction) -> bool:
  """Whether an instruction only lays an array out anew."""
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
  """What makes each array of a fusion, if that is an instruction's all."""
  inner = _fused(module, each)
  (root,) = (x for x in inner.values() if x.root)
  roots: Sequence[Instruction | None]
  if root.opcode == "tuple":
    roots = [inner[x] for x in root.operands]
  else:
    roots = [root] if len(each.results) == 1 else [None] * len(each.results)
  for made, result in zip(roots, each.results, strict=True):
    yield inner, made, result


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
