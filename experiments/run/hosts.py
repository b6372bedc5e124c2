"""Programs that run on many hosts, each of which does a part of the work.

Every host runs the same program with the same flags and has a model of its own.
They exchange bytes through a collective of one device per host, so that nothing
but the accelerators' network, or that of the CPUs, has to connect them.
"""

import sys
from collections.abc import Callable, Iterator, Sequence

import jax
import numpy as np
from jax.experimental import multihost_utils

from kvjax.errors import InputError
from kvjax.experiments import cli

_FINE, _REFUSED = b"+", b"-"


def count() -> int:
  """Number of hosts."""
  # Asking JAX would set up the devices, which takes seconds on a TPU.
  return jax.process_count() if jax.distributed.is_initialized() else 1


def is_first() -> bool:
  """Whether this host writes the files and prints."""
  return count() == 1 or jax.process_index() == 0


def gather(payload: bytes) -> list[bytes]:
  """Returns the bytes of every host, in order; all hosts must call it.

  If another host has stopped, this one exits with code 130, and the first one
  says so.
  """
  if count() == 1:
    return [payload]
  try:
    sizes = multihost_utils.process_allgather(np.array([len(payload)]))
    padded = np.zeros(int(np.max(sizes)), np.uint8)
    padded[: len(payload)] = np.frombuffer(payload, np.uint8)
    rows = multihost_utils.process_allgather(padded)
  # What it raises depends on the kind of device.
  except (RuntimeError, ValueError):
    if is_first():
      print(
        "Another host has stopped; what is done is kept, and the same command "
        "on all hosts goes on from there.",
        file=sys.stderr,
      )
    cli.leave(cli.INTERRUPTED)
  return [
    row[:size].tobytes() for row, size in zip(rows, sizes.flat, strict=True)
  ]


def from_first(make: Callable[[], bytes]) -> bytes:
  """Calls a function on the first host and returns the result on all.

  Raises:
    InputError: the function raises it; the other hosts exit without a word.
  """
  if count() == 1:
    return make()
  refusal: InputError | None = None
  message = b""
  if is_first():
    try:
      message = _FINE + make()
    except InputError as error:
      refusal, message = error, _REFUSED
  message = gather(message)[0]
  if refusal is not None:
    raise refusal
  if message[:1] == _REFUSED:
    cli.leave(cli.WRONG_INPUT)
  return message[1:]


def share[Item, Result](
  items: Sequence[Item],
  work: Callable[[Item], Iterator[list[Result]]],
  encode: Callable[[list[Result]], bytes],
  decode: Callable[[bytes], list[Result]],
) -> Iterator[list[Result]]:
  """Yields the results of all items, of which each host works on some.

  Hosts take turns in the items and wait for each other after every item, so
  that all of them know all results.

  Args:
    items: the items, the same on all hosts.
    work: yields results of an item as they come.
    encode: converts results to bytes.
    decode: converts them back.
  """
  if count() == 1:
    for item in items:
      yield from work(item)
    return
  for first in range(0, len(items), count()):
    own = items[first : first + count()][jax.process_index() :][:1]
    found = [result for item in own for part in work(item) for result in part]
    yield from filter(None, map(decode, gather(encode(found))))
