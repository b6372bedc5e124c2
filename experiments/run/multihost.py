"""Programs that run on many hosts, each of which does a part of the work.

Every host runs the same program with the same flags. Each has a model of its
own and works on some of the items, unless a mesh spans the hosts: then all work
on every item together. They exchange bytes through a collective of their
devices, so that nothing but the accelerators' network, or that of the CPUs, has
to connect them.
"""

import contextlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence

import jax
import numpy as np
from jax.experimental import multihost_utils

from kvjax import hosts
from kvjax.errors import InputError
from kvjax.experiments import exits
from kvjax.prompts import bucket


def count() -> int:
  """Number of hosts."""
  # Asking JAX would set up the devices, which takes seconds on a TPU.
  return jax.process_count() if jax.distributed.is_initialized() else 1


def sharing() -> int:
  """Number of hosts that share out the work: 1 if the mesh spans all."""
  return 1 if hosts.spanned() else count()


def is_first() -> bool:
  """Whether this host writes the files and prints."""
  return count() == 1 or jax.process_index() == 0


def gather(payload: bytes) -> list[bytes]:
  """Returns the bytes of every host, in order; all hosts must call it.

  Raises:
    exits.RefusedError: another host refuses to go on; see `refuse`.
    exits.StoppedError: another host has stopped, or takes longer than
      collectives wait for, which is 30 minutes on CPUs.
  """
  if count() == 1:
    return [payload]
  payloads, refusing = _exchange(payload, refuses=False)
  if refusing:
    raise exits.RefusedError(_refusal(payloads, refusing))
  return payloads


def refuse(sentence: str) -> str:
  """Tells the other hosts about a user's mistake, whatever they are about.

  Every call of `gather` is an occasion: the others' next one raises an error.

  Args:
    sentence: what is wrong.

  Returns:
    What to say of all hosts' mistakes; the sentence if this host is alone.
  """
  if count() == 1:
    return sentence
  try:
    return _refusal(*_exchange(sentence.encode(), refuses=True))
  except exits.StoppedError:  # the others are done, or have stopped
    return sentence


def _refusal(payloads: Sequence[bytes], refusing: Sequence[int]) -> str:
  """Returns the sentence of the first host that refuses."""
  number = refusing[0]
  sentence = payloads[number].decode()
  # Host 0 speaks for itself, and for hosts that all say the same.
  return sentence if number == 0 else f"Host {number}: {sentence}"


def _exchange(payload: bytes, refuses: bool) -> tuple[list[bytes], list[int]]:
  """Returns the bytes of every host, and the numbers of hosts that refuse."""
  # One more, as zero has no sign.
  size = len(payload) + 1
  try:
    sizes = multihost_utils.process_allgather(
      np.array([-size if refuses else size])
    ).ravel()
    # Few lengths, as each is a program.
    padded = np.zeros(bucket(int(np.max(np.abs(sizes)))), np.uint8)
    padded[: len(payload)] = np.frombuffer(payload, np.uint8)
    rows = multihost_utils.process_allgather(padded)
  # What it raises depends on the kind of device.
  except (RuntimeError, ValueError) as error:
    raise exits.StoppedError(
      "Another host has stopped; what is done is kept, and the same command on "
      "all hosts goes on from there."
      if is_first()
      else ""
    ) from error
  lengths = np.abs(sizes) - 1
  payloads = [
    row[:length].tobytes() for row, length in zip(rows, lengths, strict=True)
  ]
  return payloads, np.flatnonzero(sizes < 0).tolist()


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


def check_same(own: Mapping[str, str]) -> None:
  """Refuses hosts whose files or versions differ; see `difference`.

  Raises:
    InputError: some do.
  """
  found = difference(own)
  if found is not None:
    number, name = found
    raise InputError(
      f"Host {number} has other {name} than host 0; give all hosts the same "
      "files and versions."
    )


@contextlib.contextmanager
def together() -> Iterator[None]:
  """Tells a host that stops from a mistake in programs that span hosts.

  Raises:
    exits.StoppedError: a program has failed, and another host is gone.
  """
  try:
    yield
  except jax.errors.JaxRuntimeError:
    if hosts.spanned():
      gather(b"")
    raise


def from_first(make: Callable[[], bytes]) -> bytes:
  """Calls a function on the first host and returns the result on all."""
  return gather(make() if is_first() else b"")[0]


def on_first(act: Callable[[], None]) -> None:
  """Calls a function on the first host; the others wait for it."""

  def acted() -> bytes:
    act()
    return b""

  from_first(acted)


def share[Item, Result](
  items: Sequence[Item],
  work: Callable[[Item], Iterator[list[Result]]],
  encode: Callable[[list[Result]], bytes],
  decode: Callable[[bytes], list[Result]],
) -> Iterator[list[Result]]:
  """Yields the results of all items, of which each host works on some.

  Hosts take turns in the items and wait for each other after every item, so
  that all of them know all results. If the mesh spans them, they work on each
  item together and have its results anyway.

  Args:
    items: the items, the same on all hosts.
    work: yields results of an item as they come.
    encode: converts results to bytes.
    decode: converts them back.
  """
  if sharing() == 1:
    for item in items:
      for results in work(item):
        yield results
        # Where the first one cannot write them, the others must not go on: they
        # would wait for it within a program.
        gather(b"")
    return
  for first in range(0, len(items), count()):
    own = items[first : first + count()][jax.process_index() :][:1]
    found = [result for item in own for part in work(item) for result in part]
    yield from filter(None, map(decode, gather(encode(found))))
