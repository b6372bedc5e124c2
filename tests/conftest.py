"""How every test runs: on 4 CPU devices, strictly, with checked shapes.

The settings are environment variables, so that the binaries that tests start
run under them too. They must be set before JAX is imported.
"""

import os
from pathlib import Path

from jaxtyping import install_import_hook

_CACHE = Path(__file__).parents[1] / ".jax_cache"

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.update(
  XLA_FLAGS="--xla_force_host_platform_device_count=4",
  JAX_NUMPY_DTYPE_PROMOTION="strict",
  JAX_NUMPY_RANK_PROMOTION="raise",
  # What takes XLA a tenth of a second is compiled once for all workers and
  # runs; the size limit is what makes JAX lock the folder.
  JAX_COMPILATION_CACHE_DIR=str(_CACHE),
  JAX_COMPILATION_CACHE_MAX_SIZE=str(2**30),
  JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS="0.1",
  # Every worker has the whole machine in sight: keep its thread pools small.
  NPROC="2",
  OPENBLAS_NUM_THREADS="1",
  TOKENIZERS_PARALLELISM="false",
  MPLBACKEND="agg",
)

install_import_hook(
  ["kvjax", "models", "kernels", "experiments"], "beartype.beartype"
)
