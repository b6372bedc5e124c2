"""Models and texts that tests fetch, which are skipped without a network."""

import contextlib

import pytest

from kvjax.models import catalog
from kvjax.models.downloads import UnreachableError


@contextlib.contextmanager
def skipped_without_network():
  """Skips the test if there is no connection to what it fetches.

  A wrong digest, or a fetcher that is broken, fails.
  """
  try:
    yield
  except UnreachableError as error:
    pytest.skip(str(error))


def located(name):
  """The folder of a named model."""
  with skipped_without_network():
    return catalog.locate(name)
