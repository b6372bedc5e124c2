"""Array programs that no library has, each with a plain reference beside it.

XLA computes them everywhere; on TPUs and GPUs Pallas kernels do where they
serve. `use` chooses.
"""

from kvjax.kernels.dispatch import Implementation as Implementation
from kvjax.kernels.dispatch import use as use
