"""Kernels that a compiler refuses, in a sentence that says what to do."""

import re
import traceback

from kvjax.experiments.run.causes import chain, first_words
from kvjax.kernels import OPERATIONS

# Compilers of kernels, and the memory that only kernels ask for.
_COMPILER = r"Mosaic|Triton|memory space [sv]mem"
_PLACE = re.compile(rf"kernels/({'|'.join(OPERATIONS)})/")


def sentence(error: BaseException) -> str | None:
  """Explains an error that a kernel's compilation raises; None for others."""
  said = compilers(error)
  if said is None:
    return None
  found = _PLACE.search("".join(map(_places, chain(error))))
  flag = f"--kernels={found[1]}:xla" if found else "--kernels=xla"
  kernel = f"The kernel of {found[1]}" if found else "A kernel"
  return (
    f"{kernel} does not compile for this device; {flag} runs XLA's program "
    f"instead ({said})."
  )


def compilers(error: BaseException) -> str | None:
  """Returns the first words of a kernel's compiler; None for other errors."""
  return first_words(error, _COMPILER)


def _places(error: BaseException) -> str:
  """What an error says of the source: its text, and the files it has passed."""
  frames = traceback.extract_tb(error.__traceback__)
  return "\n".join([str(error), *(frame.filename for frame in frames)])
