"""The records that come with kvjax, of SmolLM2-135M-Instruct."""

import json
import pathlib

import numpy as np
import pytest

import kvjax
from kvjax import models
from kvjax.errors import InputError
from kvjax.experiments.benchmarks import ruler
from kvjax.experiments.calibration import fits, measuring
from kvjax.experiments.calibration.measuring import Measurement, Measurements
from kvjax.experiments.calibration.records import FOLDER, Auto, file_name
from kvjax.experiments.candidates import candidates
from kvjax.experiments.results import Settings, digest
from kvjax.models import catalog

MODEL = "smollm2-135m-instruct"
SHIPPED = pathlib.Path(models.__file__).parent / FOLDER / MODEL
METHODS = ["compactor", "keydiff", "lagkv:lag=128", "snapkv", "random"]
TAU = 0.95


PATHS = {
  file_name(name, False): SHIPPED / file_name(name, False) for name in METHODS
}
(DIGEST,) = {
  json.loads(path.read_text())["model_id"] for path in PATHS.values()
}


@pytest.fixture(scope="module")
def shipped():
  return Auto.read(TAU, SHIPPED, DIGEST)


def test_no_record_is_used_with_other_weights():
  assert {path.name for path in SHIPPED.iterdir()} == PATHS.keys()
  with pytest.raises(InputError, match=f"of the model '{DIGEST}'"):
    Auto.read(TAU, SHIPPED, "0d5efa85493b")


@pytest.mark.slow
def test_records_have_the_digest_of_the_model():
  assert digest(located().resolve()) == DIGEST


def test_records_are_those_of_todays_methods(shipped):
  assert len(candidates(METHODS, [shipped])) == 1 + len(METHODS)


def test_records_say_what_they_hold_for(shipped):
  for record in shipped.records.values():
    ranges = {name: (low, high) for name, low, high in record.ranges}
    assert {"nll", "length"} <= ranges.keys()
    assert all(low < high for low, high in ranges.values())
    assert record.preset == "prefill"
    assert len(record.grid) >= 7
    assert {"all"} < dict(record.r2).keys()
    assert all(task in record.data for task in dict(record.r2) if task != "all")


def test_more_quality_never_keeps_less(shipped):
  """At the ends and in the middle of the measured ranges."""
  for record in shipped.records.values():
    ends = {
      name: np.linspace(low, high, 3) for name, low, high in record.ranges
    }
    features = kvjax.Features(**ends)
    shares = [
      kvjax.Calibrated(record, tau).retentions(features)
      for tau in (0.5, 0.8, 0.9, TAU, 1.0)
    ]
    assert np.all(np.diff(shares, axis=0) >= 0)
    assert np.all(shares[-1] == 1)


def located():
  try:
    return catalog.locate(MODEL)
  except InputError as error:
    pytest.skip(str(error))


@pytest.mark.slow
def test_other_contexts_keep_their_quality(shipped, tmp_path):
  """At what their calibration allows them, as tau = 0.95 asks."""
  located()
  lm = models.load(MODEL, "float32")
  tasks = ["niah_single_1", "niah_single_2", "niah_multikey_1"]
  samples = ruler.samples(tasks, [512], 4, 5, lm.text.count, ruler.Texts.read())
  settings = Settings(MODEL, DIGEST, "float32", 5)
  store = Measurements(
    tmp_path / "held_out.jsonl", settings, Measurement, "measurement"
  )
  chosen = candidates(["compactor", "keydiff", "snapkv"], [shipped])[1:]
  found = measuring.measure(
    lm, chosen, samples, store, 2, lambda task, new: None
  )
  kept = {}
  for method in ("compactor", "keydiff", "snapkv"):
    own = [m for m in found if m.method == method]
    mean = np.mean([fits.ratio("prefill", m) for m in own])
    # Of 12 contexts: two standard errors of a mean that may be 0.95.
    assert mean >= 0.85, method
    kept[method] = np.mean([m.retention for m in own])
  assert kept["compactor"] < kept["snapkv"]
