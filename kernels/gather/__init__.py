"""Gathers the slots that a cache keeps."""

from kvjax.kernels.gather.api import compact as compact
from kvjax.kernels.gather.compacted import Compacted as Compacted
