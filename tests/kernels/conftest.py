"""Fixtures that tests of several kernels share."""

import contextlib

import pytest

from kvjax import kernels
from kvjax.kernels.attention import chunked
from kvjax.kernels.attention_mass import xla as mass_xla
from kvjax.kernels.paged_attention import xla as paged_xla

# Query heads of a KV head, by D: one and eight with every D, and every number
# between them with one.
_GROUPS = {64: (1, 3, 6, 8), 128: (1, 4, 7, 8), 256: (1, 2, 5, 8)}


@pytest.fixture(
  params=[(D, G) for D, groups in _GROUPS.items() for G in groups], ids=str
)
def head_sizes(request):
  """D and G."""
  return request.param


@pytest.fixture
def chosen():
  """Gives kernels other options until the test ends."""
  with contextlib.ExitStack() as stack:

    def choose(entry):
      stack.enter_context(kernels.use_table({"default": entry}))

    yield choose


@pytest.fixture
def small_chunks(monkeypatch):
  """Several chunks of queries, of slots and of pages."""
  monkeypatch.setattr(chunked, "QUERY_CHUNK", 16)
  monkeypatch.setattr(chunked, "LOGITS", 16 * 13)
  monkeypatch.setattr(chunked, "DEQUANTIZED", 11)
  monkeypatch.setattr(paged_xla, "MAX_DEQUANTIZED", 16)
  monkeypatch.setattr(mass_xla, "_LOGITS", 61 * 11)
