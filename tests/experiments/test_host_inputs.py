"""Hosts meet, or are told why they cannot; the first one logs."""

import os
import socket
import threading
import warnings

import jax
import pytest
from absl import flags, logging
from absl.testing import flagsaver

from kvjax.errors import InputError
from kvjax.experiments.inputs import host_inputs
from kvjax.experiments.run import multihost

HOST_FLAGS = ("--coordinator=127.0.0.1:9", "--hosts=2", "--host=1")


@pytest.mark.slow
@pytest.mark.parametrize("program", ["evaluate", "compare", "calibrate"])
@pytest.mark.parametrize(
  ("flags", "said"),
  [
    (HOST_FLAGS, "--multihost; add it"),
    (("--multihost", *HOST_FLAGS[:2]), "need each other"),
    (("--multihost", *HOST_FLAGS[:2], "--host=2"), "not below --hosts=2"),
    (
      ("--multihost", "--coordinator=here", *HOST_FLAGS[1:]),
      "an address and a port",
    ),
    (
      ("--multihost", "--coordinator=here:65536", *HOST_FLAGS[1:]),
      "'here:65536' is not",
    ),
    (("--multihost",), "finds the other hosts by itself on TPU slices"),
    (
      ("--multihost", "--host_timeout=1", *HOST_FLAGS),
      "have not met at --coordinator=127.0.0.1:9 within 1 s; start all 2",
    ),
  ],
)
def test_hosts_that_cannot_meet_are_told_why(refusal, program, flags, said):
  assert said in refusal(f"kvjax.experiments.{program}", *flags)


@pytest.mark.parametrize("address", ["127.0.0.1", "::"])
def test_a_port_that_is_in_use_is_named(refusal, address):
  if ":" in address and not socket.has_dualstack_ipv6():
    pytest.skip("no IPv6")
  family = socket.AF_INET6 if ":" in address else socket.AF_INET
  with socket.create_server((address, 0), family=family) as taken:
    port = taken.getsockname()[1]
    told = refusal(
      "kvjax.experiments.evaluate",
      *("--multihost", f"--coordinator=127.0.0.1:{port}"),
      *("--hosts=2", "--host=0", "--host_timeout=20"),
    )
  assert told == (
    f"Host 0 cannot listen at port {port}: Address already in use; end what "
    "listens there, or choose another port for --coordinator.\n"
  )


@pytest.fixture
def pod_flags():
  """Flags of a host of a pod, which JAX finds the others of."""
  if not flags.FLAGS.is_parsed():
    flags.FLAGS(["test"])
  with flagsaver.as_parsed(multihost="true", host_timeout="9"):
    yield


@pytest.fixture
def refusing(monkeypatch):
  """Lets JAX refuse to connect hosts."""

  def refuse(*given, **options):
    del given, options
    raise RuntimeError("INVALID_ARGUMENT: no such task.\nFurther lines")

  monkeypatch.setattr(jax.distributed, "initialize", refuse)


@pytest.mark.parametrize("host", [0, 1])
def test_what_jax_refuses_at_once_is_no_matter_of_time(
  pod_flags, refusing, port, host
):
  address = f"127.0.0.1:{port}"
  with (
    flagsaver.as_parsed(coordinator=address, hosts="2", host=str(host)),
    pytest.raises(InputError) as refused,
  ):
    host_inputs.start()
  assert str(refused.value) == (
    f"The hosts cannot meet at --coordinator={address}: INVALID_ARGUMENT: no "
    "such task; start all 2, each with its own --host."
  )


def test_what_jax_refuses_on_a_pod_is_quoted(pod_flags, refusing):
  with pytest.raises(InputError) as refused:
    host_inputs.start()
  assert str(refused.value) == (
    "The hosts cannot meet: INVALID_ARGUMENT: no such task; --multihost finds "
    "the other hosts by itself on TPU slices and in Slurm and MPI jobs; "
    "elsewhere, give --coordinator=ADDRESS:PORT, --hosts and --host."
  )


@pytest.mark.parametrize(
  ("given", "sentence"),
  [
    (
      {},
      "The hosts have not met within 1 s; start all hosts of the slice or "
      "job, with the same command.",
    ),
    (
      {"coordinator": "10.0.0.1:8476", "hosts": "2", "host": "1"},
      "The hosts have not met at --coordinator=10.0.0.1:8476 within 1 s; start "
      "all 2, with the address of host 0.",
    ),
  ],
  ids=["pod", "coordinator"],
)
def test_hosts_that_wait_in_vain_say_for_how_long(
  pod_flags, monkeypatch, capsys, given, sentence
):
  ended = threading.Event()
  codes = []

  def end(code):
    codes.append(code)
    ended.set()

  def wait(*given, **options):
    del given, options
    assert ended.wait(60)

  monkeypatch.setattr(os, "_exit", end)
  monkeypatch.setattr(jax.distributed, "initialize", wait)
  monkeypatch.setattr(host_inputs, "_check_flags", lambda: None)
  with flagsaver.as_parsed(host_timeout="1", **given):
    host_inputs.start()
  assert codes == [2]
  assert capsys.readouterr().err == f"{sentence}\n"


@pytest.mark.parametrize("first", [True, False])
def test_only_the_first_host_logs_more_than_errors(
  pod_flags, monkeypatch, first
):
  monkeypatch.setattr(jax.distributed, "initialize", lambda *a, **o: None)
  monkeypatch.setattr(multihost, "is_first", lambda: first)
  monkeypatch.setattr(host_inputs, "_silence_output", lambda: None)
  given = []
  monkeypatch.setattr(
    host_inputs, "_check_flags", lambda: given.append(logging.get_verbosity())
  )
  before = logging.get_verbosity()
  logging.set_verbosity(logging.INFO)
  try:
    with warnings.catch_warnings():
      host_inputs.start()
    shown = logging.INFO if first else logging.ERROR
    assert logging.get_verbosity() == shown
    # The flag is compared as it was given.
    assert given == [logging.INFO]
  finally:
    logging.set_verbosity(before)
