"""Memory that a device lacks, in a sentence that says what to do."""

from kvjax.experiments import help_pages
from kvjax.experiments.run.kernel_failures import first_words

# Flags that say how much is in memory at once.
_SIZES = ("batch", "rows", "length")


def sentence(error: BaseException) -> str | None:
  """Explains an error that says that memory is short; None for all others."""
  said = first_words(error, "RESOURCE_EXHAUSTED|^MemoryError")
  if said is None:
    return None
  own = help_pages.own_flags()
  sizes = " or ".join(f"--{name}" for name in _SIZES if name in own)
  less = f"; a smaller {sizes} takes less" if sizes else ""
  return f"The device has too little memory for this ({said}){less}."
