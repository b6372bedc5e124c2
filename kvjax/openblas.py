"""OpenBLAS, by which JAX factorizes matrices on CPUs."""

import os
import sys

# The variables that it reads its number of threads from.
_THREADS = ("OPENBLAS_NUM_THREADS", "GOTO_NUM_THREADS", "OMP_NUM_THREADS")


def load() -> None:
  """Loads it with one thread, unless the environment says how many.

  Its threads wait for each other in matrices as small as a head's, which takes
  much longer than one thread does. It reads the environment, which is left as
  it was, only when it is loaded: by this function, or by whoever imports
  `scipy.linalg` before, as JAX does for its first factorization.
  """
  if "scipy.linalg" in sys.modules or any(map(os.environ.get, _THREADS)):
    return
  os.environ["OPENBLAS_NUM_THREADS"] = "1"
  try:
    import scipy.linalg  # noqa: F401
  finally:
    del os.environ["OPENBLAS_NUM_THREADS"]
