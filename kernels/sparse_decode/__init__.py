"""Attention of one token to listed slots."""

from kvjax.kernels.sparse_decode.api import sparse_decode as sparse_decode
