"""Programs that run on many hosts, each of which does a part of the work.

Every host runs the same program with the same flags and has a model of its own.
They exchange bytes through a collective of their devices, so that nothing but
the accelerators' network, or that of the CPUs, has to connect them.
"""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence

import jax
import numpy as np
from jax.experimental import multihost_utils

from kvjax.errors import InputError
from kvjax.experiments import cli
from kvjax.prompts import bucket

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

  Raises:
    cli.StoppedError: another host has stopped, or takes longer than
      collectives wait for, which is 30 minutes on CPUs.
  """
  if count() == 1:
    return [payload]
  try:
    sizes = multihost_utils.process_allgather(np.array([len(payload)]))
    # Few lengths, as each is a program.
    padded = np.zeros(bucket(int(np.max(sizes))), np.uint8)
    padded[: len(payload)] = np.frombuffer(payload, np.uint8)
    rows = multihost_utils.process_allgather(padded)
  # What it raises depends on the kind of device.
  except (RuntimeError, ValueError) as error:
    raise cli.StoppedError(
      "Another host has stopped; what is done is kept, and the same command on "
      "all hosts goes on from there."
      if is_first()
      else ""
    ) from error
  return [
    row[:size].tobytes() for row, size in zip(rows, sizes.flat, strict=True)
  ]


def difference(own: Mapping[str, str]) -> tuple[int, str] | None:
  """Finds the first host that differs from host 0, and in what.

  All hosts must call it, and get the same result.

  Args:
    own: what must be the same on all hosts, by name.
  """
  everyone = map(json.loads, gather(json.dumps(dict(own)).encode()))
  first, *others = everyone
  for number, other in enumerate(others, start=1):
    for name in {**first, **other}:
      if first.get(name) != other.get(name):
        return number, name
  return None


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
