"""Memory that is short, in a sentence that says what to do."""

from kvjax.experiments import help_pages
from kvjax.experiments.run.causes import first_words

# XLA's errors, and Python's.
_SHORT = r"^JaxRuntimeError: .*RESOURCE_EXHAUSTED|^MemoryError"
# Flags that say how much is in memory at once.
_SIZES = ("batch", "rows", "length")


def sentence(error: BaseException) -> str | None:
  """Explains an error that says that memory is short; None for all others."""
  said = first_words(error, _SHORT)
  if said is None:
    return None
  own = help_pages.own_flags()
  sizes = " or ".join(f"--{name}" for name in _SIZES if name in own)
  reason = f" ({said})" if said else ""
  less = f"; a smaller {sizes} takes less" if sizes else ""
  return f"There is too little memory for this{reason}{less}."
