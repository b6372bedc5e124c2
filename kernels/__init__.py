"""Array programs that no library has, each with a plain reference beside it.

XLA computes them everywhere; on TPUs and GPUs Pallas kernels do where they
serve. `use` chooses.
"""

from kernels.dispatch import Implementation as Implementation
from kernels.dispatch import use as use
