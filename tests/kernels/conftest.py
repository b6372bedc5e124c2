"""Sizes of heads at which kernels are tried."""

import pytest

# Query heads of a KV head, by D: one and eight with every D, and every number
# between them with one.
_GROUPS = {64: (1, 3, 6, 8), 128: (1, 4, 7, 8), 256: (1, 2, 5, 8)}


@pytest.fixture(
  params=[(D, G) for D, groups in _GROUPS.items() for G in groups], ids=str
)
def head_sizes(request):
  """D and G."""
  return request.param
