"""Programs that the host runs on arrays in its own memory."""

from collections.abc import Callable
from typing import Any

import jax
from jax.experimental.compute_on import compute_on
from jaxtyping import Array

_HOST = jax.memory.Space.Host


def is_on_host(array: Array | jax.ShapeDtypeStruct) -> bool:
  """Whether an array, a tracer or a shape is in host memory."""
  return bool(jax.typeof(array).memory_space == _HOST)


def run_on_host(function: Callable[..., Any], *operands: Any) -> Any:
  """Runs a function on the host, concurrently with the device.

  It starts once its operands are there, and the device waits for its results.

  Args:
    function: a function of arrays. All of them are on the host, so it must not
      create arrays. Scalars in arithmetic are allowed.
    *operands: trees of arrays, which are copied to the host if they are not
      there.

  Returns:
    The function's results, on the device.
  """
  operands = jax.tree.map(
    lambda x: x if is_on_host(x) else jax.device_put(x, _HOST), operands
  )
  run = compute_on(
    function,
    compute_type="device_host",
    out_memory_spaces=jax.memory.Space.Device,
  )
  return run(*operands)
