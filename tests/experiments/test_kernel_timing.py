"""Times of kernels beside the bandwidth."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax.errors import InputError
from kvjax.experiments.timing import kernel_tables, kernel_timing
from kvjax.experiments.timing.kernel_timing import (
  LIBRARY,
  PALLAS,
  XLA,
  Bandwidth,
  Timed,
)
from kvjax.kernels.specs import Spec

BANDWIDTH = Bandwidth(800, [8.0, 4.0, 2.0])  # 200 bytes a second


def negated(x):
  return {"minus": -x, "nothing": jnp.full(2, jnp.nan)}


SPEC = Spec(
  "64 numbers",
  negated,
  lambda key: (jax.random.normal(key, (64,)),),
  512,
  library=lambda x: {"minus": -x * 2, "nothing": jnp.full(2, jnp.nan)},
)


@pytest.fixture
def short(monkeypatch):
  monkeypatch.setattr(kernel_timing, "_SECONDS", 1e-4)


@pytest.mark.usefixtures("short")
def test_every_program_is_timed_and_compared():
  bandwidth, timed = kernel_timing.measure(SPEC, 4096, 3, 0)
  assert bandwidth.nbytes == 4096
  assert len(bandwidth.seconds) == 3
  assert [one.program for one in timed] == [XLA, LIBRARY]
  for one in timed:
    assert len(one.seconds) == 3
    assert min(one.seconds) > 0
  assert [one.difference for one in timed] == [0.0, 1.0]


@pytest.mark.usefixtures("short")
def test_a_kernel_that_declines_takes_no_time(monkeypatch):
  def run(x):
    raise NotImplementedError

  programs = {XLA: negated, PALLAS: run}
  monkeypatch.setattr(kernel_timing, "_programs", lambda _: programs.items())
  _, timed = kernel_timing.measure(SPEC, 4096, 1, 0)
  assert [one.seconds is None for one in timed] == [False, True]
  assert timed[1].bytes_per_second is None


def test_numbers_where_there_are_none_are_no_small_difference():
  none = np.array([np.nan, 1.0])
  assert kernel_timing.difference([none], [none]) == 0.0
  assert np.isnan(kernel_timing.difference([none], [np.array([0.0, 1.0])]))


def test_all_uses_run_in_the_timed_program():
  """No use of a loop may serve the others."""
  counted = []

  def run(x):
    jax.debug.callback(lambda: counted.append(1))
    return jnp.sort(x)

  uses = kernel_timing._repeated(run, (jnp.arange(8.0),), 5)
  uses()
  jax.effects_barrier()
  assert len(counted) == 5


def test_work_that_repeats_is_not_done_ahead_of_the_loop():
  run = kernel_timing._program(jnp.sort, 5)
  text = jax.jit(run).lower(jnp.arange(64.0)).compile().as_text()
  entry = text[text.index("ENTRY") :]
  assert "sort(" not in entry
  assert "while(" in entry


def test_bandwidth_is_of_an_array_that_is_read_whole():
  array = kernel_timing.readable(2**20)
  assert array.nbytes == 2**20
  cost = jax.jit(kernel_timing.read).lower(array).compile().cost_analysis()
  # It writes a number for 1,024 that it reads.
  assert 2**20 < cost["bytes accessed"] < 1.01 * 2**20


def test_shares_are_those_of_the_bandwidth_and_of_xla():
  timed = [
    Timed(XLA, [1.0, 3.0, 8.0], 300, 0.0),
    Timed(PALLAS, None, 300, 0.0),
    Timed(LIBRARY, [6.0, 6.0, 6.0], 300, 0.25),
  ]
  found = list(kernel_tables.rows("select", SPEC, BANDWIDTH, timed))
  assert [row["program"] for row in found] == [XLA, PALLAS, LIBRARY]
  assert [row.get("bytes_per_second") for row in found] == [100, None, 50]
  assert [row.get("share_of_bandwidth") for row in found] == [0.5, None, 0.25]
  assert [row.get("xla_over_this") for row in found] == [1, None, 0.5]
  about = "select, 64 numbers"
  assert kernel_tables.table(json.loads(json.dumps(found))).lines == [
    (about, "xla", "3,000.000", "0.00", "50.0", "1.00", "0"),
    (about, "pallas", "declines", "–", "–", "–", "–"),
    (about, "library", "6,000.000", "0.00", "25.0", "0.50", "0.2"),
  ]


def test_a_sentence_says_how_kernels_were_timed():
  summary = {
    "rounds": 3,
    "seed": 7,
    "read_bytes": 256 * 2**20,
    "device": "TPU v6",
    "rows": [{"bandwidth": speed} for speed in (4.62e9, 4.4e9, 4.5e9)],
  }
  assert kernel_tables.about(summary) == (
    "Median of 3 rounds, seed 7, on TPU v6; 256 MiB were read at "
    "4.4 to 4.6 GB/s in turns with them"
  )


def test_operations_are_chosen_by_name():
  found = [("gather", SPEC), ("select", SPEC), ("gather", SPEC)]
  assert kernel_tables.chosen(found, ["gather"]) == [found[0], found[2]]
  with pytest.raises(InputError, match="'gathr'; there are gather, select"):
    kernel_tables.chosen(found, ["gather", "gathr"])
  with pytest.raises(InputError, match="empty; there are gather, select"):
    kernel_tables.chosen(found, [])


def test_an_operation_that_there_is_not_is_refused(refusal, tmp_path):
  folder = tmp_path / "kernels"
  told = refusal(
    "kvjax.experiments.benchmark_kernels", "--only=gathr", f"--output={folder}"
  )
  assert told.startswith("--only has 'gathr'; there are ")
  assert not folder.exists()
