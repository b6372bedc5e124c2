"""The resources that a compiled program needs on a chip."""

import dataclasses
from typing import Any

import jax

from kvjax.kernels.compiled.collectives import Collective, collectives
from kvjax.kernels.compiled.hlo import Module
from kvjax.kernels.compiled.host_arrays import copied_from_host
from kvjax.kernels.compiled.kernel_traffic import kernels_in
from kvjax.kernels.compiled.overlap import overlap
from kvjax.kernels.compiled.traffic import traffic


@dataclasses.dataclass(frozen=True)
class Footprint:
  """Bytes that a program takes on each of its devices.

  Attributes:
    arguments: arguments in the device's memory.
    results: results in the device's memory that reuse no argument's buffer.
    temporary: intermediate results in the device's memory, and the program.
    host: arguments, results and intermediate results in the host's memory.
    copied: the largest array in host memory that is copied to the device in
      full.
    moved: traffic between the device's memory and its cores; see `of`.
    overlap: fusions and kernels (not bytes) that run while the host works.
    kernels: names of the program's Pallas kernels.
    vmem: the largest VMEM size of a kernel; 0 without kernels.
    sent: what the devices send each other; see `of`.
  """

  arguments: int
  results: int
  temporary: int
  host: int
  copied: int
  moved: int
  overlap: int
  kernels: tuple[str, ...]
  vmem: int
  sent: tuple[Collective, ...]

  @classmethod
  def of(
    cls, compiled: jax.stages.Compiled, jaxpr: Any, turn: bool = False
  ) -> "Footprint":
    """Measures a program that was compiled from a jaxpr.

    Args:
      compiled: the program.
      jaxpr: the jaxpr it was compiled from.
      turn: count only what one turn of its loop moves and sends.
    """
    memory: Any = compiled.memory_analysis()
    module = Module.of(compiled.as_text() or "")
    kernels = [each for each in module if each.is_kernel]
    return cls(
      arguments=memory.argument_size_in_bytes,
      results=memory.output_size_in_bytes - memory.alias_size_in_bytes,
      temporary=memory.temp_size_in_bytes + memory.generated_code_size_in_bytes,
      host=memory.host_argument_size_in_bytes
      + memory.host_output_size_in_bytes
      - memory.host_alias_size_in_bytes
      + memory.host_temp_size_in_bytes,
      copied=copied_from_host(module),
      moved=traffic(module, kernels_in(jaxpr), turn=turn),
      overlap=overlap(module),
      kernels=tuple(sorted({each.kernel for each in kernels})),
      vmem=max((each.vmem for each in kernels), default=0),
      sent=tuple(collectives(module, turn=turn)),
    )

  @property
  def hbm(self) -> int:
    """The maximum size of all data in the device's memory at once."""
    return self.arguments + self.results + self.temporary
