"""Finds arrays that a program copies in full from host memory."""

from kvjax.kernels.compiled.hlo import Buffer, Module

_HOST = 5
# Instructions that pass a buffer on.
_SAME = frozenset("parameter tuple get-tuple-element bitcast while".split())


def copied_from_host(module: Module) -> int:
  """Returns bytes of the largest device array that copies a host argument.

  An array counts if it has the shape and bytes of a host argument. Offloading
  is useless if a step copies the full array to the device.
  """
  given = {
    (each.shape, each.nbytes)
    for instruction in module.computations[module.entry].values()
    if instruction.opcode == "parameter"
    for each in instruction.results
    if each.space == _HOST
  }

  def is_copy(each: Buffer) -> bool:
    return each.hbm > 0 and (each.shape, each.nbytes) in given

  return max(
    (
      each.nbytes
      for instruction in module
      if instruction.opcode not in _SAME
      for each in instruction.results
      if is_copy(each)
    ),
    default=0,
  )
