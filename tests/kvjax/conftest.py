"""Fixtures of several files."""

from unittest import mock

import pytest

from kvjax.registry.registry import METHODS, RETRIEVALS
from kvjax.registry.wrappers import WRAPPERS


@pytest.fixture
def registry(monkeypatch):
  """Names that are registered here are gone afterwards."""
  for names in (METHODS, RETRIEVALS):
    list(names)  # plug-ins stay
    monkeypatch.setattr(names, "_entries", dict(names._entries))
  with mock.patch.dict(WRAPPERS):
    yield
