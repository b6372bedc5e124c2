"""The records that are shipped with the bundled model."""

import dataclasses
import pathlib
import random

import numpy as np
import pytest

import kvjax
from kvjax import models
from kvjax.experiments.benchmarks import ruler
from kvjax.experiments.calibration import measuring
from kvjax.experiments.calibration.measuring import Measurement, Measurements
from kvjax.experiments.calibration.records import FOLDER, Auto, file_name
from kvjax.experiments.candidates import DEFAULT, FULL, candidates
from kvjax.experiments.results import Settings, digest
from kvjax.experiments.tasks import fitting, needles

SETTINGS = Settings("tiny", "abc", "float32", 0)
REFERENCE = pathlib.Path(models.__file__).parent / "reference"


@pytest.fixture(scope="module")
def shipped():
  return Auto.read(0.95, REFERENCE / FOLDER, digest(REFERENCE))


@pytest.fixture(scope="module")
def reference():
  return models.load(REFERENCE, "float32")


def test_the_bundled_model_has_a_record_for_every_method(shipped):
  names = [name for name in DEFAULT if name != FULL]
  assert len(candidates(names, [shipped])) == 1 + len(names)
  files = {path.name for path in (REFERENCE / FOLDER).iterdir()}
  assert files == {file_name(name, False) for name in names}


def test_what_nobody_can_foretell_keeps_more(reference, shipped):
  rng = random.Random(7)
  text = fitting.ProseText(rng, "train")
  texts = [
    " ".join(text.sentences(600)),
    "\n".join(needles.draw(rng, "uuids") for _ in range(40)),
  ]
  encode, bos = reference.tokenizer.encode, reference.tokenizer.bos
  rows = [encode(bos + text)[:512] for text in texts]
  nll = kvjax.negative_log_likelihood(
    reference.model, reference.params, kvjax.Prompts.of(rows)
  )
  names = ["keydiff", "compactor", "random"]
  keydiff, compactor, uniform = (
    candidate.plan.budget.retentions(np.asarray(nll), np.array([512, 512]))
    for candidate in candidates(names, [shipped])[1:]
  )
  # Prose, then UUIDs.
  assert keydiff[0] < 0.4
  assert keydiff[0] < compactor[0] < uniform[0]
  assert min(keydiff[1], compactor[1], uniform[1]) > 0.99
  assert keydiff[1] > 2 * keydiff[0]
  assert compactor[1] > compactor[0]


@pytest.mark.slow
def test_other_contexts_keep_their_quality(reference, shipped, tmp_path):
  """At what their calibration allows them, as tau = 0.95 asks."""
  texts = dataclasses.replace(ruler.Texts.read(), essay="train")
  samples = ruler.samples(
    [
      *("niah_single_1", "niah_single_2", "niah_single_3"),
      *("niah_multikey_1", "niah_multikey_2", "niah_multikey_3"),
      "niah_multivalue",
    ],
    [1024],
    3,
    5,
    reference.tokenizer.count,
    texts,
  )
  store = Measurements(
    tmp_path / "held_out.jsonl", SETTINGS, Measurement, "measurement"
  )
  chosen = candidates(["keydiff", "compactor", "random"], [shipped])[1:]
  found = measuring.measure(
    reference, chosen, samples, store, 3, lambda task, new: None
  )
  for method in ("keydiff", "compactor", "random"):
    own = [m for m in found if m.method == method]
    assert np.mean([m.ratio for m in own]) >= 0.95, method
    prose, uuids = (
      [m.retention for m in own if m.task == task]
      for task in ("niah_single_2", "niah_multikey_3")
    )
    if method == "keydiff":
      assert np.mean(uuids) > 2 * np.mean(prose)
