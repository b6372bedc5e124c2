"""Preset "recite": its retentions, promises and records."""

import dataclasses
import json

import numpy as np
import pytest

import kvjax
from kvjax.calibration.conformal import TARGETS
from kvjax.calibration.reciting import digest
from kvjax.calibration.record import Calibration
from kvjax.errors import InputError
from kvjax.methods import KeyDiff

GRID = (0.1, 0.25, 0.5, 0.9)
RECORD = Calibration(
  alpha=0.0,
  beta=0.0,
  model_id="tiny",
  method=str(KeyDiff()),
  per_query_head=False,
  tau_range=(0.2, 1.0),
  error=0.05,
  triples=40,
  preset="recite",
  grid=GRID,
  token_weights=((3, 0.5), (17, 1.0)),
)


def features_of(recited, length=100):
  rows = len(recited)
  return kvjax.Features(
    nll=np.ones(rows), length=np.full(rows, length), recited=np.array(recited)
  )


@pytest.mark.parametrize(
  ("recited", "share"),
  [
    ([0.9, 0.9, 0.9, 0.9], 0.1),
    ([0.7, 0.8, 0.8, 0.9], 0.25),
    ([0.1, 0.2, 0.3, 0.8], 0.9),
    # The first alone is not enough: more retention recites less.
    ([0.9, 0.7, 0.9, 0.9], 0.5),
    ([0.9, 0.9, 0.9, 0.79], 1.0),
    ([0.1, 0.2, 0.3, 0.4], 1.0),
    ([np.nan, 0.9, 0.9, 0.9], 1.0),
    ([0.9, 0.9, 0.9, np.nan], 1.0),
  ],
)
def test_a_retention_is_the_first_from_which_on_all_recite(recited, share):
  features = features_of([recited, [0.9] * 4])
  assert RECORD.retentions(features, 0.8).tolist() == [share, 0.1]


def test_where_nothing_is_known_everything_stays():
  features = features_of([[1.0] * 4] * 2)
  assert RECORD.retentions(features, 1.0).tolist() == [1, 1]
  unknown = features._replace(recited=None)
  assert RECORD.retentions(unknown, 0.5).tolist() == [1, 1]
  single = features._replace(nll=np.array([np.nan, 1.0]))
  assert RECORD.retentions(single, 0.5).tolist() == [1, 0.1]
  # No promise is high enough.
  low = dataclasses.replace(RECORD, promises=((0.5, 0.6), (0.9, 0.8)))
  budget = kvjax.Calibrated(low, 0.9)
  assert budget.retentions(features).tolist() == [1, 1]
  assert kvjax.Calibrated(low, 0.7).retentions(features).tolist() == [0.1] * 2


def test_lengths_far_out_of_range_keep_everything():
  record = dataclasses.replace(RECORD, ranges=(("length", 100.0, 200.0),))
  features = features_of([[1.0] * 4] * 4)
  features = features._replace(length=np.array([79, 81, 219, 221]))
  with pytest.warns(kvjax.InputWarning, match="length of 100 to 200; others"):
    found = record.retentions(features, 0.5)
  assert found.tolist() == [1, 0.1, 0.1, 1]


def measured(contexts, seed):
  """Contexts that lose their answer below a retention, and nearly recite it."""
  rng = np.random.default_rng(seed)
  needs = rng.integers(0, len(GRID) + 1, contexts)[:, None]
  kept = np.arange(len(GRID))[None] >= needs
  noise = rng.uniform(0, 0.3, kept.shape)
  index = np.repeat(np.arange(contexts), len(GRID))
  return kvjax.Triples(
    np.tile(GRID, contexts),
    rng.uniform(1, 2, contexts)[index],
    np.where(kept, 1.2, 0.1).ravel(),
    rng.integers(100, 120, contexts)[index],
    context=index,
    task=[("one", "two")[c % 2] for c in index],
    recited=np.where(kept, 1 - noise, 0.4 + noise).ravel(),
  )


def calibrated(triples, others=None, **options):
  return kvjax.calibrate(
    triples,
    model_id="tiny",
    method=KeyDiff(),
    preset="recite",
    others=others,
    token_weights=((3, 0.5), (17, 1.0)),
    **options,
  )


def by_hand(others, target):
  """Sum of the qualities at the retentions of a target, by loops."""
  kept = 0.0
  for context in range(int(others.context.max()) + 1):
    own = others.select(others.context == context)
    quality = 1.0
    for reached, ratio in zip(own.recited[::-1], own.ratio[::-1], strict=True):
      if reached < target:
        break
      quality = min(float(ratio), 1.0)
    kept += quality
  return kept


