"""Attention of a block of queries over cached slots."""

from kernels.attention.api import attention as attention
