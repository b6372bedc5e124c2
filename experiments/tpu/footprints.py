"""What a compiled program takes of a chip."""

import dataclasses
from typing import Any

import jax

from kvjax.experiments.tpu.hlo import Module
from kvjax.experiments.tpu.host_arrays import copied_from_host
from kvjax.experiments.tpu.kernel_traffic import kernels_in
from kvjax.experiments.tpu.meanwhile import meanwhile
from kvjax.experiments.tpu.traffic import traffic


@dataclasses.dataclass(frozen=True)
class Footprint:
  """Bytes that a program takes on each of its devices.

  Attributes:
    arguments: in the device's memory.
    results: the same, where they do not take an argument's place.
    temporary: the same, for intermediate results, and the program itself.
    host: arguments, results and intermediate results in the host's memory.
    copied: the largest of them that is copied whole to the device.
    moved: between the device's memory and its cores; see `of`.
    meanwhile: fusions and kernels (not bytes) that run beside the host's work.
    kernels: names of the Pallas kernels in it.
    vmem: what the one of them that takes most has of VMEM; 0 without any.
  """

  arguments: int
  results: int
  temporary: int
  host: int
  copied: int
  moved: int
  meanwhile: int
  kernels: tuple[str, ...]
  vmem: int

  @classmethod
  def of(
    cls, compiled: jax.stages.Compiled, jaxpr: Any, turn: bool = False
  ) -> "Footprint":
    """Reads it off a program that was compiled from a jaxpr.

    Args:
      compiled: the program.
      jaxpr: what it was compiled from.
      turn: only what its loop moves counts as moved.
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
      meanwhile=meanwhile(module),
      kernels=tuple(sorted({each.kernel for each in kernels})),
      vmem=max((each.vmem for each in kernels), default=0),
    )

  @property
  def hbm(self) -> int:
    """All that is in the device's memory at once, at most."""
    return self.arguments + self.results + self.temporary
