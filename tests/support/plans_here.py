"""Plans of this machine's devices, in place of those of a slice."""

import dataclasses
import importlib.util

import jax
import pytest
from tiny_published import TINY

import kvjax
from kvjax.experiments.compilation import chips
from kvjax.experiments.compilation.engine_programs import Use
from kvjax.experiments.planning.compiling import Needs, Planned, Sent
from kvjax.experiments.planning.sizes import Sizes

# Of slow tests, which also run where libtpu is not.
LIBTPU = pytest.mark.skipif(
  importlib.util.find_spec("libtpu") is None, reason="make test-tpu runs it"
)
HALF = kvjax.get_plan("keydiff", kvjax.Retention(0.5))
USE = Use("keydiff", "", HALF, 96, TINY, rows=2, answer=32)
HBM = 10**7


def silent(about, count):
  """Shows no progress."""
  del about, count


def here(rows=1, **changed):
  """This machine's four devices in place of a slice's."""
  devices = tuple(jax.devices()[:4])
  return chips.Chip(
    *("v5e-4", "v5e:2x2", devices, HBM, 2**20, 10**9, 10**12),
    rows=rows,
    kv_heads=2,
    **changed,
  )


def planned(rows, temporary=(400, 100), hbm=10_000, weights=2_000, **changed):
  """A plan whose cache takes 500 bytes a row."""
  taken = Sizes(
    weights=weights,
    cache=500 * rows,
    host=0,
    copies=0,
    read=3_000,
    flops=2e6,
    kinds=1,
    retrieves=False,
  )
  sent = {"all-reduce": Sent(2, 4_000), "all-gather": Sent(1, 1_000)}
  prefill, decode = (
    Needs(each * rows, 1_000, sent if number else {})
    for number, each in enumerate(temporary)
  )
  return Planned(
    dataclasses.replace(USE, rows=rows),
    dataclasses.replace(here(), hbm_bytes=hbm),
    taken._replace(**changed),
    prefill,
    decode,
  )
