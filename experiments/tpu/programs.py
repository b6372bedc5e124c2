"""What is compiled, and what comes of it."""

import dataclasses
from collections.abc import Callable
from typing import NamedTuple

import jax

from kvjax.experiments.tpu.chips import Chip
from kvjax.experiments.tpu.footprints import Footprint

KINDS = ("kernel", "prefill", "decode")


class Lowered(NamedTuple):
  """A program that only has to be compiled.

  Attributes:
    measure: compiles it for the devices of a chip.
    ideal: the fewest bytes that must move between a device's memory and its
      cores; None where that says nothing about the program.
    host: bytes per device that must be in the host's memory.
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
  ) -> "Lowered":
    """A function that was traced under `jax.jit`.

    Args:
      traced: the function; it is lowered now, in the contexts that are open.
      ideal: see above.
      host: likewise.
      turn: only a turn of its loop counts as moved.
    """
    lowered = traced.lower()

    def measure() -> Footprint:
      return Footprint.of(lowered.compile(), traced.jaxpr, turn=turn)

    return cls(measure, ideal, host)


@dataclasses.dataclass(frozen=True)
class Program:
  """Something to compile.

  Attributes:
    kind: one of `KINDS`.
    name: of the operation or the method.
    shapes: how large, in words.
    operands: the shapes and dtypes themselves, where they are few.
    lower: brings it as far as compiling, for a chip.
    function: which of the operation's functions it calls.
  """

  kind: str
  name: str
  shapes: str
  lower: Callable[[Chip], Lowered]
  operands: Callable[[], str] | None = None
  function: str = ""


@dataclasses.dataclass(frozen=True)
class Outcome:
  """What came of compiling a program for a chip.

  Attributes:
    program: what was compiled.
    chip: what for.
    footprint: what it takes, if it compiled.
    ideal: see `Lowered`.
    fault: why it does not serve; None if it does.
  """

  program: Program
  chip: Chip
  footprint: Footprint | None = None
  ideal: int | None = None
  fault: str | None = None


def compiled(program: Program, chip: Chip) -> Outcome:
  """Compiles a program; whatever goes wrong is a fault of the outcome."""
  try:
    lowered = program.lower(chip)
    footprint = lowered.measure()
  except Exception as error:  # of tracing, of Mosaic or of XLA
    return Outcome(program, chip, fault=_first_line(error))
  fault = find_fault(program, chip, footprint, lowered.host)
  return Outcome(program, chip, footprint, lowered.ideal, fault)


def find_fault(
  program: Program, chip: Chip, footprint: Footprint, host: int
) -> str | None:
  """Why a program that compiles does not serve, in a sentence.

  Args:
    program: what was compiled.
    chip: what for.
    footprint: what it takes.
    host: bytes that must be in the host's memory.
  """
  if program.kind == "kernel" and not footprint.kernels:
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
