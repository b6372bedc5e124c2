"""What several processes say of the answers that they share."""

import pytest

from kvjax.errors import InputError
from kvjax.experiments.run.processes import Process, Processes

ONE = Process("CPU, 2 cores", {"jax": "1.2"}, {"prefill": 2.0, "total": 10.0})
OTHER = Process(
  "TPU v6", {"jax": "1.3", "torch": "2"}, {"prefill": 1.0, "total": 5.5}
)


def test_what_differs_is_listed_and_seconds_are_added_up(tmp_path):
  first = Processes(tmp_path / "run")
  # It says more and more until it is killed.
  first.note(Process(ONE.device, ONE.versions, {"prefill": 1.0, "total": 3.0}))
  first.note(ONE)
  second = Processes(tmp_path / "run")
  second.note(OTHER)
  expected = {
    "device": "CPU, 2 cores and TPU v6",
    "versions": {"jax": "1.2 and 1.3", "torch": "none and 2"},
    "seconds": {"prefill": 3.0, "total": 15.5},
  }
  assert second.summary(OTHER, answered=True) == expected
  third = Processes(tmp_path / "run")
  assert third.summary(ONE, answered=False) == expected
  again = third.summary(ONE, answered=True)
  assert again["device"] == expected["device"]
  assert again["seconds"] == {"prefill": 5.0, "total": 25.5}


def test_one_alone_says_what_it_says(tmp_path):
  for answered in (True, False):
    found = Processes(tmp_path).summary(ONE, answered)
    assert Process(**found) == ONE
  assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("content", ['{"processes": [{}]}', '{"a": 1}'])
def test_what_no_run_has_written_is_refused(tmp_path, content):
  (tmp_path / "processes.json").write_text(content)
  with pytest.raises(InputError, match=r"processes\.json is not what a run"):
    Processes(tmp_path)
