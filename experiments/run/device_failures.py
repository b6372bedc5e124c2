"""Says what to do where a kernel does not compile, or memory is short."""

import re
import traceback

from kvjax.errors import causes
from kvjax.experiments import help_pages
from kvjax.kernels import OPERATIONS

# Compilers of kernels, and the memory that only kernels ask for.
_COMPILER = r"Mosaic|Triton|memory space [sv]mem"
_PLACE = re.compile(rf"kernels/({'|'.join(OPERATIONS)})/")
# XLA's errors, and Python's.
_SHORT = r"^JaxRuntimeError: .*RESOURCE_EXHAUSTED|^MemoryError"
# Flags that say how much is in memory at once.
_SIZES = ("batch", "rows", "length")
_SAID = 200


def of_kernel(error: BaseException) -> str | None:
  """Explains an error that a kernel's compilation raises; None for others."""
  said = compilers(error)
  if said is None:
    return None
  found = _PLACE.search("".join(map(_places, causes(error))))
  flag = f"--kernels={found[1]}:xla" if found else "--kernels=xla"
  kernel = f"The kernel of {found[1]}" if found else "A kernel"
  return (
    f"{kernel} does not compile for this device; {flag} runs XLA's program "
    f"instead ({said})."
  )


def of_memory(error: BaseException) -> str | None:
  """Explains an error that says that memory is short; None for all others."""
  said = _first_words(error, _SHORT)
  if said is None:
    return None
  own = help_pages.own_flags()
  sizes = " or ".join(f"--{name}" for name in _SIZES if name in own)
  reason = f" ({said})" if said else ""
  less = f"; a smaller {sizes} takes less" if sizes else ""
  return f"There is too little memory for this{reason}{less}."


def compilers(error: BaseException) -> str | None:
  """Returns the first words of a kernel's compiler; None for other errors."""
  return _first_words(error, _COMPILER)


def _first_words(error: BaseException, pattern: str) -> str | None:
  """Returns what the error, or one that it came from, begins with.

  Args:
    error: the error.
    pattern: of the error's kind and text; None is returned if none matches.
  """
  for one in causes(error):
    if re.search(pattern, f"{type(one).__name__}: {one}"):
      return " ".join(str(one).split())[:_SAID].removesuffix(".")
  return None


def _places(error: BaseException) -> str:
  """What an error says of the source: its text, and the files it has passed."""
  frames = traceback.extract_tb(error.__traceback__)
  return "\n".join([str(error), *(frame.filename for frame in frames)])
