"""What a program brings whole from the host's memory."""

from kvjax.experiments.tpu.hlo import Buffer, Module

_HOST = 5
# They hand on what is there.
_SAME = frozenset("parameter tuple get-tuple-element bitcast while".split())


def copied_from_host(module: Module) -> int:
  """Bytes of the largest array on the device such as those given on the host.

  Such are arrays of the same shape and bytes: what is kept with the host is of
  no use if all of it comes over for a step.
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
