"""What tables call a model."""

import pathlib

import pytest

from kvjax.experiments import inputs


@pytest.mark.parametrize(
  ("directory", "name"),
  [
    ("hub/models--org--Some-8B-it/snapshots/0e9e39f2", "org/Some-8B-it"),
    ("hub/models--gpt2/snapshots/0e9e39f2", "gpt2"),
    ("models/Some-8B-it", "Some-8B-it"),
    ("own/snapshots/step-7", "step-7"),
  ],
)
def test_a_model_of_the_hubs_cache_has_its_own_name(
  monkeypatch, directory, name
):
  place = pathlib.Path("/some/where") / directory
  monkeypatch.setattr(inputs, "model_directory", lambda: place)
  assert inputs.model_name() == name
