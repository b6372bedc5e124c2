"""What a run ran on, for its records."""

import contextlib
import os
import platform
from importlib import metadata

import jax

from kvjax.experiments.run import multihost

_PACKAGES = ("kvjax", "jax", "jaxlib", "flax", "numpy", "tokenizers")


def versions() -> dict[str, str]:
  """Returns the versions of Python and of relevant packages."""
  by_name = {"python": platform.python_version()}
  for name in _PACKAGES:
    # kvjax need not be installed when it runs from a checkout.
    with contextlib.suppress(metadata.PackageNotFoundError):
      by_name[name] = metadata.version(name)
  return by_name


def device(count: int = 1) -> str:
  """Describes the device, as `CPU, 2 cores` or `4 x NVIDIA H100`.

  Of many hosts, each has it, as in `2 hosts with 4 x TPU v5e`, unless the mesh
  spans them, as in `8 x TPU v5e on 2 hosts`.
  """
  kind = local_device(count)
  if multihost.count() == 1:
    return kind
  if multihost.sharing() == 1:
    return f"{kind} on {multihost.count()} hosts"
  return f"{multihost.count()} hosts with {kind}"


def local_device(count: int = 1) -> str:
  """Describes the device of this host, which has done the work alone."""
  kind = jax.local_devices()[0].device_kind
  if jax.default_backend() == "cpu":
    kind = f"CPU, {os.cpu_count()} cores"
  return kind if count == 1 else f"{count} x {kind}"
