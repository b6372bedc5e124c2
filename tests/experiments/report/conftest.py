"""Runs made by hand, as fixtures."""

import pytest
from made_runs import let_age, make_answer, make_record


@pytest.fixture
def answer():
  return make_answer


@pytest.fixture
def record():
  return make_record


@pytest.fixture
def age():
  return let_age


@pytest.fixture(scope="session")
def crowd():
  """Twelve methods at three budgets, at one of them on RULER's 13 tasks."""
  tasks = [
    *(f"niah_single_{number}" for number in (1, 2, 3)),
    *(f"niah_multikey_{number}" for number in (1, 2, 3)),
    *("niah_multivalue", "niah_multiquery", "vt", "cwe", "fwe", "qa_1", "qa_2"),
  ]
  methods = [f"method_{number}" for number in range(10)]
  methods += ["lagkv:lag=128", "protokv:score=attn_mean:prototypes=60"]
  answers = [
    make_answer(
      method,
      str(retention),
      score,
      task=task,
      sample=sample,
      retention=retention,
    )
    for method in methods
    for retention in (0.5, 0.25, 0.1)
    for task in (tasks if retention == 0.25 else tasks[-1:])
    for sample, score in enumerate((100.0, 0.0))
  ]
  full = [
    make_answer("full", task=task, sample=sample)
    for task in tasks
    for sample in (0, 1)
  ]
  return make_record([*full, *answers])
