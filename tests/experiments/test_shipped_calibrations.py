"""The records that come with kvjax."""

import pathlib

import numpy as np
import pytest
from fetching import located

import kvjax
from kvjax import models
from kvjax.errors import InputError
from kvjax.experiments.benchmarks.ruler import generator
from kvjax.experiments.calibration import fits, measuring
from kvjax.experiments.calibration.measuring import Measurement, Measurements
from kvjax.experiments.calibration.record_files import FOLDER, Auto, file_name
from kvjax.experiments.run.candidates import candidates
from kvjax.experiments.run.comparison import pending
from kvjax.experiments.run.model_digest import digest
from kvjax.experiments.run.results import Settings
from kvjax.models import catalog

MODELS = pathlib.Path(models.__file__).parent
# The folders of records, by the model that each is of.
FOLDERS = {"reference": MODELS / "reference" / FOLDER} | {
  name: MODELS / FOLDER / name
  for name in catalog.NAMED
  if (MODELS / FOLDER / name).is_dir()
}
TAU = 0.95


def read(name):
  """The records of a model, which must have been measured on its weights."""
  return Auto.read(TAU, FOLDERS[name], digest(located(name)))


@pytest.fixture(
  scope="module",
  params=[
    pytest.param(name, marks=[] if name == "reference" else pytest.mark.slow)
    for name in FOLDERS
  ],
)
def shipped(request):
  records = read(request.param).records
  assert records
  return request.param, records


def test_records_have_the_digest_of_the_weights(shipped):
  """Those of any other weights are refused."""
  name, records = shipped
  assert {record.model_id for record in records.values()} == {
    digest(located(name))
  }
  with pytest.raises(InputError, match="needs one of its own"):
    Auto.read(TAU, FOLDERS[name], "0")


def test_records_are_those_of_todays_methods(shipped):
  name, _ = shipped
  files = {path.stem for path in FOLDERS[name].glob("*.json")}
  names = [stem.replace("--", ":") for stem in files]
  assert {f"{file_name(name, False)}" for name in names} == {
    f"{stem}.json" for stem in files
  }
  assert len(candidates(names, [read(name)])) == 1 + len(names)


def test_records_say_what_they_hold_for(shipped):
  _, records = shipped
  for record in records.values():
    ranges = {name: (low, high) for name, low, high in record.ranges}
    assert {"nll", "length"} <= ranges.keys()
    assert {feature for feature, _ in record.slopes} <= ranges.keys() | {
      "log_length"
    }
    assert all(low < high for low, high in ranges.values())
    assert record.preset == "prefill"
    assert len(record.grid) >= 7
    assert len(record.promises) > 1
    tasks = dict(record.r2).keys() - {"all"}
    assert tasks
    assert all(task in record.data for task in tasks)


def test_more_quality_never_keeps_less(shipped):
  """At the ends and in the middle of the measured ranges."""
  for record in shipped[1].values():
    ends = {
      name: np.linspace(low, high, 3) for name, low, high in record.ranges
    }
    features = kvjax.Features(**ends)
    shares = [
      kvjax.Calibrated(record, tau).retentions(features)
      for tau in (record.promises[0][1], 0.9, TAU, 1.0)
    ]
    assert np.all(np.diff(shares, axis=0) >= 0)
    assert np.all(shares[-1] == 1)
    assert np.all(shares[0] < 1)


@pytest.mark.slow
# Some of these contexts are a little longer or less likely than measured ones.
@pytest.mark.filterwarnings("ignore::kvjax.InputWarning")
def test_other_contexts_keep_their_quality(shipped, tmp_path):
  """At what their calibration allows them, as tau = 0.95 asks."""
  name, records = shipped
  lm = models.load(located(name), "float32")
  tasks = ["niah_single_1", "niah_single_2", "niah_multikey_1"]
  (length,) = {
    high
    for record in records.values()
    for n, _, high in record.ranges
    if n == "length"
  }
  texts = generator.Texts.read()
  samples = generator.samples(tasks, [int(length)], 4, 5, lm.text.count, texts)
  settings = Settings(name, digest(located(name)), "float32", 5)
  store = Measurements(
    tmp_path / "held_out.jsonl", settings, Measurement, "measurement"
  )
  names = [
    path.stem.replace("--", ":") for path in FOLDERS[name].glob("*.json")
  ]
  chosen = candidates(names, [read(name)])[1:]
  work = pending(lm, chosen, samples, store, 2, apart=True)
  measuring.measure(lm, work, store, lambda task, new: None)
  for method in names:
    own = [m for m in store.records.values() if m.method == method]
    # Of 12 contexts: two standard errors below a mean that may be 0.95.
    assert np.mean([fits.ratio("prefill", m) for m in own]) >= 0.85, method
