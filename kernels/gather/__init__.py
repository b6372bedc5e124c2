"""Copies of the slots that a cache keeps."""

from kernels.gather.api import compact as compact
from kernels.gather.compacted import Compacted as Compacted
