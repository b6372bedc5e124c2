"""Block sizes and other options of kernels, from a table by kind of device.

`tuning.json` has the values of each kernel, which `kvjax tune` measures. They
change how fast a kernel is, and nothing else but the order of sums.
"""

import contextlib
import functools
import json
import pathlib
from collections.abc import Iterator, Mapping

import jax

# Values of options, by name of the kernel. "gather/tpu" is that of
# kernels/gather/tpu.py.
Entry = Mapping[str, Mapping[str, int]]
# Entries by JAX's name of a kind of device, such as "TPU v5 lite".
Table = Mapping[str, Entry]

# The entry of all kinds without their own.
DEFAULT = "default"

# As in `dispatch`: what was compiled with one table is never used for another.
_used = jax.make_user_context(default_value=())


@contextlib.contextmanager
def use_table(table: Table) -> Iterator[None]:
  """Prefers a table to the one of the package, for all that is traced within.

  A value that it lacks for a kind of device is that of the package.

  Args:
    table: values by kind of device, kernel and option, which are among the
      candidates of `kvjax.kernels.specs.all_choices`: others are not checked,
      and may give wrong results.

  Raises:
    ValueError: a kernel has no such option.

  Examples:
    >>> from kvjax import kernels
    >>> from kvjax.kernels.tuning import option
    >>> with kernels.use_table({"default": {"gather/tpu": {"read": 4096}}}):
    ...   option("gather/tpu", "read"), option("gather/tpu", "write")
    (4096, 1024)
  """
  values = _flat(table)
  known = {key[1:] for key in _packaged()}
  for _, kernel, name in values:
    if (kernel, name) not in known:
      raise ValueError(f"No kernel {kernel!r} has an option {name!r}.")
  with _used(tuple(sorted(values.items()))):
    yield


def uses_table_as_here() -> contextlib.AbstractContextManager[None]:
  """Returns a context of this thread's table, to enter in another thread."""
  uses: contextlib.AbstractContextManager[None] = _used(_used.value)
  return uses


def option(kernel: str, name: str) -> int:
  """Returns an option of a kernel for the device that is traced for.

  Args:
    kernel: name of the kernel.
    name: name of the option.
  """
  values = _packaged() | dict(_used.value)
  own = values.get((device_kind(), kernel, name))
  return values[DEFAULT, kernel, name] if own is None else own


def device_kind() -> str:
  """Returns JAX's name of the kind of device to compile for.

  It is that of the mesh, which may be one of devices that are not attached.
  """
  device = jax.sharding.get_abstract_mesh().abstract_device
  if device is None:
    device = jax.local_devices()[0]
  return str(device.device_kind)


@functools.cache
def _packaged() -> dict[tuple[str, str, str], int]:
  path = pathlib.Path(__file__).with_suffix(".json")
  return _flat(json.loads(path.read_text(encoding="utf-8")))


def _flat(table: Table) -> dict[tuple[str, str, str], int]:
  return {
    (kind, kernel, name): value
    for kind, entry in table.items()
    for kernel, values in entry.items()
    for name, value in values.items()
  }
