"""The table of the adapters."""

from kvjax.models.adapters import ADAPTERS
from kvjax.models.families import FAMILIES


def test_adapters_read_families_that_there_are():
  for adapter in ADAPTERS.values():
    assert set(adapter.families) <= set(FAMILIES)
