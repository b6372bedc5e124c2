"""Contexts of JAX and of kernels, which other threads do not inherit."""

import contextlib
from collections.abc import Callable

import jax

from kvjax.kernels import dispatch, tuning

# Options of JAX, with a context each, that change what a program computes or
# whether it is refused. JAX has no public function that carries over all.
_OPTIONS = (
  "debug_infs",
  "debug_key_reuse",
  "debug_nans",
  "default_device",
  "default_matmul_precision",
  "default_prng_impl",
  "disable_jit",
  "enable_x64",
  "legacy_prng_key",
  "numpy_dtype_promotion",
  "numpy_rank_promotion",
  "threefry_partitionable",
)


def in_these_contexts(run: Callable[[], None]) -> Callable[[], None]:
  """Returns a function that runs another as if in the current contexts.

  They are the mesh, JAX's options, and the kernels and their table in use. JAX
  stores them per thread, so that `contextvars` do not carry them over.

  Args:
    run: the function, which may be called in another thread.
  """
  mesh = jax.sharding.get_mesh()
  options = {name: getattr(jax.config, f"jax_{name}") for name in _OPTIONS}
  kernels = [dispatch.uses_as_here(), tuning.uses_table_as_here()]

  def run_there() -> None:
    with contextlib.ExitStack() as stack:
      stack.enter_context(jax.set_mesh(mesh))
      for name, value in options.items():
        stack.enter_context(getattr(jax, name)(value))
      for uses in kernels:
        stack.enter_context(uses)
      run()

  return run_there
