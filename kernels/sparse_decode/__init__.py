"""Attention of one token to the slots that a list names."""

from kvjax.kernels.sparse_decode.api import sparse_decode as sparse_decode
