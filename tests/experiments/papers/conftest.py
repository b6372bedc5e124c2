"""A comparison that no paper has made; the tiny model, examined and in use."""

import numpy as np
import pytest

from kvjax.experiments.papers.data_model import (
  Average,
  Column,
  Comparison,
  Key,
  Place,
  Setup,
  Targets,
)
from kvjax.experiments.papers.findings import Subject
from kvjax.experiments.papers.running import Session
from kvjax.experiments.papers.setup_samples import Sources
from kvjax.experiments.papers.shared import fixed, lines
from kvjax.experiments.run.results import Settings
from kvjax.options.budgets import Retention, Tokens

SMALL = Setup("ruler", ("niah_single_1", "niah_single_2"), (256, 288), 1)
INVENTED = Comparison(
  "Invented",
  Setup("longbench", ("trec", "lsht", "lcc"), (7500,), None),
  SMALL,
  (
    *lines({"Full": "full", "Sinks": ("streaming", "streaming:sinks=2")}),
    fixed("Ours", "keydiff", Tokens(64), Tokens(40)),
  ),
  (
    Column("short", Place(Tokens(512)), Place(Retention(0.5), 256)),
    Column("long", Place(Tokens(512)), Place(Retention(0.25), 288)),
    Column("longer", Place(Tokens(1024)), None),
  ),
  (
    Average("of two kinds", (("trec", "lsht"), ("lcc",))),
    Average("code", (("lcc",),)),
  ),
  (
    Targets(
      "A model",
      {
        Key("Full", "short", "of two kinds"): 50.0,
        Key("Full", "long", "of two kinds"): 50.0,
        Key("Sinks", "short", "of two kinds"): 12.25,
        Key("Ours", "short", "of two kinds"): 49.0,
        Key("Other", "short", "of two kinds"): 3.0,
        Key("Ours", "longer", "of two kinds"): 49.5,
        Key("Ours", "short", "lcc"): 7.0,
      },
      {"Other": "nobody knows what it was"},
    ),
  ),
  quoted=("Other",),
  scaling="Everything is smaller.",
)


@pytest.fixture
def invented():
  return INVENTED


@pytest.fixture
def subject(tiny):
  rows = np.random.default_rng(0).integers(5, 200, (2, 40)).tolist()
  return Subject(tiny, {"some": rows}, (40,), "small", 0)


@pytest.fixture
def session(tiny):
  settings = Settings("tiny", "abc", "float32", 3)
  return Session(tiny, 1, False, settings, batch=2, sources=Sources())
