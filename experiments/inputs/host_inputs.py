"""Flags for the hosts that a program runs on."""

import os
import re
import socket
import sys
import threading
import warnings

import jax
import rich.console
from absl import flags, logging

from kvjax.errors import InputError, InputWarning
from kvjax.experiments import exits
from kvjax.experiments.run import multihost

_MULTIHOST = flags.DEFINE_bool(
  "multihost",
  False,
  "Share the work with other hosts that run the same command, such as those of "
  "a TPU slice or a Slurm job; the first one writes the files.",
)
_COORDINATOR = flags.DEFINE_string(
  "coordinator",
  None,
  "Address and port of the first host, as in 10.0.0.1:8476, where --multihost "
  "does not find the other hosts by itself.",
)
_HOSTS = flags.DEFINE_integer(
  "hosts", None, "Number of hosts, with --coordinator.", lower_bound=1
)
_HOST = flags.DEFINE_integer(
  "host",
  None,
  "Number of this host, from 0, with --coordinator.",
  lower_bound=0,
)
_WAIT = flags.DEFINE_integer(
  "host_timeout", 300, "Seconds to wait for the other hosts.", lower_bound=1
)
_ADDRESS = re.compile(r"[^\s:]+:[0-9]{1,5}|\[[0-9a-fA-F:]+\]:[0-9]{1,5}")
_LAST_PORT = 2**16 - 1
# Seconds between our message and JAX's.
_SPARE = 60
# File descriptor of standard output.
_STDOUT = 1
# They differ between hosts.
_OWN = {"coordinator", "host"}


def start() -> None:
  """Connects the hosts; must run before anything touches a device.

  Raises:
    InputError: the flags contradict each other, other hosts cannot be reached,
      or they were started with other flags.
  """
  address, number, own = _COORDINATOR.value, _HOSTS.value, _HOST.value
  given = [value is not None for value in (address, number, own)]
  if not _MULTIHOST.value:
    if any(given) or flags.FLAGS["host_timeout"].present:
      raise InputError(
        "--coordinator, --hosts, --host and --host_timeout are for "
        "--multihost; add it."
      )
    return
  if any(given) and not all(given):
    raise InputError(
      "--coordinator, --hosts and --host need each other: the address of host "
      "0, the number of hosts, and the number of this one."
    )
  if number is not None and own is not None and own >= number:
    raise InputError(
      f"--host={own} is not below --hosts={number}; hosts are numbered from 0."
    )
  if address is not None:
    _check_address(address)
    if own == 0:
      _check_port(_port(address))
  # JAX would take SIGTERM for itself, and only make a note of it.
  jax.config.update("jax_enable_preemption_service", False)
  # When JAX gives up waiting, it aborts the process; this comes first.
  timer = threading.Timer(_WAIT.value, _give_up)
  timer.daemon = True
  timer.start()
  try:
    jax.distributed.initialize(
      address, number, own, initialization_timeout=_WAIT.value + _SPARE
    )
  except (ValueError, RuntimeError) as error:
    raise InputError(_not_met(error)) from error
  finally:
    timer.cancel()
  if not multihost.is_first():
    # The first one says them.
    warnings.simplefilter("ignore", InputWarning)
    _silence_output()
  _check_flags()
  if not multihost.is_first():
    # Only now, as the verbosity is a flag that hosts must share, too.
    logging.set_verbosity(logging.ERROR)


def console() -> rich.console.Console:
  """Returns a console that only the first host writes to."""
  return rich.console.Console(
    highlight=False, markup=False, emoji=False, quiet=not multihost.is_first()
  )


def _silence_output() -> None:
  """Drops standard output, where JAX on CPUs reports every connection.

  Libraries in C++ write there without asking Python. Errors are on stderr.
  """
  nowhere = os.open(os.devnull, os.O_WRONLY)
  os.dup2(nowhere, _STDOUT)
  os.close(nowhere)


def _check_address(address: str) -> None:
  if _ADDRESS.fullmatch(address) and 0 < _port(address) <= _LAST_PORT:
    return
  raise InputError(
    f"--coordinator is an address and a port, as in 10.0.0.1:8476; "
    f"{address!r} is not."
  )


def _port(address: str) -> int:
  return int(address.rpartition(":")[2])


def _check_port(port: int) -> None:
  """Refuses a port that host 0 cannot listen at; JAX may crash at one.

  It is bound for a moment as JAX does it: for all addresses of the host, and
  also if a server that has ended leaves connections there.
  """
  dual = socket.has_dualstack_ipv6()
  with socket.socket(socket.AF_INET6 if dual else socket.AF_INET) as server:
    if dual:
      server.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
    server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
      server.bind(("", port))
    except OSError as error:
      raise InputError(
        f"Host 0 cannot listen at port {port}: {error.strerror}; end what "
        "listens there, or choose another port for --coordinator."
      ) from error


def _give_up() -> None:
  print(_not_met(None), file=sys.stderr, flush=True)
  os._exit(exits.WRONG_INPUT)


def _not_met(error: Exception | None) -> str:
  """Says why the hosts have not met: an error, or the time is over."""
  given = _COORDINATOR.value is not None
  at = f" at --coordinator={_COORDINATOR.value}" if given else ""
  if error is None:
    start = (
      f"start all {_HOSTS.value}, with the address of host 0"
      if given
      else "start all hosts of the slice or job, with the same command"
    )
    return f"The hosts have not met{at} within {_WAIT.value} s; {start}."
  reason, *_ = str(error).splitlines() or [""]
  advice = (
    f"start all {_HOSTS.value}, each with its own --host"
    if given
    else "--multihost finds the other hosts by itself on TPU slices and in "
    "Slurm and MPI jobs; elsewhere, give --coordinator=ADDRESS:PORT, --hosts "
    "and --host"
  )
  return f"The hosts cannot meet{at}: {reason.strip().rstrip('.')}; {advice}."


def _check_flags() -> None:
  """Refuses hosts whose flags differ."""
  own = {
    name: str(flags.FLAGS[name].value)
    for name in flags.FLAGS
    if flags.FLAGS[name].present and name not in _OWN
  }
  found = multihost.difference(own)
  if found is None:
    return
  number, name = found
  raise InputError(
    f"Host {number} was started with another --{name} than host 0; start all "
    "hosts with the same flags."
  )