def test_promises_are_the_means_that_other_contexts_keep():
  triples, others = measured(10, 1), measured(30, 2)
  record = calibrated(triples, others, data="two tasks", seed=5)
  assert len(record.promises) > 3
  for target, promised in record.promises:
    # Quality never falls as retentions rise here: no minimum over targets.
    assert promised == pytest.approx(by_hand(others, target) / 31)
  # Targets that were left out promise no more than the one before.
  told = dict(record.promises)
  for target in TARGETS:
    best = max(k for t, k in told.items() if t <= target)
    assert by_hand(others, target) / 31 <= best + 1e-9
  # On its own contexts if there are no others.
  for target, promised in calibrated(triples).promises:
    assert promised == pytest.approx(by_hand(triples, target) / 11)


def test_other_contexts_keep_tau_on_average():
  kept = []
  tested = measured(500, 50)
  for seed in range(10):
    record = calibrated(measured(10, seed), measured(40, 100 + seed))
    budget = kvjax.Calibrated(record, 0.9)
    assert record.curve_target(0.9) < 1
    kept.append(by_hand(tested, record.curve_target(0.9)) / 500)
    shape = (500, len(GRID))
    features = features_of(tested.recited.reshape(shape), 110)
    assert np.mean(budget.retentions(features)) < 0.9
  assert 0.9 <= np.mean(kept) < 0.96


def test_a_record_says_what_it_was_made_of():
  triples, others = measured(10, 1), measured(30, 2)
  record = calibrated(triples, others, data="two tasks", seed=5)
  assert (record.alpha, record.beta, record.slopes) == (0, 0, ())
  assert (record.grid, record.shape) == (GRID, ())
  assert record.triples == 40
  capped = np.minimum(triples.ratio, 1)
  error = np.sqrt(np.mean((triples.recited - capped) ** 2))
  assert record.error == pytest.approx(error)
  ratio = np.minimum(others.ratio, 1)
  for task, found in record.r2:
    own = np.array([task in ("all", name) for name in others.task])
    residual = np.sum((others.recited - ratio)[own] ** 2)
    total = np.sum((ratio[own] - ratio[own].mean()) ** 2)
    assert found == pytest.approx(1 - residual / total)
  assert [task for task, _ in record.r2] == ["all", "one", "two"]
  both = np.concatenate([triples.length, others.length])
  assert record.ranges == (("length", both.min(), both.max()),)
  label = f"recited at 0.1+0.25+0.5+0.9, weights {digest(record.token_weights)}"
  assert record.formula == label
  other = dataclasses.replace(record, token_weights=((3, 0.5), (9, 1.0)))
  assert other.formula != label


def test_a_record_is_saved_and_loaded(tmp_path):
  record = calibrated(measured(10, 1), measured(30, 2))
  path = tmp_path / "record.json"
  record.save(path)
  assert Calibration.load(path, model_id="tiny") == record
  # Files from before there was this preset have no weights.
  fields = json.loads(path.read_text())
  del fields["token_weights"]
  path.write_text(json.dumps(fields))
  older = Calibration.load(path, model_id="tiny")
  assert older == dataclasses.replace(record, token_weights=())


@pytest.mark.parametrize(
  ("change", "said"),
  [
    ({"alpha": 1.0}, "has no curve"),
    ({"beta": 1.0}, "has no curve"),
    ({"slopes": (("tail_nll", 1.0),)}, "has no curve"),
    ({"shape": (0.1, 0.2, 0.3, 0.4)}, "a shape that never falls"),
    ({"grid": ()}, "measured retentions ascending"),
    ({"ranges": (("recited", 0.1, 0.2),)}, "ranges of nll"),
    ({"token_weights": ((5, 0.5), (5, 0.5))}, "ascending ids"),
    ({"token_weights": ((-5, 0.5),)}, "ascending ids"),
    ({"token_weights": ((5, 0.0),)}, "within 0 and 1"),
    ({"token_weights": ((5, 1.5),)}, "within 0 and 1"),
    ({"token_weights": ((5, np.nan),)}, "within 0 and 1"),
    ({"preset": "paper"}, "it alone has token_weights"),
  ],
  ids=lambda value: str(value)[:24],
)
def test_other_records_are_refused(change, said):
  with pytest.raises(InputError, match=said):
    dataclasses.replace(RECORD, **change)


def test_triples_without_recitals_are_refused():
  plain = measured(10, 1)._replace(recited=None)
  for triples, others in ((plain, None), (measured(10, 1), plain)):
    with pytest.raises(InputError, match=r"measure it with kvjax\.recited"):
      calibrated(triples, others)
