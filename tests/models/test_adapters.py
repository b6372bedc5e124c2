"""The table of the adapters."""

import inspect
import pathlib

from kvjax.models.adapters import ADAPTERS
from kvjax.models.families import FAMILIES


def test_adapters_read_families_that_there_are():
  for adapter in ADAPTERS.values():
    assert set(adapter.families) <= set(FAMILIES)


def test_an_adapter_is_at_most_150_lines():
  for adapter in ADAPTERS.values():
    file = pathlib.Path(inspect.getsourcefile(adapter.function))
    assert len(file.read_text().splitlines()) <= 150, file
