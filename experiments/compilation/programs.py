"""Programs to compile, and their outcomes."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import NamedTuple

import jax

from kvjax.experiments.compilation.chips import Chip
from kvjax.kernels.compiled.footprints import Footprint

KINDS = ("kernel", "prefill", "decode")


class Lowered(NamedTuple):
  """A program that is ready to compile.

  Attributes:
    measure: compiles it for the devices of a chip.
    ideal: the minimum number of bytes that must move between a device's memory
      and its cores; None if that is no useful bound.
    host: bytes per device that must be in host memory.
  """

  measure: Callable[[], Footprint]
  ideal: int | None = None
  host: int = 0

  @classmethod
  def of(
    cls,
    traced: jax.stages.Traced,
    ideal: int | None = None,
    host: int = 0,
    *,
    turn: bool = False,
    options: Mapping[str, bool | int] | None = None,
  ) -> "Lowered":
    """Lowers a function that was traced under `jax.jit`.

    Args:
      traced: the function; it is lowered now, in the current contexts.
      ideal: see the class.
      host: see the class.
      turn: count only the traffic of one turn of its loop.
      options: of the compiler.
    """
    lowered = traced.lower()

    def measure() -> Footprint:
      compiled = lowered.compile(compiler_options=options)
      return Footprint.of(compiled, traced.jaxpr, turn=turn)

    return cls(measure, ideal, host)


@dataclasses.dataclass(frozen=True)
class Program:
  """A program to compile.

  Attributes:
    kind: one of `KINDS`.
    name: name of the operation or method.
    shapes: its size in words.
    operands: returns shapes and dtypes, if they are few.
    lower: lowers it for a chip.
    function: the function of the operation that it calls.
  """

  kind: str
  name: str
  shapes: str
  lower: Callable[[Chip], Lowered]
  operands: Callable[[], str] | None = None
  function: str = ""


@dataclasses.dataclass(frozen=True)
class Outcome:
  """The outcome of compiling a program for a chip.

  Attributes:
    program: the program.
    chip: the chip.
    footprint: its footprint, if it compiled.
    ideal: see `Lowered`.
    fault: the reason of a failure; None on success.
  """

  program: Program
  chip: Chip
  footprint: Footprint | None = None
  ideal: int | None = None
  fault: str | None = None


def compiled(program: Program, chip: Chip) -> Outcome:
  """Compiles a program; any error becomes the fault of the outcome."""
  try:
    lowered = program.lower(chip)
    footprint = lowered.measure()
  except Exception as error:  # from tracing, Mosaic or XLA
    return Outcome(program, chip, fault=_first_line(error))
  fault = find_fault(program, chip, footprint, lowered.host)
  # What is counted as moved is not true of programs for GPUs.
  ideal = lowered.ideal if chip.platform == "tpu" else None
  return Outcome(program, chip, footprint, ideal, fault)


def find_fault(
  program: Program, chip: Chip, footprint: Footprint, host: int
) -> str | None:
  """Describes why a compiled program fails its checks, in a sentence.

  Args:
    program: the program.
    chip: the chip.
    footprint: its footprint.
    host: bytes that must be in host memory.
  """
  # Some programs for GPUs are XLA's; kernels that decline raise errors.
  tpu = chip.platform == "tpu"
  if tpu and program.kind == "kernel" and not footprint.kernels:
    return "No kernel is in the program."
  if footprint.hbm > chip.hbm_bytes:
    return f"It takes {footprint.hbm:,} bytes of HBM of {chip.hbm_bytes:,}."
  if footprint.vmem > chip.vmem_bytes:
    return f"It takes {footprint.vmem:,} bytes of VMEM of {chip.vmem_bytes:,}."
  if footprint.host < host:
    return f"The host holds {footprint.host:,} bytes of {host:,}."
  if footprint.copied:
    return f"An array of {footprint.copied:,} bytes comes whole from the host."
  return None


def _first_line(error: Exception) -> str:
  lines = str(error).strip().splitlines()
  return f"{type(error).__name__}: {lines[0] if lines else 'no message'}"
