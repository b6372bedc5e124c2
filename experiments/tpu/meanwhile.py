"""What a device does while its host works for it."""

from kvjax.experiments.tpu.hlo import Module


def meanwhile(module: Module) -> int:
  """Fusions and kernels between the start of a host's work and its end.

  They stand in the text in the order in which they are run.
  """
  found = 0
  for computation in module.computations.values():
    awaited: set[str] = set()
    for each in computation.values():
      if each.opcode.endswith("-done"):
        awaited -= set(each.operands)
      elif each.opcode.endswith("-start") and each.is_on_host:
        awaited.add(each.name)
      elif awaited and (each.opcode == "fusion" or each.is_kernel):
        found += 1
  return found
