"""The table of the adapters."""

import pathlib
import sys

from kvjax.models.adapters import ADAPTERS
from kvjax.models.families import FAMILIES


def test_adapters_read_families_that_there_are():
  for adapter in ADAPTERS.values():
    assert set(adapter.families) <= set(FAMILIES)


def test_an_adapter_is_at_most_150_lines():
  for adapter in ADAPTERS.values():
    module = sys.modules[adapter.function.__module__]
    lines = pathlib.Path(module.__file__).read_text().splitlines()
    assert len(lines) <= 150, module
